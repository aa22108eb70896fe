# SPDX-License-Identifier: Apache-2.0
"""FSDP2 jobs that save every iteration and are killed: every step that is visible is what the live
job held at that moment, and the newest goes on in another layout by torch's own loader.

CKPTFS_LONG=1: 50 iterations, and all cases.
"""
import os
from dataclasses import dataclass

import ckptfs as snapshots
import pytest
import sharded_trainer
import snapshot_trainer
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from daemon import step_of, wait_until
from gathered import assert_equal, gathered
from killed_jobs import kill, losses_of, note
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

LONG = bool(os.environ.get('CKPTFS_LONG'))
ITERATIONS = 50 if LONG else 6
AFTER = 3
# A changed order of sums moves this model's loss less.
NOISE = 1e-4
VOCAB = 301


@dataclass(frozen=True)
class Layout:
    """How a job's parameters lie: `one` process, FSDP2 (`fsdp`), FSDP2 x TP 2 (`grid`)."""
    kind: str
    world: int

    @property
    def parts(self):
        """How many ranks share out a batch."""
        return self.world // 2 if self.kind == 'grid' else self.world

    def part(self, rank):
        """Returns the number of the part that a rank has."""
        return rank // 2 if self.kind == 'grid' else rank


@dataclass(frozen=True)
class Case:
    """A job, and the one that goes on."""
    source: Layout
    target: Layout
    quick: bool = False  # not only in the long run

    def __str__(self):
        return '_to_'.join(f'{one.kind}{one.world}' for one in (self.source, self.target))


CASES = [Case(Layout('fsdp', 2), Layout('fsdp', 2)),
         Case(Layout('fsdp', 2), Layout('one', 1), quick=True),
         Case(Layout('fsdp', 4), Layout('grid', 4)),
         Case(Layout('grid', 4), Layout('fsdp', 2), quick=True),
         Case(Layout('one', 1), Layout('fsdp', 4))]


class Training:
    """One rank's."""

    def __init__(self, layout, rank):
        torch.manual_seed(0)
        self._layout, self._rank = layout, rank
        self.net = (snapshot_trainer.Net() if layout.kind == 'one'
                    else sharded_trainer.build(layout.kind, layout.world))
        if layout.kind == 'one':  # as sharded_trainer builds it
            self.net.model.norm = sharded_trainer.Gained()
            self.net.lm_head.weight = self.net.model.embed_tokens.weight
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def step(self, number):
        """The loss of an update, of all ranks' parts."""
        tokens = torch.randint(VOCAB, (4, 16), generator=torch.Generator().manual_seed(number))
        mine = tokens.chunk(self._layout.parts)[self._layout.part(self._rank)]
        loss = torch.nn.functional.cross_entropy(self.net(mine).flatten(0, 1), mine.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach() / self._layout.world
        torch.distributed.all_reduce(mean)
        return mean.item()

    def truth(self):
        """Returns what a save has to hold; collective."""
        found = dict(self.net.state_dict())
        found = {name: one.clone() for name, one in found.items() if 'inv_freq' in name}
        for name, parameter in self.net.named_parameters():
            found[name] = sharded_trainer.full(parameter)
            for kind, value in self.optimizer.state[parameter].items():
                found[f'{kind}/{name}'] = sharded_trainer.full(value)
        return found


def uninterrupted(layout, rank, out):
    """The losses of the same job, which knows nothing of us."""
    training = Training(layout, rank)
    for number in range(ITERATIONS + AFTER):
        loss = training.step(number)
        if rank == 0:
            note(f'{out}/reference', loss)


def saving(layout, rank, out, store):
    """Saves every iteration until it is killed, or the last is durable."""
    training = Training(layout, rank)
    snap = snapshots.Snapshotter(training.net, training.optimizer, 'job', store, slots=4)
    for number in range(ITERATIONS):
        loss = training.step(number)
        truth = training.truth()
        if rank == 0:
            torch.save(truth, f'{out}/truth-{number}.pt')
            note(f'{out}/losses', loss)
        snap.save(number)
    snap.wait_durable(ITERATIONS - 1, 60)


def going_on(layout, rank, out, view, newest):
    """By what torch has for it."""
    training = Training(layout, rank)
    model, states = get_state_dict(training.net, training.optimizer)
    dcp.load({'model': model, 'optim': states}, checkpoint_id=view)
    set_state_dict(training.net, training.optimizer, model_state_dict=model,
                   optim_state_dict=states)
    for number in range(newest + 1, newest + 1 + AFTER):
        loss = training.step(number)
        if rank == 0:
            note(f'{out}/after', loss)


def child(work, layout, rank, out, args):
    """One rank of a job."""
    torch.set_num_threads(1)
    for name, size in {**sharded_trainer.SIZES, 'VOCAB': VOCAB}.items():
        setattr(snapshot_trainer, name, size)
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{out}/meet-{work.__name__}', rank=rank,
        world_size=layout.world)
    work(layout, rank, out, *args)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads take their time


def start(work, layout, out, *args):
    """The ranks of a job."""
    context = mp.get_context('fork')
    ranks = [context.Process(target=child, args=(work, layout, rank, out, args))
             for rank in range(layout.world)]
    for rank in ranks:
        rank.start()
    return ranks


def run(work, layout, out, *args):
    """To its end."""
    ranks = start(work, layout, out, *args)
    for rank in ranks:
        rank.join(240)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0] * layout.world, (work.__name__, codes)


@pytest.mark.parametrize('case', [c for c in CASES if LONG or c.quick], ids=str)
def test_a_killed_job_goes_on_in_another_layout(ckptfs, tmp_path, case):
    _, mount = ckptfs.start()
    out, source = str(tmp_path), case.source
    run(uninterrupted, source, out)
    reference = losses_of(f'{out}/reference')
    at = kill(start(saving, source, out, ckptfs.store), f'{out}/losses', ITERATIONS, str(case))
    losses = losses_of(f'{out}/losses')
    assert losses == reference[:len(losses)]  # saving changes nothing
    steps = os.path.join(mount, 'run', 'job', 'step')
    wait_until(lambda: os.listdir(steps), 'a step')
    numbers = sorted(map(int, os.listdir(steps)))
    for number in numbers:
        view = os.path.join(step_of(mount, 'job', str(number)), 'view', 'tp1')
        assert_equal(gathered(view, 1), torch.load(f'{out}/truth-{number}.pt'))
    newest, target = numbers[-1], case.target
    view = os.path.join(step_of(mount, 'job', str(newest)), 'view', f'dp{target.world}', 'dcp')
    run(going_on, target, out, view, newest)
    after = losses_of(f'{out}/after')
    wanted = reference[newest + 1:newest + 1 + AFTER]
    print(f'{case}: killed after {at}, {len(numbers)} visible, newest {newest}, losses {after}')
    assert len(after) == len(wanted)
    off = max(abs(mine - theirs) for mine, theirs in zip(after, wanted))
    assert off == 0 if source == target else off < NOISE, (after, wanted)
