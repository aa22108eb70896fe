# SPDX-License-Identifier: Apache-2.0
"""The tensors that steps of torch's optimizers write, for code that has no optimizer at hand.

Other code that updates them (a class of one's own, a hook of the backward pass) tells nobody
first, so no other tensor may be copied after a save.
"""
import bisect
import weakref
from typing import Any, Dict, List, Tuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import compat, state

# By id: an optimizer, and how many steps had been made with its last, since this was imported.
_SEEN: Dict[int, Tuple['weakref.ref[Any]', int]] = {}
_STEPS = 0


def _note(optimizer: Any, *_: object) -> None:
    global _STEPS
    # A compiled step is not counted: dynamo would compile it anew for each count.  What it writes
    # is then looked at as any other memory.
    if torch.compiler.is_compiling():
        return
    _STEPS += 1
    known = _SEEN.get(id(optimizer))
    if known is not None and known[0]() is optimizer:
        _SEEN[id(optimizer)] = (known[0], _STEPS)
    else:
        _SEEN[id(optimizer)] = (weakref.ref(optimizer), _STEPS)


register_optimizer_step_pre_hook(_note)


def _extent(tensor: torch.Tensor) -> Tuple[int, int]:
    """The addresses of its values, or of this rank's part of them; none if they lie apart."""
    local = compat.local_of(tensor)
    if local.layout != torch.strided or not local.is_contiguous():
        return (0, 0)
    return (local.data_ptr(), local.data_ptr() + local.nbytes)


def steps() -> int:
    """How many steps were made since this was imported."""
    return _STEPS


def stepped_since(count: int) -> List[Any]:
    """Optimizers that have made a step since steps() returned `count`."""
    found = []
    for key, (reference, last) in list(_SEEN.items()):
        optimizer = reference()
        if optimizer is None:
            _SEEN.pop(key, None)
        elif last > count:
            found.append(optimizer)
    return found


class Stepped:
    """The memory that optimizers write which have made a step since this was updated last: only
    in their steps, which wait for copies."""

    def __init__(self) -> None:
        self._since, self._now = 0, 0
        self._extents: List[List[int]] = []  # apart, rising

    def update(self) -> None:
        """For a save.  Where no step was made since the last one it stays as it was."""
        if self._now != _STEPS:
            self._since, self._now = self._now, _STEPS
        held = [tensor for one in stepped_since(self._since) for tensor in self._of(one)]
        self._extents = []
        for begin, end in sorted(map(_extent, held)):
            if self._extents and begin <= self._extents[-1][1]:
                self._extents[-1][1] = max(self._extents[-1][1], end)
            elif begin < end:
                self._extents.append([begin, end])

    @staticmethod
    def _of(optimizer: Any) -> List[torch.Tensor]:
        found = [p for group in optimizer.param_groups for p in group['params']]
        if not state.waits_for_hooks(optimizer) or state.updates_in_backward(found):
            return []
        return found + [value for values in optimizer.state.values() for value in values.values()
                        if isinstance(value, torch.Tensor)]

    def __bool__(self) -> bool:
        return bool(self._extents)

    def has(self, tensor: Any) -> bool:
        """True if such steps alone write it."""
        if not isinstance(tensor, torch.Tensor):
            return False
        begin, end = _extent(tensor)
        at = bisect.bisect_right(self._extents, [begin, 1 << 64]) - 1
        return begin < end and at >= 0 and end <= self._extents[at][1]
