# SPDX-License-Identifier: Apache-2.0
"""Two builds of ckptfs beside each other: the loads of the cases files and cold, in turns.

Needs --other PROGRAM, the build that this one is compared with.  Each repetition loads with the
one and with the other, on the same bytes, each from a new mount of a new store; who is first
changes every time, since whoever is second finds memory that the first one touched.
"""
import contextlib
import os
import statistics

import daemon
from cases import cold, files
from context import ratio_row, warm

MOST = 1.05
STREAM = ('--mode', 'stream')
PLAIN = 'from disk, a plain file, which no build reads'  # tells how much the disk itself moves


@contextlib.contextmanager
def build(program):
    """Mounts are of this program inside."""
    before, daemon.BIN = daemon.BIN, program
    try:
        yield
    finally:
        daemon.BIN = before


def in_turns(context, load):
    """Per key of the dictionary that load() returns its medians: (with this build, with the other)."""
    programs = (daemon.BIN, context.other)
    runs = {program: [] for program in programs}
    for turn in range(context.repeat):
        for program in programs if turn % 2 else programs[::-1]:
            with build(program):
                runs[program].append(load())
    return {key: [statistics.median(run[key] for run in runs[p]) for p in programs]
            for key in runs[programs[0]][0]}


def warm_loads(context, source, view, plain, reader):
    """Of one view file: seconds per way to come to it."""
    _, _, layout, file = view
    what = (context, source, layout, file)
    at_once, _ = files.read_at_once(*what, reader, ())
    _, first, again = files.looked_at(*what, plain, reader, ())
    streamed = files.looked_at(*what, plain, reader, STREAM)
    return {'first open at once': at_once, 'first open': first, 'reopened': again,
            'streamed': streamed[1], 'streamed again': streamed[2]}


def cold_loads(context, source, view, plain):
    """Of one view file, and of its plain copy, that are on disk only: seconds."""
    _, _, layout, file = view
    path = f'{layout}/{file}{cold.END}'
    native, first = cold.one_pass(context, source, path, plain + cold.END, ())
    _, streamed = cold.one_pass(context, source, path, plain + cold.END, STREAM)
    return {'from disk, first open': first, 'from disk, streamed': streamed,
            PLAIN: native}


def run(context):
    """Rows: a ratio above 1 is this build's loss."""
    if not context.other:
        raise SystemExit('the case builds needs --other PROGRAM')
    rows = []

    def add(what, times):
        rows.extend(ratio_row('builds', f'{what}, {key}', ours, theirs, MOST if key != PLAIN else None)
                    for key, (ours, theirs) in times.items())

    for view in files.VIEWS:
        what, name, layout, file = view
        source = context.checkpoint(name)
        with context.mounted(source) as (mount, _):
            plain = files.plain_copy(context, os.path.join(mount, 'view', layout), layout, file)
        for reader, load, _ in files.READERS:
            add(f'{reader}, {what}', in_turns(context, lambda load=load: warm_loads(
                context, source, view, plain, load)))
        add(f'read, {what}', in_turns(context, lambda: cold_loads(context, source, view, plain)))
        warm(source)
    return rows
