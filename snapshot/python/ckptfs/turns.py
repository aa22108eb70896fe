# SPDX-License-Identifier: Apache-2.0
"""Turns: optimizers' steps and saves of different threads, one after the other."""
import os
import threading
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Optional, Set, Tuple

from torch.optim.optimizer import (register_optimizer_step_post_hook,
                                   register_optimizer_step_pre_hook)

from .state import NotHeld


class Turns:
    """Takes part in the steps of all of torch's optimizers of this process.

    Within one thread nothing waits: what a step does there is over when a save begins.

    limit: seconds that one waits for another, at most.
    before_update: called before each step, when no save is under way in another thread.
    """

    def __init__(self, limit: float, before_update: Callable[[], None]) -> None:
        self._limit = limit
        self._before_update = before_update
        self._pid = os.getpid()
        self._moved = threading.Condition()
        self._saving: Optional[int] = None          # thread
        self._overtaken = False                     # that save, by a step
        self._stepping: Set[Tuple[int, int]] = set()  # thread, optimizer
        self._hooks = (register_optimizer_step_pre_hook(self._begin_step),
                       register_optimizer_step_post_hook(self._end_step))

    def close(self) -> None:
        """No step waits any more."""
        for hook in self._hooks:
            hook.remove()

    def _begin_step(self, optimizer: Any, *_: object) -> None:
        if os.getpid() != self._pid:
            return
        me = threading.get_ident()
        with self._moved:
            free = self._moved.wait_for(lambda: self._saving in (None, me), self._limit)
            self._overtaken |= not free
            self._stepping.add((me, id(optimizer)))
        self._before_update()

    def _end_step(self, optimizer: Any, *_: object) -> None:
        # One that raises does not come here: it ends with the optimizer's next.
        if os.getpid() != self._pid:
            return
        with self._moved:
            self._stepping.discard((threading.get_ident(), id(optimizer)))
            self._moved.notify_all()

    @contextmanager
    def save(self, staged: bool) -> Iterator[Callable[[], bool]]:
        """While a save collects, and copies what cannot wait; staged: of memory that no step
        writes.  Gives whether a step did not wait for it.  NotHeld if a step does not end."""
        if staged:
            yield lambda: False
            return
        me = threading.get_ident()
        with self._moved:
            if self._saving == me:  # a handler of a signal
                raise NotHeld('another save is under way in this thread')
            if not self._moved.wait_for(lambda: self._is_free(me), self._limit):
                raise NotHeld('an optimizer is in its step, in another thread')
            self._saving, self._overtaken = me, False
        try:
            yield lambda: self._overtaken
        finally:
            with self._moved:
                self._saving = None
                self._moved.notify_all()

    def _is_free(self, me: int) -> bool:
        return self._saving is None and all(thread == me for thread, _ in self._stepping)
