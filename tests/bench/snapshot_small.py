# SPDX-License-Identifier: Apache-2.0
"""Saves a model of thousands of small parameters with Adam, by turns with torch.save.

Usage: snapshot_small.py STORE FILE PARAMETERS ROUNDS

Prints one JSON object: the seconds that each call took.
"""
import json
import sys
import time

import ckptfs
import torch


def main():
    """Warm up with one round, then measure."""
    store, file, parameters, rounds = *sys.argv[1:3], *map(int, sys.argv[3:5])
    torch.set_num_threads(1)
    net = torch.nn.ParameterList(torch.nn.Parameter(torch.rand(32, 32)) for _ in range(parameters))
    optimizer = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    taken = {'ours': [], 'theirs': []}
    with ckptfs.Snapshotter(net, optimizer, run='small', store=store) as snap:
        for step in range(rounds + 1):
            start = time.perf_counter()
            assert snap.save(step), snap.status()
            snap.before_update()
            taken['ours'].append(time.perf_counter() - start)
            assert snap.wait_durable(step, 60), snap.status()
            start = time.perf_counter()
            torch.save({'model': net.state_dict(), 'optimizer': optimizer.state_dict()}, file)
            taken['theirs'].append(time.perf_counter() - start)
    print(json.dumps({side: times[1:] for side, times in taken.items()}))


if __name__ == '__main__':
    main()
