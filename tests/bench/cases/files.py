# SPDX-License-Identifier: Apache-2.0
"""torch.load and safetensors on view files in a changed layout, against the
same bytes as plain files: first open, reopened, and without passthrough."""
import gc
import os
import shutil
import statistics
import struct
import subprocess
import time

import torch
from safetensors.torch import load_file

from context import ratio_row, warm

# (what, source, layout, file without its ending)
VIEWS = (
    ('TP slice', 'zero2', 'tp2', 'rank1/optimizer'),
    ('ZeRO re-partition', 'zero2', 'dp3_zero2', 'rank1/optimizer'),
    ('fp32 -> bf16', 'zero3', 'tp1', 'rank0/model'),
)


def torch_load(path):
    """Every byte through torch.load."""
    return torch.load(path + '.pt', weights_only=True)


def safetensors_load(path):
    """Every byte through safetensors: mapped, then cloned."""
    return {k: v.clone() for k, v in load_file(path + '.safetensors').items()}


GIVEN_BACK = 5  # seconds until a host has begun to take free memory
ENDS = ('.pt', '.safetensors')
READERS = (('torch.load', torch_load, 1.6), ('safetensors', safetensors_load,
                                             1.8))


def in_child(reader, path):
    """Seconds of one read in a process of its own, as a restart reads.

    The heap of a process that has read before is warm or trimmed, as it
    happens; that of a new one is always new.
    """
    gc.collect()
    from_child, to_parent = os.pipe()
    child = os.fork()
    if child == 0:
        start = time.perf_counter()
        reader(path)
        took = time.perf_counter() - start
        os.write(to_parent, struct.pack('d', took))
        os._exit(0)
    os.close(to_parent)
    took = os.read(from_child, 8)
    os.close(from_child)
    os.waitpid(child, 0)
    return struct.unpack('d', took)[0]


def plain_copy(context, view, layout, file):
    """The same bytes as ordinary files, warm."""
    out = context.path('plain', layout)
    os.makedirs(os.path.dirname(os.path.join(out, file)), exist_ok=True)
    for end in ENDS:
        shutil.copyfile(os.path.join(view, file + end),
                        os.path.join(out, file + end))
    warm(out)
    return os.path.join(out, file)


def read_at_once(context, source, layout, file, reader, options, plain=None):
    """(first open, plain after it) of a mount that is not a second old."""
    with context.mounted(source, options=options) as (mount, _):
        path = os.path.join(mount, 'view', layout, file)
        first = in_child(reader, path)
        return first, in_child(reader, plain) if plain else None


def at_once(context, source, layout, file, plain, reader, options):
    """(first open, plain) in whatever memory is free, and in held memory.

    A virtual machine may have given free pages back to its host, and then pays
    for them at the first touch, some ten times what clearing them costs: so
    the second pair follows another mount that had the memory a second ago, as
    a machine of its own always has it.
    """
    what = (context, source, layout, file, reader, options)
    time.sleep(GIVEN_BACK)
    new = read_at_once(*what, plain)
    read_at_once(*what)
    return new, read_at_once(*what, plain)


def looked_at(context, source, layout, file, plain, reader, options):
    """(plain, first open, reopened) of a file that was looked at before.

    Some seconds before, so that the daemon has memory ready.
    """
    with context.mounted(source, options=options) as (mount, _):
        path = os.path.join(mount, 'view', layout, file)
        for end in ENDS:
            os.stat(path + end)
        context.settle(mount)
        before, first, again, after = (
            in_child(reader, which) for which in (plain, path, path, plain))
    return (before + after) / 2, first, again


def one_pass(*what):
    """All of it, in seconds, as a dictionary."""
    (new, plain_new), (held, plain_held) = at_once(*what)
    plain, first, again = looked_at(*what)
    return {'plain': (plain_new + plain_held + plain) / 3, 'held': held,
            'new': new, 'first': first, 'again': again}


def measure(context, view, reader, options=()):
    """Medians of one_pass of one view file and reader."""
    _, name, layout, file = view
    source = context.checkpoint(name)
    with context.mounted(source) as (mount, _):
        plain = plain_copy(context, os.path.join(mount, 'view', layout),
                           layout, file)
    runs = [one_pass(context, source, layout, file, plain, reader, options)
            for _ in range(context.repeat)]
    return {k: statistics.median(r[k] for r in runs) for k in runs[0]}


def rows_of(context, view, name, reader, most):
    """The rows of one view file and reader."""
    def row(key, what, times, bound=None):
        return ratio_row('files', f'{name}, {view[0]}, {what}', times[key],
                         times['plain'], bound)
    chosen = measure(context, view, reader)
    streamed = measure(context, view, reader, ('--mode', 'stream'))
    worst = max(('held', 'first'), key=streamed.get)
    return [row('held', 'first open at once', chosen, most),
            row('new', 'the same in memory that the host took back', chosen),
            row('first', 'first open, looked at before', chosen, most),
            row('again', 'reopened', chosen, 1.15),
            row(worst, 'streamed', streamed, 4)]


def run(context):
    """Rows (b)."""
    rows = []
    subprocess.run(['sync'], check=False)
    for view in VIEWS:
        for name, reader, most in READERS:
            rows += rows_of(context, view, name, reader, most)
    shutil.rmtree(context.path('plain'), ignore_errors=True)
    return rows
