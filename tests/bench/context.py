# SPDX-License-Identifier: Apache-2.0
"""Helpers that the cases share: checkpoints, mounts, clocks."""
import contextlib
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import daemon

try:
    import launch
    from tiny_model import Dims, Layout
except ImportError:  # no DeepSpeed, which makes the checkpoints: some cases need none
    DIMS, SOURCES = None, {}
else:
    # About 223 million parameters.
    DIMS = Dims(hidden=1024, layers=14, heads=16, kv_heads=4, head_dim=64,
                ffn=2816, vocab=32000, seq=8, batch=4)
    SOURCES = {
        'zero2': Layout(stage=2, dp=4),
        'zero3': Layout(stage=3, dp=2, sub_group=10**9),
    }


@dataclass
class Row:
    """One line of the table; value is what the bound is about."""
    case: str
    what: str
    ours: str
    theirs: str
    value: str
    bound: str
    ok: bool


def ratio_row(case, what, ours, theirs, most=None):
    """A row whose bound, if any, is on ours / theirs, medians in seconds."""
    value = ours / theirs
    return Row(case, what, seconds(ours), seconds(theirs), f'{value:.2f}x',
               f'<= {most}x' if most else '', not most or value <= most)


def absolute_row(case, what, value, unit, most):
    """A row whose bound is on a measured number itself."""
    return Row(case, what, f'{value:.3g} {unit}', '', f'{value:.3g}',
               f'<= {most} {unit}', value <= most)


def seconds(value):
    """A duration for people."""
    return f'{value * 1000:.0f} ms' if value < 10 else f'{value:.1f} s'


def clock(call, *args):
    """(seconds, result) of one call."""
    gc.collect()
    start = time.perf_counter()
    result = call(*args)
    return time.perf_counter() - start, result


def interleave(repeat, *calls):
    """Medians of the calls' durations, run in turns."""
    times = [[] for _ in calls]
    for _ in range(repeat):
        for slot, call in zip(times, calls):
            slot.append(clock(call)[0])
    return [statistics.median(t) for t in times]


def warm(root):
    """Read everything below a folder once, so that the page cache holds it."""
    for base, _, names in os.walk(root):
        for name in names:
            with open(os.path.join(base, name), 'rb') as f:
                while f.read(1 << 24):
                    pass


def disk_bytes(root):
    """Blocks that a folder occupies, in bytes."""
    total = 0
    for base, _, names in os.walk(root):
        total += sum(os.lstat(os.path.join(base, n)).st_blocks * 512
                     for n in names)
    return total


def save_worker(out, lay):
    """One rank: a training step, then save."""
    from engine import build_engine, train  # DeepSpeed, which not every machine has
    engine = build_engine(DIMS, lay)
    train(engine, DIMS, lay, 0, 1)
    engine.save_checkpoint(out, client_state={
        'iteration': 1,
        'universal_checkpoint_info': {'universal_checkpoint_version': 0.4}})


class Context:
    """The work directory of a run."""

    def __init__(self, work, repeat):
        self.work, self.repeat = work, repeat
        # For the snapshot case.
        self.parameters, self.iterations, self.device = 2.2e8, 6, 'cpu'
        self.minutes = 2.0  # of the follow case
        self.other = None  # the program that the builds case compares with

    def path(self, *parts):
        """A path in the work directory."""
        return os.path.join(self.work, *parts)

    def checkpoint(self, name):
        """A real checkpoint of 223 M parameters, made once and warm."""
        out = self.path(name, 'ckpt')
        if not os.path.exists(os.path.join(out, 'latest')):
            shutil.rmtree(self.path(name), ignore_errors=True)
            os.makedirs(self.path(name))
            lay = SOURCES[name]
            print(f'   making {name}', file=sys.stderr, flush=True)
            log = self.path(name, 'log')
            if not launch.launch(save_worker, lay.world, (out, lay), log):
                raise RuntimeError(str(launch.errors_of(log, lay.world)))
        warm(out)
        return out

    def stock(self):
        """The stock universal directory of zero2, converted once.

        In a save directory of its own: beside its source it would be the
        newest step, and so what a mount of that shows.
        """
        out = self.path('zero2', 'stock')
        tag = os.path.join(out, 'global_step1_universal')
        if not os.path.exists(os.path.join(out, 'latest_universal')):
            os.makedirs(out, exist_ok=True)
            self.convert(os.path.join(self.checkpoint('zero2'),
                                      'global_step1'), tag)
        warm(tag)
        return out

    def convert(self, tag, target):
        """Run ds_to_universal; returns its duration."""
        done, _ = clock(lambda: subprocess.run(
            [sys.executable, '-m', 'deepspeed.checkpoint.ds_to_universal',
             '--input_folder', tag, '--output_folder', target], check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return done

    @staticmethod
    def settle(mount):
        """Wait until the daemon has prepared memory for what was looked at."""
        def ready():
            with open(os.path.join(mount, '.ckptfs', 'status')) as f:
                pool = json.load(f)['materialised']
            return pool is None or pool['reserve_ready']
        daemon.wait_until(ready, 'the reserve')

    @contextlib.contextmanager
    def mounted(self, *sources, options=()):
        """A new store with the sources, mounted; yields (mount, process)."""
        folder = tempfile.mkdtemp(prefix='mount', dir=self.work)
        program = daemon.Ckptfs(folder)
        program.reserve = ()  # as users get it
        try:
            for source in sources:
                # No config.json lies beside it, which would tell.
                program.adopt(source, os.path.basename(
                    os.path.dirname(source)), extra=(
                        '--family-set', f'head_dim={DIMS.head_dim}'))
            process, mount = program.start(*options)
            yield mount, process
        finally:
            program.close()
            shutil.rmtree(folder, ignore_errors=True)
