# SPDX-License-Identifier: Apache-2.0
"""One job on two nodes: daemons in network and mount namespaces of their own, which share
nothing but the store's directory, each with two of the four ranks."""
import glob
import json
import os
import signal
import subprocess

import pytest
from daemon import BIN, step_of, wait_until
from gathered import assert_equal, gathered
from test_snapshot import Trainer, durable_steps
from test_spool import files_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason='namespaces need root')


class Node:
    """A machine: its own mounts, network and runtime directory, and a daemon with a mount.
    words: begin each command of ckptfs there.  It has no mount of a test that runs beside this one: that would
    keep its daemon alive."""

    def __init__(self, ckptfs, name, words=()):
        self.ckptfs, self.name, self.words = ckptfs, name, words
        self.mountpoint = os.path.join(ckptfs.folder, name)
        os.mkdir(self.mountpoint)
        self.machine = subprocess.Popen(
            ['unshare', '-nm', '--propagation', 'private', 'sh', '-c',
             'umount -ali -t fuse.ckptfs; mount -t tmpfs tmpfs /run && echo up && exec sleep infinity'],
            stdout=subprocess.PIPE, text=True)
        assert self.machine.stdout.readline() == 'up\n'
        self.daemon = None

    def enter(self, network=True):
        """The words that begin a command in this machine."""
        return ['nsenter', '-t', str(self.machine.pid), '-m', *(['-n'] if network else []), '--']

    def start(self, *options):
        """A daemon, in the foreground."""
        self.daemon = subprocess.Popen(
            [*self.enter(), *self.words, os.path.abspath(BIN), 'mount', '--foreground', '--store', self.ckptfs.store,
             *self.ckptfs.reserve, *options, self.mountpoint], stdin=subprocess.DEVNULL)
        wait_until(lambda: os.path.isdir(self.path('run')), 'the mount', self.daemon)
        wait_until(lambda: self.snapshots() is not None, 'the daemon', self.daemon)

    def kill(self):
        """As a machine that takes the daemon away."""
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.wait()

    def path(self, *names):
        """A path in its mount, as seen from here."""
        return os.path.join(f'/proc/{self.machine.pid}/root{self.mountpoint}', *names)

    def run(self, *words):
        """A command of ckptfs there, on the store."""
        return subprocess.run([*self.enter(), *self.words, os.path.abspath(BIN), *words, '--store', self.ckptfs.store],
                              capture_output=True, text=True, timeout=60)

    def snapshots(self):
        """Returns what `ckptfs status` says of snapshots there."""
        done = self.run('status', '--json', '--mountpoint', self.mountpoint)
        mounts = json.loads(done.stdout) if done.returncode == 0 else []
        return mounts[0]['status'].get('snapshots') if mounts else None

    def steps(self):
        """Returns what its mount shows."""
        return sorted(os.listdir(self.path('run', 'job', 'step')))

    def close(self):
        """Nothing stays: with the machine go its mounts."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait()
        self.machine.kill()
        self.machine.wait()
        self.machine.stdout.close()


@pytest.fixture(name='nodes')
def nodes_fixture(ckptfs):
    """Two, with a daemon each."""
    made = []
    try:
        for name in ('first', 'second'):
            made.append(Node(ckptfs, name))
            made[-1].start()
        yield made
    finally:
        for node in made:
            node.close()


@pytest.fixture(name='trainer')
def trainer_fixture(tmp_path, ckptfs, nodes):
    """Four ranks of one job, two on each node.  Ranks speak to each other over this machine's
    network; to daemons over sockets of the node's own."""
    folder = tmp_path / 'job'
    folder.mkdir()
    trainer = Trainer(folder, ckptfs.store, 4,
                      enter=lambda rank: nodes[rank // 2].enter(network=False))
    yield trainer
    trainer.close()


def assert_step(nodes, trainer, step):
    """The step is in both mounts, in other layouts than the job's, and what it has to be."""
    for node in nodes:
        wait_until(lambda n=node: str(step) in n.steps(), f'step {step} on {node.name}')
        view = os.path.join(step_of(node.path(), 'job', str(step)), 'view')
        for layout, world in (('tp2', 2), ('dp2_tp2', 4)):
            assert_equal(gathered(os.path.join(view, layout), world), trainer.truth(step))


def test_two_nodes_make_one_step(ckptfs, nodes, trainer):
    for _ in range(2):
        assert trainer.step() == [True] * 4
    assert trainer.durable(0) and trainer.durable(1)
    assert durable_steps(ckptfs) == ['0', '1']
    for step in range(2):
        assert_step(nodes, trainer, step)
    blobs = os.path.join(ckptfs.store, 'blobs', 'snapshots')
    assert sorted(len(glob.glob(os.path.join(blobs, d, '*.safetensors'))) for d in os.listdir(blobs)) == [4, 4]
    prepared = os.path.join(ckptfs.store, 'prepared')
    wait_until(lambda: not [name for folder, _, names in os.walk(prepared) for name in names
                            if folder != prepared and name != 'world'
                            and not name.startswith('ranks-')], 'nothing to be left')
    for node in nodes:
        assert node.snapshots()['durable'] == 2
        assert node.snapshots()['steps'] == []


def test_a_daemon_that_dies_costs_its_step_at_most(ckptfs, nodes, trainer):
    assert trainer.step() == [True] * 4
    assert trainer.durable(0)
    first, second = nodes
    second.kill()
    assert trainer.step() == [True, True, False, False]
    wait_until(lambda: first.snapshots()['steps'] == ['job/1: waiting for ranks 2-3'],
               'the truth in the status', first.daemon)
    assert durable_steps(ckptfs) == ['0']
    second.start()
    assert trainer.step() == [True] * 4
    assert trainer.durable(2)
    # The ranks of the second node went on without step 1.
    wait_until(lambda: first.snapshots()['steps'] == [], 'the end of step 1', first.daemon)
    assert durable_steps(ckptfs) == ['0', '2']
    for step in (0, 2):
        assert_step(nodes, trainer, step)
    assert 'went on without it' in first.snapshots()['last_drop']
    done = ckptfs.run('gc', '--store', ckptfs.store)
    blobs = os.path.join(ckptfs.store, 'blobs', 'snapshots')
    assert len(os.listdir(blobs)) == 2, done.stdout + done.stderr
    trainer.end()


def test_spools_of_two_nodes(ckptfs, nodes, trainer, tmp_path):
    """The store takes nothing for longer than arenas have room for, and a daemon dies meanwhile."""
    spools = {node: str(tmp_path / f'spool-{node.name}') for node in nodes}
    for node, spool in spools.items():
        node.kill()
        node.start('--spool', spool)
    block = os.path.join(ckptfs.store, 'blobs', 'snapshots')
    os.makedirs(os.path.dirname(block), mode=0o700, exist_ok=True)
    os.symlink('/nowhere', block)
    for step in range(5):
        assert trainer.step() == [True] * 4, trainer.said()
        for node in nodes:
            wait_until(lambda n=node, s=step: n.snapshots()['spool']['saves'] == s + 1,
                       f'step {step} in the spool of the {node.name}', node.daemon)
    second = nodes[1]
    second.kill()
    second.start('--spool', spools[second])
    assert second.snapshots()['spool']['saves'] == 5
    assert durable_steps(ckptfs) == []
    os.unlink(block)
    assert all(trainer.durable(step) for step in range(5)), trainer.said()
    assert durable_steps(ckptfs) == list('01234')
    for step in (0, 3, 4):
        assert_step(nodes, trainer, step)
    for spool in spools.values():
        wait_until(lambda s=spool: files_of(s) == ['format'], 'an empty spool')
    trainer.end()
