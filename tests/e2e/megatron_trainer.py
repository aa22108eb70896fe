# SPDX-License-Identifier: Apache-2.0
"""One rank of a Megatron-Core job on the CPU that saves by our strategy and by its own.

Usage: python -c "import megatron_trainer as job; job.main()" FOLDER STORE RANK WORLD
(as a script it would be read again by each process that Megatron's own strategy starts)

A GPT of each of KINDS (two ranks of a degree) saves step 1 at once and step 2 asynchronously, with an
update before it is finished, both ways; then a model of other degrees loads what either has written.
Rank 0 writes what Megatron's own files hold to FOLDER/truth-KIND-N.pt.
"""
import os
import sys
from dataclasses import dataclass

import torch

@dataclass
class Kind:
    """The kind of a job; ranks that no degree takes are data parallel."""
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sharding: str = ''      # of DistributedOptimizer's state; '': an ordinary optimizer
    parallel: bool = False  # all data-parallel ranks save (FullyParallelSaveStrategyWrapper)

    def other(self):
        """Where it is loaded: as data parallel as can be, unless that is what it was."""
        if self.sharding == 'dp_reshardable':
            return self
        return Kind(tp=2 if self.tp * self.pp * self.ep == 1 else 1, sharding=self.sharding)


KINDS = {'plain': Kind(tp=2), 'distributed': Kind(tp=2, sharding='fully_reshardable'),
         'stages': Kind(pp=2, sharding='fully_reshardable'), 'replicas': Kind(parallel=True),
         'shards': Kind(sharding='fully_reshardable'), 'buckets': Kind(sharding='dp_reshardable'),
         'experts': Kind(ep=2, sharding='fully_reshardable')}


sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'fixtures', 'megatron'))
import megatron_ranks  # noqa: E402  pylint: disable=wrong-import-position
import ckptfs.megatron  # noqa: E402
import megatron.core.optimizer as optimizers  # noqa: E402
import megatron.core.optimizer.distrib_optimizer as distrib_optimizer  # noqa: E402
from megatron.core import dist_checkpointing as dc  # noqa: E402
from megatron.core import parallel_state as ps  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # noqa: E402
    FullyParallelSaveStrategyWrapper)
from megatron.core.distributed import (DistributedDataParallel,  # noqa: E402
                                       DistributedDataParallelConfig)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class FusedAdam(torch.optim.Optimizer):
    """States as Transformer Engine's has them, the step in the group: with torch's own,
    Megatron's DistributedOptimizer cannot load what it saved."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **_):
        super().__init__(params, {'lr': lr, 'betas': betas, 'eps': eps,
                                  'weight_decay': weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group['step'] = group.get('step', 0) + 1
            for parameter in group['params']:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update({kind: torch.zeros_like(parameter)
                                  for kind in ('exp_avg', 'exp_avg_sq')})
                state['exp_avg'].lerp_(parameter.grad, 0.1)
                state['exp_avg_sq'].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=1e-3)
                parameter.addcdiv_(state['exp_avg'], state['exp_avg_sq'].sqrt() + group['eps'],
                                   value=-group['lr'])


optimizers.USING_PYTORCH_OPTIMIZER = False
optimizers.Adam = distrib_optimizer.Adam = FusedAdam
distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


class Job:
    """A model and its optimizer at a degree."""

    def __init__(self, kind, seed, experts=0):
        self.sharding = kind.sharding
        ps.destroy_model_parallel()
        ps.initialize_model_parallel(kind.tp, kind.pp, expert_model_parallel_size=kind.ep)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        config = TransformerConfig(
            num_layers=2, hidden_size=64, num_attention_heads=8, num_query_groups=4,
            ffn_hidden_size=192, use_cpu_initialization=True, params_dtype=torch.bfloat16, bf16=True,
            gated_linear_unit=True, activation_func=torch.nn.functional.silu,
            add_bias_linear=False, normalization='RMSNorm', tensor_model_parallel_size=kind.tp,
            pipeline_model_parallel_size=kind.pp, pipeline_dtype=torch.bfloat16,
            expert_model_parallel_size=kind.ep, num_moe_experts=experts or None,
            bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
            apply_rope_fusion=False, gradient_accumulation_fusion=False)
        layer = get_gpt_layer_local_spec(num_experts=experts or None, normalization='RMSNorm')
        net = GPTModel(config, layer, vocab_size=512, max_sequence_length=16,
                       position_embedding_type='rope', parallel_output=True,
                       pre_process=ps.is_pipeline_first_stage(),
                       post_process=ps.is_pipeline_last_stage())
        net = net.to(torch.bfloat16)
        net.model_type = None
        self.net = DistributedDataParallel(config, DistributedDataParallelConfig(
            use_distributed_optimizer=bool(kind.sharding), grad_reduce_in_fp32=True), net)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(
            optimizer='adam', lr=1e-2, bf16=True, params_dtype=torch.bfloat16,
            use_distributed_optimizer=bool(kind.sharding), clip_grad=0.0), [self.net])

    def update(self, seed):
        """An optimizer step of gradients that replicas have alike."""
        self.net.zero_grad_buffer()
        made = torch.Generator().manual_seed(seed)
        for parameter in self.net.module.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.main_grad.shape, generator=made))
        self.optimizer.step()

    def sharded(self, loading=False):
        """Returns what dist_checkpointing takes."""
        kind = {'distrib_optim_sharding_type': self.sharding} if self.sharding else {}
        metadata = {**kind, 'distrib_optim_fully_reshardable_mem_efficient': True,
                    'singleton_local_shards': False, 'chained_optim_avoid_prefix': True,
                    'dp_cp_group': ps.get_data_parallel_group(with_context_parallel=True)}
        model = self.net.module.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict({'model': model}, is_loading=loading,
                                                      metadata=metadata)
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        rng = None if loading else {'seed': rank}
        state = {'model': model, 'optimizer': optimizer,
                 'rng_state': ShardedObject('rng_state', rng, (world,), (rank,))}
        if not loading:
            state['iteration'] = 7
        return state


def made(folder):
    """A directory, on all ranks."""
    if torch.distributed.get_rank() == 0:
        os.makedirs(folder)
    torch.distributed.barrier()
    return folder


def keep_truth(folder, kind, step):
    """Keeps what Megatron's own reader finds in its own files."""
    plain = dc.load_plain_tensors(f'{folder}/{kind}/stock_{step}')
    if torch.distributed.get_rank() == 0:
        torch.save(dict(plain), f'{folder}/truth-{kind}-{step}.pt')
    torch.distributed.barrier()


def same(ours, theirs, where=''):
    """Both are the same, bit for bit; how many tensors."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), (where, ours.keys(), theirs.keys())
        return sum(same(ours[k], theirs[k], f'{where}/{k}') for k in theirs)
    if isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        return sum(same(a, b, f'{where}/{i}') for i, (a, b) in enumerate(zip(ours, theirs)))
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), where
        return 1
    if not hasattr(theirs, 'getvalue') and not callable(theirs):
        assert str(ours) == str(theirs), (where, ours, theirs)
    return 0


def run(kind, folder, store):
    """Saves and loads; prints how many tensors were compared."""
    how, experts = KINDS[kind], 4 * (kind == 'experts')
    made(f'{folder}/{kind}')
    ours = [made(f'{folder}/{kind}/iter_000000{step}') for step in (1, 2)]
    theirs = [made(f'{folder}/{kind}/stock_{step}') for step in (1, 2)]
    job = Job(how, seed=5, experts=experts)
    strategy = ckptfs.megatron.SaveStrategy(store, kind, slots=4)
    if how.parallel:
        strategy = FullyParallelSaveStrategyWrapper(
            strategy, ps.get_data_parallel_group(with_context_parallel=True))
    job.update(1)
    dc.save(job.sharded(), theirs[0])
    dc.save(job.sharded(), ours[0], strategy)
    job.update(2)
    dc.save(job.sharded(), theirs[1])
    request = dc.save(job.sharded(), ours[1], strategy, async_sharded_save=True)
    job.update(3)
    request.execute_sync()
    for step in (1, 2):
        keep_truth(folder, kind, step)
    loader = Job(how.other(), seed=6, experts=experts)
    loader.update(4)
    for mine, stock in zip(ours, theirs):
        states = [dc.load(loader.sharded(loading=True), path, strict='raise_all')
                  for path in (mine, stock)]
        assert states[0]['rng_state'] == {'seed': torch.distributed.get_rank()}
        say(f'compared {kind} {same(*[clone(s) for s in states])}')
        if how.sharding != 'dp_reshardable':  # bucket padding, which nobody set
            same(*map(dc.load_plain_tensors, (mine, stock)))
        assert os.path.exists(f'{mine}/ckptfs.json')
        assert not [name for name in os.listdir(mine) if name.startswith('.ckptfs')]
    return strategy


def say(line):
    """In one piece: all ranks write to one file."""
    os.write(1, f'{line}\n'.encode())


def clone(value):
    """Returns a copy of values that a later load may write into."""
    if isinstance(value, dict):
        return {k: clone(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clone(v) for v in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def main():
    """One rank."""
    folder, store, rank, world = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5])
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{folder}/rendezvous', rank=rank, world_size=world)
    for kind in KINDS:
        run(kind, folder, store)
    # Nobody receives for another store: Megatron's own way.
    job = Job(Kind(tp=world), seed=5)
    job.update(1)
    folder = made(f'{folder}/iter_0000003')
    nobody = ckptfs.megatron.SaveStrategy(store + '-none', 'none')
    dc.save(job.sharded(), folder, FullyParallelSaveStrategyWrapper(
        nobody, ps.get_data_parallel_group(with_context_parallel=True)))
    left = sorted(name for name in os.listdir(folder) if 'ckptfs' in name)
    say(f"fallback {left} {dc.load(job.sharded(loading=True), folder)['iteration']}")
    torch.distributed.barrier()
    megatron_ranks.end()

