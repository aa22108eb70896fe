# SPDX-License-Identifier: Apache-2.0
"""A training job's snapshots through a mount: from memory first, then from disk, then
after everything has died; always the bytes of the moment of the save."""
import functools
import glob
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from ckptfs.step_files import Program, tensors_of
from daemon import step_of, wait_until
from gathered import assert_equal, gathered
from safetensors import safe_open
from zygote import Zygote

HERE = os.path.dirname(os.path.abspath(__file__))


# Importing torch would be most of what these tests wait for.
ZYGOTE = Zygote(['torch', 'safetensors', 'ckptfs'])


class Trainer:
    """The ranks of one job.  enter: of a rank, the words that begin its command."""

    def __init__(self, folder, store, world, slots=2, script='snapshot_trainer.py',
                 enter=lambda rank: []):
        self.folder = str(folder)
        words = [sys.executable, os.path.join(HERE, script), self.folder, store]
        self.log = open(os.path.join(self.folder, 'trainer.log'), 'w', encoding='utf-8')
        self.ranks = []
        for rank in range(world):
            begin = enter(rank)
            start = functools.partial(subprocess.Popen, text=True) if begin else ZYGOTE.start
            self.ranks.append(start([*begin, *words, str(rank), str(world), str(slots)],
                                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log))
        self._answers('ready')

    def _answers(self, word):
        answers = [rank.stdout.readline().split() for rank in self.ranks]
        assert all(a and a[0] == word for a in answers), (answers, self.said())
        return [a[1:] for a in answers]

    def tell(self, line, word):
        """One line to all ranks; the rest of their answers."""
        for rank in self.ranks:
            rank.stdin.write(line + '\n')
            rank.stdin.flush()
        return self._answers(word)

    def step(self):
        """Trains and saves a step; whether each rank took it."""
        return [taken == 'True' for _, taken in self.tell('step', 'saved')]

    def durable(self, step):
        """Waits for it."""
        return all(a[1] == 'True' for a in self.tell(f'durable {step}', 'durable'))

    def status(self):
        """Returns the status of rank 0."""
        self.ranks[0].stdin.write('status\n')
        self.ranks[0].stdin.flush()
        return json.loads(self.ranks[0].stdout.readline())

    def said(self):
        """Returns what the ranks wrote to stderr."""
        with open(self.log.name, encoding='utf-8') as f:
            return f.read()

    def kill(self):
        """As a machine that takes them away."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def end(self):
        """Let them end by themselves."""
        for rank in self.ranks:
            rank.stdin.close()
        assert [rank.wait(60) for rank in self.ranks] == [0] * len(self.ranks), self.said()

    def truth(self, step):
        """Returns what a step has to hold."""
        return torch.load(os.path.join(self.folder, f'truth-{step}.pt'))

    def close(self):
        """Nothing stays."""
        self.kill()
        for rank in self.ranks:
            rank.stdin.close()
            rank.stdout.close()
        self.log.close()


@pytest.fixture(name='job')
def job_fixture(tmp_path, ckptfs):
    """job(world) starts the ranks; they end with the test."""
    jobs = []

    def start(world, slots=2):
        folder = tmp_path / f'job{len(jobs)}'
        folder.mkdir()
        jobs.append(Trainer(folder, ckptfs.store, world, slots))
        return jobs[-1]

    yield start
    for one in jobs:
        one.close()


def block_store(ckptfs):
    """No snapshot can be stored until the returned path is removed."""
    os.makedirs(os.path.join(ckptfs.store, 'blobs'), mode=0o700, exist_ok=True)
    path = os.path.join(ckptfs.store, 'blobs', 'snapshots')
    with open(path, 'w', encoding='utf-8'):
        return path


def inodes(view, world):
    """Returns the inodes of the files that `gathered` reads."""
    return [os.stat(os.path.join(view, f'rank{rank}', f'{file}.safetensors')).st_ino
            for rank in range(world) for file in ('model', 'optimizer')]


def durable_steps(ckptfs):
    """Returns what the store has, whatever a daemon shows."""
    return sorted(step['id'] for step in ckptfs.list()['steps'])


def steps_in_memory(ckptfs):
    """Returns what a daemon has, and the store lacks."""
    return sorted(step['id'] for step in ckptfs.list()['in_memory'])


def loaded(files):
    """Returns what a program loads of a step without a mount."""
    found = {}
    for file in ('model', 'optimizer'):
        for key, stored in tensors_of(files, f'rank0/{file}.safetensors').items():
            found[key] = torch.empty(stored.shape, dtype=stored.dtype)
            stored.load(files, [slice(0, size) for size in stored.shape], found[key])
    return found


def test_two_ranks_from_memory_then_from_disk(ckptfs, job):
    daemon, mount = ckptfs.start()
    block = block_store(ckptfs)
    trainer = job(2, slots=4)
    for _ in range(3):
        assert trainer.step() == [True, True]
    steps = os.path.join(mount, 'run', 'job', 'step')
    wait_until(lambda: '0' in os.listdir(steps), 'the step in memory', daemon)
    assert durable_steps(ckptfs) == []
    view = os.path.join(step_of(mount, 'job', '0'), 'view')
    truth = trainer.truth(0)
    for layout, world in (('tp2', 2), ('tp1', 1), ('dp2_tp2', 4)):
        assert_equal(gathered(os.path.join(view, layout), world), truth)
    wait_until(lambda: steps_in_memory(ckptfs) == ['0'], 'the list')
    assert 'job/0  ' in ckptfs.run('list', '--store', ckptfs.store, 'job').stdout
    program = Program(ckptfs.store, 'job', '0')
    assert_equal(loaded(program), truth)
    before = inodes(os.path.join(view, 'tp2'), 2)
    assert 'deepspeed' in os.listdir(os.path.join(view, 'dp2_zero1'))

    os.unlink(block)
    assert trainer.durable(2)
    assert durable_steps(ckptfs) == ['0', '1', '2'] and steps_in_memory(ckptfs) == []
    assert_equal(loaded(program), truth)  # it goes on
    program.close()
    for step in range(3):
        view = os.path.join(step_of(mount, 'job', str(step)), 'view', 'tp2')
        assert_equal(gathered(view, 2), trainer.truth(step))
    view = os.path.join(step_of(mount, 'job', '0'), 'view', 'tp2')
    assert inodes(view, 2) == before
    status = trainer.status()
    assert (status['saves'], status['durable'], status['dropped']) == (3, 3, 0)
    trainer.kill()
    daemon.kill()
    daemon.wait()
    mount = ckptfs.mount()
    view = os.path.join(step_of(mount, 'job', '0'), 'view', 'tp2')
    assert inodes(view, 2) == before
    for step in range(3):
        view = os.path.join(step_of(mount, 'job', str(step)), 'view', 'tp2')
        assert_equal(gathered(view, 2), trainer.truth(step))
    assert_blobs(ckptfs, trainer.truth(2))


def assert_blobs(ckptfs, truth):
    """The files of each step are safetensors files that anyone reads, each tensor in
    one of them, spread over the ranks."""
    folder = os.path.join(ckptfs.store, 'blobs', 'snapshots')
    names = []
    for step in os.listdir(folder):
        held = []
        sizes = []
        for path in sorted(glob.glob(os.path.join(folder, step, '*.safetensors'))):
            sizes.append(os.path.getsize(path))
            with safe_open(path, 'pt') as f:
                held += [key for key in f.keys() if not key.startswith('ckptfs.')]
        assert sorted(held) == sorted(truth)
        assert len(sizes) == 2 and max(sizes) < 1.2 * min(sizes), sizes
        names.append(step)
    assert len(names) == 3


def test_a_trainer_that_dies_after_its_copies_loses_nothing(ckptfs, job):
    daemon, mount = ckptfs.start()
    block = block_store(ckptfs)
    trainer = job(1)
    assert trainer.step() == [True]
    steps = os.path.join(mount, 'run', 'job', 'step')
    wait_until(lambda: '0' in os.listdir(steps), 'the step in memory', daemon)
    trainer.kill()
    view = os.path.join(step_of(mount, 'job', '0'), 'view', 'tp2')
    assert_equal(gathered(view, 2), trainer.truth(0))
    os.unlink(block)
    wait_until(lambda: durable_steps(ckptfs) == ['0'], 'the step on disk', daemon)
    assert_equal(gathered(view, 2), trainer.truth(0))
    ckptfs.run('verify', '--store', ckptfs.store, 'job/0')


def test_a_daemon_that_dies_does_not_stop_the_training(ckptfs, job):
    daemon, mount = ckptfs.start('--run', 'job')
    trainer = job(1)
    assert trainer.step() == [True]
    assert trainer.durable(0)
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.wait()
    wait_until(lambda: not trainer.status()['connected'], 'the trainer to see it')
    assert trainer.step() == [False]
    assert trainer.step() == [False]
    assert trainer.said().count('snapshot dropped') == 1, trainer.said()
    daemon, mount = ckptfs.start('--run', 'job')
    assert os.readlink(os.path.join(mount, 'view')).endswith('/step/0/view')
    assert durable_steps(ckptfs) == ['0']
    assert trainer.step() == [True]
    assert trainer.durable(3)
    assert durable_steps(ckptfs) == ['0', '3']
    view = os.path.join(step_of(mount, 'job', '3'), 'view', 'tp1')
    assert_equal(gathered(view, 1), trainer.truth(3))
    trainer.end()


def test_a_daemon_that_dies_leaves_the_step_to_the_next(ckptfs, job):
    daemon, mount = ckptfs.start()
    block = block_store(ckptfs)
    trainer = job(2)
    assert trainer.step() == [True, True]
    steps = os.path.join(mount, 'run', 'job', 'step')
    wait_until(lambda: '0' in os.listdir(steps), 'the step in memory', daemon)
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.wait()
    os.unlink(block)
    assert trainer.step() == [False, False]  # nobody receives
    daemon, mount = ckptfs.start()
    assert trainer.durable(0)
    assert durable_steps(ckptfs) == ['0']
    view = os.path.join(step_of(mount, 'job', '0'), 'view', 'tp2')
    assert_equal(gathered(view, 2), trainer.truth(0))
    assert trainer.step() == [True, True]
    assert trainer.durable(2)
    for step in '02':
        ckptfs.run('verify', '--store', ckptfs.store, f'job/{step}')
    trainer.end()


def test_without_a_daemon_training_goes_on(job):
    trainer = job(2)
    for _ in range(3):
        assert trainer.step() == [False, False]
    trainer.end()
    assert trainer.said().count('snapshot dropped') == 2, trainer.said()  # one per rank
