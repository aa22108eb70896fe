# SPDX-License-Identifier: Apache-2.0
"""Base of the callbacks of training frameworks: a Saver that comes late and may fail."""
import logging
import random
import sys
from typing import Any, Callable, Dict, Optional

import torch

from .saver import Saver

LOG = logging.getLogger('ckptfs')


def caller_of(kind: type) -> Any:
    """The object of the class that called, whose method is the nearest on the stack; None without one:
    transformers gives callbacks neither the Trainer nor its handler."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get('self')
        if isinstance(found, kind):
            return found
        frame = frame.f_back
    return None


def rng_state() -> Dict[str, Any]:
    """The generators' states of this process, as values and tensors."""
    found: Dict[str, Any] = {'python': random.getstate(), 'cpu': torch.get_rng_state()}
    numpy = sys.modules.get('numpy')
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found['numpy'] = (name, torch.tensor(keys.tolist(), device='cpu'), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found['cuda'] = torch.cuda.get_rng_state_all()
        found['cuda_device'] = torch.cuda.current_device()
    return found


class LateSaver:
    """A Saver that is made when a training begins.  Nothing of it raises: without one
    nothing is saved, and the logger `ckptfs` says why, once."""

    def __init__(self) -> None:
        self.snap: Optional[Saver] = None
        self.last = -1  # the step that was asked for last

    def begin(self, make: Callable[[], Saver]) -> None:
        """make(): collective where the Saver is."""
        self.end()
        self.last = -1
        try:
            self.snap = make()
        except Exception as error:  # pylint: disable=broad-except
            LOG.warning('snapshots are not taken: %s', error)

    def save(self, step: int) -> None:
        """Each step once."""
        if self.snap is not None and step != self.last:
            self.last = step
            self.snap.save(step)

    def before_others(self) -> None:
        """Before others may write the weights without a step of an optimizer: averages that are
        swapped in for an evaluation, or at the end; the best weights, which Trainer loads."""
        if self.snap is not None:
            self.snap.before_update()

    def end(self) -> None:
        """Lets the snapshotter go; what was handed over becomes durable without us."""
        snap, self.snap = self.snap, None
        if snap is not None:
            snap.close()
