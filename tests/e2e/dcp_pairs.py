# SPDX-License-Identifier: Apache-2.0
"""Load the view dcp/ of every source with torch.distributed.checkpoint, at several meshes.

Usage: dcp_pairs.py [--variant V ...] [--table FILE]

Adopts the fixture checkpoints into one store, mounts it once, and lets an unmodified dcp.load fill
the same model on each mesh: DeepSpeed's sources the fixture's model and its optimizer (every master,
moment, buffer and step must equal the truth bit for bit, strictly), models of transformers the
model (every entry of the state_dict). --table replaces the part of docs/compatibility.md behind
its second heading. Exit code 0 only if every pair held.
"""
import argparse
import datetime
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
import models  # noqa: E402
from engine import base_optimizer, param_groups  # noqa: E402
from tiny_model import CausalLM, Dims  # noqa: E402
from variants import SIZES, VARIANTS  # noqa: E402

# mesh -> the layout that is cut for it
MESHES = {'fsdp2': 'dp2', 'fsdp3': 'dp3', 'hsdp2x2': 'dp2', 'fsdp2_tp2': 'tp2_dp2', 'ddp1': 'tp1'}
# How tensor parallelism cuts the fixture's model.
CUTS = {r'.*(embed_tokens|lm_head|qkv_proj|gate_up_proj)\.(weight|bias)': 0,
        r'.*(o_proj|down_proj)\.weight': 1}
HEADING = '## PyTorch Distributed Checkpoint'
WHY_NOT = {'e': "a module of DeepSpeed's own experts is made by DeepSpeed alone",
           'f': 'a pipeline has one name for a tied weight, and nothing tells the second one of a plain '
                'module: DCP says `Missing key in checkpoint state_dict: model.lm_head.weight`',
           'g': 'the elastic form of ZeRO-1 saves no hyper-parameters: DCP says `Missing key in '
                'checkpoint state_dict: optim.param_groups.0.weight_decay`'}


def why_not(variant):
    """The letter of why a source cannot be loaded so, or None."""
    source = VARIANTS.get(variant)
    if source is None:
        return None
    if source.moe:
        return 'e'
    if source.elastic:
        return 'g'
    return 'f' if source.tied and cases.is_pipe(source) else None


def everything():
    """Every pair that can be run."""
    return [(source, mesh) for source in (*VARIANTS, *huggingface_pairs.SOURCES)
            for mesh in MESHES if not why_not(source)]


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


def check(step, variant, mesh):
    """What is wrong with a pair."""
    words = [MESHES[mesh], 'fp32'] if variant in VARIANTS else [MESHES[mesh]]
    if variant in VARIANTS:
        words += ['plain'] if cases.is_pipe(VARIANTS[variant]) else []
        view = os.path.join(step, 'view', '_'.join(words), 'dcp')
        found = dcp_loads.run(view, tiny_load(variant, mesh))
        return wrong_of(found, load_file(daemon.truth_of(variant)))
    name, _ = huggingface_pairs.SOURCES[variant]
    load = dcp_loads.Load(mesh, lambda: models.rounded(models.make(name, seed=5)), None,
                          model_only=True)
    found = dcp_loads.run(os.path.join(step, 'view', '_'.join(words), 'dcp'), load)
    return huggingface_pairs.differ(found['tensors'], huggingface_pairs.truth_of(variant)[0])


def run(mount, variant, mesh):
    """One pair; returns its record."""
    record = {'variant': variant, 'mesh': mesh}
    try:
        wrong = check(daemon.step_of(mount, variant), variant, mesh)
    except (AssertionError, OSError, RuntimeError, ValueError) as e:
        return {**record, 'ok': False, 'errors': [str(e)[-300:]]}
    return {**record, 'ok': not wrong, 'different': wrong[:5]}


def run_all(pairs):
    """Adopt, mount, run every pair."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        program = daemon.Ckptfs(folder)
        try:
            for variant in dict.fromkeys(v for v, _ in pairs):
                if variant in VARIANTS:
                    program.adopt_variant(variant)
                else:
                    program.adopt(huggingface_pairs.source(variant), variant)
            mount = program.mount()
            for variant, mesh in pairs:
                records.append(run(mount, variant, mesh))
                print(json.dumps(records[-1]), flush=True)
            gc.collect()
            program.umount(mount)
        finally:
            program.close()
    return records


def section(records):
    """The part of docs/compatibility.md."""
    lines = [HEADING, '', 'Generated by `tests/e2e/dcp_pairs.py --table docs/compatibility.md` on '
             f'{datetime.date.today().isoformat()} with torch {torch.__version__}.', '',
             'Rows are the sources above, columns what an unmodified `torch.distributed.checkpoint.'
             'load` filled from the mounted view `dcp`: FSDP2 on', '2 and 3 ranks, HSDP on 2 x 2, '
             'FSDP2 x TP on 2 x 2, one process. Of DeepSpeed\'s sources every master (layout token '
             '`fp32`), moment, buffer and', '`step` equalled the truth bit for bit, of models of '
             'transformers every entry of the `state_dict`.', '',
             '| source | ' + ' | '.join(MESHES) + ' |', '| --- |' + ' --- |' * len(MESHES)]
    known = {(r['variant'], r['mesh']): r for r in records}
    for variant in (*VARIANTS, *huggingface_pairs.SOURCES):
        if not why_not(variant) and not any(v == variant for v, _ in known):
            continue
        cells = [f'[{why_not(variant)}]' if why_not(variant) else
                 'exact' if known.get((variant, mesh), {}).get('ok') else 'FAILS'
                 for mesh in MESHES]
        plain = huggingface_pairs.SOURCES.get(variant, (0, 0))[1] is None
        lines.append(f'| {variant}{" (huggingface)" if plain else ""} | ' + ' | '.join(cells) + ' |')
    good = sum(r['ok'] for r in records)
    lines += ['', *(f'- [{k}] {text}' for k, text in WHY_NOT.items()), '',
              f'{good} of {len(records)} pairs hold.']
    return '\n'.join(lines) + '\n'


def replace_section(path, text):
    """The file with this part in place of the one of that heading."""
    with open(path) as f:
        before, _, rest = f.read().partition(HEADING)
    _, mark, behind = rest.partition('\n## ')
    with open(path, 'w') as f:
        f.write(before.rstrip() + '\n\n' + text + (f'\n{mark.strip()} {behind}' if mark else ''))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--variant', action='append')
    parser.add_argument('--table')
    args = parser.parse_args()
    records = run_all([p for p in everything() if not args.variant or p[0] in args.variant])
    if args.table:
        replace_section(args.table, section(records))
    good = sum(r['ok'] for r in records)
    print(f'{good} passed, {len(records) - good} failed')
    return 0 if records and good == len(records) else 1


if __name__ == '__main__':
    sys.exit(main())
