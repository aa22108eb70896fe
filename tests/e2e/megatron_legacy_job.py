#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tiny GPT models of megatron-core that ranks save as Megatron's --ckpt-format torch does: megatron_legacy_job.py OUT NAME...
With --load TASKS ranks load such directories instead, or of torch_dist (megatron_loads.py), and OUT becomes {name of the task: [what is wrong with what
they have in memory]}.

OUT/<name>/run/iter_0000007/mp_rank_*/    model_optim_rng.pt, and distrib_optim.pt of a distributed optimizer
OUT/<name>/run/latest_checkpointed_iteration.txt
OUT/<name>/plain.pt                       {key: tensor} that Megatron's own reader finds in what dist_checkpointing saved of the same engines
OUT/<name>/live/<N>.pt                    what rank N's distributed optimizer has in memory (make_megatron.py)
OUT/<name>/logits.pt                      of the model that Megatron itself loads of that at one rank

The files hold what megatron/training/checkpointing.py of core 0.16.1 puts into them (generate_state_dict), in its order: buffers of the
distributed optimizer, the rank's state, and, when all ranks have theirs, the tracker.
"""
import argparse
import functools
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
from megatron.core import dist_checkpointing as dc
from megatron.core import parallel_state as ps
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import experts as experts_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_loads import differing, do, live

PLAIN = {'sharding': ''}
VARIANTS = {
    'tp2pp2': {'tp': 2, 'pp': 2, 'bias': True, **PLAIN},
    'flat_tp2': {'tp': 2},
    'flat_vpp2': {'pp': 2, 'vpp': 2, 'norm': True, 'dtype': 'float16'},
    'flat_tied': {'pp': 2, 'tied': True, 'dtype': 'float32', 'bucket': 5000},
    'fp32_tied': {'tp': 2, 'tied': True, 'channels': 8, 'dtype': 'float32', **PLAIN},
    'fp32_tied_pp2': {'pp': 2, 'tied': True, 'dtype': 'float32', **PLAIN},
    'flat_ep2': {'pp': 2, 'ep': 2, 'experts': 4},
    'plain_ep2': {'ep': 2, 'experts': 4, 'norm': True, **PLAIN},
    'grouped_ep2': {'ep': 2, 'experts': 4, 'grouped': True, **PLAIN},
    'flat_grouped': {'tp': 2, 'experts': 4, 'grouped': True},
    'flat_etp2': {'tp': 2, 'ep': 2, 'etp': 2, 'experts': 4, 'shared': 24},
    'flat_etp1': {'tp': 2, 'ep': 2, 'etp': 1, 'experts': 4},
    'uneven': {'pp': 2, 'first': 1, **PLAIN},
    'plain_vpp2': {'pp': 2, 'vpp': 2, 'bias': True, 'groups': 2, **PLAIN},
    'flat_early': {'tp': 2, 'rate': 1e-6},
    'plain_early': {'tp': 2, 'rate': 1e-6, **PLAIN},
}


def args_of(job, c):
    """Arguments as megatron.training has them, with what a legacy file alone needs."""
    out = job.args()
    tp, pp, ep, etp = job.degrees
    vars(out).update(
        rank=dist.get_rank(), virtual_pipeline_model_parallel_size=c['vpp'] if c['vpp'] > 1 else None, use_distributed_optimizer=bool(c['sharding']),
        overlap_grad_reduce=bool(c['bucket']), no_save_optim=False, no_save_rng=False, use_tp_pp_dp_mapping=False,
        decoder_first_pipeline_num_layers=c.get('first'), decoder_last_pipeline_num_layers=None, pipeline_model_parallel_layout=None,
        account_for_embedding_in_pipeline_split=False, account_for_loss_in_pipeline_split=False, ckpt_format='torch', consumed_train_samples=64,
        expert_tensor_parallel_size=etp, rotary_base=c['base'], transformer_impl='local', moe_grouped_gemm=bool(c.get('grouped')))
    assert (out.tensor_model_parallel_size, out.pipeline_model_parallel_size, out.expert_model_parallel_size) == (tp, pp, ep)
    return out


def save_legacy(job, c, save, iteration):
    """What a rank writes."""
    folder = f'{save}/iter_{iteration:07d}/{folder_of(job)}'
    if c['sharding']:
        os.makedirs(folder, exist_ok=True)
        job.optimizer.save_parameter_state(f'{folder}/distrib_optim.pt')
    if 0 in (ps.get_expert_data_parallel_rank(), ps.get_data_parallel_rank(with_context_parallel=True)):
        state = {'args': args_of(job, c), 'checkpoint_version': 3.0, 'iteration': iteration}
        for i, net in enumerate(job.nets):
            state['model' if len(job.nets) == 1 else f'model{i}'] = net.state_dict_for_save_checkpoint()
        state['optimizer'] = job.optimizer.state_dict()
        state['opt_param_scheduler'] = {'max_lr': 1e-2, 'lr_warmup_steps': 0, 'num_steps': 64, 'lr_decay_style': 'constant', 'lr_decay_steps': 100,
                                        'min_lr': 0.0, 'start_wd': 0.1, 'end_wd': 0.1, 'wd_incr_style': 'constant', 'wd_incr_steps': 0}
        state['rng_state'] = [{'random_rng_state': None, 'torch_rng_state': torch.get_rng_state(), 'rng_tracker_states': {}}]
        state['num_floating_point_operations_so_far'] = 7
        os.makedirs(folder, exist_ok=True)
        torch.save(state, f'{folder}/model_optim_rng.pt')
    dist.barrier()
    if dist.get_rank() == 0:
        for empty in (f'{save}/iter_{iteration:07d}/{one}' for one in os.listdir(f'{save}/iter_{iteration:07d}')):
            if not os.listdir(empty):
                os.rmdir(empty)
        with open(f'{save}/latest_checkpointed_iteration.txt', 'w', encoding='utf-8') as f:
            f.write(str(iteration))
    dist.barrier()


def folder_of(job):
    """The folder of this rank."""
    _, pp, ep, _ = job.degrees
    out = f'mp_rank_{ps.get_tensor_model_parallel_rank():02d}'
    out += f'_{ps.get_pipeline_model_parallel_rank():03d}' if pp > 1 else ''
    return out + (f'_{ps.get_expert_model_parallel_rank():03d}' if ep > 1 else '')


def load(task):
    """Returns what is wrong with what this rank then has in memory: {step, model, degrees, chunks, truth, strict}."""
    c = {**make_megatron.BASE, 'etp': task['degrees'][0], **task['model']}
    job = make_megatron.Job(c, *task['degrees'], seed=20, chunks=task['chunks'])
    state = torch.load(f'{task["step"]}/{folder_of(job)}/model_optim_rng.pt')  # torch's own checks of classes included
    for i, net in enumerate(job.nets):
        net.load_state_dict(state['model' if len(job.nets) == 1 else f'model{i}'], strict=task['strict'])
    wrong, keys = differing(live(job, optimizer=False), torch.load(task['truth']))
    flags = vars(state['args'])
    degrees = [flags[f'{d}_model_parallel_size'] for d in ('tensor', 'pipeline', 'expert')]
    if degrees != task['degrees'] or flags['num_layers'] != c['layers'] or flags['padded_vocab_size'] != c['vocab']:
        wrong.append(f'args say {degrees}, {flags["num_layers"]}, {flags["padded_vocab_size"]}')
    if state['checkpoint_version'] != 3.0:
        wrong.append('the version')
    return wrong + ([] if keys else ['nothing was compared'])


def specialise(c):
    """Has jobs of this variant be made with what make_megatron does not know."""
    make_megatron.get_gpt_layer_local_spec = (
        (lambda **words: get_gpt_layer_local_spec(**{**words, 'moe_grouped_gemm': True})) if c.get('grouped') else get_gpt_layer_local_spec)
    make_megatron.TransformerConfig = (
        functools.partial(TransformerConfig, num_layers_in_first_pipeline_stage=c['first']) if c.get('first') else TransformerConfig)


def make(name, out):
    """One variant, on all ranks."""
    c = {**make_megatron.BASE, 'etp': VARIANTS[name].get('tp', 1), **VARIANTS[name]}
    folder = f'{out}/{name}'
    if dist.get_rank() == 0:
        os.makedirs(f'{folder}/run')
        os.makedirs(f'{folder}/dist')
        os.makedirs(f'{folder}/live')
    dist.barrier()
    specialise(c)
    job = make_megatron.Job(c, c['tp'], c['pp'], c['ep'], seed=5)
    for group in job.optimizer.param_groups:
        group['lr'] = c.get('rate', group['lr'])
    for seed in range(1, c['steps'] + 1):
        job.update(seed)
    save_legacy(job, c, f'{folder}/run', 7)
    if c['sharding']:
        job.keep_live(f'{folder}/live/{dist.get_rank()}.pt')
    dc.save(job.sharded(), f'{folder}/dist')
    plain = dc.load_plain_tensors(f'{folder}/dist')
    if dist.get_rank() == 0:
        torch.save({k: v for k, v in plain.items() if isinstance(v, torch.Tensor)}, f'{folder}/plain.pt')
    specialise(make_megatron.BASE)
    if not c.get('first') and not c.get('grouped'):
        make_megatron.keep_logits({**c, 'sharding': c['sharding']}, folder, f'{folder}/dist')
    dist.barrier()
    if dist.get_rank() == 0:
        print('made', name, flush=True)


def load_all(tasks, out):
    """What is wrong with each, of all ranks."""
    results = {}
    for task in tasks:
        try:
            mine = load(task) if task['legacy'] else do(task)
        except Exception:  # pylint: disable=broad-exception-caught
            mine = [traceback.format_exc()]
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        results[task['name']] = [f'rank {r}: {one}' for r, all_of in enumerate(everyone) for one in all_of[:4]]
    if dist.get_rank() == 0:
        with open(out, 'w', encoding='utf-8') as f:
            json.dump(results, f)


def rank_main(out, names, loads):
    """One rank of all variants, or of all loads."""
    experts_module.gg.assert_grouped_gemm_is_available = lambda: None
    if loads:
        with open(loads, encoding='utf-8') as f:
            load_all(json.load(f), out)
    for name in names:
        make(name, out)


def main():
    """Makes variants, or loads."""
    parser = argparse.ArgumentParser()
    parser.add_argument('out')
    parser.add_argument('names', nargs='*')
    parser.add_argument('--load')
    words = parser.parse_args()
    names = words.names or ([] if words.load else list(VARIANTS))
    megatron_ranks.fork(rank_main, make_megatron.WORLD, os.path.abspath(words.out), names, words.load)


if __name__ == '__main__':
    main()
