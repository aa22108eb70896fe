# SPDX-License-Identifier: Apache-2.0
"""Writes between a save and its copy that torch does not count, and replicas that came apart: the
step is of one moment, or is dropped with what would help."""
import gc
import glob
import json
import os
import threading

import ckptfs as snapshots
import pytest
import torch
from ckptfs import devices, turns
from ckptfs.collector import _holds
from ckptfs.state import Model, State
from daemon import wait_until
from safetensors import safe_open
from test_odd_tensors import LARGE, Weights, held, sgd
from test_save_options import daemon_counts, gate_fixture, receive  # noqa: F401

ROW = LARGE // 2 + 3  # samples do not meet it


def _through_storage(tensor):
    alias = torch.empty(0)
    alias.set_(tensor.untyped_storage())
    alias[ROW] = 5


def _through_dlpack(tensor):
    torch.from_dlpack(tensor.detach())[ROW] = 5


def _through_a_system_call(tensor):
    with open('/dev/zero', 'rb', buffering=0) as zeros:
        assert zeros.readinto(memoryview(tensor.detach().numpy())[ROW:ROW + 1].cast('B')) == 4


@pytest.mark.parametrize('write', [
    lambda tensor: tensor.data[ROW:ROW + 1].fill_(5), _through_storage, _through_dlpack, _through_a_system_call,
    lambda tensor: tensor.detach().numpy().__setitem__(ROW, 5)])
def test_a_write_past_torch_is_seen(ckptfs, gate, write):
    """One row is written while the copy is not begun; after before_update() a write is nobody's
    business."""
    receive(ckptfs)
    model = Weights(a=torch.ones(LARGE), b=torch.ones(LARGE))
    with snapshots.Snapshotter(model, sgd(model), run='job', store=ckptfs.store) as snap:
        if snap.save(0) and not snap.status()['unproved']:
            write(model.b)
            gate.set()
            assert not snap.wait_durable(0)
            assert 'b was written before the update' in snap.status()['last_drop']
            assert 'before_update()' in snap.status()['last_drop']
        gate.set()
        assert snap.save(1)
        snap.before_update()
        write(model.a)
        assert snap.wait_durable(1), snap.status()
    assert held(ckptfs)['a'].eq(1).all()


class Around:
    """A wrapper of a script's own, not an optimizer of torch."""

    def __init__(self, *inner):
        self.inner = {'all': list(inner)}
        self.param_groups, self.state = inner[0].param_groups, {}


def test_an_optimizer_in_a_wrapper_was_given_with_it():
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=.1) for _ in range(2))
    assert _holds(first, first) and not _holds(first, second)
    assert _holds(Around(first, second), second) and _holds(Around(Around(first, second)), second)
    assert not _holds(Around(first), second)


@pytest.mark.parametrize('how', ['another', 'both', 'other parameters'])
def test_states_of_an_optimizer_that_was_replaced_are_not_of_the_step(ckptfs, how):
    """A script that goes on with another optimizer: the moments of the first are of earlier weights."""
    receive(ckptfs)
    model, others = Weights(a=torch.ones(4)), Weights(b=torch.ones(4))
    first = torch.optim.Adam(model.parameters())
    second = torch.optim.SGD((others if how == 'other parameters' else model).parameters(), lr=.1)

    def step(optimizer):
        for one in (*model.parameters(), *others.parameters()):
            one.grad = torch.ones(4)
        optimizer.step()
    with snapshots.Snapshotter(model, first, run='job', store=ckptfs.store) as snap:
        step(first)
        assert snap.save(0) and snap.wait_durable(0)
        for optimizer in (first, second) if how == 'both' else (second,):
            step(optimizer)
        taken = snap.save(1)
        assert taken == (how != 'another')
        assert taken or 'SGD updated the parameters' in snap.status()['last_drop']


def test_a_compiled_step_waits_and_is_compiled_once(ckptfs, gate):
    """torch's own recipe; the optimizer's hooks are a part of what is compiled."""
    receive(ckptfs)
    model = Weights(a=torch.ones(LARGE), b=torch.ones(LARGE))
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    graphs = []

    def counted(graph, _):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(lambda: optimizer.step(), backend=counted)
    torch._dynamo.reset()
    with snapshots.Snapshotter(model, optimizer, run='job', store=ckptfs.store) as snap:
        for number in range(8):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, number + 1.)
            if number == 4:
                made = len(graphs)
            step()
        assert made == len(graphs)
        want = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        assert snap.save(1)
        threading.Timer(0.5, gate.set).start()
        step()
        assert not torch.equal(model.a, want['a'])
        if not snap.wait_durable(1):
            assert 'was written before the update' in snap.status()['last_drop'], snap.status()
            return
    assert all(torch.equal(held(ckptfs)[name], tensor) for name, tensor in want.items())


def test_what_is_not_proved_is_said_of_the_step(ckptfs):
    """By the daemon and the step itself, whose trainer may be long gone."""
    receive(ckptfs)
    for run, shared in (('shared', True), ('own', False)):
        model = Weights(a=torch.ones(LARGE))
        if shared:
            model.a.share_memory_()
        with snapshots.Snapshotter(model, sgd(model), run=run, store=ckptfs.store) as snap:
            assert snap.save(0) and snap.wait_durable(0), snap.status()
            unproved = snap.status()['unproved_bytes']
        notes = json.loads(ckptfs.run('info', f'{run}/0', '--store', ckptfs.store, '--json').stdout)['notes']
        said = [note for note in notes if note.startswith('unproved: ')]
        assert len(said) == (1 if unproved else 0), notes
        assert not unproved or str(unproved) in said[0]
        assert not shared or unproved == 4 * LARGE
    assert daemon_counts(ckptfs)['unproved'] >= 1


class Graph:
    """A stand-in for torch.cuda.CUDAGraph: replays what ran while it was captured, and calls nothing of
    an optimizer's."""

    captures = False

    def __init__(self):
        self.work = []

    def capture_begin(self):
        """What follows is recorded."""
        Graph.captures = True

    def capture_end(self):
        """No more."""
        Graph.captures = False

    def replay(self):
        """What was recorded."""
        for one in self.work:
            one()


def test_a_graph_with_an_update_waits_before_its_replay(ckptfs, gate, monkeypatch):
    """One that was captured without a step does not wait, and one of which nobody saw the capture does."""
    receive(ckptfs)
    unseen = Graph()
    monkeypatch.setattr(Graph, 'captures', False)
    monkeypatch.setattr(torch.version, 'cuda', '12.8')
    monkeypatch.setattr(torch.cuda, 'CUDAGraph', Graph)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    monkeypatch.setattr(torch.cuda, 'current_stream', lambda *_: None)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: Graph.captures)
    for name in ('capture_begin', 'capture_end', 'replay'):  # watch_graphs puts its own there
        monkeypatch.setattr(Graph, name, vars(Graph)[name])
    devices.watch_graphs(lambda: turns._begin_step(None))
    model = Weights(w=torch.zeros(LARGE))
    optimizer = sgd(model)
    model.w.grad = torch.ones(LARGE)
    updates, forward = Graph(), Graph()
    updates.capture_begin()
    optimizer.step()
    updates.capture_end()
    forward.capture_begin()
    forward.capture_end()
    for graph in (updates, unseen):
        graph.work.append(lambda: model.w.data.add_(1))  # past all counters, as a device does
    forward.work.append(lambda: waited.append(gate.is_set()))
    waited = []
    with snapshots.Snapshotter(model, optimizer, run='job', store=ckptfs.store) as snap:
        for step, graph in enumerate((updates, unseen)):
            gate.clear()
            truth = float(model.w[0])
            assert snap.save(step), snap.status()
            forward.replay()
            assert not waited.pop(), 'it holds no update'
            timer = threading.Timer(0.3, gate.set)
            timer.start()
            graph.replay()
            assert gate.is_set(), 'it did not wait for the copy'
            timer.join()
            assert snap.wait_durable(step), snap.status()
            with snapshots.SavedStep(f'ckptfs://{ckptfs.store}/job/{step}') as saved:
                assert saved.model()['w'].eq(truth).all()


def _close(held_by):
    held_by[0].close()


def _forget(held_by):
    held_by.clear()
    gc.collect()


@pytest.mark.parametrize('leave', [_close, _forget])
def test_steps_wait_while_another_thread_ends_the_snapshotter(ckptfs, gate, leave):
    receive(ckptfs)
    model = Weights(w=torch.zeros(LARGE))
    optimizer = sgd(model)
    held_by = [snapshots.Snapshotter(model, optimizer, run='job', store=ckptfs.store)]
    assert held_by[0].save(1)
    model.w.grad = torch.ones(LARGE)
    threads = [threading.Thread(target=leave, args=(held_by,)), threading.Thread(target=optimizer.step)]
    for thread in threads:
        thread.start()
        thread.join(0.3)
    assert all(thread.is_alive() for thread in threads) and model.w.eq(0).all(), 'it did not wait'
    gate.set()
    for thread in threads:
        thread.join(60)
    assert model.w.ne(0).all()
    wait_until(lambda: ckptfs.list()['steps'], 'the step')
    assert held(ckptfs)['w'].eq(0).all()


def tensors_of_all_ranks(ckptfs, name):
    """One of each step, of whichever rank wrote it."""
    for path in glob.glob(os.path.join(ckptfs.store, 'blobs', 'snapshots', '*', 'rank-*.safetensors')):
        with safe_open(path, 'pt') as file:
            if name in file.keys():
                yield file.get_tensor(name)


class Replica:
    """A model that one rank of two holds: all of it is the other's, too."""
    lazy = False

    def __init__(self):
        self.tensors = {'a': torch.zeros(LARGE), 'b': torch.ones(LARGE), 'c': torch.arange(3.0)}

    def start(self, rank, world):
        """Nothing to agree on."""

    def collect(self):
        """Parameters without an optimizer."""
        model = Model([(name, 'frozen') for name in self.tensors], tensors=self.tensors)
        return model, [State(name, 'weight', '', tensor) for name, tensor in self.tensors.items()], []


def test_replicas_that_came_apart_are_not_mixed(ckptfs):
    """Local SGD, a step within no_sync()."""
    receive(ckptfs)
    replicas = [Replica(), Replica()]
    ranks = [snapshots.Saver(one, 'job', ckptfs.store, rank=rank, world=2, job='life')
             for rank, one in enumerate(replicas)]
    for step in range(3):
        if step > 0:
            replicas[step % 2].tensors['b'][ROW] = 7  # by one rank first, then by the other
        assert all(rank.save(step) for rank in ranks)
        assert [rank.wait_durable(step) for rank in ranks] == [step != 1] * 2
    for rank in ranks:
        assert 'replicas came apart' in rank.status()['last_drop']
        rank.close()
    assert {int(tensor[ROW]) for tensor in tensors_of_all_ranks(ckptfs, 'b')} == {1, 7}
