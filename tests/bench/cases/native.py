# SPDX-License-Identifier: Apache-2.0
"""Plain read and mmap of a direct and of a materialised file against the same
bytes as an ordinary file."""
import mmap
import os
import shutil

from context import Row, interleave, seconds, warm

def read_all(path):
    """Sequential read in 1 MiB pieces."""
    buffer = bytearray(1 << 20)
    with open(path, 'rb', buffering=0) as f:
        while f.readinto(buffer):
            pass


def map_all(path):
    """One byte of every page through a mapping."""
    with open(path, 'rb') as f:
        with mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
            sum(m[::4096])


def row(what, ours, theirs):
    """A row whose bound is a share of native speed."""
    share = theirs / ours
    return Row('native', what, seconds(ours), seconds(theirs),
               f'{share:.2f} of native', '>= 0.9', share >= 0.9)


def run(context):
    """Rows (c)."""
    source, rows = context.checkpoint('zero2'), []
    tag = 'global_step1'
    with context.mounted(source) as (mount, _):
        step = os.path.join(mount, 'run', 'zero2', 'step', tag)
        name = 'bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt'
        direct = next(os.path.join(b, name) for b, _, ns in
                      os.walk(os.path.join(step, 'source')) if name in ns)
        made = os.path.join(step, 'view', 'tp2', 'rank1', 'optimizer.pt')
        read_all(made)
        plain = context.path('plain.pt')
        shutil.copyfile(made, plain)
        warm(source)
        read_all(plain)
        pairs = (('direct', direct, os.path.join(source, tag, name)),
                 ('materialised, reopened', made, plain))
        for what, ours, theirs in pairs:
            for way, call in (('read', read_all), ('mmap', map_all)):
                a, b = interleave(context.repeat, lambda: call(ours),
                                  lambda: call(theirs))
                rows.append(row(f'{way} of a file, {what}', a, b))
        os.unlink(plain)
    return rows
