# SPDX-License-Identifier: Apache-2.0
"""An unmodified engine's load at another dp: from a mount and from the stock
universal directory, and the whole detour that the stock way takes."""
import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import replace

import daemon
import launch
import tiny_model
from context import DIMS, SOURCES, clock, ratio_row
from engine import build_engine

TARGET = replace(SOURCES['zero2'], dp=2, universal=True)


def load_worker(path, result):
    """One rank: time load_checkpoint."""
    engine = build_engine(DIMS, TARGET)
    start = time.perf_counter()
    loaded, _ = engine.load_checkpoint(path)
    assert loaded
    with open(f'{result}.{tiny_model.Par.rank}', 'w') as f:
        json.dump(time.perf_counter() - start, f)


def load(path):
    """Seconds of the slowest rank."""
    with tempfile.TemporaryDirectory() as tmp:
        result = os.path.join(tmp, 'seconds')
        log = os.path.join(tmp, 'log')
        if not launch.launch(load_worker, TARGET.world, (path, result), log):
            raise RuntimeError(str(launch.errors_of(log, TARGET.world)))
        return max(json.load(open(f'{result}.{r}'))
                   for r in range(TARGET.world))


def from_mount(context, source):
    """(adopt + mount + load, load) in seconds, from an empty store."""
    folder = tempfile.mkdtemp(prefix='load', dir=context.work)
    program = daemon.Ckptfs(folder)
    program.reserve = ()
    try:
        ready, mount = clock(lambda: program.mount(adopt=[source]))
        assert 'universal' not in os.readlink(os.path.join(mount, 'view'))
        took = load(os.path.join(mount, 'view', 'dp2_zero2', 'deepspeed'))
        return ready + took, took
    finally:
        program.close()
        shutil.rmtree(folder, ignore_errors=True)


def run(context):
    """Rows (a), second half."""
    source, converted = context.checkpoint('zero2'), context.stock()
    target = context.path('detour')
    conversion, _ = clock(lambda: context.convert(
        os.path.join(source, 'global_step1'), target))
    shutil.rmtree(target)
    ours, ours_load, stock = [], [], []
    for _ in range(max(3, context.repeat // 2)):
        both, only = from_mount(context, source)
        ours.append(both)
        ours_load.append(only)
        stock.append(load(converted))
    ours, only, stock = map(statistics.median, (ours, ours_load, stock))
    return [
        ratio_row('load', 'adopt + mount + load dp2, against loading a '
                  'converted directory', ours, stock, 1.2),
        ratio_row('load', 'adopt + mount + load dp2, against conversion + '
                  'load', ours, conversion + stock, 1.0),
        ratio_row('load', 'the load alone', only, stock, 1.2),
    ]
