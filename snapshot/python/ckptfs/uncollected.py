# SPDX-License-Identifier: Apache-2.0
"""Python does not look for garbage while a save makes thousands of objects, all of use: to look
through the trainer's for each few hundred of them takes as long as all else."""
import contextlib
import gc
import os
import threading
from typing import Iterator, Set, Tuple


class _Pause:
    """By the threshold: what anybody says meanwhile with gc.disable() and gc.enable() holds."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler of a signal may save
        self._saves: Set[object] = set()  # under way
        self._before: Tuple[int, ...] = ()  # empty: it is not set
        os.register_at_fork(after_in_child=self._after_fork)

    def begin(self, save: object) -> None:
        with self._lock:
            self._saves.add(save)
            if not self._before and gc.get_threshold()[0]:
                self._before = gc.get_threshold()
                gc.set_threshold(0, *self._before[1:])

    def end(self, save: object) -> None:
        """Also of one that did not begin, or did in the process that forked this one."""
        with self._lock:
            self._saves.discard(save)
            if not self._saves:
                self._restore()

    def _restore(self) -> None:
        before, self._before = self._before, ()
        if before and gc.get_threshold()[0] == 0:  # else somebody has set it meanwhile
            gc.set_threshold(*before)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # whoever held it is not here
        if self._saves:
            self._saves = set()
            self._restore()


_PAUSE = _Pause()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Meanwhile."""
    save = object()
    try:
        _PAUSE.begin(save)
        yield
    finally:
        _PAUSE.end(save)
