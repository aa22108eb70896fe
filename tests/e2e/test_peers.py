# SPDX-License-Identifier: Apache-2.0
"""Steps in the memory of several machines: daemons in namespaces of their own, on a network that
is a bridge, each with one rank of a job, and a store that takes no tensors."""
import json
import os
import subprocess
import sys

import pytest
from daemon import BIN, wait_until
from gathered import assert_equal, gathered
from test_nodes import Node
from test_snapshot import Trainer, durable_steps

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason='namespaces need root')


def ip(machine, *words):
    """ip(8) in a machine's network."""
    subprocess.run(['nsenter', '-t', str(machine.pid), '-n', 'ip', *map(str, words)], check=True)


class Network:
    """A bridge in a namespace of its own, and a cable from it to each node."""

    def __init__(self):
        self.switch = subprocess.Popen(['unshare', '-n', 'sh', '-c', 'echo up && exec sleep infinity'],
                                       stdout=subprocess.PIPE, text=True)
        assert self.switch.stdout.readline() == 'up\n'
        ip(self.switch, 'link', 'add', 'bridge', 'type', 'bridge')
        ip(self.switch, 'link', 'set', 'bridge', 'up')

    def add(self, node, number):
        """Connects a node; its address."""
        cable, address = f'cable{number}', f'10.77.0.{number + 1}'
        ip(self.switch, 'link', 'add', cable, 'type', 'veth', 'peer', 'name', 'net0', 'netns', node.machine.pid)
        ip(self.switch, 'link', 'set', cable, 'master', 'bridge', 'up')
        ip(node.machine, 'addr', 'add', f'{address}/24', 'dev', 'net0')
        ip(node.machine, 'link', 'set', 'net0', 'up')
        ip(node.machine, 'link', 'set', 'lo', 'up')
        return address

    def pull(self, number, plugged=False):
        """Pulls a node's cable, or plugs it in again."""
        ip(self.switch, 'link', 'set', f'cable{number}', 'up' if plugged else 'down')

    def close(self):
        """Nothing stays."""
        self.switch.kill()
        self.switch.wait()
        self.switch.stdout.close()


class PeerNode(Node):
    """A node whose daemon has peers."""

    def __init__(self, ckptfs, network, number):
        super().__init__(ckptfs, f'node{number}')
        self.number = number
        self.address = network.add(self, number)

    def start(self, *options, protect='copy'):
        super().start('--peer', self.address, '--failure-domain', self.name, '--protect', protect, *options)
        wait_until(lambda: 'peers' in self.snapshots(), 'the peers', self.daemon)

    def peers(self):
        """What its status says of peers."""
        return self.snapshots()['peers']

    def memory(self):
        """The steps that its mount shows from memory."""
        place = self.path('run', 'job', 'memory')
        return sorted(os.listdir(place)) if os.path.isdir(place) else []

    def recover(self):
        """What `ckptfs recover` prints, or says if there is nothing."""
        done = self.run('recover', 'job')
        return done.stdout.strip() if done.returncode == 0 else f'{done.returncode}: {done.stderr}'


class Machines:
    """Nodes on a network, and a job with a rank on each, or on those of `ranks`."""

    def __init__(self, ckptfs, folder, count, options=lambda number: (), ranks=None, protect='copy'):
        self.network, self.nodes, self.trainer = Network(), [], None
        ranks = ranks or range(count)
        try:
            for number in range(count):
                self.nodes.append(PeerNode(ckptfs, self.network, number))
                self.nodes[-1].start(*options(number), protect=protect)
            for node in self.nodes:
                wait_until(lambda n=node: len(n.peers()['peers']) == count - 1, 'all peers', node.daemon)
            os.makedirs(os.path.join(ckptfs.store, 'blobs'), mode=0o700, exist_ok=True)
            os.symlink('/nowhere', os.path.join(ckptfs.store, 'blobs', 'snapshots'))
            folder.mkdir()
            self.trainer = Trainer(folder, ckptfs.store, len(ranks),
                                   enter=lambda rank: self.nodes[ranks[rank]].enter(network=False))
        except BaseException:
            self.close()
            raise

    def save(self, step):
        """Saves a step and waits until it is in the mounts of all."""
        assert all(self.trainer.step())
        for node in self.nodes:
            wait_until(lambda n=node: n.memory() == [str(step)], f'{step} in memory at {node.name}: '
                       f'{json.dumps(node.snapshots())}', node.daemon)

    def dcp_load(self, node, step, world):
        """What DCP says that loads the step in memory on a node, cut over so many ranks."""
        reader = os.path.join(os.path.dirname(__file__), 'peer_dcp_reader.py')
        truth = os.path.join(self.trainer.folder, f'truth-{step}.pt')
        done = subprocess.run(
            [*node.enter(), sys.executable, reader, node.ckptfs.store, truth, str(world), '29511'],
            capture_output=True, text=True, env={**os.environ, 'CKPTFS_BIN': os.path.abspath(BIN)}, timeout=300,
            check=False)
        return done.stdout.split() if done.returncode == 0 else done.stderr

    def assert_equal(self, node, step):
        """What a node's mount shows is what was saved, in other layouts than the job's."""
        view = node.path('run', 'job', 'memory', str(step), 'view')
        for layout, world in (('tp2', 2), ('dp2_tp2', 4)):
            assert_equal(gathered(os.path.join(view, layout), world), self.trainer.truth(step))

    def close(self):
        """Nothing stays."""
        if self.trainer is not None:
            self.trainer.close()
        for node in self.nodes:
            node.close()
        self.network.close()


@pytest.fixture(name='machines')
def machines_fixture(ckptfs, tmp_path):
    """machines(count, ...) starts them; they end with the test."""
    made = []

    def start(count, **more):
        made.append(Machines(ckptfs, tmp_path / 'job', count, **more))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_a_step_outlives_a_machine(ckptfs, machines):
    """It is shown from memory while the store takes nothing; one machine of three dies."""
    three = machines(3)
    first, second, third = three.nodes
    three.save(0)
    three.save(1)
    assert durable_steps(ckptfs) == []
    assert [node.recover() for node in three.nodes] == ['job/memory/1'] * 3
    assert not os.path.exists(first.path('view')), 'no durable step is shown'
    status = first.peers()
    assert status['protect']['scheme'] == 'copy' and status['protect']['protected'] >= 1
    assert {peer['host'] for peer in status['peers']} and status['shown'] == ['job/memory/1']
    three.trainer.kill()
    second.kill()
    for node in (first, third):
        assert node.recover() == 'job/memory/1'
        three.assert_equal(node, 1)
    # A machine that takes its place shows it, too, and any number of them may load it.
    second.start()
    assert second.recover() == 'job/memory/1'
    three.assert_equal(second, 1)
    first.kill()
    third.kill()
    assert second.recover().startswith('3: '), 'nobody has it any more'
    wait_until(lambda: second.memory() == [], 'the end of the step', second.daemon)


def test_a_network_that_fails(ckptfs, machines):
    """A slow link and a cable that is pulled cost no save; the store takes the steps at last."""
    three = machines(3, options=lambda number: ('--peer-memory', '1K') if number == 1 else ())
    first, full, third = three.nodes
    slow = ['nsenter', '-t', str(first.machine.pid), '-n', 'tc', 'qdisc', 'add', 'dev', 'net0', 'root', 'tbf',
            'rate', '20mbit', 'burst', '64kbit', 'latency', '400ms']
    subprocess.run(slow, check=True)
    assert three.trainer.step() == [True] * 3
    wait_until(lambda: full.peers()['protect']['full'] >= 1, 'the line about a node that is full', full.daemon)
    assert [node.memory() for node in three.nodes] == [[], [], []], 'a part that nobody else holds'
    full.kill()
    full.start()
    three.network.pull(2)
    saved = three.trainer.step()
    assert saved[0] and saved[2], 'what the network does is not their business'
    wait_until(lambda: first.peers()['peers'] and any(peer['away'] for peer in first.peers()['peers']),
               'the truth in the status', first.daemon)
    three.network.pull(2, plugged=True)
    wait_until(lambda: len([p for p in first.peers()['peers'] if not p['away']]) == 2, 'both again', first.daemon)
    os.unlink(os.path.join(ckptfs.store, 'blobs', 'snapshots'))
    wait_until(lambda: '0' in durable_steps(ckptfs), 'step 0 in the store', first.daemon)
    for node in three.nodes:
        wait_until(lambda n=node: n.snapshots()['steps'] == [], 'free arenas', node.daemon)
    three.save(2)
    assert three.trainer.durable(2)
    assert {node.recover() for node in three.nodes} == {'job/memory/2'}, 'the same save, from memory'
    for node in three.nodes:
        three.assert_equal(node, 2)
    third.kill()
    full.kill()
    # The copies of both may lie on the first machine, or not.
    found = first.recover()
    assert found in ('job/2', 'job/memory/2'), 'what is durable is not lost'
    if found == 'job/memory/2':
        three.assert_equal(first, 2)


def test_a_daemon_with_another_key_is_refused(ckptfs, machines):
    """It learns nothing, holds nothing, and costs the others a line."""
    two = machines(2)
    two.save(0)
    os.unlink(os.path.join(ckptfs.store, 'keys', 'peers'))
    stranger = PeerNode(ckptfs, two.network, 2)
    try:
        stranger.start()  # the store gets another key
        wait_until(lambda: len([p for p in stranger.peers()['peers'] if 'refuses us' in p['away']
                                or "does not have this store's key" in p['away']]) == 2,
                   'the refusals', stranger.daemon)
        two.save(1)
        assert stranger.memory() == [] and stranger.peers()['used'] == 0
        for node in two.nodes:
            two.assert_equal(node, 1)
            wait_until(lambda n=node: any(peer['away'] for peer in n.peers()['peers']), 'the line', node.daemon)
    finally:
        stranger.close()


def test_recover_asks_memory_spools_and_store(ckptfs, machines, tmp_path):
    """It names the newest place that has all of the newest save, and nothing that a machine lacks."""
    def spool(number):
        return '--spool', str(tmp_path / f'spool{number}')
    two = machines(2, options=spool)
    first, second = two.nodes
    assert first.recover().startswith('3: ') and 'durable, in memory or in a spool' in first.recover()
    two.save(0)
    for node in two.nodes:
        wait_until(lambda n=node: n.snapshots()['spool']['saves'] == 1, 'the save in the spool', node.daemon)
    assert [node.recover() for node in two.nodes] == ['job/memory/0'] * 2, 'the same save, which can be loaded'
    two.trainer.kill()
    for node in two.nodes:
        node.kill()
    first.start(*spool(0))
    assert first.recover().startswith('3: '), 'a file of rank 1 lies in a spool that nobody tells of'
    second.start(*spool(1))
    assert [node.recover() for node in two.nodes] == ['job/spool/0'] * 2
    said = json.loads(first.run('recover', 'job', '--json').stdout)
    assert (said['place'], said['id'], said['iteration']) == ('spool', '', 0)
    os.unlink(os.path.join(ckptfs.store, 'blobs', 'snapshots'))
    wait_until(lambda: durable_steps(ckptfs) == ['0'], 'the step in the store', first.daemon)
    assert second.recover() == 'job/0'
    assert json.loads(first.run('recover', 'job', '--json').stdout)['place'] == 'store'
    second.kill()
    done = first.run('recover', 'job')
    assert done.stdout == 'job/0\n' and 'does not answer' in done.stderr


def test_a_job_of_one_machine_outlives_it(ckptfs, machines):
    """All ranks are on one node; another one, without a rank, has the step when that dies."""
    two = machines(2, ranks=[0, 0])
    two.save(0)
    job, helper = two.nodes
    two.trainer.kill()
    job.kill()
    assert helper.recover() == 'job/memory/0'
    two.assert_equal(helper, 0)
    for world in (1, 2):
        assert two.dcp_load(helper, 0, world) == ['equal', str(world)]
    assert durable_steps(ckptfs) == []
    done = subprocess.run([*helper.enter(), os.path.abspath(BIN), 'mount', '--store', ckptfs.store, '--protect', 'copy',
                           '--foreground', helper.mountpoint], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and '--protect needs --peer' in done.stderr
    done = ckptfs.run('mount', '--peer', '127.0.0.1', '--protect', 'local', helper.mountpoint, check=False)
    assert done.returncode == 2 and 'has no local copies' in done.stderr, done.stderr
