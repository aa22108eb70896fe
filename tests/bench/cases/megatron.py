# SPDX-License-Identifier: Apache-2.0
"""Megatron's ranks load what others of 2 x 2 saved (tp x pp), at other degrees, through a mount and from a directory
that Megatron itself saved at these degrees; from_pretrained of a Megatron step against the same files in a plain
directory.

The model has 150 M parameters: 0.3 GB of weights, 1.8 GB of masters and moments.
"""
import json
import os
import shutil
import statistics
import subprocess
import sys

from cases import tools
from context import absolute_row, ratio_row, warm

JOB = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'megatron_job.py')
SAVED = (2, 2)
LOADED = ((4, 1), (1, 4))


def job(*words):
    """Four ranks."""
    subprocess.run([sys.executable, '-W', 'ignore', JOB, *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def saved(context, tp, pp):
    """The directory of a step that Megatron saved at these degrees, made once and warm."""
    step = context.path(f'megatron_tp{tp}_pp{pp}', 'iter_0000007')
    if not os.path.exists(os.path.join(step, 'metadata.json')):
        shutil.rmtree(os.path.dirname(step), ignore_errors=True)
        print(f'   making {step}', file=sys.stderr, flush=True)
        job('save', step, tp, pp)
    warm(step)
    return step


def step_in(view):
    """The step's directory in a view that Megatron is told to load."""
    with open(os.path.join(view, 'latest_checkpointed_iteration.txt'), encoding='utf-8') as f:
        return os.path.join(view, f'iter_{int(f.read()):07d}')


def loads(context, source, tp, pp):
    """Rows of degrees."""
    plain, out = saved(context, tp, pp), context.path('megatron.json')
    ours, again, theirs, own, ratios = [], [], [], [], []
    for number in range(max(3, context.repeat)):
        with context.mounted(source) as (mount, _):
            context.settle(mount)
            view = step_in(os.path.join(mount, 'view', f'tp{tp}_pp{pp}', 'megatron'))
            order = [view, view, plain, source]
            order = order if number % 2 == 0 else [plain, source, view, view]
            job('load', tp, pp, out, *order)
        with open(out, encoding='utf-8') as f:
            found = list(zip(order, json.load(f)))
        first, second = [one for path, one in found if path == view]
        assert first[2] == second[2] == dict(found)[source][2], found  # the same values
        ours.append(first[0])
        again.append(second[0])
        ratios.append(first[1])
        theirs.append(dict(found)[plain][0])
        own.append(dict(found)[source][0])
    stock, what = statistics.median(theirs), f"Megatron's load at tp{tp} pp{pp} of what tp{SAVED[0]} pp{SAVED[1]} saved"
    return [ratio_row('megatron', f'{what}: from a new mount, against a directory that was saved so', statistics.median(ours), stock, 1.1),
            ratio_row('megatron', f'{what}: again', statistics.median(again), stock, 1.1),
            ratio_row('megatron', f"{what}: again, against Megatron's own reshard", statistics.median(again), statistics.median(own)),
            absolute_row('megatron', f'{what}: bytes read for each delivered', max(ratios), 'x', 1.1)]


def pretrained(context, source):
    """Rows of from_pretrained."""
    plain = context.path('plain_megatron')
    shutil.rmtree(plain, ignore_errors=True)
    with context.mounted(source) as (mount, _):
        shutil.copytree(os.path.join(mount, 'view', 'tp1', 'huggingface'), plain)
    warm(plain)
    with context.mounted(source) as (mount, _):
        view = os.path.join(mount, 'view', 'tp1', 'huggingface')
        ours, theirs, first = tools.turns(3 * context.repeat, lambda: tools.in_rank(context, tools.load, view),
                                          lambda: tools.in_rank(context, tools.load, plain))
    shutil.rmtree(plain)
    return [ratio_row('megatron', 'from_pretrained of a Megatron step, against the same files', ours, theirs, 1.3),
            ratio_row('megatron', 'from_pretrained of a Megatron step, first open after the mount', first, theirs)]


def run(context):
    """Rows."""
    source = saved(context, *SAVED)
    rows = [row for degrees in LOADED for row in loads(context, source, *degrees)]
    return rows + pretrained(context, source)
