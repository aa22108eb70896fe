# SPDX-License-Identifier: Apache-2.0
"""Optimizers that megatron-core saves by buckets of ranks (dp_reshardable, the default of its trainer).

Such a directory does not say which parameter lies where.  make_megatron.py keeps what each rank's optimizer has in memory
when it saves (`live`), by parameter and range, so the truth is the engine's own and no reader's.
"""
import json
import os
import pickle
import shutil

import pytest
import torch

import daemon
from dcp_reads import read_dcp

LAYERS = 4
BLOCK = 'decoder.layers.'
# name: (tp, experts' tp, experts of one rank)
JOBS = {'buckets': (2, 2, 0), 'buckets_tp2pp2': (2, 2, 0), 'buckets_many': (1, 1, 0), 'buckets_vpp': (1, 1, 0),
        'buckets_ep2': (1, 1, 2), 'buckets_etp2': (2, 2, 2)}
STATES = ('master', 'exp_avg', 'exp_avg_sq')


@pytest.fixture(scope='module')
def saved():
    """The folder of all models."""
    return os.path.join(daemon.FIXTURES, 'megatron')


@pytest.fixture(scope='module')
def shown(saved, tmp_path_factory):
    """All of them in one mount."""
    program = daemon.Ckptfs(str(tmp_path_factory.mktemp('mount')))
    for name in [*JOBS, 'buckets_new']:
        program.adopt(f'{saved}/{name}', name)
    yield program.mount(), program
    program.close()


def view(mount, run, layout):
    return os.path.join(daemon.step_of(mount, run), 'view', layout)


def key_of(name):
    """The key under which Megatron saves a parameter of its module, and the rank's number of the expert."""
    name = name.replace('input_layernorm.', 'self_attention.linear_qkv.layer_norm_')
    name = name.replace('pre_mlp_layernorm.', 'mlp.linear_fc1.layer_norm_')
    parts = name.split('.')
    if 'local_experts' not in parts:
        return name, None
    at = parts.index('local_experts')
    return '.'.join([*parts[:at], 'experts', *parts[at + 2:]]), int(parts[at + 1])


def cut(name, tensor, rank, ranks):
    """The part of a tensor that Megatron's rank has."""
    if 'linear_fc1.weight' in name:
        return torch.cat([part.chunk(ranks)[rank] for part in tensor.chunk(2)])
    if 'linear_qkv.' in name and 'layer_norm' not in name or 'word_embeddings' in name or 'output_layer' in name:
        return tensor.chunk(ranks)[rank]
    if name.endswith(('linear_proj.weight', 'linear_fc2.weight')):
        return tensor.chunk(ranks, 1)[rank]
    return tensor


def live_of(saved, name):
    """(key, expert, tensor rank, ranks, first element, states) of all that the job's ranks have."""
    tp, etp, per_rank = JOBS[name]
    for rank in range(4):
        live = torch.load(f'{saved}/{name}/live/{rank}.pt')
        for parameter, first, states in live['states']:
            key, expert = key_of(parameter)
            if 'output_layer' in key and name == 'buckets_many':
                key = 'embedding.word_embeddings.weight'
            if expert is None:
                yield key, None, live['ranks']['tp'], tp, first, states
            else:
                yield key, live['ranks']['ep'] * per_rank + expert, live['ranks']['etp'], etp, first, states


def assert_live(saved, name, states):
    """States of whole tensors are those of the engine, and none of the engine's is missing."""
    seen = {kind: {} for kind in STATES}
    for key, expert, rank, ranks, first, values in live_of(saved, name):
        assert set(values) == set(STATES)
        for kind, value in values.items():
            whole = states[kind][key]
            mine = cut(key, whole if expert is None else whole[expert], rank, ranks).reshape(-1)
            assert torch.equal(mine[first:first + value.numel()], value), (name, key, kind, rank, first)
            seen[kind][key] = seen[kind].get(key, 0) + value.numel()
    for kind in STATES:
        assert set(seen[kind]) == set(states[kind])
        for key, elements in seen[kind].items():
            assert elements >= states[kind][key].numel(), (key, elements)


def states_of(loaded):
    return {kind: {k.removeprefix(kind + '/'): v for k, v in loaded.items() if k.startswith(kind + '/')} for kind in STATES}


@pytest.mark.parametrize('name', JOBS)
def test_masters_and_moments_are_those_in_the_engines_memory(shown, saved, name):
    loaded = torch.load(view(shown[0], name, 'tp1') + '/rank0/optimizer.pt')
    assert_live(saved, name, states_of(loaded))
    steps = [v for k, v in loaded.items() if k.startswith('step/')]
    assert len(steps) == len(states_of(loaded)['master']) and {int(v) for v in steps} == {2}


def left_out(program, name):
    info = json.loads(program.run('info', name, '--store', program.store, '--json').stdout)
    return [one for one in info['left_out'] if one.get('part') == 'optimizer']


def test_what_nothing_tells_apart_is_left_out_with_the_reason_and_the_remedy(shown):
    """Before the first step all norms are one: each of them may be any."""
    [left] = left_out(shown[1], 'buckets_new')
    assert 'dp_reshardable' in left['why'] and 'layer_norm_weight' in left['why'] and 'same values' in left['why'], left
    assert '--dist-ckpt-optim-fully-reshardable' in left['needs']
    assert os.path.exists(view(shown[0], 'buckets_new', 'tp1') + '/rank0/model.pt')
    assert not left_out(shown[1], 'buckets')
