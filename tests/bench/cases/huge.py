# SPDX-License-Identifier: Apache-2.0
"""A synthetic checkpoint of 1T parameters and 1,024 ZeRO-3 ranks."""
import os
import shutil
import subprocess
import sys
import tempfile

import daemon
import synthetic
from context import Row, absolute_row, clock, disk_bytes, seconds

RANKS = 1024
KINDS = tuple(k + '.safetensors' for k in ('master', 'exp_avg', 'exp_avg_sq'))
MEASURE = """
import resource, subprocess, sys, time
start = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(time.perf_counter() - start,
      resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def source(context):
    """The checkpoint, made once."""
    out = context.path('huge', 'ckpt')
    if not os.path.exists(os.path.join(out, 'latest')):
        shutil.rmtree(context.path('huge'), ignore_errors=True)
        synthetic.make(out, RANKS)
    return out


def timed(*words):
    """(seconds, peak resident MB) of one ckptfs command.

    A small process in between starts it: the peak of a process counts what
    its parent had when it forked.
    """
    done = subprocess.run([sys.executable, '-S', '-c', MEASURE, daemon.BIN,
                           *words], stdout=subprocess.PIPE, text=True,
                          check=True)
    took, peak = done.stdout.split()
    return float(took), float(peak) / 1000


def reads_of(pid):
    """(read system calls, page faults) of a process so far."""
    with open(f'/proc/{pid}/io') as f:
        calls = next(int(x.split()[1]) for x in f if x.startswith('syscr'))
    with open(f'/proc/{pid}/stat') as f:
        fields = f.read().rsplit(')', 1)[1].split()
    return calls, int(fields[7]) + int(fields[9])


def norms(program, run, every=1):
    """Read all states of every n-th norm with a fresh daemon.

    Returns (seconds, I/Os) a piece of 32 bytes.  I/Os are the daemon's read
    calls and page faults.  All norms are what one rank of a layout without
    tensor parallelism reads of them.
    """
    process, mount = program.start('--run', run)
    param = os.path.join(daemon.step_of(mount, run), 'param')
    names = sorted(n for n in os.listdir(param) if 'norm' in n)[::every]
    before = reads_of(process.pid)

    def read():
        for name in names:
            for kind in KINDS:
                with open(os.path.join(param, name, kind), 'rb') as f:
                    assert len(f.read()) >= 4 * synthetic.HIDDEN
    took, _ = clock(read)
    ios = sum(reads_of(process.pid)) - sum(before)
    process.terminate()
    process.wait(daemon.TIMEOUT)
    pieces = len(names) * len(KINDS) * RANKS
    return took / pieces, ios / pieces


def norm_rows(program):
    """Rows on the norms, packed and not (of which a sample is enough)."""
    took, ios = norms(program, 'huge')
    plain_took, plain_ios = norms(program, 'plain', every=16)
    return [
        Row('huge', 'I/Os for all norms, a piece of 32 bytes '
            '(compared with --pack never)', f'{ios:.4f}', f'{plain_ios:.3f}',
            f'{ios / plain_ios:.4f}x', '<= 0.05', ios <= 0.05),
        Row('huge', 'time for that, a piece', f'{took * 1e6:.2f} us',
            f'{plain_took * 1e6:.0f} us', f'{took / plain_took:.4f}x', '',
            True),
    ]


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
        unpacked, _ = timed('adopt', path, '--store', program.store,
                            '--name', 'plain', '--pack', 'never')
        side = disk_bytes(os.path.join(program.store, 'blobs'))
        of_norms = norm_rows(program)
    finally:
        program.close()
        shutil.rmtree(folder, ignore_errors=True)
    return [
        absolute_row('huge', 'adopt 1T parameters of 1,024 ranks '
                     f'(peak {peak:.0f} MB)', took, 's', 60),
        absolute_row('huge', 'reopen its manifest', again, 's', 1),
        absolute_row('huge', 'memory of that', memory, 'MB', 200),
        Row('huge', 'of the adopt, packing', seconds(took - unpacked), '',
            f'{side / 1e6:.1f} MB', '', True),
        *of_norms,
    ]
