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


def one_pass(context, source, layout, file, plain, reader, options):
    """(plain, first open at once, first open, reopened) in seconds.

    Each first open is in a mount of its own: one that is read as soon as it
    is there, and one whose file was looked at some seconds before, so that the
    daemon has memory ready.
    """
    with context.mounted(source, options=options) as (mount, _):
        path = os.path.join(mount, 'view', layout, file)
        in_child(reader, plain)
        before, at_once = (in_child(reader, which) for which in (plain, path))
    with context.mounted(source, options=options) as (mount, _):
        path = os.path.join(mount, 'view', layout, file)
        for end in ENDS:
            os.stat(path + end)
        context.settle(mount)
        in_child(reader, plain)
        first, again, after = (
            in_child(reader, which) for which in (path, path, plain))
    return (before + after) / 2, at_once, first, again


def measure(context, view, reader, most, options=()):
    """Medians of one_pass of one view file and reader."""
    what, name, layout, file = view
    source = context.checkpoint(name)
    with context.mounted(source) as (mount, _):
        plain = plain_copy(context, os.path.join(mount, 'view', layout),
                           layout, file)
    runs = [one_pass(context, source, layout, file, plain, reader, options)
            for _ in range(context.repeat)]
    return [statistics.median(x) for x in zip(*runs)]


def run(context):
    """Rows (b)."""
    rows = []
    subprocess.run(['sync'], check=False)
    for view in VIEWS:
        for name, reader, most in READERS:
            plain, at_once, first, again = measure(context, view, reader,
                                                   most)
            what = f'{name}, {view[0]}'
            rows.append(ratio_row('files', what + ', first open at once',
                                  at_once, plain, most))
            rows.append(ratio_row('files', what + ', first open', first, plain,
                                  most))
            rows.append(ratio_row('files', what + ', reopened', again, plain,
                                  1.15))
            plain, at_once, first, _ = measure(context, view, reader, most,
                                               ('--mode', 'stream'))
            rows.append(ratio_row('files', what + ', streamed',
                                  max(at_once, first), plain, 4))
    shutil.rmtree(context.path('plain'), ignore_errors=True)
    return rows
