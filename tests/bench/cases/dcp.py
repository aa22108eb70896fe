# SPDX-License-Identifier: Apache-2.0
"""A million chunks of a DCP checkpoint: adopting them, and reading a tensor that lies in a
grid of 1,024 boxes; slices of one tensor in 102,400 boxes."""
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time

import daemon
import dcp_chunks
from context import absolute_row
from safetensors import safe_open

TENSORS, RANKS = 977, 1024


def adopt(folder, name, *made, options=()):
    """(seconds, GB) of one adopt; the program that did it."""
    out = os.path.join(folder, name)
    pid = os.fork()  # making it takes two gigabytes
    if pid == 0:
        dcp_chunks.make(out, *made)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    program = daemon.Ckptfs(os.path.join(folder, f'{name}-store'))
    os.makedirs(program.folder)
    begin = time.monotonic()
    process = subprocess.Popen([daemon.BIN, 'adopt', out, '--store', program.store, *options],
                               stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0
    return time.monotonic() - begin, used.ru_maxrss / 1e6, program


def slices(folder):
    """Milliseconds of reading 64 KiB anywhere in one tensor of a grid of 320 x 320 boxes."""
    _, _, program = adopt(folder, 'boxes', 1, 320 * 320, 320, (64, 64), 1024,
                          options=('--pack', 'never'))
    path = os.path.join(program.mount('--mode', 'stream'), 'run', 'boxes', 'step', 'boxes', 'view',
                        'tp1', 'rank0', 'model.safetensors')
    pick, size, times = random.Random(1), os.path.getsize(path), []
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    for _ in range(300):
        at = pick.randrange(1 << 20, size - (1 << 20)) & -4096
        begin = time.perf_counter()
        assert len(os.pread(file, 1 << 16, at)) == 1 << 16
        times.append(time.perf_counter() - begin)
    os.close(file)
    program.close()
    return absolute_row('dcp', '64 KiB anywhere in a tensor of 102,400 boxes, median',
                        statistics.median(times) * 1000, 'ms', 1)


def run(context):
    """Rows: seconds and memory of an adopt, seconds of reading."""
    rows = []
    folder = tempfile.mkdtemp(prefix='dcp', dir=context.work)
    try:
        for name, columns in (('rows', 1), ('grid', 8)):
            took, memory, program = adopt(folder, name, TENSORS, RANKS, columns)
            what = f'adopt of 1,000,448 chunks, {name}'
            rows.append(absolute_row('dcp', what, took, 's', 30))
            rows.append(absolute_row('dcp', f'{what}: memory', memory, 'GB', 1))
            path = os.path.join(program.mount(), 'run', name, 'step', name, 'view', 'tp1',
                                'rank0', 'model.safetensors')
            begin = time.monotonic()
            with safe_open(path, 'pt') as f:
                for key in list(f.keys())[:100]:
                    f.get_tensor(key).sum()
            rows.append(absolute_row('dcp', f'100 tensors of 1,024 chunks, {name}',
                                     time.monotonic() - begin, 's', 60))
            program.close()
        rows.append(slices(folder))
    finally:
        shutil.rmtree(folder)
    return rows
