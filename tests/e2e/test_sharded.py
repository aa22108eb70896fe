# SPDX-License-Identifier: Apache-2.0
"""Snapshots of states that lie in parts on several ranks, through a mount in other
layouts, bit for bit."""
import os

import ckptfs as library
import pytest
import torch
from ckptfs.state import Model, State
from daemon import step_of, wait_until
from gathered import assert_equal, gathered
from test_snapshot import durable_steps

NORM, UP, DOWN = ('model.norm.weight', 'model.layers.0.mlp.up_proj.weight',
                  'model.layers.0.mlp.down_proj.weight')


class Parts:
    """The part that one of three ranks has of a model; a collector."""

    lazy = False

    def __init__(self, truth, rank):
        self.truth, self.rank = truth, rank

    def start(self, rank, world):
        """Nothing to say to the others."""
        assert (rank, world) == (self.rank, 3)

    def states(self):
        """Boxes of a weight, flat ranges of another, flat ranges of columns of states."""
        rank, truth = self.rank, self.truth
        begin, end = ((0, 5), (5, 12), (12, 12))[rank]
        yield State(UP, 'weight', '', truth[UP][begin:end], shape=(12, 8), offsets=(begin, 0))
        row = truth[DOWN].flatten()
        begin, end = ((0, 1), (1, 40), (40, 96))[rank]
        yield State(DOWN, 'weight', '', row[begin:end], shape=(8, 12), flat=(begin, end))
        column, begin, end = ((0, 0, 60), (5, 0, 60), (0, 60, 60))[rank]
        state = truth[f'exp_avg/{UP}']
        local = state[:, :5] if column == 0 else state[:, 5:]
        width = local.shape[1]
        row = local.flatten()
        end = min(end, len(row))
        yield State(UP, 'exp_avg', '', row[begin:end], shape=(12, 8), flat=(begin, end),
                    pieces=[((0, column), (12, column + width), (0, 0))],
                    local_shape=(12, width))
        if rank > 0:  # a stage that rank 0 is not of
            yield State(NORM, 'weight', '', truth[NORM], ranks=(1, 2))
            yield State(NORM, 'exp_avg', '', truth[f'exp_avg/{NORM}'], ranks=(1, 2))
        yield State(UP, 'step', '', truth[f'step/{UP}'])

    def collect(self):
        """What is asked of a collector."""
        names = [UP, DOWN, NORM][:2 if self.rank == 0 else 3]
        model = Model([(name, 'trainable') for name in names], per_rank=True,
                      layout='dp3_zero3')
        return model, list(self.states()), [('', names, library.state.hyper_parameters({'lr': 1.0}))]


def make_truth():
    """Whole states."""
    return {UP: torch.randn(12, 8), DOWN: torch.randn(8, 12).bfloat16(), NORM: torch.randn(8),
            f'exp_avg/{UP}': torch.randn(12, 8), f'exp_avg/{NORM}': torch.randn(8),
            f'step/{UP}': torch.tensor(3.0)}


@pytest.fixture(name='savers')
def savers_fixture(ckptfs):
    """savers(collectors): one for each rank, which end with the test."""
    made = []

    def start(collectors):
        wait_until(lambda: 'snapshots' in ckptfs.run('status', '--store', ckptfs.store, '--json',
                                                     check=False).stdout,
                   'the receiver')
        for rank, collector in enumerate(collectors):
            made.append(library.Saver(collector, 'job', ckptfs.store, rank=rank,
                                      world=len(collectors), job='x'))
        return made

    yield start
    for saver in made:
        saver.close()


def test_parts_of_all_kinds_are_whole_in_every_layout(ckptfs, savers):
    daemon, mount = ckptfs.start()
    truth = make_truth()
    ranks = savers([Parts(truth, rank) for rank in range(3)])
    assert all(saver.save(4) for saver in ranks)
    assert all(saver.wait_durable(4, 60) for saver in ranks)
    wait_until(lambda: durable_steps(ckptfs) == ['4'], 'the step on disk', daemon)
    view = os.path.join(step_of(mount, 'job', '4'), 'view')
    assert 'dp3_zero3' in os.listdir(view)
    for layout, world in (('tp1', 1), ('tp2', 2), ('dp2_tp2_zero1', 4), ('dp3_zero3', 3)):
        assert_equal(gathered(os.path.join(view, layout), world), truth)


def test_parts_that_leave_a_gap_are_no_step(ckptfs, savers):
    daemon, mount = ckptfs.start()
    truth = make_truth()
    collectors = [Parts(truth, rank) for rank in range(3)]
    ranks = savers(collectors)
    whole = collectors[1].states
    collectors[1].states = lambda: [
        s for s in whole() if (s.parameter, s.kind) != (UP, 'exp_avg')]
    assert all(saver.save(4) for saver in ranks)
    assert not any(saver.wait_durable(4, 60) for saver in ranks)
    collectors[1].states = whole
    assert all(saver.save(5) for saver in ranks)
    assert all(saver.wait_durable(5, 60) for saver in ranks)
    wait_until(lambda: durable_steps(ckptfs) == ['5'], 'the step on disk', daemon)
    assert ranks[0].status()['dropped'] == 1
    assert f"'{UP}' (exp_avg)" in ranks[0].status()['last_drop']
    assert os.listdir(os.path.join(mount, 'run', 'job', 'step')).count('4') == 0
