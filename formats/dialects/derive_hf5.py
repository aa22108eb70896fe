#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes hf5.toml from the installed transformers: derive_hf5.py OUTPUT [MODEL_TYPE...].

Tiny models of each architecture have an integer of its own in every element (fp32 holds them up to 2^24). transformers
itself writes their files; one read of both then tells which box of which file's tensor each module's tensor consists of.
A table says these boxes as rules, and is refused here where a rule would not give the same boxes again.
"""
import bisect
import collections
import logging
import math
import os
import re
import sys
import tempfile
import warnings

os.environ.update(TRANSFORMERS_VERBOSITY='error', HF_HUB_DISABLE_PROGRESS_BARS='1')

# pylint: disable=wrong-import-position
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, __version__

BASE = {'vocab_size': 96, 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2, 'num_attention_heads': 4,
        'num_key_value_heads': 2, 'head_dim': 8, 'max_position_embeddings': 64, 'pad_token_id': 0, 'bos_token_id': 1,
        'eos_token_id': 2}
MOE = {'num_experts': 4, 'num_local_experts': 4, 'n_routed_experts': 4, 'num_experts_per_tok': 2,
       'moe_intermediate_size': 16, 'shared_expert_intermediate_size': 24, 'n_shared_experts': 1,
       'first_k_dense_replace': 1, 'n_group': 1, 'topk_group': 1, 'decoder_sparse_step': 1, 'mlp_only_layers': [],
       'moe_num_experts': 4}
MLA = {'q_lora_rank': 16, 'kv_lora_rank': 12, 'qk_rope_head_dim': 4, 'qk_nope_head_dim': 8, 'v_head_dim': 8, 'head_dim': 4,
       'num_key_value_heads': 4}
LINEAR = {'linear_num_key_heads': 2, 'linear_num_value_heads': 4, 'linear_key_head_dim': 8, 'linear_value_head_dim': 8}
SMALL_GPT = {'n_embd': 32, 'n_layer': 2, 'n_head': 4, 'n_positions': 64}
ARCHITECTURES = {
    **{kind: {} for kind in ('llama', 'mistral', 'qwen2', 'qwen3', 'gemma', 'gemma2', 'gemma3_text', 'phi3', 'olmo2',
                             'gpt_neox', 'falcon', 'starcoder2', 'cohere', 'glm4', 'granite', 'nemotron', 'smollm3',
                             'exaone4')},
    'gpt2': SMALL_GPT,
    'gptj': {**SMALL_GPT, 'rotary_dim': 4},
    'opt': {'ffn_dim': 48, 'word_embed_proj_dim': 32},
    'bloom': {'n_layer': 2, 'n_head': 4},
    **{kind: MOE for kind in ('mixtral', 'qwen2_moe', 'qwen3_moe', 'olmoe', 'glm4_moe', 'gpt_oss', 'minimax_m2',
                              'phimoe', 'granitemoe', 'ernie4_5_moe')},
    'deepseek_v2': {**MOE, **MLA},
    'deepseek_v3': {**MOE, **MLA},
    'llama4_text': {**MOE, 'interleave_moe_layer_step': 1},
    'qwen3_next': {**MOE, **LINEAR, 'linear_conv_kernel_dim': 4, 'layer_types': ['linear_attention', 'full_attention']},
    'qwen3_5_moe_text': {**MOE, **LINEAR},
    'jamba': {**MOE, 'attn_layer_period': 2, 'attn_layer_offset': 1, 'expert_layer_period': 2,
              'expert_layer_offset': 1},
    'mamba2': {'num_heads': 8, 'state_size': 8, 'n_groups': 1, 'head_dim': 8, 'chunk_size': 8},
}

Rule = collections.namedtuple('Rule', 'to source join stack transpose')
Box = collections.namedtuple('Box', 'name first index extent stride')  # of a file's tensor; where it lies in the module's


def build(kind):
    """A tiny model of the type, of distinct integers; a tied tensor is numbered once."""
    wanted = {**BASE, **ARCHITECTURES[kind]}
    try:
        config = CONFIG_MAPPING[kind](**wanted)
    except Exception:  # pylint: disable=broad-except
        wanted.pop('head_dim')
        config = CONFIG_MAPPING[kind](**wanted)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    first, seen = 1, set()
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point() and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensor.copy_(torch.arange(first, first + tensor.numel(), dtype=torch.float32).reshape(tensor.shape))
                first += tensor.numel()
    assert first < 2**24, 'fp32 does not hold that many integers'
    return model


def modules_of(model):
    """The tensors of the modules, tied ones under their first name."""
    out, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and tensor.numel() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            out[name] = tensor.detach()
    return out


def files_of(model, directory):
    """What save_pretrained writes."""
    model.save_pretrained(directory)
    return load_file(os.path.join(directory, 'model.safetensors'))


class Source:
    """Finds the tensor that holds an element by its integer."""

    def __init__(self, tensors):
        first = {}
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.numel():
                first.setdefault(int(tensor.reshape(-1)[0]), (name, tensor.numel()))
        self.begins = sorted(first)
        self.of = [(begin, *first[begin]) for begin in self.begins]

    def at(self, code):
        """(integer of its first element, name, elements)."""
        return self.of[bisect.bisect_right(self.begins, code) - 1]


def boxes_of(source, target):
    """The boxes of the source's tensors that the target consists of, each as large as it can be."""
    codes = target.to(torch.float64).to(torch.int64)
    done = torch.zeros_like(codes, dtype=torch.bool)
    out = []
    while not bool(done.all()):
        index = [int(i) for i in torch.unravel_index((~done).reshape(-1).to(torch.int8).argmax(), codes.shape)]
        begin, name, count = source.at(int(codes[tuple(index)]))
        extent, stride = [1] * codes.dim(), [0] * codes.dim()
        for dim in reversed(range(codes.dim())):  # as long as the step from slab to slab is one number

            def slab(k, dim=dim):
                at = lambda e: index[e] + (k if e == dim else 0)
                return codes[tuple(slice(at(e), at(e) + (extent[e] if e > dim else 1)) for e in range(codes.dim()))]

            zero, step, k = slab(0), None, 1
            while index[dim] + k < codes.shape[dim]:
                delta = slab(k) - zero
                step = int(delta.flatten()[0]) if step is None else step
                inside = int(slab(k).min()) >= begin and int(slab(k).max()) < begin + count
                if not inside or not bool((delta == step * k).all()):
                    break
                k += 1
            extent[dim], stride[dim] = k, step if k > 1 else 0
        done[tuple(slice(i, i + e) for i, e in zip(index, extent))] = True
        out.append(Box(name, int(codes[tuple(index)]) - begin, tuple(index), tuple(extent), tuple(stride)))
    return out


def numbers(name):
    """The numbers that are words of the name."""
    return [int(word) for word in name.split('.') if word.isdigit()]


def template(name, holes):
    """The name with its numbers as holes, in order."""
    left = iter(holes)
    return re.sub(r'(?<=\.)\d+(?=\.)', lambda _: next(left), name)


def part_of(box, rule, part, files):
    """The box that the rule says for a part: as MapsOfPart of core/dialect/dialect.h."""
    file = list(files[box.name].shape)
    stride = [math.prod(file[d + 1:]) for d in range(len(file))]
    if rule.transpose:
        file[-2:], stride[-2:] = file[-1:-3:-1], stride[-1:-3:-1]
    index = [0] * len(file)
    if rule.join != 'whole':
        dim = 0 if rule.join == 'rows' else int(rule.join.split()[1])
        index[dim] = part * file[dim]
    if rule.stack:
        file, stride, index = [1] + file, [0] + stride, [numbers(box.name)[-1]] + index
    stride = [s if e > 1 else 0 for s, e in zip(stride, file)]
    return Box(box.name, 0, tuple(index), tuple(file), tuple(stride))


def rule_of(name, shape, boxes, files):
    """The rule that gives the boxes; None where the file has the same tensor under the same name."""
    layer = numbers(name)
    assert len(layer) < 2, f'{name}: more numbers than a layer'
    deep = len(numbers(boxes[0].name)) - len(layer)
    holes = ['{layer}'] * len(layer) + ['{expert}'] * deep
    stack = 'expert' if deep else ''
    firsts = [box for box in boxes if not stack or numbers(box.name)[-1] == 0]
    join = 'whole'
    if len(firsts) > 1:
        dim = next(d for d in range(len(shape)) if firsts[0].index[d] != firsts[1].index[d]) - (1 if stack else 0)
        join = 'rows' if dim == 0 else f'dim {dim}'
    strides = firsts[0].stride
    transpose = len(shape) > 1 and strides[-1] > 1 and strides[-2] == 1
    rule = Rule(template(name, ['{layer}'] * len(layer)), tuple(template(box.name, holes) for box in firsts), join, stack,
                transpose)
    parts = {source: part for part, source in enumerate(rule.source)}
    for box in boxes:
        said = part_of(box, rule, parts[template(box.name, holes)], files)
        assert said == box, f'{name}: no rule says {box}, the nearest says {said}'
        assert numbers(box.name)[:len(layer)] == layer, f'{name}: of another layer: {box.name}'
    assert len(boxes) == len(rule.source) * (shape[0] if stack else 1), f'{name}: {len(boxes)} boxes'
    return None if rule == Rule(rule.to, (rule.to,), 'whole', '', False) else rule


def rules_of(model):
    """The rules of a model, in its modules' order."""
    with tempfile.TemporaryDirectory() as directory:
        files = files_of(model, directory)
    source = Source(files)
    rules = {}
    for name, tensor in modules_of(model).items():
        rule = rule_of(name, tensor.shape, boxes_of(source, tensor), files)
        if rule:
            assert rules.setdefault(rule.to, rule) == rule, f'{name}: two rules for {rule.to}'
    return list(rules.values())


def quoted(texts):
    """A list of texts, in lines of at most 100 columns."""
    lines, line = [], '['
    for i, text in enumerate(texts):
        piece = f'"{text}"' + (',' if i + 1 < len(texts) else ']')
        if len(line) + len(piece) > 90 and line.strip():
            lines.append(line.rstrip())
            line = ' ' * 8
        line += piece + ' '
    return '\n'.join([*lines, line.rstrip()])


def table(found):
    """The text of hf5.toml without its head, of {model type: rules}."""
    types = collections.defaultdict(list)
    for kind, rules in found.items():
        for rule in rules:
            types[rule].append(kind)
    out = []
    for rule, kinds in sorted(types.items(), key=lambda item: (item[0].source, item[0].to)):
        out += ['', '[[map]]', f'model_types = {quoted(sorted(kinds))}', f'to = "{rule.to}"', f'from = {quoted(rule.source)}']
        out += [f'join = "{rule.join}"'] if rule.join != 'whole' else []
        out += [f'stack = "{rule.stack}"'] if rule.stack else []
        out += ['transpose = true'] if rule.transpose else []
    same = sorted(kind for kind, rules in found.items() if not rules)
    out += ['', '[[same]]', f'model_types = {quoted(same)}', '']
    return '\n'.join(out)


def main():
    """Writes the table."""
    warnings.filterwarnings('ignore')
    logging.disable(logging.WARNING)
    found = {kind: rules_of(build(kind)) for kind in sys.argv[2:] or ARCHITECTURES}
    with open(sys.argv[1], 'w', encoding='utf-8') as out:
        out.write('# SPDX-License-Identifier: Apache-2.0\n'
                  f'# Modules of transformers 5 and the files that it writes: derive_hf5.py, of transformers {__version__}.\n'
                  '# `to` is a module\'s tensor, `from` those of files; docs/reference/dialects.md describes tables.\n'
                  'name = "hf5"\ndescription = "modules of transformers 5"\n')
        out.write(table(found))


if __name__ == '__main__':
    main()
