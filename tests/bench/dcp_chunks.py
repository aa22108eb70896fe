# SPDX-License-Identifier: Apache-2.0
"""A DCP directory of as many chunks as one likes, as torch pickles and saves them.

    dcp_chunks.py OUT TENSORS RANKS [--grid COLUMNS]

Every tensor is cut over all ranks along dim 0, or into a grid of boxes; rank files have one
archive per tensor.  All ranks' files are one file under many names.
"""
import argparse
import io
import os
import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (ChunkStorageMetadata, Metadata, MetadataIndex,
                                                   TensorProperties, TensorStorageMetadata)

CHUNK = (4, 16)


def boxes_of(ranks, columns, chunk):
    """(whole shape, offsets of each rank's chunk)."""
    height, width = chunk
    return (torch.Size([ranks // columns * height, columns * width]),
            [torch.Size([r // columns * height, r % columns * width]) for r in range(ranks)])


def make(out, tensors, ranks, columns=1, chunk=CHUNK, files=None):
    """Write the directory; `files`, if there are not as many as ranks."""
    files = files or ranks
    os.makedirs(out)
    buffer = io.BytesIO()
    torch.save(torch.arange(chunk[0] * chunk[1], dtype=torch.float32).view(chunk), buffer)
    archive = buffer.getvalue()
    with open(f'{out}/__0_0.distcp', 'wb') as f:
        f.write(archive * (tensors * ranks // files))
    for rank in range(1, files):
        os.link(f'{out}/__0_0.distcp', f'{out}/__{rank}_0.distcp')
    shape, offsets = boxes_of(ranks, columns, chunk)
    sizes = torch.Size(chunk)
    states, places = {}, {}
    for i in range(tensors):
        name = f'model.layers.{i // 8}.mlp.experts.{i % 8}.gate_proj.weight'
        states[name] = TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), shape,
            [ChunkStorageMetadata(torch.Size(o), torch.Size(sizes)) for o in offsets])
        for rank, offset in enumerate(offsets):
            at = (i * (ranks // files) + rank // files) * len(archive)
            places[MetadataIndex(name, torch.Size(offset), rank)] = _StorageInfo(
                f'__{rank % files}_0.distcp', at, len(archive))
    paths = {name: ('model', name[len('model.'):]) for name in states}
    with open(f'{out}/.metadata', 'wb') as f:
        pickle.dump(Metadata(states, paths, places), f)


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('out')
    parser.add_argument('tensors', type=int)
    parser.add_argument('ranks', type=int)
    parser.add_argument('--grid', type=int, default=1)
    args = parser.parse_args()
    make(args.out, args.tensors, args.ranks, args.grid)


if __name__ == '__main__':
    main()
