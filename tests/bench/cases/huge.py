# SPDX-License-Identifier: Apache-2.0
"""A synthetic checkpoint of 1T parameters and 1,024 ZeRO-3 ranks."""
import os
import shutil
import subprocess
import tempfile
import time

import daemon
import synthetic
from context import Row, absolute_row, clock

RANKS = 1024


def source(context):
    """The checkpoint, made once."""
    out = context.path('huge', 'ckpt')
    if not os.path.exists(os.path.join(out, 'latest')):
        shutil.rmtree(context.path('huge'), ignore_errors=True)
        synthetic.make(out, RANKS)
    return out


def timed(*words):
    """(seconds, peak resident MB) of one ckptfs command."""
    start = time.perf_counter()
    process = subprocess.Popen([daemon.BIN, *words],
                               stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f'ckptfs {words} exited {process.returncode}')
    return time.perf_counter() - start, usage.ru_maxrss / 1000


def reads_of(pid):
    """(read system calls, page faults) of a process so far."""
    with open(f'/proc/{pid}/io') as f:
        calls = next(int(x.split()[1]) for x in f if x.startswith('syscr'))
    with open(f'/proc/{pid}/stat') as f:
        fields = f.read().rsplit(')', 1)[1].split()
    return calls, int(fields[7]) + int(fields[9])


def norms(program):
    """Read every norm of the model: (seconds, I/Os, pieces of 32 bytes)."""
    process, mount = program.start()
    step = daemon.step_of(mount, 'huge')
    names = [n for n in os.listdir(os.path.join(step, 'param'))
             if 'norm' in n]
    before = reads_of(process.pid)

    def read():
        for name in names:
            with open(os.path.join(step, 'param', name,
                                   'master.safetensors'), 'rb') as f:
                assert len(f.read()) >= 4 * synthetic.HIDDEN
    took, _ = clock(read)
    after = reads_of(process.pid)
    return took, sum(after) - sum(before), len(names) * RANKS


def run(context):
    """Rows (e)."""
    path = source(context)
    folder = tempfile.mkdtemp(prefix='huge', dir=context.work)
    program = daemon.Ckptfs(folder)
    try:
        took, peak = timed('adopt', path, '--store', program.store, '--name',
                           'huge')
        again, memory = timed('info', f'huge/{synthetic.TAG}', '--store',
                              program.store)
        norm_seconds, ios, pieces = norms(program)
    finally:
        program.close()
        shutil.rmtree(folder, ignore_errors=True)
    return [
        absolute_row('huge', 'adopt 1T parameters of 1,024 ranks '
                     f'(peak {peak:.0f} MB)', took, 's', 60),
        absolute_row('huge', 'reopen its manifest', again, 's', 1),
        absolute_row('huge', 'memory of that', memory, 'MB', 200),
        Row('huge', f'all norms, {pieces} pieces of 32 bytes',
            f'{norm_seconds:.2f} s', '', f'{ios / pieces:.3f} I/Os a piece',
            '<= 0.25', ios <= pieces / 4),
    ]
