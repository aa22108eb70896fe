# SPDX-License-Identifier: Apache-2.0
"""Loads the step that machines hold in memory by torch.distributed.checkpoint, each weight cut
over the ranks by its rows, and compares all of it.

Usage: peer_dcp_reader.py STORE TRUTH WORLD PORT; prints `equal` and the number of ranks, if all of
them loaded and found it so.
"""
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gathered import assert_equal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def _empty(value, mesh):
    """A tensor to be loaded into: cut over the ranks, where it has rows enough."""
    whole = torch.zeros_like(value)
    cut = value.ndim > 0 and value.shape[0] >= mesh.size()
    return distribute_tensor(whole, mesh, [Shard(0)]) if cut else whole


def _state_dict(truth, mesh):
    """The tensors of a truth file ("model.w", "exp_avg/model.w"), where get_state_dict has them."""
    model, states = {}, {}
    for key, value in truth.items():
        kind, slash, name = key.rpartition('/')
        if slash:
            states.setdefault(name, {})[kind] = _empty(value, mesh)
        else:
            model[name] = _empty(value, mesh)
    return {'model': model, 'optim': {'state': states}}


def _found(state_dict):
    found = dict(state_dict['model'])
    for name, states in state_dict['optim']['state'].items():
        found.update({f'{kind}/{name}': value for kind, value in states.items()})
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}


def _load(rank, store, truth, world, port):
    dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank, world_size=world)
    truth = torch.load(truth)
    state_dict = _state_dict(truth, init_device_mesh('cpu', (world,)))
    dcp.load(state_dict, checkpoint_id=f'ckptfs://{store}/job/memory')
    assert_equal(_found(state_dict), truth)
    dist.destroy_process_group()


def main():
    """Starts the ranks.  One that differs, or ends, is an exception here."""
    store, truth, world, port = sys.argv[1:]
    torch.multiprocessing.spawn(_load, (store, truth, int(world), int(port)), nprocs=int(world))
    print('equal', world)


if __name__ == '__main__':
    main()
