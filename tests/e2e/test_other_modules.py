# SPDX-License-Identifier: Apache-2.0
"""A saved state with several modules and optimizers: a model's moments are those of its own optimizer, or none."""
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from daemon import step_of


def layers(*sizes):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])))


def trained(*modules, named=False):
    """An optimizer of these modules' parameters, after three steps."""
    parameters = [item for module in modules for item in (module.named_parameters() if named else module.parameters())]
    optimizer = torch.optim.AdamW(parameters, lr=.1)
    for _ in range(3):
        optimizer.zero_grad()
        sum(p.square().sum() * (i + 1) for module in modules for i, p in enumerate(module.parameters())).backward()
        optimizer.step()
    return optimizer


def moments(module, optimizer):
    return {f'{kind}/{name}': optimizer.state[p][kind] for name, p in module.named_parameters()
            for kind in ('exp_avg', 'exp_avg_sq') if p in optimizer.state}


torch.manual_seed(0)
SMALL, HEAD, LARGE = layers(16, 32, 10), nn.Linear(32, 10), layers(10, 32, 16, 2)
EVEN, OTHER, LONGER, TWIN = layers(16, 16, 10), layers(16, 16, 1), layers(16, 16, 10, 2), layers(16, 16, 10)
BODY, CRITERION = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 10, bias=False)), nn.Linear(32, 10, bias=False)
OF = {name: trained(module) for name, module in
      {'head': HEAD, 'large': LARGE, 'even': EVEN, 'other': OTHER, 'twin': TWIN, 'small': SMALL}.items()}
OF_NAMES = {'other': trained(OTHER, named=True), 'longer': trained(LONGER, named=True), 'even': trained(EVEN, named=True)}
OF_BOTH = trained(BODY[0], CRITERION)

# name: (what torch.save is given, the model, its moments, more words of adopt, what adopt says)
TORCH = {
    'probe': ({'model': SMALL.state_dict(), 'head': HEAD.state_dict(), 'optimizer': OF['head'].state_dict()}, SMALL, {}, (),
              "optimizer of 'head'"),
    'probe_by_names': ({'model': EVEN.state_dict(), 'predictor': OTHER.state_dict(), 'optimizer': OF_NAMES['other'].state_dict()},
                       EVEN, {}, (), "optimizer of 'predictor'"),
    'decoder': ({'encoder': SMALL.state_dict(), 'decoder': LARGE.state_dict(), 'optimizer': OF['large'].state_dict()}, SMALL, {},
                ('--model', 'encoder'), "optimizer of 'decoder'"),
    'decoder_by_names': ({'encoder': EVEN.state_dict(), 'decoder': LONGER.state_dict(),
                          'optimizer': OF_NAMES['longer'].state_dict()}, EVEN, {}, ('--model', 'encoder'), "optimizer of 'decoder'"),
    'criterion': ({'model': BODY.state_dict(), 'criterion': CRITERION.state_dict(), 'optimizer': OF_BOTH.state_dict()}, BODY, {}, (),
                  "'criterion'"),
    'own': ({'model': SMALL.state_dict(), 'head': nn.Linear(7, 3).state_dict(), 'optimizer': OF['small'].state_dict()}, SMALL,
            moments(SMALL, OF['small']), (), ''),
    'best': ({'model': EVEN.state_dict(), 'best_model': TWIN.state_dict(), 'optimizer': OF_NAMES['even'].state_dict()}, EVEN,
             moments(EVEN, OF_NAMES['even']), (), ''),
    'called_as_an_average': ({'source': EVEN.state_dict(), 'target': TWIN.state_dict(), 'optimizer_target': OF['twin'].state_dict()},
                             EVEN, {}, (), "optimizer of 'target'"),
}

# name: ({key: (module, its optimizer's key and optimizer)}, the model's key, its moments, more words)
DCP = {
    'actor_critic': ({'model': (EVEN, 'optim', 'even'), 'critic': (OTHER, 'critic_optim', 'other')}, 'model', True, ()),
    'critic_alone': ({'model': (EVEN, None, None), 'critic': (OTHER, 'critic_optim', 'other')}, 'model', False, ()),
    'twin': ({'model': (EVEN, None, None), 'critic': (TWIN, 'critic_optim', 'twin')}, 'model', False, ()),
    'student': ({'model': (EVEN, None, None), 'student': (TWIN, 'optimizer', 'twin')}, 'model', False, ()),
    'called_as_an_average': ({'source': (EVEN, None, None), 'target': (TWIN, 'optimizer_target', 'twin')}, 'source', False, ()),
    'gan': ({'generator': (EVEN, 'optim_g', 'even'), 'discriminator': (OTHER, 'optim_d', 'other')}, 'generator', True,
            ('--model', 'generator')),
    'both_of_a_kind': ({'generator': (EVEN, 'optim_g', 'even'), 'discriminator': (TWIN, 'optim_d', 'twin')}, 'generator', True,
                       ('--model', 'generator')),
    'nested': ({'actor.model': (EVEN, 'actor.optim', 'even'), 'critic.model': (OTHER, 'critic.optim', 'other')}, 'actor.model', True,
               ('--model', 'actor.model')),
}


def put(state, key, value):
    *above, last = key.split('.')
    for word in above:
        state = state.setdefault(word, {})
    state[last] = value


def check(ckptfs, run, model, wanted):
    view = os.path.join(step_of(ckptfs.mount(), run), 'view', 'tp1', 'rank0')
    weights = load_file(os.path.join(view, 'model.safetensors'))
    assert sorted(weights) == sorted(model.state_dict())
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    found = load_file(os.path.join(view, 'optimizer.safetensors'))
    assert sorted(key for key in found if key.startswith('exp_avg')) == sorted(wanted)
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


@pytest.mark.parametrize('form', TORCH)
def test_an_optimizer_of_a_torch_file(ckptfs, tmp_path, form):
    state, model, wanted, words, says = TORCH[form]
    torch.save(state, tmp_path / 'ckpt.pt')
    said = ckptfs.adopt(tmp_path / 'ckpt.pt', 'run', extra=words).stderr
    check(ckptfs, 'run', model, wanted)
    assert says in said and ('optimizer' in said) == bool(says), said


@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize('form', DCP)
def test_an_optimizer_of_a_dcp_directory(ckptfs, tmp_path, form, flat):
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    modules, key, own, words = DCP[form]
    state = {}
    for place, (module, optimizer_key, optimizer) in modules.items():
        if optimizer_key is None:
            put(state, place, module.state_dict())
            continue
        weights, states = get_state_dict(module, OF[optimizer],
                                         options=StateDictOptions(flatten_optimizer_state_dict=flat))
        put(state, place, weights)
        put(state, optimizer_key, states)
    dcp.save(state, checkpoint_id=str(tmp_path / 'run' / 'step-1'), no_dist=True)
    said = ckptfs.adopt(tmp_path / 'run', 'run', extra=words).stderr
    model, _, optimizer = modules[key]
    check(ckptfs, 'run', model, moments(model, OF[optimizer]) if own else {})
    assert all(f"optimizer of '{place}'" in said for place in modules if place != key), said


@pytest.mark.parametrize('form', ['named', 'numbered', 'dcp', 'dcp_named'])
def test_an_average_under_an_ordinary_key(ckptfs, tmp_path, form):
    """torch's AveragedModel and mmengine's keep a counter: no optimizer has trained what they hold."""
    average = torch.optim.swa_utils.AveragedModel(EVEN)
    average.update_parameters(EVEN)
    counted = average.state_dict()
    for name, state in {'torch': counted, 'mmengine': {'steps' if key == 'n_averaged' else key: value
                                                       for key, value in counted.items()}}.items():
        optimizer = OF_NAMES['even'] if 'named' in form else OF['even']
        whole = {'model': state, 'optimizer': optimizer.state_dict(), 'epoch': 3}
        path = tmp_path / f'{name}.pt'
        if form.startswith('dcp'):
            path = tmp_path / name / 'step-1'
            dcp.save(whole, checkpoint_id=str(path), no_dist=True)
        else:
            torch.save(whole, path)
        said = ckptfs.adopt(path, name).stderr
        assert 'the model is an average of weights, which an optimizer does not train' in said
        view = os.path.join(step_of(ckptfs.mount(), name), 'view', 'tp1', 'rank0')
        assert not [key for key in load_file(os.path.join(view, 'optimizer.safetensors')) if key.startswith(('exp_avg', 'master'))]
        weights = load_file(os.path.join(view, 'model.safetensors'))
        assert all(torch.equal(weights[key], value) for key, value in state.items())


@pytest.mark.parametrize('parts', [('encoder', 'optimizer'), ('policy', 'optim'), ('state', 'optimizer'), ('model', 'optimizers'),
                                   ('optimizer', 'scheduler')], ids='-'.join)
def test_a_module_whose_part_is_called_optimizer(ckptfs, tmp_path, parts):
    state = dict(nn.ModuleDict({name: nn.Linear(4, 5) for name in parts}).state_dict())
    for form, whole in {'bare': state, 'under_a_key': {'state_dict': state, 'epoch': 3}}.items():
        torch.save(whole, tmp_path / f'{form}.pt')
        said = ckptfs.adopt(tmp_path / f'{form}.pt', form).stderr
        assert 'left out' not in said
        view = os.path.join(step_of(ckptfs.mount(), form), 'view', 'tp1', 'rank0')
        found = load_file(os.path.join(view, 'model.safetensors'))
        assert sorted(found) == sorted(state) and all(torch.equal(found[key], value) for key, value in state.items())


def test_two_modules_that_nothing_tells_apart(ckptfs, tmp_path):
    torch.save({'actor': EVEN.state_dict(), 'critic': TWIN.state_dict(), 'optimizer': OF_NAMES['even'].state_dict()},
               tmp_path / 'ckpt.pt')
    said = ckptfs.adopt(tmp_path / 'ckpt.pt', 'run', extra=('--model', 'actor')).stderr
    check(ckptfs, 'run', EVEN, {})
    assert "'critic' has the names and shapes of 'actor'" in said, said


def test_names_of_a_module_that_the_model_holds(ckptfs, tmp_path):
    """`self.model = ...` and an optimizer of self.model.named_parameters()."""
    for name, before in {'one': ('net.',), 'two': ('net.', 'copy.')}.items():
        weights = {f'{part}{key}': value.clone() for part in before for key, value in EVEN.state_dict().items()}
        torch.save({'state_dict': weights, 'optimizer': OF_NAMES['even'].state_dict()}, tmp_path / f'{name}.pt')
        ckptfs.adopt(tmp_path / f'{name}.pt', name)
        view = os.path.join(step_of(ckptfs.mount(), name), 'view', 'tp1', 'rank0')
        found = load_file(os.path.join(view, 'optimizer.safetensors'))
        wanted = moments(EVEN, OF_NAMES['even']) if name == 'one' else {}
        assert {key for key in found if key.startswith('exp_avg')} == {key.replace('/', '/net.') for key in wanted}
        assert all(torch.equal(found[key.replace('/', '/net.')], value) for key, value in wanted.items())


def test_numbers_that_look_like_names(ckptfs, tmp_path):
    """Parameters of a ParameterList are called "0", "1", ...; optimizer.state_dict() has numbers of its own."""
    module = nn.ParameterList([nn.Parameter(torch.randn(4, 4 + i)) for i in range(3)])
    optimizer = torch.optim.AdamW([module[2], module[0], module[1]], lr=.1)
    sum(p.square().sum() for p in module).backward()
    optimizer.step()
    dcp.save({'model': module.state_dict(), 'optim': optimizer.state_dict()}, checkpoint_id=str(tmp_path / 'run' / 'step-1'),
             no_dist=True)
    ckptfs.adopt(tmp_path / 'run', 'run')
    check(ckptfs, 'run', module, moments(module, optimizer))


def flattened(value, path=''):
    """As a script does it: texts of keys and places, joined by dots."""
    if not isinstance(value, (dict, list)) or not value:
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {name: inner for key, one in items for name, inner in flattened(one, f'{path}.{key}').items()}


LIST = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(3)])
FIRST_LAST = trained(nn.ParameterList([LIST[2], LIST[0], LIST[1]]))


@pytest.mark.parametrize('groups', ['whole', 'without_params', 'one_a_parameter'])
@pytest.mark.parametrize('form', ['dcp', 'dcp_nested', 'torch', 'torch_states'])
def test_numbers_that_a_script_wrote_as_texts(ckptfs, tmp_path, form, groups):
    """Its model's parameters are called "0", "1", "2", and the optimizer had them in another order."""
    state = FIRST_LAST.state_dict()
    if groups == 'one_a_parameter':
        state['param_groups'] = [{**state['param_groups'][0], 'params': [i]} for i in range(3)]
    if groups == 'without_params' and form.startswith('dcp'):
        for group in state['param_groups']:
            del group['params']
    texts = {**state, 'state': {str(number): one for number, one in state['state'].items()}}
    if form != 'torch_states':
        texts['param_groups'] = [{**one, 'params': [str(i) for i in one['params']]} if 'params' in one else one
                                 for one in state['param_groups']]
    if form.startswith('torch'):
        torch.save({'model': LIST.state_dict(), 'optimizer': texts}, tmp_path / 'ckpt.pt')
        said = ckptfs.adopt(tmp_path / 'ckpt.pt', 'run').stderr
    else:
        whole = {'model': LIST.state_dict(), 'optim': texts}
        if form == 'dcp':
            whole = {key[1:]: value for key, value in flattened(whole).items()}
        dcp.save(whole, checkpoint_id=str(tmp_path / 'run' / 'step-1'), no_dist=True)
        said = ckptfs.adopt(tmp_path / 'run', 'run').stderr
    check(ckptfs, 'run', LIST, {})
    assert 'optimizer' in said, said


def test_two_models_of_accelerate(ckptfs, tmp_path):
    """FSDP's folders are numbered as the models were prepared: the first is the step's."""
    for number, module in enumerate((EVEN, OTHER)):
        optimizer = OF['even' if number == 0 else 'other']
        weights, states = get_state_dict(module, optimizer)
        dcp.save({'model': weights}, checkpoint_id=str(tmp_path / 'step_1' / f'pytorch_model_fsdp_{number}'), no_dist=True)
        dcp.save({'optimizer': states}, checkpoint_id=str(tmp_path / 'step_1' / f'optimizer_{number}'), no_dist=True)
    said = ckptfs.adopt(tmp_path / 'step_1', 'run').stderr
    check(ckptfs, 'run', EVEN, moments(EVEN, OF['even']))
    assert "'pytorch_model_fsdp_1/'" in said and "'optimizer_1/'" in said, said


def test_numbers_need_the_optimizers_order(ckptfs, tmp_path):
    """A flat optimizer of DCP does not say in which order it had its parameters."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    for flat in (False, True):
        weights, states = get_state_dict(EVEN, OF['even'], options=StateDictOptions(flatten_optimizer_state_dict=flat))
        dcp.save({'model': weights, 'optim': states}, checkpoint_id=str(tmp_path / str(flat) / 'step-1'), no_dist=True)
        ckptfs.adopt(tmp_path / str(flat), str(flat))
        done = ckptfs.run('export', '--store', ckptfs.store, f'{flat}/step-1', 'tp1_numbered/dcp', tmp_path / f'out{flat}', check=False)
        assert (done.returncode == 0) == (not flat), done.stderr
        assert not flat or 'in which order' in done.stderr, done.stderr


def test_an_object_that_is_not_understood_is_left_out_alone(ckptfs, tmp_path):
    import pickle
    path = tmp_path / 'run' / 'step-1'
    dcp.save({'model': EVEN.state_dict(), 'loader': {'order': 'text', 'epoch': 3}}, checkpoint_id=str(path), no_dist=True)
    with open(path / '.metadata', 'rb') as file:
        stored = pickle.load(file).storage_data
    place, = (info for index, info in stored.items() if index.fqn == 'loader.order')
    with open(path / place.relative_path, 'r+b') as file:
        file.seek(place.offset)
        file.write(b'\0' * place.length)
    said = ckptfs.adopt(tmp_path / 'run', 'run').stderr
    check(ckptfs, 'run', EVEN, {})
    assert "'loader.order'" in said and "'loader.epoch'" not in said, said


def test_an_optimizer_in_the_file_of_the_weights(ckptfs, tmp_path):
    """Also in a directory; --weights-only opens none."""
    for name in ('inside', 'broken'):
        (tmp_path / name).mkdir()
    torch.save({'model': SMALL.state_dict(), 'optimizer': OF['small'].state_dict()}, tmp_path / 'inside' / 'pytorch_model.bin')
    ckptfs.adopt(tmp_path / 'inside', 'inside')
    check(ckptfs, 'inside', SMALL, moments(SMALL, OF['small']))
    torch.save(SMALL.state_dict(), tmp_path / 'broken' / 'pytorch_model.bin')
    (tmp_path / 'broken' / 'optimizer.pt').write_bytes(b'cut off')
    assert ckptfs.adopt(tmp_path / 'broken', 'broken', check=False).returncode == 4
    ckptfs.adopt(tmp_path / 'broken', 'broken', extra=('--weights-only',))
    check(ckptfs, 'broken', SMALL, {})
