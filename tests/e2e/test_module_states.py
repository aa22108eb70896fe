# SPDX-License-Identifier: Apache-2.0
"""What a module's state dict has beside its parameters and buffers is in a snapshot, or refuses it by name."""
import ckptfs as snapshots
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptfs import state
from ckptfs.saved_values import SavedValues
from test_dcp_beside import BESIDE, differing, other
from test_dcp_beside import MODEL as BESIDE_MODEL
from test_save_options import receive
from test_snapshot_values import SIZE, saved_fixture  # noqa: F401 (a fixture)
from torch.distributed.checkpoint.state_dict import get_state_dict


@pytest.mark.parametrize('name', ['_forward_module', '_orig_mod', '_checkpoint_wrapped_module'])
def test_a_child_that_is_called_as_a_wrappers_is_a_child(saved, name):
    model = torch.nn.Module()
    model.add_module(name, torch.nn.Linear(SIZE, SIZE))
    model.norm = torch.nn.BatchNorm1d(SIZE)
    model.register_buffer('scale', torch.randn(SIZE))
    held = saved(torch.nn.Sequential(model)).model()
    assert sorted(held) == sorted(torch.nn.Sequential(model).state_dict())
    assert torch.equal(held['0.scale'], model.scale)


class Scaled(torch.nn.Linear):
    """Its state dict has what it does not register, as those of quantised layers do."""

    def __init__(self):
        super().__init__(SIZE, SIZE)
        self.absmax = torch.randn(SIZE)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + 'weight.absmax'] = self.absmax


def test_tensors_that_a_module_does_not_register_are_held(saved):
    model = torch.nn.Sequential(Scaled(), torch.nn.Linear(SIZE, 2))
    model._register_state_dict_hook(lambda module, state, prefix, _: state.update({f'{prefix}made': module[0].absmax * 2}))
    held = saved(model).model()
    assert sorted(held) == sorted(model.state_dict())
    assert all(torch.equal(held[key], value) for key, value in model.state_dict().items())


def test_packed_parameters_are_refused_by_name(ckptfs):
    model = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE)), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(TypeError, match='0._packed_params.dtype stands in state_dict.., but is neither registered by its module'):
        snapshots.Snapshotter(model, None, 'job', ckptfs.store)


class Turned(torch.nn.Linear):
    """Its state dict has its weight transposed."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + 'weight'] = destination[prefix + 'weight'].t()


def test_a_parameter_in_another_form_is_refused_by_name(ckptfs):
    with pytest.raises(TypeError, match='0.weight stands in state_dict.. in another form'):
        snapshots.Snapshotter(torch.nn.Sequential(Turned(SIZE, SIZE)), None, 'job', ckptfs.store)


def test_what_an_instance_adds_and_prepares_is_held(saved):
    """state_dict replaced on the instance (adapters' old recipe), a buffer that a pre-hook brings up to date."""
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE))
    model.register_buffer('count', torch.zeros(2))
    model.register_state_dict_pre_hook(lambda module, *_: module.count.fill_(7))
    torchs = model.state_dict
    model.state_dict = lambda *words, **more: {**torchs(*words, **more), 'scale': torch.full((2,), 3.)}
    held = saved(model).model()
    assert held['count'].tolist() == [7, 7] and held['scale'].tolist() == [3, 3]
    assert sorted(held) == sorted(model.state_dict())


class Counting(torch.optim.SGD):
    """Its state dict has a tensor of its own, as those of averaging and lookahead optimizers do."""

    def state_dict(self):
        return {**super().state_dict(), 'slow': torch.arange(3.), 'step': 17}


def test_what_an_optimizer_adds_to_its_state_dict_is_held(saved):
    model = torch.nn.Linear(SIZE, SIZE)
    hooked = torch.optim.Adam([model.bias])
    hooked.register_state_dict_post_hook(lambda _, given: {**given, 'ema': {'x': torch.ones(3)}})
    step = saved(model, [Counting([model.weight], .1), hooked])
    first, second = step.optimizer('0'), step.optimizer('1')
    assert first['slow'].tolist() == [0, 1, 2] and first['step'] == 17
    assert sorted(second) == ['ema', 'param_groups', 'state'] and second['ema']['x'].tolist() == [1, 1, 1]
    assert not any(key.startswith('ckptfs.') for key in step.documents())


class Named(torch.optim.SGD):
    """Its states have the names that it is given."""

    def __init__(self, parameters, kinds):
        super().__init__(parameters, .1)
        for group in self.param_groups:
            for parameter in group['params']:
                self.state[parameter] = {kind: torch.randn_like(parameter) for kind in kinds}


def test_names_that_could_be_taken_for_others_come_back(saved):
    """A parameter that is called as the files' mark of their format; names of parameters and kinds like labels."""
    model = torch.nn.Module()
    for name in 'pt', 'format', '0/w', 'exp_avg/w', 'w':
        model.register_parameter(name, torch.nn.Parameter(torch.randn(SIZE, 2)))
    optimizers = [Named(model.parameters(), ['exp_avg', '0']) for _ in range(2)]
    step = saved(model, optimizers)
    assert sorted(step.model()) == sorted(model.state_dict())
    assert all(torch.equal(step.model()[name], value) for name, value in model.state_dict().items())
    for label, optimizer in zip('01', optimizers):
        held = step.optimizer(label)['state']
        for number, states in optimizer.state_dict()['state'].items():
            assert sorted(held[number]) == sorted(states)
            assert all(torch.equal(held[number][kind], value) for kind, value in states.items())


def test_a_kind_with_a_slash_is_no_step(ckptfs, caplog):
    receive(ckptfs)
    model = torch.nn.Linear(SIZE, SIZE)
    with snapshots.Snapshotter(model, Named(model.parameters(), ['a/b']), 'job', ckptfs.store) as snap:
        assert not snap.save(0)
    assert "states are called 'a/b'" in caplog.text


def test_names_of_our_own_documents_are_refused(ckptfs):
    with pytest.raises(ValueError, match='a document cannot be called ckptfs.dcp'):
        snapshots.Snapshotter(torch.nn.Linear(2, 2), None, 'job', ckptfs.store, {'ckptfs.dcp': 1})


def test_a_function_may_return_an_object_with_a_state_dict(saved):
    model = torch.nn.Linear(SIZE, SIZE)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), .1), 3)
    assert saved(model, documents={'scheduler': lambda: scheduler}).document('scheduler')['step_size'] == 3


class Numbered(torch.optim.SGD):
    """A state that is a Python number, as transformers' Adafactor has it."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]['params']:
            self.state[parameter] = {'step': self.state[parameter].get('step', 0) + 1, 'moment': torch.ones_like(parameter)}


class Extra(torch.nn.Linear):
    """Its extra state is a dict."""
    value = None

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, value):
        self.value = value


def trained_extra(value):
    """A state dict of a model and its optimizer; the model's extra state."""
    model = Extra(SIZE, SIZE)
    model.value = value
    optimizer = Numbered(model.parameters(), .1)
    model(torch.ones(1, SIZE)).sum().backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {'model': of_model, 'optim': of_optimizer}


def test_dcp_takes_numbers_and_extra_states_back(ckptfs):
    receive(ckptfs)
    url = f'ckptfs://{ckptfs.store}/job/0'
    dcp.save(trained_extra({'x': torch.full((2,), 7.), 'y': [1, 2]}), checkpoint_id=url)
    into = trained_extra({'x': torch.zeros(2), 'y': [0, 0]})
    into['optim']['state']['weight']['step'] = 5
    dcp.load(into, checkpoint_id=url)
    assert into['model']['_extra_state']['x'].tolist() == [7, 7] and into['model']['_extra_state']['y'] == [1, 2]
    assert into['optim']['state']['weight']['step'] == 1


@pytest.mark.parametrize('first', ['ema', 'cfg'])
def test_the_model_is_not_what_stands_first_in_another_dict(ckptfs, first):
    """An average with its decay, or a configuration with a tensor, before the model."""
    receive(ckptfs)
    given = trained_extra(None)
    del given['model']['_extra_state']
    other = {'ema': {name: one + 1 for name, one in given['model'].items()}, 'cfg': {'dim': 3, 't': torch.ones(2)}}[first]
    url = f'ckptfs://{ckptfs.store}/{first}/0'
    dcp.save({first: {'model': other, 'decay': .9}, **given}, checkpoint_id=url)
    with snapshots.SavedStep(url) as step:
        assert sorted(step.model()) == ['bias', 'weight'] and torch.equal(step.model()['weight'], given['model']['weight'])
        held = step.document(f'{first}.model')
        assert all(torch.equal(held[name], one) for name, one in other.items() if torch.is_tensor(one))


def emptied(value):
    """The same with other values."""
    if torch.is_tensor(value):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(one) for key, one in value.items()}
    return [emptied(one) for one in value] if isinstance(value, list) else value


def differ(a, b):
    if torch.is_tensor(a):
        return not torch.equal(a, b)
    return a.keys() != b.keys() or any(differ(a[key], b[key]) for key in a) if isinstance(a, dict) else a != b


@pytest.mark.parametrize('spelling', ['opt', 'nested', 'beside', 'number beside', 'bare'])
def test_dcp_loads_under_the_keys_of_the_save(ckptfs, spelling):
    """A tensor beside the model may be called as a parameter is."""
    receive(ckptfs)
    given = trained_extra(None)
    del given['model']['_extra_state']
    more = {**given['model'], 'scale': torch.ones(3)}
    given = {'opt': {'model': given['model'], 'opt': given['optim']}, 'nested': {'app': given},
             'beside': {**given, 'model': more, 'scale': torch.full((3,), 7.)},
             'number beside': {**given, 'model': more, 'other': 3, 'bias': 5}, 'bare': given['model']}[spelling]
    url = f'ckptfs://{ckptfs.store}/job/0'
    dcp.save(given, checkpoint_id=url)
    into = emptied(given)
    dcp.load(into, checkpoint_id=url)
    assert not differ(given, into)


def test_each_rank_loads_its_own_keys():
    """torchtitan's dataloader stands under dp_rank_N of each rank alone."""
    pickled = [state.document({f'dp_rank_{rank}': {'position': 10 + rank}})[0].hex() for rank in range(2)]
    documents = [{'key': 'dataloader', 'scope': 'dp1' * rank, 'pickle': one, 'tensors': []} for rank, one in enumerate(pickled)]
    documents += [{**documents[0], 'scope': 'dp2', 'pickle': state.document({'dp_rank_0': {'position': 5}})[0].hex()}]  # rank 0's comes first
    values = SavedValues({'documents': documents}, lambda *_: None).values
    assert values == {'dataloader.dp_rank_0.position': 10, 'dataloader.dp_rank_1.position': 11}


@pytest.mark.parametrize('what', [*BESIDE, 'states', 'rest'])
def test_what_lies_beside_the_model_comes_back_without_a_mount(ckptfs, tmp_path, what):
    hyper = {'lr': 0.5, 'params': list(BESIDE_MODEL)}
    more = {'states': {'optim': {'state': {name: {'pair': (1, 2), 'step': 3} for name in BESIDE_MODEL}, 'param_groups': [hyper]}},
            'rest': {'optim': {'state': {'z.weight': {'exp_avg': torch.ones(2)}}, 'param_groups': [hyper]}}}
    tree = {'model': BESIDE_MODEL, **{**BESIDE, **more}[what]}
    dcp.save(tree, checkpoint_id=str(tmp_path / 'run' / 'step-1'), no_dist=True)
    ckptfs.adopt(str(tmp_path / 'run'), 'run')
    got = other(tree)
    dcp.load(got, checkpoint_id=f'ckptfs://{ckptfs.store}/run/step-1', no_dist=True)
    assert not differing(got, tree), differing(got, tree)


@pytest.mark.parametrize('state', [
    {'net': {'a': torch.ones(3)}, 'scaler': None, 'step': 3}, {'model': {'a': torch.ones(3)}, 'args': {'model': 'llama', 'heads': 4, 'resume': None}},
    {'model': None, 'net': {'a': torch.ones(3)}}], ids=['none', 'options', 'no_model'])
def test_what_is_none_comes_back_through_dcp(ckptfs, tmp_path, state):
    """As from torch's own files; a dict of options may have one that is called `model`."""
    receive(ckptfs)
    dcp.save(state, checkpoint_id=str(tmp_path / 'own'), no_dist=True)
    dcp.save(state, checkpoint_id=f'ckptfs://{ckptfs.store}/job/1', no_dist=True)

    def empty(value):
        if isinstance(value, dict):
            return {key: empty(one) for key, one in value.items()}
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else 'another'
    loaded = []
    for place in (str(tmp_path / 'own'), f'ckptfs://{ckptfs.store}/job/1'):
        into = empty(state)
        dcp.load(into, checkpoint_id=place, no_dist=True)
        loaded.append(repr(into))
    assert loaded[0] == loaded[1] == repr(state), loaded


def test_values_are_loaded_into_host_memory_whatever_the_default_device(saved):
    """A large model is made without memory, and given what was saved."""
    model = torch.nn.Linear(SIZE, SIZE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(SIZE)).sum().backward()
    optimizer.step()
    step = saved(model, optimizer)
    with torch.device('meta'):
        other = torch.nn.Linear(SIZE, SIZE)
        other.load_state_dict(step.model(), assign=True)
        states = step.optimizer()['state']
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(states[0]['exp_avg'], optimizer.state[model.weight]['exp_avg'])


def test_of_tied_weights_the_parameters_name_is_kept(saved):
    """Trainer writes that one, and readers of a part of the model look for it."""
    model = torch.nn.ModuleDict({'words': torch.nn.Embedding(SIZE, SIZE), 'head': torch.nn.Linear(SIZE, SIZE, bias=False)})
    model['head'].weight = model['words'].weight
    step = saved(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(step.weights()) == ['words.weight'] and set(step.model()) == {'words.weight', 'head.weight'}
