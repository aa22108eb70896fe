# SPDX-License-Identifier: Apache-2.0
"""Pairs of the matrix from what torch.distributed.checkpoint saved (tests/fixtures/dcp)."""
import functools
import os
import sys
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import daemon
from cells import GIVEN, MEGATRON, MESHES, NOT_OF_MEGATRON, NOT_OF_TRANSFORMERS, NOT_TRIED, RANKS, TOOLS, Target, probe

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'fixtures', 'dcp'))

import make_dcp  # noqa: E402
import test_dcp_source  # noqa: E402
import torch_jobs  # noqa: E402
from make_dcp import VARIANTS, dcp_model  # noqa: E402

TITLE = 'PyTorch DCP (tests/fixtures/dcp/make_dcp.py)'
PREFIX = 'dcp_'  # there is an fsdp2 among the columns
SOURCES = tuple(PREFIX + variant for variant in VARIANTS)
ADOPTED = '`{} {}` and `{} {!r}`'.format(*test_dcp_source.SAID)


def adopt(program, source):
    """Into the program's store."""
    path = os.path.join(test_dcp_source.FIXTURES, source.removeprefix(PREFIX), 'ckpt')
    return program.adopt(path, source, extra=test_dcp_source.SAID, check=False)


def why_not(source, column):
    """Why a column has no pair of this source."""
    if column == MEGATRON:
        return NOT_OF_MEGATRON
    if column in ('zero1_autotp', 'zero1_bf16', 'zero3_autotp'):
        return NOT_TRIED
    if column == GIVEN and not VARIANTS[source.removeprefix(PREFIX)][1].get('transformers'):
        return NOT_OF_TRANSFORMERS
    if column == 'zero3' and source == PREFIX + 'shards':
        return "weights alone: DeepSpeed's universal loader at ZeRO 3 asks for Adam's moments by name"
    return None


def pairs():
    """Every pair that can be run."""
    columns = ('zero1', 'zero2', 'zero3', *MESHES, 'huggingface', GIVEN, *TOOLS)
    out = [Target(source, column, column) for source in SOURCES for column in columns
           if not why_not(source, column)]
    return out + [Target(source, RANKS, layout) for source in SOURCES
                  for layout in torch_jobs.LAYOUTS]


def sample():
    """Returns a pair for every source: a mesh, an engine, `from_pretrained`, or the files of
    ranks."""
    said = {'titan': 'hsdp2x2', 'fsdp2_tp': 'zero2', 'ddp': 'fsdp3', 'fsdp2_bf16': 'ddp1', 'fsdp2': 'huggingface',
            'llama': GIVEN}
    return [Target(PREFIX + source, said[source], said[source]) if source in said else
            Target(PREFIX + source, RANKS, 'dp3_zero1') for source in VARIANTS]


def optimizer(source, model):
    """As the job made it; other rates, which a load has to replace."""
    mesh, options = VARIANTS[source]
    if options.get('sgd'):
        return torch.optim.SGD(model.parameters(), lr=dcp_model.RATE, momentum=0.9)
    if mesh.startswith('fsdp1') or source == 'accelerate':
        return torch.optim.AdamW(model.parameters(), lr=dcp_model.RATE)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{'params': decayed, 'weight_decay': dcp_model.DECAY},
                              {'params': others, 'weight_decay': 0.0}], lr=dcp_model.RATE)


def loss(model, number, rank, ranks):
    """Returns the loss of the batch of dcp_model.step."""
    generator = torch.Generator().manual_seed(1000 + number)
    sizes = dcp_model.SIZES
    tokens = torch.randint(0, sizes['vocab'], (sizes['batch'], sizes['seq'] + 1),
                           generator=generator).chunk(ranks)
    tokens = tokens[min(rank, len(tokens) - 1)]
    logits = model(tokens[:, :-1]).float()
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@functools.cache
def job_of(source):
    """Returns the job whose checkpoint it is."""
    variant = source.removeprefix(PREFIX)
    return torch_jobs.Job(lambda: make_dcp.made(VARIANTS[variant][1], seed=99),
                          functools.partial(optimizer, variant), loss, dcp_model.cut_for_tp,
                          test_dcp_source.truth_of(variant), make_dcp.STEPS)


def run(mount, pair):
    """One pair; its record."""
    job = job_of(pair.source)
    step = daemon.step_of(mount, pair.source, test_dcp_source.STEP)
    if pair.source == PREFIX + 'shards' and pair.column not in MESHES:  # the writer of safetensors saves weights alone
        job = replace(job, truth={'weight': job.truth['weight']})
    if pair.column == RANKS:
        return torch_jobs.compare_ranks(step, job, pair.target, test_dcp_source.cut)
    if pair.column in MESHES:
        return torch_jobs.load_mesh(step, job, pair.column)
    if pair.column.startswith('zero'):
        return torch_jobs.load_engine(step, job, int(pair.column[-1]))
    if pair.column == GIVEN:
        return torch_jobs.pretrained(step, job)
    return probe(step, 'tp1', pair.column)
