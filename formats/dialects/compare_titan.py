#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds titan.toml against torchtitan's own StateDictAdapters: every element of every tensor of tiny models.

Usage: compare_titan.py      prints a line for each model type; ends with 1 if one differs
"""
import importlib.abc
import importlib.machinery
import os
import re
import sys
import tempfile
import tomllib
import types
from types import SimpleNamespace as Namespace

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

# pylint: disable=wrong-import-position
import torch

import derive_hf5


class Absent(types.ModuleType):
    """A package of GPUs that torchtitan imports and an adapter never calls."""
    __path__ = []
    __version__ = '9.9.9'

    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        return type(name, (), {'__init__': lambda *_, **__: None}) if name[0].isupper() or name == 'dtype' else Absent(name)

    def __call__(self, *words, **_):
        return words[0] if words and callable(words[0]) else lambda function: function


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Absent where triton is not installed."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition('.')[0] == 'triton' else None

    def create_module(self, spec):
        return Absent(spec.name)

    def exec_module(self, module):
        """Nothing to run."""


def adapters():
    """Those of torchtitan, by the model type of transformers."""
    import torch._dynamo  # pylint: disable=unused-import  # before anything looks like triton
    sys.meta_path.append(Finder())
    from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
    return {'llama': Llama3StateDictAdapter, 'qwen3': Qwen3StateDictAdapter, 'qwen3_moe': Qwen3StateDictAdapter,
            'deepseek_v3': DeepSeekV3StateDictAdapter}


def config_of(config):
    """The fields of torchtitan's config that an adapter asks for."""
    experts = getattr(config, 'num_experts', None) or getattr(config, 'n_routed_experts', None)
    attention = Namespace(n_heads=config.num_attention_heads, n_kv_heads=config.num_key_value_heads, head_dim=config.head_dim,
                          q_lora_rank=getattr(config, 'q_lora_rank', 0) or 0)
    layer = Namespace(attention=attention, moe=Namespace(num_experts=experts) if experts else None)
    return Namespace(layers=[layer] * config.num_hidden_layers, dim=config.hidden_size, enable_weight_tying=config.tie_word_embeddings)


def interleaved(tensor, groups):
    """Rows (half, j) of each group as rows (j, half)."""
    return tensor.view(groups, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def pattern(name):
    text = re.escape(name).replace(r'\{layer\}', r'(?P<layer>\d+)').replace(r'\{expert\}', r'(?P<expert>\d+)')
    return re.compile(text + '$')


def translated(files, rules, sizes):
    """The tensors that the rules make of those of files."""
    out, stacks = {}, {}
    for rule in rules:
        for name, tensor in files.items():
            found = pattern(rule['from'][0]).match(name)
            if not found:
                continue
            to = rule['to'].replace('{layer}', found.groupdict().get('layer') or '')
            if rule.get('join') == 'interleave2':
                tensor = interleaved(tensor, sizes[rule['groups']])
            if rule.get('stack'):
                stacks.setdefault(to, {})[int(found['expert'])] = tensor
            else:
                assert to not in out, to
                out[to] = tensor
    return out | {to: torch.stack([of[i] for i in range(len(of))]) for to, of in stacks.items()}


def differences(kind, adapter, rules):
    """Names of tensors that differ from the adapter's."""
    model = derive_hf5.build(kind)
    with tempfile.TemporaryDirectory() as folder:
        files = derive_hf5.files_of(model, f'{folder}/files')
    made = adapter(config_of(model.config), None)
    made._validate_hf_rope_config = lambda *_: None  # it reads a config.json of the assets
    want = made.from_hf(dict(files))
    sizes = {'heads': model.config.num_attention_heads, 'kv_heads': model.config.num_key_value_heads}
    got = translated(files, [rule for rule in rules if kind in rule['model_types']], sizes)
    same = [name for name in want if name in got and got[name].shape == want[name].shape and torch.equal(got[name], want[name])]
    return sorted((set(want) | set(got)) - set(same)), len(want)


def main():
    with open(os.path.join(HERE, 'titan.toml'), 'rb') as file:
        rules = tomllib.load(file)['map']
    wrong = 0
    for kind, adapter in adapters().items():
        differ, count = differences(kind, adapter, rules)
        print(kind, f'{count} tensors,', f'differ: {differ[:4]}' if differ else 'all equal')
        wrong += bool(differ)
    return wrong


if __name__ == '__main__':
    sys.exit(main() > 0)
