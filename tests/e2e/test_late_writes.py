# SPDX-License-Identifier: Apache-2.0
"""Who writes parameters while a save is being copied, beside the step of an optimizer that waits
for it: what it writes is copied before save returns, or waited for, or the step is dropped."""
import logging
import multiprocessing
import os
import threading

import ckptfs as snapshots
import pytest
import torch
from ckptfs import dcp as ours
from safetensors import safe_open
from test_odd_tensors import LARGE, Weights, held, lazily, sgd
from test_save_options import receive
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.optim import _apply_optimizer_in_backward


class InBackward(torch.optim.Optimizer):
    """As LOMO does: updates each parameter when its gradient is there, past all counters."""

    def __init__(self, parameters, register):
        super().__init__(parameters, {'lr': 1.0})
        for parameter in self.param_groups[0]['params']:
            getattr(parameter, register)(lambda *_, p=parameter: self.update(p))

    @staticmethod
    def update(parameter):
        """A few rows, which samples do not meet."""
        parameter.data[100:102] += 1

    def step(self, closure=None):
        """All is done."""


@pytest.mark.parametrize('register', ['register_post_accumulate_grad_hook', 'register_hook'])
def test_an_optimizer_that_updates_in_the_backward_pass(ckptfs, caplog, register):
    receive(ckptfs)
    model = Weights(w=torch.zeros(LARGE))
    optimizer = InBackward(model.parameters(), register)
    with caplog.at_level(logging.WARNING, 'ckptfs'), snapshots.Snapshotter(
            model, optimizer, run='job', store=ckptfs.store, pace=1) as snap:
        assert snap.save(1)
        model.w.sum().backward()
        assert model.w[100] == 1
        assert snap.wait_durable(1) and not lazily(snap)
    assert held(ckptfs)['w'].eq(0).all()
    assert len([r for r in caplog.records if 'InBackward' in r.message]) == 1


def test_hooks_of_torch_that_step_are_waited_for(ckptfs):
    model = Weights(w=torch.zeros(LARGE))
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {'lr': 1.0})
    optimizer, = model.w._in_backward_optimizers
    with snapshots.Snapshotter(model, optimizer, store=ckptfs.store) as snap:
        assert lazily(snap)


def test_an_embedding_of_bounded_norm_is_written_by_the_forward_pass(ckptfs):
    receive(ckptfs)
    model = torch.nn.Embedding(LARGE, 4, max_norm=1.0)
    truth = model.weight.detach().clone()
    with snapshots.Snapshotter(model, sgd(model), run='job', store=ckptfs.store, pace=1) as snap:
        assert snap.save(1)
        model(torch.arange(LARGE))
        assert not torch.equal(model.weight, truth)
        assert snap.wait_durable(1)
    assert torch.equal(held(ckptfs)['weight'], truth)


# ---- the writer of DCP, which is given no optimizer ---------------------------------


@pytest.fixture(name='gloo')
def gloo_fixture(tmp_path):
    """One rank."""
    torch.distributed.init_process_group('gloo', rank=0, world_size=1,
                                         init_method=f'file://{tmp_path}/meet')
    yield
    torch.distributed.destroy_process_group()


def late_bytes(writer):
    """How many bytes the writer's last save has left to its thread."""
    return writer._saver.size()['lazy_bytes']


def test_the_writer_of_dcp_waits_for_optimizers_that_it_has_seen(ckptfs, gloo):
    receive(ckptfs)
    model = Weights(w=torch.zeros(LARGE))
    optimizer = torch.optim.AdamW(model.parameters())
    model.w.sum().backward()
    optimizer.step()
    state = dict(zip(('model', 'optim'), get_state_dict(model, optimizer)))
    writer = ours.Writer(ckptfs.store, 'job', 1)
    dcp.async_save(state, storage_writer=writer).result()
    assert writer.taken and late_bytes(writer) == 3 * 4 * LARGE


def test_the_writer_of_dcp_waits_for_nobody_else(ckptfs, gloo):
    receive(ckptfs)
    model, rows = Weights(w=torch.zeros(LARGE)), torch.zeros(LARGE)
    state = {'model': {'w': model.w}, 'optim': {
        'state': {'w': {'rows': rows}}, 'param_groups': [{'params': ['w'], 'lr': 1.0}]}}
    writer = ours.Writer(ckptfs.store, 'job', 1, pace=1)
    done = dcp.async_save(state, storage_writer=writer)
    for tensor in (model.w, rows):  # an optimizer of one's own: rows that samples do not meet
        tensor.data[100:102] += 1
    done.result()
    assert writer.taken and late_bytes(writer) == 0
    assert all(held(ckptfs)[key].eq(0).all() for key in ('w', 'rows/w'))


# ---- threads ----------------------------------------------------------------------


def test_a_save_of_another_thread_is_of_one_moment(ckptfs):
    receive(ckptfs)
    names = [f'p{i}' for i in range(600)]
    model = Weights(**{name: torch.zeros(50 if i else LARGE) for i, name in enumerate(names)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    over, taken = threading.Event(), []
    with snapshots.Snapshotter(model, optimizer, run='job', store=ckptfs.store) as snap:
        def save():
            for step in range(1, 13):
                if snap.save(step) and snap.wait_durable(step):
                    taken.append(step)
            over.set()

        thread = threading.Thread(target=save)
        thread.start()
        while not over.is_set():
            optimizer.step()
        thread.join()
        assert len(taken) == 12, snap.status()
    folder = os.path.join(ckptfs.store, 'blobs', 'snapshots')
    moments = set()
    for step in os.listdir(folder):
        with safe_open(os.path.join(folder, step, 'rank-00000.safetensors'), 'pt') as file:
            values = {v for name in names for v in file.get_tensor(name).unique().tolist()}
        assert len(values) == 1, values
        moments |= values
    assert len(moments) > 1


class InAnotherThread:
    """A save in another thread that is in the middle of what it collects."""

    def __init__(self, snap, wait):
        self.result = []
        self._thread = threading.Thread(target=lambda: self.result.append(snap.save(1)))
        self._thread.start()
        wait()

    def join(self):
        """What the save returned."""
        self._thread.join(60)
        return self.result


@pytest.fixture(name='collecting')
def collecting_fixture(ckptfs):
    """(snapshotter, optimizer, a save that goes on when the event is set, the event)."""
    receive(ckptfs)
    inside, go_on = threading.Event(), threading.Event()

    def document():
        inside.set()
        return go_on.wait(60)

    model = Weights(w=torch.zeros(9))
    model.w.grad = torch.ones(9)
    optimizer = sgd(model)
    with snapshots.Snapshotter(model, optimizer, run='job', store=ckptfs.store,
                               documents={'slow': document}, update_limit=0.5) as snap:
        yield snap, optimizer, InAnotherThread(snap, inside.wait), go_on
        go_on.set()


def test_an_update_does_not_wait_for_good(collecting):
    snap, optimizer, save, go_on = collecting
    optimizer.step()
    go_on.set()
    assert save.join() == [False]
    assert 'was written while it was saved' in snap.status()['last_drop']


def test_a_child_waits_for_no_thread_of_its_parent(collecting):
    _, optimizer, save, go_on = collecting
    child = multiprocessing.get_context('fork').Process(target=optimizer.step)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    go_on.set()
    assert save.join() == [True]


def test_a_step_that_raised_is_over_with_the_next(ckptfs):
    receive(ckptfs)
    model = Weights(w=torch.zeros(9))
    optimizer = sgd(model)

    def fail():
        raise RuntimeError('no loss')

    with snapshots.Snapshotter(model, optimizer, run='job', store=ckptfs.store,
                               update_limit=0.2) as snap:
        with pytest.raises(RuntimeError, match='no loss'):
            optimizer.step(fail)
        assert snap.save(1)
        assert InAnotherThread(snap, lambda: None).join() == [False]
        assert 'an optimizer is in its step' in snap.status()['last_drop']
        optimizer.step()
        assert InAnotherThread(snap, lambda: None).join() == [True]
