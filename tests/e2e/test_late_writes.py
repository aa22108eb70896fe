# SPDX-License-Identifier: Apache-2.0
"""Somebody writes parameters while a save is being copied, beside the step of an optimizer that
waits for it.  These writes are copied before save returns, or waited for, or the step is
dropped."""
import functools
import gc
import logging
import mmap
import multiprocessing
import os
import signal
import threading
import weakref

import ckptfs as snapshots
import pytest
import torch
from ckptfs import dcp as ours
from ckptfs.collector import TorchCollector
from daemon import wait_until
from test_odd_tensors import LARGE, Weights, all_held, held, lazily, sgd
from test_save_options import gate_fixture, receive  # noqa: F401
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


def test_hooks_of_torch_that_step_are_waited_for(ckptfs, gate, monkeypatch):
    receive(ckptfs)
    model = Weights(w=torch.zeros(LARGE))
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {'lr': 1.0})
    optimizer, = model.w._in_backward_optimizers
    asked = threading.Event()
    with snapshots.Snapshotter(model, optimizer, run='job', store=ckptfs.store) as snap:
        before = snap.before_update
        monkeypatch.setattr(snap, 'before_update', lambda: (asked.set(), before())[1])
        assert lazily(snap) and snap.save(1)
        backward = threading.Thread(target=lambda: model.w.sum().backward())
        backward.start()
        assert asked.wait(60)
        backward.join(0.3)
        assert backward.is_alive() and model.w.eq(0).all(), 'it did not wait'
        gate.set()
        backward.join(60)
        assert model.w.eq(-1).all()
        assert snap.wait_durable(1), snap.status()
    assert held(ckptfs)['w'].eq(0).all()


class Own:
    """An optimizer that is none of torch's: writes rows that samples do not meet."""

    def __init__(self, parameters):
        self.param_groups = [{'params': list(parameters), 'lr': 1.0}]
        self.state = {p: {'rows': torch.zeros_like(p)} for p in self.param_groups[0]['params']}

    def step(self):
        """Past all counters."""
        for parameter, values in self.state.items():
            parameter.data[100:102] += 1
            values['rows'].data[100:102] += 1


def test_an_optimizer_of_ones_own_is_not_waited_for(ckptfs, gate):
    receive(ckptfs)
    model = Weights(w=torch.zeros(LARGE))
    optimizer = Own(model.parameters())
    with snapshots.Snapshotter(model, optimizer, run='job', store=ckptfs.store) as snap:
        assert snap.save(1)
        optimizer.step()
        gate.set()
        assert snap.wait_durable(1), snap.status()
    assert all(held(ckptfs)[key].eq(0).all() for key in ('w', 'rows/w'))


def test_averages_and_what_no_optimizer_has_are_copied_at_once(ckptfs, gate):
    receive(ckptfs)
    model = Weights(w=torch.ones(LARGE), free=torch.ones(LARGE))
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD([model.w], lr=1.0)
    averaged.update_parameters(model)
    with snapshots.Snapshotter([model, averaged], optimizer, run='job',
                               store=ckptfs.store) as snap:
        model.w.sum().backward()
        optimizer.step()
        assert snap.size()['lazy_bytes'] == model.w.nbytes
        assert snap.save(1)
        averaged.update_parameters(model)
        model.free.data[100:102] += 1
        assert averaged.module.w.eq(0.5).all()
        gate.set()
        assert snap.wait_durable(1), snap.status()
    found = {key: set(tensor.unique().tolist()) for key, tensor in held(ckptfs).items()
             if not key.startswith('ckptfs.')}
    assert found == {'w': {0}, 'free': {1}, 'module.w': {1}, 'module.free': {1}, 'n_averaged': {1}}


# ---- memory that goes before it is copied -------------------------------------------


def test_memory_outlives_its_owners_until_it_is_copied(ckptfs, gate):
    receive(ckptfs)
    pages = mmap.mmap(-1, 4 * LARGE)
    weight = torch.frombuffer(pages, dtype=torch.float32)
    model = Weights(w=weight.copy_(torch.randn(LARGE)), v=torch.randn(LARGE))
    optimizer = torch.optim.Adam(model.parameters())
    (model.w.sum() + model.v.sum()).backward()
    optimizer.step()
    truth = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        truth |= {f'{k}/{name}': value.clone() for k, value in optimizer.state[parameter].items()}
    models, optimizers, mapped = [model], [optimizer], weakref.ref(pages)
    with snapshots.Saver(TorchCollector(models, optimizers), 'job', ckptfs.store) as snap:
        assert lazily(snap) and snap.save(1)
        models.clear()
        optimizers.clear()
        del pages, weight, model, optimizer, parameter
        gc.collect()
        assert mapped() is not None, 'nobody keeps it'
        gate.set()
        assert snap.wait_durable(1), snap.status()
        found = held(ckptfs)
        assert all(torch.equal(found[key], tensor) for key, tensor in truth.items())
        wait_until(lambda: mapped() is None, 'the end of it')


def _replaced(parameter):
    parameter.data = parameter.data.clone()


def _emptied(parameter):
    """As an unsharded parameter is; what is allocated next takes its place."""
    parameter.untyped_storage().resize_(0)
    return [torch.zeros(LARGE).index_fill_(0, torch.tensor([100]), 7) for _ in range(100)]


@pytest.mark.parametrize('change', [_replaced, _emptied])
def test_a_parameter_that_got_other_memory_is_named(ckptfs, gate, change):
    receive(ckptfs)
    model = Weights(a=torch.zeros(LARGE), b=torch.zeros(LARGE))
    with snapshots.Snapshotter(model, sgd(model), run='job', store=ckptfs.store) as snap:
        assert lazily(snap) and snap.save(1)
        others = change(model.b)
        gate.set()
        assert not snap.wait_durable(1), held(ckptfs)['b'].unique()
        assert snap.status()['last_drop'].startswith('step 1: b was written before the update: ')
        del others
        model.b.data = torch.full((LARGE,), 3.)
        assert snap.save(2) and snap.wait_durable(2), snap.status()
    assert held(ckptfs)['b'].eq(3).all() and held(ckptfs)['a'].eq(0).all()


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
    moments = set()
    for tensors in all_held(ckptfs):
        values = {v for name in names for v in tensors[name].unique().tolist()}
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
        """Returns what the save returned."""
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
    assert 'was written while it was being saved' in snap.status()['last_drop']


def test_an_interrupted_wait_does_not_hide_the_next_step(collecting):
    snap, optimizer, save, go_on = collecting
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    go_on.set()
    assert save.join() == [True]
    taken = []

    def closure():
        thread = threading.Thread(target=lambda: taken.append(snap.save(2)))
        thread.start()
        thread.join(60)

    optimizer.step(closure)
    assert taken == [False]
    assert 'an optimizer is in its step, in another thread' in snap.status()['last_drop']


def test_a_child_waits_for_no_thread_of_its_parent(collecting):
    _, optimizer, save, go_on = collecting
    child = multiprocessing.get_context('fork').Process(target=optimizer.step)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    go_on.set()
    assert save.join() == [True]


class Stepping:
    """A step of an optimizer in another thread that is in its closure until it is let go."""

    def __init__(self, optimizer):
        self._go_on, inside = threading.Event(), threading.Event()

        def closure():
            inside.set()
            self._go_on.wait(60)
            raise RuntimeError('no loss')

        def step():
            with pytest.raises(RuntimeError, match='no loss'):
                optimizer.step(closure)

        self._thread = threading.Thread(target=step)
        self._thread.start()
        inside.wait(60)

    def end(self):
        """By what its closure raises."""
        self._go_on.set()
        self._thread.join(60)


def test_a_step_of_another_thread_is_waited_for(ckptfs):
    receive(ckptfs)
    model, other = Weights(w=torch.zeros(9)), Weights(w=torch.zeros(9))
    with snapshots.Snapshotter(model, sgd(model), run='job', store=ckptfs.store,
                               update_limit=0.2) as snap:
        stepping = Stepping(sgd(model))  # whoever it is of
        assert not snap.save(1)
        assert 'an optimizer is in its step, in another thread' in snap.status()['last_drop']
        stepping.end()
        assert snap.save(2)
        unrelated = Stepping(sgd(other))
        assert snap.save(3)
        unrelated.end()
        assert snap.wait_durable(2) and snap.wait_durable(3)


class Noting(torch.optim.SGD):
    """Calls its closure when it has written half of what it writes."""

    def step(self, closure=None):
        for number, parameter in enumerate(self.param_groups[0]['params']):
            parameter.data += 1
            if number == 0 and closure:
                closure()


def test_a_save_within_a_step(ckptfs):
    """From its hooks all is copied, since the step waits no more; in its middle none is taken."""
    receive(ckptfs)
    model = Weights(a=torch.zeros(LARGE), b=torch.zeros(LARGE))
    optimizer = Noting(model.parameters(), lr=1)
    with snapshots.Snapshotter(model, optimizer, run='job', store=ckptfs.store, pace=1) as snap:
        optimizer.step(lambda: snap.save(0))
        assert 'within the step of an optimizer' in snap.status()['last_drop']
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            handle = register(lambda *_: (snap.save(1), None)[1])
            optimizer.step()
            handle.remove()
            assert snap.wait_durable(1), snap.status()
    found = {tuple(float(v) for k in 'ab' for v in tensors[k].unique())
             for tensors in all_held(ckptfs)}
    assert found == {(1, 1), (3, 3)}


def test_a_patched_class_is_not_waited_for(ckptfs, monkeypatch):
    model = Weights(w=torch.zeros(LARGE))
    inner = torch.optim.SGD.step

    @functools.wraps(inner)
    def step(self, closure=None):
        model.w.data[100:102] += 1
        return inner(self, closure)

    monkeypatch.setattr(torch.optim.SGD, 'step', step)
    with snapshots.Snapshotter(model, sgd(model), store=ckptfs.store) as snap:
        assert not lazily(snap)


class Odd(torch.optim.SGD):
    """As a dataclass is."""

    def __eq__(self, other):
        return NotImplemented


def test_memory_that_others_write_is_not_the_optimizers(ckptfs, gloo):
    """One that has gone to others since the last save, or lies beside."""
    receive(ckptfs)
    flat = torch.zeros(2 * LARGE)
    model = Weights(a=flat[:LARGE], b=flat[LARGE:])
    optimizer = Odd([model.a], lr=0.1)
    model.a.grad = torch.ones(LARGE)
    late = []
    for step in (1, 2, 3):
        if step < 3:
            optimizer.step()
        else:
            sgd(Weights(w=torch.zeros(9))).step()
        state = {'model': {'a': model.a, 'b': model.b}, 'optim': {
            'state': {}, 'param_groups': [{'params': ['a', 'b'], 'lr': 1.0}]}}
        writer = ours.Writer(ckptfs.store, 'job', step)
        dcp.async_save(state, storage_writer=writer).result()
        late.append(late_bytes(writer))
        assert writer.taken
    assert late == [4 * LARGE, 4 * LARGE, 0]


# ---- handlers of signals -----------------------------------------------------------


@pytest.mark.parametrize('ask', [lambda snap: snap.save(9), lambda snap: snap.close(),
                                 lambda snap: snap.drop(9, ValueError('x'))])
def test_a_handler_may_ask_in_the_middle_of_a_save(ckptfs, monkeypatch, ask):
    receive(ckptfs)
    model = Weights(w=torch.zeros(9))
    with snapshots.Snapshotter(model, sgd(model), run='job', store=ckptfs.store) as snap:
        signal_within_save(monkeypatch, lambda *_: ask(snap))
        assert snap.save(1)
        assert snap.wait_durable(1) or ask.__code__.co_names == ('close',)


def test_what_a_handler_raises_ends_the_save(ckptfs, monkeypatch):
    receive(ckptfs)
    model = Weights(w=torch.zeros(9))
    with snapshots.Snapshotter(model, sgd(model), run='job', store=ckptfs.store) as snap:
        with pytest.raises(KeyboardInterrupt):
            signal_within_save(monkeypatch, signal.default_int_handler)
            snap.save(1)
        assert snap.save(2) and snap.wait_durable(2)
        assert snap.status()['dropped'] == 1


def signal_within_save(monkeypatch, handler):
    """Has a handler run while the next save is in the library, once."""
    before = signal.signal(signal.SIGUSR1, handler)
    find = snapshots.shot.Shot._find_change

    def found(shot, late):
        if not late and signal.getsignal(signal.SIGUSR1) is handler:
            try:
                os.kill(os.getpid(), signal.SIGUSR1)
                for _ in range(1000):  # it runs between two of these
                    pass
            finally:
                signal.signal(signal.SIGUSR1, before)
        return find(shot, late)

    monkeypatch.setattr(snapshots.shot.Shot, '_find_change', found)


# ---- what is said ------------------------------------------------------------------


class Unsayable(Exception):
    """Cannot say what it is."""

    def __str__(self):
        raise ValueError('nothing')


@pytest.mark.parametrize('error', [ValueError('caf\udce9'), ValueError('x' + 'é' * 3000), Unsayable()])
def test_any_reason_can_be_said(ckptfs, error):
    receive(ckptfs)
    models = [Weights(w=torch.zeros(9)) for _ in range(2)]
    fails = [False]

    def document():
        if fails[0]:
            raise error
        return 1

    ranks = [snapshots.Saver(TorchCollector([model], [], replicated=True), 'job', ckptfs.store,
                             {'x': document} if rank else {}, rank=rank, world=2, job='x')
             for rank, model in enumerate(models)]
    for step in (1, 2):
        assert [rank.save(step) for rank in ranks] == [True, not fails[0]]
        assert ranks[0].wait_durable(step) is not fails[0]
        fails[0] = True
    assert all(rank.status()['dropped'] == 1 for rank in ranks)
    for rank in ranks:
        rank.close()


def test_who_never_saved_drops_for_the_others_too(ckptfs):
    receive(ckptfs)
    models = [Weights(w=torch.zeros(9)) for _ in range(2)]
    ranks = [snapshots.Saver(TorchCollector([model], [], replicated=True), 'job', ckptfs.store,
                             {'x': lambda: 1 / 0} if rank else {}, rank=rank, world=2, job='x')
             for rank, model in enumerate(models)]
    assert [rank.save(1) for rank in ranks] == [True, False]
    assert not ranks[0].wait_durable(1, 30)
    assert 'division by zero' in ranks[0].status()['last_drop']
    for rank in ranks:
        rank.close()
