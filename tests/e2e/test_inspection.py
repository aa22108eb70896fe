# SPDX-License-Identifier: Apache-2.0
"""`stats` and `diff` against torch: of real checkpoints, and of every dtype with what numbers can be."""
import json
import os
import pty
import re
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from daemon import BIN, TALLY, checkpoint, truth_of

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def odd_tensors():
    """One tensor a dtype, of what is odd in it; empty ones, scalars, and one of several blocks."""
    torch.manual_seed(7)
    tensors = {}
    for dtype in FLOATS:
        values = torch.randn(300).to(dtype)
        name = str(dtype).removeprefix('torch.')
        tensors[name] = values
        special = torch.tensor([0., -0., float('nan'), float('inf'), -float('inf'), 1., -2.]).to(dtype)
        tensors[f'{name}.special'] = torch.cat([values[:20].float(), special.float()]).to(dtype).reshape(3, 9)
        tensors[f'{name}.nan'] = torch.full((5,), float('nan')).to(dtype)
        tensors[f'{name}.empty'] = torch.empty(0, 4).to(dtype)
    for dtype in WHOLE:
        name = str(dtype).removeprefix('torch.')
        tensors[name] = torch.randint(0, 2, (64,)).to(dtype)
        if dtype != torch.bool:
            ends = torch.iinfo(dtype)
            tensors[f'{name}.ends'] = torch.tensor([ends.min, ends.max, 0, 1], dtype=dtype)
    tensors['scalar'] = torch.tensor(3.25)
    tensors['large'] = torch.randn(2_500_000) * 1e-3 + 7
    return tensors


@pytest.fixture(scope='module')
def odd(tmp_path_factory):
    """A file of weights, and what is in it."""
    path = tmp_path_factory.mktemp('odd') / 'odd.safetensors'
    tensors = odd_tensors()
    save_file(tensors, path)
    return str(path), tensors


def stats_of(program, *words):
    """Returns what `ckptfs stats` says, by name and kind."""
    told = json.loads(program.run('stats', *words, '--json').stdout)['tensors']
    return {(t['name'], t['kind']): t for t in told}


def check(told, tensor):
    """One tensor's statistics are torch's."""
    assert told['shape'] == list(tensor.shape) and told['elements'] == tensor.numel()
    wide = tensor.double() if tensor.is_floating_point() or tensor.dtype == torch.bool else tensor
    nan = int(wide.isnan().sum())
    infinite = int(wide.isinf().sum())
    finite = wide[wide.isfinite()]
    assert (told['nan'], told['infinite'], told['zeros']) == (nan, infinite, int((finite == 0).sum()))
    if finite.numel() == 0:
        assert told['min'] is None and told['mean'] is None and told['std'] is None
        return
    assert told['min'] == finite.min().item() and told['max'] == finite.max().item()
    numbers = finite.double()
    scale = max(float(numbers.abs().max()), 1e-300)
    assert abs(told['mean'] - float(numbers.mean())) <= 1e-12 * scale
    assert abs(told['std'] - float(numbers.std(correction=0))) <= 1e-9 * scale


def test_stats_of_every_dtype(ckptfs, odd):
    path, tensors = odd
    told = stats_of(ckptfs, path)
    assert {name for name, _ in told} == set(tensors)
    for (name, kind), one in told.items():
        assert kind == 'weight'
        check(one, tensors[name])
    ends = told['int64.ends', 'weight']
    assert (ends['min'], ends['max']) == (-2**63, 2**63 - 1)


def test_stats_do_not_depend_on_threads(ckptfs, odd):
    path, _ = odd
    one = ckptfs.run('stats', path, '--threads', '1', '--json').stdout
    assert one == ckptfs.run('stats', path, '--threads', '7', '--json').stdout


@pytest.mark.parametrize('variant', ['zero2', 'zero3', 'tp2', 'zero1_bf16'])
def test_stats_of_a_real_checkpoint(ckptfs, variant):
    ckptfs.adopt_variant(variant)
    told = stats_of(ckptfs, variant, '--store', ckptfs.store)
    compared = 0
    for key, tensor in load_file(truth_of(variant)).items():
        for (name, kind), one in told.items():
            if key in (f'{name}/{kind}', f'{kind}/{name}', f'{name}.{kind}', f'{kind}.{name}'):
                check(one, tensor)
                compared += 1
    assert compared >= 20, sorted(load_file(truth_of(variant)))[:4]


def changed(tensors):
    """The same with changes of every kind, and what diff has to say of them."""
    other = {name: tensor.clone() for name, tensor in tensors.items()}
    del other['scalar']
    other['added'] = torch.ones(2)
    other['int32'] = other['int32'].reshape(8, 8)
    other['float16'] = other['float16'].float()
    other['large'][[3, 2_000_000]] += torch.tensor([0.5, -0.25])
    special = other['float32.special'].reshape(-1)
    special[20], special[21] = -0., 0.  # the zeros change places
    other['float64'][5] = float('nan')
    other['bfloat16'][7] *= 2
    other['int64.ends'][1] -= 1
    other['uint8'][0] ^= 1
    return other


def diff_of(program, *words):
    """(exit code, changes by name, everything)."""
    done = program.run('diff', *words, '--json', check=False)
    told = json.loads(done.stdout)
    return done.returncode, {c['name']: c for c in told['changes']}, told


def test_diff_of_every_kind(ckptfs, odd, tmp_path):
    path, tensors = odd
    other, after = str(tmp_path / 'other.safetensors'), changed(tensors)
    save_file(after, other)
    code, changes, told = diff_of(ckptfs, path, other)
    assert code == 9
    assert {n: c['change'] for n, c in changes.items()} == {
        'scalar': 'removed', 'added': 'added', 'int32': 'reshaped', 'float16': 'retyped', 'large': 'changed',
        'float32.special': 'changed', 'float64': 'changed', 'bfloat16': 'changed', 'int64.ends': 'changed',
        'uint8': 'changed'}
    assert told['same'] == len(tensors) - 9
    assert changes['float16']['different_values'] == 0
    for name in ('large', 'bfloat16', 'float64', 'int64.ends', 'uint8', 'float32.special'):
        a, b = tensors[name].reshape(-1), after[name].reshape(-1)
        one = changes[name]
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        different = (a.view(bits) != b.view(bits)).nonzero().reshape(-1)
        assert one['different_bits'] == len(different) and one['first'] == int(different[0])
        unequal = (a != b) & ~((a != a) & (b != b))
        assert one['different_values'] == int(unequal.sum())
        finite = a.double().isfinite() & b.double().isfinite()
        if a.is_floating_point():
            assert one['max_abs'] == float((a.double() - b.double())[finite].abs().max()), name
        else:
            assert one['max_abs'] == max(abs(int(x) - int(y)) for x, y in zip(a, b))


def test_diff_by_tolerance(ckptfs, odd, tmp_path):
    path, tensors = odd
    other = str(tmp_path / 'other.safetensors')
    after = {name: tensor.clone() for name, tensor in tensors.items()}
    after['large'] *= 1 + 1e-5
    after['float32'][3] += 1e-3
    save_file(after, other)
    for atol, rtol in ((0, 0), (1e-4, 0), (1e-2, 0), (0, 1e-4), (1e-3, 1e-4), (1e-2, 1e-3)):
        code, changes, told = diff_of(ckptfs, path, other, '--atol', atol, '--rtol', rtol)
        for name in ('large', 'float32'):
            a, b = tensors[name].double(), after[name].double()
            beyond = int((~((a == b) | ((a - b).abs() <= atol + rtol * b.abs()))).sum())
            assert changes.get(name, {}).get('beyond_tolerance', 0) == beyond, (name, atol, rtol)
        assert code == (9 if changes else 0)
        assert told['same'] == len(tensors) - 2


def test_diff_of_two_layouts_of_one_training(ckptfs):
    """The same states, whatever ranks they were saved by: the universal view against the source."""
    ckptfs.adopt_variant('zero2')
    out = os.path.join(ckptfs.folder, 'universal')
    ckptfs.run('export', 'zero2', 'tp1/deepspeed', out, '--store', ckptfs.store)
    code, changes, told = diff_of(ckptfs, 'zero2', out, '--kind', 'exp_avg', '--store', ckptfs.store)
    assert code == 0 and told['same'] > 3 and not changes


def test_a_source_that_changed_is_stale(ckptfs):
    source = shutil.copytree(checkpoint('zero1'), os.path.join(ckptfs.folder, 'run'))
    ckptfs.run('adopt', source, '--store', ckptfs.store, *TALLY)
    for folder, _, names in os.walk(source):
        for name in names:
            if 'optim_states' in name:
                with open(os.path.join(folder, name), 'ab') as f:
                    f.write(b'x')
    done = ckptfs.run('stats', 'run', '--store', ckptfs.store, check=False)
    assert done.returncode == 5, done.stderr


def held(program, variant, *words):
    """{(name, kind): who holds it}, as `ckptfs ls` says."""
    program.adopt_variant(variant)
    told = json.loads(program.run('ls', variant, *words, '--json', '--store', program.store).stdout)['tensors']
    return {(t['name'], t['kind']): t['held_by'] for t in told}


def test_who_holds_a_tensor_of_tensor_parallel_ranks(ckptfs):
    found = held(ckptfs, 'tp2')
    layer = 'model.layers.0.'
    said = {'self_attn.qkv_proj.weight': 'tp 0-1 cut dim 0', 'mlp.down_proj.weight': 'tp 0-1 cut dim 1',
            'input_layernorm.weight': 'tp 0-1 whole'}
    for name, ranks in said.items():
        whole = ranks.endswith('whole')
        for kind, states in ('weight', 'model_states'), ('exp_avg', 'optim_states'):
            holders = found[layer + name, kind]
            assert holders['tensor_ranks'] == ranks and holders['copies'] == (2 if whole else 0), (name, kind)
            assert holders['stages'] == [] and states in holders['file']
        assert found[layer + name, 'weight']['files'] == 2
    text = ckptfs.run('ls', 'tp2', '--store', ckptfs.store, '--kind', 'weight').stdout
    assert 'cut dim 1' in text


def test_who_holds_a_tensor_of_pipeline_stages(ckptfs):
    found = held(ckptfs, 'pp2')
    assert found['1.self_attn.o_proj.weight', 'weight']['stages'] == [0]
    assert found['3.self_attn.o_proj.weight', 'master']['stages'] == [1]
    tied = found['tied_modules.embed.weight', 'master']
    assert tied['stages'] == [0, 1] and tied['copies'] == 2
    layer = found['3.mlp.down_proj.weight', 'weight']
    assert (layer['files'], layer['copies'], layer['tensor_ranks']) == (1, 0, '')
    assert layer['file'].endswith('layer_03-model_00-model_states.pt')


def drawn_on_a_terminal(program, *words):
    """Returns what a command writes to a terminal's standard error."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([BIN, *words], stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        text = b''
        while True:
            try:
                said = os.read(ours, 1 << 16)
            except OSError:  # its end has closed
                break
            if not said:
                break
            text += said
    os.close(ours)
    assert process.returncode == 0
    return text.decode()


def test_a_progress_bar_counts_one_thing(ckptfs, odd):
    """Bytes, of all that there are, and never backwards; to a file it says nothing."""
    path, tensors = odd
    text = drawn_on_a_terminal(ckptfs, 'stats', path)
    lines = [line for line in text.replace('\n', '\r').split('\r') if line.strip()]
    counts = [re.findall(r'([\d.]+) (B|KiB|MiB|GiB)\b', line) for line in lines]
    assert lines and all(len(found) == 2 for found in counts), lines
    assert len({found[1] for found in counts}) == 1
    percent = [int(re.search(r'(\d+) ?%', line)[1]) for line in lines]
    assert percent == sorted(percent) and percent[-1] == 100
    assert ckptfs.run('stats', path).stderr == ''
