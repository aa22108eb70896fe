# SPDX-License-Identifier: Apache-2.0
"""torch.load and safetensors on view files in a changed layout, against the
same bytes as plain files: first open, reopened, and without passthrough."""
import os
import shutil
import statistics
import subprocess

import torch
from safetensors.torch import load_file

from context import clock, ratio_row, warm

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


READERS = (('torch.load', torch_load, 1.6), ('safetensors', safetensors_load,
                                             1.8))


def plain_copy(context, view, layout, file):
    """The same bytes as ordinary files, warm."""
    out = context.path('plain', layout)
    os.makedirs(os.path.dirname(os.path.join(out, file)), exist_ok=True)
    for end in ('.pt', '.safetensors'):
        shutil.copyfile(os.path.join(view, file + end),
                        os.path.join(out, file + end))
    warm(out)
    return os.path.join(out, file)


def one_pass(context, source, layout, file, plain, reader, options):
    """(plain, first open, reopened) in seconds, in a mount of its own."""
    with context.mounted(source, options=options) as (mount, _):
        path = os.path.join(mount, 'view', layout, file)
        theirs, _ = clock(reader, plain)
        first, _ = clock(reader, path)
        again, _ = clock(reader, path)
        return theirs, first, again


def measure(context, view, reader, most, options=()):
    """Median (plain, first, again) of one view file and reader."""
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
            plain, first, again = measure(context, view, reader, most)
            what = f'{name}, {view[0]}'
            rows.append(ratio_row('files', what + ', first open', first, plain,
                                  most))
            rows.append(ratio_row('files', what + ', reopened', again, plain,
                                  1.15))
            plain, first, _ = measure(context, view, reader, most,
                                      ('--mode', 'stream'))
            rows.append(ratio_row('files', what + ', streamed', first, plain,
                                  4))
    shutil.rmtree(context.path('plain'), ignore_errors=True)
    return rows
