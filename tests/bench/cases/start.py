# SPDX-License-Identifier: Apache-2.0
"""Time until a load in another layout can start, and what it costs on disk."""
import os
import shutil
import tempfile

import daemon
from context import Row, clock, disk_bytes, seconds


def adopt_and_mount(context, source):
    """(seconds, bytes of the store) of one command from nothing."""
    folder = tempfile.mkdtemp(prefix='start', dir=context.work)
    program = daemon.Ckptfs(folder)
    try:
        took, mount = clock(lambda: program.mount(adopt=[source]))
        assert os.path.exists(os.path.join(
            mount, 'view', 'dp2_zero1', 'deepspeed', 'latest_universal'))
        return took, disk_bytes(program.store)
    finally:
        program.close()
        shutil.rmtree(folder, ignore_errors=True)


def run(context):
    """Rows (a), first half."""
    source = context.checkpoint('zero2')
    target = context.path('converted')
    shutil.rmtree(target, ignore_errors=True)
    stock = context.convert(os.path.join(source, 'global_step1'), target)
    extra = disk_bytes(target)
    shutil.rmtree(target)
    runs = sorted(adopt_and_mount(context, source)
                  for _ in range(context.repeat))
    ours, store = runs[len(runs) // 2]
    return [
        Row('start', 'adopt + mount, against ds_to_universal', seconds(ours),
            seconds(stock), f'{stock / ours:.0f}x less', '>= 20x less',
            stock / ours >= 20),
        Row('start', 'extra bytes on disk (the index)', f'{store / 1e6:.2f} MB',
            f'{extra / 1e6:.0f} MB', f'{store / extra:.5f}', '< 1 MB',
            store < 1e6),
    ]
