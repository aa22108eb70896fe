# SPDX-License-Identifier: Apache-2.0
"""One rank of an FSDP training that saves as verl and SkyRL do: each rank its own files.

Usage: rank_shards_job.py FOLDER KIND RANK WORLD

Writes FOLDER/run/global_step_{1,2}/actor/, as verl's FSDPCheckpointManager (0.7) does, with data.pt and the tracker, and
what the live job had at the last step: FOLDER/truth/ (save_pretrained), moments.pt, logits.pt.
"""
import contextlib
import json
import os
import shutil
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

STEPS = 2
PLAN = {**{f'self_attn.{n}_proj': ColwiseParallel() for n in 'qkv'}, 'self_attn.o_proj': RowwiseParallel(),
        'mlp.up_proj': ColwiseParallel(), 'mlp.gate_proj': ColwiseParallel(), 'mlp.down_proj': RowwiseParallel()}
MESHES = {'hsdp': ((2, 2), ('ddp', 'fsdp')), 'tp': ((2, 2), ('fsdp', 'tp'))}


def make(kind):
    """The model before anything cuts it: neither the vocabulary nor the inner size is divided evenly by 4."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=46, num_hidden_layers=2, num_attention_heads=4,
                                        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=kind == 'tied'))


def wrap(model, kind, world):
    """The model on its mesh."""
    shape, names = MESHES.get(kind, ((world,), ('fsdp',)))
    if kind == 'flat':  # FSDP1 without a mesh: ShardedTensors
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), device_id=torch.device('cpu'))
    mesh = init_device_mesh('cpu', shape, mesh_dim_names=names)
    if kind == 'flat_mesh':
        return FullyShardedDataParallel(model, device_mesh=mesh, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
                                        device_id=torch.device('cpu'))
    part = mesh
    if kind == 'tp':
        part = mesh['fsdp']
        for layer in model.model.layers:
            parallelize_module(layer, mesh['tp'], PLAN)
    for layer in model.model.layers:
        fully_shard(layer, mesh=part)
    fully_shard(model, mesh=part)
    return model


def states_of(model, kind):
    """As verl asks for them."""
    if not kind.startswith('flat'):
        return contextlib.nullcontext()
    return FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig())


def save(folder, model, optimizer, schedule, kind, step, rank, world):
    """verl/utils/checkpoint/fsdp_checkpoint_manager.py, save_checkpoint; then the trainer's part."""
    own = f'{folder}/run/global_step_{step}'
    actor = f'{own}/actor'
    os.makedirs(actor, exist_ok=True)
    dist.barrier()
    with states_of(model, kind):
        torch.save(model.state_dict(), f'{actor}/model_world_size_{world}_rank_{rank}.pt')
        torch.save(optimizer.state_dict(), f'{actor}/optim_world_size_{world}_rank_{rank}.pt')
    torch.save({'lr_scheduler': schedule.state_dict(), 'rng': {'cpu': torch.get_rng_state()}},
               f'{actor}/extra_state_world_size_{world}_rank_{rank}.pt')
    if rank == 0:
        make(kind).config.save_pretrained(f'{actor}/huggingface')
        with open(f'{actor}/fsdp_config.json', 'w', encoding='utf-8') as f:
            json.dump({'FSDP_version': 1 if kind.startswith('flat') else 2, 'world_size': world}, f, indent=4)
    dist.barrier()
    if rank == 0:
        torch.save({'seen': step}, f'{own}/data.pt')
        with open(f'{folder}/run/latest_checkpointed_iteration.txt', 'w', encoding='utf-8') as f:
            f.write(str(step))


def whole(value):
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


def weights_of(model, kind):
    """Whole weights, put together by torch from the live job."""
    if kind.startswith('flat'):
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return model.state_dict()
    return {name: whole(value) for name, value in model.state_dict().items()}


def keep_truth(folder, model, optimizer, kind, rank, ids):
    """The live job's tensors now."""
    weights = weights_of(model, kind)
    moments = {}
    if not kind.startswith('flat'):
        moments = {f'{state}/{name}': whole(optimizer.state[p][state]) for name, p in model.named_parameters()
                   for state in ('exp_avg', 'exp_avg_sq')}
    if rank != 0:
        return
    plain = make(kind)
    plain.load_state_dict(weights)
    plain.save_pretrained(f'{folder}/truth')
    torch.save(moments, f'{folder}/moments.pt')
    with torch.no_grad():
        torch.save(plain.eval()(input_ids=ids).logits, f'{folder}/logits.pt')


def main():
    folder, kind, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group('gloo', init_method=f'file://{folder}/meeting', rank=rank, world_size=world)
    model = wrap(make(kind), kind, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    ids = torch.arange(16).view(2, 8)
    for step in range(1, STEPS + 1):
        model(input_ids=ids + step, labels=ids + step).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        save(folder, model, optimizer, schedule, kind, step, rank, world)
    keep_truth(folder, model, optimizer, kind, rank, ids)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
