# SPDX-License-Identifier: Apache-2.0
"""The cost of saving for a training loop on processors, against the stock ways and against what the
disk allows."""
import contextlib
import json
import os
import shutil
import statistics
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
DEVICE_SIDES = (PINNED, 'torch.save', 'dcp.async_save', OURS, WAITING)
PLUGGED = 'ckptfs, deepspeed'
# DeepSpeed's own, in the same training.
ENGINES = ('deepspeed', 'deepspeed, fast', 'deepspeed, decoupled')
GIB = 1 << 30
FILES = ('model.safetensors', 'optimizer.safetensors')
LINE = 200 * 10 ** 6  # bytes a second of a store that is not a disk of this machine
BLKIO = '/sys/fs/cgroup/blkio'


@contextlib.contextmanager
def receiving(context):
    """A daemon that receives for a new store; yields (program, process, mount)."""
    folder = tempfile.mkdtemp(prefix='snap', dir=context.work)
    program = daemon.Ckptfs(folder)
    program.reserve = ()  # as users get it
    limit = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2
    try:
        process, mount = program.start('--snapshot-memory', limit)
        yield program, process, mount
    finally:
        program.close()
        shutil.rmtree(folder, ignore_errors=True)


def program_of(script, *words):
    """(words, environment) of a script beside these that imports ckptfs."""
    path = os.pathsep.join([os.path.join(os.path.dirname(os.environ['CKPTFS_BIN']), 'python'),
                            *sys.path])
    return ([sys.executable, os.path.join(os.path.dirname(HERE), script), *map(str, words)],
            {**os.environ, 'PYTHONPATH': path})


@contextlib.contextmanager
def asked(script, *words):
    """One that answers lines, until its input ends."""
    argv, env = program_of(script, *words)
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env=env)
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait()


def job(side, out, context):
    """One side's figures."""
    argv, env = program_of('snapshot_job.py', side, out, context.parameters, context.iterations,
                           context.device)
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=env)
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


def measure_all(sides, context):
    """({side: figures}, a row for each of the stock sides that failed)."""
    found, rows = {}, []
    for side in sides:
        try:
            found[side] = measure(side, context)
        except subprocess.CalledProcessError:
            if side.startswith(OURS):
                raise
            rows.append(Row('snapshot', f'{side} did not run here', '', 'fails', '', '', True))
    return found, rows


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


@contextlib.contextmanager
def line(folder, processes):
    """The disk of `folder` gives these processes LINE bytes a second; yields whether it does."""
    group = os.path.join(BLKIO, f'ckptfs-bench-{os.getpid()}')
    device = os.stat(folder).st_dev
    try:
        os.mkdir(group)
        for name, text in [('blkio.throttle.read_bps_device',
                            f'{os.major(device)}:{os.minor(device)} {LINE}'),
                           *(('cgroup.procs', str(pid)) for pid in processes)]:
            with open(os.path.join(group, name), 'w', encoding='ascii') as f:
                f.write(text)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        for pid in processes:
            with contextlib.suppress(OSError), open(os.path.join(BLKIO, 'cgroup.procs'), 'w',
                                                    encoding='ascii') as f:
                f.write(str(pid))
        os.rmdir(group)


def cold_load(context, program, limited):
    """(seconds, how) of the same load with nothing of the store in memory, or nothing."""
    dropped = drop_caches(program.store)
    process, mount = program.start()
    view = os.path.join(daemon.step_of(mount, 'job', '0'), 'view', 'tp2')
    look(context, mount, view)
    how = '' if dropped else ' (only its own files dropped from the page cache)'
    with line(program.store, [process.pid, os.getpid()] if limited else []) as held:
        taken = clock(load, view)[0] if held or not limited else None
    program.umount(mount)
    return taken, how


def load_rows(context):
    """Loading a step that is only in memory, against the same from a cold disk, and from one that
    is behind a line."""
    with receiving(context) as (program, process, mount):
        parts = os.path.join(program.store, '.tmp')  # no blob is begun without it
        os.rename(parts, parts + '-away')
        run = os.path.join(mount, 'run')
        with asked('snapshot_hold.py', program.store, context.parameters) as holder:
            assert holder.stdout.readline() == 'saved\n'
            daemon.wait_until(lambda: os.path.isdir(run) and os.listdir(run), 'the step', process)
            view = os.path.join(daemon.step_of(mount, 'job', '0'), 'view', 'tp2')
            look(context, mount, view)
            memory = clock(load, view)[0]
            os.rename(parts + '-away', parts)
            daemon.wait_until(lambda: program.list()['steps'], 'the step on disk', process, 600)
        program.umount(mount)
        rows = []
        for limited, what in ((False, 'a cold disk'), (True, f'a store at {LINE // 10 ** 6} MB/s')):
            taken, how = cold_load(context, program, limited)
            if taken is not None:
                rows.append(Row('snapshot', f'load at tp2 from memory, against {what}{how}',
                                seconds(memory), seconds(taken), f'{taken / memory:.1f}x faster',
                                '>= 5x', taken >= 5 * memory))
    return rows


def gib(value):
    """A rate for people."""
    return f'{value / GIB:.2f} GiB/s'


def rate_row(what, ours, disk, tool, least=0.0):
    """A row of bytes per second."""
    return Row('snapshot', what, gib(ours), f'{gib(disk)} ({tool})', f'{ours / disk:.2f} of it',
               f'>= {least}' if least else '', ours >= least * disk)


def disk_rows(context, rounds=7, steps=3):
    """From memory to disk with nothing beside it, in turns with the disk alone: what it takes moves
    by halves from one minute to the next."""
    pairs, tool = [], ''
    with receiving(context) as (program, _, _), \
            asked('snapshot_rates.py', program.store, context.parameters) as saver:
        for _ in range(rounds):
            saver.stdin.write(f'{steps}\n')
            saver.stdin.flush()
            size, taken = json.loads(saver.stdout.readline())
            program.run('gc', '--store', program.store, '--keep-last', '1')
            disk, tool = disk_rate(context, size)
            pairs.append((size / taken, disk))
    ours, disk = (statistics.median(side) for side in zip(*pairs))
    ratios = sorted(one / other for one, other in pairs)
    tool += f', {rounds} times in turn: {ratios[0]:.2f} to {ratios[-1]:.2f} of it'
    return [rate_row('memory to disk, no training beside, one save behind the other', ours, disk,
                     tool, 0.9)]


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


def device_rows(ours, size, iterations):
    """Returns what only a device with memory of its own shows."""
    copy, beside = ours['copy'], ours['collective']
    rows = [rate_row('device to arena', copy['ours'], copy['pinned'], 'pinned copy', 0.9)]
    hidden = max(0, size / copy['ours'] - copy['backward'])
    most = hidden + 0.05 * ours['each']['plain'] / iterations
    blocked = ours['each']['blocked']
    rows.append(Row('snapshot', 'time in our calls per save, against what of a copy forward and backward '
                    'do not hide, and 5 % of an iteration', seconds(blocked), seconds(most),
                    f'{blocked / most:.2f}x', '<= 1x', blocked <= most))
    if beside['beside'] is not None:
        rows.append(ratio_row('snapshot', f'an all_reduce of 256 MiB over {beside["world"]} devices while a save '
                              f'is copied ({beside["times"]} times), against one alone', beside['beside'],
                              beside['alone'], 1.05))
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
    on_device = context.device != 'cpu'
    found, rows = measure_all(DEVICE_SIDES if on_device else SIDES, context)
    ours = found[OURS]
    size = ours['status']['file_bytes']
    for side in list(found)[:-2]:
        most = 0.1 if side == 'torch.save' else 0.5
        row = ratio_row('snapshot', f'time in our calls per save of {size / GIB:.2f} GiB, '
                        f'against {side}', ours['each']['blocked'],
                        found[side]['each']['blocked'], most)
        rows.append(row)
    when = f', {seconds(ours["ready"])} after' if on_device else ', which makes the arena'
    rows.append(Row('snapshot', f'the first save{when}', seconds(ours['first']),
                    seconds(found['torch.save']['first']) + ' (torch.save)', '', '', True))
    rows += loop_rows(found, 'each', 'training that saves every step')
    rows += loop_rows(found, 'tenth', 'training that saves every tenth step')
    disk, tool = disk_rate(context, size)
    rows.append(rate_row('memory to disk, each save by itself', ours['rate'], disk, tool))
    if on_device:
        return rows + device_rows(ours, size, context.iterations)
    rows += disk_rows(context)
    each = found[WAITING]['each']
    if each['kept']:
        rows.append(rate_row('memory to disk while training, all steps',
                             each['kept'] * size / (each['saving'] + each['drain']), disk, tool))
    return rows + engine_rows(context) + load_rows(context)
