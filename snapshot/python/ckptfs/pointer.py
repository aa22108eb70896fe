# SPDX-License-Identifier: Apache-2.0
"""`latest` in DeepSpeed's save directory, when a step is durable and not before."""
import atexit
import logging
import os
import queue
import re
import threading
import weakref
from typing import Any, Callable, Optional, Tuple

LOG = logging.getLogger('ckptfs')
# Seconds that a process which ends waits for its last step.
LAST_STEP = 60.0


def _replace(path: str, make: Callable[[str], None]) -> None:
    """make(a temporary path), then a rename: nobody sees half of it."""
    temporary = f'{path}.{os.getpid()}.ckptfs'
    try:
        make(temporary)
        os.replace(temporary, path)
    except OSError:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        raise


def _write_text(path: str, text: str) -> None:
    with open(path, 'w', encoding='utf-8') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


class Pointers:
    """The pointers of rank 0 of a job.  `mount`: where the store is mounted, if the tag's directory
    is to be a link to the step's universal view of `layout` there.

    Thread safety: none but what its own thread needs.
    """

    def __init__(self, snap: Any, run: str, mount: Optional[str], layout: str) -> None:
        self._snap, self._layout = snap, layout
        self._steps = os.path.join(os.path.abspath(mount), 'run', run, 'step') if mount else ''
        self._waiting: 'queue.SimpleQueue[Optional[Tuple]]' = queue.SimpleQueue()
        self._thread: Optional[threading.Thread] = None
        self._lock = threading.Lock()  # of `latest`
        self._forgotten = 0            # of the saves so far, those that it may not name
        self._asked = 0
        this = weakref.ref(self)
        atexit.register(lambda: this() and this().close())

    def point(self, step: int, save_dir: str, tag: str, latest: bool) -> None:
        """Once the step is durable, in the order of the calls."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name='ckptfs-latest',
                                            daemon=True)
            self._thread.start()
        self._asked += 1
        self._waiting.put((step, self._asked, os.path.abspath(save_dir), tag, latest))

    def forget(self, folder: str) -> None:
        """Somebody else writes `latest` now, which must not go back, and the directory of
        a tag, where a link of ours would lead into the mount."""
        with self._lock:
            self._forgotten = self._asked
            if os.path.islink(folder):
                os.unlink(folder)

    def close(self, seconds: float = LAST_STEP) -> None:
        """Writes what was asked for, unless it takes longer."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join(seconds)

    def _serve(self) -> None:
        while True:
            item = self._waiting.get()
            if item is None:
                return
            step, number, save_dir, tag, latest = item
            try:
                if self._snap.wait_durable(step):
                    self._write(number, save_dir, tag, latest)
            except Exception as error:  # pylint: disable=broad-except
                LOG.warning('%s does not show %s: %s', save_dir, tag, error)

    def _write(self, number: int, save_dir: str, tag: str, latest: bool) -> None:
        with self._lock:
            if number <= self._forgotten:
                return
            name = tag
            if os.path.isdir(os.path.join(save_dir, tag)) and not os.path.islink(
                    os.path.join(save_dir, tag)):
                name = f'{tag}-snapshot'  # the tag's files are of another save
            if self._steps:
                _replace(os.path.join(save_dir, name),
                         lambda path: os.symlink(self._view(tag), path))
            for file in ('latest_universal', 'latest') if self._steps else ('latest',):
                if latest:
                    _replace(os.path.join(save_dir, file), lambda path: _write_text(path, name))

    def _view(self, tag: str) -> str:
        """The step's, which is <tag>-<n> if an earlier life of the job saved the tag."""
        def view(step: str) -> str:
            return os.path.join(self._steps, step, 'view', self._layout, 'deepspeed', tag)

        names = os.listdir(self._steps) if os.path.isdir(self._steps) else []
        same = [n for n in names if re.fullmatch(re.escape(tag) + r'(-\d+)?', n)
                and os.path.isdir(view(n))]
        return view(max(same, key=lambda n: os.stat(os.path.join(self._steps, n)).st_mtime_ns,
                        default=tag))
