# SPDX-License-Identifier: Apache-2.0
"""Every kind of source against everything that loads a view: docs/compatibility.md.

Usage: matrix.py [--all] [--part P ...] [--source S ...] [--column C ...] [--missing]
                 [--table [FILE]] [--results FILE]

Adopts the sources into one store, mounts it once, and for each pair lets unmodified software load
the view: DeepSpeed's engines, torch.distributed.checkpoint on meshes, from_pretrained, Trainer,
accelerate, Lightning; and reads the files of ranks.  What is loaded must equal a truth that none of
our code made, bit for bit; the next losses those of the run that never stopped, or of a
module that torch itself filled.  The parts say which pairs there are:

  deepspeed    deepspeed_pairs.py     the tiny model's checkpoints, engines, rank<N>
  dcp          dcp_sources.py         what torch.distributed.checkpoint saved, all columns
  huggingface  huggingface_pairs.py   transformers' models
  tools        tool_sources.py        directories of Trainer, accelerate, Lightning
  to_dcp       dcp_pairs.py           sources of DeepSpeed's and transformers' models on every mesh

Without --all (or one of the choices) it runs a selection that has every source, target kind and
degree.  Results are kept in --results (.cache/matrix.json), with the program that gave them; --missing
runs what has none of this program.  --table alone writes the page from them: a cell whose result is of
another program, or is only on the page that was there before, says so.
Exit code 0 only if every pair held.
"""
import argparse
import datetime
import fcntl
import gc
import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, HERE)
sys.path.insert(0, os.path.join(HERE, '..', 'fixtures', 'deepspeed'))

import daemon  # noqa: E402
from cells import COLUMNS  # noqa: E402

# In the order of the page; a later one has columns of the sources of the earlier.
PARTS = {'deepspeed': 'deepspeed_pairs', 'dcp': 'dcp_sources', 'huggingface': 'huggingface_pairs',
         'tools': 'tool_sources', 'to_dcp': 'dcp_pairs'}
PAGE = os.path.join(ROOT, 'docs', 'compatibility.md')


def program():
    """What the bytes of a view follow from: a digest of the program's sources."""
    out = hashlib.sha256()
    for folder in ('core', 'formats', 'fs', 'mount'):
        for base, folders, names in os.walk(os.path.join(ROOT, folder)):
            folders.sort()
            for name in sorted(n for n in names if n.endswith(('.h', '.cc', '.fbs'))):
                out.update(name.encode())
                with open(os.path.join(base, name), 'rb') as f:
                    out.update(f.read())
    return out.hexdigest()[:8]


def part_of(pair, parts):
    """The name of the part whose pair it is."""
    return next(name for name, part in parts.items() if pair in part.pairs())


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


def run_all(pairs, parts, keep):
    """Adopt, mount, run every (name of its part, pair)."""
    adopters = {source: part.adopt for part in parts.values() for source in getattr(part, 'SOURCES', ())}
    records = []
    with tempfile.TemporaryDirectory() as folder:
        ckptfs = daemon.Ckptfs(folder)
        try:
            adopt_all(ckptfs, pairs, adopters)
            mount = ckptfs.mount()
            for name, pair in pairs:
                records.append(run_pair(parts[name], mount, pair))
                print(json.dumps(records[-1]), flush=True)
                keep(pair.key, records[-1])
            gc.collect()  # models map the view's files, and modules refer to themselves
            ckptfs.umount(mount)
        finally:
            ckptfs.close()
    return records


class Results:
    """The file in which records are kept."""

    def __init__(self, path):
        self.path, self.program = path, program()
        self.today = datetime.date.today().isoformat()
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self.records = self.read()

    def read(self):
        """What is in the file."""
        if not os.path.exists(self.path):
            return {}
        with open(self.path, encoding='utf-8') as f:
            return json.load(f)

    def keep(self, key, record):
        """Written at once, since a run takes hours; others may run other pairs meanwhile."""
        with open(f'{self.path}.lock', 'w', encoding='utf-8') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.records = {**self.read(), key: {**record, 'program': self.program,
                                                 'date': self.today}}
            with open(f'{self.path}.new', 'w', encoding='utf-8') as f:
                json.dump(self.records, f, indent=0)
            os.replace(f'{self.path}.new', self.path)

    def has(self, pair):
        """Whether this program has a good result of it."""
        record = self.records.get(pair.key)
        return record is not None and record['ok'] and record['program'] == self.program


def sample(parts):
    """[(part, pair)] that have every source, kind of target and degree, in a few minutes."""
    import cases
    from cells import Target
    chosen = [('deepspeed', Target(v, t.kind, t)) for v, t in cases.thinned(64)]
    chosen += [('huggingface', pair) for pair in parts['huggingface'].SAMPLE]
    return chosen + [('dcp', Target(*pair)) for pair in (
        ('dcp_titan', 'hsdp2x2', 'hsdp2x2'), ('dcp_fsdp2_tp', 'zero2', 'zero2'))]


def chosen_pairs(args, parts, results):
    """[(part, pair)] that the command line asks for."""
    if not (args.all or args.part or args.source or args.column or args.missing):
        return [] if args.table else sample(parts)
    return [(name, pair) for name, part in parts.items() for pair in part.pairs()
            if (not args.part or name in args.part)
            and (not args.source or pair.source in args.source)
            and (not args.column or pair.column in args.column)
            and not (args.missing and results.has(pair))]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--all', action='store_true')
    parser.add_argument('--part', action='append', choices=PARTS)
    parser.add_argument('--source', action='append')
    parser.add_argument('--column', action='append', choices=COLUMNS)
    parser.add_argument('--missing', action='store_true')
    parser.add_argument('--table', nargs='?', const=PAGE)
    parser.add_argument('--results', default=os.path.join(ROOT, '.cache', 'matrix.json'))
    args = parser.parse_args()
    parts = {name: importlib.import_module(module) for name, module in PARTS.items()}
    results = Results(args.results)
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
