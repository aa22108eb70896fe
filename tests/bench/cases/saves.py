# SPDX-License-Identifier: Apache-2.0
"""The cost and the remains of a job's 1,000th snapshot, against the 10th, while old steps go and a
reader keeps one of them open; and one of thousands of small parameters."""
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import daemon
from context import Row, disk_bytes, ratio_row, seconds

SAVES, KEPT, WINDOW = 1000, 5, 20
SMALL, ROUNDS = 3000, 9
SLACK = 16 << 20  # of memory: what allocators keep


def held(process):
    """Returns what a process holds: bytes in memory, descriptors."""
    with open(f'/proc/{process.pid}/statm', encoding='ascii') as f:
        pages = int(f.read().split()[1])
    return {'bytes': pages * os.sysconf('SC_PAGE_SIZE'),
            'descriptors': len(os.listdir(f'/proc/{process.pid}/fd'))}


def settled(program, process, newest):
    """Waits until the policy has been followed; what is left then."""
    kept = {'0', '1', *(str(newest - n) for n in range(KEPT))}  # /view shows 0, 1 is open
    daemon.wait_until(lambda: {s['id'] for s in program.list()['steps']} == kept, 'retention',
                      process)
    blobs = os.path.join(program.store, 'blobs', 'snapshots')
    daemon.wait_until(lambda: len(os.listdir(blobs)) == len(kept), 'blobs to go', process)
    found = []
    for _ in range(20):  # a file that is open for a moment only is not held
        found.append(held(process))
        time.sleep(0.05)
    return {**{what: min(one[what] for one in found) for what in found[0]},
            'disk': disk_bytes(blobs)}


def python(name, *words, **options):
    """A script of the benchmark, with our package."""
    script = os.path.join(os.path.dirname(os.path.dirname(__file__)), name)
    path = [os.path.join(os.path.dirname(os.environ['CKPTFS_BIN']), 'python'), *sys.path]
    return subprocess.Popen([sys.executable, script, *words], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, 'PYTHONPATH': os.pathsep.join(path)}, **options)


def small_row(context):
    """A save whose cost is in the number of tensors."""
    folder = tempfile.mkdtemp(prefix='small', dir=context.work)
    program = daemon.Ckptfs(folder)
    try:
        program.start()
        job = python('snapshot_small.py', program.store, os.path.join(folder, 'stock.pt'),
                     str(SMALL), str(ROUNDS))
        taken = json.loads(job.communicate()[0])
    finally:
        program.close()
        shutil.rmtree(folder, ignore_errors=True)
    return ratio_row('saves', f'{SMALL:,} parameters of 4 KiB with Adam, a save, against torch.save',
                     *(statistics.median(taken[side]) for side in ('ours', 'theirs')))


def run(context):
    """Rows: time per save, and memory, descriptors and disk."""
    return [*many_rows(context), small_row(context)]


def many_rows(context):
    """Those of a thousand saves."""
    folder = tempfile.mkdtemp(prefix='saves', dir=context.work)
    program = daemon.Ckptfs(folder)
    marks = (KEPT + WINDOW, KEPT + 2 * WINDOW, SAVES - WINDOW, SAVES)
    try:
        process, mount = program.start('--keep-last', KEPT, '--hot-steps', 1)
        job = python('snapshot_many.py', program.store, str(SAVES), '2', *map(str, marks),
                     stdin=subprocess.PIPE)

        def go_on():
            job.stdin.write('\n')
            job.stdin.flush()
            return json.loads(job.stdout.readline())

        job.stdout.readline()  # the first two are there
        view = os.path.join(daemon.step_of(mount, 'job', '1'), 'view', 'tp1', 'rank0')
        with open(os.path.join(view, 'model.safetensors'), 'rb') as reader:
            truth = reader.read()
            go_on()
            early = go_on()
            early_left = settled(program, process, marks[1] - 1)
            go_on()
            late = go_on()
            late_left = settled(program, process, marks[3] - 1)
            reader.seek(0)
            assert reader.read() == truth, 'an open file of an old step changed'
        job.stdin.close()
        assert job.wait(60) == 0
    finally:
        program.close()
        shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for what, said in (('blocked', 'time in save'), ('durable', 'until a save is durable')):
        tenth, thousandth = (statistics.median(f[what]) for f in (early, late))
        rows.append(Row('saves', f'{said}, the {SAVES - WINDOW}th to {SAVES}th, against the '
                        f'{marks[0]}th to {marks[1]}th', seconds(thousandth), seconds(tenth),
                        f'{thousandth / tenth:.2f}x', '<= 1.2x', thousandth <= 1.2 * tenth))
    for what, tenth, thousandth in (('the daemon', early_left, late_left),
                                    ('the trainer', early['held'], late['held'])):
        rows.append(Row('saves', f'memory of {what}', f'{thousandth["bytes"] >> 20} MiB',
                        f'{tenth["bytes"] >> 20} MiB', '', '16 MiB more',
                        thousandth['bytes'] <= tenth['bytes'] + SLACK))
        rows.append(Row('saves', f'descriptors of {what}', str(thousandth['descriptors']),
                        str(tenth['descriptors']), '', 'as many',
                        thousandth['descriptors'] <= tenth['descriptors']))
    rows.append(Row('saves', 'disk that snapshots take', f'{late_left["disk"] >> 10} KiB',
                    f'{early_left["disk"] >> 10} KiB', '', 'as much',
                    late_left['disk'] <= early_left['disk']))
    return rows
