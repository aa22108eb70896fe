# SPDX-License-Identifier: Apache-2.0
"""What the steps of torch's optimizers write, for who is given tensors but no optimizer.

Whoever else updates them (a class of one's own, a hook of the backward pass) calls nobody
first, so nothing else may be copied after a save.
"""
import weakref
from typing import Any, Set

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import state
from .dtensor import memory_of

# Those that have made a step since this module was imported.
_SEEN: 'weakref.WeakSet[torch.optim.Optimizer]' = weakref.WeakSet()


def _note(optimizer: Any, *_: object) -> None:
    _SEEN.add(optimizer)


register_optimizer_step_pre_hook(_note)


def stepped_memory() -> Set[int]:
    """Where the parameters and states lie (dtensor.memory_of) that such a step alone
    writes, and waits for copies before it does."""
    found = set()
    for optimizer in list(_SEEN):
        held = [p for group in optimizer.param_groups for p in group['params']]
        if not state.waits_for_hooks(optimizer) or state.updates_in_backward(held):
            continue
        held += [value for values in optimizer.state.values() for value in values.values()
                 if isinstance(value, torch.Tensor)]
        found.update(map(memory_of, held))
    return found - {0}
