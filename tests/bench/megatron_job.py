#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ranks of Megatron that save or load one model: megatron_job.py save STEP TP PP
                                                megatron_job.py load TP PP OUT STEP...

save trains one step and saves a torch_dist directory with its optimizer.  load has the same ranks load each STEP
in turn, weights and optimizer, and writes OUT, a list of JSON: [seconds until the slowest rank has all in its
modules, bytes that all ranks read for each that they got, the sum of all that they got] of each.
"""
import json
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, '..', *part) for part in (('fixtures', 'megatron'), ('fixtures', 'deepspeed'), ('e2e',))]

# pylint: disable=wrong-import-position
import make_megatron  # it answers what Megatron asks of a GPU, before torch is used
import dcp_loads
import megatron_ranks
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing as dc
from megatron.core import parallel_state as ps

# 127 M parameters: 0.25 GB of weights, 1.5 GB of masters and moments.
MODEL = {**make_megatron.BASE, 'layers': 8, 'hidden': 1024, 'heads': 16, 'groups': 8, 'channels': 64, 'ffn': 2816, 'vocab': 16384}


def save(step, tp, pp):
    """One rank of the job."""
    if dist.get_rank() == 0:
        os.makedirs(step)
    dist.barrier()
    job = make_megatron.Job(MODEL, tp, pp, 1, seed=5)
    job.update(1)
    dc.save(job.sharded(), step)


def tensors_of(job):
    """Returns what this rank has in memory: weights, masters and moments."""
    weights = [p.detach() for net in job.nets for p in net.module.parameters()]
    states = [t for one in getattr(job.optimizer, 'chained_optimizers', [job.optimizer])
              for kinds in one.optimizer.state.values() for t in kinds.values() if isinstance(t, torch.Tensor)]
    masters = [p.detach() for one in getattr(job.optimizer, 'chained_optimizers', [job.optimizer])
               for group in one.optimizer.param_groups for p in group['params']]
    return weights + states + masters


def load_one(job, step):
    """[seconds, bytes read for each byte, sum]."""
    for tensor in tensors_of(job):
        tensor.zero_()
    dist.barrier()
    before, begin = dcp_loads.bytes_read(), time.perf_counter()
    asked = job.sharded(loading=True)
    metadata = {**dc.load_content_metadata(step), 'dp_cp_group': ps.get_data_parallel_group(with_context_parallel=True)}
    asked['optimizer'] = job.optimizer.sharded_state_dict(dict(asked), is_loading=True, metadata=metadata)
    loaded = dc.load(asked, step)
    job.net.module.load_state_dict(loaded['model'])
    job.optimizer.load_state_dict(loaded['optimizer'])
    dist.barrier()
    took = time.perf_counter() - begin
    read = dcp_loads.bytes_read() - before
    held = tensors_of(job)
    totals = torch.tensor([read, sum(t.nbytes for t in held), sum(float(t.double().sum()) for t in held)], dtype=torch.float64)
    dist.all_reduce(totals)
    return [took, float(totals[0] / totals[1]), float(totals[2])]


def load(tp, pp, out, steps):
    """One rank of the job that goes on at other degrees."""
    job = make_megatron.Job(MODEL, tp, pp, 1, seed=6)
    job.update(2)  # so that the optimizer has states
    found = [load_one(job, step) for step in steps]
    if dist.get_rank() == 0:
        with open(out, 'w', encoding='utf-8') as f:
            json.dump(found, f)


def main():
    """By forked ranks."""
    what, *words = sys.argv[1:]
    if what == 'save':
        megatron_ranks.fork(save, make_megatron.WORLD, words[0], int(words[1]), int(words[2]))
    else:
        megatron_ranks.fork(load, make_megatron.WORLD, int(words[0]), int(words[1]), words[2], words[3:])


if __name__ == '__main__':
    main()
