# SPDX-License-Identifier: Apache-2.0
"""A job that saves every five seconds while its own retention deletes: of what a mount that
follows it with --link took nothing is lost, and every whole step was taken."""
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

import daemon
from context import Row, seconds
from rotating_job import DIES
from safetensors.torch import load_file

EVERY, LIMIT = 5, 2
SLACK = 16 << 20  # of memory: what allocators keep
DEAD = 135  # seconds that the last save lies there dead: longer than anything is waited for


def held(process):
    """Returns what a process holds, and the processor time it took: bytes, descriptors, seconds."""
    with open(f'/proc/{process.pid}/statm', encoding='ascii') as f:
        pages = int(f.read().split()[1])
    with open(f'/proc/{process.pid}/stat', encoding='ascii') as f:
        fields = f.read().rsplit(')', 1)[1].split()
    ticks = int(fields[11]) + int(fields[12])
    return {'bytes': pages * os.sysconf('SC_PAGE_SIZE'),
            'descriptors': len(os.listdir(f'/proc/{process.pid}/fd')),
            'seconds': ticks / os.sysconf('SC_CLK_TCK')}


class Watched:
    """The job as a reader of /view sees it."""

    def __init__(self, mount):
        self.mount, self.saved, self.late, self.back = mount, {}, [], 0
        self.newest = 0

    def step(self):
        """Returns the step of /view; 0 while there is none."""
        try:
            return int(os.readlink(os.path.join(self.mount, 'view')).split('/')[3].split('-')[1])
        except FileNotFoundError:
            return 0

    def look(self):
        """Once: which step is new, and how late."""
        now = self.step()
        self.back += now < self.newest
        if now > self.newest and now in self.saved:
            self.late.append(time.monotonic() - self.saved[now])
        self.newest = max(now, self.newest)


def equal(mount, truth, number):
    """True if a step has the bytes of its save."""
    view = os.path.join(mount, 'run', 'output', 'step', f'checkpoint-{number}', 'view', 'tp1')
    found = load_file(os.path.join(view, 'rank0', 'model.safetensors'))
    there = load_file(os.path.join(truth, f'{number}.safetensors'))
    return found.keys() == there.keys() and all(
        (found[name].numpy() == value.numpy()).all() for name, value in there.items())


def run(context):
    """Rows: steps taken and lost, how late they are seen, what the daemon holds."""
    folder = tempfile.mkdtemp(prefix='follow', dir=context.work)
    output, truth = os.path.join(folder, 'output'), os.path.join(folder, 'truth')
    os.makedirs(truth)
    program = daemon.Ckptfs(folder)
    saves = max(3, int(context.minutes * 60 / EVERY / DIES)) * DIES  # the last of which dies
    try:
        process, mount = program.start('--follow', '--link', output)
        seen = Watched(mount)
        job = subprocess.Popen(
            [sys.executable, os.path.join(os.path.dirname(daemon.__file__), 'rotating_job.py'),
             output, truth, str(saves), str(EVERY), str(LIMIT)], stdout=subprocess.PIPE)
        os.set_blocking(job.stdout.fileno(), False)
        early, first, said = None, time.monotonic(), b''
        while job.poll() is None:
            with contextlib.suppress(BlockingIOError):
                said += os.read(job.stdout.fileno(), 1 << 12)
            *lines, said = said.split(b'\n')  # a line may come in parts
            for line in lines:
                seen.saved[int(line)] = time.monotonic()
            seen.look()
            if early is None and len(seen.saved) >= 2 * DIES:
                early, first = held(process), time.monotonic()
            time.sleep(0.05)
        late, took = held(process), time.monotonic() - first
        whole = [n for n in range(1, saves + 1) if n % DIES]
        daemon.wait_until(lambda: len(program.list()['steps']) >= len(whole), 'the last step',
                          process)
        time.sleep(DEAD)
        steps = {int(s['id'].split('-')[1]) for s in program.list()['steps']}
        right = sum(equal(mount, truth, n) for n in whole if n in steps)
        status = json.loads(program.run('status', '--store', program.store, '--json').stdout)
        named = {s['id'] for s in status[0]['status']['following'][0]['waiting']}
        dead = {name for name in os.listdir(output) if int(name.split('-')[1]) % DIES == 0}
    finally:
        program.close()
        shutil.rmtree(folder, ignore_errors=True)
    name = f'{saves} saves every {EVERY} s, {LIMIT} kept by the job, in {took / 60:.0f} min'
    delay = sorted(seen.late)
    busy = (late['seconds'] - early['seconds']) / took
    return [
        Row('follow', f'steps of {name}, equal to what was saved', f'{right}',
            f'{len(whole)} whole saves', '', 'all', right == len(whole) == len(steps)),
        Row('follow', 'saves that died among the steps', f'{len(steps - set(whole))}',
            f'{saves // DIES} that died', '', 'none', steps == set(whole)),
        Row('follow', f'of them still there {DEAD} s after the job, named by the status',
            f'{len(named & dead)}', f'{len(dead)}', '', 'all', bool(dead) and dead <= named),
        Row('follow', '/view went back', f'{seen.back}', '', '', 'never', not seen.back),
        Row('follow', 'from the last file of a save to /view: median, worst',
            f'{seconds(delay[len(delay) // 2])}, {seconds(delay[-1])}', '', '', f'<= {EVERY} s',
            delay[-1] <= EVERY),
        Row('follow', 'processor of the daemon', f'{busy:.1%}', '', '', '<= 5%', busy <= 0.05),
        Row('follow', 'memory of the daemon', f'{late["bytes"] >> 20} MiB',
            f'{early["bytes"] >> 20} MiB', '', f'{SLACK >> 20} MiB more',
            late['bytes'] <= early['bytes'] + SLACK),
        Row('follow', 'descriptors of the daemon', f'{late["descriptors"]}',
            f'{early["descriptors"]}', '', 'as many',
            late['descriptors'] <= early['descriptors'] + 2)]
