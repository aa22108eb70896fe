# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of torch.distributed.checkpoint, as every kind of job saves them.

What the views show of one is compared bit for bit with what torch gathered out of the
live model and optimizer (tests/fixtures/dcp).
"""
import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import daemon

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'fixtures', 'dcp'))
from make_dcp import STEPS, VARIANTS  # noqa: E402

FIXTURES = os.path.join(daemon.FIXTURES, 'dcp')
STEP = f'step-{STEPS}'
# What a config.json would say, and what no rule of a Llama knows.
SAID = ('--family-set', 'head_dim=8', '--replicated', r'model\.(gain|seen|running_mean)')


def source(variant):
    """The step's directory."""
    return os.path.join(FIXTURES, variant, 'ckpt', STEP)


def truth_of(variant):
    """{kind: {name: tensor}} of the live job."""
    out = {}
    for key, tensor in load_file(os.path.join(FIXTURES, variant, 'truth.safetensors')).items():
        kind, name = key.split('/', 1)
        out.setdefault(kind, {})[name] = tensor
    return out


@pytest.fixture(scope='module')
def mounted(tmp_path_factory):
    """All variants in one mount."""
    program = daemon.Ckptfs(str(tmp_path_factory.mktemp('dcp')))
    for variant in VARIANTS:
        program.adopt(os.path.join(FIXTURES, variant, 'ckpt'), variant, extra=SAID)
    yield program.mount()
    program.close()


def view_of(mount, variant, layout):
    """The directory of a layout."""
    return os.path.join(daemon.step_of(mount, variant, STEP), 'view', layout)


def differ(got, want):
    """Names of tensors that are not equal in dtype, shape and every bit."""
    return sorted(
        k for k in set(got) | set(want)
        if k not in got or k not in want or got[k].dtype != want[k].dtype
        or got[k].shape != want[k].shape
        or not torch.equal(got[k].contiguous().view(-1).view(torch.uint8),
                           want[k].contiguous().view(-1).view(torch.uint8)))


def optimizer_of(truth):
    """Keys as the optimizer's rank files have them."""
    return {f'{kind}/{name}': t for kind, names in truth.items() if kind != 'weight'
            for name, t in names.items()}


@pytest.mark.parametrize('variant', VARIANTS)
def test_a_rank_alone_holds_what_the_job_held(mounted, variant):
    truth = truth_of(variant)
    rank = os.path.join(view_of(mounted, variant, 'tp1'), 'rank0')
    assert differ(load_file(os.path.join(rank, 'model.safetensors')), truth['weight']) == []
    assert differ(torch.load(os.path.join(rank, 'model.pt'), mmap=True), truth['weight']) == []
    if variant == 'shards':  # the writer of safetensors saves weights alone
        return
    assert differ(load_file(os.path.join(rank, 'optimizer.safetensors')),
                  optimizer_of(truth)) == []


def cut(name, tensor, tp, rank):
    """What a Llama's tensor-parallel rank holds."""
    if any(word in name for word in ('q_proj', 'k_proj', 'v_proj', 'gate_proj', 'up_proj')):
        return tensor.chunk(tp, 0)[rank]
    if any(word in name for word in ('o_proj', 'down_proj')):
        return tensor.chunk(tp, 1)[rank]
    if any(word in name for word in ('embed_tokens', 'lm_head')):
        rows = -(-tensor.shape[0] // tp)
        padded = torch.cat([tensor, tensor.new_zeros(rows * tp - tensor.shape[0],
                                                     tensor.shape[1])])
        return padded[rank * rows:(rank + 1) * rows]
    return tensor


@pytest.mark.parametrize('variant', ['fsdp2', 'fsdp2_tp', 'ddp', 'titan', 'ranks'])
def test_tensor_parallel_ranks_hold_their_parts(mounted, variant):
    truth = truth_of(variant)
    for rank in range(2):
        folder = os.path.join(view_of(mounted, variant, 'tp2'), f'rank{rank}')
        want = {k: cut(k, t, 2, rank) for k, t in truth['weight'].items()}
        assert differ(load_file(os.path.join(folder, 'model.safetensors')), want) == []
        want = {k: cut(k, t, 2, rank) if t.ndim else t for k, t in optimizer_of(truth).items()}
        assert differ(load_file(os.path.join(folder, 'optimizer.safetensors')), want) == []


@pytest.mark.parametrize('variant', ['fsdp2_tp', 'accelerate', 'fsdp1'])
def test_data_parallel_ranks_hold_flat_parts(mounted, variant):
    truth = optimizer_of(truth_of(variant))
    parts = [load_file(os.path.join(view_of(mounted, variant, 'dp3_zero1'), f'rank{rank}',
                                    'optimizer.safetensors')) for rank in range(3)]
    for key, tensor in truth.items():
        if tensor.ndim == 0:
            assert all(torch.equal(part[key], tensor) for part in parts)
            continue
        flat = torch.cat([part[key] for part in parts])
        assert torch.equal(flat[:tensor.numel()], tensor.flatten()), key
        assert not flat[tensor.numel():].any(), key


def test_other_things_beside_the_model_are_kept(mounted):
    with open(os.path.join(daemon.step_of(mounted, 'fsdp2', STEP), 'info.json')) as f:
        info = json.load(f)
    assert info['framework'] == 'dcp' and info['iteration'] == STEPS
    folder = os.path.join(view_of(mounted, 'fsdp2', 'dp2_zero1'), 'deepspeed')
    with open(os.path.join(folder, 'latest')) as f:
        tag = f.read()
    states = torch.load(os.path.join(folder, tag, 'mp_rank_00_model_states.pt'),
                        weights_only=False)
    assert states['train_state']['step'] == STEPS
    assert states['train_state']['ntokens'].item() == 12345
    assert states['lr_scheduler']['last_epoch'] == STEPS
    assert sorted(states['rng']) == [f'rank_{r}' for r in range(4)]


@pytest.mark.parametrize('variant', ['fsdp2', 'fsdp2_flat', 'hsdp', 'accelerate', 'titan'])
def test_a_universal_directory_has_every_state(mounted, variant):
    truth = truth_of(variant)
    folder = os.path.join(view_of(mounted, variant, 'dp2_zero1'), 'deepspeed')
    with open(os.path.join(folder, 'latest')) as f:
        zero = os.path.join(folder, f.read(), 'zero')
    for kind, file in (('weight', 'fp32'), ('exp_avg', 'exp_avg'), ('exp_avg_sq', 'exp_avg_sq')):
        for name in truth['exp_avg']:
            got = torch.load(os.path.join(zero, name, f'{file}.pt'))['param']
            assert torch.equal(got, truth[kind][name].float()), (kind, name)
    rates = torch.load(os.path.join(zero, 'optimizer_state.pt'), weights_only=False)
    assert rates['param_groups'][0]['lr'] == 1e-2


def test_verify_export_and_param(ckptfs, tmp_path):
    for variant in ('fsdp2_tp', 'ranks'):
        ckptfs.adopt(source(variant), variant)
        ckptfs.run('verify', f'{variant}/{STEP}', '--store', ckptfs.store)
    truth = truth_of('fsdp2_tp')
    ckptfs.run('export', f'fsdp2_tp/{STEP}', 'tp1', str(tmp_path / 'out'), '--store', ckptfs.store)
    got = load_file(tmp_path / 'out' / 'rank0' / 'model.safetensors')
    assert differ(got, truth['weight']) == []
    mount = ckptfs.mount()
    folder = os.path.join(daemon.step_of(mount, 'fsdp2_tp', STEP), 'param')
    assert 'lm_head.weight' in os.listdir(folder)
