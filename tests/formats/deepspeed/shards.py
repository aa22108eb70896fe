# SPDX-License-Identifier: Apache-2.0
"""A tag directory read by torch.load and nothing of ours: the whole tensors.

It knows what only DeepSpeed and the fixtures' model say: where ZeRO puts a
parameter's elements, and how the model's own rules cut it (tiny_model.py).
A key, <kind>/<name>, has a list of tensors: what ranks hold as replicas need
not be equal in a file that somebody changed, and any of them is an answer.
ValueError: the files do not fit together.
"""
import re

import torch

from tiny_model import Dims, Layout, auto_sizes, kind_of, unshard

RANK = re.compile(r'(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states')
MODEL = re.compile(r'mp_rank_(\d+)_model_states')
LAYER = re.compile(r'layer_(\d+)-model_(\d+)-model_states')
EXPERT = re.compile(r'(.*\.deepspeed_experts\.)(\d+)(\..*)')


def check(holds, why):
    """Refuse as the reader under test is meant to."""
    if not holds:
        raise ValueError(why)


def joined(parts):
    """One run of elements out of the ranks' parts."""
    check(all(p.dim() == 1 for p in parts), 'a part is not flat')
    sizes = [len(p) for p in parts]
    check(set(sizes[:-1]) <= {sizes[0]} and sizes[-1] <= sizes[0], f'parts of {sizes}')
    return torch.cat([p.to(parts[0].dtype) for p in parts])


def cut(flat, at, shape):
    """A parameter of a flat run."""
    shape = torch.Size(shape)
    check(at + shape.numel() <= len(flat), 'a flat run is too short')
    return flat[at:at + shape.numel()].reshape(shape)


class Shards:
    """`contents`: what torch.load gave, by file name; `meta`: of the fixture."""

    def __init__(self, contents, meta):
        known = lambda kind, values: {k: v for k, v in values.items()
                                      if k in kind.__dataclass_fields__}
        self.dims = Dims(**known(Dims, meta['dims']))
        self.lay = Layout(**known(Layout, meta['layout']))
        self.tp = self.lay.tp * (self.lay.autotp or 1)
        self.contents = contents
        self.models, self.optimizers = {}, {}
        for name, content in contents.items():
            rank, model = RANK.match(name), MODEL.match(name)
            if rank:
                into = self.models if rank[3] == 'model' else self.optimizers
                into[int(rank[2]), int(rank[1])] = content
            elif model:
                self.models[int(model[1]), 0] = content

    def merged(self):
        """{<kind>/<name>: [tensor, ...]}."""
        local = {}  # (kind, name): {tp rank: [tensors]}

        def keep(kind, name, mp, tensor):
            ranks = local.setdefault((kind, name), {})
            ranks.setdefault(mp % self.tp, []).append(tensor)
        for mp in range(self.tp * self.lay.pp):
            self.weights(mp, keep)
            if self.lay.stage == 3:
                self.stage3(mp, keep)
            elif self.optimizers:  # also BF16_Optimizer's, without ZeRO
                self.stage12(mp, keep)
            elif not self.lay.moe:
                self.stage0(mp, keep)
        return {f'{kind}/{name}': self.whole(name, ranks)
                for (kind, name), ranks in local.items()}

    def whole(self, name, ranks):
        """The tensor-parallel ranks' tensors as one, by the model's own rules."""
        kind, subs = kind_of(name, self.dims)
        by_hand = self.lay.tp > 1
        alone = ranks[0][0].dim() == 0 or '.deepspeed_experts.' in name
        if self.tp == 1 or kind == 'rep' or alone or (kind == 'vocab' and not by_hand):
            return [t for held in ranks.values() for t in held]
        sizes = None
        if self.lay.autotp and subs:
            sizes = [auto_sizes(name, subs, self.dims, self.tp, r) for r in range(self.tp)]
        out = []
        for copy in range(max(map(len, ranks.values()))):
            parts = [ranks[r][min(copy, len(ranks[r]) - 1)] for r in range(self.tp)]
            full = unshard(parts, kind, subs, sizes)
            out.append(full[:self.dims.vocab] if kind == 'vocab' else full)
        return out

    def weights(self, mp, keep):
        """Goes through what modules, layer files and expert files hold."""
        module = self.models[mp, 0]['module'] or {}
        for name, tensor in module.items():
            if tensor.numel() or self.lay.stage < 3:
                keep('weight', name, mp, tensor)
        for file, content in self.contents.items():
            layer = LAYER.match(file)
            if layer and mp == int(layer[2]):
                tied = self.lay.tied and int(layer[1]) == 0
                for name, tensor in content.items():
                    keep('weight', f'{"tied_modules.embed" if tied else int(layer[1])}.{name}',
                         mp, tensor)
            elif '_expert_' in file and mp == 0:
                for name, tensor in content.items():
                    keep('weight', name, mp, tensor)

    def states(self, zero, g):
        """{kind: tensor} of one partition, its master among them."""
        base = zero.get('base_optimizer_state', zero.get('optimizer_state_dict'))
        kinds = dict(base['state'][g] if isinstance(base, dict) else base[g])
        masters = zero.get('single_partition_of_fp32_groups', zero.get('fp32_flat_groups'))
        kinds['master'] = masters[g]
        return kinds

    def partitions(self, mp, g, first=0, step=1):
        """[(kind, [flat of each rank])], scalars as they are."""
        ranks = [self.optimizers[mp, dp]['optimizer_state_dict']
                 for dp in range(first, self.lay.dp, step)]
        each = [self.states(zero, g) for zero in ranks]
        check(all(e.keys() == each[0].keys() for e in each), 'states of some ranks only')
        return [(kind, [torch.as_tensor(e[kind]) for e in each]) for kind in each[0]]

    def shapes(self, mp):
        """param_shapes, or by the places of parameters in partitions, whose weights have the shapes."""
        told = self.models[mp, 0]['param_shapes']
        if told is not None:
            return told
        ranks = [self.optimizers[mp, dp]['optimizer_state_dict']['param_slice_mappings'] for dp in range(self.lay.dp)]
        held = {}
        self.weights(mp % self.tp, lambda kind, name, mp, tensor: held.setdefault(name, tensor.shape))
        return [{name: self.shape_of(name, held, sum(r[g][name].numel for r in ranks if name in r[g]))
                 for name in dict.fromkeys(n for rank in ranks for n in rank[g])} for g in range(len(ranks[0]))]

    @staticmethod
    def shape_of(name, held, elements):
        check(name in held and held[name].numel() == elements, f'no shape of {name}')
        return held[name]

    def stage12(self, mp, keep):
        for g, group in enumerate(self.shapes(mp)):
            experts = any(map(EXPERT.match, group))
            degree = self.lay.ep if experts else 1
            for e in range(degree):
                zero = self.optimizers[mp, e]['optimizer_state_dict']
                gaps = (zero.get('param_alignment_paddings') or {}) if self.lay.aligned else {}
                for kind, parts in self.partitions(mp, g, e, degree):
                    self.flat_group(mp, kind, parts, group, e, gaps[g] if gaps else (), keep)

    def flat_group(self, mp, kind, parts, group, expert_rank, gaps, keep):
        whole = None if parts[0].dim() == 0 else joined(parts)
        at = 0
        for i, (name, shape) in enumerate(group.items()):
            found = EXPERT.match(name)
            if found:
                number = int(found[2]) + expert_rank * self.dims.experts // self.lay.ep
                name = f'{found[1]}{number}{found[3]}'
            if whole is None:
                for part in parts:
                    keep(kind, name, mp, part)
                continue
            keep(kind, name, mp, cut(whole, at, shape))
            at += torch.Size(shape).numel() + (gaps[i] if gaps else 0)

    def stage3(self, mp, keep):
        for g, group in enumerate(self.models[mp, 0]['param_shapes']):
            for kind, parts in self.partitions(mp, g):
                self.sliced_group(mp, kind, parts, group, keep)
        model = self.models[mp, 0]
        for name, shape in (model.get('frozen_param_shapes') or {}).items():
            parts = [self.models[mp, dp]['frozen_param_fragments'][name]
                     for dp in range(self.lay.dp)]
            keep('weight', name, mp, cut(joined(parts), 0, shape))

    def sliced_group(self, mp, kind, parts, group, keep):
        needed = sum(-(-s.numel() // self.lay.dp) for s in group.values())
        check(all(p.dim() == 0 or len(p) == needed for p in parts), 'a part of another size')
        at = 0
        for name, shape in group.items():
            size = -(-shape.numel() // self.lay.dp)
            for part in parts if parts[0].dim() == 0 else ():
                keep(kind, name, mp, part)
            if parts[0].dim():
                held = cut(joined([p[at:at + size] for p in parts]), 0, shape)
                keep(kind, name, mp, held)
                if kind == 'master':  # weights are stored as masters only
                    keep('weight', name, mp, held.to(self.models[0, 0]['module'][name].dtype))
            at += size

    def stage0(self, mp, keep):
        model = self.models[mp, 0]
        names = [n for n in model['module'] if n not in model['buffer_names']]
        optimizer = model['optimizer']
        states = optimizer.get('optimizer_state_dict', optimizer)['state']
        if 'fp32_groups_flat' in optimizer:  # weights are views of one run, too
            names.sort(key=lambda n: model['module'][n].storage_offset())
            shapes = {n: model['module'][n].shape for n in names}
            master, = optimizer['fp32_groups_flat']
            for kind, value in [('master', master), *states[0].items()]:
                self.flat_group(mp, kind, [torch.as_tensor(value)], shapes, 0, (), keep)
            return
        masters = [m for g in optimizer.get('fp32_groups', ()) for m in g]
        for i, name in enumerate(names):
            keep('master', name, mp, masters[i] if masters else model['module'][name])
            for kind, value in states[i].items():
                keep(kind, name, mp, torch.as_tensor(value))
