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
    """Of all daemons of the store that live; those that were killed are told, too."""
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
    hot = status(ckptfs)[0]['status']['snapshots']['hot']
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
    block = block_store(ckptfs)
    trainer = job(1)
    assert trainer.step() == [True]
    until_in_memory(ckptfs, daemon)
    trainer.kill()
    wait_until(lambda: steps_in_memory(ckptfs) == ['0'], 'the list', daemon)
    program = Program(ckptfs.store, 'job', '0')
    assert_equal(loaded(program), trainer.truth(0))
    if how == 'ended':
        os.unlink(block)
        daemon.terminate()
        assert daemon.wait(60) == 0
        assert durable_steps(ckptfs) == ['0']
    else:
        daemon.kill()
        daemon.wait()
        assert ckptfs.list()['steps'] == [] and steps_in_memory(ckptfs) == []
        with pytest.raises(RuntimeError, match='went away'):
            program.describe()
    program.close()


def until_in_memory(ckptfs, daemon):
    """Waits until a step is whole, and not durable."""
    wait_until(lambda: any(one['status']['snapshots']['waiting'] for one in status(ckptfs)),
               'the step in memory', daemon)


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
