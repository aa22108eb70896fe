# SPDX-License-Identifier: Apache-2.0
"""rank<N>/ files against truth: buffers, frozen parameters and MoE included.

The expected shard of every tensor is computed here from the truth with the
fixture model's own cutting rules, and the files' metadata is checked by putting
the global tensors together again from nothing but what it says.
"""
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from daemon import checkpoint, step_of, truth_of
from load_deepspeed import recorded
from tiny_model import kind_of, shard
from variants import VARIANTS

# Layouts that cut everything that can be cut; expert tensors only by ep.
LAYOUTS = ['tp1', 'dp3_zero1', 'tp2_dp2_zero3', 'tp4_pp3',
           'pp2_dp2_zero2_split2-1']
MOE_LAYOUTS = ['tp1', 'dp4_ep2_zero2', 'dp4_ep4']
STATES = ('master', 'exp_avg', 'exp_avg_sq', 'momentum_buffer')


def pairs():
    """(variant, layout) of every source."""
    for variant, source in VARIANTS.items():
        for layout in MOE_LAYOUTS if source.moe else LAYOUTS:
            pipe = source.pipe or source.pp > 1
            yield variant, layout + ('_plain' if pipe else '')


def degrees(layout):
    """{'tp': 2, ...} of a layout name."""
    out = dict(tp=1, pp=1, dp=1, ep=1, zero=0)
    for token in layout.split('_'):
        key = token.rstrip('0123456789-')
        if key in out:
            out[key] = int(token[len(key):])
    return out


def place(rank, deg):
    """(tp, dp, pp) of a rank: tp fastest, then dp, then pp."""
    tp, dp = deg['tp'], deg['dp']
    return rank % tp, rank // tp % dp, rank // (tp * dp)


def read(folder):
    """({key: tensor}, parts) of both safetensors files of a rank."""
    tensors, parts = {}, {}
    for name in ('model', 'optimizer'):
        path = os.path.join(folder, f'{name}.safetensors')
        with safe_open(path, 'pt') as f:
            meta = json.loads((f.metadata() or {}).get('ckptfs.parts', '{}'))
            for key in f.keys():
                assert (name, key) not in tensors
                tensors[name, key] = f.get_tensor(key)
            parts.update({(name, k): v for k, v in meta.items()})
    return tensors, parts


def bits(tensor):
    """A tensor's bytes, for comparisons that know no NaN."""
    return tensor.contiguous().flatten().view(torch.uint8)


def want_of(truth, file, key):
    """(name, the whole tensor) that a file's key stands for, or None."""
    if file == 'model':
        for kind in ('weight', 'buffer'):
            if f'{kind}/{key}' in truth:
                return key, truth[f'{kind}/{key}']
        raise AssertionError(f'unknown {key} in model.safetensors')
    kind, name = key.split('/', 1)
    if kind == 'step':
        return name, truth['step']
    assert kind in STATES, key
    return name, truth[f'{"model" if kind == "master" else kind}/{name}']


def expected_shard(full, name, local_shape, dims, at, deg, flat):
    """Returns what a rank must hold of `full`; only vocabulary rows are taken from `local_shape`,
    since families pad in units of their own."""
    kind, subs = kind_of(name, dims)
    if '.experts.' in name or (kind == 'vocab' and deg.get('whole_vocab')):
        kind = 'rep'
    if kind == 'vocab' and deg['tp'] > 1:
        rows = local_shape[0] * deg['tp']
        assert dims.vocab <= rows < dims.vocab + 128 * deg['tp'], rows
        full = torch.nn.functional.pad(full, (0, 0, 0, rows - dims.vocab))
    local = shard(full, kind, subs, at[0], deg['tp'])
    if not flat:
        return local
    size = -(-local.numel() // deg['dp'])
    padded = torch.zeros(size * deg['dp'], dtype=local.dtype)
    padded[:local.numel()] = local.flatten()
    return padded[at[1] * size:(at[1] + 1) * size]


def check_rank(folder, rank, truth, dims, deg):
    """Every tensor of one rank; returns the keys that it holds."""
    tensors, parts = read(folder)
    at = place(rank, deg)
    for (file, key), got in tensors.items():
        name, full = want_of(truth, file, key)
        if key.startswith('step/'):
            assert float(got) == float(full), key
            continue
        state = file == 'optimizer'
        flat = state and deg['zero'] >= 1 and not (
            '.experts.' in name and deg['ep'] > 1)
        if state and deg['zero'] >= 1 and not flat:
            continue  # sliced over the expert grid: reassembled below
        local = parts[file, key]['local_shape'] if flat else got.shape
        want = expected_shard(full, name, local, dims, at, deg, flat)
        if state:
            want = want.to(got.dtype)
        assert got.dtype == want.dtype, key
        assert tuple(got.shape) == tuple(want.shape), (folder, file, key)
        assert torch.equal(bits(got), bits(want)), (folder, file, key)
    return set(tensors)


def wanted_keys(truth):
    """Every (file, key) that the ranks together must hold."""
    keys = set()
    for key in truth:
        kind, _, name = key.partition('/')
        if kind in ('weight', 'buffer'):
            keys.add(('model', name))
        elif kind == 'model':
            keys.add(('optimizer', f'master/{name}'))
        elif kind != 'step':
            keys.add(('optimizer', key))
    return keys


@pytest.mark.parametrize('variant,layout', list(pairs()))
def test_shards_equal_truth(mount, variant, layout):
    truth = load_file(truth_of(variant))
    dims, deg = recorded(truth_of(variant))[0], degrees(layout)
    # AutoTP leaves it whole, which its own degree shows.
    deg['whole_vocab'] = VARIANTS[variant].autotp == deg['tp']
    view = os.path.join(step_of(mount, variant), 'view', layout)
    seen = set()
    for rank in range(deg['tp'] * deg['dp'] * deg['pp']):
        seen |= check_rank(os.path.join(view, f'rank{rank}'), rank, truth,
                           dims, deg)
    missing = wanted_keys(truth) - seen
    if VARIANTS[variant].moe and VARIANTS[variant].stage == 0:
        # its optimizer states have no names: a note says so
        missing = {key for key in missing if key[0] == 'model'}
    assert not missing, sorted(missing)[:5]


def masters_saved(variant, stage, tp):
    """Names of the trained parameters that a stage of the source held."""
    path = os.path.join(checkpoint(variant), 'global_step5',
                        f'mp_rank_{stage * tp:02d}_model_states.pt')
    groups = torch.load(path, weights_only=False)['param_shapes']
    return {name for group in groups for name in group}


@pytest.mark.parametrize('variant', ['pp2', 'tp2_pp2', 'pp2_untied'])
def test_the_own_layout_has_the_stages_of_the_source(mount, variant):
    """Three layers on two stages: only with their real split."""
    view = os.path.join(step_of(mount, variant), 'view')
    own, = [n for n in os.listdir(view) if n.endswith('_split2-1_pipe')]
    deg = degrees(own)
    assert (deg['pp'], deg['tp']) == (2, VARIANTS[variant].tp)
    for stage in range(2):
        rank = stage * deg['tp'] * deg['dp']
        tensors, _ = read(os.path.join(view, own, f'rank{rank}'))
        shown = {k.removeprefix('master/') for _, k in tensors
                 if k.startswith('master/')}
        assert shown == masters_saved(variant, stage, deg['tp'])


def put(whole, part, tensor):
    """Copy the pieces that metadata names into the global tensor."""
    for piece in part['pieces']:
        box = tuple(slice(*b) for b in piece['box'])
        local = tuple(slice(a, a + b[1] - b[0])
                      for a, b in zip(piece['at'], piece['box']))
        whole[box] = tensor[local]


@pytest.mark.parametrize('variant', ['zero2_frozen', 'tp2_pp2', 'moe'])
def test_metadata_alone_puts_the_tensors_together(mount, variant):
    layout = {'moe': 'dp4_ep2'}.get(variant, 'tp2_pp3')
    if variant == 'tp2_pp2':
        layout += '_plain'
    truth, deg = load_file(truth_of(variant)), degrees(layout)
    view = os.path.join(step_of(mount, variant), 'view', layout)
    whole = {}
    for rank in range(deg['tp'] * deg['dp'] * deg['pp']):
        tensors, parts = read(os.path.join(view, f'rank{rank}'))
        for key, tensor in tensors.items():
            if key[1].startswith('step/'):
                continue
            into = whole.setdefault(key, torch.zeros(
                parts[key]['global_shape'], dtype=tensor.dtype))
            put(into, parts[key], tensor)
    for key, got in whole.items():
        want = want_of(truth, *key)[1].to(got.dtype)
        assert torch.equal(bits(got), bits(want)), key
    assert set(whole) >= wanted_keys(truth)


def test_pt_files_hold_the_same(mount):
    folder = os.path.join(step_of(mount, 'zero3_frozen'), 'view',
                          'tp2_dp2_zero3', 'rank3')
    for name in ('model', 'optimizer'):
        path = os.path.join(folder, name)
        want = load_file(path + '.safetensors')
        for options in ({}, {'weights_only': True}, {'mmap': True},
                        {'weights_only': True, 'mmap': True}):
            got = torch.load(path + '.pt', **options)
            assert set(want) <= set(got)
            for key, tensor in want.items():
                assert torch.equal(bits(got[key]), bits(tensor)), key
        meta = torch.load(path + '.pt', map_location='meta')
        assert all(meta[k].shape == v.shape for k, v in want.items())


def test_what_no_rule_covers_is_refused_by_name(ckptfs):
    ckptfs.adopt(checkpoint('zero2_frozen'), 'run')
    mount = ckptfs.mount()
    view = os.path.join(step_of(mount, 'run'), 'view')
    assert os.path.isdir(os.path.join(view, 'tp1', 'rank0'))
    assert not os.path.exists(os.path.join(view, 'tp2', 'rank0'))
    said = ckptfs.run('explain', 'tp2', '--store', ckptfs.store, check=False)
    assert "'model.layers.0.tally.calls' and 8 more: no rule says" in said.stdout + said.stderr
    assert '--replicated' in said.stdout + said.stderr
