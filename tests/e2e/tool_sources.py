# SPDX-License-Identifier: Apache-2.0
"""Pairs of the matrix from what transformers' Trainer, accelerate and Lightning wrote themselves
(tool_jobs.py; which, test_tools.py says).

The truth is what the job's own process kept or gathered; of DeepSpeed's engines at ZeRO 1 and 2 what its own
ds_to_universal makes of their files.  A column of the tool holds if a training that goes on from the
view has the losses of the one that never stopped.
"""
import atexit
import functools
import glob
import math
import os
import subprocess
import sys
import tempfile

os.environ['CKPTFS_LONG'] = '1'  # all that test_tools.py can make

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import Replicate  # noqa: E402
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,  # noqa: E402
                                               parallelize_module)

import daemon  # noqa: E402
import test_dcp_source  # noqa: E402
import test_tools  # noqa: E402
import tool_jobs  # noqa: E402
import torch_jobs  # noqa: E402
from cells import ALIKE, GIVEN, MEGATRON, MESHES, NOT_OF_MEGATRON, NOT_TRIED, OWN_CONFIG, RANKS, TOOLS, Target, said_of  # noqa: E402

TITLE = 'Trainer, accelerate and Lightning (tests/e2e/tool_jobs.py)'
SOURCES = {'-'.join(map(str, made)): made for made in test_tools.MADE}
HEADS = ('--family-set', 'head_dim=8')  # as a config.json beside the checkpoint tells
ADOPTED = (f'`{" ".join(HEADS)}`, and with `--parameter-order FILE` where a tool saved without DeepSpeed and FSDP, or Lightning '
           'whole tensors of FSDP: its optimizer then has no names')
HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = tempfile.TemporaryDirectory(prefix='ckptfs-tools-')
if hasattr(test_tools, 'ZYGOTE'):  # a process that starts the jobs
    atexit.register(test_tools.ZYGOTE.close)


@functools.cache
def made(source):
    """The job, which trains when it is asked for first."""
    folder = os.path.join(FOLDER.name, source)
    os.mkdir(folder)
    return test_tools.Job(folder, *SOURCES[source])


def adopt(program, source):
    """Into the program's store."""
    job = made(source)
    order = job.way == 'plain' or (job.tool == 'lightning' and job.way.endswith('full'))
    return program.adopt(job.path, source, check=False,
                         extra=(*HEADS, *(('--parameter-order', job.order) if order else ())))


def has_config(source):
    """True if the step has a config.json: Trainer writes one, but for FSDP's shards."""
    tool, way, _ = SOURCES[source]
    return tool == 'trainer' and way not in ('fsdp1', 'fsdp2')


def why_not(source, column):
    """Why a column has no pair of this source."""
    if column == MEGATRON:
        return ALIKE if has_config(source) else NOT_OF_MEGATRON
    if column in ('zero1_autotp', 'zero1_bf16', 'zero3_autotp'):
        return NOT_TRIED
    if column == GIVEN and has_config(source):
        return OWN_CONFIG
    return None


def pairs():
    """Every pair that can be run."""
    columns = ('zero1', 'zero2', 'zero3', *MESHES, 'huggingface', GIVEN, *TOOLS)
    out = [Target(source, column, column) for source in SOURCES for column in columns
           if not why_not(source, column)]
    return out + [Target(source, RANKS, layout) for source in SOURCES
                  for layout in torch_jobs.LAYOUTS]


def kind_of(source):
    """Returns what one of stands for all of its kind: the tool, and what drives it."""
    tool, way, _ = SOURCES[source]
    return {tool, next(kind for kind in ('plain', 'zero', 'fsdp') if way.startswith(kind))}


def sample():
    """Each tool and each way, which are trained when they are asked for: a training takes longer than a load."""
    chosen = {'trainer-zero2-2': ('trainer', 'huggingface', 'fsdp2'),
              'accelerate-fsdp2-2': ('accelerate', GIVEN, 'zero3'),
              'lightning-plain-1': ('lightning', 'ddp1', 'trainer')}
    return [Target(source, column, column) for source, columns in chosen.items() for column in columns]


# ---- what is loaded into -------------------------------------------------------------------


class Wrapped(nn.Module):
    """As Lightning's module of tool_jobs.py names it."""

    def __init__(self):
        super().__init__()
        self.net = tool_jobs.model()

    def forward(self, **batch):
        return self.net(**batch)


def loss(model, number, _, __):
    """Returns the loss of an update's rows; every rank has all."""
    rows = tool_jobs.samples()
    at = number % tool_jobs.UPDATES * tool_jobs.ROWS
    batch = torch.stack([row['input_ids'] for row in rows[at:at + tool_jobs.ROWS]])
    return model(input_ids=batch, labels=batch).loss


def plan(prefix, model, mesh):
    """The usual one of a Llama."""
    layer = f'{prefix}model.layers.*.'
    cuts = {f'{prefix}model.embed_tokens': RowwiseParallel(input_layouts=Replicate()),
            f'{prefix}lm_head': ColwiseParallel(output_layouts=Replicate())}
    for name in ('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'mlp.gate_proj',
                 'mlp.up_proj'):
        cuts[layer + name] = ColwiseParallel()
    for name in ('self_attn.o_proj', 'mlp.down_proj'):
        cuts[layer + name] = RowwiseParallel()
    parallelize_module(model, mesh, cuts)


def rate_of(tool, ranks):
    """Returns the rate of the next step: a cosine over six updates; halved every second, where
    accelerate steps the schedule once per rank; none."""
    if tool == 'trainer':
        return 1e-2 * (1 + math.cos(math.pi * tool_jobs.MIDDLE / tool_jobs.UPDATES)) / 2
    steps = tool_jobs.MIDDLE * ranks
    return 1e-2 / 2**(steps // 2) if tool == 'accelerate' else 1e-2


def optimizer(tool, rate, model):
    """Groups as the tool makes them, at the rate that it has come to."""
    if tool != 'trainer':
        return torch.optim.AdamW(model.parameters(), lr=rate)
    groups = [[p for p in model.parameters() if p.ndim > 1],
              [p for p in model.parameters() if p.ndim < 2]]
    return torch.optim.AdamW([{'params': groups[0], 'weight_decay': 0.1},
                              {'params': groups[1], 'weight_decay': 0.}], lr=rate)


def converted(job):
    """({kind: {name: tensor}}, bound of gradients) by DeepSpeed's own conversion of the middle tag."""
    states = glob.glob(f'{job.path}/**/*mp_rank_00_model_states.pt', recursive=True)
    states = [path for path in states if f'/{job.id}/' in path][0]
    out = os.path.join(job.folder, 'converted')
    subprocess.run([sys.executable, '-m', 'deepspeed.checkpoint.ds_to_universal', '--inject_missing_state',
                    '--input_folder', os.path.dirname(states), '--output_folder', out], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    truth = {}
    for path in glob.glob(f'{out}/zero/*/*.pt'):
        kind, name = os.path.basename(path)[:-3], os.path.basename(os.path.dirname(path))
        value = torch.load(path, weights_only=False)
        value = value['param'] if isinstance(value, dict) else torch.as_tensor(value)
        if kind in ('fp32', 'exp_avg', 'exp_avg_sq'):
            truth.setdefault('weight' if kind == 'fp32' else kind, {})[name] = value
    step = torch.load(glob.glob(f'{out}/zero/*/step.pt')[0], weights_only=False)
    truth['step'] = {name: torch.tensor(float(step)) for name in truth['exp_avg']}
    settings = torch.load(f'{out}/zero/optimizer_state.pt', weights_only=False)
    return truth, settings['clip_grad']


@functools.cache
def job_of(source):
    """Returns the job whose checkpoint it is."""
    job = made(source)
    prefix = 'net.' if job.tool == 'lightning' else ''
    if os.path.exists(f'{job.folder}/truth.pt'):
        truth, clip = {}, 0.
        for name, states in torch.load(f'{job.folder}/truth.pt').items():
            for kind, tensor in states.items():
                truth.setdefault(kind, {})[name] = tensor
    else:
        truth, clip = converted(job)
    return torch_jobs.Job(Wrapped if prefix else tool_jobs.model,
                          functools.partial(optimizer, job.tool,
                                            rate_of(job.tool, job.ranks)), loss,
                          functools.partial(plan, prefix), truth, tool_jobs.MIDDLE, clip, False)


# ---- columns ---------------------------------------------------------------------------------


def resumed(step, job, tool):
    """The record of a training that goes on from the tool's view."""
    layout = job.layout
    why = said_of(step, layout, tool)
    if why:
        return {'layout': layout, 'ok': True, 'why': why,
                'state': 'n/a' if 'not saved by' in why else 'refused'}
    try:
        losses = job.resumed(job.path_in(step, layout), job.engine)
        ok = job.goes_on(losses)
    except AssertionError as e:
        return {'layout': layout, 'ok': False, 'errors': [str(e)[-400:]]}
    return {'layout': layout, 'ok': ok, 'exact_losses': not job.counts_twice,
            'errors': [] if ok else [f'{losses}, not as {job.losses}']}


def run(mount, pair):
    """One pair; its record."""
    tool, job = made(pair.source), job_of(pair.source)
    step = daemon.step_of(mount, pair.source, tool.id)
    if pair.column == RANKS:
        return torch_jobs.compare_ranks(step, job, pair.target, test_dcp_source.cut)
    if pair.column in MESHES:
        return torch_jobs.load_mesh(step, job, pair.column)
    if pair.column.startswith('zero'):
        return torch_jobs.load_engine(step, job, int(pair.column[-1]))
    if pair.column in ('huggingface', GIVEN):
        return torch_jobs.pretrained(step, job, 'net.' if tool.tool == 'lightning' else '')
    return resumed(step, tool, pair.column)
