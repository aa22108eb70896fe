# SPDX-License-Identifier: Apache-2.0
"""Engines whose files do not say what their names say: Muon's momenta, and Ulysses' ranks.

The truth is what the live engines hold.
"""
import glob
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import launch

WORLD = 4
MUON = {'type': 'Muon', 'params': {'lr': 1e-2, 'weight_decay': .1, 'torch_adam': True}}
ADAMW = {'type': 'AdamW', 'params': {'lr': 1e-2, 'torch_adam': True}}
KINDS = ('exp_avg', 'exp_avg_sq')


class Net(nn.Module):
    """Matrices for Muon, and biases for Adam."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(n, 16) for n in (12, 16, 16, 16, 16))
        self.head = nn.Linear(16, 6, bias=False)

    def forward(self, x):
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return self.head(x)


def start():
    """The process group, without a library that would be compiled."""
    import deepspeed
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    deepspeed.init_distributed('gloo', verbose=False)
    torch.manual_seed(5)
    return deepspeed


def train(deepspeed, more, **arguments):
    model = Net()
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(),
        config={'train_micro_batch_size_per_gpu': 2, 'bf16': {'enabled': True},
                'zero_allow_untested_optimizer': True, **more}, **arguments)[0]
    for i in range(3):
        torch.manual_seed(i)
        engine.backward(engine(torch.randn(2, 12).bfloat16()).float().pow(2).sum())
        engine.step()
    return engine


def truth_of(engine, kinds=KINDS):
    """Masters and moments, by collectives."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    truth = {}
    for name, p in engine.module.named_parameters():
        truth[f'master/{name}'] = safe_get_full_fp32_param(p).clone()
        for kind in kinds:
            truth[f'{kind}/{name}'] = safe_get_full_optimizer_state(p, kind).clone()
    return truth


def save(engine, out, truth):
    import deepspeed.comm as dist
    engine.save_checkpoint(f'{out}/run', tag='global_step3')
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(truth, f'{out}/truth.pt')


def muon_rank(out, stage):
    """A run with DeepSpeed's Muon; each rank notes the momenta that it holds, by parameter."""
    deepspeed = start()
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    members = {}
    flat = DeepSpeedZeroOptimizer.get_flat_partition

    def noting(self, tensors, *args, **kwargs):
        members[kwargs.get('param_group_idx', args[-1] if args else None)] = list(tensors)
        return flat(self, tensors, *args, **kwargs)
    DeepSpeedZeroOptimizer.get_flat_partition = noting
    engine = train(deepspeed, {'zero_optimization': {'stage': stage}, 'optimizer': MUON})
    names = {id(p): n for n, p in engine.module.named_parameters()}
    own, at = {}, 0
    muon, adam = (engine.optimizer.optimizer.state[group['params'][0]] for group in engine.optimizer.optimizer.param_groups)
    buffer = muon['momentum_buffer']
    for p in members[0]:
        own[names[id(p)]] = buffer[at:at + p.numel()].view(p.shape).clone()
        at += p.numel()
    assert at == buffer.numel()
    torch.save((own, {kind: adam[kind] for kind in KINDS}), f'{out}/states{deepspeed.comm.get_rank()}.pt')
    save(engine, out, truth_of(engine, ()))


def ulysses_rank(out, stage, degree):
    """A run with sequence parallelism of a degree, and the data parallelism that is left."""
    deepspeed = start()
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu
    mpu.initialize_sequence_parallel(degree)
    zero = {'stage': stage, **({'stage3_param_persistence_threshold': 0} if stage == 3 else {})}
    engine = train(deepspeed, {'zero_optimization': zero, 'sequence_parallel_size': degree, 'optimizer': ADAMW}, mpu=mpu)
    save(engine, out, truth_of(engine))


def run(worker, out, *args, world=WORLD):
    log = os.path.join(out, 'rank')
    assert launch.launch(worker, world, (str(out), *args), log), launch.errors_of(log, world)


def shown(ckptfs, tmp_path, *words):
    """The model, the optimizer and what adopt said."""
    out = tmp_path / f'out{len(list(tmp_path.glob("out*")))}'
    done = ckptfs.adopt(tmp_path / 'run', extra=words)
    ckptfs.run('export', '--store', ckptfs.store, done.stdout.split()[0], 'tp1/rank0', out)
    return (load_file(next(out.rglob('model.safetensors'))), load_file(next(out.rglob('optimizer.safetensors'))),
            done.stderr)


@pytest.mark.parametrize('stage', [1, 2])
def test_muons_momenta_are_taken_where_one_rank_has_them(ckptfs, tmp_path, stage):
    run(muon_rank, tmp_path, stage, world=3)
    held, moments = zip(*(torch.load(f'{tmp_path}/states{r}.pt') for r in range(3)))
    model, optimizer, said = shown(ckptfs, tmp_path)
    truth = torch.load(f'{tmp_path}/truth.pt')
    for kind in KINDS:
        flat = torch.cat([one[kind] for one in moments])  # of the biases, in the model's order
        truth.update({f'{kind}/inner.{i}.bias': flat[16 * i:16 * i + 16] for i in range(5)})
    assert len(truth) == 11 + 2 * 5 and all(torch.equal(optimizer[k], t) for k, t in truth.items())
    assert set(model) == {k.split('/', 1)[1] for k in truth if k.startswith('master')}
    alone = {n for n in model if sum(n in one for one in held) == 1}
    several = {n for one in held for n in one} - alone
    assert alone and several
    assert {k.split('/', 1)[1] for k in optimizer if k.startswith('momentum')} == alone
    for name in alone:
        live = next(one[name] for one in held if name in one)
        assert torch.equal(optimizer[f'momentum_buffer/{name}'], live), name
    assert "left out: optimizer state 'momentum_buffer' of '" in said and 'copy of its own' in said
    done = ckptfs.run('adopt', '--store', f'{tmp_path}/other', '--require', 'optimizer', tmp_path / 'run', check=False)
    assert done.returncode != 0 and 'momentum_buffer' in done.stderr


def rename_as_older(tag, degree):
    """Gives files the names of engines before 0.19.6, where the rank of a sequence stands."""
    for path in glob.glob(f'{tag}/*zero_pp_rank_*'):
        rank = int(path.split('zero_pp_rank_')[1].split('_')[0])
        os.rename(path, path.replace('_mp_rank_00_', f'_mp_rank_{rank % degree:02d}_'))


@pytest.mark.parametrize('stage,degree', [(1, 2), (2, 4), (3, 2)])
def test_a_sequence_degree_is_no_tensor_degree(ckptfs, tmp_path, stage, degree):
    run(ulysses_rank, tmp_path, stage, degree)
    truth = torch.load(f'{tmp_path}/truth.pt')
    tag = tmp_path / 'run' / 'global_step3'
    model = torch.load(next(tag.glob('*model_states.pt')), weights_only=False)
    assert model['mp_world_size'] == 1 and model['checkpoint_parallel_dimensions']['tp_degree'] == degree
    for spelling in ('current', 'older'):
        if spelling == 'older':
            rename_as_older(tag, degree)
        optimizer = shown(ckptfs, tmp_path)[1]
        assert len(truth) == 3 * 11 and all(torch.equal(optimizer[k], t) for k, t in truth.items()), spelling
    # A rank that is missing is named as the data-parallel rank that it is.
    os.remove(next(tag.glob('*zero_pp_rank_3_*optim_states.pt')))
    done = ckptfs.run('adopt', '--store', f'{tmp_path}/other', tmp_path / 'run', check=False)
    assert done.returncode != 0 and 'data-parallel rank 3 of 4, model-parallel rank 0 of 1' in done.stderr


def test_ranks_of_two_runs_are_not_taken_for_a_sequence(ckptfs, tmp_path):
    run(ulysses_rank, tmp_path, 1, 2)
    tag = tmp_path / 'run' / 'global_step3'
    one = next(tag.glob('*zero_pp_rank_1_mp_rank_00_optim_states.pt'))
    shutil.copy(one, str(one).replace('_mp_rank_00_', '_mp_rank_01_'))
    done = ckptfs.run('adopt', '--store', ckptfs.store, tmp_path / 'run', check=False)
    assert done.returncode != 0 and 'two runs lie in one directory' in done.stderr


