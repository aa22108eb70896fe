# SPDX-License-Identifier: Apache-2.0
"""In a source's own layout every rank<N> holds what that rank had, exactly.

The weights are compared with the source's rank files, read here by torch and by
nothing of ours; the optimizer states with the truth, cut by what the files say
of themselves, which the weights have proved.
"""
import glob
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from daemon import FIXTURES, checkpoint, step_of, truth_of
from test_rank_files import bits, read, want_of
from tiny_model import Dims, flat_name
from variants import VARIANTS


class Source:
    """The rank files of one checkpoint."""

    def __init__(self, variant):
        self.lay = VARIANTS[variant]
        self.tp = self.lay.tp * (self.lay.autotp or 1)
        self.folder = os.path.join(checkpoint(variant), 'global_step5')

    def load(self, name):
        """One file, by its name in the tag's directory."""
        return torch.load(os.path.join(self.folder, name), weights_only=False)

    def place(self, rank):
        """(tp, dp, pp) of a global rank: tp fastest, then dp."""
        tp, dp = self.tp, self.lay.dp
        return rank % tp, rank // tp % dp, rank // (tp * dp)

    def model(self, rank):
        """The model states that a rank wrote or shared."""
        tp, _, pp = self.place(rank)
        mp = f'mp_rank_{pp * self.tp + tp:02d}_model_states.pt'
        return self.load(('zero_pp_rank_0_' if self.lay.stage == 3 else '')
                         + mp)

    def weights(self, rank):
        """{name: tensor} of what the rank's module held."""
        model = self.model(rank)
        if model['module'] is None:
            return self.layers(rank, model)
        held = {k: v for k, v in model['module'].items() if v.numel()}
        if self.lay.stage == 3:
            held.update(self.gathered(rank, model))
        held.update(self.experts(rank))
        return held

    def layers(self, rank, model):
        """A pipeline stage's own layer files."""
        groups = model['param_shapes'] or [group for dp in range(self.lay.dp) for group in self.load(
            f'bf16_zero_pp_rank_{dp}_mp_rank_{self.place(rank)[2]:02d}_optim_states.pt')['optimizer_state_dict']['param_slice_mappings']]
        names = [n for group in groups for n in group]
        numbers = {int(n.split('.')[0]) for n in names if n[0].isdigit()}
        tied = {n.split('.', 2)[1] for n in names if n.startswith('tied_')}
        held = {}
        for number in numbers:
            part = self.load(f'layer_{number:02d}-model_'
                             f'{self.place(rank)[0]:02d}-model_states.pt')
            held.update({f'{number}.{k}': v for k, v in part.items()})
        for key in tied:  # the fixture ties the first layer to the last
            part = self.load(
                f'layer_00-model_{self.place(rank)[0]:02d}-model_states.pt')
            held.update({f'tied_modules.{key}.{k}': v
                         for k, v in part.items()})
        return held

    def experts(self, rank):
        """The experts of the rank's place in its expert-parallel group."""
        held, lay = {}, self.lay
        pattern = os.path.join(self.folder, 'layer_*_expert_*_model_states.pt')
        files = {os.path.basename(f) for f in glob.glob(pattern)}
        for layer in {f.split('_')[1] for f in files}:
            mine = [f for f in files if f.split('_')[1] == layer]
            each = len(mine) // lay.ep
            for name in mine:
                if int(name.split('_')[3]) // each == rank % lay.ep:
                    held.update(self.load(name))
        return held

    def gathered(self, rank, model):
        """ZeRO 3: the slices of all data-parallel ranks, put together."""
        tp, _, pp = self.place(rank)
        flats, frozen = [], []
        for dp in range(self.lay.dp):
            stem = f'zero_pp_rank_{dp}_mp_rank_{pp * self.tp + tp:02d}'
            name, = glob.glob(f'{self.folder}/*{stem}_optim_states.pt')
            state = torch.load(name, weights_only=False)
            flats.append(state['optimizer_state_dict']['fp32_flat_groups'])
            frozen.append(self.load(f'{stem}_model_states.pt').get(
                'frozen_param_fragments') or {})
        held = {}
        for g, group in enumerate(model['param_shapes']):
            at = 0
            for name, shape in group.items():
                size = -(-shape.numel() // self.lay.dp)
                parts = [flat[g][at:at + size] for flat in flats]
                held[name] = torch.cat(parts)[:shape.numel()].view(shape)
                at += size
        for name, shape in (model.get('frozen_param_shapes') or {}).items():
            parts = torch.cat([f[name].flatten() for f in frozen])
            held[name] = parts[:shape.numel()].view(shape)
        return held


def own_layout(step):
    """The name of the source's own layout, which is always listed."""
    with open(os.path.join(step, 'info.json')) as f:
        layout = json.load(f)['layout']
    assert layout in os.listdir(os.path.join(step, 'view')), layout
    return layout


def check_states(folder, truth, naming):
    """Every state against the truth, cut as the file says."""
    tensors, parts = read(folder)
    for (file, key), got in tensors.items():
        if file != 'optimizer' or key.startswith('step/'):
            continue
        kind, name = key.split('/', 1)
        full = want_of(truth, file, f'{kind}/{naming(name)}')[1].to(got.dtype)
        part = parts[file, key]
        local = torch.zeros(part.get('local_shape', got.shape),
                            dtype=got.dtype)
        for piece in parts['model', name]['pieces']:
            box = tuple(slice(*b) for b in piece['box'])
            into = tuple(slice(a, a + b[1] - b[0])
                         for a, b in zip(piece['at'], piece['box']))
            local[into] = full[box]
        want = local
        if 'range' in part:
            begin, end = part['range']
            want = torch.zeros_like(got)
            want[:end - begin] = local.flatten()[begin:end]
        assert torch.equal(bits(got), bits(want)), (folder, key)


@pytest.mark.parametrize('variant', VARIANTS)
def test_ranks_hold_what_they_had(mount, variant):
    step, source = step_of(mount, variant), Source(variant)
    layout = own_layout(step)
    truth = load_file(truth_of(variant))
    with open(os.path.join(FIXTURES, variant, 'meta.json')) as f:
        layers = json.load(f)['dims']['layers']

    def naming(name):
        return flat_name(name, Dims(layers=layers))
    for rank in range(source.lay.world):
        folder = os.path.join(step, 'view', layout, f'rank{rank}')
        got = torch.load(os.path.join(folder, 'model.pt'))
        want = source.weights(rank)
        assert set(want) == set(got), rank
        for name, tensor in want.items():
            shown = got[name]
            assert shown.shape == tensor.shape, (rank, name)
            if source.lay.stage == 3 and tensor.is_floating_point():
                tensor = tensor.to(shown.dtype)  # stored as masters only
            assert shown.dtype == tensor.dtype, (rank, name)
            assert torch.equal(bits(shown), bits(tensor)), (rank, name)
        check_states(folder, truth, naming)
