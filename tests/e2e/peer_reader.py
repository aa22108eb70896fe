# SPDX-License-Identifier: Apache-2.0
"""Reads a job's step from the memory of machines, some of which cannot be reached.

Usage: peer_reader.py STORE TRUTH MOST ADDRESS...

For each set of at most MOST addresses it prints a line: the addresses, then `equal` (all tensors
are those of TRUTH), `lost` (no step is in memory) or what went wrong.  It runs in a network
namespace of its own, whose routes it changes.
"""
import itertools
import subprocess
import sys

import ckptfs
import torch
from gathered import assert_equal


def tensors(store):
    """All tensors of the step in memory, as truth files name them."""
    with ckptfs.SavedStep(f'ckptfs://{store}/job/memory') as step:
        found = {}
        for (_, kind, name), stored in step.tensors().items():
            whole = torch.empty(stored.shape, dtype=stored.dtype)
            step.load(stored, tuple(slice(0, size) for size in stored.shape), whole)
            found[name if kind == 'weight' else f'{kind}/{name}'] = whole
        return found


def outcome(store, truth):
    """The outcome of a load."""
    try:
        found = tensors(store)
    except RuntimeError as error:
        return 'lost' if 'has no step in memory' in str(error) else f'refused: {error}'
    try:
        assert_equal(found, truth)
    except AssertionError as error:
        return f'WRONG: {error}'
    return 'equal'


def main():
    """Each set of addresses, once."""
    store, truth, most, *addresses = sys.argv[1:]
    truth = torch.load(truth)
    for count in range(int(most) + 1):
        for dead in itertools.combinations(addresses, count):
            for address in dead:
                subprocess.run(['ip', 'route', 'add', 'prohibit', f'{address}/32'], check=True)
            print(','.join(dead) or '-', outcome(store, truth), flush=True)
            for address in dead:
                subprocess.run(['ip', 'route', 'del', 'prohibit', f'{address}/32'], check=True)


if __name__ == '__main__':
    main()
