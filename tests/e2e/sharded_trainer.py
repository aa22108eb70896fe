# SPDX-License-Identifier: Apache-2.0
"""One rank of a job whose parameters are DTensors, led by its input.

Usage: sharded_trainer.py FOLDER STORE RANK WORLD

Lines of the input: "make KIND" builds a model (fsdp, offload, hsdp, grid, tensor) with a Snapshotter
of the run KIND ("make KIND dcp": saves through torch.distributed.checkpoint instead, "make KIND url": and names only where to), "refuse" prints what it says of models that it does not take, "step"
trains one step and saves it (prints "saved N BOOL LATE"), "spoil" writes a parameter after that, "durable N" waits for it, "load VIEW" empties the memory
and loads a view, or a URL, by DCP (prints whether all is as before), "status" prints it as JSON.
Copies that may be late are held up until the backward pass after the save has ended.
Rank 0 writes what each save has to hold to FOLDER/truth-KIND-N.pt.
"""
import json
import os
import sys
import threading

import ckptfs
import snapshot_trainer
import torch
import torch.distributed.checkpoint as dcp
from ckptfs.dcp_reader import Planner, Reader
from ckptfs.url import is_url
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (CPUOffloadPolicy, FullyShardedDataParallel,
                                    fully_shard)
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                               parallelize_module)
from torch.nn.parallel import DistributedDataParallel

# Few rows, so that some ranks have none; a vocabulary whose part is worth being late.
SIZES = {'HIDDEN': 6, 'HEADS': 2, 'MLP': 10, 'VOCAB': 12001, 'LAYERS': 2}
PLAN = {f'self_attn.{n}_proj': ColwiseParallel() for n in 'qkv'}
PLAN.update({f'mlp.{n}_proj': ColwiseParallel() for n in ('gate', 'up')})
PLAN.update({'self_attn.o_proj': RowwiseParallel(), 'mlp.down_proj': RowwiseParallel()})


def full(tensor):
    """All of it, bit for bit; collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Gained(nn.LayerNorm):
    """With a bias of one row, which one rank has all of."""

    def __init__(self):
        super().__init__(SIZES['HIDDEN'], bias=False)
        self.bias = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight) + self.bias


def build(kind, world):
    """A model that lies as the kind says."""
    net = snapshot_trainer.Net()
    net.model.norm = Gained()
    net.lm_head.weight = net.model.embed_tokens.weight
    if kind == 'hsdp':
        net = net.bfloat16()
    dims = {'fsdp': {'dp': world}, 'offload': {'dp': world}, 'tensor': {'tp': world},
            'hsdp': {'copies': 2, 'dp': world // 2}, 'grid': {'dp': world // 2, 'tp': 2}}[kind]
    mesh = init_device_mesh('cpu', tuple(dims.values()), mesh_dim_names=tuple(dims))
    if 'tp' in dims:
        for layer in net.model.layers:
            parallelize_module(layer, mesh['tp'], PLAN)
    if 'dp' in dims:
        over = mesh if kind == 'hsdp' else mesh['dp']
        more = {'offload_policy': CPUOffloadPolicy(pin_memory=False)} if kind == 'offload' else {}
        for layer in net.model.layers:
            fully_shard(layer, mesh=over, **more)
        fully_shard(net, mesh=over, **more)
    return net


def refusals(world, store):
    """Returns what the constructor says of models that it cannot save."""
    mesh = init_device_mesh('cpu', (world,))
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(inner[0], mesh=mesh)
    partial = nn.Linear(4, 4)
    partial.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    stage = nn.Linear(4, 4)
    own = init_device_mesh('cpu', (world, 1), mesh_dim_names=('pp', 'dp'))['dp']
    for name in ('weight', 'bias'):
        setattr(stage, name, nn.Parameter(DTensor.from_local(torch.ones(4), own,
                                                             [Replicate()])))
    # torch's DDP takes the DTensors of a tensor-parallel model away.
    both = init_device_mesh('cpu', (1, world), mesh_dim_names=('copies', 'tp'))
    copies = parallelize_module(nn.Sequential(nn.Linear(4, 4)), both['tp'], {'0': ColwiseParallel()})
    copies = DistributedDataParallel(copies, device_mesh=both['copies'])
    said = []
    old = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device('cpu'))
    for model in (nn.Linear(2, 2), old, inner, partial, stage, copies):
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        try:
            ckptfs.Snapshotter(model, optimizer, run='x', store=store)
            said.append('')
        except TypeError as error:
            said.append(str(error))
    return said


class Job:
    """A model, its optimizer and Snapshotter."""

    def __init__(self, kind, folder, store, rank, world, by_dcp):
        self.store, self.dcp = store, by_dcp
        self.future = self.writer = None
        # DCP talks from a thread of its own, beside the training.
        self.group = torch.distributed.new_group(backend='gloo') if by_dcp else None
        self.kind, self.folder, self.rank, self.world = kind, folder, rank, world
        self.step, self.net = 0, build(kind, world)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.snap = ckptfs.Snapshotter(
            self.net, self.optimizer, run=kind, store=store, slots=4,
            documents={'args': {'num_attention_heads': SIZES['HEADS']}})

    def save(self):
        """The step, by Snapshotter or DCP; whether it was taken."""
        if not self.dcp:
            return self.snap.save(self.step)
        model, optimizer = get_state_dict(self.net, self.optimizer)
        if self.dcp == 'url':
            self.future = dcp.async_save(
                {'model': model, 'optim': optimizer, 'args': {'num_attention_heads': SIZES['HEADS']}},
                checkpoint_id=f'ckptfs://{self.store}/{self.kind}/{self.step}',
                process_group=self.group)
            return True
        self.writer = ckptfs.dcp.Writer(self.store, self.kind, self.step, slots=4)
        self.future = dcp.async_save(
            {'model': model, 'optim': optimizer, 'args': {'num_attention_heads': SIZES['HEADS']}},
            storage_writer=self.writer, process_group=self.group)
        return self.writer.taken

    def late(self):
        """How many saves are being copied or written."""
        savers = list(ckptfs.dcp._SAVERS.values()) if self.dcp else [self.snap]
        return sum(saver.status()['under_way'] for saver in savers)

    def durable(self, step):
        """True if the step is durable."""
        if not self.dcp:
            return self.snap.wait_durable(step, 60)
        self.future.result()
        savers = list(ckptfs.dcp._SAVERS.values())
        return all(saver.wait_durable(step, 60) for saver in savers)

    def load(self, view):
        """True if DCP loads what the last save had into emptied memory."""
        truth = self.truth()
        with torch.no_grad():
            for parameter in self.optimizer.param_groups[0]['params']:
                for value in (parameter, *self.optimizer.state[parameter].values()):
                    value.zero_()
        model, optimizer = get_state_dict(self.net, self.optimizer)
        model = {name: value for name, value in model.items() if 'inv_freq' not in name}
        if is_url(view):
            how, more = {'checkpoint_id': view}, {'args': {'num_attention_heads': 0}}
            optimizer['param_groups'][0]['lr'] = 0.0
        else:
            how, more = {'storage_reader': Reader(view), 'planner': Planner()}, {}
        dcp.load({'model': model, 'optim': optimizer, **more}, **how)
        heads = more.get('args', {}).get('num_attention_heads', SIZES['HEADS'])
        if (heads, optimizer['param_groups'][0]['lr']) != (SIZES['HEADS'], 1e-2):
            return None
        try:
            dcp.load({'model': {'nowhere': torch.ones(1)}}, **how)
        except CheckpointException as error:
            found = self.truth()
            return 'nowhere' in str(error) and all(
                torch.equal(found[key], value) for key, value in truth.items())
        return None

    def truth(self):
        """Returns what a save has to hold."""
        truth = {n: b.clone() for n, b in self.net.state_dict().items() if 'inv_freq' in n}
        for name, parameter in self.net.named_parameters():
            truth[name] = full(parameter)
            for kind, value in self.optimizer.state[parameter].items():
                truth[f'{kind}/{name}'] = full(value)
        return truth

    def train(self, gate):
        """A step, and its save."""
        shard = {'tensor': 0, 'grid': self.rank // 2}.get(self.kind, self.rank)
        tokens = torch.randint(SIZES['VOCAB'], (4, 16), generator=torch.Generator().manual_seed(
            self.step * self.world + shard))
        loss = nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        late = self.late()
        gate.set()
        self.optimizer.step()
        self.optimizer.zero_grad()
        truth = self.truth()
        with torch.no_grad():
            self.net(tokens)  # leaves the root's parameters gathered
        if self.future:
            self.future.result()  # its collectives must not meet those of the next save
        gate.clear()
        taken = self.save()
        self.net.model.rotary_emb.inv_freq += 1
        if self.rank == 0:
            torch.save(truth, f'{self.folder}/truth-{self.kind}-{self.step}.pt')
        print('saved', self.step, taken, late, flush=True)
        self.step += 1


def main():
    """Train as the input says."""
    folder, store, rank, world = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5])
    for name, size in SIZES.items():
        setattr(snapshot_trainer, name, size)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{folder}/rendezvous', rank=rank, world_size=world)
    gate = threading.Event()

    def before_copy():
        if threading.current_thread() is not threading.main_thread():
            gate.wait(60)

    native = ckptfs.saver._native
    writer = native.Writer
    native.Writer = lambda *args: writer(*args[:-1], before_copy)
    job = None
    print('ready', flush=True)
    for line in sys.stdin:
        word, *more = line.split()
        if word == 'make':
            gate.set()
            if job:
                job.snap.close()
            torch.manual_seed(0)
            job = Job(more[0], folder, store, rank, world, ''.join(more[1:]))
            print('made', job.kind, flush=True)
        elif word == 'refuse':
            print('refused', json.dumps(refusals(world, store)), flush=True)
        elif word == 'step':
            job.train(gate)
        elif word == 'spoil':
            with torch.no_grad():
                for parameter in job.optimizer.param_groups[0]['params'][:1]:
                    parameter.add_(1)
            print('spoilt', flush=True)
        elif word == 'durable':
            gate.set()
            print('durable', more[0], job.durable(int(more[0])), flush=True)
        elif word == 'load':
            print('loaded', job.load(more[0]), flush=True)
        elif word == 'status':
            print(json.dumps(job.snap.status()), flush=True)
    gate.set()
    job.snap.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads take their time


if __name__ == '__main__':
    main()
