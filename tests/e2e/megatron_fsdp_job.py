#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tiny GPT models that ranks wrap in Megatron-FSDP, update, and save as Megatron's --ckpt-format fsdp_dtensor does: megatron_fsdp_job.py OUT NAME...

OUT/<name>/run/iter_0000007           what torch.distributed.checkpoint wrote; all states that it got were prepared by megatron-core
OUT/<name>/run/latest_checkpointed_iteration.txt
OUT/<name>/live/<N>.pt                what rank N has in memory, out of the buffers of Megatron-FSDP: {ranks: {tp, etp, ep}, states: [(name of the
                                      parameter with the model's number of its expert, first element of the rank's tensor, {kind: values})],
                                      weights: {name: the rank's whole tensor in the model's dtype}, shapes: {name: shape of the rank's tensor}}

Stand-ins answer what Megatron asks of a GPU: streams that do nothing, a mesh of CPUs, and the FusedAdam that it takes there.  Sharding, names,
chunks and all that is done to a state before it is saved are megatron-core's own code.
"""
import argparse
import contextlib
import os
import sys
import types

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'fixtures', 'megatron'))

# pylint: disable=wrong-import-position
import make_megatron  # it answers what Megatron asks of a GPU, before torch is used
import megatron_ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import fsdp_dtensor_checkpoint as transforms
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model

BASE = {**make_megatron.BASE, 'strategy': 'optim_grads_params', 'instances': 1, 'masters': True, 'args': True}
VARIANTS = {
    'dp4': {},
    'tp2': {'tp': 2, 'bias': True, 'groups': 2},
    'tp4': {'tp': 4, 'tied': True, 'channels': 8, 'strategy': 'optim'},
    'ep2': {'ep': 2, 'experts': 4},
    'tp2ep2': {'tp': 2, 'ep': 2, 'etp': 1, 'experts': 4, 'norm': True},
    'etp2': {'tp': 2, 'ep': 2, 'etp': 2, 'experts': 4, 'bias': True, 'shared': 24, 'strategy': 'optim_grads'},
    'hsdp': {'instances': 2, 'norm': True, 'channels': 8, 'strategy': 'optim_grads', 'masters': False},
    'new': {'steps': 0},
    'bridge': {'tp': 2, 'ep': 2, 'etp': 1, 'experts': 4, 'args': False},
}


class FusedAdam(make_megatron.FusedAdam):
    """The same, of DTensors, whose local parts it updates: each has its states from the first step on, as Transformer Engine's."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group['step'] = group.get('step', 0) + 1
            for parameter in group['params']:
                state = self.state[parameter]
                if not state:
                    state.update({kind: torch.zeros_like(parameter) for kind in ('exp_avg', 'exp_avg_sq')})
                if parameter.grad is None:
                    continue
                grad, value = parameter.grad.to_local(), parameter.to_local()
                average, square = state['exp_avg'].to_local(), state['exp_avg_sq'].to_local()
                average.lerp_(grad, 0.1)
                square.mul_(0.999).addcmul_(grad, grad, value=1e-3)
                value.addcdiv_(average, square.sqrt() + group['eps'], value=-group['lr'])


class Device(str):
    """The CPU; `cuda:N` is asked for its number."""

    def __format__(self, _):
        return '0'


def stand_in_for_streams():
    """Answers what Megatron-FSDP asks of a GPU besides."""
    nothing = {name: lambda *_, **__: None for name in ('synchronize', 'wait_stream', 'wait_event', 'record_event')}
    stream = types.SimpleNamespace(**nothing)
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_, **__: stream
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.current_device = lambda: Device('cpu')
    torch.cuda.set_rng_state = lambda *_, **__: None
    from_group = dist.DeviceMesh.from_group
    dist.DeviceMesh.from_group = lambda groups, device_type, *args, **kwargs: from_group(groups, 'cpu', *args, **kwargs)
    make_megatron.optimizers.Adam = make_megatron.distrib_optimizer.Adam = FusedAdam
    mcore_fsdp_adapter.TELinear = type('TELinear', (), {})  # None without Transformer Engine, which isinstance refuses


class Job:
    """One rank's part of a model, and its optimizer."""

    def __init__(self, c, seed):
        ps.destroy_model_parallel()
        tp, pp, ep, etp = self.degrees = c['tp'], c['pp'], c['ep'], c['etp']
        ps.initialize_model_parallel(tp, pp, None, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
                                     num_distributed_optimizer_instances=c['instances'])
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self.c = c
        config, layer = make_megatron.config_of(c, self.degrees)
        dtype = config.params_dtype
        net = GPTModel(config, layer, vocab_size=c['vocab'], max_sequence_length=64, position_embedding_type='rope',
                       rotary_base=c['base'], parallel_output=True, share_embeddings_and_output_weights=c['tied'])
        self.model = FullyShardedDataParallel(
            config, DistributedDataParallelConfig(
                use_distributed_optimizer=True, use_megatron_fsdp=True, grad_reduce_in_fp32=True,
                data_parallel_sharding_strategy=c['strategy'], **({} if c['masters'] else {'preserve_fp32_weights': False}),
                gradient_reduce_div_fusion=False,  # gloo has no PREMUL_SUM
                num_distributed_optimizer_instances=c['instances']),
            Float16Module(config, net), device=torch.device('cpu'))
        self.buffer = self.model.param_and_grad_buffer
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer='adam', lr=1e-2, weight_decay=0.1, bf16=config.bf16, fp16=config.fp16, initial_loss_scale=1.0, params_dtype=dtype,
                            use_distributed_optimizer=True, clip_grad=0.0), [self.model])

    def pieces(self):
        """Yields for each parameter its name, its optimizer's parameter, where this rank's part of it begins, and its group of buffers."""
        for name, parameter in self.buffer.optimizer_named_parameters:
            group = self.buffer.parameter_groups[self.buffer.param_to_param_group[parameter.orig_param]]
            item = group.model_weight_buffer.param_idx[parameter.orig_param]
            yield name.removeprefix('module.'), parameter, group.model_weight_buffer._get_item_slice_in_shard(item), group, item

    def update(self, seed):
        """A step of gradients that replicas have alike."""
        self.model.zero_grad_buffer()
        for name, parameter, (first, last), group, item in self.pieces():
            whole = parameter.orig_param
            where = 0
            if getattr(whole, 'tensor_model_parallel', False):
                where = ps.get_tensor_model_parallel_rank() + 1
            if '.experts.' in name:
                where = 10 * ps.get_expert_model_parallel_rank() + ps.get_expert_tensor_parallel_rank() + 1
            made = torch.Generator().manual_seed(1000 * seed + 100000 * where + sum(map(ord, name)))
            values = torch.randn(whole.numel(), generator=made)
            group.main_grad_buffer.get_item(item, only_shard=True).copy_(values[first:last])
        self.model.finish_grad_sync()
        for group in self.optimizer.param_groups:  # as OptimizerParamScheduler does
            group['weight_decay'] = 0.1 * group['wd_mult']
        self.optimizer.step()

    def keep_live(self, path):
        """Keeps what this rank has in memory."""
        states, shapes = [], {}
        for name, parameter, (first, last), group, item in self.pieces():
            kinds = {'master': parameter, **self.optimizer.optimizer.state.get(parameter, {})}
            shapes[name] = parameter.orig_param.shape
            values = {kind: value.detach().to_local().reshape(-1).clone() for kind, value in kinds.items()}
            values['weight'] = group.model_weight_buffer.get_item(item, only_shard=True).clone()
            assert all(one.numel() == last - first for one in values.values()), name
            if last > first:
                states.append((name, first, values))
        ranks = {'tp': ps.get_tensor_model_parallel_rank(), 'etp': ps.get_expert_tensor_parallel_rank(), 'ep': ps.get_expert_model_parallel_rank()}
        torch.save({'ranks': ranks, 'states': states, 'shapes': shapes}, path)

    def args(self):
        """Arguments as megatron.training has them."""
        out = make_megatron.Job.args(self)
        vars(out).update(ckpt_format='fsdp_dtensor', use_megatron_fsdp=True, use_distributed_optimizer=True, swiglu=True,
                         data_parallel_sharding_strategy=self.c['strategy'], bf16=self.c['dtype'] == 'bfloat16', fp16=self.c['dtype'] == 'float16', rank=dist.get_rank())
        return out

    def state(self):
        """Returns what Megatron's generate_state_dict and preprocess_fsdp_dtensor_state_dict make (megatron/training/checkpointing.py of core 0.16.1)."""
        args = self.args()
        [model] = unwrap_model([self.model])
        state = {'args': args, 'checkpoint_version': 3.0, 'iteration': 7, 'model': model.state_dict_for_save_checkpoint(),
                 'optimizer': self.optimizer.sharded_state_dict({}, metadata={'distrib_optim_sharding_type': 'fsdp_dtensor'}),
                 'opt_param_scheduler': {'max_lr': 1e-2, 'lr_warmup_steps': 0, 'num_steps': 64, 'lr_decay_style': 'constant', 'lr_decay_steps': 100,
                                         'min_lr': 0.0, 'start_wd': 0.1, 'end_wd': 0.1, 'wd_incr_style': 'constant', 'wd_incr_steps': 0},
                 'rng_state': {f'({ps.get_pipeline_model_parallel_rank()}, {ps.get_tensor_model_parallel_rank()})': [{'torch_rng_state': torch.get_rng_state(), 'rng_tracker_states': {}}]},
                 'num_floating_point_operations_so_far': 7}
        transforms.handle_fp8_extra_state_case(state['model'])
        state['model'], state['optimizer'] = transforms.handle_swiglu_in_state_dict(model, state['model'], state['optimizer'])
        if args.num_experts:
            state['model'] = transforms.handle_experts_in_state_dict(state['model'], args.num_experts)
        preprocess_state_dict_for_uneven_dtensor(state)
        if not self.c['args']:  # as Megatron-Bridge, which has the same state but for these
            del state['args']
        return state


def make(name, out):
    """One variant, on all ranks."""
    c = {**BASE, 'etp': VARIANTS[name].get('tp', 1), **VARIANTS[name]}
    folder = f'{out}/{name}'
    step = f'{folder}/run/iter_0000007'
    if dist.get_rank() == 0:
        os.makedirs(step)
        os.makedirs(f'{folder}/live')
    dist.barrier()
    job = Job(c, seed=5)
    for seed in range(1, c['steps'] + 1):
        job.update(seed)
    job.keep_live(f'{folder}/live/{dist.get_rank()}.pt')
    dcp.save(job.state(), storage_writer=dcp.FileSystemWriter(step))
    dist.barrier()
    if dist.get_rank() == 0:
        with open(f'{folder}/run/latest_checkpointed_iteration.txt', 'w', encoding='utf-8') as f:
            f.write('7')
        print('made', name, flush=True)


def rank_main(out, names):
    """One rank of all variants."""
    stand_in_for_streams()
    for name in names:
        make(name, out)


def main():
    """Makes variants."""
    parser = argparse.ArgumentParser()
    parser.add_argument('out')
    parser.add_argument('names', nargs='*')
    words = parser.parse_args()
    megatron_ranks.fork(rank_main, make_megatron.WORLD, os.path.abspath(words.out), words.names or list(VARIANTS))


if __name__ == '__main__':
    main()
