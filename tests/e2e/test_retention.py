# SPDX-License-Identifier: Apache-2.0
"""Old steps go, what is used stays: `ckptfs gc` and a daemon's policy, beside real mounts,
trainers and readers."""
import fcntl
import json
import os
import signal
import subprocess
import time

from daemon import BIN, checkpoint, step_of, wait_until
from test_snapshot import assert_equal, durable_steps, gathered, job_fixture  # noqa: F401


def gc(ckptfs, *words, check=True):
    """`ckptfs gc` and what it says."""
    done = ckptfs.run('gc', '--store', ckptfs.store, '--json', *words, check=check)
    return json.loads(done.stdout)


def names(steps):
    """Returns the names of steps as JSON."""
    return [f"{step['run']}/{step['id']}" for step in steps]


def blob_folders(ckptfs):
    """Directories that the store owns, of snapshots and others."""
    blobs = os.path.join(ckptfs.store, 'blobs')
    snapshots = os.path.join(blobs, 'snapshots')
    found = [n for n in os.listdir(blobs) if n not in ('side', 'snapshots')]
    return found + (os.listdir(snapshots) if os.path.isdir(snapshots) else [])


def test_a_daemon_keeps_what_its_policy_says(ckptfs, job):
    daemon, mount = ckptfs.start('--keep-last', '2', '--keep-every', '4')
    trainer = job(1)
    assert trainer.step() == [True] and trainer.durable(0)
    assert trainer.step() == [True] and trainer.durable(1)
    view = os.path.join(step_of(mount, 'job', '1'), 'view', 'tp1', 'rank0')
    with open(os.path.join(view, 'model.safetensors'), 'rb') as reader:
        before = reader.read(1000)
        for step in range(2, 8):
            assert trainer.step() == [True] and trainer.durable(step)
        # 1 is open; 0 and 4 are multiples; 6 and 7 the newest.
        wait_until(lambda: durable_steps(ckptfs) == ['0', '1', '4', '6', '7'], 'retention', daemon)
        reader.seek(0)
        assert reader.read(1000) == before
        assert_equal(gathered(os.path.join(step_of(mount, 'job', '1'), 'view', 'tp1'), 1),
                     trainer.truth(1))
    assert trainer.step() == [True] and trainer.durable(8)
    # A held step is looked at again: `list` holds the steps that it looks at, too.
    wait_until(lambda: durable_steps(ckptfs) == ['0', '4', '7', '8'], 'retention', daemon, 150)
    wait_until(lambda: len(blob_folders(ckptfs)) == 4, 'the blobs to go', daemon)
    steps = os.path.join(mount, 'run', 'job', 'step')
    wait_until(lambda: sorted(os.listdir(steps)) == ['0', '4', '7', '8'], 'the listing', daemon)
    for step in (0, 4, 7, 8):
        assert_equal(gathered(os.path.join(step_of(mount, 'job', str(step)), 'view', 'tp2'), 2),
                     trainer.truth(step))
    status = json.loads(ckptfs.run('status', '--store', ckptfs.store, '--json').stdout)
    retention = status[0]['status']['snapshots']['retention']
    assert retention['removed'] == 5 and retention['last_failure'] == ''
    trainer.end()


def held(path):
    """Opens what a step needs as a reader does, until it is closed."""
    file = open(path, 'rb')  # pylint: disable=consider-using-with
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def test_what_was_held_goes_when_it_is_let_go(ckptfs, job):
    daemon, _ = ckptfs.start('--keep-last', '1', '--keep-every', '100')
    trainer = job(1)
    manifests = os.path.join(ckptfs.store, 'manifests')
    blobs = os.path.join(ckptfs.store, 'blobs', 'snapshots')
    assert trainer.step() == [True] and trainer.durable(0)  # stays: /view shows it
    before = os.listdir(manifests), os.listdir(blobs)
    assert trainer.step() == [True] and trainer.durable(1)
    manifest, = set(os.listdir(manifests)).difference(before[0])
    with held(os.path.join(manifests, manifest)):
        assert trainer.step() == [True] and trainer.durable(2)
        time.sleep(1)
        assert durable_steps(ckptfs) == ['0', '1', '2']
    # Nothing is saved any more.
    wait_until(lambda: durable_steps(ckptfs) == ['0', '2'], 'retention', daemon)
    wait_until(lambda: len(blob_folders(ckptfs)) == 2, 'the blobs to go', daemon)
    blob, = set(os.listdir(blobs)).difference(before[1])
    with held(os.path.join(ckptfs.store, 'holds', blob)):
        assert trainer.step() == [True] and trainer.durable(3)
        wait_until(lambda: durable_steps(ckptfs) == ['0', '3'], 'retention', daemon)
        time.sleep(1)
        assert len(blob_folders(ckptfs)) == 3
    wait_until(lambda: len(blob_folders(ckptfs)) == 2, 'the blobs to go', daemon)
    trainer.end()


def test_the_step_that_a_view_shows_stays(ckptfs, job):
    daemon, mount = ckptfs.start('--run', 'job', '--keep-last', '1')
    trainer = job(1)
    for step in range(3):
        assert trainer.step() == [True] and trainer.durable(step)
    assert os.readlink(os.path.join(mount, 'view')).endswith('/step/0/view')
    wait_until(lambda: durable_steps(ckptfs) == ['0', '2'], 'retention', daemon)
    assert names(gc(ckptfs, '--keep-last', '1')['in_use']) == ['job/0']
    ckptfs.run('switch', '--store', ckptfs.store, 'job/2')
    # By this, or by the daemon, which looks again.
    assert names(gc(ckptfs, '--keep-last', '1')['removed']) in (['job/0'], [])
    wait_until(lambda: durable_steps(ckptfs) == ['2'], 'retention', daemon)
    steps = os.path.join(mount, 'run', 'job', 'step')
    wait_until(lambda: os.listdir(steps) == ['2'], 'the listing', daemon)
    trainer.end()


def test_gc_removes_what_a_view_has_left(ckptfs, job):
    _, mount = ckptfs.start('--run', 'job')
    trainer = job(1)
    for step in range(3):
        assert trainer.step() == [True] and trainer.durable(step)
    done = gc(ckptfs, '--keep-last', '1')
    assert names(done['in_use']) == ['job/0'] and names(done['removed']) == ['job/1']
    ckptfs.run('switch', '--store', ckptfs.store, 'job/2')
    assert names(gc(ckptfs, '--keep-last', '1')['removed']) == ['job/0']
    assert os.listdir(os.path.join(mount, 'run', 'job', 'step')) == ['2']
    trainer.end()


def test_gc_of_copied_linked_and_referenced_steps(ckptfs):
    before = tree_of(checkpoint('zero1'))
    for how in ('copy', 'link', 'reference'):
        words = [] if how == 'reference' else [f'--{how}']
        ckptfs.adopt(checkpoint('zero1'), name=how,
                     extra=('--replicated', r'.*\.tally\..*', *words))
    count = len([s for s in ckptfs.list()['steps'] if s['run'] == 'copy'])
    assert count >= 1
    assert len(blob_folders(ckptfs)) >= 2
    dry = gc(ckptfs, '--keep-last', '1', '--dry-run')
    done = gc(ckptfs, '--keep-last', '1')
    assert names(dry['removed']) == names(done['removed'])
    assert len(done['removed']) == 2 * (count - 1)
    for how in ('copy', 'link'):
        step = next(s for s in ckptfs.list()['steps'] if s['run'] == how)
        ckptfs.run('verify', '--store', ckptfs.store, f"{how}/{step['id']}")
        ckptfs.run('remove', '--store', ckptfs.store, f"{how}/{step['id']}")
    assert gc(ckptfs)['directories'] == 2
    assert blob_folders(ckptfs) == []
    assert tree_of(checkpoint('zero1')) == before
    assert len(ckptfs.list()['steps']) == count


def tree_of(path):
    """Names, sizes, times and link counts below a directory."""
    found = []
    for folder, _, files in os.walk(path):
        for file in files:
            info = os.stat(os.path.join(folder, file))
            found.append((folder, file, info.st_size, info.st_mtime_ns, info.st_nlink))
    return sorted(found)


def test_gc_beside_a_copy_under_way_and_killed(ckptfs):
    words = ('adopt', '--store', ckptfs.store, '--copy', '--name', 'again', '--replicated',
             r'.*\.tally\..*', checkpoint('zero1'))
    ckptfs.run(*words)
    ckptfs.run('remove', '--store', ckptfs.store,
               *names(s for s in ckptfs.list()['steps']))
    for turn in range(12):
        adopt = subprocess.Popen([BIN, *words], stdout=subprocess.DEVNULL)
        collect = subprocess.Popen([BIN, 'gc', '--store', ckptfs.store],
                                   stdout=subprocess.DEVNULL)
        if turn % 3 == 0:
            time.sleep(0.003 * turn)
            collect.send_signal(signal.SIGKILL)
        if turn % 3 == 1:
            time.sleep(0.02 * turn)
            adopt.send_signal(signal.SIGKILL)
        collect.wait()
        assert adopt.wait() in (0, -signal.SIGKILL)
        steps = names(ckptfs.list()['steps'])
        for step in steps:
            ckptfs.run('verify', '--store', ckptfs.store, step)
        if turn % 2 == 0 and steps:
            ckptfs.run('remove', '--store', ckptfs.store, *steps)
    gc(ckptfs)
    left = ckptfs.list()['steps']
    assert len(blob_folders(ckptfs)) == len(left)
    assert os.listdir(os.path.join(ckptfs.store, '.tmp')) == []
