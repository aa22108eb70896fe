# SPDX-License-Identifier: Apache-2.0
"""Names that training code gives the parts of a DCP state dict: the model is never taken for its
average, an optimizer never for nothing."""
import glob
import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from daemon import step_of

MODEL = {'a.weight': torch.arange(12.).reshape(3, 4), 'b.bias': torch.arange(5.) + 100}
EMA = {name: -tensor - 1 for name, tensor in MODEL.items()}


def optimizer(names=tuple(MODEL), base=0.25):
    """As get_optimizer_state_dict has it."""
    return {'state': {name: {'step': torch.tensor(2.), 'exp_avg': MODEL[name] + base, 'exp_avg_sq': MODEL[name] * base}
                      for name in names},
            'param_groups': [{'lr': 0.5, 'betas': (0.9, 0.99), 'params': list(names)}]}


def adopt(ckptfs, folder, state, *more, **options):
    dcp.save(state, checkpoint_id=str(folder / 'step-1'), no_dist=True)
    return ckptfs.adopt(str(folder), 'run', extra=more, **options)


def weights(ckptfs, file='model'):
    path = os.path.join(step_of(ckptfs.mount(), 'run'), 'view', 'tp1', 'rank0', f'{file}.safetensors')
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def same(got, want):
    return set(got) == set(want) and all(torch.equal(got[name], tensor) for name, tensor in want.items())


AVERAGED = {
    'ema': {'model': MODEL, 'ema': EMA},
    'ema_of_the_model': {'model': MODEL, 'ema': {'model': EMA}},
    'averaged': {'model': MODEL, 'averaged': EMA},
    'net': {'net': MODEL, 'ema': EMA},
    'app': {'app': {'model': MODEL, 'ema': EMA}},
    'model_ema': {'state_dict': MODEL, 'model_ema': EMA},
    'avg_model': {'module': MODEL, 'avg_model': {'module': EMA}},
    'flat': {f'{top}.{name}': tensor for top, part in (('ema.model', EMA), ('model', MODEL)) for name, tensor in part.items()},
    'torchtitan': {**MODEL, 'ema': EMA},
}


@pytest.mark.parametrize('trained', [True, False])
@pytest.mark.parametrize('shape', AVERAGED)
def test_an_average_of_the_weights_is_not_the_model(ckptfs, tmp_path, shape, trained):
    adopt(ckptfs, tmp_path, {**AVERAGED[shape], **({'optim': optimizer()} if trained else {})})
    flat = shape == 'flat' and not trained  # its keys are all that anybody says: names with dots
    assert same(weights(ckptfs), AVERAGED['flat'] if flat else MODEL)


def test_two_models_of_the_same_names_are_refused(ckptfs, tmp_path):
    done = adopt(ckptfs, tmp_path, {'left': {'model': MODEL}, 'right': {'model': EMA}, 'optim': optimizer()}, check=False)
    assert done.returncode != 0 and "'left.model'" in done.stderr and "'right.model'" in done.stderr, done.stderr


@pytest.mark.parametrize('optimizers', [
    {'optim_muon': optimizer(('a.weight',)), 'optim_adamw': optimizer(('b.bias',))},
    {'optimizers': [optimizer()]},
    {'optimizers': {'muon': optimizer(('a.weight',)), 'adam': optimizer(('b.bias',))}},
], ids=['words', 'list', 'dict'])
def test_every_optimizer_is_seen(ckptfs, tmp_path, optimizers):
    adopt(ckptfs, tmp_path, {'model': MODEL, **optimizers})
    got = weights(ckptfs, 'optimizer')
    for name, states in optimizer()['state'].items():
        assert torch.equal(got[f'exp_avg/{name}'], states['exp_avg']), name


def test_an_optimizer_without_a_word_for_one_is_told_by_its_groups(ckptfs, tmp_path):
    adopt(ckptfs, tmp_path, {'weights_of_it': MODEL, 'adam': optimizer()})
    assert same(weights(ckptfs), MODEL) and 'exp_avg/a.weight' in weights(ckptfs, 'optimizer')


def test_states_without_groups_and_without_a_word_for_an_optimizer_are_told(ckptfs, tmp_path):
    done = adopt(ckptfs, tmp_path, {'model': MODEL, 'adam': {'state': optimizer()['state']}})
    assert "'adam." in done.stderr and 'nothing before it names an optimizer' in done.stderr, done.stderr
    assert same(weights(ckptfs), MODEL)


def test_lists_and_what_is_no_weight_stay(ckptfs, tmp_path):
    mixed = [torch.ones(2), 5, {'deep': [1, torch.zeros(3)]}]
    adopt(ckptfs, tmp_path, {**MODEL, 'rng': torch.arange(7, dtype=torch.uint8), 'notes': {'list': mixed},
                             'optimizer': optimizer()})
    assert same(weights(ckptfs), MODEL)
    view = os.path.join(step_of(ckptfs.mount(), 'run'), 'view', 'tp1', 'dcp')
    out = tmp_path / 'whole.pt'
    dcp_to_torch_save(view, out)
    got = torch.load(out)['notes']['list']
    assert isinstance(got, list) and got[1] == 5 and torch.equal(got[0], mixed[0]), got
    assert isinstance(got[2]['deep'], list) and torch.equal(got[2]['deep'][1], torch.zeros(3))


def save_by_ranks(folder, parts):
    """Rows of model.w by ranks that save without collectives: [(first row, tensor)]."""
    step = folder / 'step-1'
    step.mkdir(parents=True)
    for rank, (first, part) in enumerate(parts):
        own = folder / f'own{rank}'
        dcp.save({'model': {'w': part}}, checkpoint_id=str(own), no_dist=True)
        metadata = pickle.loads((own / '.metadata').read_bytes())
        metadata.state_dict_metadata['model.w'].size = torch.Size([8, 4])
        metadata.state_dict_metadata['model.w'].chunks[0].offsets = torch.Size([first, 0])
        stored, = metadata.storage_data.values()
        stored.relative_path = f'__{rank}_0.distcp'
        metadata.storage_data = {MetadataIndex('model.w', torch.Size([first, 0])): stored}
        (step / f'__{rank}.metadata').write_bytes(pickle.dumps(metadata))
        (own / '__0_0.distcp').rename(step / stored.relative_path)
        shutil.rmtree(own)


def loaded(ckptfs, state):
    """Returns what torch.distributed.checkpoint fills a dict of these keys with, through the
    view."""
    view = os.path.join(step_of(ckptfs.mount(), 'run'), 'view', 'tp1', 'dcp')
    dcp.load(state, checkpoint_id=view, no_dist=True)
    return state


@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize('lr', [torch.tensor(0.1), torch.tensor(0.3, dtype=torch.float64), torch.tensor([0.2]),
                                torch.tensor(0.7, dtype=torch.bfloat16), torch.tensor(0.7, dtype=torch.float16),
                                torch.tensor(-3, dtype=torch.int16), torch.tensor(200, dtype=torch.uint8)],
                         ids=lambda lr: f'{lr.dtype}{list(lr.shape)}')
def test_hyper_parameters_that_are_tensors_stay_so(ckptfs, tmp_path, lr, flat):
    def state(value, word):
        groups = ({f'param_groups.{name}.{key}': one for name in MODEL for key, one in (('lr', value), ('name', word))}
                  if flat else {'param_groups': [{'lr': value, 'name': word, 'params': list(MODEL)}]})
        states = {f'state.{name}.exp_avg': tensor + 1 for name, tensor in MODEL.items()}
        nested = {'state': {name: {'exp_avg': tensor + 1} for name, tensor in MODEL.items()}}
        return {'model': {name: tensor.clone() for name, tensor in MODEL.items()},
                'optim': {**(states if flat else nested), **groups}}
    adopt(ckptfs, tmp_path, state(lr, 'first'))
    group = loaded(ckptfs, state(torch.zeros_like(lr), ''))['optim']
    group = {key.split('.')[-1]: one for key, one in group.items()} if flat else group['param_groups'][0]
    assert group['name'] == 'first' and torch.equal(group['lr'], lr), group


def test_counts_beyond_what_fp32_holds_stay_whole(ckptfs, tmp_path):
    count = 2 ** 24 + 1
    state = {'model': MODEL, 'optim': optimizer()}
    for states in state['optim']['state'].values():
        states['step'] = torch.tensor(count)
    adopt(ckptfs, tmp_path, state)
    into = {'optim': {'state': {name: {'step': torch.tensor(0)} for name in MODEL}}}
    assert [one['step'].item() for one in loaded(ckptfs, into)['optim']['state'].values()] == [count] * len(MODEL)


def test_states_of_other_shapes_than_their_weights(ckptfs, tmp_path):
    def states(fill):
        return {'optim': {'state': {'a.weight': {'row_var': fill(3, 1), 'codes': fill(2, 6), 'absmax': fill(7), 'none': fill(0)}}}}
    saved = states(torch.rand)
    adopt(ckptfs, tmp_path, {'model': MODEL, **saved})
    got = loaded(ckptfs, states(torch.zeros))['optim']['state']['a.weight']
    assert same(got, saved['optim']['state']['a.weight'])


def test_a_key_of_the_job_s_own_is_not_a_module_s_extra_state(ckptfs, tmp_path):
    adopt(ckptfs, tmp_path, {'model': MODEL, 'extra_state/x': 5})
    assert loaded(ckptfs, {'extra_state/x': 0})['extra_state/x'] == 5


def test_ranks_by_themselves_with_other_counts_are_refused(ckptfs, tmp_path):
    for rank, count in enumerate((3., 4.)):
        state = {'model': MODEL, 'optim': optimizer()}
        state['optim']['state']['a.weight']['step'] = torch.tensor(count)
        own = tmp_path / f'own{rank}'
        dcp.save(state, checkpoint_id=str(own), no_dist=True)
        metadata = pickle.loads((own / '.metadata').read_bytes())
        for stored in metadata.storage_data.values():
            stored.relative_path = f'__{rank}_0.distcp'
        (tmp_path / 'step-1').mkdir(exist_ok=True)
        (tmp_path / 'step-1' / f'__{rank}.metadata').write_bytes(pickle.dumps(metadata))
        (own / '__0_0.distcp').rename(tmp_path / 'step-1' / f'__{rank}_0.distcp')
        shutil.rmtree(own)
    done = ckptfs.adopt(str(tmp_path), 'run', check=False)
    assert done.returncode != 0 and "'optim.state.a.weight.step'" in done.stderr and 'did not save the same moment' in done.stderr


def test_boxes_that_some_ranks_alone_repeat_are_told(ckptfs, tmp_path):
    rows = torch.arange(16.).reshape(4, 4)
    save_by_ranks(tmp_path / 'even', [(0, rows), (4, rows + 50)])
    save_by_ranks(tmp_path / 'more', [(0, rows), (4, rows + 50), (0, rows + 1)])
    for run, told in (('even', False), ('more', True)):
        said = ckptfs.run('info', str(tmp_path / run)).stdout
        assert ("more ranks saved some boxes than others, such as of 'model.w'" in said) == told, said
    ckptfs.adopt(str(tmp_path / 'more'), 'run')
    assert same(weights(ckptfs), {'w': torch.cat([rows, rows + 50])})


@pytest.mark.parametrize('value', [torch.tensor(1 + 2j), torch.ones(2), torch.tensor(0.5).to(torch.float8_e4m3fn),
                                   (torch.tensor(0.9), torch.tensor(0.99))], ids=['complex', 'two', 'fp8', 'tuple'])
def test_a_hyper_parameter_that_is_not_a_number_costs_itself_alone(ckptfs, tmp_path, value):
    state = {'model': MODEL, 'optim': optimizer()}
    state['optim']['param_groups'][0]['odd'] = value
    done = adopt(ckptfs, tmp_path, state)
    assert "'optim.param_groups.0.odd'" in done.stderr and 'not a number' in done.stderr, done.stderr
    assert torch.equal(weights(ckptfs, 'optimizer')['exp_avg/a.weight'], optimizer()['state']['a.weight']['exp_avg'])
    view = os.path.join(step_of(ckptfs.mount(), 'run'), 'view', 'dp2', 'dcp')
    got = {'optim': {'param_groups': [{'odd': torch.zeros_like(value) if torch.is_tensor(value) else None}]}}
    dcp.load(got, checkpoint_id=view, no_dist=True)
    got = got['optim']['param_groups'][0]['odd']
    assert got == value if isinstance(value, tuple) else torch.equal(got, value)


@pytest.mark.parametrize('shape', ['nested', 'flat', 'without_states'])
@pytest.mark.parametrize('wrapper', ['module.', '_orig_mod.', '_orig_mod.module.'])
@pytest.mark.parametrize('names', [('a.weight', 'b.bias'), ('0.weight', '1.bias')])
def test_an_optimizer_names_parameters_without_wrappers(ckptfs, tmp_path, names, wrapper, shape):
    """{'model': model.state_dict(), 'optim': get_optimizer_state_dict(model, ...)} of a compiled model, or in DDP."""
    model = {wrapper + name: tensor for name, tensor in zip(names, MODEL.values())}
    states = {name: {'step': torch.tensor(2.), 'exp_avg': tensor + 1, 'exp_avg_sq': tensor * 3} for name, tensor in zip(names, MODEL.values())}
    if shape == 'without_states':
        states = {}
    optim = {'state': states, 'param_groups': [{'lr': 0.5, 'params': list(names)}]}
    if shape == 'flat':
        optim = {**{f'state.{name}.{kind}': value for name, kinds in states.items() for kind, value in kinds.items()},
                 **{f'param_groups.{name}.lr': 0.5 for name in names}}
    done = adopt(ckptfs, tmp_path, {'model': model, 'optim': optim})
    assert 'left out' not in done.stderr, done.stderr
    if states:
        assert same(weights(ckptfs, 'optimizer'), {f'{kind}/{wrapper}{name}': value for name, kinds in states.items()
                                                   for kind, value in kinds.items()})
    blank = {key: torch.zeros_like(value) if torch.is_tensor(value) else None for key, value in optim.items()} if shape == 'flat' else {
        'state': {name: {kind: torch.zeros_like(value) for kind, value in kinds.items()} for name, kinds in states.items()},
        'param_groups': [{'lr': None, 'params': None}]}
    into = {'model': {name: torch.zeros_like(tensor) for name, tensor in model.items()}, 'optim': blank}
    got = loaded(ckptfs, into)
    assert same(got['model'], model)
    if shape == 'flat':
        assert all(torch.equal(got['optim'][key], value) if torch.is_tensor(value) else got['optim'][key] == value for key, value in optim.items())
    else:
        assert got['optim']['param_groups'] == optim['param_groups']
        assert all(same(got['optim']['state'][name], kinds) for name, kinds in states.items())


def test_an_optimizer_s_file_beside_weights_alone_is_named(ckptfs, tmp_path):
    """As llama-recipes saves: shards of the weights, and the optimizer by torch.save."""
    state = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict()
    dcp.save({'model': MODEL}, checkpoint_id=str(tmp_path / 'run' / 'step-1'), no_dist=True)
    torch.save(state, tmp_path / 'run' / 'step-1' / 'optimizer-llama-0.pt')
    torch.save({'last_epoch': 3}, tmp_path / 'run' / 'step-1' / 'scheduler.pt')
    done = ckptfs.adopt(str(tmp_path / 'run'), 'run')
    assert 'the optimizer in optimizer-llama-0.pt' in done.stderr and 'scheduler' not in done.stderr, done.stderr
    assert ckptfs.adopt(str(tmp_path / 'run'), 'whole', extra=['--require', 'optimizer'], check=False).returncode != 0


NESTED = {'cfg': {'warm': {'x': 3, 'y': [1, 2]}, 'dotted.key': 't', 'rate': torch.tensor(0.25)}, 'tree': [{'a': 1}, {'a': 2.5}],
          'pair': (1, {'q': 2})}


def test_dicts_among_hyper_parameters_are_dicts_again(ckptfs, tmp_path):
    state = {'model': MODEL, 'optim': optimizer()}
    state['optim']['param_groups'][0].update(NESTED)
    adopt(ckptfs, tmp_path, state)
    view = os.path.join(step_of(ckptfs.mount(), 'run'), 'view')
    dcp_to_torch_save(f'{view}/dp2/dcp', str(tmp_path / 'whole.pt'))
    group = torch.load(tmp_path / 'whole.pt', weights_only=False)['optim']['param_groups'][0]
    assert {name: group[name] for name in NESTED} == NESTED
    file, = glob.glob(f'{view}/dp2_zero1/deepspeed/*/zero/optimizer_state.pt')
    group = torch.load(file, weights_only=False)['param_groups'][0]
    assert {name: group[name] for name in NESTED} == NESTED  # the tensor is a number there, and equal
    assert not [name for name in group if '.' in name]


def test_a_dict_with_keys_that_are_no_text_is_kept(ckptfs, tmp_path):
    """The planner makes texts of them; a dict with a key whose text is not known stays one value."""
    net = torch.nn.Linear(3, 2)
    opt = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    opt.step()
    odd = {('web', (1,)): 0.5, 'code': 2, None: 1, True: 2, 4: 5, 2.5: 'x', 1e-5: 'y', (): 'z'}
    opt.param_groups[0].update(mix=odd, flags={b'raw': 1, 'n': 3}, quoted={("it's",): 1})
    torch.save({'model': net.state_dict(), 'optimizer': opt.state_dict()}, tmp_path / 'ckpt_5.pt')
    ckptfs.adopt(str(tmp_path / 'ckpt_5.pt'), 'run')
    dcp_to_torch_save(os.path.join(step_of(ckptfs.mount(), 'run'), 'view/tp1/dcp'), str(tmp_path / 'whole.pt'))
    group = torch.load(tmp_path / 'whole.pt', weights_only=False)['optim']['param_groups'][0]
    assert group['mix'] == {str(key): value for key, value in odd.items()}
    assert group['flags'] == {b'raw': 1, 'n': 3} and group['quoted'] == {("it's",): 1}


@pytest.mark.parametrize('lr', [torch.tensor(0.1), torch.tensor(0.25, dtype=torch.float64), torch.tensor([3])], ids=str)
def test_a_rate_that_is_a_tensor_of_a_torch_file(ckptfs, tmp_path, lr):
    """As of optimizers in graphs: dcp/ has the tensor, an engine the number."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
    opt = torch.optim.Adam([{'params': net[0].parameters()}, {'params': net[1].parameters(), 'lr': 0.5}])
    net(torch.ones(1, 3)).sum().backward()
    opt.step()
    opt.param_groups[0]['lr'] = lr
    torch.save({'model': net.state_dict(), 'optimizer': opt.state_dict()}, tmp_path / 'ckpt_5.pt')
    done = ckptfs.adopt(str(tmp_path / 'ckpt_5.pt'), 'run')
    assert 'left out' not in done.stderr, done.stderr
    view = os.path.join(step_of(ckptfs.mount(), 'run'), 'view')
    into = {'optim': {'param_groups': [{'lr': torch.zeros_like(lr)}, {'lr': None}]}}
    dcp.load(into, checkpoint_id=f'{view}/dp2/dcp', no_dist=True)
    groups = into['optim']['param_groups']
    assert torch.equal(groups[0]['lr'], lr) and groups[0]['lr'].dtype == lr.dtype and groups[1]['lr'] == 0.5
    file, = glob.glob(f'{view}/dp2_zero1/deepspeed/*/zero/optimizer_state.pt')
    assert [group['lr'] for group in torch.load(file, weights_only=False)['param_groups'][:2]] == [lr.item(), 0.5]


def named_job():
    """A model and an optimizer of its named parameters, in two groups, after one step."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
    known = list(net.named_parameters())
    opt = torch.optim.AdamW([{'params': known[:2]}, {'params': known[2:], 'lr': 0.5}])
    net(torch.ones(1, 3)).sum().backward()
    opt.step()
    return net, opt


@pytest.mark.parametrize('source', ['file', 'dcp', 'huggingface'])
def test_an_optimizer_of_named_parameters_is_loaded_strictly(ckptfs, tmp_path, source):
    net, opt = named_job()
    model, optim = get_state_dict(net, opt)
    folder = tmp_path / 'step-5'
    if source == 'dcp':
        dcp.save({'model': model, 'optim': optim}, checkpoint_id=str(folder), no_dist=True)
    elif source == 'file':
        folder = tmp_path / 'ckpt_5.pt'
        torch.save({'model': net.state_dict(), 'optimizer': opt.state_dict()}, folder)
    else:
        folder.mkdir()
        save_file(net.state_dict(), folder / 'model.safetensors')
        torch.save(opt.state_dict(), folder / 'optimizer.pt')
    done = ckptfs.adopt(str(folder), 'run')
    assert 'left out' not in done.stderr, done.stderr
    view = os.path.join(step_of(ckptfs.mount(), 'run'), 'view')
    other, fresh = named_job()
    into = dict(zip(('model', 'optim'), get_state_dict(other, fresh)))
    into['model'] = {name: torch.zeros_like(tensor) for name, tensor in into['model'].items()}
    dcp.load(into, checkpoint_id=f'{view}/dp2/dcp', no_dist=True)
    set_state_dict(other, fresh, model_state_dict=into['model'], optim_state_dict=into['optim'])
    assert same(other.state_dict(), net.state_dict())
    got, want = fresh.state_dict(), opt.state_dict()
    assert got['param_groups'] == want['param_groups'] and got['param_groups'][1]['param_names'] == ['1.weight', '1.bias']
    assert all(same(got['state'][i], want['state'][i]) for i in range(4))
    file, = glob.glob(f'{view}/dp2_zero1/deepspeed/*/zero/optimizer_state.pt')  # flat tensors have no names
    assert not any('param_names' in group for group in torch.load(file, weights_only=False)['param_groups'])


class Body(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.tail = torch.nn.Linear(8, 8), torch.nn.Linear(8, 5)

    def forward(self, x):
        return self.tail(self.head(x).relu())


def test_an_optimizer_of_a_part_of_the_model_is_that_parts(ckptfs, tmp_path):
    """Its own names are other parameters' of the whole."""
    net = torch.nn.ModuleDict({'head': torch.nn.Linear(8, 8), 'body': Body()})
    opt = torch.optim.AdamW(net['body'].parameters(), lr=1e-2)
    net['body'](net['head'](torch.randn(4, 8))).square().sum().backward()
    opt.step()
    done = adopt(ckptfs, tmp_path, {'model': net.state_dict(), 'optim': get_optimizer_state_dict(net['body'], opt)})
    assert 'left out' not in done.stderr, done.stderr
    got = weights(ckptfs, 'optimizer')
    for name, parameter in net.named_parameters():
        assert (f'exp_avg/{name}' in got) == name.startswith('body.'), name
        if name.startswith('body.'):
            assert torch.equal(got[f'exp_avg/{name}'], opt.state[parameter]['exp_avg']), name
    whole = str(tmp_path / 'whole.pt')
    dcp_to_torch_save(os.path.join(step_of(ckptfs.mount(), 'run'), 'view/tp1/dcp'), whole)
    assert set(torch.load(whole, weights_only=False)['optim']['state']) == {n for n, _ in net['body'].named_parameters()}


@pytest.mark.parametrize('active', ['policy', 'value'])
def test_states_of_two_adapters_are_nobodys(ckptfs, tmp_path, active):
    """The file has one adapter's weights, without its name."""
    names = [f'base_model.model.q_proj.lora_{part}' for part in 'AB']
    model = {f'{name}.weight': torch.randn(4, 4) for name in names}
    live = [f'{name}.{adapter}.weight' for adapter in ('policy', 'value') for name in names]
    optim = {'state': {name: {'step': torch.tensor(2.), 'exp_avg': torch.randn(4, 4)} for name in live},
             'param_groups': [{'lr': 0.1, 'params': live}]}
    done = adopt(ckptfs, tmp_path, {'model': model, 'optim': optim})
    assert done.stderr.count('left out') >= 1 and not weights(ckptfs, 'optimizer'), (active, done.stderr)


def test_what_stands_in_one_dict_with_an_odd_hyper_parameter_stays_with_it(ckptfs, tmp_path):
    state = {'model': MODEL, 'optim': optimizer()}
    state['optim']['param_groups'][0]['cfg'] = {'odd': torch.ones(2), 'even': 7}
    done = adopt(ckptfs, tmp_path, state)
    assert "'optim.param_groups.0.cfg.odd' and 1 more" in done.stderr, done.stderr
    view = os.path.join(step_of(ckptfs.mount(), 'run'), 'view', 'tp1')
    dcp_to_torch_save(f'{view}/dcp', str(tmp_path / 'whole.pt'))
    group = torch.load(tmp_path / 'whole.pt', weights_only=False)['optim']['param_groups'][0]
    assert group['lr'] == 0.5 and group['cfg']['even'] == 7 and torch.equal(group['cfg']['odd'], torch.ones(2))


def two_groups(flat):
    """Groups that differ in their decay alone."""
    decay = {'a.weight': 0.1, 'b.bias': 0.0}
    told = {name: {'lr': 0.5, 'weight_decay': decay[name]} for name in MODEL}
    if flat:
        state = {f'state.{name}.{kind}': value for name, kinds in optimizer()['state'].items() for kind, value in kinds.items()}
        return state | {f'param_groups.{name}.{key}': value for name in MODEL for key, value in told[name].items()}
    return {'state': optimizer()['state'], 'param_groups': [told[name] | {'params': [name]} for name in MODEL]}


@pytest.mark.parametrize('flat', [True, False])
def test_hyper_parameters_that_an_engine_does_not_get_are_told(ckptfs, tmp_path, flat):
    adopt(ckptfs, tmp_path, {'model': MODEL, 'optim': two_groups(flat)})
    view = os.path.join(step_of(ckptfs.mount(), 'run'), 'view')
    with open(f'{view}/README.txt') as file:
        readme = ' '.join(file.read().split())
    with open(f'{view}/layouts.json') as file:
        layouts = json.load(file)['layouts']
    for layout in 'dp2_zero1', 'dp8_zero3':
        file, = glob.glob(f'{view}/{layout}/deepspeed/*/zero/optimizer_state.pt')
        state = torch.load(file, weights_only=False)
        groups = state['param_groups'] if 'zero3' not in layout else state['optimizer_state_dict']['param_groups']
        left_out = flat or 'zero3' in layout
        assert groups[0]['lr'] == 0.5 and ('weight_decay' not in groups[0]) == left_out
        told = json.loads(ckptfs.run('explain', layout, '--store', ckptfs.store, '--json').stdout)['left_out']
        assert told == layouts[layout]['left_out']
        told = [one for one in told if 'hyper-parameters' in one['what']]
        assert len(told) == left_out
        for one in told:
            assert one['format'] == 'deepspeed' and one['layout'] == layout
            assert "'weight_decay', different for 'a.weight' and 'b.bias'" in one['what'] and "'lr'" not in one['what']
            assert one['what'] in readme
            said = ckptfs.run('explain', layout, '--store', ckptfs.store).stdout
            assert f"deepspeed leaves out: {one['what']}\n" in said
    assert ('any layout (deepspeed): hyper-parameters' in readme) == flat


def test_groups_that_are_alike_leave_nothing_out(ckptfs, tmp_path):
    adopt(ckptfs, tmp_path, {'model': MODEL, 'optim': optimizer()})
    view = os.path.join(step_of(ckptfs.mount(), 'run'), 'view')
    with open(f'{view}/README.txt') as file:
        assert 'some views do not show' not in file.read()
    assert 'left out:' not in ckptfs.run('info', 'run', '--store', ckptfs.store).stdout


def test_equal_tensors_are_two_parameters(ckptfs, tmp_path):
    """Nothing in a DCP directory says that they are tied."""
    twins = {'embed.weight': torch.arange(12.).reshape(3, 4), 'head.weight': torch.arange(12.).reshape(3, 4)}
    adopt(ckptfs, tmp_path, {'model': twins})
    told = json.loads(ckptfs.run('ls', 'run', '--json', '--store', ckptfs.store).stdout)['tensors']
    assert sorted(t['name'] for t in told) == sorted(twins)
    rank = os.path.join(step_of(ckptfs.mount(), 'run'), 'view', 'tp1', 'rank0')
    assert same(load_file(os.path.join(rank, 'model.safetensors')), twins)
    loaded = torch.load(os.path.join(rank, 'model.pt'))
    loaded['head.weight'].zero_()
    assert torch.equal(loaded['embed.weight'], twins['embed.weight'])
