# SPDX-License-Identifier: Apache-2.0
"""Turns: optimizers' steps and saves, one after the other, of whatever threads.

The stack of a thread shows if it is in a step, so that a step that raised, or whose thread
is gone, is over.
"""
import os
import sys
import threading
import weakref
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Callable, Dict, Iterator, Optional, Set, Tuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .devices import note_step, watch_graphs
from .compat import HOOKED_STEP
from .state import NotHeld

# Seconds between two looks at what other threads do.
PAUSE = 0.001
LONGEST = 1e6  # seconds


class Turn:
    """A save's.  overtaken: a step did not wait for it.  eager: it is within the hooks of a
    step, which waits for nobody any more."""

    def __init__(self, eager: bool = False) -> None:
        self.overtaken, self.eager = False, eager


def _steps(frame: Optional[FrameType]) -> Iterator[Tuple[Any, bool]]:
    """The optimizers whose steps are on a stack, and whether they may be writing: not in the
    hooks before and after."""
    inner = None
    while frame is not None:
        if frame.f_code is HOOKED_STEP:
            held = frame.f_locals
            code = getattr(held.get('func'), '__code__', None)
            writes = inner is not None and (not isinstance(code, CodeType) or inner.f_code is code)
            yield held.get('self'), writes
        inner, frame = frame, frame.f_back


class Turns:
    """Takes part in the steps of torch's optimizers of this process.

    limit: seconds that one waits for another, at most.
    touches: whether an optimizer's parameters are among what is saved.
    before_update: called before each step, when no save is under way in another thread.
    """

    def __init__(self, limit: float, touches: Callable[[Any], bool],
                 before_update: Callable[[], None]) -> None:
        self._limit = limit if 0 <= limit < LONGEST else LONGEST
        self._touches = touches
        self._before_update = before_update
        self._pid = os.getpid()
        self._moved = threading.Condition()
        self._saving: Optional[int] = None  # thread
        self._turn = Turn()
        self._held: Set[int] = set()        # threads whose steps wait for the save
        self._counting = threading.Lock()
        self._steps: Dict[int, int] = {}    # since the last save, by the optimizer's id
        self._counted = False               # there was one
        global _ALL
        with _CHANGES:
            _ALL = (*(one for one in _ALL if one() is not None), weakref.ref(self))

    def close(self) -> None:
        """No step waits any more."""
        global _ALL
        with _CHANGES:
            _ALL = tuple(one for one in _ALL if one() not in (None, self))

    def begin_step(self, optimizer: Any) -> None:
        """Returns when it may write.  None: a graph of a device, which may be any optimizer's."""
        if os.getpid() != self._pid:
            return
        touches = optimizer is None or self._touches(optimizer)
        if self._saving is not None and touches:
            self._wait_for_save()
        self._before_update()
        if touches and optimizer is not None:
            with self._counting:
                self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
                self._counted = True

    def steps_since_save(self) -> Optional[int]:
        """The steps of the one optimizer since this was asked last; None before the first, and of
        several, which ranks may have of their own."""
        with self._counting:
            steps, self._steps = self._steps, {}
            return None if len(steps) > 1 or not self._counted else sum(steps.values())

    def _wait_for_save(self) -> None:
        me = threading.get_ident()
        with self._moved:
            self._held.add(me)
            try:
                free = self._moved.wait_for(lambda: self._saving in (None, me), self._limit)
                self._turn.overtaken |= not free
            finally:  # a handler of a signal may raise: the thread's next step is waited for
                self._held.discard(me)

    @contextmanager
    def save(self, staged: bool) -> Iterator[Turn]:
        """While a save collects, and copies what cannot wait; staged: of memory that no step
        writes.  NotHeld within a step, and if one does not end."""
        if staged:
            yield Turn()
            return
        mine = [writes for optimizer, writes in _steps(sys._getframe())
                if self._touches(optimizer)]
        if any(mine):
            raise NotHeld('it was saved within the step of an optimizer')
        me = threading.get_ident()
        try:
            with self._moved:
                if self._saving == me:  # a handler of a signal
                    me = -1
                    raise NotHeld('another save is under way in this thread')
                if not self._moved.wait_for(lambda: self._saving is None, self._limit):
                    raise NotHeld('another thread is saving')
                # From now on steps wait.
                self._saving, self._turn = me, Turn(bool(mine))
                turn = self._turn
                self._wait_for_steps(me)
            yield turn
        finally:
            with self._moved:
                if self._saving == me:
                    self._saving = None
                self._moved.notify_all()

    def _wait_for_steps(self, me: int) -> None:
        waited = 0.0
        while any(self._touches(optimizer) for thread, frame in sys._current_frames().items()
                  if thread != me and thread not in self._held
                  for optimizer, _ in _steps(frame)):
            if waited >= self._limit:
                raise NotHeld('an optimizer is in its step, in another thread')
            self._moved.wait(PAUSE)
            waited += PAUSE


_CHANGES = threading.Lock()
_ALL: Tuple['weakref.ref[Turns]', ...] = ()


def _begin_step(optimizer: Optional[torch.optim.Optimizer], *_: object) -> None:
    note_step()
    for one in _ALL:
        turns = one()
        if turns is not None:
            turns.begin_step(optimizer)


# Never removed: other threads may be in the middle of their hooks.
register_optimizer_step_pre_hook(_begin_step)
watch_graphs(lambda: _begin_step(None))
