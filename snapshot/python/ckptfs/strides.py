# SPDX-License-Identifier: Apache-2.0
"""How a tensor's dimensions lie in memory."""
from typing import List, Optional

import torch


def order(tensor: torch.Tensor) -> Optional[List[int]]:
    """The dimensions as they lie, outermost first ([0, 2, 3, 1] in channels_last); None for a
    tensor that has gaps or shares elements with itself."""
    shape, strides = tensor.shape, tensor.stride()
    found = sorted(range(tensor.dim()), key=lambda d: (-strides[d], shape[d] == 1, d))
    expected = 1
    for dim in reversed(found):
        if shape[dim] == 1:
            continue
        if strides[dim] != expected:
            return None
        expected *= shape[dim]
    return found
