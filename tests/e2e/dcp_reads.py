# SPDX-License-Identifier: Apache-2.0
"""Reads of a DCP directory by torch itself, in one process."""
import torch
import torch.distributed.checkpoint as dcp


def read_dcp(path):
    """All tensors of a directory that torch.distributed.checkpoint saved, by key."""
    reader = dcp.FileSystemReader(path)
    metadata = reader.read_metadata().state_dict_metadata
    state = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items() if hasattr(m, 'size')}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state
