# SPDX-License-Identifier: Apache-2.0
"""`ckptfs daemon`: receiving snapshots without a mount."""
import json
import os
import signal
import subprocess

import pytest
from daemon import BIN, step_of, wait_until
from service_manager import ServiceManager
from test_snapshot import (Program, assert_equal, block_store, durable_steps, gathered,  # noqa: F401
                           job_fixture, loaded, steps_in_memory)


def start(ckptfs, *options, manager=None):
    """A daemon in the foreground."""
    command = [BIN, 'daemon', '--foreground', '--store', ckptfs.store, *options]
    if manager is None:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    else:
        process = manager.start(command)
    ckptfs.processes.append(process)
    wait_until(lambda: process.pid in [one['pid'] for one in status(ckptfs)], 'the daemon', process)
    return process


def status(ckptfs):
    """Returns what all living daemons of the store say; `ckptfs status` names killed ones, too."""
    done = ckptfs.run('status', '--store', ckptfs.store, '--json', check=False)
    return [one for one in json.loads(done.stdout or '[]') if 'status' in one]


def receiving(ckptfs):
    """The processes that receive."""
    return [one['pid'] for one in status(ckptfs) if 'snapshots' in one['status']]


def test_receives_makes_durable_and_ends_at_a_signal(ckptfs, job):
    daemon = start(ckptfs, '--keep-last', '2', '--hot-steps', '1')
    assert receiving(ckptfs) == [daemon.pid]
    trainer = job(2)
    for step in range(4):
        assert trainer.step() == [True, True] and trainer.durable(step)
    wait_until(lambda: durable_steps(ckptfs) == ['2', '3'], 'retention', daemon)
    counts = status(ckptfs)[0]['status']['snapshots']
    assert 0 <= counts['huge_bytes'] <= counts['arena_bytes'] and counts['arena_bytes'] >= 2 * 16 << 20
    hot = counts['hot']
    assert hot['steps'] == 1 and hot['bytes'] > 1 << 20, hot
    assert ckptfs.run('switch', '--store', ckptfs.store, 'job/3', check=False).returncode == 3
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(60) == 0
    assert status(ckptfs) == []
    assert trainer.step() == [False, False]
    mount = ckptfs.mount()
    assert_equal(gathered(os.path.join(step_of(mount, 'job', '3'), 'view', 'tp2'), 2),
                 trainer.truth(3))
    assert trainer.step() == [True, True] and trainer.durable(5)
    trainer.end()


def test_one_of_several_receives_and_the_next_takes_over(ckptfs, job):
    first = start(ckptfs)
    second = start(ckptfs)
    mount = ckptfs.mount()
    assert receiving(ckptfs) == [first.pid]
    trainer = job(1)
    assert trainer.step() == [True] and trainer.durable(0)
    # The mount of the same machine shows what the daemon has stored.
    assert_equal(gathered(os.path.join(step_of(mount, 'job', '0'), 'view', 'tp1'), 1),
                 trainer.truth(0))
    first.kill()
    first.wait()
    wait_until(lambda: len(receiving(ckptfs)) == 1, 'another to receive')
    assert first.pid not in receiving(ckptfs)
    wait_until(lambda: trainer.step() == [True], 'a save that is taken')
    trainer.end()
    second.terminate()
    assert second.wait(60) == 0


@pytest.mark.parametrize('how', ['killed', 'ended'])
def test_what_is_whole_when_it_ends(ckptfs, job, how):
    daemon = start(ckptfs)
    trainer = job(1)
    assert trainer.step() == [True] and trainer.durable(0)
    files = os.path.join(ckptfs.store, 'blobs', 'snapshots')
    os.rename(files, files + '.away')
    block = block_store(ckptfs)
    assert trainer.step() == [True]
    until_in_memory(ckptfs, daemon)
    trainer.kill()
    wait_until(lambda: steps_in_memory(ckptfs) == ['1'], 'the list', daemon)
    program = Program(ckptfs.store, 'job', '1')
    assert_equal(loaded(program), trainer.truth(1))
    if how == 'killed':
        daemon.kill()
        daemon.wait()
    os.unlink(block)
    os.rename(files + '.away', files)
    if how == 'killed':
        with pytest.raises(RuntimeError, match='went away'):
            program.describe()
    else:
        daemon.terminate()
        assert daemon.wait(60) == 0
    program.close()
    last = {'killed': '0', 'ended': '1'}[how]
    assert durable_steps(ckptfs) == [str(step) for step in range(int(last) + 1)]
    assert steps_in_memory(ckptfs) == []
    mount = ckptfs.mount('--run', 'job')
    assert os.readlink(os.path.join(mount, 'view')).endswith(f'/step/{last}/view')
    assert_equal(gathered(os.path.join(mount, 'view', 'tp2'), 2), trainer.truth(int(last)))


def until_in_memory(ckptfs, daemon):
    """Waits until a step is whole, and not durable."""
    wait_until(lambda: any(one['status']['snapshots']['waiting'] for one in status(ckptfs)),
               'the step in memory', daemon)


@pytest.mark.skipif(os.geteuid() != 0, reason='mounting needs root')
def test_a_store_that_is_full_has_room_again(ckptfs, job, capfd):
    os.mkdir(ckptfs.store)
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=32m,mode=0700', 'tmpfs', ckptfs.store], check=True)
    try:
        daemon = start(ckptfs)
        trainer = job(1, slots=1)
        assert trainer.step() == [True] and trainer.durable(0)
        filler = os.path.join(ckptfs.store, 'filler')
        with open(filler, 'wb', buffering=0) as file, pytest.raises(OSError, match='No space'):
            while file.write(bytes(4096)):
                pass
        wait_until(lambda: trainer.step() == [True], 'room in the arena', daemon)
        until_in_memory(ckptfs, daemon)
        waiting, = steps_in_memory(ckptfs)
        assert trainer.step() == [False]
        assert 'the arena is full of steps' in trainer.status()['last_drop']
        wait_until(lambda: status(ckptfs)[0]['status']['snapshots']['full_drops'], 'the count', daemon)
        said = capfd.readouterr().err
        assert f'snapshot job/{waiting} stays in memory: ' in said and 'No space left' in said, said
        assert durable_steps(ckptfs) == ['0']
        wait_until(lambda: os.listdir(os.path.join(ckptfs.store, '.tmp')) == [], 'nothing half', daemon)
        os.unlink(filler)
        assert trainer.durable(waiting)
        wait_until(lambda: trainer.step() == [True], 'a save that is taken', daemon)
        last = str(trainer.status()['saves'] - 1)
        assert trainer.durable(last) and durable_steps(ckptfs) == sorted(['0', waiting, last], key=int)
        mount = ckptfs.mount()
        for step in ('0', waiting, last):
            ckptfs.run('verify', '--store', ckptfs.store, f'job/{step}')
            view = os.path.join(step_of(mount, 'job', step), 'view', 'tp2')
            assert_equal(gathered(view, 2), trainer.truth(step))
        ckptfs.umount(mount)
        trainer.end()
        daemon.terminate()
        assert daemon.wait(60) == 0
    finally:
        subprocess.run(['umount', '-l', ckptfs.store], check=True)


def kept_by_a_manager(ckptfs, job, tmp_path):
    """A step of two ranks that only memory holds, of a daemon with a service manager."""
    manager = ServiceManager(tmp_path)
    first = start(ckptfs, manager=manager)
    block = block_store(ckptfs)
    trainer = job(2)
    assert trainer.step() == [True, True]
    until_in_memory(ckptfs, first)
    return manager, first, block, trainer


def test_both_die_and_a_service_manager_has_the_arena(ckptfs, job, tmp_path):
    manager, first, block, trainer = kept_by_a_manager(ckptfs, job, tmp_path)
    trainer.kill()
    first.kill()
    first.wait()
    os.unlink(block)
    assert len(manager.hear()) == 4  # an arena and a ledger per rank
    second = start(ckptfs, manager=manager)
    wait_until(lambda: durable_steps(ckptfs) == ['0'], 'the step on disk', second)
    wait_until(lambda: manager.hear() == [], 'nothing to keep', second)
    mount = ckptfs.mount()
    assert_equal(gathered(os.path.join(step_of(mount, 'job', '0'), 'view', 'tp2'), 2),
                 trainer.truth(0))
    second.terminate()
    assert second.wait(60) == 0
    manager.close()


def test_a_rank_comes_back_though_its_arena_was_kept(ckptfs, job, tmp_path):
    manager, first, block, trainer = kept_by_a_manager(ckptfs, job, tmp_path)
    first.kill()
    first.wait()
    os.unlink(block)
    second = start(ckptfs, manager=manager)
    assert trainer.durable(0)
    wait_until(lambda: trainer.step() == [True, True], 'a save that is taken', second)
    assert durable_steps(ckptfs)[0] == '0'
    trainer.end()
    wait_until(lambda: manager.hear() == [], 'nothing to keep', second)
    manager.close()


def test_in_the_background(ckptfs):
    ckptfs.run('daemon', '--store', ckptfs.store)
    assert len(receiving(ckptfs)) == 1
    for pid in ckptfs.running():
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not ckptfs.running(), 'its end')
