# SPDX-License-Identifier: Apache-2.0
"""Engines whose optimizers are not plain Adams, of a model with odd parameters.

Three groups of their own rates; one has fewer elements than ranks. A parameter is 0-d, one never has
a gradient, one is frozen; one may have no elements, which DeepSpeed takes below ZeRO 3.  `whole` puts the tensors of a save together by DeepSpeed's own layout.
"""
import glob
import json
import os

import tiny_model  # noqa: F401  (sets what DeepSpeed reads when it is imported)
import deepspeed
import torch

STEPS, MORE = 4, 2
GROUPS = [('first.weight', 'last.weight', 'unused'), ('gain', 'first.bias', 'nothing'), ('heat', 'last.bias')]
OPTIMIZERS = {
    'nadam': lambda groups: torch.optim.NAdam(groups, lr=0.01),  # a number besides step
    'amsgrad': lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    'rmsprop': lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=.9, centered=True),
}


class Odd(torch.nn.Module):
    """A model of 80 parameters."""

    def __init__(self, empty):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)
        self.gain = torch.nn.Parameter(torch.tensor([1.5, 2.5, 0.5]))
        self.heat = torch.nn.Parameter(torch.tensor(0.7))
        self.nothing = torch.nn.Parameter(torch.ones(0)) if empty else None
        self.unused = torch.nn.Parameter(torch.ones(4))
        self.fixed = torch.nn.Parameter(torch.arange(11.) / 10, requires_grad=False)
        self.register_buffer('shift', torch.arange(3.))

    def forward(self, x):
        y = self.last(torch.tanh(self.first(x)) * self.heat) * self.gain
        return ((y + self.shift + self.fixed[:3]) ** 2).mean()


def engine_of(stage, name, zero, empty):
    """A real engine."""
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    deepspeed.init_distributed('gloo', verbose=False)
    m = Odd(empty)
    known = dict(m.named_parameters())
    groups = [{'params': [known[name] for name in names if name in known], **more}
              for names, more in zip(GROUPS, ({'lr': 0.02}, {}, {'lr': 0.005}))]
    config = {'train_micro_batch_size_per_gpu': 1, 'steps_per_print': 10**6, 'bf16': {'enabled': True},
              'zero_allow_untested_optimizer': True,
              'zero_optimization': {'stage': stage, 'sub_group_size': 20, **zero}}
    return deepspeed.initialize(model=m, optimizer=OPTIMIZERS[name](groups), config=config)[0]


def train(engine, first, steps):
    """The losses of some steps, equal on all ranks."""
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(1, 7, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def job(stage, name, zero, view, out, empty=False):
    """One rank: trains, or loads the view; saves, and keeps the losses of the next steps."""
    engine = engine_of(stage, name, zero, empty)
    if view is None:
        train(engine, 0, STEPS)
    else:
        path, _ = engine.load_checkpoint(view)
        assert path is not None
    engine.save_checkpoint(out)
    losses = train(engine, STEPS, MORE)
    if torch.distributed.get_rank() == 0:
        with open(f'{out}/losses.json', 'w', encoding='utf-8') as f:
            json.dump(losses, f)


def pieces_of(flats, shapes, three):
    """{name: tensor} of one kind's partitions."""
    out, at, flat = {}, 0, torch.cat(flats)
    for name, shape in shapes.items():
        length = -(-shape.numel() // len(flats)) if three else shape.numel()
        piece = torch.cat([f[at:at + length] for f in flats]) if three else flat[at:at + length]
        out[name] = piece[:shape.numel()].detach().view(shape)
        at += length
    return out


def unsharded(model):
    """The same of a save without ZeRO, whose optimizer numbers its states."""
    masters, base = model['optimizer']['fp32_groups'], model['optimizer']['optimizer_state_dict']
    out, number = {}, 0
    for names, group in zip(GROUPS, masters):
        for name, master in zip(names, group):
            out[f'master/{name}'] = master.detach()
            out.update((f'{kind}/{name}', torch.as_tensor(value)) for kind, value in base['state'].get(number, {}).items())
            number += 1
    return out, base['param_groups']


def whole(save):
    """{kind/name: tensor}, settings of groups and losses of a save."""
    with open(f'{save}/latest', encoding='utf-8') as f:
        folder = os.path.join(save, f.read())
    model = torch.load(sorted(glob.glob(f'{folder}/*model_states.pt'))[0], weights_only=False)
    out, groups = sharded(folder, model) if model['optimizer'] is None else unsharded(model)
    out.update((f'buffer/{n}', model['module'][n]) for n in model['buffer_names'])
    settings = [{k: v for k, v in g.items() if k != 'params'} for g in groups]
    with open(f'{save}/losses.json', encoding='utf-8') as f:
        return out, settings, json.load(f)


def sharded(folder, model):
    """The same of ZeRO's partitions: {kind/name: tensor}, groups."""
    names = sorted(glob.glob(f'{folder}/*optim_states.pt'))  # fewer than ten ranks
    ranks = [torch.load(n, weights_only=False)['optimizer_state_dict'] for n in names]
    three = 'fp32_flat_groups' in ranks[0]
    masters = 'fp32_flat_groups' if three else 'single_partition_of_fp32_groups'
    base = [r['optimizer_state_dict' if three else 'base_optimizer_state'] for r in ranks]
    out = {}
    for g, shapes in enumerate(model['param_shapes']):
        kinds = {'master': [r[masters][g] for r in ranks]}
        for kind in base[0]['state'][g]:
            kinds[kind] = [b['state'][g][kind] for b in base]
        for kind, values in kinds.items():
            number = not torch.is_tensor(values[0]) or values[0].dim() == 0
            assert not number or len({float(v) for v in values}) == 1, kind
            found = dict.fromkeys(shapes, torch.tensor(float(values[0]))) if number else pieces_of(values, shapes, three)
            out.update((f'{kind}/{name}', value) for name, value in found.items())
    return out, base[0]['param_groups']
