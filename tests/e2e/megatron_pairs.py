# SPDX-License-Identifier: Apache-2.0
"""Pairs of the matrix with Megatron at an end: what its ranks load of its own saves, of engines around models of transformers and of
directories of Hugging Face, and what transformers computes with its saves.

Ranks of megatron-core load `megatron/` strictly at other degrees than the source's.  All that they then have in memory must equal the
truth (megatron_truth.py) bit for bit: weights, masters and moments; the next step of the optimizer and the logits, too.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import daemon
import huggingface_pairs
from cells import ENGINES as DEEPSPEED
from cells import GIVEN, MEGATRON, MESHES, OWN_CONFIG, RANKS, TOOLS, Target, probe
from megatron_forms import as_the_newest_cores_save
from megatron_truth import ENGINES, GROUP, LOGITS, MODELS, OWN, STATES, engine_truth, keep_logits, own_truth, samples_of, step_in
from megatron_truth import MEGATRON as SAVES
from test_megatron_source import MODELS as SHOWN
from test_megatron_source import by_layer, files_of, plain_of

HERE = os.path.dirname(os.path.abspath(__file__))
TITLE = 'Megatron-Core (tests/fixtures/megatron)'
PREFIX = 'megatron_'
SOURCES = {PREFIX + name: name for name in OWN}
ELSEWHERE = '`e2e_megatron_source`, `e2e_megatron_buckets` and `e2e_megatron_legacy` have jobs of DeepSpeed and FSDP2 go on from its saves'
# layout: [tp, pp, ep] of the job
DENSE = {'tp4': [4, 1, 1], 'tp2_pp2': [2, 2, 1], 'pp4': [1, 4, 1]}
EXPERTS = {'dp4_ep4': [1, 1, 4], 'pp2_dp2': [1, 2, 1], 'tp2_dp2_ep2': [2, 1, 2]}
TWO_LAYERS = {'tp2': [2, 1, 1], 'pp2': [1, 2, 1], 'tp2_pp2': [2, 2, 1]}
EXPERTS_OF_TWO = {'dp4_ep2': [1, 1, 2], 'pp2': [1, 2, 1], 'dp4_ep4': [1, 1, 4]}


def layouts(source):
    """{layout: degrees} in which a source is loaded."""
    if source in SOURCES:
        name = SOURCES[source]
        if 'experts' in OWN[name]:
            return EXPERTS
        return {('tp2' if layout == 'tp4' and name == 'qwen2' else layout): [2, 1, 1] if layout == 'tp4' and name == 'qwen2' else degrees
                for layout, degrees in DENSE.items()}
    family = source.partition('_')[0]
    if family not in MODELS:
        return {'tp1': None}
    return EXPERTS_OF_TWO if family == 'mixtral' else TWO_LAYERS


def adopt(program, source):
    """Into the program's store."""
    name = SOURCES[source]
    folder = f'{SAVES}/{name}'
    if name == 'newest':
        folder = os.path.join(program.folder, 'newest')
        if not os.path.exists(folder):
            shutil.copytree(f'{SAVES}/llama', folder)
            as_the_newest_cores_save(f'{folder}/iter_0000007')
    return program.adopt(folder, source, check=False)


def kind_of(source):
    """Its models are alike but for experts; a form of saving is a kind of its own."""
    name = SOURCES[source]
    return {'megatron_experts' if 'experts' in OWN[name] else name if name in ('newest', 'buckets', 'plain_adam') else 'megatron_dense'}


def why_not(source, column):
    """Why a column has no pair of this source."""
    if column == GIVEN:
        return OWN_CONFIG
    if column in (*DEEPSPEED, *MESHES):
        return ELSEWHERE
    return None


def pairs():
    """Every pair that can be run."""
    out = [Target(source, MEGATRON, layout) for source in (*SOURCES, *huggingface_pairs.SOURCES) for layout in layouts(source)]
    for source in SOURCES:
        out += [Target(source, 'huggingface', 'huggingface'), Target(source, RANKS, 'tp1')]
        out += [Target(source, tool, tool) for tool in TOOLS]
    return out


def sample():
    """Returns one of each kind, which e2e_megatron_view does not have."""
    return [Target('megatron_qwen2', MEGATRON, 'pp4'), Target('megatron_qwen3_moe', RANKS, 'tp1'), Target('megatron_newest', RANKS, 'tp1'),
            Target('megatron_buckets', RANKS, 'tp1'), Target('megatron_plain_adam', 'huggingface', 'huggingface')]


def task_of(step, pair, folder):
    """What the ranks are to do."""
    source, layout = pair.source, pair.target
    own = SOURCES.get(source)
    if own:
        model, truth, strict, samples = {**OWN[own], 'sharding': 'fully_reshardable'}, own_truth(own), 'raise_all', None
        logits = f'{SAVES}/{own}/logits.pt' if own in LOGITS else None
    else:
        model, strict, samples, logits = MODELS[source.partition('_')[0]], 'raise_unexpected', samples_of(source), None
        truth, weights = engine_truth(source, model)
        if source in LOGITS:
            logits = f'{folder}/logits.pt'
            keep_logits(source, weights, logits)
    torch.save(truth, f'{folder}/truth.pt')
    degrees = layouts(source)[layout]
    if model.get('experts') and degrees[0] > 1:
        logits = None  # Megatron computes no experts under tensor parallelism without sequence parallelism
    said = [degrees[0], degrees[1]]
    return {'name': pair.key, 'model': model, 'degrees': degrees, 'step': step_in(os.path.join(step, 'view', layout, 'megatron')),
            'strict': strict, 'truth': f'{folder}/truth.pt', 'optimizer': any(key.startswith(STATES) for key in truth), 'logits': logits,
            'group': GROUP, 'run': said, 'samples': samples, 'chunks': 1, 'most': None}


def loaded(step, pair):
    """The record of ranks of Megatron."""
    if layouts(pair.source)[pair.target] is None:
        return probe(step, pair.target, 'megatron')
    with tempfile.TemporaryDirectory() as folder:
        task = task_of(step, pair, folder)
        with open(f'{folder}/tasks.json', 'w', encoding='utf-8') as f:
            json.dump([task], f)
        subprocess.run([sys.executable, '-W', 'ignore', f'{HERE}/megatron_loads.py', f'{folder}/tasks.json', f'{folder}/out.json'],
                       check=True, timeout=500)
        with open(f'{folder}/out.json', encoding='utf-8') as f:
            wrong = json.load(f)[pair.key]
    return {'layout': pair.target, 'ok': not wrong, 'different': wrong[:3], 'module_only': not task['optimizer']}


def transformers_of(step, source):
    """The record of from_pretrained: its tensors, and the logits of the model that Megatron loads."""
    name = SOURCES[source]
    saved = {'newest': 'llama', 'buckets': 'llama', 'plain_adam': 'llama'}.get(name, name)
    folder = os.path.join(step, 'view', 'tp1', 'huggingface')
    weights, _ = plain_of(SAVES, name if name != 'newest' else 'llama')
    wrong = huggingface_pairs.differ(load_file(f'{folder}/model.safetensors'), files_of(weights, saved))
    model, said = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    wrong += [str(value) for value in said.values() if value]
    if name in SHOWN or name == 'newest':
        truth = torch.load(f'{SAVES}/{saved}/logits.pt')
        with torch.no_grad():
            logits = model(truth['tokens']).logits
        wrong += [] if torch.allclose(logits, truth['logits'], atol=2e-5, rtol=1e-4) else ['logits']
    return {'layout': 'tp1', 'ok': not wrong, 'different': wrong[:5]}


def ranks_of(step, source):
    """The record of the files of a rank: what Megatron's own reader finds, layer by layer."""
    name = SOURCES[source]
    folder = os.path.join(step, 'view', 'tp1', 'rank0')
    truth = own_truth(name)
    want = by_layer({k: v for k, v in truth.items() if not k.startswith(STATES)})
    wrong = huggingface_pairs.differ(load_file(f'{folder}/model.safetensors'), want)
    got = load_file(f'{folder}/optimizer.safetensors')
    for ours, kind in (('master', 'param'), ('exp_avg', 'exp_avg'), ('exp_avg_sq', 'exp_avg_sq')):
        prefix = f'{STATES}{kind}.'
        states = by_layer({k.removeprefix(prefix): v for k, v in truth.items() if k.startswith(prefix)})
        wrong += huggingface_pairs.differ({k.removeprefix(f'{ours}/'): v for k, v in got.items() if k.startswith(f'{ours}/')}, states)
    return {'layout': 'tp1', 'ok': not wrong, 'different': wrong[:5]}


def run(mount, pair):
    """One pair; its record."""
    step = daemon.step_of(mount, pair.source)
    if pair.column == MEGATRON:
        return loaded(step, pair)
    if pair.column == RANKS:
        return ranks_of(step, pair.source)
    if pair.column in TOOLS:
        return probe(step, 'tp1', pair.column)
    return transformers_of(step, pair.source)
