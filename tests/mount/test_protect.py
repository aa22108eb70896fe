# SPDX-License-Identifier: Apache-2.0
"""`ckptfs protect --plan`: its numbers, against formulas written down here."""
import json
from math import comb

import pytest


@pytest.fixture
def plan(ckptfs):
    return lambda *words: json.loads(ckptfs.run('protect', '--plan', '--json', *words).stdout)


def cliques(nodes, size, parity, dead):
    """P(lost) of nodes / size groups that each outlive `parity` deaths."""
    ways = [1] + [0] * dead
    for _ in range(nodes // size):
        ways = [sum(ways[f - j] * comb(size, j) for j in range(min(f, parity) + 1)) for f in range(dead + 1)]
    return 1 - ways[dead] / comb(nodes, dead)


def test_plan_says_what_is_lost_and_what_it_costs(ckptfs, plan):
    told = plan('--nodes', '120', '--part', '40G')
    rows = {row['scheme']: row for row in told['schemes']}
    shapes = {'off': (1, 0), 'local': (2, 1), 'copy': (2, 1), 'copy:2': (3, 2), 'ec:4+1': (5, 1), 'ec:4+2': (6, 2),
              'ec:8+2': (10, 2)}
    assert list(rows) == list(shapes) and (told['mtbf_days'], told['window_minutes']) == (263.94, 15)
    for scheme, (size, parity) in shapes.items():
        row = rows[scheme]
        assert row['groups'] == 120 // size and row['group_sizes'] == [size, size] and row['error'] is None
        expected = [cliques(120, size, parity, f) for f in range(5)]
        assert row['lost_by_nodes'] == pytest.approx(expected, abs=1e-12), scheme
        memory = parity / (size - parity)
        assert row['extra_memory'] == pytest.approx(memory)
        assert row['extra_memory_bytes'] == round(memory * 40 * 2**30)
        assert row['sent'] == (0 if scheme == 'local' else (size - 1) / (size - parity))
    year = {row['scheme']: row['loads_a_year'] for row in plan('--nodes', '2040')['schemes']}
    assert [round(year[s], d) for s, d in (('off', 0), ('copy', 2), ('ec:4+1', 2), ('ec:8+2', 4))] == [
        2821, 0.11, 0.45, 0.0002]
    text = ckptfs.run('protect', '--plan', '--nodes', '120').stdout
    line, = [l for l in text.splitlines() if l.startswith('ec:4+1')]
    assert line.split()[:7] == ['ec:4+1', '0.25', '1.00', '1', '0.9664', '0.9009', '0.8085']


def test_plan_counts_failure_domains(ckptfs, plan):
    row, = plan('--nodes', '120', '--failure-domain', '4', '--scheme', 'ec:8+2')['schemes']
    assert row['lost_by_domains'][:2] == [0, 0] and 0 <= row['lost_by_domains'][2] < 1
    # Two racks: groups of ten hold five of each.
    row, = plan('--nodes', '120', '--failure-domain', '60', '--scheme', 'ec:8+2')['schemes']
    assert row['lost_by_domains'] == [0, 1, 1]
    often, = plan('--nodes', '120', '--failure-domain', '60', '--scheme', 'ec:8+2', '--domain-mtbf', '365')['schemes']
    assert often['loads_a_year'] == pytest.approx(row['loads_a_year'] + 2)
    text = ckptfs.run('protect', '--plan', '--nodes', '120', '--failure-domain', '60').stdout
    assert '1F' in text and '2F' in text


def test_plan_says_what_does_not_fit(ckptfs, plan):
    rows = {row['scheme']: row for row in plan('--nodes', '6')['schemes']}
    assert rows['ec:8+2']['error']['message'] == "'ec:8+2' needs 10 nodes; there are 6"
    assert rows['ec:4+2']['error'] is None
    assert "'ec:8+2' needs 10 nodes" in ckptfs.run('protect', '--plan', '--nodes', '6').stdout


@pytest.mark.parametrize('words, said', [
    (['protect'], '--plan'), (['protect', '--plan'], '--nodes'),
    (['protect', '--plan', '--nodes', '0'], 'nodes'), (['protect', '--plan', '--nodes', '131073'], '131072'),
    (['protect', '--plan', '--nodes', '4', '--scheme', 'ec:8'], 'ec:8+2'),
    (['protect', '--plan', '--nodes', '4', '--dead', '17'], '16'),
    (['protect', '--plan', '--nodes', '4', '--mtbf', '0'], 'above 0'),
    (['protect', '--plan', '--nodes', '4', '--window', 'nan'], 'above 0'),
    (['protect', '--plan', '--nodes', '4', '--part', 'x'], 'x')])
def test_wrong_plans_are_refused(ckptfs, words, said):
    done = ckptfs.run(*words, check=False)
    assert done.returncode == 2 and said in done.stderr, done.stderr
