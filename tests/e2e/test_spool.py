# SPDX-License-Identifier: Apache-2.0
"""Snapshots on a disk of the machine's own, while the store does not take them."""
import os
import re
import signal
import subprocess
import time

import pytest
from daemon import BIN, step_of, wait_until
from gathered import assert_equal, gathered
from test_daemon import start, status
from test_snapshot import block_store, durable_steps, inodes, job_fixture  # noqa: F401


def spool_of(ckptfs):
    """Returns what the receiving daemon's status says of its spool."""
    return next(one['status']['snapshots']['spool'] for one in status(ckptfs)
                if 'snapshots' in one['status'])


def saves_of(ckptfs):
    """Returns what it says of all saves."""
    return next(one['status']['snapshots'] for one in status(ckptfs) if 'snapshots' in one['status'])


def files_of(spool):
    """The files below a spool."""
    return sorted(name for _, _, names in os.walk(spool) for name in names)


def save_into_spool(ckptfs, trainer, daemon, steps):
    """Trains `steps` steps, each of which is in the spool before the next one is saved."""
    for _ in range(steps):
        saves = spool_of(ckptfs)['saves']
        assert set(trainer.step()) == {True}, trainer.said()
        wait_until(lambda n=saves: spool_of(ckptfs)['saves'] == n + 1, 'the step in the spool',
                   daemon)


@pytest.fixture(name='spool')
def spool_fixture(tmp_path):
    """Where a spool may be made."""
    return str(tmp_path / 'spool')


def test_training_goes_on_beyond_the_arena(ckptfs, job, spool):
    daemon, mount = ckptfs.start('--spool', spool)
    block = block_store(ckptfs)
    trainer = job(2)
    save_into_spool(ckptfs, trainer, daemon, 6)  # with two slots
    steps = os.path.join(mount, 'run', 'job', 'step')
    wait_until(lambda: sorted(n for n in os.listdir(steps) if n != 'latest') == list('012345'),
               'all steps in the mount', daemon)
    assert durable_steps(ckptfs) == [] and trainer.status()['durable'] == 0
    before = []
    for step in range(6):
        view = os.path.join(step_of(mount, 'job', str(step)), 'view')
        for layout, world in (('tp2', 2), ('dp2_tp2', 4)):
            assert_equal(gathered(os.path.join(view, layout), world), trainer.truth(step))
        before.append(inodes(os.path.join(view, 'tp2'), 2))
    seen = spool_of(ckptfs)
    assert (seen['saves'], seen['spooled'], seen['failed'], seen['full']) == (6, 6, 0, 0), seen
    assert seen['directory'] == spool and 0 < seen['bytes'] < seen['budget']
    text = ckptfs.run('status', '--store', ckptfs.store).stdout
    assert 'spooled: 6' in text, text
    metrics = ckptfs.run('status', '--store', ckptfs.store, '--metrics').stdout
    for name, number in (('spool_spooled_saves_total', 6), ('snapshot_durable_saves_total', 0),
                         ('snapshot_memory_steps', 6), ('snapshot_durable_lag_seconds_count', 0)):
        assert re.search(rf'^ckptfs_{name}{{[^}}]*}} {number}$', metrics, re.M), (name, metrics)
    assert float(re.search(r'^ckptfs_snapshot_oldest_waiting_seconds{[^}]*} (.*)$', metrics, re.M)[1]) > 0

    os.unlink(block)
    assert trainer.durable(5)
    assert durable_steps(ckptfs) == list('012345')
    metrics = ckptfs.run('status', '--store', ckptfs.store, '--metrics').stdout
    assert re.search(r'^ckptfs_snapshot_durable_saves_total{[^}]*} 6$', metrics, re.M), metrics
    assert float(re.search(r'^ckptfs_snapshot_durable_lag_seconds_sum{[^}]*} (.*)$', metrics, re.M)[1]) > 0
    for step in range(6):
        view = os.path.join(step_of(mount, 'job', str(step)), 'view', 'tp2')
        assert_equal(gathered(view, 2), trainer.truth(step))
        assert inodes(view, 2) == before[step]
    assert files_of(spool) == ['format'] and spool_of(ckptfs)['bytes'] == 0
    assert os.stat(spool).st_mode & 0o777 == 0o700
    trainer.end()


def test_a_store_that_keeps_up_gets_it_from_memory(ckptfs, job, spool):
    start(ckptfs, '--spool', spool)
    trainer = job(2)
    slowest = 0.
    for step in range(3):
        begun = time.monotonic()
        assert trainer.step() == [True, True] and trainer.durable(step)
        slowest = max(slowest, time.monotonic() - begun)
    assert spool_of(ckptfs)['spooled'] == 0 or slowest > 4  # the store has five seconds
    trainer.end()


@pytest.mark.parametrize('trainer_dies', [True, False])
def test_the_daemon_dies_and_the_next_finishes(ckptfs, job, spool, trainer_dies):
    daemon = start(ckptfs, '--spool', spool)
    block = block_store(ckptfs)
    trainer = job(2)
    save_into_spool(ckptfs, trainer, daemon, 4)
    if trainer_dies:
        trainer.kill()
    daemon.kill()
    daemon.wait()
    # From the spool it is shown by the next one, whose store is blocked still.
    daemon, mount = ckptfs.start('--spool', spool)
    for step in range(4):
        steps = os.path.join(mount, 'run', 'job', 'step')
        wait_until(lambda s=str(step): s in os.listdir(steps), 'the step in the mount', daemon)
        view = os.path.join(step_of(mount, 'job', str(step)), 'view', 'tp2')
        assert_equal(gathered(view, 2), trainer.truth(step))
    os.unlink(block)
    wait_until(lambda: durable_steps(ckptfs) == list('0123'), 'all steps on disk', daemon)
    wait_until(lambda: files_of(spool) == ['format'], 'an empty spool', daemon)
    for step in range(4):
        view = os.path.join(step_of(mount, 'job', str(step)), 'view', 'tp2')
        assert_equal(gathered(view, 2), trainer.truth(step))
    if trainer_dies:
        return
    assert all(trainer.durable(step) for step in range(4))
    wait_until(lambda: trainer.step() == [True, True], 'a save that is taken', daemon)
    assert trainer.status()['dropped'] == trainer.status()['saves'] - 5
    trainer.end()


def test_it_ends_without_waiting_for_its_store(ckptfs, job, spool):
    daemon = start(ckptfs, '--spool', spool)
    block = block_store(ckptfs)
    trainer = job(1)
    save_into_spool(ckptfs, trainer, daemon, 3)
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(60) == 0
    assert durable_steps(ckptfs) == []
    os.unlink(block)
    daemon = start(ckptfs, '--spool', spool)
    assert all(trainer.durable(step) for step in range(3))
    assert durable_steps(ckptfs) == ['0', '1', '2']
    trainer.end()


def test_a_full_spool_leaves_it_to_the_arena(ckptfs, job, spool):
    daemon = start(ckptfs, '--spool', spool)
    block = block_store(ckptfs)
    trainer = job(1)
    save_into_spool(ckptfs, trainer, daemon, 1)
    room = int(trainer.status()['file_bytes'] * 2.5)
    daemon.terminate()
    assert daemon.wait(60) == 0
    daemon = start(ckptfs, '--spool', spool, '--spool-size', str(room))
    tries = []
    wait_until(lambda: tries.append(trainer.step() == [True]) or tries[-1], 'a save that is taken')
    wait_until(lambda: spool_of(ckptfs)['saves'] == 2, 'the step in the spool', daemon)
    assert trainer.step() == [True] and trainer.step() == [True]  # the arena's two slots
    assert trainer.step() == [False]
    wait_until(lambda: spool_of(ckptfs)['full'] == 2, 'the count', daemon)
    assert status(ckptfs)[0]['status']['snapshots']['full_drops'] == 1
    os.unlink(block)
    assert trainer.durable(len(tries) + 2)
    assert len(durable_steps(ckptfs)) == 4
    trainer.end()


@pytest.mark.skipif(os.geteuid() != 0, reason='mounting needs root')
def test_a_disk_without_room_is_done_without(ckptfs, job, tmp_path):
    disk = tmp_path / 'disk'
    disk.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m,mode=0700', 'tmpfs', disk], check=True)
    try:
        daemon = start(ckptfs, '--spool', str(disk), '--spool-size', '1G')
        block = block_store(ckptfs)
        trainer = job(1)
        assert trainer.step() == [True]
        wait_until(lambda: spool_of(ckptfs)['failed'] == 1, 'the failure', daemon)
        seen = spool_of(ckptfs)
        assert 'No space left' in seen['last_failure'] and seen['saves'] == 0, seen
        wait_until(lambda: saves_of(ckptfs)['last_failure'], 'the failure of the store', daemon)
        assert 'the store did not take job/0: ' in ckptfs.run('status', '--store', ckptfs.store).stdout
        os.unlink(block)
        assert trainer.durable(0)
        assert saves_of(ckptfs)['last_failure'] == ''
        assert durable_steps(ckptfs) == ['0'] and files_of(disk) == ['format']
        trainer.end()
        daemon.terminate()
        assert daemon.wait(60) == 0
    finally:
        subprocess.run(['umount', '-l', disk], check=True)


def test_what_is_no_spool_is_refused(ckptfs, tmp_path, spool):
    def refusal(path):
        done = subprocess.run([BIN, 'daemon', '--foreground', '--store', ckptfs.store, '--spool', path],
                              capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    (tmp_path / 'model.pt').write_text('')
    code, said = refusal(str(tmp_path))
    assert code in (4, 6) and str(tmp_path) in said, said
    os.mkdir(spool, 0o755)
    code, said = refusal(spool)
    assert code == 6 and f'{spool} may be entered or read by others (chmod go-rwx)' in said, said
    os.chmod(spool, 0o700)
    os.mkdir(os.path.join(spool, 'snapshots'), 0o700)
    os.symlink('/etc', os.path.join(spool, 'snapshots', 'x'))
    code, said = refusal(spool)
    assert code == 6 and f'{spool}/snapshots/x is a symbolic link' in said, said
    os.unlink(os.path.join(spool, 'snapshots', 'x'))
    first = start(ckptfs, '--spool', spool)
    other = type(ckptfs)(str(tmp_path / 'other'))
    os.mkdir(other.folder)
    first.terminate()
    assert first.wait(60) == 0
    done = subprocess.run([BIN, 'daemon', '--foreground', '--store', other.store, '--spool', spool],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 4 and 'is the spool of another store' in done.stderr, done.stderr
