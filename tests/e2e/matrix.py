# SPDX-License-Identifier: Apache-2.0
"""Every kind of source against everything that loads a view: docs/reference/compatibility.md.

Usage: matrix.py [--all] [--part P ...] [--source S ...] [--column C ...] [--missing] [--refused]
                 [--earlier] [--table [FILE]] [--results FILE]

Adopts the sources into one store, mounts it once, and for each pair lets unmodified software load
the view: DeepSpeed's engines, torch.distributed.checkpoint on meshes, from_pretrained, Trainer,
accelerate, Lightning, ranks of Megatron; and reads the files of ranks.  Loaded values must equal a truth that none of
our code made, bit for bit; the next losses must equal those of the run that never stopped, or of a
module that torch itself filled.  The parts say which pairs there are:

  deepspeed    deepspeed_pairs.py     the tiny model's checkpoints, engines, rank<N>
  dcp          dcp_sources.py         what torch.distributed.checkpoint saved, all columns
  huggingface  huggingface_pairs.py   transformers' models
  tools        tool_sources.py        directories of Trainer, accelerate, Lightning
  to_dcp       dcp_pairs.py           sources of DeepSpeed's and transformers' models on every mesh
  megatron     megatron_pairs.py      what Megatron saved, and what its ranks load of it and of transformers' models

Without --all (or one of the choices) it runs a selection that has every column and every kind of
source.  Results are kept in --results (.cache/matrix.json), with the program that gave them; where that
has none of a cell, the page's word is the result, with the program that the page names.  --missing runs
what has no good result of this program; --refused what is known as refused or n/a, whose texts change
more often than bytes do; --earlier lists the cells that are not of this program, and runs nothing.
--table writes the page, alone from what is known: a cell of an earlier program has a mark.  It loses
no result: without records and without a page it writes nothing.
Exit code 0 only if every pair held.
"""
import argparse
import gc
import importlib
import json
import os
import sys
import tempfile
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.path.insert(0, os.path.join(HERE, '..', 'fixtures', 'deepspeed'))

import daemon  # noqa: E402
from cells import COLUMNS, GIVEN  # noqa: E402
from matrix_results import ROOT, Results, read_page  # noqa: E402

# In the order of the page; a later one has columns of the sources of the earlier.
PARTS = {'deepspeed': 'deepspeed_pairs', 'dcp': 'dcp_sources', 'huggingface': 'huggingface_pairs',
         'tools': 'tool_sources', 'to_dcp': 'dcp_pairs', 'megatron': 'megatron_pairs'}
PAGE = os.path.join(ROOT, 'docs', 'reference', 'compatibility.md')


def run_pair(part, mount, pair):
    """Its record; of one that ends otherwise what it says."""
    start = time.monotonic()
    try:
        record = part.run(mount, pair)
    except Exception as e:  # the other pairs are run all the same
        traceback.print_exc()
        record = {'ok': False, 'errors': [repr(e)[-300:]]}
    state = record.get('state') or ('exact' if record['ok'] else 'FAILS')
    return {'source': pair.source, 'column': pair.column, 'target': str(pair.target), **record,
            'state': state, 'seconds': round(time.monotonic() - start, 1)}


def adopt_all(ckptfs, pairs, adopters):
    """Every source once; those that cannot be taken say why."""
    for source in dict.fromkeys(pair.source for _, pair in pairs):
        done = adopters[source](ckptfs, source)
        if done.returncode:
            print(f'adopt {source}: {done.stderr.strip()}', flush=True)


def mounted(ckptfs, folder, wanted):
    """{whether with --hf-config: a mount}, of those that are wanted."""
    mounts = {}
    if False in wanted:
        mounts[False] = ckptfs.mount()
    if True in wanted:
        import models
        config = os.path.join(folder, 'config')
        models.MODELS['llama']().config.save_pretrained(config)
        mounts[True] = ckptfs.mount('--hf-config', config)
    return mounts


def run_all(pairs, parts, keep):
    """Adopt, mount, run every (name of its part, pair)."""
    adopters = {source: part.adopt for part in parts.values() for source in getattr(part, 'SOURCES', ())}
    records = []
    with tempfile.TemporaryDirectory() as folder:
        ckptfs = daemon.Ckptfs(folder)
        try:
            adopt_all(ckptfs, pairs, adopters)
            mounts = mounted(ckptfs, folder, {pair.column == GIVEN for _, pair in pairs})
            for name, pair in pairs:
                records.append(run_pair(parts[name], mounts[pair.column == GIVEN], pair))
                print(json.dumps(records[-1]), flush=True)
                keep(pair.key, records[-1])
            gc.collect()  # models map the view's files, and modules refer to themselves
            for mount in mounts.values():
                ckptfs.umount(mount)
        finally:
            ckptfs.close()
    return records


def sample(parts):
    """[(part, pair)] that have every column, and every kind of source of every part, in some minutes."""
    return [(name, pair) for name, part in parts.items() for pair in part.sample()]


def chosen_pairs(args, parts, results):
    """[(part, pair)] that the command line asks for."""
    if not (args.all or args.part or args.source or args.column or args.missing or args.refused):
        return [] if args.table else sample(parts)
    return [(name, pair) for name, part in parts.items() for pair in part.pairs()
            if (not args.part or name in args.part)
            and (not args.source or pair.source in args.source)
            and (not args.column or pair.column in args.column)
            and not (args.missing and results.has(pair))
            and not (args.refused and not results.refused(pair))]


def imported():
    """{name of a part: its module}."""
    return {name: importlib.import_module(module) for name, module in PARTS.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--all', action='store_true')
    parser.add_argument('--part', action='append', choices=PARTS)
    parser.add_argument('--source', action='append')
    parser.add_argument('--column', action='append', choices=COLUMNS)
    parser.add_argument('--missing', action='store_true')
    parser.add_argument('--refused', action='store_true')
    parser.add_argument('--earlier', action='store_true')
    parser.add_argument('--table', nargs='?', const=PAGE)
    parser.add_argument('--results', default=os.path.join(ROOT, '.cache', 'matrix.json'))
    args = parser.parse_args()
    parts = imported()
    results = Results(args.results, read_page(args.table if args.table and os.path.exists(args.table) else PAGE))
    if args.earlier:
        import matrix_page
        print(*matrix_page.earlier(parts, results), sep='\n')
        return 0
    pairs = chosen_pairs(args, parts, results)
    records = run_all(pairs, parts, results.keep) if pairs else []
    if args.table:
        import matrix_page
        matrix_page.write(args.table, parts, results)
    good = sum(r['ok'] for r in records)
    print(f'{good} passed, {len(records) - good} failed')
    return 0 if good == len(records) and (records or args.table) else 1


if __name__ == '__main__':
    sys.exit(main())
