# SPDX-License-Identifier: Apache-2.0
"""States of optimizers that are not plain tensors as large as their parameter.

One that is not understood is left out alone, by its name; what is understood is shown in every layout.
"""
import json
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'golden', 'deepspeed_tiny', 'ckpt')


class LowBit(torch.Tensor):
    """Bytes and a scale that stand for floats, as torchao's states do."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ['codes', 'scale'], []

    @classmethod
    def __tensor_unflatten__(cls, tensors, *_):
        return cls(tensors['codes'], tensors['scale'])

    def __repr__(self):
        return f'LowBit({tuple(self.shape)})'

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.is_pinned.default:
            return False
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            return cls(args[0].codes.clone(), args[0].scale.clone())
        raise NotImplementedError(function)


class Net(nn.Module):
    """No two parameters have one shape."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.body(x).relu())


def trained(make):
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).sum().backward()
        optimizer.step()
    return model, optimizer


def shown(ckptfs, path, out, layout='tp1/rank0', *words):
    """The optimizer and the model of a rank, and what adopt said."""
    done = ckptfs.adopt(path, extra=words)
    ckptfs.run('export', '--store', ckptfs.store, done.stdout.split()[0], layout, out)
    return load_file(next(out.rglob('optimizer.safetensors'))), load_file(next(out.rglob('model.safetensors'))), done.stderr


def test_low_bit_moments_of_dcp_are_left_out_alone(ckptfs, tmp_path):
    model, optimizer = trained(lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2))
    states = get_optimizer_state_dict(model, optimizer)
    for name in ('body.weight', 'head.weight'):
        states['state'][name]['exp_avg'] = LowBit(torch.zeros(states['state'][name]['exp_avg'].shape, dtype=torch.uint8),
                                                  torch.ones(4))
    step = tmp_path / 'run' / 'step-2'
    dcp.save({'model': model.state_dict(), 'optim': states}, checkpoint_id=step, no_dist=True)
    told = dcp.FileSystemReader(step).read_metadata().state_dict_metadata['optim.state.body.weight.exp_avg']
    assert told.properties.dtype == torch.float32 and told.size == (6, 8)  # and nothing of the bytes
    got, weights, said = shown(ckptfs, step, tmp_path / 'out')
    assert all(torch.equal(weights[k], t) for k, t in model.state_dict().items())
    assert {k for k in got if k.startswith('exp_avg/')} == {'exp_avg/body.bias', 'exp_avg/head.bias'}
    for name, state in states['state'].items():
        assert torch.equal(got[f'exp_avg_sq/{name}'], state['exp_avg_sq'])
    line, = [line for line in said.splitlines() if 'left out' in line]
    assert "optimizer state 'exp_avg' of 'body.weight' and 1 more" in line and 'LowBit' in line
    done = ckptfs.run('adopt', '--store', f'{tmp_path}/other', '--require', 'optimizer', step, check=False)
    assert done.returncode != 0 and 'LowBit' in done.stderr


def test_a_low_bit_weight_is_refused_by_name(ckptfs, tmp_path):
    step = tmp_path / 'run' / 'step-2'
    weights = {'a.weight': torch.rand(4, 4), 'b.weight': LowBit(torch.zeros(4, 4, dtype=torch.uint8), torch.ones(1))}
    dcp.save({'model': weights, 'note': LowBit(torch.zeros(3, dtype=torch.uint8), torch.ones(1))}, checkpoint_id=step,
             no_dist=True)
    done = ckptfs.run('adopt', '--store', ckptfs.store, step, check=False)
    assert done.returncode != 0 and "'model.b.weight'" in done.stderr and 'LowBit' in done.stderr


def test_states_with_names_of_ours_are_left_out_alone(ckptfs, tmp_path):
    model, optimizer = trained(lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2))
    states = get_optimizer_state_dict(model, optimizer)
    for kind in ('weight', 'master', ''):
        states['state']['body.weight'][kind] = torch.rand(6, 8)
    step = tmp_path / 'run' / 'step-2'
    dcp.save({'model': model.state_dict(), 'optim': states}, checkpoint_id=step, no_dist=True)
    got, weights, said = shown(ckptfs, step, tmp_path / 'out')
    assert all(torch.equal(weights[k], t) for k, t in model.state_dict().items())
    assert all(torch.equal(got[f'exp_avg/{k}'], one['exp_avg']) for k, one in states['state'].items())
    assert "left out: optimizer state 'weight' of 'body.weight'" in said
    assert said.count('a name that ckptfs uses for something else (dcp/ alone shows it, as it was)') == 3


def test_a_live_name_is_not_joined_with_a_weight_that_has_states_of_its_own(ckptfs, tmp_path):
    model, optimizer = trained(lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2))
    states = get_optimizer_state_dict(model, optimizer)
    states['state']['module.body.weight'] = {'exp_avg': torch.rand(6, 8), 'own': torch.rand(6, 8)}
    step = tmp_path / 'run' / 'step-2'
    dcp.save({'model': model.state_dict(), 'optim': states}, checkpoint_id=step, no_dist=True)
    got, _, said = shown(ckptfs, step, tmp_path / 'out')
    assert torch.equal(got['exp_avg/body.weight'], states['state']['body.weight']['exp_avg'])
    assert not any(name.startswith('own/') for name in got)
    assert "left out: the key 'optim.state.module.body.weight." in said and 'and 1 more' in said


def test_states_of_a_partition_that_are_not_flat_are_left_out_alone(ckptfs, tmp_path):
    """A ZeRO optimizer's: shorter ones (absmax of 8-bit blocks), and a low-bit tensor."""
    shutil.copytree(GOLDEN, tmp_path / 'run')
    files = sorted((tmp_path / 'run').rglob('*optim_states.pt'))
    for file in files:
        saved = torch.load(file, weights_only=False)
        for state in saved['optimizer_state_dict']['base_optimizer_state']['state'].values():
            state['absmax'] = torch.rand(3)
            state['weight'] = torch.zeros_like(state['exp_avg'])
            state['master'] = torch.ones_like(state['exp_avg'])
            state['grad'] = 1.0
            state['low'] = LowBit(torch.zeros_like(state['exp_avg'], dtype=torch.uint8), torch.ones(1))
        torch.save(saved, file)
    before = shown(ckptfs, GOLDEN, tmp_path / 'before')
    got, weights, said = shown(ckptfs, tmp_path / 'run', tmp_path / 'out')
    assert files and set(got) == set(before[0]) and all(torch.equal(got[k], t) for k, t in before[0].items())
    assert all(torch.equal(weights[k], t) for k, t in before[1].items())
    assert "optimizer state 'absmax' of group 0" in said and "optimizer state 'low' of group 0" in said
    line, = [line for line in said.splitlines() if 'a name that ckptfs uses for something else' in line]
    assert "optimizer state 'weight' of group 0 and" in line


@pytest.mark.parametrize('which', ['transformers', 'torch'])
def test_rows_and_columns_are_cut_with_their_parameter(ckptfs, tmp_path, which):
    from transformers.optimization import Adafactor
    make = {'transformers': lambda named: Adafactor(named, lr=1e-3, relative_step=False, scale_parameter=False),
            'torch': torch.optim.Adafactor}[which]
    model, optimizer = trained(make)
    own = tmp_path / 'run' / 'checkpoint-2'
    own.mkdir(parents=True)
    save_file(model.state_dict(), own / 'model.safetensors')
    torch.save(optimizer.state_dict(), own / 'optimizer.pt')
    (own / 'trainer_state.json').write_text(json.dumps({'global_step': 2}))
    rules = tmp_path / 'mine.toml'
    rules.write_text('name = "mine"\n[[rule]]\nmatch = "body.{rest}"\npattern = "column"\n'
                     '[[rule]]\nmatch = "head.weight"\npattern = "row"\n[[rule]]\nmatch = "head.bias"\npattern = "replicate"\n')
    truth = {}
    names = {p: n for n, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        truth.update({f'{kind}/{names[parameter]}': t for kind, t in state.items() if isinstance(t, torch.Tensor) and t.ndim})
    rows, columns = (('exp_avg_sq_row', 'exp_avg_sq_col') if which == 'transformers' else ('row_var', 'col_var'))
    for rank in range(2):
        got, _, said = shown(ckptfs, own, tmp_path / f'out{rank}', f'tp2/rank{rank}', '--family', rules)
        assert 'left out' not in said
        want = dict(truth)
        for name in (f'{rows}/body.weight', f'{columns}/head.weight'):  # along the dim that is cut
            dim = truth[name].shape.index(max(truth[name].shape))
            want[name] = truth[name].chunk(2, dim)[rank]
        for name, tensor in truth.items():
            if name.endswith('body.bias'):
                want[name] = tensor.chunk(2)[rank]
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), (rank, name)


class Projector:
    """A state that only its class can read."""


def file_of(folder, **more):
    """optimizer.pt beside safetensors, whose states are of many kinds; (what the job asks DCP for, the file's dict)."""
    net = Net()
    own = folder / 'run' / 'checkpoint-3'
    own.mkdir(parents=True)
    states = {}
    for i, (name, p) in enumerate(net.named_parameters()):
        states[i] = {'exp_avg': torch.randn_like(p), 'step': 3, 'Q': [torch.randn(3, 3), torch.randn(2)], 'none': None,
                     'block': torch.randn(5), 'sizes': (1, 2.5, 'x'), 'inner': {'a': torch.ones(2), 'b': 1}}
    group = {'lr': .1, 'betas': (.9, .99), 'params': [*range(4)]}
    optimizer = {'state': states, 'param_groups': [{**group, 'param_names': [n for n, _ in net.named_parameters()]}]}
    asked = {'model': net.state_dict(),
             'optim': {'state': {n: dict(states[i]) for i, (n, _) in enumerate(net.named_parameters())},
                       'param_groups': [{**group, 'params': [n for n, _ in net.named_parameters()]}]}}
    save_file(net.state_dict(), own / 'model.safetensors')
    for i in range(4):
        states[i].update(more.get('states', {}))
    optimizer['param_groups'][0].update(more.get('settings', {}))
    optimizer.update(more.get('parts', {}))
    torch.save(optimizer, own / 'optimizer.pt')
    (own / 'trainer_state.json').write_text('{"global_step": 3}')
    return asked


def test_what_an_optimizer_file_has_beside_moments_comes_back(ckptfs, tmp_path):
    from test_dcp_beside import differing, other
    asked = file_of(tmp_path)
    done = ckptfs.adopt(tmp_path / 'run', 'run')
    assert "state 'Q'" in done.stderr and 'dcp/ alone shows it' in done.stderr
    for view in ('tp1', 'dp2'):
        out = tmp_path / view
        ckptfs.run('export', '--store', ckptfs.store, done.stdout.split()[0], f'{view}/dcp', out)
        got = other(asked)
        dcp.load(got, checkpoint_id=next(at for at, _, files in os.walk(out) if '.metadata' in files), no_dist=True)
        assert not differing(got, asked)


def test_what_nobody_can_show_is_named(ckptfs, tmp_path):
    file_of(tmp_path, states={'projector': Projector()}, settings={'rate': torch.ones(2), 'kind': torch.float32},
            parts={'base': {'x': 1}})
    done = ckptfs.adopt(tmp_path / 'run', 'run')
    for word in ("state 'projector' is neither", "setting 'rate' is a tensor, or holds some", "setting 'kind' is neither", "'base' is neither"):
        assert word in done.stderr
    assert "'projector' is neither a plain tensor nor a number (dcp/" not in done.stderr


@pytest.mark.parametrize('which', ['tensors', 'numpy'])
def test_settings_that_are_tensors_or_numbers_of_numpy_are_numbers(ckptfs, tmp_path, which):
    """lr=torch.tensor(...), a schedule out of numpy.linspace: every view has numbers; anything else is named."""
    import numpy
    shutil.copytree(GOLDEN, tmp_path / 'run')
    number = {'tensors': torch.tensor, 'numpy': numpy.float64}[which]
    for name in os.listdir(tmp_path / 'run' / 'global_step3'):
        if name.endswith('optim_states.pt'):
            path = tmp_path / 'run' / 'global_step3' / name
            held = torch.load(path, weights_only=False)
            for group in held['optimizer_state_dict']['base_optimizer_state']['param_groups']:
                group.update(lr=number(0.125), betas=(number(0.5), 0.75), many=torch.ones(3), made=Projector())
            torch.save(held, path)
    done = ckptfs.adopt(tmp_path / 'run')
    assert "the optimizer's setting 'many'" in done.stderr and "setting 'made' is neither a number nor text; only deepspeed/" in done.stderr
    for view in ('dp2_zero1/deepspeed', 'tp1/dcp'):
        ckptfs.run('export', '--store', ckptfs.store, done.stdout.split()[0], view, tmp_path / view)
    folder = next(at for at, _, files in os.walk(tmp_path / 'tp1') if '.metadata' in files)
    dcp_to_torch_save(folder, tmp_path / 'whole.pt')
    groups = torch.load(tmp_path / 'whole.pt', weights_only=False)['optim']['param_groups']
    path = next((tmp_path / 'dp2_zero1').rglob('optimizer_state.pt'))
    groups += [one for one in torch.load(path, weights_only=False)['param_groups'] if one]  # an engine takes any number
    assert len(groups) == 2
    for group in groups:
        assert type(group.get('lr')) is float, group
        assert group['lr'] == 0.125 and tuple(group['betas']) == (0.5, 0.75)
