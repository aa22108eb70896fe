# SPDX-License-Identifier: Apache-2.0
"""Measure ckptfs against the stock way and against plain files.

Usage: bench.py [--case NAME ...] [--work DIR] [--bin PROGRAM] [--json FILE]
                [--parameters N] [--iterations N] [--device cuda] [--other PROGRAM]

One runner, one table.  Every case compares the two sides in one run on the
same bytes with a warm page cache, as medians of interleaved repetitions; the
bound is the project's own promise.  The checkpoints (real DeepSpeed, 223 M
parameters) are made once into the work directory, which needs 20 GB.
Exit code 0 only if every bound holds.
"""
import argparse
import datetime
import importlib
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(ROOT, 'tests', 'e2e'),
                os.path.join(ROOT, 'tests', 'fixtures', 'deepspeed')]

CASES = ('start', 'load', 'files', 'native', 'cold', 'far', 'listing',
         'memory', 'publish', 'dialect', 'saves', 'attacks', 'follow', 'ingest', 'dcp', 'dcp_view', 'compact', 'tools', 'megatron', 'huge', 'snapshot',
         'builds')


def hardware():
    """One line on what this ran on."""
    with open('/proc/cpuinfo') as f:
        model = next((x.split(':', 1)[1].strip() for x in f
                      if x.startswith('model name')), 'unknown CPU')
    kib = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 1024
    return (f'{datetime.date.today().isoformat()}, {os.cpu_count()} cores of '
            f'{model}, {kib >> 20} GiB, Linux {os.uname().release}')


def show(rows):
    """The table as Markdown."""
    lines = ['| case | measured | ours | compared with | ratio | bound | |',
             '| --- | --- | ---: | ---: | ---: | ---: | --- |']
    for r in rows:
        lines.append(f'| {r.case} | {r.what} | {r.ours} | {r.theirs} | '
                     f'{r.value} | {r.bound} | {"ok" if r.ok else "MISSED"} |')
    return '\n'.join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--case', action='append', choices=CASES)
    parser.add_argument('--work', default=os.path.join(ROOT, '.cache', 'bench'))
    parser.add_argument('--bin', default=os.path.join(ROOT, 'build', 'ckptfs'))
    parser.add_argument('--repeat', type=int, default=5)
    parser.add_argument('--parameters', type=float, default=2.2e8,
                        help='of the model of the snapshot case')
    parser.add_argument('--iterations', type=int, default=6,
                        help='saved by the snapshot case')
    parser.add_argument('--device', default='cpu',
                        help='where the snapshot case trains: cpu or cuda')
    parser.add_argument('--minutes', type=float, default=2,
                        help='that the follow case lasts; its figures are of 60')
    parser.add_argument('--other', metavar='PROGRAM',
                        help='the build that the builds case compares with')
    parser.add_argument('--json')
    args = parser.parse_args()
    os.environ['CKPTFS_BIN'] = os.path.abspath(args.bin)
    os.makedirs(args.work, exist_ok=True)
    from context import Context
    context, rows = Context(args.work, args.repeat), []
    context.parameters, context.iterations = args.parameters, args.iterations
    context.device, context.minutes = args.device, args.minutes
    context.other = args.other and os.path.abspath(args.other)
    cases = args.case or [name for name in CASES if name != 'builds' or args.other]
    for name in cases:
        print(f'== {name}', file=sys.stderr, flush=True)
        new = importlib.import_module(f'cases.{name}').run(context)
        rows += new
        print(show(new), file=sys.stderr, flush=True)
    print(f'{hardware()}\n\n{show(rows)}')
    if args.json:
        with open(args.json, 'w') as f:
            json.dump({'hardware': hardware(),
                       'rows': [vars(r) for r in rows]}, f, indent=1)
    missed = sum(not r.ok for r in rows)
    print(f'\n{len(rows) - missed} passed, {missed} failed')
    return 1 if missed else 0


if __name__ == '__main__':
    sys.exit(main())
