# SPDX-License-Identifier: Apache-2.0
"""Six machines that keep each other's parts as units of an erasure code, and as copies: what is
lost when some of them go, and what is never lost or wrong."""
import os
import subprocess
import sys

import pytest
from ckptfs import url
from daemon import BIN, wait_until
from test_nodes import Node
from test_peers import Machines

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason='namespaces need root')

HERE = os.path.dirname(os.path.abspath(__file__))


class Reader(Node):
    """A machine without a daemon, that reads from the memory of the others."""

    def __init__(self, ckptfs, network, number):
        super().__init__(ckptfs, 'reader')
        network.add(self, number)

    def outcomes(self, trainer, step, most, nodes):
        """{set of nodes' numbers that it cannot reach: what comes of a load}."""
        truth = os.path.join(trainer.folder, f'truth-{step}.pt')
        numbers = {node.address: node.number for node in nodes}
        done = subprocess.run(
            [*self.enter(), sys.executable, os.path.join(HERE, 'peer_reader.py'), self.ckptfs.store, truth, str(most),
             *numbers], capture_output=True, text=True, env={**os.environ, 'CKPTFS_BIN': os.path.abspath(BIN)},
            timeout=300)
        assert done.returncode == 0, done.stderr
        lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
        return {frozenset(numbers[address] for address in dead.split(',') if address != '-'): what
                for dead, what in lines}


@pytest.fixture(name='six')
def six_fixture(ckptfs, tmp_path):
    """six(protect) starts them, with a job on the first three; they end with the test."""
    made = []

    def start(protect):
        machines = Machines(ckptfs, tmp_path / 'job', 6, ranks=[0, 1, 2], protect=protect)
        made.append(machines)
        machines.reader = Reader(ckptfs, machines.network, 6)
        made.append(machines.reader)
        return machines

    yield start
    for one in reversed(made):
        one.close()


def test_units_on_six_machines(six):
    """ec:4+2: any one and any two may go, and no three; then two die for good."""
    machines = six('ec:4+2')
    machines.save(0)
    outcomes = machines.reader.outcomes(machines.trainer, 0, 3, machines.nodes)
    assert len(outcomes) == 1 + 6 + 15 + 20
    wrong = {tuple(dead): what for dead, what in outcomes.items() if what != ('equal' if len(dead) <= 2 else 'lost')}
    assert not wrong, wrong
    # Two owners die with the job's ranks; the others show the step in other layouts.
    machines.trainer.kill()
    for node in machines.nodes[:2]:
        node.kill()
    for node in machines.nodes[2:4]:
        assert node.recover() == 'job/memory/0'
        machines.assert_equal(node, 0)
    # A third one dies: three units of each lost file are left, which are not enough.
    machines.nodes[2].kill()
    last = machines.nodes[5]
    wait_until(lambda: last.memory() == [], 'the end of the step', last.daemon)
    assert last.recover().startswith('3: ')


def test_copies_on_six_machines(six):
    """copy: a step is lost with both nodes of a pair, if one of them is of the job."""
    machines = six('copy')
    machines.save(0)
    outcomes = machines.reader.outcomes(machines.trainer, 0, 2, machines.nodes)
    assert {what for dead, what in outcomes.items() if len(dead) < 2} == {'equal'}
    lost = [dead for dead, what in outcomes.items() if what == 'lost']
    assert {what for dead, what in outcomes.items() if dead not in lost} == {'equal'}
    assert sorted(map(sorted, lost)) == [[0, 3], [1, 4], [2, 5]]


def test_five_are_too_few(six):
    """ec:4+2 needs six nodes: with five the status says so, and a save is not held up."""
    machines = six('ec:4+2')
    first, last = machines.nodes[0], machines.nodes[5]
    last.kill()
    assert all(machines.trainer.step())
    # It says how many nodes are missing, or how many there are, if it knew before that one is dead.
    wait_until(lambda: any('needs 1 more nodes' in line or 'needs 6 nodes; there are 5' in line
                           for line in first.peers()['protect']['steps']), 'the reason', first.daemon)
    assert first.memory() == []
    last.start(protect='ec:4+2')
    for node in (first, last):
        wait_until(lambda n=node: n.memory() == ['0'], 'the step in memory', node.daemon)
    machines.assert_equal(last, 0)


def test_names_of_steps_in_memory(tmp_path):
    """A run may be called memory, too: where a store lies tells which one is meant, or nothing does."""
    assert url.parse('ckptfs:///s/job/memory') == ('/s', 'job', 'memory')
    assert url.parse('ckptfs:///s/job/memory/7') == ('/s', 'job', 'memory/7')
    assert url.parse('ckptfs:///s/memory/7') == ('/s', 'memory', '7')
    inner = tmp_path / 'job'
    inner.mkdir()
    (inner / 'format').write_text('a store')
    assert url.parse(f'ckptfs://{inner}/memory/7') == (str(inner), 'memory', '7')
    (tmp_path / 'format').write_text('a store')
    with pytest.raises(ValueError, match='are both stores'):
        url.parse(f'ckptfs://{inner}/memory/7')
