# SPDX-License-Identifier: Apache-2.0
"""Two builds of ckptfs beside each other: what the cases start, load, listing, memory, native, files
and cold measure of a mount, in turns.

Needs --other PROGRAM, the build that this one is compared with.  Each repetition loads with the
one and with the other, on the same bytes, each from a new mount of a new store; who is first
changes every time, since whoever is second finds memory that the first one touched.
"""
import contextlib
import os
import statistics

import daemon
from cases import cold, files, listing, load, memory, native, start
from context import Row, clock, ratio_row, warm

MOST = 1.05
STREAM = ('--mode', 'stream')
MEMORY = 'anonymous memory of the daemon, read at tp2 dp2'
PLAIN = 'from disk, a plain file, which no build reads'  # tells how much the disk itself moves


@contextlib.contextmanager
def build(program):
    """Mounts are of this program inside."""
    before, daemon.BIN = daemon.BIN, program
    try:
        yield
    finally:
        daemon.BIN = before


def in_turns(context, measure):
    """Per key of the dictionary that measure() returns its medians: (with this build, with the other)."""
    programs = (daemon.BIN, context.other)
    runs = {program: [] for program in programs}
    for turn in range(context.repeat):
        for program in programs if turn % 2 else programs[::-1]:
            with build(program):
                runs[program].append(measure())
    return {key: [statistics.median(run[key] for run in runs[p]) for p in programs]
            for key in runs[programs[0]][0]}


def warm_loads(context, source, view, plain, reader):
    """Returns, for one view file, the seconds per way to come to it."""
    _, _, layout, file = view
    what = (context, source, layout, file)
    at_once, _ = files.read_at_once(*what, reader, ())
    _, first, again = files.looked_at(*what, plain, reader, ())
    streamed = files.looked_at(*what, plain, reader, STREAM)
    return {'first open at once': at_once, 'first open': first, 'reopened': again,
            'streamed': streamed[1], 'streamed again': streamed[2]}


def cold_loads(context, source, view, plain):
    """Returns the seconds for one view file, and for its plain copy, that are on disk only."""
    _, _, layout, file = view
    path = f'{layout}/{file}{cold.END}'
    native, first = cold.one_pass(context, source, path, plain + cold.END, ())
    _, streamed = cold.one_pass(context, source, path, plain + cold.END, STREAM)
    return {'from disk, first open': first, 'from disk, streamed': streamed,
            PLAIN: native}


def restart(context, source):
    """Returns what a restart does with a mount, but for its loads: seconds, of memory MB."""
    name = 'bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt'
    times = {'adopt and mount': start.adopt_and_mount(context, source)[0],
             "an engine's load at dp2": load.from_mount(context, source)[1],
             'ls -lR of 1,024 ranks': listing.first_listing(context)}
    with context.mounted(source) as (mount, _):
        direct = os.path.join(mount, 'run/zero2/step/global_step1/source/global_step1', name)
        made = os.path.join(mount, 'view/tp2/rank1/optimizer.pt')
        for what, path in (('direct', direct), ('materialised', made)):
            native.read_all(path)
            times[f'read of a file, {what}'] = clock(native.read_all, path)[0]
            times[f'mmap of a file, {what}'] = clock(native.map_all, path)[0]
    return {**times, MEMORY: memory.after_a_restart(context)}


def memory_row(ours, theirs):
    """A row whose bound is what counts for seconds, and 2 MB that an allocator may keep."""
    return Row('builds', MEMORY, f'{ours:.1f} MB', f'{theirs:.1f} MB', f'{ours / theirs:.2f}x',
               f'<= {MOST}x, and 2 MB', ours <= MOST * theirs + 2)


def rows_of(what, times):
    """A row per key of what in_turns gives."""
    return [ratio_row('builds', f'{what}, {key}' if what else key, ours, theirs,
                      MOST if key != PLAIN else None) for key, (ours, theirs) in times.items()]


def view_rows(context, view):
    """The loads of one view file."""
    what, name, layout, file = view
    source, rows = context.checkpoint(name), []
    with context.mounted(source) as (mount, _):
        plain = files.plain_copy(context, os.path.join(mount, 'view', layout), layout, file)
    for reader, call, _ in files.READERS:
        rows += rows_of(f'{reader}, {what}', in_turns(
            context, lambda call=call: warm_loads(context, source, view, plain, call)))
    rows += rows_of(f'read, {what}', in_turns(context, lambda: cold_loads(context, source, view, plain)))
    warm(source)
    return rows


def run(context):
    """Rows: a ratio above 1 is this build's loss."""
    if not context.other:
        raise SystemExit('the case builds needs --other PROGRAM')
    source = context.checkpoint('zero2')
    times = in_turns(context, lambda: restart(context, source))
    memory_mb = times.pop(MEMORY)
    rows = [*rows_of('', times), memory_row(*memory_mb)]
    for view in files.VIEWS:
        rows += view_rows(context, view)
    return rows
