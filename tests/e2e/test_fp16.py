# SPDX-License-Identifier: Apache-2.0
"""fp16 with a dynamic loss scale: steps that overflow change no weight.

Real engines at ZeRO 0 to 3; DeepSpeed asks whether the CPU has fast fp16, and
is told so.  They overflow by a scale that is too large; without ZeRO, where 0.19.7
does not scale the loss, by a gradient that is infinite.  One save follows nothing
but skipped steps, one some steps that were taken and a last one that was not:
counters, masters and weights then tell of different numbers of steps, and none of
that is a defect.

Without ZeRO the first save's weights are not their masters, cast: 0.19.7 lets the
optimizer take a step with no gradient when it is made, whose weight decay reaches the
masters and, until a real step is taken, not the weights.
"""
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import daemon
import gather
import launch
from engine import build_engine, train
from tiny_model import Dims, Layout, Par

WORLD, SKIPPED, TAKEN = 2, 3, 3
GOOD, HUGE = 8, 40  # powers of two
DIMS = Dims(layers=1)
STAGES = (0, 1, 2, 3)
SAVES = [(stage, tag) for stage in STAGES for tag in ('early', 'late')]
MOMENTS = gather.moments_of


def engine_of(stage, more=None):
    """An engine in fp16."""
    from deepspeed.accelerator import get_accelerator
    get_accelerator().is_fp16_supported = lambda: True
    lay = Layout(stage=stage, dp=WORLD, dtype='fp32')
    return build_engine(DIMS, lay, {**(more or {}), 'fp16': {
        'enabled': True, 'loss_scale': 0, 'initial_scale_power': GOOD, 'hysteresis': 1,
        'loss_scale_window': 1000}}), lay


def skip(engine, lay, steps):
    """Steps that overflow."""
    before, hook = engine.skipped_steps, None
    if lay.stage:
        engine.optimizer.loss_scale = 2.0 ** HUGE
    else:
        first = next(engine.module.parameters())
        hook = first.register_hook(lambda g: torch.full_like(g, torch.inf))
    train(engine, DIMS, lay, engine.global_steps, steps)
    assert engine.skipped_steps == before + steps
    if hook:
        hook.remove()


def save(engine, lay, out, tag):
    """A checkpoint and its truth."""
    taken = engine.global_steps > engine.skipped_steps
    if not taken and lay.stage == 3:  # it makes its states with the first step
        gather.moments_of = lambda lay: ()
    truth, notes = gather.gather_state(engine, DIMS, lay, check_api=False)
    gather.moments_of = MOMENTS
    assert bool(notes['bit16_differs']) == (not taken and lay.stage == 0), notes
    engine.save_checkpoint(os.path.join(out, 'ckpt'), tag=tag)
    if Par.rank == 0:
        truth['skipped'] = torch.tensor(engine.skipped_steps)
        truth['step'] = torch.tensor([float(s) for s in gather.live_step(engine)])
        truth['scale'] = torch.tensor(float(engine.optimizer.loss_scale))
        save_file(truth, os.path.join(out, f'{tag}.safetensors'))


def worker(stage, out):
    engine, lay = engine_of(stage)
    skip(engine, lay, SKIPPED)
    save(engine, lay, out, 'early')
    engine.optimizer.loss_scale = 2.0 ** GOOD
    train(engine, DIMS, lay, engine.global_steps, TAKEN)
    assert engine.skipped_steps == SKIPPED
    skip(engine, lay, 1)
    save(engine, lay, out, 'late')


@pytest.fixture(scope='module')
def saved(request, tmp_path_factory):
    """(stage, folder) of checkpoints of one engine."""
    out = str(tmp_path_factory.mktemp(f'fp16_{request.param}'))
    log = os.path.join(out, 'rank')
    assert launch.launch(worker, WORLD, (request.param, out), log), launch.errors_of(log, WORLD)
    return request.param, out


def resume(stage, view, out, more):
    engine, lay = engine_of(stage, more)
    path, _ = engine.load_checkpoint(view)
    assert path is not None
    truth, _ = gather.gather_state(engine, DIMS, lay, check_api=False)
    truth['scale'] = torch.tensor(float(engine.optimizer.loss_scale))
    truth['skipped'] = torch.tensor(engine.skipped_steps)
    train(engine, DIMS, lay, engine.global_steps, 1)
    if Par.rank == 0:
        save_file(truth, out)


@pytest.mark.parametrize('saved,tag', SAVES, indirect=['saved'])
def test_skipped_steps_are_no_defects(ckptfs, saved, tag):
    stage, out = saved
    truth = load_file(os.path.join(out, f'{tag}.safetensors'))
    adopted = ckptfs.adopt(os.path.join(out, 'ckpt', tag), 'run').stderr
    said = ckptfs.run('verify', f'run/{tag}', '--store', ckptfs.store).stdout.splitlines()
    # Before the first step nothing proves whose the numbered masters are: decay changed them.
    apart = (stage, tag) == (0, 'early')
    assert ('left out: the optimizer' in adopted) == apart, adopted
    assert len(said) == 1 and said[-1].endswith(': 0 defects'), said
    view = os.path.join(daemon.step_of(ckptfs.mount(), 'run', tag), 'view', 'tp1')
    model = torch.load(os.path.join(view, 'rank0', 'model.pt'))
    states = torch.load(os.path.join(view, 'rank0', 'optimizer.pt'))
    compared = 0
    for key, want in truth.items():
        kind, _, name = key.partition('/')
        if not name or (apart and kind not in ('weight', 'buffer')):
            continue
        got = (model[name] if kind in ('weight', 'buffer')
               else states[f'{ {"model": "master"}.get(kind, kind) }/{name}'])
        assert got.dtype == want.dtype and torch.equal(got, want), key
        compared += 1
    assert compared > (4 if apart else 20) and {t.dtype for t in model.values() if t.dim() > 1} == {torch.float16}
    if apart:
        return
    steps = {float(t) for k, t in states.items() if k.startswith('step/')}
    assert steps == {float(t) for t in truth['step']}
    check_documents(os.path.join(view, 'deepspeed', tag), truth, stage)
    # An engine of another precision keeps what its own configuration says.
    other = os.path.join(os.path.dirname(view), 'tp1_bf16', 'deepspeed', tag, 'zero', 'optimizer_state.pt')
    assert not {'loss_scaler', 'dynamic_loss_scale'} & set(torch.load(other, weights_only=False))


def check_documents(folder, truth, stage):
    """The counters, and what the loss scale is."""
    counters = torch.load(os.path.join(folder, 'mp_rank_00_model_states.pt'), weights_only=False)
    assert counters['skipped_steps'] == int(truth['skipped'])
    common = torch.load(os.path.join(folder, 'zero', 'optimizer_state.pt'), weights_only=False)
    scale = common['cur_scale'] if stage == 0 else common['loss_scaler'].cur_scale
    assert float(scale) == float(truth['scale'])


# Without ZeRO the loss scale has another form; its weights are compared above.
# DeepSpeed's loader asks for moments, which there are after the first step that is taken.
@pytest.mark.parametrize('saved', STAGES[1:], indirect=True)
@pytest.mark.parametrize('tag', ['late'])
@pytest.mark.parametrize('target', [1, 3])
@pytest.mark.parametrize('form', ['deepspeed', 'deepspeed_native'])
def test_an_engine_goes_on(ckptfs, saved, tag, target, form, tmp_path):
    stage, out = saved
    ckptfs.adopt(os.path.join(out, 'ckpt', tag), 'run')
    view = os.path.join(daemon.step_of(ckptfs.mount(), 'run', tag), 'view', f'dp2_zero{target}', form)
    more = {'checkpoint': {'load_universal': form == 'deepspeed'}}
    if stage != 3:  # its configuration has no size of sub-groups, so native ones have DeepSpeed's own
        more['zero_optimization'] = {'stage': target, 'stage3_param_persistence_threshold': 0}
    got, log = str(tmp_path / 'got.safetensors'), str(tmp_path / 'rank')
    assert launch.launch(resume, WORLD, (target, view, got, more), log), launch.errors_of(log, WORLD)
    got, want = load_file(got), load_file(os.path.join(out, f'{tag}.safetensors'))
    assert all(torch.equal(got[k], t) for k, t in want.items() if k != 'step')
