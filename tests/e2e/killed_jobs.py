# SPDX-License-Identifier: Apache-2.0
"""Jobs that write down their losses and are killed at some iteration."""
import os
import random

from daemon import wait_until


def note(path, line):
    """Appends to a file that others read meanwhile."""
    with open(path, 'a', encoding='utf-8') as file:
        file.write(f'{line}\n')


def lines_of(path):
    """So far."""
    if not os.path.exists(path):
        return []
    with open(path, encoding='utf-8') as file:
        return file.read().split()


def losses_of(path):
    """So far, as numbers."""
    return [float(loss) for loss in lines_of(path)]


def kill(ranks, losses, iterations, seed):
    """Kills one of a job's processes, then the others, at some iteration, which it returns.
    losses: the file that gets a line for each."""
    chance = random.Random(seed)
    at, victim = chance.randint(3, iterations), chance.randrange(len(ranks))
    wait_until(lambda: len(lines_of(losses)) >= at or not all(r.is_alive() for r in ranks),
               f'iteration {at}', seconds=300)
    assert all(r.is_alive() or r.exitcode == 0 for r in ranks), 'the job failed'
    for rank in [ranks[victim], *ranks]:
        rank.kill()
        rank.join()
    return at
