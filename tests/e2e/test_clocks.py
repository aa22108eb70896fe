# SPDX-License-Identifier: Apache-2.0
"""The time of day jumps by a year, forth and back, in daemons, ranks and commands (libfaketime);
nodes have clocks of their own.  Nothing is decided by it: no step is lost, mixed, or shown in
another order than it was saved in, and nothing is reclaimed that somebody may still need."""
import glob
import os
import signal
import subprocess
import time

import pytest
from daemon import step_of, wait_until
from gathered import assert_equal, gathered
from test_nodes import Node, assert_step
from test_snapshot import Trainer, durable_steps

FAKETIME = glob.glob('/usr/lib/*/faketime/libfaketimeMT.so.1')
pytestmark = pytest.mark.skipif(not FAKETIME, reason='needs the package faketime')


class Clock:
    """The time of day of the processes that have its environment."""

    def __init__(self, folder, name='clock', jump='+0'):
        self.path = str(folder / name)
        self.environment = {'LD_PRELOAD': FAKETIME[0], 'FAKETIME_TIMESTAMP_FILE': self.path,
                            'FAKETIME_NO_CACHE': '1', 'FAKETIME_DONT_FAKE_MONOTONIC': '1',
                            'NO_FAKE_STAT': '1'}
        self.jump(jump)

    def jump(self, by):
        """To what the real time is, plus `by`, as faketime(1) has it."""
        with open(f'{self.path}.new', 'w', encoding='utf-8') as file:
            file.write(by)
        os.rename(f'{self.path}.new', self.path)

    def words(self):
        """Returns the words that begin a command under this clock."""
        return ['env', *(f'{key}={value}' for key, value in self.environment.items())]


@pytest.fixture(name='clock')
def clock_fixture(tmp_path, monkeypatch):
    """The clock of every process that the test starts."""
    clock = Clock(tmp_path)
    for key, value in clock.environment.items():
        monkeypatch.setenv(key, value)
    return clock


def trainer_of(tmp_path, store, world, enter):
    """The ranks of a job."""
    folder = tmp_path / 'job'
    folder.mkdir()
    return Trainer(folder, store, world, enter=enter)


def test_the_clock_is_another_one(clock):
    """Else nothing here tests anything."""
    clock.jump('-800d')
    year = subprocess.run(['date', '+%Y'], capture_output=True, text=True, check=True).stdout
    assert int(year) < time.gmtime().tm_year


def test_steps_of_a_clock_that_jumps(ckptfs, clock, tmp_path):
    daemon, mount = ckptfs.start('--keep-last', '3')
    trainer = trainer_of(tmp_path, ckptfs.store, 2, lambda rank: ['env'])
    try:
        jumps = ['+0', '+400d', '-400d', '+0', '-8000d', '+8000d', '+0']
        for step, jump in enumerate(jumps):
            clock.jump(jump)
            assert trainer.step() == [True, True], trainer.said()
            assert trainer.durable(step), trainer.said()
            assert ckptfs.run('resolve', 'job', '--store', ckptfs.store).stdout.split() == [str(step)]
            wait_until(lambda s=step: str(s) in os.listdir(os.path.join(mount, 'run', 'job', 'step')),
                       f'step {step}', daemon)
            view = os.path.join(step_of(mount, 'job', str(step)), 'view', 'tp2')
            assert_equal(gathered(view, 2), trainer.truth(step))
        # The first is what /view shows.
        wait_until(lambda: durable_steps(ckptfs) == ['0', '4', '5', '6'], 'the last three', daemon)
    finally:
        trainer.close()


def test_nothing_that_is_under_way_is_reclaimed(ckptfs, tmp_path):
    """Two nodes whose clocks are two years apart; one has done its part, and `gc` of the other,
    whose clock goes on jumping, looks through the store meanwhile."""
    if os.geteuid() != 0:
        pytest.skip('namespaces need root')
    clocks = [Clock(tmp_path, 'clock-1', '+400d'), Clock(tmp_path, 'clock-2', '-400d')]
    nodes, trainer = [], None
    try:
        for clock, name in zip(clocks, ('first', 'second')):
            nodes.append(Node(ckptfs, name, clock.words()))
            nodes[-1].start()
        trainer = trainer_of(
            tmp_path, ckptfs.store, 4,
            lambda rank: [*nodes[rank // 2].enter(network=False), *clocks[rank // 2].words()])
        assert trainer.step() == [True] * 4, trainer.said()
        assert trainer.durable(0), trainer.said()
        second = nodes[1].daemon
        second.send_signal(signal.SIGSTOP)
        assert trainer.step() == [True] * 4, trainer.said()
        wait_until(lambda: nodes[0].snapshots()['steps'] == ['job/1: waiting for ranks 2-3'],
                   'the first half', nodes[0].daemon)
        for by in ('+0', '+4000d', '-4000d'):
            clocks[1].jump(by)
            done = nodes[1].run('gc')
            assert done.returncode == 0, done.stderr
        second.send_signal(signal.SIGCONT)
        assert trainer.durable(1), trainer.said()
        for step in range(2):
            assert_step(nodes, trainer, step)
        assert [node.run('resolve', 'job').stdout.split() for node in nodes] == [['1']] * 2
    finally:
        if trainer is not None:
            trainer.close()
        for node in nodes:
            node.close()
