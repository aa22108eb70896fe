# SPDX-License-Identifier: Apache-2.0
"""Pairs of the matrix with DCP at the end: what torch.distributed.checkpoint loads of every source
that is not its own (dcp_sources.py has those).

An unmodified dcp.load fills the same model and its optimizer on each mesh: every master, moment, buffer and
step must equal the truth bit for bit, strictly, and the next losses those of a model on the same mesh that
torch itself filled with the truth.  A Hugging Face directory has weights alone: these fill it.
"""
import functools
import gc
import json
import os
import sys
import tempfile
from dataclasses import replace

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.path.insert(0, os.path.join(HERE, '..', 'fixtures', 'deepspeed'))

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import cases  # noqa: E402
import daemon  # noqa: E402
import dcp_loads  # noqa: E402
import huggingface_pairs  # noqa: E402
import make_huggingface  # noqa: E402
import models  # noqa: E402
import torch_jobs  # noqa: E402
from cells import MESHES, Target  # noqa: E402
from engine import base_optimizer, batch_of, param_groups  # noqa: E402
from tiny_model import CausalLM, Dims  # noqa: E402
from variants import SIZES, VARIANTS  # noqa: E402

# How tensor parallelism cuts the fixture's model.
CUTS = {r'.*(embed_tokens|lm_head|qkv_proj|gate_up_proj)\.(weight|bias)': 0,
        r'.*(o_proj|down_proj)\.weight': 1}
# Maps what torch says of a view that lacks what it asks for to the reason.
REST = '; all the rest is exact with `planner=DefaultLoadPlanner(allow_partial_load=True)`'
WHY_REFUSED = {
    'Missing key in checkpoint state_dict: model.lm_head.weight':
        'a pipeline has one name for a tied weight, and nothing tells the second one of a plain '
        f'module: a strict load misses `model.lm_head.weight`{REST}, which fills a tied weight by its other name',
    'Missing key in checkpoint state_dict: optim.param_groups.0.weight_decay':
        'the elastic form of ZeRO-1 saves no hyper-parameters: a strict load misses '
        f'`optim.param_groups.0.weight_decay`{REST}, and the groups keep the rates that they were made with'}
NO_HYPER_PARAMETERS = WHY_REFUSED['Missing key in checkpoint state_dict: optim.param_groups.0.weight_decay']
NO_MODULE = "read tensor by tensor: the module is one that DeepSpeed alone makes, and takes no step"
STEPS = 2
# For files that name a model's experts one by one.
EXPERTS = ('mixtral', 'Missing key in checkpoint state_dict: model.model.layers.0.mlp.')


def pairs():
    """Every pair that can be run."""
    return [Target(source, mesh, mesh) for source in (*VARIANTS, *huggingface_pairs.SOURCES)
            for mesh in MESHES]


def sample():
    """An engine's checkpoint and a model's; test_dcp.py has one of every mesh."""
    return [Target('tp2', 'fsdp2_tp2', 'fsdp2_tp2'), Target('gpt2_zero1', 'fsdp2', 'fsdp2')]


def tiny_step(dims, model, optimizer, number, rank, ranks):
    """One update on the batch of the variant's own run; this rank's loss."""
    loss = model(*batch_of(dims, number, rank, ranks))
    return dcp_loads.update(loss, model, optimizer)


def whole(truth):
    """A truth's masters, buffers, what is not trained, and states, as torch fills a model with them."""
    of_kind = {}
    for key, tensor in truth.items():
        kind, _, name = key.partition('/')
        of_kind.setdefault(kind, {})[name] = tensor
    state, kinds = {}, [kind for kind in torch_jobs.STATES if kind in of_kind]
    for name in of_kind.get(kinds[0], {}) if kinds else ():
        state[name] = {kind: of_kind[kind][name].float() for kind in kinds}
        state[name].update({'step': truth['step']} if 'step' in truth else {})
    return {'model': {**of_kind.get('weight', {}), **of_kind.get('model', {}), **of_kind.get('buffer', {})},
            'optim': {'state': state}}


def trained(variant, mesh, truth, **more):
    """tiny_load, and the steps after it."""
    dims = replace(Dims(), **SIZES.get(variant, {}))
    with open(os.path.join(os.path.dirname(daemon.truth_of(variant)), 'losses.json'), encoding='utf-8') as f:
        first = json.load(f)['first_step']
    return tiny_load(variant, mesh, step=functools.partial(tiny_step, dims), steps=STEPS, first_step=first,
                     native=whole(truth), plan=functools.partial(dcp_loads.whole_in_forward, cuts=CUTS), **more)


def tiny_load(variant, mesh, **more):
    """A load into the model that a variant trained."""
    lay, dims = VARIANTS[variant], replace(Dims(), **SIZES.get(variant, {}))

    def model():
        made = CausalLM(dims, replace(lay, tp=1, autotp=0))
        for name, parameter in made.named_parameters():
            if lay.frozen and 'layers.0.mlp' in name:
                parameter.requires_grad_(False)
        return made
    return dcp_loads.Load(mesh, model,
                          lambda made: base_optimizer(param_groups(made, lay), lay),
                          cuts=CUTS, **more)


def wrong_of(found, truth):
    """Names of what is not the live engine's: every tensor, and no other."""
    tensors = dict(found['tensors'])
    steps = {float(tensors.pop(k)) for k in list(tensors) if k.startswith('step/')}
    expected = {k: v for k, v in truth.items() if k != 'step' and not k.startswith('weight/')}
    # A parameter that is not trained has no master.
    expected.update({'model' + k[6:]: v for k, v in truth.items()
                     if k.startswith('weight/') and 'model' + k[6:] not in expected})
    wrong = sorted(tensors.keys() ^ expected.keys())
    wrong += [k for k, v in expected.items() if k in tensors
              and not torch.equal(tensors[k], v.to(tensors[k].dtype))]
    if 'step' in truth and steps != {float(truth['step'])}:
        wrong.append('step')
    return wrong


def bare(view, variant, mesh):
    """Returns what is wrong with a load without a module: one of DeepSpeed's own experts is made by
    DeepSpeed alone."""
    load = dcp_loads.Load(mesh, None, None)
    found = dcp_loads.run(view, load, dcp_loads.bare_worker)['tensors']
    truth, tensors = load_file(daemon.truth_of(variant)), {}
    if not VARIANTS[variant].stage:  # its states have no names: weights alone are adopted
        truth = {k: v for k, v in truth.items() if k.split('/')[0] in ('weight', 'buffer')}
    for key, value in found.items():
        top, _, name = key.partition('.')
        kind = ('buffer' if f'buffer/{name}' in truth else 'model') if top == 'model' else key.rpartition('.')[2]
        if top != 'model':
            name = name.removeprefix('state.').removesuffix(f'.{kind}')
        tensors[f'{kind}/{name}'] = value
    return wrong_of({'tensors': tensors}, truth)


def weights_of(step, variant, mesh):
    """Returns what is wrong with the 16-bit weights that a model is filled with, and no
    optimizer."""
    name, _ = huggingface_pairs.SOURCES[variant]
    load = dcp_loads.Load(mesh, lambda: models.rounded(models.make(name, seed=5)), None, model_only=True)
    found = dcp_loads.run(os.path.join(step, 'view', MESHES[mesh], 'dcp'), load)
    return huggingface_pairs.differ(found['tensors'], huggingface_pairs.truth_of(variant)[0])


def of_transformers(step, variant, mesh):
    """The record of a model of transformers."""
    name, engine = huggingface_pairs.SOURCES[variant]
    try:
        wrong = weights_of(step, variant, mesh)
    except AssertionError as e:
        if variant != EXPERTS[0] or EXPERTS[1] not in str(e):
            raise
        return {'layout': MESHES[mesh], 'ok': True, 'state': 'refused', 'why': huggingface_pairs.ONE_BY_ONE}
    if engine is None or wrong:
        return {'layout': MESHES[mesh], 'ok': not wrong, 'different': wrong[:5], 'module_only': engine is None}
    truth, layout = huggingface_pairs.states_of(variant), f'{MESHES[mesh]}_fp32'
    load = dcp_loads.Load(mesh, lambda: models.make(name, seed=5), make_huggingface.optimizer_of,
                          huggingface_pairs.torch_step, first_step=make_huggingface.STEPS, steps=STEPS,
                          native=whole(truth),
                          plan=functools.partial(dcp_loads.whole_in_forward, cuts=huggingface_pairs.CUTS[name]))
    return judged(layout, dcp_loads.run(os.path.join(step, 'view', layout, 'dcp'), load), truth)


def judged(layout, found, truth):
    """The record of a load that went on."""
    wrong = wrong_of(found, truth)
    diff = max(abs(a - b) for a, b in zip(found['losses'], found['native'], strict=True))
    return {'layout': layout, 'ok': not wrong and diff == 0, 'different': wrong[:5], 'loss_diff': diff,
            'exact_losses': True}


def of_tiny(step, variant, mesh):
    """The record of the fixture's model."""
    source, truth = VARIANTS[variant], load_file(daemon.truth_of(variant))
    layout = '_'.join([MESHES[mesh], 'fp32', *(['plain'] if cases.is_pipe(source) else [])])
    view = os.path.join(step, 'view', layout, 'dcp')
    if source.moe:
        wrong = bare(view, variant, mesh)
        return {'layout': layout, 'ok': not wrong, 'different': wrong[:5], 'note': NO_MODULE,
                'module_only': not source.stage}
    try:
        return judged(layout, dcp_loads.run(view, trained(variant, mesh, truth)), truth)
    except AssertionError as e:
        why = next((text for said, text in WHY_REFUSED.items() if said in str(e)), None)
        if why is None:
            raise
    load = trained(variant, mesh, truth, partial=True, own_rates=why == NO_HYPER_PARAMETERS)
    record = judged(layout, dcp_loads.run(view, load), truth)
    return {**record, 'state': 'refused', 'why': why} if record['ok'] else record


def run(mount, pair):
    """One pair; its record."""
    check = of_tiny if pair.source in VARIANTS else of_transformers
    try:
        return check(daemon.step_of(mount, pair.source), pair.source, pair.target)
    except (AssertionError, OSError, RuntimeError, ValueError) as e:
        return {'ok': False, 'errors': [str(e)[-300:]]}


def run_all(wanted):
    """Adopt, mount, run (source, mesh) pairs; their records."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        program = daemon.Ckptfs(folder)
        try:
            for variant in dict.fromkeys(v for v, _ in wanted):
                if variant in VARIANTS:
                    program.adopt_variant(variant)
                else:
                    program.adopt(huggingface_pairs.source(variant), variant)
            mount = program.mount()
            for variant, mesh in wanted:
                records.append({'pair': (variant, mesh),
                                **run(mount, Target(variant, mesh, mesh))})
            gc.collect()
            program.umount(mount)
        finally:
            program.close()
    return records
