#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Megatron's ranks load directories, and compare what they then have in memory with truth: megatron_loads.py TASKS OUT

TASKS is a file of JSON, a list of dicts, which all ranks do one after the other:

name        of the result
model       what differs from make_megatron.BASE
degrees     [tp, pp, ep]
chunks      of each stage
step        the directory that dist_checkpointing.load is given
strict      its word for how keys are compared
truth       a file of torch: {key: the whole tensor}, by the keys of torch_dist
optimizer   whether the optimizer is loaded, too
logits      a file of torch, {tokens, logits}, or null
most        times the bytes that a rank gets, which it may read at most, or null
samples     that a job of DeepSpeed had seen, or null
run         [tp, pp] of the layout
group       what groups of the optimizer must have: lr, eps, step

OUT becomes {name: [what is wrong]}.
"""
import json
import os
import sys
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'fixtures', 'megatron'))

# pylint: disable=wrong-import-position
import make_megatron  # it answers what Megatron asks of a GPU, before torch is used
import megatron_ranks
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from megatron.core import dist_checkpointing as dc
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

STATES = 'optimizer.state.'
READ = []  # bytes of each chunk that this rank has read


def count_reads():
    """Has torch's reader tell what it reads."""
    slice_file = FileSystemReader._slice_file

    def counted(self, file, info):
        READ.append(info.length)
        return slice_file(self, file, info)

    FileSystemReader._slice_file = counted


def shards_of(state):
    """The parts of tensors in a sharded state, what is joined in memory taken apart."""
    apply_factories(state)
    return [one for one in nested_values(state) if isinstance(one, ShardedTensor)]


def part_of(shard, whole):
    """The part of a tensor that a shard is; rows that only the run has are zeros."""
    axes = shard.prepend_axis_num
    shape = (1,) * axes + tuple(shard.local_shape)
    out = torch.zeros(shape, dtype=whole.dtype)
    begin = shard.global_offset
    sizes = [max(0, min(size, whole.shape[d] - begin[d])) for d, size in enumerate(shape)]
    there = whole[tuple(slice(b, b + n) for b, n in zip(begin, sizes))]
    out[tuple(slice(0, n) for n in sizes)] = there
    return out.reshape(shard.local_shape)


def differing(shards, truth):
    """Returns all that is wrong, and how many were compared."""
    wrong, keys = [], set()
    for shard in shards:
        keys.add(shard.key)
        if shard.key not in truth:
            wrong.append(f'{shard.key}: no truth')
            continue
        want = part_of(shard, truth[shard.key])
        if shard.data.dtype != want.dtype or not torch.equal(shard.data.cpu().reshape(want.shape), want):
            wrong.append(f'{shard.key} at {tuple(shard.global_offset)}: differs')
    return wrong, keys


def gradients(job, seed):
    """Gradients that are the same whatever the layout, by the key of each tensor: each rank is given its part."""
    grads = {}
    wholes = {}
    by_data = {p.data_ptr(): p for net in job.nets for p in net.module.parameters()}
    for base in nested_values(job.sharded(loading=True)):
        if not isinstance(base, (ShardedTensor, ShardedTensorFactory)):
            continue
        parameter = by_data.get(base.data.data_ptr())
        if parameter is None or parameter.shape != base.data.shape:
            continue
        old, base.data = base.data, parameter.main_grad
        parts = [base] if isinstance(base, ShardedTensor) else shards_of({'one': base})
        for shard in parts:
            if shard.key not in wholes:
                made = torch.Generator().manual_seed(seed + sum(map(ord, shard.key)))
                wholes[shard.key] = torch.randn(shard.global_shape, generator=made)
            shard.data.copy_(part_of(shard, wholes[shard.key]))
        base.data = old
        grads.update({shard.key: wholes[shard.key] for shard in parts})
    return grads


def next_update(job, truth, group, what):
    """What is wrong after one more step of the optimizer, whose masters, moments and hyper-parameters must be the source's."""
    for net in job.nets:
        net.zero_grad_buffer()
    grads = gradients(job, seed=3)
    job.optimizer.step()
    shards = [s for s in live(job, optimizer=True) if s.key.startswith(STATES + 'param.')]
    wrong = []
    for shard in shards:
        key = shard.key.removeprefix(STATES + 'param.')
        grad = grads.get(key)
        if grad is None:
            wrong.append(f'{key}: no gradient')
            continue
        master, first, second = (part_of(shard, truth[f'{STATES}{kind}.{key}']) for kind in ('param', 'exp_avg', 'exp_avg_sq'))
        grad = part_of(shard, grad)
        first = first.lerp(grad, 0.1)
        second = second * 0.999 + 1e-3 * grad * grad
        want = master - group['lr'] * first / (second.sqrt() + group['eps'])
        if not torch.allclose(shard.data.reshape(want.shape), want, atol=1e-6, rtol=1e-5):
            wrong.append(f'{what}: {key}: another next step')
    steps = {g['step'] for o in optimizers(job) for g in o.param_groups}
    if steps != {group['step'] + 1}:
        wrong.append(f'{what}: it counts {steps}')
    return wrong


def optimizers(job):
    """Torch's own optimizers inside."""
    chain = getattr(job.optimizer, 'chained_optimizers', [job.optimizer])
    return [one.optimizer for one in chain]


def live(job, optimizer):
    """The parts of tensors that the job has in memory, by the keys under which it would save them."""
    state = job.sharded(loading=not optimizer)
    return shards_of({k: v or {} for k, v in state.items() if k.startswith(('model', 'optimizer'))})


def logits_of(job, tokens):
    """The whole logits, of a pipeline of one stage."""
    net = job.net.module
    mask = torch.triu(torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        mine = net(tokens, torch.arange(tokens.shape[1])[None].expand(len(tokens), -1), mask)
    parts = [torch.empty_like(mine) for _ in range(ps.get_tensor_model_parallel_world_size())]
    dist.all_gather(parts, mine.contiguous(), group=ps.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)


def do(task):
    """Returns what is wrong on this rank."""
    c = {**make_megatron.BASE, **task['model']}
    job = make_megatron.Job(c, *task['degrees'], seed=20, chunks=task['chunks'])
    if task['optimizer']:
        job.update(7)  # so that the optimizer has states to lose
    asked = job.sharded(loading=True)
    if task['optimizer']:
        metadata = {**dc.load_content_metadata(task['step']), 'dp_cp_group': ps.get_data_parallel_group(with_context_parallel=True)}
        asked['optimizer'] = job.optimizer.sharded_state_dict(dict(asked), is_loading=True, metadata=metadata)
    READ.clear()
    loaded = dc.load(asked, task['step'], strict=task['strict'])
    read = sum(READ)
    for i, net in enumerate(job.nets):
        net.module.load_state_dict(loaded['model' if len(job.nets) == 1 else f'model{i}'])
    if task['optimizer']:
        job.optimizer.load_state_dict(loaded['optimizer'])
    truth = torch.load(task['truth'])
    wrong, keys = differing(live(job, task['optimizer']), truth)
    expected = {k for k in truth if task['optimizer'] or not k.startswith(STATES)}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, keys)
    if missing := expected - set().union(*everyone):
        wrong.append(f'nobody has {sorted(missing)[:4]}')
    flags = vars(loaded['args'])
    if not flags['no_save_rng'] or flags['no_save_optim'] == task['optimizer']:
        wrong.append(f'{flags["no_save_rng"]=} {flags["no_save_optim"]=}')
    wrong += schedule(task, loaded)
    got = sum(shard.data.nbytes for shard in live(job, task['optimizer']))
    if task['most'] and not got <= read <= task['most'] * got:
        wrong.append(f'{read} bytes were read for {got}')
    if (flags['tensor_model_parallel_size'], flags['pipeline_model_parallel_size']) != tuple(task['run'][:2]):
        wrong.append('the degrees are not the layout\'s')
    state = {k: v.clone() for k, v in job.net.module.state_dict().items() if v is not None}
    if task['optimizer']:
        wrong += next_update(job, truth, task['group'], task['name'])
    if task['logits'] and task['degrees'][1] == 1:
        want = torch.load(task['logits'])
        got = logits_of(in_fp32(state, c, task), want['tokens'])[..., :want['logits'].shape[-1]]
        if not torch.allclose(got, want['logits'], atol=2e-5, rtol=1e-4):
            wrong.append(f'logits differ by {(got - want["logits"]).abs().max()}')
    return wrong


def schedule(task, loaded):
    """What is wrong with the schedule: of a DeepSpeed step the samples are known, and nothing else."""
    if task['samples'] is None:
        return []
    nobody = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    arguments = {'init_lr': 0.0, 'max_lr': 1.0, 'min_lr': 0.0, 'lr_warmup_steps': 10, 'lr_decay_steps': 1000, 'lr_decay_style': 'linear',
                 'start_wd': 0.1, 'end_wd': 0.1, 'wd_incr_steps': 0, 'wd_incr_style': 'constant'}
    over = OptimizerParamScheduler(nobody, **arguments, use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True)
    over.load_state_dict(loaded['opt_param_scheduler'])
    wrong = [] if over.num_steps == task['samples'] == loaded['args'].consumed_train_samples else [f'{over.num_steps} samples']
    same = OptimizerParamScheduler(nobody, **arguments, use_checkpoint_opt_param_scheduler=False)
    try:
        same.load_state_dict(loaded['opt_param_scheduler'])
        wrong.append('it takes a schedule that nobody knows')
    except AssertionError:
        pass
    return wrong


def in_fp32(state, c, task):
    """A job with these weights that computes in fp32; it takes the ranks from the one before."""
    job = make_megatron.Job({**c, 'dtype': 'float32'}, *task['degrees'], seed=21)
    job.net.module.load_state_dict(state, strict=False)
    return job


def rank_main(tasks, out):
    """One rank of all tasks."""
    count_reads()
    results = {}
    for task in tasks:
        try:
            mine = do(task)
        except Exception:  # pylint: disable=broad-exception-caught
            mine = [traceback.format_exc()]
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        results[task['name']] = [f'rank {r}: {one}' for r, all_of in enumerate(everyone) for one in all_of[:4]]
    if dist.get_rank() == 0:
        with open(out, 'w', encoding='utf-8') as f:
            json.dump(results, f)


def main():
    """All tasks of a file."""
    with open(sys.argv[1], encoding='utf-8') as f:
        tasks = json.load(f)
    megatron_ranks.fork(rank_main, make_megatron.WORLD, tasks, sys.argv[2])


if __name__ == '__main__':
    main()
