# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed jobs that save every iteration and are killed: every step that is visible
is the engine's state of that moment, and the newest goes on in another layout.

The truth is gathered from the live engine by collectives (gather.py), and what is
gone on with is an unmodified engine that reads a universal view.  CKPTFS_LONG=1: 50
iterations, and all cases.
"""
import json
import os
from dataclasses import asdict, dataclass, replace

import pytest
import torch
import torch.multiprocessing as mp
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file, save_file

import launch
import load_deepspeed
from daemon import step_of, wait_until
from deepspeed_jobs import engine_of, run
from engine import train
from gather import gather_state, live_step
from killed_jobs import kill, losses_of, note
from make_deepspeed import client_state
from ports import held_port
from tiny_model import Dims, Layout, Par

LONG = bool(os.environ.get('CKPTFS_LONG'))
ITERATIONS = 50 if LONG else 6
AFTER = 3
DIMS = Dims(layers=1)
# A changed order of sums moves this model's loss less (tests/e2e/matrix.py).
NOISE = 0.01
FP16 = {'fp16': {'enabled': True, 'loss_scale': 0, 'initial_scale_power': 8, 'hysteresis': 1}}
ONE_SUB_GROUP = 10**9  # with more the stage-3 loader counts steps wrongly


@dataclass(frozen=True)
class Case:
    """A job, and the engine that goes on."""
    name: str
    source: Layout
    target: Layout
    exact: bool = False   # the target adds up gradients in the source's order
    half: bool = False    # fp16
    quick: bool = False   # not only in the long run


CASES = [
    Case('zero1_bf16_dp2_to_zero2_dp2', Layout(stage=1, dp=2), Layout(stage=2, dp=2), True),
    Case('bf16_optimizer_dp2_to_dp1', Layout(stage=1, dp=2, grad32=True, groups=2),
         Layout(stage=1, dp=1, grad32=True, groups=2)),
    Case('zero2_fp16_dp2_to_zero1_dp2', Layout(stage=2, dp=2, dtype='fp32'),
         Layout(stage=1, dp=2, dtype='fp32'), True, half=True, quick=True),
    Case('zero2_rr_dp3_to_zero1_dp2', Layout(stage=2, dp=3, round_robin=True),
         Layout(stage=1, dp=2)),
    Case('zero3_dp2_to_zero1_dp2', Layout(stage=3, dp=2, sub_group=3000),
         Layout(stage=1, dp=2), quick=True),
    Case('zero2_dp2_to_zero3_dp2', Layout(stage=2, dp=2), Layout(stage=3, dp=2)),
    Case('pp2_dp1_to_dp2', Layout(stage=1, pp=2, pipe=True), Layout(stage=1, dp=2), quick=True),
    Case('pp2_dp2_tied_to_zero2_dp1', Layout(stage=1, dp=2, pp=2, pipe=True, tied=True),
         Layout(stage=2, dp=1, tied=True)),
]


def target_of(case):
    """The engine that goes on."""
    more = {'sub_group': ONE_SUB_GROUP} if case.target.stage == 3 else {}
    return replace(case.target, universal=True, **more)


def extra_of(case):
    """More of an engine's configuration."""
    if case.half:
        get_accelerator().is_fp16_supported = lambda: True
    return FP16 if case.half else {}


def job(out, store, mount, case):
    """Saves every iteration until it is killed, or the last is durable."""
    lay = case.source
    engine = engine_of(DIMS, lay, store, more=extra_of(case), mount=mount)
    for done in range(1, ITERATIONS + 1):
        (loss,) = train(engine, DIMS, lay, done - 1, 1)
        truth, _ = gather_state(engine, DIMS, lay, check_api=False)
        if Par.rank == 0:
            truth['step'] = torch.tensor(live_step(engine)[0])
            save_file(truth, os.path.join(out, f'{done}.safetensors'))
            note(os.path.join(out, 'losses'), loss)
        engine.save_checkpoint(os.path.join(out, 'save'),
                               client_state=client_state(DIMS, lay, done))
    engine.checkpoint_engine.snap.wait_durable(ITERATIONS, 60)


def uninterrupted(out, case):
    """The losses of the same job, which knows nothing of us."""
    engine = engine_of(DIMS, case.source, '', more=extra_of(case))
    losses = train(engine, DIMS, case.source, 0, ITERATIONS + AFTER)
    if Par.rank == 0:
        with open(os.path.join(out, 'reference'), 'w', encoding='utf-8') as file:
            json.dump(losses, file)


def killed(out, args, world, seed):
    """Runs a job and kills a rank of it, then the others, at some iteration."""
    context = mp.get_context('fork')
    with held_port() as port:
        ranks = [context.Process(target=launch._child, args=(r, job, world, port, args,
                                                             os.path.join(out, 'rank')))
                 for r in range(world)]
        for rank in ranks:
            rank.start()
        return kill(ranks, os.path.join(out, 'losses'), ITERATIONS, seed)


def compare(view, truth):
    """Every tensor of a step against what the engine held."""
    model = torch.load(os.path.join(view, 'rank0', 'model.pt'))
    states = torch.load(os.path.join(view, 'rank0', 'optimizer.pt'))
    for key, want in truth.items():
        kind, _, name = key.partition('/')
        if not name:
            continue
        got = model[name] if kind in ('weight', 'buffer') else states[
            f'{"master" if kind == "model" else kind}/{name}']
        assert got.dtype == want.dtype and torch.equal(got, want), (view, key)
    steps = {float(t) for k, t in states.items() if k.startswith('step/')}
    assert steps == {float(truth['step'])}, view
    return len(truth)


def check_steps(out, mount, case):
    """All visible steps; the newest one's number."""
    layout = 'tp1_plain' if case.source.pipe else 'tp1'
    steps = os.path.join(mount, 'run', 'job', 'step')
    wait_until(lambda: os.listdir(steps), 'a step')
    names = os.listdir(steps)
    numbers = sorted(int(n.removeprefix('global_step')) for n in names)
    for number in numbers:
        view = os.path.join(step_of(mount, 'job', f'global_step{number}'), 'view', layout)
        assert compare(view, load_file(os.path.join(out, f'{number}.safetensors'))) > 20
    return numbers


@pytest.mark.parametrize('case', [c for c in CASES if LONG or c.quick], ids=lambda c: c.name)
def test_a_killed_job_goes_on_in_another_layout(ckptfs, tmp_path, case):
    _, mount = ckptfs.start()
    out = str(tmp_path)
    run(uninterrupted, case.source.world, (out, case), out)
    with open(os.path.join(out, 'reference'), encoding='utf-8') as file:
        reference = json.load(file)
    at = killed(out, (out, ckptfs.store, mount, case), case.source.world, case.name)
    losses = losses_of(os.path.join(out, 'losses'))
    assert losses == reference[:len(losses)]  # saving changes nothing
    numbers = check_steps(out, mount, case)
    newest = numbers[-1]
    with open(os.path.join(out, 'meta.json'), 'w', encoding='utf-8') as file:
        json.dump({'dims': asdict(DIMS), 'layout': asdict(case.source)}, file)
    with open(os.path.join(out, 'losses.json'), 'w', encoding='utf-8') as file:
        json.dump({'after': reference[newest:newest + AFTER]}, file)
    target = target_of(case)
    naming = '_plain' if case.source.pipe and not target.pipe else ''
    view = os.path.join(step_of(mount, 'job', f'global_step{newest}'), 'view',
                        f'dp{target.dp}_zero{target.stage}{naming}', 'deepspeed')
    code, report = load_deepspeed.load(view, os.path.join(out, f'{newest}.safetensors'), target,
                                       steps=AFTER, extra=extra_of(case))
    print(f'{case.name}: killed after {at}, {len(numbers)} visible, newest {newest}, '
          f'loss off by {report.get("loss_diff")}')
    assert code == 0, report
    assert report['global_steps'] == newest
    assert report['loss_diff'] == 0 if case.exact else report['loss_diff'] < NOISE, report
