# SPDX-License-Identifier: Apache-2.0
"""Loads a layout with an unmodified reader and compares it bit by bit.

Usage: quickstart_check.py VIEW LAYOUT CHECKPOINT [TRUTH]

The ranks' shards are read with torch.load (or the safetensors package), put
together by what info.json says of them, and compared with an independent
reading: TRUTH (a safetensors file written without ckptfs), else the
checkpoint's own model file through torch, else the unsharded view.
"""
import argparse
import glob
import json
import os
import struct
import sys

import numpy as np

try:
    import torch
except ImportError:
    torch = None

MOST_BYTES = 2 << 30  # compare this much of a large checkpoint
WIDTH = {'F64': 8, 'I64': 8, 'F32': 4, 'I32': 4, 'F16': 2, 'BF16': 2, 'I16': 2,
         'U8': 1, 'I8': 1, 'BOOL': 1}


def bits(tensor):
    """A torch tensor's bits as a numpy array of unsigned integers."""
    width = tensor.element_size()
    if tensor.dim() == 0:
        return bits(tensor.reshape(1)).reshape(())
    return tensor.contiguous().view(torch.uint8).numpy().view(f'u{width}')


def from_bytes(dtype, shape, data):
    """The same of a safetensors entry."""
    return np.frombuffer(data, f'u{WIDTH[dtype]}').reshape(shape)


def load_file(rank, stem):
    """A rank's file through somebody else's reader: name -> bits."""
    if torch is not None:
        loaded = torch.load(f'{rank}/{stem}.pt', weights_only=True, mmap=True)
        return {name: bits(tensor) for name, tensor in loaded.items()}
    import safetensors
    with open(f'{rank}/{stem}.safetensors', 'rb') as f:
        entries = safetensors.deserialize(f.read())
    return {name: from_bytes(e['dtype'], e['shape'], e['data']) for name, e in entries}


def read_truth(path):
    """A safetensors file read by hand: its header is JSON after 8 bytes."""
    with open(path, 'rb') as f:
        size, = struct.unpack('<Q', f.read(8))
        header, data = json.loads(f.read(size)), f.read()
    return {name: from_bytes(e['dtype'], e['shape'], data[slice(*e['data_offsets'])])
            for name, e in header.items() if name != '__metadata__'}


def assemble(view, stem):
    """Every tensor of a layout's `stem` files, unsharded again."""
    local, parts = {}, {}
    for rank in sorted(glob.glob(f'{view}/rank*')):
        with open(f'{rank}/info.json') as f:
            info = json.load(f)
        place = (info['coordinate']['tp'], info['coordinate']['pp'])
        for name, tensor in load_file(rank, stem).items():
            part = info[stem][name]
            parts[name, place] = part
            whole = local.setdefault(
                (name, place), np.zeros(int(np.prod(part.get('local_shape', part['shape']))), tensor.dtype))
            begin = part.get('range', [0])[0]
            flat = tensor.reshape(-1)[:len(whole) - begin]  # the last one is padded
            whole[begin:begin + len(flat)] = flat
    tensors = {}
    for (name, place), flat in local.items():
        part = parts[name, place]
        shard = flat.reshape(part.get('local_shape', part['shape']))
        whole = tensors.setdefault(name, np.zeros(part['global_shape'], shard.dtype))
        for piece in part['pieces']:
            box = tuple(slice(b, e) for b, e in piece['box'])
            at = tuple(slice(a, a + e - b) for a, (b, e) in zip(piece['at'], piece['box']))
            whole[box] = shard[at]
    return tensors


def newest_model_file(checkpoint):
    """The model file of an unsharded DeepSpeed checkpoint, or None."""
    tag = checkpoint
    if os.path.exists(f'{checkpoint}/latest'):
        with open(f'{checkpoint}/latest') as f:
            tag = os.path.join(checkpoint, f.read().strip())
    files = glob.glob(f'{tag}/mp_rank_*_model_states.pt')
    return files[0] if len(files) == 1 else None


def reference(view, stem, checkpoint, truth):
    """(what it is, name -> bits) to compare with."""
    if truth:
        told = read_truth(truth)
        rename = {'model': lambda n: n.replace('weight/', '').replace('buffer/', ''),
                  'optimizer': lambda n: n.replace('model/', 'master/')}[stem]
        return os.path.basename(truth), {rename(name): t for name, t in told.items()}
    path = newest_model_file(checkpoint)
    if torch is not None and stem == 'model' and path:
        try:
            with torch.serialization.safe_globals([argparse.Namespace]):
                module = torch.load(path, weights_only=True, mmap=True)['module']
            return path, {n: bits(t) for n, t in module.items() if torch.is_tensor(t)}
        except Exception as error:  # another format, or classes torch does not trust
            print(f'   ({path}: {str(error).splitlines()[0]})')
    return 'the unsharded view', load_file(f'{os.path.dirname(view)}/tp1/rank0', stem)


def compare(view, stem, checkpoint, truth):
    """Prints the outcome; returns the number of differing tensors."""
    what, expected = reference(view, stem, checkpoint, truth)
    equal, different, compared = 0, [], 0
    for name, tensor in sorted(assemble(view, stem).items()):
        if name not in expected:
            continue
        other = expected[name]
        same = tensor.dtype == other.dtype and np.array_equal(tensor.reshape(-1), other.reshape(-1))
        equal += same
        if not same:
            different.append(name)
        compared += tensor.nbytes
    print(f'   {stem}: {equal} tensors ({compared} bytes) equal bit for bit to {what}, '
          f'{len(different)} differ {different[:3] or ""}')
    return len(different) + (equal == 0)


def main():
    view, layout, checkpoint = sys.argv[1:4]
    truth = sys.argv[4] if len(sys.argv) > 4 else ''
    view = os.path.join(view, layout)
    ranks = len(glob.glob(f'{view}/rank*'))
    reader = f'torch.load of torch {torch.__version__}' if torch else 'the safetensors package'
    print(f'   {ranks} ranks of {layout} through {reader}')
    size = sum(os.path.getsize(f) for f in glob.glob(f'{view}/rank*/*.safetensors'))
    stems = ['model', 'optimizer']
    if size > MOST_BYTES:
        print('   large: only the model files are compared')
        stems = ['model']
    return 1 if sum(compare(view, stem, checkpoint, truth) for stem in stems) else 0


if __name__ == '__main__':
    sys.exit(main())
