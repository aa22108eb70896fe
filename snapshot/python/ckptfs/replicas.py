# SPDX-License-Identifier: Apache-2.0
"""Compares what ranks are said to hold alike, by a digest of the bytes that a rank holds.

It looks at a part of large states, at places that each step chooses as if by chance, whichever
steps a job saves.  Replicas that are trained apart (local SGD, a step within no_sync()) differ nearly
everywhere.
"""
import hashlib
from typing import List, Sequence, Tuple

import torch

from . import _native
from .strides import order

# Samples of a device's tensor, taken on the device: number of windows, and bytes of each.
WINDOWS, WIDTH = 16, 64


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Without gaps, as it lies."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain if plain.is_contiguous() or order(plain) else plain.contiguous()


def _windows(plain: torch.Tensor, step: int) -> torch.Tensor:
    """Some bytes of a device's tensor, there."""
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    size = flat.numel()
    if size <= WINDOWS * WIDTH:
        return flat
    apart = size // WINDOWS
    chance = hashlib.blake2b(step.to_bytes(8, 'little'), digest_size=8).digest()
    first = int.from_bytes(chance, 'little') % (apart - WIDTH + 1)
    return flat.as_strided((WINDOWS, WIDTH), (apart, 1), flat.storage_offset() + first).reshape(-1)


def digest(tensors: Sequence[torch.Tensor], step: int) -> str:
    """Returns a digest of their bytes, or of some of them; it is the same of the same on every
    rank."""
    spans: List[Tuple[int, int]] = []
    kept, devices = [], {}
    for tensor in tensors:
        plain = _dense(tensor)
        if plain.device.type == 'cpu':
            kept.append(plain)
            spans.append((plain.data_ptr(), plain.nbytes))
        elif plain.numel():
            devices.setdefault(plain.device, []).append(_windows(plain, step))
    for device in devices:
        kept.append(torch.cat(devices[device]).cpu())
        spans.append((kept[-1].data_ptr(), kept[-1].nbytes))
    return _native.replica_digest(spans, step)
