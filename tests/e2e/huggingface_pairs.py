# SPDX-License-Identifier: Apache-2.0
"""Pairs of the matrix with transformers at an end: what each loads, and whether it holds.

Sources are what `save_pretrained` wrote, and DeepSpeed's checkpoints of the same
models.  Targets are `from_pretrained` of the view huggingface/, and engines: at ZeRO
1 and 2 they load the universal view (of a directory without an optimizer the module
only), at ZeRO 3 what has no optimizer is loaded by `from_pretrained` and then cut.
Every entry of the state_dict must equal the truth bit for bit, and the logits; of engines every master and
moment, the step, and the losses of the next steps.
"""
import glob
import json
import os
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'fixtures', 'huggingface'))

import daemon  # noqa: E402
import dcp_loads  # noqa: E402
import launch  # noqa: E402
import make_huggingface  # noqa: E402
import models  # noqa: E402
from cells import NOT_TRIED, OWN_CONFIG, GIVEN, RANKS, TOOLS, Target, probe, said_of  # noqa: E402

FIXTURES = os.path.join(daemon.FIXTURES, 'huggingface')
TITLE = 'Hugging Face, and DeepSpeed of the same models (tests/fixtures/huggingface)'
VIEW = 'huggingface'  # the column of from_pretrained
TARGETS = (VIEW, 'zero1', 'zero2', 'zero3')
SOURCES = {variant: (name, engine) for variant, name, engine in make_huggingface.variants()}
LAYOUTS = ('tp1', 'tp2')
# Sums of bf16 in another order move these losses by 0.0025 at most (seen over 57 pairs), first moments that
# are lost by 0.005.
NOISE = 0.004
# How tensor parallelism cuts the models: {pattern of names: dim}.
LLAMA = {r'.*(embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj)\.(weight|bias)': 0,
         r'.*(o_proj|down_proj)\.weight': 1}
CUTS = {'llama': LLAMA, 'qwen2': LLAMA, 'mixtral': {**LLAMA, r'.*experts\.gate_up_proj': 1, r'.*experts\.down_proj': 2},
        'gpt2': {r'.*(wte|lm_head)\.weight': 0, r'.*c_(attn|fc)\.weight': 1, r'.*c_(attn|fc)\.bias': 0, r'.*c_proj\.weight': 0}}
ONE_BY_ONE = ('the files of this model name its experts one by one, the module that is loaded has them in '
              'one tensor: `from_pretrained` joins them')


def adopt(program, variant):
    """Into the program's store."""
    return program.adopt(source(variant), variant, check=False)


def why_not(variant, column):
    """Why a column has no pair of this source."""
    if column in ('zero1_autotp', 'zero1_bf16', 'zero3_autotp'):
        return NOT_TRIED
    if column == GIVEN:
        return OWN_CONFIG
    if variant == 'mixtral' and column in ('zero1', 'zero2'):
        return ONE_BY_ONE
    return None


def pairs():
    """All but those with DCP (dcp_pairs.py)."""
    out = [Target(source, target, target) for source in SOURCES for target in (*TARGETS, *TOOLS)
           if not why_not(source, target)]
    return out + [Target(source, RANKS, layout) for source in SOURCES for layout in LAYOUTS]


def sample():
    """Returns a pair for every source: `from_pretrained`, or an engine."""
    engines = {'llama_zero2': 'zero1', 'qwen2_autotp2': 'zero3', 'mixtral_zero1': 'zero3', 'gpt2': 'zero2'}
    return [Target(source, engines.get(source, VIEW), engines.get(source, VIEW)) for source in SOURCES]


def source(variant):
    """The checkpoint of a variant."""
    return os.path.join(FIXTURES, variant, 'ckpt')


def truth_of(variant):
    """(state_dict, logits) of the live model."""
    all_of = load_file(os.path.join(FIXTURES, variant, 'truth.safetensors'))
    return {k.removeprefix('weight/'): t for k, t in all_of.items() if k.startswith('weight/')}, all_of['logits']


def states_of(variant):
    """{kind/name: tensor} of the live optimizer, and its step; nothing of a directory without one."""
    all_of = load_file(os.path.join(FIXTURES, variant, 'truth.safetensors'))
    return {k: t for k, t in all_of.items() if not k.startswith('weight/') and k != 'logits'}


def same(a, b):
    """Equal in type, shape and every bit."""
    return (a.dtype == b.dtype and a.shape == b.shape
            and torch.equal(a.contiguous().flatten().view(torch.uint8),
                            b.contiguous().flatten().view(torch.uint8)))


def differ(got, want):
    """Names that are in one only, or not equal."""
    return sorted(k for k in got.keys() | want.keys()
                  if k not in got or k not in want or not same(got[k], want[k]))


def load(directory):
    """The model, which must have taken every tensor and missed none."""
    model, said = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True)
    assert not {k: v for k, v in said.items() if v}
    return model


def keep_and_train(built, name, out, trained):
    """Keeps what the engine holds, with its optimizer if that was `trained`, and the losses of the
    next steps."""
    whole = {f'weight/{k}': t for k, t in make_huggingface.gather_weights(built, name).items()}
    if trained:
        whole.update(make_huggingface.gather_states(built, name))
    losses = make_huggingface.train(built, make_huggingface.STEPS, make_huggingface.MORE)
    if torch.distributed.get_rank() == 0:
        torch.save((whole, losses), out)


def start(name, engine, directory, module_only, out):
    """One rank: an engine of other weights, which are loaded from the view."""
    torch.manual_seed(99)
    if not module_only:
        make_huggingface.ENGINES[engine]['checkpoint'] = {'load_universal': True}
    built = make_huggingface.engine_of(models.MODELS[name]().eval(), name, engine)
    path, _ = built.load_checkpoint(directory, load_module_only=module_only)
    assert path is not None
    keep_and_train(built, name, out, not module_only)


def start_partitioned(name, directory, out):
    """One rank: from_pretrained, and an engine at ZeRO 3 that cuts what it loaded."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    built = make_huggingface.engine_of(model, name, 'zero3')
    assert all(p.numel() == 0 for p in built.module.parameters())
    keep_and_train(built, name, out, False)


def torch_step(model, optimizer, number, rank, ranks):
    """One update by torch, on the batch of an engine's; this rank's loss."""
    rows = models.batch(100 + number).chunk(ranks)
    ids = rows[min(rank, len(rows) - 1)]
    return dcp_loads.update(model(input_ids=ids, labels=ids).loss, model, optimizer)


def losses_of(variant):
    """Returns the losses of the steps after the save, and of an engine that begins with a
    directory's weights."""
    with open(os.path.join(FIXTURES, variant, 'losses.json'), encoding='utf-8') as f:
        return json.load(f)


def starts(worker, variant, *args):
    """The record of an engine of all ranks, which must hold what the variant's did, and go on as it."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = os.path.join(folder, 'loaded.pt'), os.path.join(folder, 'rank')
        if not launch.launch(worker, make_huggingface.WORLD, (*args, out), log):
            return {'ok': False, 'errors': launch.errors_of(log, make_huggingface.WORLD)}
        got, losses = torch.load(out)
    want = {f'weight/{k}': t for k, t in truth_of(variant)[0].items()}
    alone = not any(k.startswith('model/') for k in got)
    want.update({} if alone else states_of(variant))
    tied = {k for k in want if k not in got}
    assert tied <= {'weight/lm_head.weight'}
    wrong = differ(got, {k: t for k, t in want.items() if k not in tied})
    diff = max(abs(a - b) for a, b in zip(losses, losses_of(variant), strict=True))
    return {'ok': not wrong and diff < NOISE, 'different': wrong[:5], 'loss_diff': diff, 'module_only': alone}


def same_sums(engine, target):
    """True if an engine adds up gradients as the one did that saved, or that began with what was
    saved."""
    return (engine or 'zero1') == target or {engine or 'zero1', target} == {'zero1', 'zero2'}


def check(step, variant, target):
    """The record of a pair with a model or an engine."""
    name, engine = SOURCES[variant]
    if target == VIEW:
        want, logits = truth_of(variant)
        model = load(os.path.join(step, 'view', 'tp1', VIEW))
        wrong = differ(model.state_dict(), want) + ([] if same(models.logits(model), logits) else ['logits'])
        return {'layout': 'tp1', 'ok': not wrong, 'different': wrong}
    if engine is None and target == 'zero3':
        return {'layout': 'tp1', **starts(start_partitioned, variant, name, os.path.join(step, 'view', 'tp1', VIEW))}
    layout = 'tp1' if engine is None else f'dp2_{target}'
    found = starts(start, variant, name, target, os.path.join(step, 'view', layout, 'deepspeed'), engine is None)
    exact = same_sums(engine, target)
    return {'layout': layout, **found, 'exact_losses': exact,
            'ok': found['ok'] and not (exact and found['loss_diff'])}


def cut(name, whole, tp, rank, gpt2):
    """Returns what the engine's layers hold of a tensor, by the model's own code."""
    if gpt2 and '.c_attn.' in name:
        dim = whole.ndim - 1
        return torch.cat([p.chunk(tp, dim)[rank] for p in whole.chunk(3, dim)], dim)
    if gpt2 and '.c_fc.' in name:
        return whole.chunk(tp, whole.ndim - 1)[rank]
    if gpt2 and name.endswith('c_proj.weight'):
        return whole.chunk(tp, 0)[rank]
    if any(p in name for p in ('q_proj', 'k_proj', 'v_proj', 'gate_proj', 'up_proj',
                               '.w1.', '.w3.')):
        return whole.chunk(tp, 0)[rank]
    if any(p in name for p in ('o_proj', 'down_proj', '.w2.')):
        return whole.chunk(tp, 1)[rank]
    if any(p in name for p in ('embed_tokens', 'lm_head', 'wte')):
        rows = -(-whole.shape[0] // ((128 if gpt2 else 1) * tp)) * (128 if gpt2 else 1)
        padded = torch.cat([whole, whole.new_zeros(rows * tp - whole.shape[0],
                                                   whole.shape[1])])
        return padded[rank * rows:(rank + 1) * rows]
    return whole


def held_by(variant, tp, rank):
    """{name: tensor} of a tensor-parallel rank: of AutoTP's degree what the engine itself saved there, of
    a directory the tensors of its files, which from_pretrained may join, of others the truth, cut."""
    name, engine = SOURCES[variant]
    if engine == 'autotp2' and tp == 2:
        path, = glob.glob(f'{source(variant)}/global_step*/mp_rank_{rank:02d}_model_states.pt')
        return torch.load(path, weights_only=False)['module']
    truth = truth_of(variant)[0]
    if engine is None:
        truth = {}
        for file in glob.glob(f'{source(variant)}/*.safetensors'):
            truth.update(load_file(file))
    return {k: cut(k, t, tp, rank, name == 'gpt2') if tp > 1 else t for k, t in truth.items()}


def states_held_by(variant, tp, rank):
    """{kind/name: tensor} of the optimizer's states of a tensor-parallel rank: the truth, cut as the weights are."""
    weights, out = held_by(variant, tp, rank), {}
    for key, tensor in states_of(variant).items():
        kind, _, name = key.partition('/')
        if kind != 'step':
            out[f'{"master" if kind == "model" else kind}/{name}'] = (
                tensor if weights[name].shape == tensor.shape else
                cut(name, tensor, tp, rank, SOURCES[variant][0] == 'gpt2'))
    return out


def compare_ranks(step, variant, target):
    """Returns what is wrong with the tensors in the files of a layout's ranks."""
    tp, wrong = int(target[2:]), []
    name, engine = SOURCES[variant]
    experts = name == 'mixtral' and engine != 'autotp2' and tp > 1
    layout = f'{target}_etp{tp}' if experts else target
    folder = os.path.join(step, 'view', layout)
    if not os.path.isdir(os.path.join(folder, 'rank0')):
        return {'ok': True, 'state': 'refused', 'layout': layout, 'why': said_of(step, layout, 'rank')}
    for rank in range(tp):
        # Copies: a file that is mapped keeps the mount.
        held = lambda file: {k: t.clone() for k, t in load_file(
            os.path.join(folder, f'rank{rank}', f'{file}.safetensors')).items()}
        got = held('model')
        wrong += [k for k in differ(got, held_by(variant, tp, rank))
                  if k in got or k != 'lm_head.weight']  # one that is tied has one name
        if engine:
            states = held('optimizer')
            wrong += [k for k, t in states.items() if k.startswith('step/') and float(t) != make_huggingface.STEPS]
            wrong += differ({k: t for k, t in states.items() if not k.startswith('step/')},
                            states_held_by(variant, tp, rank))
    return {'layout': layout, 'ok': not wrong, 'different': wrong[:5], 'module_only': engine is None}


def run(mount, pair):
    """One pair; its record."""
    step = daemon.step_of(mount, pair.source)
    if pair.column == RANKS:
        return compare_ranks(step, pair.source, pair.target)
    if pair.column in TOOLS:
        return probe(step, 'tp1', pair.column)
    try:
        return check(step, pair.source, pair.target)
    except (AssertionError, OSError, RuntimeError, ValueError) as e:
        return {'ok': False, 'errors': [repr(e)]}
