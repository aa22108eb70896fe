# SPDX-License-Identifier: Apache-2.0
"""Read view files in a changed layout whose sources are on disk only, against
plain files of the same bytes that are on disk only."""
import os
import shutil
import statistics

from cases.files import VIEWS, plain_copy
from cases.native import read_all
from context import clock, ratio_row

END = '.safetensors'


def evict(path):
    """Drop a file's, or a folder's files', pages from the page cache."""
    if os.path.isdir(path):
        for name in os.listdir(path):
            evict(os.path.join(path, name))
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def one_pass(context, source, file, plain, options):
    """(plain, ours) in seconds, each from the disk; ours first opened."""
    evict(plain)
    native = clock(read_all, plain)[0]
    with context.mounted(source, options=options) as (mount, _):
        path = os.path.join(mount, 'view', file)
        os.stat(path)
        context.settle(mount)
        evict(source)
        return native, clock(read_all, path)[0]


def run(context):
    """Rows: what a restart after a reboot sees; no bound is promised."""
    rows = []
    for what, name, layout, file in VIEWS:
        source = context.checkpoint(name)
        with context.mounted(source) as (mount, _):
            plain = plain_copy(context, os.path.join(mount, 'view', layout),
                               layout, file) + END
        for how, options in (('first open', ()),
                             ('streamed', ('--mode', 'stream'))):
            runs = [one_pass(context, source, f'{layout}/{file}{END}', plain,
                             options) for _ in range(context.repeat)]
            native, ours = map(statistics.median, zip(*runs))
            rows.append(ratio_row('cold', f'read from disk, {what}, {how}',
                                  ours, native))
    shutil.rmtree(context.path('plain'), ignore_errors=True)
    return rows
