# SPDX-License-Identifier: Apache-2.0
"""Whole tensors out of the rank files of a view, by their metadata alone."""
import json
import math
import os

import torch
from safetensors import safe_open


def _locals(view, world):
    """(key, part, local tensor): of one that several ranks share once, whole."""
    rows = {}
    for rank in range(world):
        for file in ('model', 'optimizer'):
            path = os.path.join(view, f'rank{rank}', f'{file}.safetensors')
            with safe_open(path, 'pt') as f:
                parts = json.loads(f.metadata()['ckptfs.parts'])
                for key in f.keys():
                    tensor, part = f.get_tensor(key), parts[key]
                    if 'range' not in part:
                        yield key, part, tensor
                        continue
                    shape = part['local_shape']
                    _, row, seen = rows.setdefault((key, str(part['pieces'])), (
                        part, torch.zeros(math.prod(shape), dtype=tensor.dtype),
                        torch.zeros(math.prod(shape), dtype=torch.bool)))
                    begin, end = part['range']
                    row[begin:end], seen[begin:end] = tensor[:end - begin], True  # padding behind
    for (key, _), (part, row, seen) in rows.items():
        assert seen.all(), key
        yield key, part, row.view(part['local_shape'])


def gathered(view, world):
    """{key: tensor} of a layout's ranks, put together; everything is there."""
    whole, covered = {}, {}
    for key, part, local in _locals(view, world):
        shape = part['global_shape']
        out = whole.setdefault(key, torch.zeros(shape, dtype=local.dtype))
        seen = covered.setdefault(key, torch.zeros(shape, dtype=torch.bool))
        for piece in part['pieces']:
            box = tuple(slice(b, e) for b, e in piece['box'])
            at = tuple(slice(a, a + e - b) for a, (b, e) in zip(piece['at'], piece['box']))
            out[box], seen[box] = local[at], True
    assert all(seen.all() for seen in covered.values())
    return whole


def assert_equal(found, truth):
    """Bit for bit, and nothing more or less."""
    assert found.keys() == truth.keys()
    for key, value in truth.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key].view(torch.uint8) if value.ndim else found[key],
                           value.view(torch.uint8) if value.ndim else value), key
