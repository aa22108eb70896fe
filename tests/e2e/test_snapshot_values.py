# SPDX-License-Identifier: Apache-2.0
"""Values beside tensors in a snapshot: hyper-parameters, states that were numbers, schedulers,
random numbers, documents.  They come back as they were, or something is said when they are saved;
and what cannot be loaded keeps nothing else from being loaded."""
import argparse
import json
import logging
import pickle
from collections import Counter, OrderedDict, defaultdict
from types import SimpleNamespace

import ckptfs as snapshots
import numpy
import pytest
import torch
from ckptfs import callbacks, resume
from ckptfs.collector import TorchCollector
from ckptfs.plain_pickle import plain
from ckptfs.saved_values import SavedValues, hyper_parameters
from ckptfs.step_files import _DTYPES, tensors_of
from test_save_options import receive
from torch.distributed import checkpoint as dcp
from torch.optim import lr_scheduler

SIZE = 8


def trained(make=torch.optim.AdamW, dtype=torch.float32):
    """A small model and its optimizer after one update."""
    torch.manual_seed(0)
    model = torch.nn.Linear(SIZE, SIZE).to(dtype)
    optimizer = make(model.parameters(), lr=0.1)
    model(torch.ones(1, SIZE, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(name='saved')
def saved_fixture(ckptfs):
    """saved(model, optimizer, documents) is the step that was saved, opened."""
    receive(ckptfs)
    opened = []

    def save(model, optimizer=None, documents=None):
        step = len(opened) + 1
        with snapshots.Snapshotter(model, optimizer, 'job', ckptfs.store, documents) as snap:
            assert snap.save(step) and snap.wait_durable(step), snap.status()
        opened.append(resume.SavedStep(f'ckptfs://{ckptfs.store}/job/{step}'))
        return opened[-1]

    yield save
    for step in opened:
        step.__exit__()


# ---- states ----------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Keeps numbers beside a tensor."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]['params']:
            self.state[parameter].update(step=3, updates=1001, rms=0.1, warm=True,
                                         seen=torch.tensor(5), buffer=torch.zeros_like(parameter))


def test_states_that_were_numbers_are_numbers(saved):
    model, optimizer = trained(Counting, torch.bfloat16)
    got = saved(model, optimizer).optimizer()
    state = got['state'][0]
    assert {key: value for key, value in state.items() if not torch.is_tensor(value)} == {
        'step': 3, 'updates': 1001, 'rms': 0.1, 'warm': True}
    assert type(state['updates']) is int and type(state['rms']) is float
    assert state['warm'] is True
    assert state['seen'].dtype == torch.int64 and state['seen'] == 5
    again = Counting(model.parameters(), lr=0.1)
    again.load_state_dict(got)
    assert again.state[model.weight]['updates'] == 1001  # not 1000, the next of bfloat16


# ---- hyper-parameters --------------------------------------------------------------


def test_hyper_parameters_that_are_tensors_come_back_as_such(ckptfs, saved):
    """A learning rate on a device, as torch.compile and CUDA graphs want it."""
    model, optimizer = trained(lambda parameters, lr: torch.optim.AdamW(
        parameters, lr=torch.tensor(lr), betas=(torch.tensor(0.5), torch.tensor(0.75)), foreach=False))
    step = saved(model, optimizer)
    group, = step.optimizer()['param_groups']
    assert torch.is_tensor(group['lr']) and group['lr'].dtype == torch.float32
    assert torch.equal(group['lr'], torch.tensor(0.1)) and type(group['weight_decay']) is float
    assert [torch.equal(*pair) for pair in zip(group['betas'], optimizer.param_groups[0]['betas'])] == [True] * 2
    assert not [key for key in step.documents() if key.startswith('ckptfs.')]
    again = trained()[1]
    again.load_state_dict(step.optimizer())
    assert torch.equal(again.param_groups[0]['lr'], torch.tensor(0.1))
    state = {'optim': {'param_groups': [{'lr': torch.tensor(0.), 'weight_decay': 0.}]}}
    dcp.load(state, checkpoint_id=f'ckptfs://{ckptfs.store}/job/1')
    assert torch.equal(state['optim']['param_groups'][0]['lr'], torch.tensor(0.1))


def test_hyper_parameters_of_numpy_are_numbers(saved):
    model, optimizer = trained()
    optimizer.param_groups[0].update(
        lr=numpy.float64(0.25), betas=(0.5, numpy.float32(0.75)),
        nested={'a': [numpy.int64(3)], 'b': numpy.arange(3), 'c': torch.ones(2)})
    group, = saved(model, optimizer).optimizer()['param_groups']
    assert (group['lr'], group['betas']) == (0.25, (0.5, 0.75))
    assert group['nested'] == {'a': [3], 'b': [0, 1, 2], 'c': [1.0, 1.0]}
    assert [type(one) for one in (group['lr'], *group['betas'], group['nested']['a'][0])] == [
        float, float, float, int]


@pytest.mark.parametrize('value', [lambda: 1, argparse.ArgumentParser(), numpy.longdouble(1)])
def test_a_group_that_could_not_be_loaded_is_dropped_by_name(ckptfs, value):
    receive(ckptfs)
    model, optimizer = trained()
    optimizer.add_param_group({'params': [], 'hook': [value]})
    with snapshots.Snapshotter(model, optimizer, 'job', ckptfs.store) as snap:
        assert not snap.save(1)
        assert 'hook of parameter group 1 could not be loaded again' in snap.status()['last_drop']


def described(group):
    """Returns what a store says of a step that has a group of these hyper-parameters."""
    return {'optimizer': '', 'parameters': ['w'], 'pickle': pickle.dumps(group, 2).hex()}


def test_a_group_of_an_older_step_is_read_but_for_what_takes_code():
    group = described({'lr': numpy.float64(0.5), 'size': [argparse.ArgumentParser]})
    found = hyper_parameters(group)
    assert found['lr'] == 0.5 and found['size'].what == 'argparse.ArgumentParser'
    values = SavedValues({'groups': [group, described('?')]}, None).values
    assert values['optim.param_groups.w.lr'] == 0.5


def test_weights_load_though_a_group_does_not(ckptfs, saved, monkeypatch):
    """As an earlier ckptfs saved it, which looked at nothing."""
    monkeypatch.setattr(snapshots.state, 'hyper_parameters', lambda group, where='': pickle.dumps(
        {'lr': 0.5, 'odd': argparse.ArgumentParser}, 2))
    model, optimizer = trained()
    step = saved(model, optimizer)
    assert torch.equal(step.weights()['weight'], model.weight)
    with pytest.raises(RuntimeError, match='odd of parameter group 0 cannot be loaded: it holds a '
                                           'argparse.ArgumentParser'):
        step.optimizer()
    url = f'ckptfs://{ckptfs.store}/job/1'
    state = {'model': {name: torch.zeros_like(one) for name, one in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=url, no_dist=True)
    assert torch.equal(state['model']['weight'], model.weight)
    with pytest.raises(BaseException, match='param_groups.weight.odd cannot be loaded'):
        dcp.load({**state, 'optim.param_groups.weight.odd': 1}, checkpoint_id=url, no_dist=True)


class Whole(torch.nn.Module):
    """A model with all that a state dict can have: tied weights, buffers, extra states."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(SIZE, SIZE), torch.nn.BatchNorm1d(SIZE)
        self.last = torch.nn.Linear(SIZE, SIZE)
        self.last.weight = self.first.weight
        self.extra = {'seen': 0, 'mean': torch.zeros(2)}

    def extra_only(self):
        """Without anything else."""
        self.first = self.norm = self.last = None
        return self

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def forward(self, x):
        self.extra = {'seen': self.extra['seen'] + len(x), 'mean': torch.ones(2)}
        return self.last(self.norm(self.first(x)))


def test_a_loop_of_ones_own_goes_on(saved):
    """As docs/reference/snapshots.md has it."""
    def training():
        torch.manual_seed(0)
        model = Whole()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, lr_scheduler.StepLR(optimizer, 2)

    def train(model, optimizer, scheduler, count):
        losses = []
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(torch.randn(4, SIZE)).square().sum()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        return losses

    whole = training()
    train(*whole, 3)
    state = torch.get_rng_state()
    step = saved(*whole[:2], {'scheduler': whole[2]})
    torch.set_rng_state(state)
    truth = train(*whole, 3)
    model, optimizer, scheduler = training()
    model.load_state_dict(step.model())
    optimizer.load_state_dict(step.optimizer())
    scheduler.load_state_dict(step.document('scheduler'))
    assert model.extra['seen'] == 12 and model.extra['mean'].eq(1).all()
    torch.set_rng_state(state)
    assert train(model, optimizer, scheduler, 3) == truth


@pytest.mark.parametrize('name, models', [
    ('_extra_state', [Whole().extra_only(), Whole().extra_only()]),
    ('weight', [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])])
def test_two_of_one_name_are_refused(ckptfs, name, models):
    with pytest.raises(TypeError, match=f'two modules have a {name}: save each as a run'):
        snapshots.Snapshotter(models, None, 'job', ckptfs.store)


def test_a_parameter_of_several_optimizers(ckptfs, saved):
    """The optimizers have states of one kind, or of different ones."""
    model, first = trained()
    others = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.optim.SGD(
        [model.weight], lr=0.2), torch.optim.Adam([model.weight], lr=0.3)]
    for other in others:
        other.step()
    optimizers = [first, *others]
    step = saved(model, optimizers)
    for label, optimizer in enumerate(optimizers):
        got, want = step.optimizer(str(label)), optimizer.state_dict()
        assert set(got['state']) == set(want['state'])
        for number, values in want['state'].items():
            assert set(got['state'][number]) == {k for k, v in values.items() if v is not None}
            for kind, value in got['state'][number].items():
                assert torch.equal(value, values[kind]), (label, number, kind)
        assert [group['lr'] for group in got['param_groups']] == [
            group['lr'] for group in want['param_groups']]


def test_wrappers_are_left_out_of_names(saved):
    model, optimizer = trained()
    step = saved(torch.nn.DataParallel(torch.compile(model)), optimizer)
    assert set(step.weights()) == {'weight', 'bias'}


def test_a_scripted_module_is_refused(ckptfs):
    with pytest.raises(TypeError, match='pass the module that was scripted'):
        snapshots.Snapshotter(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), None,
                              'job', ckptfs.store)


@pytest.mark.parametrize('step', [None, 'x', float('nan'), 1.5, -1, 1 << 64])
def test_nobody_knows_of_a_step_that_is_none(ckptfs, step):
    receive(ckptfs)
    model, optimizer = trained()
    with snapshots.Snapshotter(model, optimizer, 'job', ckptfs.store) as snap:
        assert snap.save(0) and snap.wait_durable(0)
        assert not snap.wait_durable(step) and not snap.cancel(step)
        assert snap.progress(step) == {'bytes': 0, 'copied': 0, 'durable': 0}
        assert not snap.wait_durable(5, float('nan')) and snap.wait_durable(0.0)


def test_a_run_whose_name_begins_with_a_dash(ckptfs):
    receive(ckptfs)
    model, optimizer = trained()
    with snapshots.Snapshotter(model, optimizer, '-job', ckptfs.store) as snap:
        assert snap.save(1) and snap.wait_durable(1)
    with snapshots.SavedStep(f'ckptfs://{ckptfs.store}/-job/1') as step:
        assert torch.equal(step.weights()['weight'], model.weight)


def test_no_optimizer(saved):
    model, _ = trained()
    step = saved(model, None)
    assert step.optimizers() == [] and set(step.weights()) == {'weight', 'bias'}


@pytest.mark.parametrize('with_state', [False, True])
def test_an_optimizer_of_another_model_is_refused(ckptfs, with_state):
    model, _ = trained()
    other = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.Adam([{'params': model.parameters()}, {'params': [other]}])
    if with_state:
        other.sum().backward()
        optimizer.step()
    with pytest.raises(TypeError, match=r'parameter group 1 of the Adam has a parameter of shape '
                                        r'\[3, 2\] that the model does not have'):
        snapshots.Snapshotter(model, optimizer, store=ckptfs.store)


def test_a_parameter_that_came_later_drops_the_step_by_name(ckptfs):
    receive(ckptfs)
    model, optimizer = trained()
    with snapshots.Snapshotter(model, optimizer, 'job', ckptfs.store) as snap:
        optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(5))]})
        assert not snap.save(1)
        assert 'parameter group 1 of the AdamW has a parameter of shape [5]' in (
            snap.status()['last_drop'])


# ---- schedulers ----------------------------------------------------------------------


SCHEDULERS = {
    'multi_step': lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 1, 3]),
    'sequential': lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [3])],
        [2]),
    'numpy': lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: numpy.cos(epoch / 9))}


@pytest.mark.parametrize('name', SCHEDULERS)
def test_schedulers_come_back(saved, name):
    model, optimizer = trained()
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.step()
    scheduler.step()
    step = saved(model, optimizer, {'scheduler': scheduler})
    state = step.document('scheduler')
    assert state == scheduler.state_dict()
    assert all(type(one) is float for one in state['_last_lr'])
    again = SCHEDULERS[name](torch.optim.AdamW(model.parameters(), lr=0.1))
    again.load_state_dict(state)
    assert again.last_epoch == scheduler.last_epoch
    assert step.optimizer()['param_groups'][0]['lr'] == optimizer.param_groups[0]['lr']


@pytest.mark.parametrize('framework,documents', [
    ('lightning', {'schedulers': [argparse.ArgumentParser], 'checkpoint': {}, 'precision': {}}),
    ('transformers', {'trainer_state': {'global_step': 1}, 'scheduler': [argparse.ArgumentParser]})])
def test_a_checkpoint_names_what_cannot_be_loaded(ckptfs, saved, tmp_path, framework, documents):
    model, optimizer = trained()
    saved(model, optimizer, documents)
    checkpoint = getattr(snapshots, framework).checkpoint
    with pytest.raises(RuntimeError, match='schedulers? cannot be loaded: it holds a '
                                           'argparse.ArgumentParser'):
        checkpoint(f'ckptfs://{ckptfs.store}/job/1', str(tmp_path / 'out'))


# ---- documents -----------------------------------------------------------------------


def odd_documents():
    """Returns what DCP and Trainer loops have kept beside tensors."""
    return {
        'bytes': [b'', b'ab\xff'], 'bytearray': bytearray(b'xy'), 'set': {1, 'a'},
        'frozenset': frozenset([(1, 2)]), 'complex': 1 + 2j, 'range': range(1, 9, 2),
        'dtype': torch.bfloat16, 'device': [torch.device('cpu'), torch.device('cuda', 1)],
        'size': torch.Size([2, 3]), 'counter': Counter('aab'), 'ordered': OrderedDict(b=1, a=2),
        'default': defaultdict(list, {1: [2]}), 'of_sets': defaultdict(set, {'a': {1}}),
        'types': [int, {str}, numpy.ndarray], 'numpy': numpy.float32(0.5), 'numpy_dtype': numpy.dtype('>i4'),
        'namespace': argparse.Namespace(rate=0.1, deep={'a': argparse.Namespace(b=1)})}


def test_documents_of_plain_classes_come_back(saved, caplog):
    truth = odd_documents()
    step = saved(torch.nn.Linear(2, 2), None, truth)
    for key, value in truth.items():
        got = step.document(key)
        assert got == value, key
        assert type(got) is (float if key == 'numpy' else type(value)), key
    assert step.document('default').default_factory is list
    assert not caplog.records


@pytest.mark.parametrize('array', [
    numpy.arange(6.).reshape(2, 3), numpy.asfortranarray(numpy.arange(6.).reshape(2, 3)),
    numpy.arange(12).reshape(3, 4)[:, ::2], numpy.zeros((0, 3), 'i4'), numpy.array(5),
    numpy.array([True, False]), numpy.arange(3, dtype='>i4'), numpy.ones(2, 'c16'), numpy.ones(2, 'f2')], ids=str)
def test_arrays_come_back(saved, array):
    documents = {'deep': {'a': ([array], torch.ones(2)), 'again': array}}
    got = saved(torch.nn.Linear(2, 2), None, documents).document('deep')
    assert type(got['again']) is numpy.ndarray and got['again'].dtype == array.dtype
    assert numpy.array_equal(got['again'], array) and got['a'][0][0] is got['again']
    got['again'][...] = 0  # as an array that was made, not a view of bytes
    assert torch.equal(got['a'][1], torch.ones(2))


def test_a_document_that_takes_code_is_said_once(ckptfs, caplog):
    receive(ckptfs)
    documents = {'parser': [argparse.ArgumentParser], 'objects': numpy.array([None]), 'fine': 1}
    with snapshots.Snapshotter(torch.nn.Linear(2, 2), None, 'job', ckptfs.store, documents) as snap:
        assert snap.save(1) and snap.save(2)
        said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert len(said) == 2, said
        assert 'parser' in said[0] and 'argparse.ArgumentParser' in said[0]
        assert 'objects' in said[1] and 'numpy.dtype O8' in said[1]
        assert snap.wait_durable(2)


class Calls:
    """Pickles as a call of anything, and then takes a state."""

    def __init__(self, call, *args, state=None):
        self.made = (call, args) if state is None else (call, args, state)

    def __reduce__(self):
        return self.made


def scalar_of_objects():
    """An address, if numpy believed that dtype."""
    dtype = Calls(numpy.dtype, 'O8', False, True, state=(3, '|', None, None, None, 8, 8, 0))
    return Calls(numpy.float64(1).__reduce__()[0], dtype, b'x' * 8)


def array_of(dtype, shape, data):
    """As an array's own pickle, of anything."""
    return Calls(numpy.zeros(1).__reduce__()[0], numpy.ndarray, (0,), b'b',
                 state=(1, shape, dtype, False, data))


HOSTILE = {
    'eval': lambda: Calls(eval, '1'), 'getattr': lambda: Calls(getattr, 1, 'real'),
    'long set': lambda: Calls(set, range(10**12)), 'long list': lambda: Calls(list, range(10**12)),
    'long frozenset': lambda: Calls(frozenset, range(10**12)),
    'large bytes': lambda: Calls(bytearray, 10**12), 'repeated text': lambda: Calls(str, ['a']),
    'large size': lambda: Calls(torch.Size, range(10**12)),
    'other codec': lambda: Calls(__import__('_codecs').encode, 'a', 'rot13'),
    'factory': lambda: Calls(defaultdict, torch.Size), 'factory called': lambda: Calls(int, '9' * 9),
    'counter of a text': lambda: Calls(Counter, 'abc'), 'device': lambda: Calls(torch.device, 'nothing'),
    'complex of texts': lambda: Calls(complex, '1'),
    'a class': lambda: Counter, 'a class in a set': lambda: {torch.Size},
    'another class': lambda: argparse.Namespace,
    'objects': lambda: numpy.array([None]), 'objects as bytes': scalar_of_objects,
    'dtype with fields': lambda: numpy.zeros(1, [('a', 'i4')]),
    'dtype that lies': lambda: Calls(numpy.dtype, 'f8', state=(3, '<', None, None, None, 99, 1, 63)),
    'large array': lambda: array_of(numpy.dtype('f8'), (2**40, 2**40), b''),
    'short array': lambda: array_of(numpy.dtype('f8'), (10**12,), b'x' * 8),
    'negative array': lambda: array_of(numpy.dtype('f8'), (-1,), b'x' * 8),
    'array of text': lambda: array_of(numpy.dtype('f8'), (1,), 'x' * 8),
    'array without dtype': lambda: array_of('f8', (1,), b'x' * 8)}


@pytest.mark.parametrize('name', HOSTILE)
def test_nothing_hostile_is_loaded(name):
    text = pickle.dumps({'value': HOSTILE[name]()}, 2)
    with pytest.raises(pickle.UnpicklingError):
        plain(text, None)


@pytest.mark.parametrize('place', [
    b'collections\nCounter', b'collections\nOrderedDict', b'collections\ndefaultdict',
    b'argparse\nNamespace', b'__builtin__\nset', b'_codecs\nencode', b'torch\ndevice',
    b'numpy\ndtype', b'numpy.core.multiarray\n_reconstruct', b'numpy.core.multiarray\nscalar'])
def test_a_pickle_does_not_write_into_what_makes_values(place):
    """BUILD with a tuple sets attributes."""
    write = b'\x80\x02c' + place + b'\nN}X\x08\x00\x00\x00__init__K\x01s\x86b.'
    before = pickle.dumps(odd_documents(), 2)
    try:
        plain(write, None)
    except pickle.UnpicklingError:
        pass
    assert plain(before, None)['namespace'] == argparse.Namespace(
        rate=0.1, deep={'a': argparse.Namespace(b=1)})
    assert plain(before, None)['counter'] == Counter('aab')
    assert argparse.Namespace(a=1).a == 1


@pytest.mark.parametrize('deep', [
    {('float32', numpy.dtype('f4')), (int, 1)}, frozenset([(str, numpy.dtype('i2'))]), [{(int, (dict,))}],
    {('a', int): {(float,)}}])
def test_values_within_sets_come_back(deep):
    for protocol in 2, 4:
        assert plain(pickle.dumps({'deep': deep}, protocol), None)['deep'] == deep


def test_what_is_noted_on_an_ordered_dict_comes_back():
    noted = OrderedDict(a=1)
    noted.noted = {'dtype': numpy.dtype('f8'), 'type': int, 'space': argparse.Namespace(b=int)}
    assert vars(plain(pickle.dumps(noted, 2), None)) == vars(noted)


def test_tensors_are_written_by_nobody_else():
    tensor = torch.arange(4.)
    pid = b'X\x01\x00\x00\x000Q'
    assert plain(b'\x80\x02' + pid + b'.', lambda _: tensor) is tensor
    assert plain(b'\x80\x02]' + b'(' + pid + pid + b'e.', lambda _: tensor.clone())[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(pickle.UnpicklingError):  # BUILD: set_(source, 0, (9,), (1,)), which would resize it
        plain(b'\x80\x02' + pid + b'(' + pid + b'K\x00K\t\x85K\x01\x85tb.', lambda _: tensor)
    assert tensor.untyped_storage().nbytes() == 16


@pytest.mark.parametrize('text', [
    b'\x80\x02Nr\x00\x00\x00\x04.',  # a memo of a gigabyte
    b'\x80\x02c_codecs\nencode\n}X\x01\x00\x00\x00aK\x01sb.',  # writes into a function
    b'\x80\x02(I1\nI2\ntQ.'])  # a tensor without a number
def test_pickles_of_a_few_bytes_that_would_cost_more(text):
    with pytest.raises(pickle.UnpicklingError):
        plain(text, None)


def test_a_value_that_holds_itself_and_doubles():
    cycle = [numpy.arange(2)]
    cycle.append((cycle, {'again': cycle}))
    got = plain(pickle.dumps(cycle, 2), None)
    assert got[1][0] is got and got[1][1]['again'] is got and got[0].tolist() == [0, 1]
    many = ()
    for _ in range(80):
        many = (many, many)
    plain(pickle.dumps([many, numpy.ones(1)], 2), None)
    found = hyper_parameters(described({'a': many, 'b': [argparse.ArgumentParser]}))
    assert type(found['a']) is tuple and found['b'].what == 'argparse.ArgumentParser'


# ---- random numbers --------------------------------------------------------------------


class Devices:
    """Stands for torch.cuda with generators on the host; there need be no device."""

    def __init__(self, count):
        self.generators = [torch.Generator().manual_seed(n) for n in range(count)]
        self.random = self

    def get_rng_state_all(self):
        """As torch.cuda's."""
        return [one.get_state() for one in self.generators]

    def set_rng_state(self, state, device=1):
        """As torch.cuda's; the current device is 1."""
        self.generators[device].set_state(state)

    def set_rng_state_all(self, states):
        """As torch.cuda's."""
        for device, state in enumerate(states):
            self.set_rng_state(state, device)


@pytest.mark.parametrize('ranks', [1, 2])
def test_random_numbers_of_all_devices(ckptfs, tmp_path, monkeypatch, ranks):
    from transformers.trainer_pt_utils import set_rng_state_for_device
    receive(ckptfs)
    devices = Devices(2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, 'is_available', lambda: True)
        patch.setattr(torch.cuda, 'is_initialized', lambda: True)
        patch.setattr(torch.cuda, 'current_device', lambda: 1)
        patch.setattr(torch.cuda, 'get_rng_state_all', devices.get_rng_state_all)
        random = callbacks.rng_state()
    truth = [torch.rand(2, generator=one) for one in devices.generators]
    model, optimizer = trained()
    documents = {'rng': random, 'scheduler': {}, 'trainer_state': {'global_step': 1}}
    made = [snapshots.Saver(TorchCollector([model], [optimizer], True), 'job', ckptfs.store, documents,
                            rank=rank, world=ranks, job='x') for rank in range(ranks)]
    assert all(one.save(1) for one in made) and all(one.wait_durable(1) for one in made)
    for one in made:
        one.close()
    url = f'ckptfs://{ckptfs.store}/job/1'
    folder = snapshots.transformers.checkpoint(url, str(tmp_path / 'out'))
    for rank in range(ranks):
        name = 'rng_state.pth' if ranks == 1 else f'rng_state_{rank}.pth'
        state = torch.load(f'{folder}/{name}', weights_only=False)
        set_rng_state_for_device('CUDA', SimpleNamespace(random=devices), state, ranks > 1)
        for device in range(2) if ranks > 1 else [1]:
            drawn = torch.rand(2, generator=devices.generators[device])
            assert torch.equal(drawn, truth[device]), device


# ---- dtypes ----------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['float8_e4m3fn', 'float8_e5m2', 'float8_e4m3fnuz',
                                  'float8_e5m2fnuz', 'float8_e8m0fnu', 'uint16', 'complex64'])
def test_dtypes_come_back(saved, name):
    model = torch.nn.Linear(2, 2)
    model.register_buffer('odd', torch.ones(4).to(getattr(torch, name)))
    got = saved(model).weights()['odd']
    assert got.dtype == model.odd.dtype
    assert torch.equal(got.view(torch.uint8), model.odd.view(torch.uint8))


class OneFile:
    """A safetensors file with a tensor of each of some dtypes."""

    def __init__(self, *dtypes):
        header = json.dumps({f'w{n}': {'dtype': dtype, 'shape': [4], 'data_offsets': [0, 4]}
                             for n, dtype in enumerate(dtypes)}).encode()
        self._bytes = len(header).to_bytes(8, 'little') + header + bytes(4)

    def read(self, _, offset, out):
        """As Files' read."""
        out[:] = self._bytes[offset:offset + len(out)]


def test_a_dtype_that_torch_does_not_have_is_said(caplog):
    assert 'F4' not in _DTYPES
    assert list(tensors_of(OneFile('F4', 'U8'), 'model.safetensors')) == ['w1']
    assert 'w0 is left out: this torch has no dtype for F4' in caplog.text
