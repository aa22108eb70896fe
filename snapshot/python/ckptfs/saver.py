# SPDX-License-Identifier: Apache-2.0
"""Saver: hands what a collector finds to the daemon of a store, while training goes on.

Snapshotter (snapshotter.py) is the Saver of a PyTorch loop; plug-ins of frameworks pass
their own collector.
"""
import atexit
import functools
import hashlib
import logging
import math
import os
import threading
import time
import uuid
import weakref
from multiprocessing.util import Finalize
from typing import Any, Callable, Dict, List, Mapping, Optional, Protocol, Set, Tuple

import torch
from . import _native, replicas, state
from .devices import current
from .saved_file import SavedFile
from .shot import Plans, Shot, cuda_library
from .state import NotHeld, State
from .turns import Turn, Turns
from .uncollected import uncollected

LOG = logging.getLogger('ckptfs')
# Seconds that a wait is in C: signals are handled between two of them.
SLICE = 0.2
# Bytes for documents, where a save's size is foreseen.
ROOM = 8 << 20

_ALIVE: 'weakref.WeakSet[Saver]' = weakref.WeakSet()

# (label of the optimizer, names of its parameters, hyper-parameters: a pickle of protocol 2)
Group = Tuple[str, List[str], bytes]


class Collector(Protocol):
    """Says what a rank has to save.  It copies nothing and moves nothing."""

    # True if states that are `updated` may be copied until the next optimizer step:
    # every step that writes them calls torch's global pre-hooks of optimizers, or
    # Saver.before_update.  If false, all is copied before save returns.
    lazy: bool
    # True if nobody else writes what is collected:
    # optimizers go on beside a save.  May be left out.
    staged: bool = False

    def touches(self, optimizer: Any) -> bool:
        """True if its steps may write what is collected.  May be left out: all may."""
        return True

    def growth(self) -> float:
        """How many times as large the states will be as now, when optimizers have made those of
        their first step; 0: nobody knows.  May be left out."""
        return 0.0

    def start(self, rank: int, world: int) -> None:
        """Called once, by all ranks alike, before the first collect.  May talk to the
        other ranks; TypeError for what it cannot save."""

    def collect(self) -> Tuple[state.Model, List[State], List[Group]]:
        """Everything that this rank holds at this moment, at every save.

        The model, every state of its parameters and buffers (weights are states, too),
        and the parameter groups.  NotHeld, or any other exception, drops the
        snapshot.  Shares says which of the states this rank writes.
        """


class FileCollector:
    """A collector that has files of a framework's own checkpoint instead of states."""

    lazy = False
    framework = ''
    version = ''

    def start(self, rank: int, world: int) -> None:
        """As Collector has it."""

    def files(self, step: int, documents: Mapping[str, Any]) -> Tuple[str, List[SavedFile]]:
        """(the checkpoint's tag, this rank's files and parts of files)."""
        raise NotImplementedError


def own_job() -> str:
    """A job's text for one life alone (snapshot/wire/protocol.h, kOwnJob)."""
    return f'own:{uuid.uuid4().hex}'


def _place(rank: Optional[int], world: Optional[int],
           job: Optional[str]) -> Tuple[int, int, str]:
    """(rank, world, job): the job is a text that all ranks of this life share."""
    distributed = torch.distributed
    if rank is not None or world is not None:
        if rank is None or world is None or not 0 <= rank < world:
            raise ValueError(f'rank={rank} and world={world} must be given together')
        if world > 1 and not job:
            raise ValueError('job= is needed: a text that all ranks of this life '
                             'share, and no other life has')
        return rank, world, job or own_job()
    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1, job or own_job()
    shared = [own_job()]  # whatever was given may have been given before
    distributed.broadcast_object_list(shared, src=0)
    return distributed.get_rank(), distributed.get_world_size(), shared[0]


def _asked(step: Any) -> int:
    """Returns the step that somebody means; -1 if `step` is not a step."""
    try:
        number = int(step)
        return number if 0 <= number < 1 << 64 and step == number else -1
    except Exception:  # pylint: disable=broad-except
        return -1  # a tensor of several, say


def _text(error: Exception) -> str:
    """Returns the error's own words, whatever they are."""
    try:
        said = str(error) or type(error).__name__
    except Exception:  # pylint: disable=broad-except
        said = type(error).__name__
    return said.encode('utf-8', 'replace').decode()


def _wait_before_update(writer: _native.Writer, limit: float) -> None:
    """Until what is saved is copied.  Handlers of signals run meanwhile, and may raise."""
    left, last = limit, False
    end = time.monotonic() + left
    while not writer.wait_before_update(max(min(left, SLICE), 0.0), last):
        left = end - time.monotonic()
        last = not left > SLICE


def _leave(writer: _native.Writer, turns: Turns) -> None:
    """Optimizers' steps wait until the writer has ended its copies, whoever ends it."""
    writer.close()
    turns.close()


class Saver:
    """Hands the states that a collector finds to the ckptfs daemon of a store.

    collector: a Collector.
    run, store, documents, rank, world, job, slots, update_limit, full, pace: as
        Snapshotter has them.

    With torch.distributed initialised the constructor is collective.  It raises for
    arguments that make no sense; nothing else here raises: a snapshot that cannot
    be taken is dropped, and the logger `ckptfs` says so once.
    """

    def __init__(self, collector: Collector, run: str, store: str,
                 documents: Optional[Mapping[str, Any]] = None, *,
                 rank: Optional[int] = None, world: Optional[int] = None,
                 job: Optional[str] = None, slots: int = 2,
                 update_limit: float = 60.0, full: str = 'drop',
                 pace: int = 0) -> None:
        if full not in ('drop', 'wait'):
            raise ValueError(f"full={full!r} is neither 'drop' nor 'wait'")
        self._collector = collector
        self._documents = dict(documents or {})
        self._known: Set[str] = set()  # documents of which it was asked whether they can be loaded
        self._rank, self._world, job = _place(rank, world, job)
        collector.start(self._rank, self._world)
        self._shares = state.Shares(self._rank, self._world)
        self._plans = Plans()
        self._pid = os.getpid()
        self._said_forked = False
        self._last = -1  # the step that was saved before
        self._updates: Optional[int] = 0  # since this was made; None: it is not known
        self._together = job.startswith('own:')  # all ranks made theirs at once
        self._staged = False  # so was it
        self._devices: Tuple[int, ...] = ()  # that were saved
        self._members = ''  # a digest of the names that an optimizer has
        self._update_limit = update_limit
        self._writer = _native.Writer(os.path.realpath(store), run, job, self._rank,
                                      self._world, slots, update_limit,
                                      full == 'wait', int(pace), cuda_library(), None)
        this = weakref.ref(self)
        touches = getattr(collector, 'touches', lambda _: True)
        writer = self._writer

        def before_update() -> None:
            alive = this()
            if alive is not None:
                alive.before_step()
            else:  # it ends, in another thread, and its copies are not done
                _wait_before_update(writer, update_limit)

        self._turns = Turns(update_limit, touches, before_update)
        weakref.finalize(self, _leave, writer, self._turns)
        self._busy: Optional[int] = None  # the thread that is in the writer's save
        self._after: List[Callable[[], None]] = []  # calls that handlers of signals asked for
        _ALIVE.add(self)
        # A process of multiprocessing that was forked runs no atexit handlers.
        end = Finalize(None, _close, (this,), exitpriority=10)
        weakref.finalize(self, end.cancel).atexit = False
        self._expect()

    def _expect(self) -> None:
        """Has the memory for saves of a device's states made before the first one."""
        growth = getattr(self._collector, 'growth', None)
        if growth is None or not cuda_library():
            return
        try:
            model, states, _ = self._collector.collect()
            shot = Shot(False, Turn())
            shot.add_states(self._shares.of(states, dict(model.parameters)))
            capture = shot.finish(Plans())
            if shot.devices and growth():
                size = self._writer.size(capture)['file_bytes']
                self._writer.expect(int(size * growth() * 1.01) + ROOM, min(shot.devices))
        except Exception as error:  # pylint: disable=broad-except
            LOG.debug('the first save will make the memory for it: %s', error)

    def save(self, step: int, deadline: Optional[float] = None) -> bool:
        """Take a snapshot of everything as it is now, as step `step` (>= 0).

        Returns before parameters and optimizer states are copied: these must not be
        written but by the optimizers' next step, which waits for the copy.  All
        else is copied before it returns.  False if the snapshot was dropped: it is, if
        it is not handed over whole `deadline` seconds after this call.  From
        another thread than the optimizers' it waits for the end of a step of theirs.
        """
        if os.getpid() != self._pid:
            if not self._said_forked:
                LOG.warning('snapshot dropped: this process was forked from the one that saves')
            self._said_forked = True
            return False
        shot: Optional[Shot] = None
        try:
            if self._busy == threading.get_ident():  # a handler of a signal
                raise NotHeld('another save is under way in this thread')
            if _asked(step) < 0:
                raise NotHeld(f'{step} is not a step: a whole number from 0 to 2**64 - 1')
            with self._turns.save(getattr(self._collector, 'staged', False)) as turn:
                with uncollected():
                    shot, capture = self._capture(_asked(step), turn)
                self._devices = tuple({*self._devices, *shot.devices})
                self._tell_moment(capture)
                taken = self._hand_over(shot, capture, deadline)
        except Exception as error:  # pylint: disable=broad-except
            self.drop(step, error)
            taken = False
        while self._after and self._busy is None:
            self._after.pop(0)()
        self._tell()
        if shot is not None and shot.raised is not None:  # by a handler of a signal
            raise shot.raised
        return taken

    def _tell_moment(self, capture: _native.Capture) -> None:
        """Says how many updates lie between this rank's last save and this one: parts of ranks that
        update the same parameters, and went on from one step by different numbers of updates, are
        not of one moment."""
        steps, staged = self._turns.steps_since_save(), getattr(self._collector, 'staged', False)
        # Staged bytes are of an earlier moment than this call.
        self._updates = None if steps is None or self._updates is None else self._updates + steps
        if self._world > 1 and self._members and not staged:
            said = []
            if steps is not None and self._last >= 0 and not self._staged:
                said.append(f'since:{self._rank}:{self._last}:{steps}:{self._members}')
            if self._updates is not None and self._together:
                said.append(f'since:{self._rank}:-1:{self._updates}:{self._members}')
            capture.alike = [*capture.alike, *((one, 1) for one in said)]
        self._last, self._staged = capture.step, staged

    def _hand_over(self, shot: Shot, capture: _native.Capture,
                   deadline: Optional[float]) -> bool:
        self._busy = threading.get_ident()
        try:
            return self._writer.save(capture, shot.kept, shot.changed, shot, deadline)
        finally:
            self._busy = None

    def drop(self, step: int, why: Exception) -> None:
        """Instead of a save, where there is nothing to save."""
        if self._busy == threading.get_ident():
            self._after.append(functools.partial(self.drop, step, why))
            return
        step = _asked(step)
        self._writer.drop(step if step >= 0 else None, _text(why))
        self._tell()

    def cancel(self, step: int) -> bool:
        """Drop the newest save of the step.  False if it is handed over whole already,
        over, or unknown."""
        step = _asked(step)
        return step >= 0 and self._writer.cancel(step)

    def progress(self, step: int) -> Dict[str, int]:
        """Returns, for the newest save of the step: bytes of this rank's file, how many of them
        were copied, how many are durable (all at once, with those of all ranks)."""
        step = _asked(step)
        return self._writer.progress(step) if step >= 0 else {
            'bytes': 0, 'copied': 0, 'durable': 0}

    def size(self) -> Dict[str, int]:
        """Returns what a save would take now, in bytes; nothing is handed over.

        file_bytes: of this rank's file; lazy_bytes: of them, copied after save has
        returned; arena_bytes: the daemon's memory for this rank.  Raises where a save
        would be dropped.
        """
        return self._writer.size(self._capture(0, Turn())[1])

    def wait_durable(self, step: int, timeout: Optional[float] = 600.0) -> bool:
        """True when the step is on disk with all ranks' parts; False if it was dropped
        or `timeout` seconds (None: no time) are over.  Handlers of signals run meanwhile, and may raise."""
        step, now = _asked(step), time.monotonic()
        timeout = math.inf if timeout is None else timeout
        # NaN is over.
        end = now + timeout if timeout == timeout else now
        done, early = False, step < 0
        # A wait that ends early has heard that the step was dropped.
        while not done and not early:
            begun, left = now, max(min(end - now, SLICE), 0.0)
            done = self._writer.wait_durable(step, left)
            now = time.monotonic()
            early = now >= end or now - begun < left / 2
        self._tell()
        return done

    def status(self) -> Dict[str, Any]:
        """Counts of saves, durable and dropped ones; bytes of this rank's file; seconds
        spent in save and waiting before updates."""
        self._tell()
        return self._writer.status()

    def close(self) -> None:
        """Finish what is being copied and leave.  The daemon makes what was handed over durable
        without us.  Called at the end of the process, and of one that multiprocessing has started,
        unless that is os._exit or a signal's."""
        if os.getpid() != self._pid:
            return
        if self._busy == threading.get_ident():
            self._after.append(self.close)
            return
        _leave(self._writer, self._turns)
        self._tell()

    def __enter__(self) -> 'Saver':
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def before_update(self) -> None:
        """Returns when parameters and optimizer states may be written.  The steps of
        torch's optimizers call it themselves.  Handlers of signals run meanwhile, and may
        raise."""
        if os.getpid() != self._pid:
            return
        _wait_before_update(self._writer, self._update_limit)

    def before_step(self) -> None:
        """As before_update, for what this thread gives its current streams from now on alone:
        devices wait for copies out of their memory, and this thread does not."""
        if os.getpid() != self._pid:
            return
        if not self._devices or not self._writer.hold_update(current(self._devices)):
            self.before_update()

    def _tell(self) -> None:
        for line in self._writer.take_log():
            LOG.warning('%s', line)

    def _capture(self, step: int, turn: Turn) -> Tuple[Shot, _native.Capture]:
        if isinstance(self._collector, FileCollector):
            return self._capture_files(step, turn, self._collector)
        # Two saves between two updates: the first is copied by then.
        model, states, groups = self._collector.collect()
        shot = Shot(self._collector.lazy, turn)
        shot.add_states(self._shares.of(states, dict(model.parameters), step))
        scope = f'dp{self._rank}' if self._rank else ''
        for key, value in {**self._documents, **model.extra}.items():
            shot.add_document(key, scope, *self._document(key, value))
        declares = self._rank == 0 or model.per_rank
        capture = shot.capture
        capture.step, capture.layout, capture.alike = step, model.layout, self._shares.alike
        capture.framework, capture.framework_version = model.framework, model.framework_version
        names = sorted(name for _, members, _ in groups for name in members)
        self._members = hashlib.sha256(repr(names).encode()).hexdigest()[:16] if names else ''
        if declares:
            capture.add_parameters(model.parameters)
            capture.aliases = model.aliases
            for group in groups:
                shot.add_group(*group)
        return shot, shot.finish(self._plans)

    def _document(self, key: str, value: Any) -> Tuple[bytes, List[torch.Tensor]]:
        """Says at its first save what of it cannot be loaded again."""
        pickled, tensors = state.document(value)
        refused = '' if key in self._known else state.refusal(pickled, tensors)
        self._known.add(key)
        if refused:
            LOG.warning('the document %s is saved, but could not be loaded again: %s', key, refused)
        return pickled, tensors

    def _capture_files(self, step: int, turn: Turn,
                       collector: FileCollector) -> Tuple[Shot, _native.Capture]:
        tag, files = collector.files(step, self._documents)
        shot = Shot(collector.lazy, turn)
        alike: List[Tuple[str, int]] = []
        for file in files:
            shot.add_file(file)
            if file.replicas > 1 and file.replicated:
                held = replicas.digest(file.replicated, step)
                alike.append((f'bytes:{file.name}:{held}', file.replicas))
        if self._rank == 0:
            shot.add_document('tag', '', *state.document(tag))
        capture = shot.capture
        capture.alike = alike
        capture.step, capture.framework, capture.framework_version = (
            step, collector.framework, collector.version)
        return shot, shot.finish(self._plans)


def _close(reference: 'weakref.ref[Saver]') -> None:
    saver = reference()
    if saver is not None:
        saver.close()


@atexit.register
def _close_all() -> None:
    for saver in list(_ALIVE):
        saver.close()
