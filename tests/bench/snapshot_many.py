# SPDX-License-Identifier: Apache-2.0
"""A training job that saves a thousand steps, each until it is durable.

Usage: snapshot_many.py STORE SAVES MARK...

Prints, when MARK saves are durable, one JSON object of what it holds and of the seconds
that the saves since the last mark took; then goes on when it reads a line.
"""
import json
import os
import sys
import time

import ckptfs
import torch
from snapshot_job import make


def held():
    """Returns what this process holds: bytes in memory, descriptors, threads."""
    with open('/proc/self/statm', encoding='ascii') as f:
        pages = int(f.read().split()[1])
    return {'bytes': pages * os.sysconf('SC_PAGE_SIZE'),
            'descriptors': len(os.listdir('/proc/self/fd')),
            'threads': len(os.listdir('/proc/self/task'))}


def main():
    """Train, save, wait, a thousand times."""
    store, saves, marks = sys.argv[1], int(sys.argv[2]), {int(n) for n in sys.argv[3:]}
    torch.set_num_threads(1)
    net, optimizer = make(1e6)
    blocked, durable = [], []
    with ckptfs.Snapshotter(net, optimizer, run='job', store=store) as snap:
        for step in range(saves):
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 / (step + 1))
            optimizer.step()
            start = time.perf_counter()
            assert snap.save(step), snap.status()
            saved = time.perf_counter()
            assert snap.wait_durable(step, 60), snap.status()
            blocked.append(saved - start)
            durable.append(time.perf_counter() - start)
            if step + 1 in marks:
                print(json.dumps({'held': held(), 'blocked': blocked, 'durable': durable}),
                      flush=True)
                blocked, durable = [], []
                sys.stdin.readline()


if __name__ == '__main__':
    main()
