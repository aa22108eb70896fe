# SPDX-License-Identifier: Apache-2.0
"""Writing into an ingest mount against writing into the directory that it mirrors, in turns: `dd`
and `torch.save` of 2 GiB, dcp.save of 1 GiB, each with fsync; and the same with every byte through
the daemon."""
import os
import shutil
import statistics
import subprocess
import tempfile

import torch
import torch.distributed.checkpoint as checkpoint

import daemon
from context import clock, ratio_row

GIB = 1 << 30
LEAST = 0.9  # of the disk's speed, where the kernel writes


def sync(path):
    """All of a file is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def dd(folder):
    """2 GiB by write(2), 1 MiB each."""
    subprocess.run(['dd', 'if=/dev/zero', f'of={folder}/dd', 'bs=1M', 'count=2048', 'conv=fsync', 'status=none'],
                   check=True)


def saver():
    """torch.save of 2 GiB in 64 tensors."""
    tensors = {f'layers.{i}.weight': torch.ones(GIB // 32 // 4) for i in range(64)}

    def save(folder):
        torch.save(tensors, f'{folder}/model.pt')
        sync(f'{folder}/model.pt')
    return save


def sharded():
    """dcp.save of 1 GiB by one process; it syncs what it writes."""
    tensors = {f'layers.{i}.weight': torch.ones(GIB // 32 // 4) for i in range(32)}

    def save(folder):
        checkpoint.save(tensors, checkpoint_id=f'{folder}/dcp', no_dist=True)
    return save


def empty(folder):
    """Nothing is left of the save before; the disk is idle."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    os.sync()


def row_of(mount, plain, what, save, repeat, least):
    """Time in the mount against time in a directory beside it, in turns."""
    times = {mount: [], plain: []}
    for turn in range(repeat):
        for folder in (mount, plain) if turn % 2 == 0 else (plain, mount):  # the first has the colder disk
            empty(folder)
            times[folder].append(clock(save, folder)[0])
    ours, theirs = map(statistics.median, times.values())
    return ratio_row('ingest', what, ours, theirs, least and round(1 / least, 2))


def run(context):
    """Rows: seconds of a save in the mount against seconds on the disk."""
    folder = tempfile.mkdtemp(prefix='ingest', dir=context.work)
    program = daemon.Ckptfs(folder)
    rows = []
    try:
        for option, how, least in ((), 'written by the kernel', LEAST), (('--no-passthrough',), 'through the daemon', None):
            directory = os.path.join(folder, f'saves{len(rows)}')
            plain = os.path.join(folder, 'plain')
            os.makedirs(plain, exist_ok=True)
            mount = program.mountpoint()
            program.run('ingest', '--store', program.store, *option, directory, mount)
            for what, save in (('dd of 2 GiB', dd), ('torch.save of 2 GiB', saver()), ('dcp.save of 1 GiB', sharded())):
                rows.append(row_of(mount, plain, f'{what}, {how}, against the disk', save, context.repeat, least))
            program.umount(mount)
            shutil.rmtree(directory)
    finally:
        program.close()
        shutil.rmtree(folder, ignore_errors=True)
    return rows
