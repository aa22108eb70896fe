#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama of transformers trained under FSDP2 on two ranks, saved by DCP: fsdp_llama.py CONFIG OUT

OUT/ckpt is the directory with CONFIG beside it, OUT/truth.pt what torch gathered from the live job: {kind: {name: tensor}}.
"""
import gc
import os
import shutil
import sys
import tempfile

os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')

# pylint: disable=wrong-import-position
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

WORLD = 2


def rank_main(rank, config, out, rendezvous):
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method='file://' + rendezvous, rank=rank, world_size=WORLD)
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    vectors = [p for p in model.parameters() if p.ndim < 2]
    others = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW([{'params': others}, {'params': vectors, 'weight_decay': 0.0}], lr=1e-2, weight_decay=0.1)
    for step in range(2):
        ids = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=whole)
    states = get_optimizer_state_dict(model, optimizer, options=whole)['state']
    if rank == 0:
        kinds = {kind: {name: state[kind] for name, state in states.items()} for kind in ('exp_avg', 'exp_avg_sq')}
        torch.save({'weight': weights, **kinds}, f'{out}/truth.pt')
    dcp.save({'model': get_model_state_dict(model), 'optim': get_optimizer_state_dict(model, optimizer)}, checkpoint_id=f'{out}/ckpt')
    if rank == 0:
        shutil.copy(f'{config}/config.json', f'{out}/ckpt')
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads are not waited for


def main():
    """Forks the ranks: imports are paid once."""
    gc.freeze()  # or each rank would walk, and so copy, what was imported
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (sys.argv[1], sys.argv[2], folder + '/rendezvous'), nprocs=WORLD, start_method='fork')


if __name__ == '__main__':
    main()
