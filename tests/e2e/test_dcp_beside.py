# SPDX-License-Identifier: Apache-2.0
"""A job loads again from a view what it saved by DCP, key by key and strictly: copies of the model,
odd tensors, states of any kind, optimizers that number their parameters."""
import json
import multiprocessing
import os
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     get_state_dict, set_state_dict)

from daemon import step_of

MODEL = {'a.weight': torch.arange(12.).reshape(3, 4), 'a.bias': torch.ones(3)}


def other(value):
    """Returns other values with the same keys, shapes and types."""
    if torch.is_tensor(value):
        return torch.zeros_like(value) if value.dtype == torch.bool else torch.full_like(value, 7)
    if isinstance(value, dict):
        return {key: other(one) for key, one in value.items()}
    if isinstance(value, list):
        return [other(one) for one in value]
    return 'another'


def flat(value, at=''):
    """(key, leaf) pairs; tuples are opened, too."""
    if isinstance(value, (dict, list, tuple)):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for name, one in inner for key, leaf in flat(one, f'{at}.{name}').items()} or {at: type(value)()}
    return {at: value}


def differing(got, want):
    """Keys whose value is not the same to the last bit."""
    got, want = flat(got), flat(want)

    def same(a, b):
        if torch.is_tensor(b):
            return torch.is_tensor(a) and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
        return type(a) is type(b) and (a == b or a != a and b != b)

    return [key for key in {*got, *want} if key not in got or key not in want or not same(got[key], want[key])]


def exported(ckptfs, folder, view):
    out = folder / view
    ckptfs.run('export', '--store', ckptfs.store, 'run/step-1', f'{view}/dcp', out)
    return next(at for at, _, files in os.walk(out) if '.metadata' in files)


def comes_back(ckptfs, folder, tree, views=('tp1', 'tp2_dp2'), **options):
    """Saves, adopts, loads strictly from each view and compares; what adopt said."""
    dcp.save(tree, checkpoint_id=str(folder / 'run' / 'step-1'), no_dist=True)
    done = ckptfs.adopt(str(folder / 'run'), 'run', **options)
    for view in views:
        got = other(tree)
        dcp.load(got, checkpoint_id=exported(ckptfs, folder, view), no_dist=True)
        assert not differing(got, tree), (view, differing(got, tree))
    return done.stdout + done.stderr


BESIDE = {
    'empty': {'metrics': {'none': torch.zeros(0, 3), 'x': torch.ones(2)}},
    'in_a_list': {'buf': {'tokens': [torch.zeros(0, dtype=torch.int64), torch.ones(3, dtype=torch.int64)]}},
    'transposed': {'m': {'t': torch.arange(6).reshape(2, 3).t()}},
    'every_second': {'m': torch.arange(10.)[::2], 'n': {'deep': [{'x': torch.arange(20.).reshape(4, 5)[:, 1:3]}]}},
    'no_dims': {'m': {'loss': torch.tensor(2.5), 'flag': torch.tensor(True), 'list': [torch.tensor(1), 'text', None]}},
    'large': {'ema': {name: tensor.repeat(200, 300) for name, tensor in MODEL.items()}, 'ema_step': 3},
    'small_copy': {'ema': {name: -tensor for name, tensor in MODEL.items()}, 'teacher': [{'net': dict(MODEL)}]},
    'objects': {'loop': {'none': None, 'tuple': (1, torch.ones(2)), 'list': [1, [2.5, 'x']], 'size': torch.Size([2])}},
    'extra_state': {'model': {**MODEL, 'a._extra_state': {'scale': 2.0}, 'b._extra_state': torch.zeros(0)}},
    'random': {'rng': {'torch': torch.get_rng_state(), 'numbers': (3, tuple(range(5)), None)}, 'dataloader': {'dp_rank_0': b'state'}},
}


@pytest.mark.parametrize('what', BESIDE)
def test_what_lies_beside_the_model_comes_back(ckptfs, tmp_path, what):
    said = comes_back(ckptfs, tmp_path, {'model': MODEL, **BESIDE[what]})
    assert 'left out' not in said, said


def test_a_copy_of_the_model_is_cut_for_the_mesh(ckptfs, tmp_path):
    tree = {'model': MODEL, **BESIDE['large']}
    comes_back(ckptfs, tmp_path, tree, views=())
    at = exported(ckptfs, tmp_path, 'dp2')
    assert os.path.getsize(os.path.join(at, '__1_0.distcp')) > tree['ema']['a.weight'].nbytes // 2
    whole = tmp_path / 'whole.pt'
    dcp_to_torch_save(at, whole)
    assert not differing(torch.load(whole), tree)
    view = os.path.join(step_of(ckptfs.mount(), 'run'), 'view', 'tp1', 'rank0')
    assert 'ema' not in json.dumps(json.load(open(os.path.join(view, 'info.json'))))


ODD = {
    'none': lambda name, tensor: {'momentum_buffer': None},
    'lists': lambda name, tensor: {'old': [tensor + 1, tensor * 2], 'al': [None, tensor, 0.5], 'empty': []},
    'tuples': lambda name, tensor: {'pair': (tensor, 3), 'n': (1, 2)},
    'dicts': lambda name, tensor: {'q': {'l': tensor, 'r': [tensor[:1], {'deep': 2}]}, 'order': torch.Size([2])},
    'scalars': lambda name, tensor: {'step': 3, 'on': True, 'big': 1 << 80, 'd': 0.125, 'z': torch.tensor(2.), 'text': 'x'},
    'empty': lambda name, tensor: {'buffer': torch.zeros(0), 'rows': torch.zeros(0, 4), 'turned': tensor.repeat(2, 1).t()},
    'some': lambda name, tensor: {'exp_avg': tensor, 'step': torch.tensor(2.)} if name == 'a.bias' else {'exp_avg': None},
}


@pytest.mark.parametrize('flattened', [False, True], ids=['nested', 'flat'])
@pytest.mark.parametrize('what', ODD)
def test_a_state_of_any_kind_comes_back(ckptfs, tmp_path, what, flattened):
    states = {name: ODD[what](name, tensor) for name, tensor in MODEL.items()}
    hyper = {'lr': 0.5, 'weights': torch.ones(3), 'betas': (0.9, 0.99), 'of': {'tensors': [torch.ones(2)]}}
    optim = {'state': states, 'param_groups': [{**hyper, 'params': list(MODEL)}]}
    if flattened:
        optim = {**{f'state.{name}.{kind}': value for name, kinds in states.items() for kind, value in kinds.items()},
                 **{f'param_groups.{name}.{key}': value for name in MODEL for key, value in hyper.items()}}
    comes_back(ckptfs, tmp_path, {'model': MODEL, 'optim': optim})
    whole = tmp_path / 'whole.pt'
    dcp_to_torch_save(exported(ckptfs, tmp_path, 'dp4'), whole)
    empty_lists = [key for key in differing(torch.load(whole, weights_only=False)['optim'], optim) if not key.endswith('.step')]
    assert not empty_lists, empty_lists


UNKNOWN = {
    'other_names': {'optim': {'state': {'b.weight': {'exp_avg': torch.ones(3, 4)}}, 'param_groups': [{'lr': 0.5, 'params': ['b.weight']}]}},
    'one_more': {'optim': {'state': {'a.bias': {'exp_avg': torch.ones(3)}, 'b.bias': {'exp_avg': torch.ones(3)}},
                           'param_groups': [{'lr': 0.5, 'params': ['a.bias', 'b.bias']}]}},
}
# Numbers whose shapes leave one way, and an optimizer that only its own form tells.
UNDERSTOOD = {
    'numbers': {'optimizer': {'state': {0: {'exp_avg': torch.ones(3, 4), 'step': 2}, 1: {'exp_avg': torch.ones(3), 'step': 2}},
                              'param_groups': [{'lr': 0.5, 'params': [0, 1]}]}},
    'no_word': {'adam': {'state': {'a.bias': {'exp_avg': torch.ones(3)}}, 'param_groups': [{'lr': 0.5, 'params': ['a.bias']}]}},
}


@pytest.mark.parametrize('what', [*UNKNOWN, *UNDERSTOOD])
def test_an_optimizer_that_is_not_understood_comes_back_and_is_told(ckptfs, tmp_path, what):
    state = {**UNKNOWN, **UNDERSTOOD}[what]
    said = comes_back(ckptfs, tmp_path, {'model': MODEL, **state})
    assert ('left out' in said and next(iter(state)) in said) == (what in UNKNOWN), said


def test_numbers_stay_numbers(ckptfs, tmp_path):
    order = tmp_path / 'order'
    order.write_text('a.weight\na.bias\n')
    comes_back(ckptfs, tmp_path, {'model': MODEL, **UNDERSTOOD['numbers']}, extra=('--parameter-order', str(order)))
    got = {'optim': other({'state': {name: {'exp_avg': MODEL[name]} for name in MODEL}})}
    dcp.load(got, checkpoint_id=exported(ckptfs, tmp_path, 'nested'), no_dist=True)
    assert torch.equal(got['optim']['state']['a.weight']['exp_avg'], torch.ones(3, 4))


def test_names_become_numbers_by_token(ckptfs, tmp_path):
    names = ['a.bias', 'a.weight']  # in the optimizer's order
    optim = {'state': {name: {'exp_avg': MODEL[name] + 1} for name in names},
             'param_groups': [{'lr': 0.5, 'params': names[:1]}, {'lr': 0.25, 'params': names[1:]}]}
    comes_back(ckptfs, tmp_path, {'model': MODEL, 'optim': optim})
    want = {'optim': {'state': {number: optim['state'][name] for number, name in enumerate(names)},
                      'param_groups': [{'lr': 0.5, 'params': [0]}, {'lr': 0.25, 'params': [1]}]}}
    got = other(want)
    dcp.load(got, checkpoint_id=exported(ckptfs, tmp_path, 'numbered'), no_dist=True)
    assert not differing(got, want)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = torch.nn.Linear(8, 12), torch.nn.LayerNorm(12)
        self.head, self.scale = torch.nn.Linear(12, 4), torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.head(self.norm(self.body(x).relu())) * self.scale


OPTIMIZERS = {
    'LBFGS': {'max_iter': 3}, 'SGD': {'lr': 0.1}, 'AdamW': {'lr': torch.tensor(0.01), 'amsgrad': True}, 'Rprop': {}, 'ASGD': {},
    'Adafactor': {}, 'NAdam': {}, 'Adagrad': {},
}


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_an_optimizer_comes_back_by_its_names_and_by_its_numbers(ckptfs, tmp_path, name):
    torch.manual_seed(1)
    model = Net()
    if name == 'Adafactor':
        from transformers import Adafactor as kind
    else:
        kind = getattr(torch.optim, name)
    optimizer = kind(model.parameters(), **OPTIMIZERS[name])

    @torch.enable_grad()  # transformers' Adafactor calls it without
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 8)).pow(2).sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    weights, by_name = get_state_dict(model, optimizer)
    forms = {'names': by_name}
    if name != 'LBFGS':  # torch does not flatten its lists, and get_state_dict moves them on
        forms['numbers'] = optimizer.state_dict()
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        forms['flat'] = get_optimizer_state_dict(model, optimizer, options=flat)
    for form, optim in forms.items():
        (tmp_path / form).mkdir()
        ckptfs.store = str(tmp_path / form / 'store')
        comes_back(ckptfs, tmp_path / form, {'model': weights, 'optim': optim}, views=('tp1', 'dp2'))


def _train(rank, ranks, folder):
    """An FSDP2 job that keeps an average of its weights."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=rank, world_size=ranks)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(10, 14), torch.nn.Tanh(), torch.nn.Linear(14, 7))
    fully_shard(model, mesh=init_device_mesh('cpu', (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = {name: tensor.detach() * 0.5 for name, tensor in get_model_state_dict(model).items()}
    if ranks == 2:
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        weights, optim = get_state_dict(model, optimizer)
        dcp.save({'model': weights, 'optim': optim, 'ema': ema, 'ema_of_ranks': [ema]}, checkpoint_id=f'{folder}/run/step-1')
        whole = {'model': weights, 'ema': ema}
        truth = {part: {name: tensor.full_tensor() for name, tensor in of.items()} for part, of in whole.items()}
        if rank == 0:
            torch.save(truth, f'{folder}/truth.pt')
    else:
        truth = torch.load(f'{folder}/truth.pt')
        for view in ('tp1', 'dp3'):
            ema = {name: torch.zeros_like(tensor) for name, tensor in ema.items()}
            weights, optim = get_state_dict(model, optimizer)
            target = {'model': weights, 'optim': optim, 'ema': ema, 'ema_of_ranks': [dict(ema)]}
            dcp.load(target, checkpoint_id=open(f'{folder}/{view}.at').read())
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optim)
            for part, of in truth.items():
                for name, tensor in of.items():
                    assert torch.equal(target[part][name].full_tensor(), tensor), (view, part, name)
                    assert torch.equal(target['ema_of_ranks'][0][name].full_tensor(), truth['ema'][name])
    dist.barrier()
    dist.destroy_process_group()


def _ranks(count, folder):
    jobs = [multiprocessing.get_context('fork').Process(target=_train, args=(rank, count, folder)) for rank in range(count)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(120)
    assert [job.exitcode for job in jobs] == [0] * count


def test_an_average_under_fsdp_comes_back_at_another_number_of_ranks(ckptfs, tmp_path):
    _ranks(2, tmp_path)
    said = ckptfs.adopt(str(tmp_path / 'run'), 'run')
    assert 'left out' not in said.stdout + said.stderr
    for view in ('tp1', 'dp3'):
        (tmp_path / f'{view}.at').write_text(exported(ckptfs, tmp_path, view))
    (tmp_path / 'meet').unlink()
    _ranks(3, tmp_path)
    verified = ckptfs.run('verify', '--store', ckptfs.store, 'run/step-1')
    assert 'ema' not in verified.stdout + verified.stderr
