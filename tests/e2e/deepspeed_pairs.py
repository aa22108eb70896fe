# SPDX-License-Identifier: Apache-2.0
"""Pairs of the matrix from the tiny model's DeepSpeed checkpoints (tests/fixtures/deepspeed).

Targets are unmodified engines that load the universal view (cases.py): every master, moment and
16-bit weight must equal the truth bit for bit, and the next steps' losses the uninterrupted run's,
exactly where gradients are added in the same order, within rounding noise elsewhere; and
the files rank<N>, compared with what the model's own rules cut out of the truth.
"""
import os

from safetensors.torch import load_file

import cases
import daemon
import load_deepspeed
import test_rank_files
from cells import GIVEN, MEGATRON, NOT_OF_MEGATRON, NOT_OF_TRANSFORMERS, RANKS, TOOLS, Target, probe
from variants import VARIANTS

TITLE = 'DeepSpeed (tests/fixtures/deepspeed/variants.py)'
SOURCES = tuple(VARIANTS)
ADOPTED = '`{} {!r}`'.format(*daemon.TALLY)
STEPS = 2
# A changed order of bf16 sums moves this model's loss by 0.002 at most (seen
# over 66 pairs); a wrong layout of its tensors moves it by 0.1 and more.
NOISE = 0.01
# Where several groups are loaded at ZeRO 3, DeepSpeed gives all of them the
# rates of the first, and the losses then say nothing about the load.
NO_BOUND = 1.0
# The error that torch's schedule raises for another number of groups.
OTHER_GROUPS = 'ValueError: zip() argument 2 is'
SPLIT_BY_SIZE = ("DeepSpeed splits these experts into groups by their size, which are more or fewer at another ep, and torch's schedule "
                 'has a rate of each group; with `load_lr_scheduler_states=False` every tensor is exact')


def adopt(program, variant):
    """Into the program's store."""
    return program.adopt_variant(variant, check=False)


def why_not(variant, column):
    """Why a column has no pair of this source."""
    if column == MEGATRON:
        return NOT_OF_MEGATRON
    if column == GIVEN:
        return NOT_OF_TRANSFORMERS
    if VARIANTS[variant].moe and VARIANTS[variant].stage:
        return "DeepSpeed's own experts are for ZeRO 1 and 2, without AutoTP"
    if VARIANTS[variant].moe:
        return 'without ZeRO the states of experts have no names: weights alone are adopted'
    if column in ('zero3', 'zero3_autotp'):
        return "DeepSpeed's universal loader at ZeRO 3 asks for Adam's moments by name"
    return None


def engines(variant):
    """Every engine that the variant can be loaded into."""
    return [Target(variant, t.kind, t) for v, t in cases.everything() if v == variant]


def pairs():
    """All but those with DCP (dcp_pairs.py)."""
    out = []
    for variant in SOURCES:
        out += engines(variant)
        out += [Target(variant, column, column) for column in ('huggingface', *TOOLS)]
        out += [Target(variant, RANKS, layout) for v, layout in test_rank_files.pairs()
                if v == variant]
    return out


def sample():
    """Returns pairs of every source, target kind and degree; for experts the files, too."""
    return [Target(v, t.kind, t) for v, t in cases.thinned(30)] + [
        next(pair for pair in pairs() if (pair.source, pair.column) == (variant, RANKS))
        for variant in SOURCES if VARIANTS[variant].moe]


def load_engine(mount, variant, target):
    """Returns what an engine found."""
    layout = cases.layout_name(variant, target)
    view = os.path.join(daemon.step_of(mount, variant), 'view', layout, 'deepspeed')
    if not os.path.isdir(view):
        return {'layout': layout, 'ok': False, 'errors': [f'no {view}']}
    steps = 0 if cases.cannot_train(variant, target) else STEPS
    code, report = load_deepspeed.load(
        view, daemon.truth_of(variant), cases.engine_layout(variant, target),
        steps=steps)
    said = ' '.join(map(str, report.get('errors', ())))
    if VARIANTS[variant].sequential and target.ep != VARIANTS[variant].ep and OTHER_GROUPS in said:
        return {'layout': layout, 'ok': True, 'state': 'refused', 'why': SPLIT_BY_SIZE}
    exact = steps > 0 and cases.loss_must_match(variant, target)
    diff = report.get('loss_diff')
    most = NO_BOUND if cases.mixes_rates(variant, target) else NOISE
    losses_ok = steps == 0 or (
        diff is not None and (diff == 0 if exact else diff < most))
    keep = ('tensors_equal', 'tensors_different', 'different', 'step_equal',
            'bit16_differs', 'loss_diff', 'errors')
    return {'layout': layout, **{k: report[k] for k in keep if k in report},
            'exact_losses': exact, 'ok': code == 0 and losses_ok}


def compare_ranks(mount, variant, layout):
    """Returns what the files of all ranks of a layout hold."""
    truth = load_file(daemon.truth_of(variant))
    dims, degrees = (load_deepspeed.recorded(daemon.truth_of(variant))[0],
                     test_rank_files.degrees(layout))
    degrees['whole_vocab'] = VARIANTS[variant].autotp == degrees['tp']
    view, seen = os.path.join(daemon.step_of(mount, variant), 'view', layout), set()
    for rank in range(degrees['tp'] * degrees['dp'] * degrees['pp']):
        seen |= test_rank_files.check_rank(os.path.join(view, f'rank{rank}'), rank, truth, dims,
                                           degrees)
    missing = test_rank_files.wanted_keys(truth) - seen
    if VARIANTS[variant].moe and VARIANTS[variant].stage == 0:
        missing = {key for key in missing if key[0] == 'model'}  # states without names
    return {'layout': layout, 'ok': not missing, 'different': sorted(map(str, missing))[:5]}


def run(mount, pair):
    """One pair; its record."""
    if pair.column == RANKS:
        return compare_ranks(mount, pair.source, pair.target)
    if isinstance(pair.target, cases.Target):
        return load_engine(mount, pair.source, pair.target)
    return probe(daemon.step_of(mount, pair.source), 'tp1', pair.column)
