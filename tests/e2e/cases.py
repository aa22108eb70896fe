# SPDX-License-Identifier: Apache-2.0
"""The pairs of source checkpoints and the targets that they are loaded at.

A target is an unmodified engine's ZeRO stage and degrees.  DeepSpeed itself
sets the limits: ZeRO 2 has no pipeline, ZeRO 3 neither a pipeline nor
hand-written tensor parallelism (AutoTP it has), and worlds stay at 8 ranks.
"""
import itertools
import random
from dataclasses import dataclass, replace

from variants import VARIANTS

WORLD = 8
# One sub-group: with more, DeepSpeed gives all of them one step counter on a
# universal ZeRO-3 load, and the losses after it drift.
ONE_SUB_GROUP = 10**9


@dataclass(frozen=True)
class Target:
    """An engine layout to load into; grad32 selects BF16_Optimizer."""
    stage: int
    dp: int
    tp: int = 1
    pp: int = 1
    grad32: bool = False
    autotp: bool = False
    ep: int = 1

    @property
    def kind(self):
        """Column of the table."""
        name = f'zero{self.stage}' + ('_bf16' if self.grad32 else '')
        return name + ('_autotp' if self.autotp else '')

    @property
    def world(self):
        """Number of ranks."""
        return self.dp * self.tp * self.pp

    def __str__(self):
        return f'{self.kind} dp{self.dp} tp{self.tp} pp{self.pp}' + (f' ep{self.ep}' if self.ep > 1 else '')


def targets():
    """Every target within DeepSpeed's limits."""
    out = []
    for dp, tp, pp in itertools.product((1, 2, 3, 4), (1, 2, 4), (1, 2, 3)):
        if dp * tp * pp > WORLD:
            continue
        out += [Target(1, dp, tp, pp), Target(1, dp, tp, pp, grad32=True)]
        if pp == 1:
            out.append(Target(2, dp, tp))
        if pp == 1 and tp == 1:
            out.append(Target(3, dp))
        if pp == 1 and tp > 1:
            out += [Target(3, dp, tp, autotp=True),
                    Target(1, dp, tp, autotp=True)]
    return out


def fits(variant, target):
    """Why DeepSpeed itself cannot run this pair, or None."""
    source = VARIANTS[variant]
    if source.moe:
        return None if source.stage else 'the states of experts have no names without ZeRO'
    if source.momentum and target.stage == 3:
        return 'the ZeRO-3 universal loader asks for Adam moments by name'
    return None


def expert_targets():
    """Returns all degrees of engines with experts of their own, which DeepSpeed has for ZeRO 1 and
    2."""
    return [Target(stage, dp, ep=ep, grad32=grad32) for stage, grad32 in ((1, False), (1, True), (2, False))
            for dp, ep in itertools.product((1, 2, 4), (1, 2, 4)) if dp % ep == 0]


def everything():
    """Every pair that can be run."""
    return [(v, t) for v, source in VARIANTS.items() for t in (expert_targets() if source.moe else targets())
            if not fits(v, t)]


def thinned(count=66, seed=7):
    """A selection that has every source, target kind and degree, spread evenly.

    Sources take turns; each takes first a target whose losses must be equal to
    the last bit, if it has one, then the target whose features (kind, degrees,
    kind and tp for this source) were chosen least so far.
    """
    pool, seen, chosen = everything(), {}, []
    random.Random(seed).shuffle(pool)

    def features(v, t):
        return (t.kind, ('dp', t.dp), ('tp', t.tp), ('pp', t.pp),
                (v, t.kind), (v, 'tp', t.tp), (t.tp, t.pp, t.dp))

    def cost(v, t):
        first = not any(c[0] == v for c in chosen)
        return (first and not loss_must_match(v, t),
                sum(3 ** min(seen.get(f, 0), 8) for f in features(v, t)))
    for variant in itertools.cycle(dict.fromkeys(v for v, _ in everything())):
        mine = [t for v, t in pool if v == variant]
        if len(chosen) >= count or not mine:
            return chosen
        best = min(mine, key=lambda t: cost(variant, t))
        pool.remove((variant, best))
        chosen.append((variant, best))
        for f in features(variant, best):
            seen[f] = seen.get(f, 0) + 1


def is_pipe(source):
    """True if the source's names are those of a PipelineModule."""
    return source.pipe or source.pp > 1


def layout_name(variant, target):
    """The view directory a user would name for this target."""
    words = [f'{k}{n}' for k, n in (('tp', target.tp), ('pp', target.pp), ('ep', target.ep),
                                    ('dp', target.dp)) if n > 1]
    words.append(f'zero{target.stage}')
    pipe = target.pp > 1
    if pipe != is_pipe(VARIANTS[variant]):
        words.append('pipe' if pipe else 'plain')
    return '_'.join(words)


def engine_layout(variant, target):
    """The Layout of the engine that loads."""
    source = VARIANTS[variant]
    lay = replace(
        source, stage=target.stage, dp=target.dp, pp=target.pp, ep=target.ep,
        tp=1 if target.autotp else target.tp,
        autotp=target.tp if target.autotp else 0, pipe=target.pp > 1,
        grad32=target.grad32, round_robin=False, elastic=False, fused=False,
        aligned=False, low_state=False, universal=True)
    if target.grad32 or target.autotp:
        lay = replace(lay, dtype='bf16')
    if target.stage == 3:
        lay = replace(lay, sub_group=ONE_SUB_GROUP)
    return lay


def mixes_rates(variant, target):
    """True if DeepSpeed loads one group's hyper-parameters into all."""
    return target.stage == 3 and VARIANTS[variant].groups > 1


def cannot_train(variant, target):
    """True if the engine loads, but cannot take a step, checkpoint or not.

    DeepSpeed 0.19.7's BF16_Optimizer takes the norm of an empty list on a rank
    that has nothing but another stage's tied weight: the last of three stages
    of this model, on the second tensor-parallel rank.
    """
    return (VARIANTS[variant].tied and target.grad32 and target.tp > 1
            and target.pp == 3)


def loss_must_match(variant, target):
    """True if the target adds up gradients exactly as the source's engine did.

    ZeRO 3 reduces in another order than the lower stages, those in different
    orders from three ranks on, and so does a group whose parameters are
    aligned.  A pipeline in bf16 without ZeRO keeps them in fp32.
    """
    source, lay = VARIANTS[variant], engine_layout(variant, target)
    if source.pipe and source.stage == 0:
        return False
    if source.low_state or source.aligned or mixes_rates(variant, target) or (
            (source.stage == 3) != (target.stage == 3)):
        return False
    if source.stage != lay.stage and lay.dp > 2:
        return False
    return all(getattr(source, k) == getattr(lay, k) for k in
               ('dp', 'tp', 'pp', 'ep', 'autotp', 'dtype', 'grad32'))
