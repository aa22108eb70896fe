# SPDX-License-Identifier: Apache-2.0
"""A 1T-parameter, 1,024-rank ZeRO-3 checkpoint that takes no space.

torch itself writes the files, with skip_data: real zip records, directories
and pickles, and holes where tensor data would be.  12 TB of apparent size; the
headers are all that lies on disk.

Usage: synthetic.py OUT [--ranks N] [--layers N]
"""
import argparse
import os
import sys
from collections import OrderedDict

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

HIDDEN, FFN, VOCAB = 8192, 131072, 32000
TAG = 'global_step1000'


def shapes(layers):
    """{parameter: shape}: 3.49e9 elements a layer, 288 layers are 1T."""
    out = OrderedDict([('model.embed_tokens.weight', (VOCAB, HIDDEN))])
    for i in range(layers):
        pre = f'model.layers.{i}.'
        out[pre + 'input_layernorm.weight'] = (HIDDEN,)
        out[pre + 'self_attn.qkv_proj.weight'] = (3 * HIDDEN, HIDDEN)
        out[pre + 'self_attn.o_proj.weight'] = (HIDDEN, HIDDEN)
        out[pre + 'post_attention_layernorm.weight'] = (HIDDEN,)
        out[pre + 'mlp.gate_up_proj.weight'] = (2 * FFN, HIDDEN)
        out[pre + 'mlp.down_proj.weight'] = (HIDDEN, FFN)
    out['model.norm.weight'] = (HIDDEN,)
    out['lm_head.weight'] = (VOCAB, HIDDEN)
    return out


def numel(shape):
    """Elements of a shape."""
    return torch.Size(shape).numel()


def model_states(names, ranks):
    """Returns what a rank's model file holds under ZeRO 3."""
    module = OrderedDict((n, torch.empty(0, dtype=torch.bfloat16))
                         for n in names)
    listed = OrderedDict((n, torch.Size(s)) for n, s in names.items())
    return {'module': module, 'buffer_names': [], 'optimizer': None,
            'param_shapes': [listed], 'frozen_param_shapes': OrderedDict(),
            'shared_params': {}, 'frozen_param_fragments': OrderedDict(),
            'lr_scheduler': {'last_epoch': 1000, '_last_lr': [1e-4]},
            'data_sampler': None, 'random_ltd': None,
            'sparse_tensor_module_names': set(), 'skipped_steps': 0,
            'global_steps': 1000, 'global_samples': 1000 * ranks,
            'dp_world_size': ranks, 'mp_world_size': 1,
            'checkpoint_parallel_dimensions': {'pp_degree': 1,
                                               'tp_degree': 1},
            'ds_config': {'zero_optimization': {'stage': 3}},
            'ds_version': '0.19.7', 'iteration': 1000}


def optimizer_states(ranks, master, exp_avg, exp_avg_sq):
    """Returns what a rank's optimizer file holds under ZeRO 3, one sub-group."""
    moments = {'step': torch.tensor(1000.), 'exp_avg': exp_avg,
               'exp_avg_sq': exp_avg_sq}
    group = {'weight_decay': 0.1, 'lr': 1e-4, 'betas': (0.9, 0.95),
             'eps': 1e-8, 'params': [0]}
    return {'optimizer_state_dict': {
        'zero_stage': ZeroStageEnum.weights, 'loss_scaler': LossScaler(1),
        'dynamic_loss_scale': False, 'overflow': False,
        'partition_count': ranks,
        'optimizer_state_dict': {'state': {0: moments},
                                 'param_groups': [group]},
        'fp32_flat_groups': [master]},
        'ds_config': {'zero_optimization': {'stage': 3}},
        'ds_version': '0.19.7'}


def partition(tensors, rank, ranks):
    """A rank's flat share: of each tensor its part, the last one padded."""
    parts = []
    for tensor in tensors:
        share = -(-tensor.numel() // ranks)
        padded = torch.zeros(share * ranks)
        padded[:tensor.numel()] = tensor.flatten()
        parts.append(padded[rank * share:(rank + 1) * share])
    return torch.cat(parts)


def make_filled(out, states, ranks):
    """Write a small one with values: {kind: {parameter: fp32 tensor}}."""
    folder = os.path.join(out, TAG)
    os.makedirs(folder, exist_ok=True)
    model = model_states({n: t.shape for n, t in states['master'].items()},
                         ranks)
    for rank in range(ranks):
        mine = f'zero_pp_rank_{rank}_mp_rank_00_'
        flat = [partition(states[kind].values(), rank, ranks)
                for kind in ('master', 'exp_avg', 'exp_avg_sq')]
        torch.save(model, os.path.join(folder, mine + 'model_states.pt'))
        torch.save(optimizer_states(ranks, *flat), os.path.join(
            folder, 'bf16_' + mine + 'optim_states.pt'))
    with open(os.path.join(out, 'latest'), 'w') as f:
        f.write(TAG)


def make(out, ranks=1024, layers=288):
    """Write the checkpoint; returns its number of parameters' elements."""
    names = shapes(layers)
    folder = os.path.join(out, TAG)
    os.makedirs(folder, exist_ok=True)
    elements = sum(-(-numel(s) // ranks) for s in names.values())
    model = model_states(names, ranks)
    model['args'] = {'num_attention_heads': HIDDEN // 128}
    optimizer = optimizer_states(ranks, torch.empty(elements),
                                 torch.empty(elements), torch.empty(elements))
    for rank in range(ranks):
        mine = f'zero_pp_rank_{rank}_mp_rank_00_'
        with torch.serialization.skip_data():
            torch.save(model, os.path.join(folder, mine + 'model_states.pt'))
            torch.save(optimizer, os.path.join(
                folder, 'bf16_' + mine + 'optim_states.pt'))
    with open(os.path.join(out, 'latest'), 'w') as f:
        f.write(TAG)
    return sum(numel(s) for s in names.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('out')
    parser.add_argument('--ranks', type=int, default=1024)
    parser.add_argument('--layers', type=int, default=288)
    args = parser.parse_args()
    print(f'{make(args.out, args.ranks, args.layers):.4g} elements')
    return 0


if __name__ == '__main__':
    sys.exit(main())
