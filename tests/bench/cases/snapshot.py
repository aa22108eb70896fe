# SPDX-License-Identifier: Apache-2.0
"""What saving costs a training loop on processors, against the stock ways and against
what the disk allows."""
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile

import daemon
from cases.cold import evict
from context import Row, clock, ratio_row, seconds
from safetensors.torch import load_file

HERE = os.path.dirname(os.path.abspath(__file__))
OURS = 'ckptfs'
WAITING = 'ckptfs, waiting'  # for room, so that every step is kept
SIDES = ('torch.save', 'dcp.async_save', 'dcp.async_save, shared', OURS, WAITING)
PINNED = 'dcp.async_save, pinned'  # CUDA alone
PLUGGED = 'ckptfs, deepspeed'
ENGINES = ('deepspeed',)  # DeepSpeed's own, in the same training
GIB = 1 << 30
FILES = ('model.safetensors', 'optimizer.safetensors')


@contextlib.contextmanager
def receiving(context):
    """A daemon that receives for a new store; yields (program, process, mount)."""
    folder = tempfile.mkdtemp(prefix='snap', dir=context.work)
    program = daemon.Ckptfs(folder)
    program.reserve = ()  # what users get
    limit = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2
    try:
        process, mount = program.start('--snapshot-memory', limit)
        yield program, process, mount
    finally:
        program.close()
        shutil.rmtree(folder, ignore_errors=True)


def job(side, out, context):
    """One side's figures."""
    words = [sys.executable, os.path.join(os.path.dirname(HERE), 'snapshot_job.py'), side, out,
             str(context.parameters), str(context.iterations), context.device]
    path = os.pathsep.join([os.path.join(os.path.dirname(os.environ['CKPTFS_BIN']), 'python'),
                            *sys.path])
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, 'PYTHONPATH': path})
    return json.loads(done.stdout.splitlines()[-1])


def measure(side, context):
    """One side, alone on the machine, in a directory of its own."""
    subprocess.run(['sync'], check=True)
    print(f'   {side}', file=sys.stderr, flush=True)
    if side.startswith(OURS):
        with receiving(context) as (program, _, _):
            return job(side, program.store, context)
    with tempfile.TemporaryDirectory(dir=context.work) as out:
        return job(side, out, context)


def disk_rate(context, size):
    """Bytes per second that the disk takes past the page cache: fio's, or dd's."""
    path, blocks = context.path('direct'), max(1, size >> 24)
    try:
        if shutil.which('fio'):
            done = subprocess.run(
                ['fio', '--name=x', f'--filename={path}', '--rw=write', '--bs=16M', '--direct=1',
                 '--ioengine=io_uring', '--iodepth=8', '--end_fsync=1',
                 f'--size={blocks << 24}', '--output-format=json'],
                check=True, capture_output=True, text=True)
            return json.loads(done.stdout)['jobs'][0]['write']['bw_bytes'], 'fio'
        taken = clock(lambda: subprocess.run(
            ['dd', 'if=/dev/zero', f'of={path}', 'bs=16M', f'count={blocks}', 'oflag=direct',
             'conv=fsync'], check=True, stderr=subprocess.DEVNULL))[0]
        return (blocks << 24) / taken, 'dd'
    finally:
        if os.path.exists(path):
            os.unlink(path)


def drop_caches(folder):
    """Nothing of it is in memory; whether the whole page cache could be dropped."""
    for base, _, _ in os.walk(folder):
        evict(base)
    subprocess.run(['sync'], check=True)
    try:
        with open('/proc/sys/vm/drop_caches', 'w', encoding='utf-8') as f:
            f.write('3')
        return True
    except OSError:
        return False


def look(context, mount, view):
    """Looks at what will be loaded, so that the daemon makes memory ready for it."""
    for rank in range(2):
        for file in FILES:
            os.stat(os.path.join(view, f'rank{rank}', file))
    context.settle(mount)


def load(view):
    """All tensors of a layout's two ranks."""
    for rank in range(2):
        for file in FILES:
            for tensor in load_file(os.path.join(view, f'rank{rank}', file)).values():
                tensor.clone()  # a mapped one is not read before


def load_rows(context):
    """Loading a step that is only in memory, against the same from a cold disk."""
    with receiving(context) as (program, process, mount):
        parts = os.path.join(program.store, '.tmp')  # no blob is begun without it
        os.rename(parts, parts + '-away')
        holder = subprocess.Popen(
            [sys.executable, os.path.join(os.path.dirname(HERE), 'snapshot_hold.py'),
             program.store, str(context.parameters)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, 'PYTHONPATH': os.pathsep.join(
                [os.path.join(os.path.dirname(os.environ['CKPTFS_BIN']), 'python'), *sys.path])})
        run = os.path.join(mount, 'run')
        try:
            assert holder.stdout.readline() == 'saved\n'
            daemon.wait_until(lambda: os.path.isdir(run) and os.listdir(run), 'the step', process)
            view = os.path.join(daemon.step_of(mount, 'job', '0'), 'view', 'tp2')
            look(context, mount, view)
            memory = clock(load, view)[0]
            os.rename(parts + '-away', parts)
            daemon.wait_until(lambda: program.list()['steps'], 'the step on disk', process, 600)
        finally:
            holder.stdin.close()
            holder.wait()
        program.umount(mount)
        dropped = drop_caches(program.store)
        process, mount = program.start()
        view = os.path.join(daemon.step_of(mount, 'job', '0'), 'view', 'tp2')
        look(context, mount, view)
        disk = clock(load, view)[0]
    how = '' if dropped else ' (only its own files dropped from the page cache)'
    return [Row('snapshot', 'load at tp2 from memory, against a cold disk' + how,
                seconds(memory), seconds(disk), f'{disk / memory:.1f}x faster', '>= 5x',
                disk >= 5 * memory)]


def gib(value):
    """A rate for people."""
    return f'{value / GIB:.2f} GiB/s'


def rate_row(what, ours, disk, tool, least=0.0):
    """A row of bytes per second."""
    return Row('snapshot', what, gib(ours), f'{gib(disk)} ({tool})', f'{ours / disk:.2f} of it',
               f'>= {least}' if least else '', ours >= least * disk)


def slowdown(figures):
    """A loop that saves, to one that does not, in the same process."""
    return figures['saving'] / figures['plain']


def loop_rows(found, often, said):
    """How much longer training takes."""
    ours = found[WAITING][often]
    rows = []
    for side, figures in found.items():
        if side == WAITING:
            continue
        theirs = figures[often]
        rows.append(Row(
            'snapshot', f'{said}, waiting for room, against {side}'
            f' ({theirs["kept"]} of {theirs["saves"]} kept)',
            f'{slowdown(ours):.2f}x', f'{slowdown(theirs):.2f}x',
            f'{slowdown(ours) / slowdown(theirs):.2f}x', '' if side == OURS else '<= 1x',
            side == OURS or slowdown(ours) <= slowdown(theirs)))
    return rows


def engine_rows(context):
    """Our engine in DeepSpeed against its own; it does without the steps that it drops."""
    found = {side: measure(side, context) for side in (PLUGGED, *ENGINES)}
    ours, rows = found[PLUGGED], []
    for side in ENGINES:
        rows.append(ratio_row('snapshot', f'time in our calls per save in DeepSpeed, against {side}',
                              ours['each']['blocked'], found[side]['each']['blocked'], 0.1))
        for often, said in (('each', 'every step'), ('tenth', 'every tenth step')):
            mine, theirs = slowdown(ours[often]), slowdown(found[side][often])
            rows.append(Row('snapshot', f'DeepSpeed training that saves {said}, against {side} '
                            f'({ours[often]["kept"]} of {ours[often]["saves"]} kept)',
                            f'{mine:.2f}x', f'{theirs:.2f}x', f'{mine / theirs:.2f}x', '<= 1x',
                            mine <= theirs))
    return rows


def run(context):
    """Rows of sections 4.2 (a) and (b), rates, and loading."""
    sides = SIDES if context.device == 'cpu' else (PINNED, *SIDES)
    found = {side: measure(side, context) for side in sides}
    ours = found[OURS]
    size = ours['status']['file_bytes']
    rows = []
    for side in sides[:-2]:
        most = 0.1 if side == 'torch.save' else 0.5
        row = ratio_row('snapshot', f'time in our calls per save of {size / GIB:.2f} GiB, '
                        f'against {side}', ours['each']['blocked'],
                        found[side]['each']['blocked'], most)
        rows.append(row)
    rows.append(Row('snapshot', 'the first save, which makes the arena', seconds(ours['first']),
                    seconds(found['torch.save']['first']) + ' (torch.save)', '', '', True))
    rows += loop_rows(found, 'each', 'training that saves every step')
    rows += loop_rows(found, 'tenth', 'training that saves every tenth step')
    disk, tool = disk_rate(context, size)
    rows.append(rate_row('memory to disk, no training beside', ours['rate'], disk, tool, 0.9))
    if 'copy' in ours:
        rows.append(rate_row('device to arena', ours['copy']['ours'], ours['copy']['pinned'],
                             'pinned copy', 0.9))
    each = found[WAITING]['each']
    if each['kept']:
        rows.append(rate_row('memory to disk while training, all steps',
                             each['kept'] * size / (each['saving'] + each['drain']), disk, tool))
    return rows + engine_rows(context) + load_rows(context)
