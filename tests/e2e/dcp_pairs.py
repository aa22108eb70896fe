# SPDX-License-Identifier: Apache-2.0
"""Pairs of the matrix with DCP at the end: what torch.distributed.checkpoint loads of every source
that is not its own (dcp_sources.py has those).

An unmodified dcp.load fills the same model on each mesh: DeepSpeed's sources the fixture's model and
its optimizer (every master, moment, buffer and step must equal the truth bit for bit, strictly),
models of transformers the model (every entry of the state_dict).
"""
import gc
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
import models  # noqa: E402
from cells import MESHES, Target  # noqa: E402
from engine import base_optimizer, param_groups  # noqa: E402
from tiny_model import CausalLM, Dims  # noqa: E402
from variants import SIZES, VARIANTS  # noqa: E402

# How tensor parallelism cuts the fixture's model.
CUTS = {r'.*(embed_tokens|lm_head|qkv_proj|gate_up_proj)\.(weight|bias)': 0,
        r'.*(o_proj|down_proj)\.weight': 1}
# What torch says of a view that lacks what it asks for -> why it does.
REST = '; all the rest is exact with `planner=DefaultLoadPlanner(allow_partial_load=True)`'
WHY_REFUSED = {
    'Missing key in checkpoint state_dict: model.lm_head.weight':
        'a pipeline has one name for a tied weight, and nothing tells the second one of a plain '
        f'module: a strict load misses `model.lm_head.weight`{REST}, which fills a tied weight by its other name',
    'Missing key in checkpoint state_dict: optim.param_groups.0.weight_decay':
        'the elastic form of ZeRO-1 saves no hyper-parameters: a strict load misses '
        f'`optim.param_groups.0.weight_decay`{REST}, and the groups keep the rates that they were made with'}
# Of files that name a model's experts one by one.
EXPERTS = ('mixtral', 'Missing key in checkpoint state_dict: model.model.layers.0.mlp.')


def pairs():
    """Every pair that can be run."""
    return [Target(source, mesh, mesh) for source in (*VARIANTS, *huggingface_pairs.SOURCES)
            for mesh in MESHES]


def sample():
    """An engine's checkpoint and a model's; test_dcp.py has one of every mesh."""
    return [Target('tp2', 'fsdp2_tp2', 'fsdp2_tp2'), Target('gpt2_zero1', 'fsdp2', 'fsdp2')]


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
    """What is wrong with a load without a module: one of DeepSpeed's own experts is made by DeepSpeed alone."""
    load = dcp_loads.Load(mesh, None, None)
    found = dcp_loads.run(view, load, dcp_loads.bare_worker)['tensors']
    truth, tensors = load_file(daemon.truth_of(variant)), {}
    if not VARIANTS[variant].stage:  # whose states have no names: weights alone are adopted
        truth = {k: v for k, v in truth.items() if k.split('/')[0] in ('weight', 'buffer')}
    for key, value in found.items():
        top, _, name = key.partition('.')
        kind = ('buffer' if f'buffer/{name}' in truth else 'model') if top == 'model' else key.rpartition('.')[2]
        if top != 'model':
            name = name.removeprefix('state.').removesuffix(f'.{kind}')
        tensors[f'{kind}/{name}'] = value
    return wrong_of({'tensors': tensors}, truth)


def check(step, variant, mesh):
    """(what is wrong, why torch refuses it) of a pair."""
    words = [MESHES[mesh], 'fp32'] if variant in VARIANTS else [MESHES[mesh]]
    if variant not in VARIANTS:
        name, _ = huggingface_pairs.SOURCES[variant]
        load = dcp_loads.Load(mesh, lambda: models.rounded(models.make(name, seed=5)), None,
                              model_only=True)
        try:
            found = dcp_loads.run(os.path.join(step, 'view', '_'.join(words), 'dcp'), load)
        except AssertionError as e:
            if variant != EXPERTS[0] or EXPERTS[1] not in str(e):
                raise
            return [], huggingface_pairs.ONE_BY_ONE
        return huggingface_pairs.differ(found['tensors'],
                                        huggingface_pairs.truth_of(variant)[0]), None
    words += ['plain'] if cases.is_pipe(VARIANTS[variant]) else []
    view = os.path.join(step, 'view', '_'.join(words), 'dcp')
    if VARIANTS[variant].moe:
        return bare(view, variant, mesh), None
    try:
        found = dcp_loads.run(view, tiny_load(variant, mesh))
    except AssertionError as e:
        why = next((text for said, text in WHY_REFUSED.items() if said in str(e)), None)
        if why is None:
            raise
        found = dcp_loads.run(view, tiny_load(variant, mesh, partial=True))
        return wrong_of(found, load_file(daemon.truth_of(variant))), why
    return wrong_of(found, load_file(daemon.truth_of(variant))), None


def run(mount, pair):
    """One pair; its record."""
    try:
        wrong, why = check(daemon.step_of(mount, pair.source), pair.source, pair.target)
    except (AssertionError, OSError, RuntimeError, ValueError) as e:
        return {'ok': False, 'errors': [str(e)[-300:]]}
    refused = {'state': 'refused', 'why': why} if why else {}
    alone = pair.source in VARIANTS and VARIANTS[pair.source].moe and not VARIANTS[pair.source].stage
    return {'ok': not wrong, 'different': wrong[:5], 'layout': MESHES[pair.target], 'module_only': bool(alone), **refused}


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
