# SPDX-License-Identifier: Apache-2.0
"""A small training job that saves when it is told to.

Usage: snapshot_honest.py STORE SAVES

For each line that it reads: saves so often, each until it is durable, and prints the seconds of each.
"""
import json
import sys
import time

import ckptfs
import torch


def main():
    """Save on demand."""
    store, saves = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    net = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    step = 0
    with ckptfs.Snapshotter(net, optimizer, run='honest', store=store) as snap:
        for _ in sys.stdin:
            took = []
            for _ in range(saves):
                step += 1
                start = time.perf_counter()
                assert snap.save(step), snap.status()
                assert snap.wait_durable(step, 120), snap.status()
                took.append(time.perf_counter() - start)
            print(json.dumps(took), flush=True)


if __name__ == '__main__':
    main()
