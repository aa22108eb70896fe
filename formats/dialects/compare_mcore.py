#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares mcore.toml with what mbridge (0.15.1) makes of the same tensors: compare_mcore.py

Each tensor of a rule has an integer of its own in every element.  mbridge names its files' tensors and takes it apart;
the rule, by the words of docs/reference/dialects.md, must give the same names and elements.  Rules in spellings that
mbridge does not have (stacked and sequential experts, norms by themselves) must say what the one that it has says.
"""
import math
import os
import re
import sys
import tempfile
import tomllib
import warnings
from types import SimpleNamespace

warnings.filterwarnings('ignore')

# pylint: disable=wrong-import-position
import torch
from mbridge import AutoBridge
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from megatron.core import parallel_state
from transformers import CONFIG_MAPPING

HERE = os.path.dirname(os.path.abspath(__file__))
SIZES = {'heads': 6, 'kv_heads': 3, 'head_dim': 4, 'hidden': 12}
CONFIG = {'vocab_size': 96, 'hidden_size': 12, 'intermediate_size': 14, 'num_hidden_layers': 3, 'num_attention_heads': 6,
          'num_key_value_heads': 3, 'head_dim': 4, 'num_experts': 4, 'num_local_experts': 4, 'num_experts_per_tok': 2,
          'moe_intermediate_size': 8, 'shared_expert_intermediate_size': 12}
# Spellings that mbridge does not have, and those that it has.
OTHERS = [(r'experts\.experts\.(linear_fc\d)\.weight', r'experts.\1.weight{expert}'),
          (r'experts\.local_experts\.\{expert\}\.(linear_fc\d)\.weight', r'experts.\1.weight{expert}'),
          (r'self_attention\.(q|kv)_layernorm\.weight', r'self_attention.linear_\1_up_proj.layer_norm_weight')]
INPUT = (r'\.input_layernorm\.weight', '.self_attention.linear_qkv.layer_norm_weight')  # but for latent attention, which has it by itself
NORMS = ('pre_mlp_layernorm.weight', 'mlp.linear_fc1.layer_norm_weight')  # dense models have the second, others the first


def known_spelling(to, moe, latent):
    """The name that mbridge has for it."""
    for pattern, other in OTHERS if latent else [*OTHERS[:-1], INPUT]:
        to = re.sub(pattern, other, to)
    return to.replace(NORMS[1 if moe else 0], NORMS[0 if moe else 1])


def rendered(name, layer=1, expert=2):
    return name.replace('{layer}', str(layer)).replace('{expert}', str(expert))


def size(expression):
    return eval(expression, {'__builtins__': {}}, {k: v for k, v in SIZES.items()})  # pylint: disable=eval-used


def parts_of(rule, tensor):
    """The tensors that the rule makes of one of the dialect without its stack."""
    join = rule.get('join', 'whole')
    if join == 'whole':
        return [tensor]
    groups = int(size(rule.get('groups', '1')))
    shares = [int(size(share)) for share in rule.get('shares', ['1'] * len(rule['from']))]
    unit = tensor.shape[0] // groups // sum(shares)
    grouped = tensor.reshape(groups, -1, *tensor.shape[1:])
    return [part.reshape(-1, *tensor.shape[1:]) for part in grouped.split([share * unit for share in shares], 1)]


def numbered(*shape):
    return torch.arange(1, 1 + math.prod(shape), dtype=torch.float32).view(shape)


def tensor_for(name):
    """A tensor of distinct integers in the shape of the name's class."""
    if 'linear_qkv.weight' in name or 'linear_qkv.bias' in name:
        rows = (SIZES['heads'] + 2 * SIZES['kv_heads']) * SIZES['head_dim']
        return numbered(rows, SIZES['hidden']) if name.endswith('weight') else numbered(rows)
    return numbered(8, SIZES['hidden']) if 'norm' not in name else numbered(SIZES['hidden'])


# Its arguments are of another core's configuration, which names do not depend on.
DeepseekV3Bridge._build_config = lambda self: SimpleNamespace(mtp_num_layers=0)  # pylint: disable=protected-access


def main():
    """Exits with the number of differences."""
    with tempfile.NamedTemporaryFile() as rendezvous:
        torch.distributed.init_process_group('gloo', init_method=f'file://{rendezvous.name}-1', rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    with open(os.path.join(HERE, 'mcore.toml'), 'rb') as f:
        rules = tomllib.load(f)['map']
    compared, wrong = {}, []
    for rule in rules:
        for kind in rule['model_types']:
            config = CONFIG_MAPPING[kind](**CONFIG)
            try:
                bridge = AutoBridge.from_config(config)
            except ValueError:
                continue  # mistral is a Llama by its names
            moe = any('expert' in name for one in rules if kind in one['model_types'] for name in one['from'])
            name = rendered(known_spelling(rule['to'], moe, kind.startswith('deepseek')))
            if moe and '.mlp.linear_fc' in name and 'norm' not in name:
                continue  # layers without experts, which it does not take
            names, tensors = bridge._weight_to_hf_format(name, tensor_for(name))  # pylint: disable=protected-access
            ours = parts_of(rule, tensor_for(name))
            same = names == [rendered(one) for one in rule['from']] and all(map(torch.equal, tensors, ours))
            compared[kind] = compared.get(kind, 0) + 1
            if not same or len(tensors) != len(ours):
                wrong.append(f"{kind}: {rule['to']}: {names}")
    print(compared)
    print(f'ok {sum(compared.values())}' if not wrong else 'WRONG\n' + '\n'.join(wrong))
    sys.exit(len(wrong))


if __name__ == '__main__':
    main()
