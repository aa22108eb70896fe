# SPDX-License-Identifier: Apache-2.0
"""Writes a step as verl's FSDPCheckpointManager does, of a module whose every element says its place.

Usage: make.py FOLDER [tp]   FOLDER/global_step_3/actor/, with the torch that runs it; needs gloo

Two ranks of FSDP2; with tp four, of which two and two share body and head, too.

Element i of the k-th parameter is 1000 * k + i; of its exp_avg 0.5 more, of its exp_avg_sq 0.25 more.
"""
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TP = 'tp' in sys.argv[2:]
WORLD = 4 if TP else 2
# None is cut evenly in two; torch 2.7 cuts no uneven rows in both ways.
SHAPES = {'embed': (7, 4), 'body': (8, 4), 'head': (4, 8)} if TP else {'embed': (7, 4), 'body': (5, 4), 'head': (3, 4)}
DIMS = {'body': 0, 'head': 1} if TP else {}


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, torch.nn.Linear(shape[1], shape[0], bias=False))
        self.register_buffer('seen', torch.tensor([1.0, 2.0]))


def wrap(module):
    if not TP:
        return fully_shard(module, mesh=init_device_mesh('cpu', (2,), mesh_dim_names=('fsdp',)))
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('fsdp', 'tp'))
    parallelize_module(module, mesh['tp'], {'body': ColwiseParallel(), 'head': RowwiseParallel()})
    return fully_shard(module, mesh=mesh['fsdp'])


def fill(name, tensor, first):
    """Only this rank's part of it: tensor parallelism cuts first."""
    part = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape) + first
    shard, place = divmod(dist.get_rank(), 2) if TP else (dist.get_rank(), 0)
    if name in DIMS:
        part = part.chunk(2, DIMS[name])[place]
    tensor.to_local().copy_(part.chunk(2)[shard])


def save(rank, folder):
    os.environ['GLOO_SOCKET_IFNAME'] = 'lo'
    dist.init_process_group('gloo', init_method=f'file://{folder}/meeting', rank=rank, world_size=WORLD)
    module = wrap(Module())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for k, (name, parameter) in enumerate(module.named_parameters()):
            name = name.removesuffix('.weight')
            fill(name, parameter, 1000 * k)
            fill(name, optimizer.state[parameter]['exp_avg'], 1000 * k + 0.5)
            fill(name, optimizer.state[parameter]['exp_avg_sq'], 1000 * k + 0.25)
    actor = f'{folder}/global_step_3/actor'
    os.makedirs(f'{actor}/huggingface', exist_ok=True)
    torch.save(module.state_dict(), f'{actor}/model_world_size_{WORLD}_rank_{rank}.pt')
    torch.save(optimizer.state_dict(), f'{actor}/optim_world_size_{WORLD}_rank_{rank}.pt')
    torch.save({'lr_scheduler': {'last_epoch': 1}, 'rng': {}}, f'{actor}/extra_state_world_size_{WORLD}_rank_{rank}.pt')
    if rank == 0:
        with open(f'{actor}/fsdp_config.json', 'w', encoding='utf-8') as f:
            json.dump({'FSDP_version': 2, 'world_size': WORLD}, f)
        with open(f'{actor}/huggingface/config.json', 'w', encoding='utf-8') as f:
            json.dump({'model_type': 'none', 'torch': torch.__version__}, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    os.makedirs(sys.argv[1], exist_ok=True)
    mp.spawn(save, (os.path.abspath(sys.argv[1]),), WORLD)
    if os.path.exists(f'{sys.argv[1]}/meeting'):
        os.unlink(f'{sys.argv[1]}/meeting')
    with open(f'{sys.argv[1]}/latest_checkpointed_iteration.txt', 'w', encoding='utf-8') as f:
        f.write('3')
