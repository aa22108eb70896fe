#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes module_names.txt from the installed transformers: module_names.py OUTPUT [CLASS...].

Each class is built without memory ("meta") from its own defaults, and again with each setting of its config
changed: a name that is always there is one that from_pretrained asks for. Names of files are what transformers
makes of the modules' own names when it saves. Numbers become '#'. Without CLASS: what the automatic classes for
text, images with text and speech know.
"""
import copy
import re
import sys
import time
import warnings
from collections import defaultdict

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key, revert_weight_conversion
from transformers.models.auto import modeling_auto

MAPPINGS = ('CAUSAL_LM', 'IMAGE_TEXT_TO_TEXT', 'SEQ_TO_SEQ_CAUSAL_LM', 'SPEECH_SEQ_2_SEQ', 'MASKED_LM')
NUMBER = re.compile(r'(?<![^.])\d+(?![^.])')
LAYERS = re.compile(r'(^|_)(num_layers|n_layers?|depths?|layers)$|hidden_layers')
LAYER_KEYS = ('num_hidden_layers', 'n_layer', 'num_layers', 'n_layers', 'encoder_layers', 'decoder_layers', 'depth',
              'num_decoder_layers', 'encoder_num_hidden_layers')
# Tensors that a mixture-of-experts model has in some layers, as numbers of its config say.
SPARSE = re.compile(r'expert|router|\.gate\.|moe')
SECONDS = 6  # for the changed settings of one class


def parts(config):
    """The config and those of its parts, with where they stand."""
    yield (), config
    for key in getattr(config, 'sub_configs', {}):
        part = getattr(config, key, None)
        if hasattr(part, 'to_dict'):
            yield (key,), part


def shrink(config):
    """Four layers, of each kind if there are several."""
    for _, part in parts(config):
        for key in LAYER_KEYS:
            if isinstance(getattr(part, key, None), int) and getattr(part, key) > 4:
                setattr(part, key, 4)
        kinds = getattr(part, 'layer_types', None)
        if isinstance(kinds, list) and len(kinds) > 4:
            part.layer_types = (list(dict.fromkeys(kinds)) + [kinds[-1]] * 4)[:4]
    return config


def others(key, value):
    """Returns other values that the setting may have."""
    if LAYERS.search(key) or key in ('is_decoder', 'model_type', 'architectures'):
        return []
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int) and key.endswith('lora_rank'):
        return [None]  # the projection is whole
    if isinstance(value, int) and 0 <= value <= 16 and not re.search('token|vocab|hidden_size|dim|head', key):
        return [0, 1, 2]
    if isinstance(value, list) and 0 < len(value) <= 8 and all(isinstance(v, str) for v in value):
        return [[v] * len(value) for v in sorted(set(value))]
    return [0, 1, True] if value is None and re.search('moe|expert|lora|bias|norm', key) else []


def changed(config):
    """Copies with one setting changed, and the setting's name where it became None."""
    for path, part in parts(config):
        for key, value in list(part.to_dict().items()):
            for other in others(key, value):
                out = copy.deepcopy(config)
                at = out
                for name in path:
                    at = getattr(at, name)
                try:
                    setattr(at, key, other)
                except Exception:  # pylint: disable=broad-except
                    continue
                yield (None if path or other is not None else key), out


class Names:
    """The names that one config's model gives its tensors."""

    def __init__(self, cls, config):
        with torch.device('meta'):
            model = cls(config)
        state = model.state_dict()
        parameters = {k for k, _ in model.named_parameters(remove_duplicate=False)}
        spell = lambda keys: {NUMBER.sub('#', k) for k in keys}
        self.all, self.buffers = spell(state), spell(k for k in state if k not in parameters)
        ties = [re.compile(p) for p in getattr(cls, '_tied_weights_keys', None) or ()]
        self.tied = spell(k for k in state if any(t.search(k) for t in ties))
        self.files = spell(revert_weight_conversion(model, state))
        mapping = get_model_conversion_mapping(model)
        renamings = [m for m in mapping if not isinstance(m, WeightConverter)]
        converters = [m for m in mapping if isinstance(m, WeightConverter)]
        self.lost = spell(k for k in state if rename_source_key(
            k, renamings, converters, model.base_model_prefix, state) != (k, None))


def survey(cls):
    """{mark: templates} of a class."""
    try:
        config = shrink(cls.config_class())
        first = Names(cls, config)
    except Exception:  # pylint: disable=broad-except
        config = cls.config_class()
        first = Names(cls, config)
    seen, began = [first], time.time()
    nulls = {}
    for key, other in changed(config):
        if time.time() - began > SECONDS:
            break
        try:
            seen.append(Names(cls, other))
        except Exception:  # pylint: disable=broad-except
            continue
        if key:
            nulls[key] = seen[-1]
    union = lambda what: set().union(*(getattr(s, what) for s in seen))
    buffers, tied = union('buffers'), union('tied')
    needed = lambda what: {n for n in set.intersection(*(getattr(s, what) for s in seen))
                           if n not in buffers and not SPARSE.search(n)}
    out = {'+': needed('all') - tied, 't': needed('all') & tied, 'x': union('lost')}
    out['?'] = union('all') - out['+'] - out['t']
    for key, other in nulls.items():
        for mark, names in (f'! {key}', first.all - other.all), (f'0 {key}', other.all - first.all):
            out[mark] = {n for n in names - buffers if not SPARSE.search(n)}
    if union('files') != union('all'):
        out['f'] = needed('files') - tied
        out['F'] = union('files') - out['f']
    return out


def joined(found):
    """Names of modules that files spell alike have a mark of their own."""
    out = {mark: set(found.get(mark, ())) for mark in (*'+t?xfF', *(m for m in found if ' ' in m))}
    for both, ours, theirs in ('=', '+', 'f'), ('~', '?', 'F'), ('T', 't', 'F'):
        out[both] = out[ours] & out[theirs]
        out[ours] -= out[both]
        out[theirs] -= out[both]
    return out


def braced(names):
    """One line for names that differ in one word."""
    left = sorted(names)
    while left:
        words, best = left[0].split('.'), ([left[0]], left[0])
        for i in range(len(words)):
            before, behind = words[:i], words[i + 1:]
            alike = [n for n in left if (w := n.split('.')) and len(w) == len(words) and w[:i] == before and w[i + 1:] == behind]
            if len(alike) > len(best[0]) and not any('{' in n for n in alike):
                choice = '{' + ','.join(n.split('.')[i] for n in alike) + '}'
                best = (alike, '.'.join([*before, choice, *behind]))
        yield best[1]
        left = [n for n in left if n not in best[0]]


def classes(names):
    """The classes, each once."""
    if not names:
        for mapping in MAPPINGS:
            for value in getattr(modeling_auto, f'MODEL_FOR_{mapping}_MAPPING_NAMES').values():
                names += value if isinstance(value, (tuple, list)) else (value,)
    for name in dict.fromkeys(names):
        yield name, getattr(transformers, name, None)


def write(path, blocks):
    """Writes what is known so far."""
    with open(path, 'w', encoding='utf-8') as out:
        out.write(f'# What classes of transformers {transformers.__version__} call their tensors: module_names.py.\n')
        for lines, of in blocks.items():
            out.write('\n'.join(of + list(lines)) + '\n')


def main():
    """Classes with the same names stand together."""
    warnings.filterwarnings('ignore')
    transformers.logging.set_verbosity(50)
    blocks = defaultdict(list)
    for name, cls in classes(sys.argv[2:]):
        try:
            found = survey(cls)
        except Exception as error:  # pylint: disable=broad-except
            print(f'{name}: {type(error).__name__}: {error}'[:150], file=sys.stderr)
            continue
        lines = tuple(f'{mark} {line}' for mark, names in joined(found).items() for line in braced(names))
        blocks[lines].append(f'class {name} {cls.config_class.model_type} {cls.base_model_prefix or "-"}')
        write(sys.argv[1], blocks)


if __name__ == '__main__':
    main()
