# SPDX-License-Identifier: Apache-2.0
"""Tensors that do not lie in memory as they are, optimizers that keep their states
elsewhere, and steps that are none: right, or dropped, and training goes on."""
import functools
import json
import os

import ckptfs as snapshots
import pytest
import torch
from ckptfs import state
from ckptfs.saved_file import saved_file
from daemon import step_of
from safetensors import safe_open
from test_save_options import receive
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

LARGE = 20_000  # is copied when save has returned


class Weights(torch.nn.Module):
    """Parameters of a name each."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, torch.nn.Parameter(tensor))


def sgd(model):
    """An optimizer that has no states."""
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def all_held(ckptfs):
    """The tensors of each step's only rank."""
    blobs = os.path.join(ckptfs.store, 'blobs')
    for step in os.listdir(os.path.join(blobs, 'snapshots')):
        yield held_in(blobs, f'snapshots/{step}')


def held_in(blobs, place):
    """The tensors of the rank's file there, those that earlier files keep for it included, each in
    the order of its state."""
    def opened(where):
        return safe_open(os.path.join(blobs, where, 'rank-00000.safetensors'), 'pt')

    with opened(place) as file:
        words = json.loads(file.metadata()['ckptfs.rank_file'])
        found = {key: file.get_tensor(key) for key in file.keys()}
    for key, one in words.get('kept', {}).items():
        with opened(one['place']) as earlier:
            found[key] = earlier.get_tensor(key)
    for key, said in words['tensors'].items():
        if 'order' in said:
            found[key] = found[key].permute([said['order'].index(dim) for dim in range(found[key].dim())])
    return found


def held(ckptfs):
    """Returns what the only step holds."""
    step, = all_held(ckptfs)
    return step


def test_conjugates_and_negatives(ckptfs):
    receive(ckptfs)
    numbers = torch.randn(2, LARGE, dtype=torch.complex64)
    model = Weights(lazy=numbers[0].conj(), small=numbers[0][:9].conj(),
                    negative=torch._neg_view(numbers[1].real.contiguous()))
    truth = {name: p.detach().clone().resolve_conj().resolve_neg()
             for name, p in model.named_parameters()}
    with snapshots.Snapshotter(model, sgd(model), run='job', store=ckptfs.store) as snap:
        assert snap.save(1) and snap.wait_durable(1), snap.status()
    found = held(ckptfs)
    for name, tensor in truth.items():
        assert torch.equal(found[name], tensor), name


def _halved(model, optimizer):
    """The same Parameter objects, in other memory."""
    model.half()
    for values in optimizer.state.values():
        for kind, value in values.items():
            values[kind] = value.half()


def _turned(model, _):
    for parameter in model.parameters():
        parameter.data = parameter.data.T


def _narrowed(model, optimizer):
    """Fewer rows, in the same memory."""
    for parameter in model.parameters():
        optimizer.state[parameter]['momentum_buffer'] = (
            optimizer.state[parameter]['momentum_buffer'][:2])
        parameter.data = parameter.data[:2]


def _loaded(_, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())
    for values in optimizer.state.values():
        values['momentum_buffer'] = values['momentum_buffer'] * 3


def _more(model, optimizer):
    for parameter in model.parameters():
        optimizer.state[parameter]['seen'] = torch.arange(LARGE)


def _fewer(_, optimizer):
    optimizer.state.clear()


def _frozen(model, _):
    """Nobody waits with writes to them."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def _negated(model, _):
    for parameter in model.parameters():
        parameter.data = torch._neg_view(parameter.data)


def _renamed(model, _):
    model.other = model.large
    del model.large


def _assigned(model, _):
    """The same object, as if it had always been so."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
        parameter.data.mul_(-7)


CHANGES = {change.__name__: change for change in (
    _halved, _turned, _narrowed, _loaded, _more, _fewer, _frozen, _negated, _renamed, _assigned)}


@pytest.mark.parametrize('change', CHANGES)
def test_what_became_of_tensors_between_saves(ckptfs, change):
    """A save has the step as it is, though it remembers the last save."""
    receive(ckptfs)
    model = Weights(large=torch.randn(4, LARGE), small=torch.randn(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with snapshots.Snapshotter(model, optimizer, run='job', store=ckptfs.store) as snap:
        for step in range(2):
            assert snap.save(step) and snap.wait_durable(step), snap.status()
        CHANGES[change](model, optimizer)
        assert snap.save(2), snap.status()
        truth = {name: p.detach().clone().resolve_neg().contiguous()
                 for name, p in model.named_parameters()}
        if change == '_frozen':
            for parameter in model.parameters():
                parameter.data.zero_()
        for name, parameter in model.named_parameters():
            for kind, value in optimizer.state[parameter].items():
                truth[f'{kind}/{name}'] = value.clone()
        assert snap.wait_durable(2), snap.status()
    found = sum(same(tensors, truth) for tensors in all_held(ckptfs))
    assert found == (3 if change == '_frozen' else 1)


def same(tensors, truth):
    """True if these are all that there is of tensors, bit for bit."""
    held = {key for key in tensors if not key.startswith('ckptfs.')}
    return held == truth.keys() and all(
        tensors[key].dtype == one.dtype and torch.equal(tensors[key], one)
        for key, one in truth.items())


@pytest.mark.parametrize('size', [9, LARGE])
def test_a_tensor_without_memory_is_dropped_by_name(ckptfs, size):
    receive(ckptfs)
    model = Weights(wrapped=TwoTensor(torch.ones(size), torch.ones(size)))
    with snapshots.Snapshotter(model, sgd(model), run='job', store=ckptfs.store) as snap:
        assert not snap.save(1)
        assert 'wrapped is a' in snap.status()['last_drop']
        assert 'no memory of its own' in snap.status()['last_drop']


def test_states_of_an_optimizer_within_are_not_forgotten(ckptfs):
    model = Weights(w=torch.ones(9))
    inner = torch.optim.Adam(model.parameters())

    class Outer(torch.optim.Optimizer):
        """Has another one do the work, and says nothing of its states."""

        def __init__(self):
            super().__init__(model.parameters(), {})
            self.base = inner

    outer = Outer()
    with pytest.raises(TypeError, match='Outer keeps states in a Adam of its own'):
        snapshots.Snapshotter(model, outer, store=ckptfs.store)
    snapshots.Snapshotter(model, [outer, inner], store=ckptfs.store).close()
    outer.state = inner.state
    snapshots.Snapshotter(model, outer, store=ckptfs.store).close()


def lazily(snap):
    """True if a save returns before weights are copied."""
    return snap.size()['lazy_bytes'] > 0


def test_a_step_that_writes_outside_of_the_hooks_is_not_waited_for(ckptfs):
    model = Weights(w=torch.ones(LARGE))
    optimizer = sgd(model)
    with snapshots.Snapshotter(model, optimizer, store=ckptfs.store) as snap:
        assert lazily(snap)
        optimizer.step = optimizer.step  # bound, as accelerate leaves it
        assert lazily(snap)
        del optimizer.step
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert 'step' in vars(optimizer) and lazily(snap)
        inner = optimizer.step

        @functools.wraps(inner)
        def decayed():
            for parameter in model.parameters():
                parameter.data.mul_(0.9)
            inner()

        optimizer.step = decayed
        assert not lazily(snap)


def test_what_lies_otherwise_is_copied_late(ckptfs):
    """channels_last, transposed and 5-dimensional memory, with the states that lie alike, bit for bit; what
    has gaps is copied at once."""
    mount = ckptfs.start()[1]
    gaps = torch.randn(300, 600)[:, ::2]
    model = Weights(conv=torch.randn(64, 32, 5, 5).to(memory_format=torch.channels_last),
                    volume=torch.randn(16, 8, 6, 7, 8).to(memory_format=torch.channels_last_3d),
                    turned=torch.randn(200, 300).T, middle=torch.randn(40, 30, 50).permute(1, 0, 2),
                    flat=torch.randn(300, 1, 200).transpose(0, 2), plain=torch.randn(150, 200), gaps=gaps)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def update():
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    update()
    with snapshots.Snapshotter(model, optimizer, run='job', store=ckptfs.store, pace=1) as snap:
        # The states of a tensor with gaps have none.
        assert snap.size()['lazy_bytes'] == 3 * sum(
            p.nbytes for p in model.parameters()) - model.gaps.nbytes
        truth = {name: p.detach().clone() for name, p in model.named_parameters()}
        states = {(kind, name): optimizer.state[p][kind].clone()
                  for name, p in model.named_parameters() for kind in ('exp_avg', 'exp_avg_sq')}
        assert snap.save(1), snap.status()
        update()  # which waits
        assert snap.wait_durable(1), snap.status()
    with snapshots.SavedStep(f'ckptfs://{ckptfs.store}/job/1') as step:
        saved, found = step.model(), step.optimizer(named=True)['state']
    for name, tensor in truth.items():
        assert torch.equal(saved[name], tensor), name
    for (kind, name), tensor in states.items():
        assert torch.equal(found[name][kind], tensor), (kind, name)
    with safe_open(os.path.join(step_of(mount, 'job', '1'), 'view', 'tp1', 'rank0',
                                'model.safetensors'), 'pt') as file:
        for name, tensor in truth.items():
            assert torch.equal(file.get_tensor(name), tensor), name


def test_what_is_said_before_a_write_of_ones_own_is_whole(ckptfs):
    """As diffusers' EMAModel.copy_to and restore write: no counter tells of it."""
    receive(ckptfs)
    model = Weights(w=torch.ones(5_000_000))
    with snapshots.Snapshotter(model, sgd(model), run='job', store=ckptfs.store, pace=1) as snap:
        assert snap.save(1)
        snap.before_update()
        model.w.data.copy_(torch.zeros(5_000_000))
        assert snap.wait_durable(1)
    assert held(ckptfs)['w'].eq(1).all()


def test_an_optimizer_whose_states_are_spread(ckptfs, tmp_path):
    torch.distributed.init_process_group('gloo', rank=0, world_size=1,
                                         init_method=f'file://{tmp_path}/meet')
    try:
        model = Weights(w=torch.ones(9))
        spread = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
        with pytest.raises(TypeError, match='ZeroRedundancyOptimizer'):
            snapshots.Snapshotter(model, spread, store=ckptfs.store)
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(name='two_ranks')
def two_ranks_fixture():
    """This process is rank 0 of two, of which the other is not there."""
    torch.distributed.init_process_group('fake', rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def test_models_that_only_some_ranks_keep_alike(ckptfs, two_ranks):
    model = Weights(w=torch.ones(9), v=torch.ones(9))
    alone = DistributedDataParallel(model, process_group=torch.distributed.new_group([0]))
    with pytest.raises(TypeError, match=r'has ranks \[0\] only'):
        snapshots.Snapshotter(alone, sgd(model), store=ckptfs.store)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ['v'])
    apart = DistributedDataParallel(model)
    with pytest.raises(TypeError, match='ignores v'):
        snapshots.Snapshotter(apart, sgd(model), store=ckptfs.store)
    model.v.requires_grad_(False)  # as it was loaded, on all ranks
    snapshots.Snapshotter(apart, sgd(model), store=ckptfs.store).close()


class Held(snapshots.Collector):
    """All states of a model, which one rank's optimizer may not have all of."""

    lazy = False

    def __init__(self, model, optimizer):
        self._model, self._optimizer = model, optimizer

    def start(self, rank, world):
        """Nothing to say to the others."""

    def collect(self):
        """Returns what is asked of a collector."""
        model = state.model_state([self._model])
        names = {id(tensor): name for name, tensor in model.tensors.items()}
        weights = [state.State(name, 'weight', '', tensor)
                   for name, tensor in model.tensors.items()]
        held = state.optimizer_states(self._optimizer, '', names)
        return model, weights + held, [('', list(model.tensors), state.hyper_parameters({}))]


def test_states_that_only_some_ranks_hold_are_not_left_out(ckptfs):
    receive(ckptfs)
    model = Weights(w=torch.ones(9))
    optimizer, none = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())
    model.w.sum().backward()
    optimizer.step()
    ranks = [snapshots.Saver(Held(model, one), 'job', ckptfs.store, rank=rank, world=2, job='x')
             for rank, one in enumerate((optimizer, none))]
    assert all(rank.save(1) for rank in ranks)
    assert not any(rank.wait_durable(1) for rank in ranks)
    assert 'only 1 of 2 ranks' in ranks[0].status()['last_drop']
    none.step()
    assert all(rank.save(2) for rank in ranks)
    assert all(rank.wait_durable(2) for rank in ranks), ranks[0].status()
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize('step', [None, 'x', float('nan'), -1, 1 << 64])
def test_a_step_that_is_none_is_dropped(ckptfs, step):
    model = Weights(w=torch.ones(9))
    with snapshots.Snapshotter(model, sgd(model), run='job', store=ckptfs.store) as snap:
        assert snap.save(step) is False
        assert snap.status()['dropped'] == 1


def test_views_that_begin_at_one_place_are_not_one_tensor():
    square = torch.arange(4.).view(2, 2)
    wave = torch.tensor([1 + 2j])
    file = saved_file('file', {'a': square, 'b': square.t(), 'again': square,
                               'c': wave.imag, 'd': wave.conj().imag}, lambda tensor: False)
    assert {s.key: s.tensor.tolist() for s in file.storages} == {
        'a': [[0, 1], [2, 3]], 'b': [[0, 2], [1, 3]], 'c': [2], 'd': [-2]}
