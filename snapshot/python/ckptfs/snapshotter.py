# SPDX-License-Identifier: Apache-2.0
"""Snapshotter: the one line that a PyTorch training loop adds."""
import atexit
import functools
import logging
import os
import uuid
import weakref
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import _native, state
from .state import NotHeld, State

LOG = logging.getLogger('ckptfs')
# Below this many bytes a tensor is copied at once: looking at it again costs more.
SMALL = 64 << 10

Modules = Union[nn.Module, Sequence[nn.Module]]
Optimizers = Union[torch.optim.Optimizer, Sequence[torch.optim.Optimizer]]

_ALIVE: 'weakref.WeakSet[Snapshotter]' = weakref.WeakSet()


def _as_list(given: Any) -> List[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


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
        return rank, world, job or uuid.uuid4().hex
    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1, job or uuid.uuid4().hex
    shared = [job or uuid.uuid4().hex]
    distributed.broadcast_object_list(shared, src=0)
    return distributed.get_rank(), distributed.get_world_size(), shared[0]


class Snapshotter:
    """Hands the state of a training job to the ckptfs daemon of a store.

    model, optimizer: one each, or lists.  Modules may be wrapped in DDP and
        torch.compile; with several ranks they have to be in DDP.
    run: the name under which the steps appear, /run/<run>/step/<step>.
    store: the directory of the store; `ckptfs mount --store STORE MNT` receives.
    documents: what else belongs to the job, by name: values that can be pickled
        (tensors in them included), objects with a state_dict(), or functions that
        return one of these.  They are taken at every save.
    rank, world: if torch.distributed is not initialised and there are several ranks;
        then job: a text that all ranks of this life of the job share, and no other.
    slots: how many snapshots the memory has room for: 1 is being written to disk
        while the next is taken.
    update_limit: seconds that an update waits for a copy before the snapshot is
        dropped instead.

    With torch.distributed initialised the constructor is collective.  It raises for
    arguments that make no sense; nothing else here raises: a snapshot that cannot
    be taken is dropped, and the logger `ckptfs` says so once.
    """

    def __init__(self, model: Modules, optimizer: Optimizers, run: str, store: str,
                 documents: Optional[Mapping[str, Any]] = None, *,
                 rank: Optional[int] = None, world: Optional[int] = None,
                 job: Optional[str] = None, slots: int = 2,
                 update_limit: float = 60.0) -> None:
        self._models = _as_list(model)
        self._optimizers = _as_list(optimizer)
        self._documents = dict(documents or {})
        for module in self._models:
            state.refuse_sharded(module)
        self._rank, self._world, job = _place(rank, world, job)
        if self._world > 1 and not all(map(state.is_data_parallel, self._models)):
            raise TypeError('with several ranks every model has to be in '
                            'DistributedDataParallel')
        self._lazy = all(map(state.waits_for_hooks, self._optimizers))
        self._pid = os.getpid()
        self._owners: Tuple[Any, Dict[str, int]] = (None, {})
        self._writer = _native.Writer(os.path.realpath(store), run, job, self._rank,
                                      self._world, slots, update_limit)
        this = weakref.ref(self)

        def before_update(*_: object) -> None:
            alive = this()
            if alive is not None:
                alive._before_update()

        self._hook = register_optimizer_step_pre_hook(before_update)
        weakref.finalize(self, self._hook.remove)
        _ALIVE.add(self)

    def save(self, step: int) -> bool:
        """Take a snapshot of everything as it is now, as step `step` (>= 0).

        Returns before parameters and optimizer states are copied: these must not be
        written but by the optimizers' next step, which waits for the copy.  All
        else is copied before it returns.  False if the snapshot was dropped.
        """
        if os.getpid() != self._pid:
            return False
        try:
            taken = self._save(int(step))
        except Exception as error:  # pylint: disable=broad-except
            self._writer.drop(max(int(step), 0), str(error) or type(error).__name__)
            taken = False
        self._tell()
        return taken

    def wait_durable(self, step: int, timeout: float = 600.0) -> bool:
        """True when the step is on disk with all ranks' parts; False if it was dropped
        or `timeout` seconds are over."""
        done = self._writer.wait_durable(step, timeout)
        self._tell()
        return done

    def status(self) -> Dict[str, Any]:
        """Counts of saves, durable and dropped ones; bytes of this rank's file; seconds
        spent in save and waiting before updates."""
        self._tell()
        return self._writer.status()

    def close(self) -> None:
        """Finish what is being copied and leave.  What was handed over becomes durable
        without us."""
        if os.getpid() != self._pid:
            return
        self._hook.remove()
        self._writer.close()
        self._tell()

    def __enter__(self) -> 'Snapshotter':
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _before_update(self) -> None:
        if os.getpid() == self._pid:
            self._writer.wait_before_update()

    def _tell(self) -> None:
        for line in self._writer.take_log():
            LOG.warning('%s', line)

    def _states(self, model: state.Model) -> Tuple[List[State], List[Tuple]]:
        """(every state of the model and its optimizers, the parameter groups)."""
        names = {id(tensor): name for name, tensor in model.tensors.items()}
        updated, states, groups = set(), [], []
        for index, optimizer in enumerate(self._optimizers):
            label = str(index) if len(self._optimizers) > 1 else ''
            states += state.optimizer_states(optimizer, label, names)
            for group in optimizer.param_groups:
                updated.update(id(p) for p in group['params'] if p.requires_grad)
                groups.append((label, [names[id(p)] for p in group['params']],
                               state.hyper_parameters(group)))
        weights = [State(name, 'weight', '', tensor, updated=id(tensor) in updated)
                   for name, tensor in model.tensors.items()]
        return weights + states, groups

    def _mine(self, states: List[State], roles: Dict[str, str]) -> List[State]:
        """Those that this rank writes: all ranks hold the same, but for buffers,
        which are rank 0's."""
        if self._world == 1:
            return states
        spread = [s for s in states if roles[s.parameter] != 'buffer']
        sizes = [(f'{s.optimizer}/{s.kind}/{s.parameter}', s.tensor.nbytes)
                 for s in spread]
        if self._owners[0] != sizes:
            self._owners = (sizes, state.share(sizes, self._world))
        mine = [s for s, (key, _) in zip(spread, sizes)
                if self._owners[1][key] == self._rank]
        if self._rank == 0:
            mine += [s for s in states if roles[s.parameter] == 'buffer']
        return mine

    def _save(self, step: int) -> bool:
        if step < 0:
            raise NotHeld(f'step {step} is below 0')
        # Two saves between two updates: the first is copied by then.
        model = state.model_state(self._models)
        states, groups = self._states(model)
        shot = _Shot(self._lazy)
        for one in self._mine(states, dict(model.parameters)):
            shot.add_state(one)
        scope = f'dp{self._rank}' if self._rank else ''
        for key, value in {**self._documents, **model.extra}.items():
            shot.add_document(key, scope, *state.document(value))
        first = self._rank == 0
        if first:
            for group in groups:
                shot.add_group(*group)
        return self._writer.save(
            step, torch.__version__, shot.tensors, model.parameters if first else [],
            model.aliases if first else [], shot.groups, shot.documents, shot.kept,
            functools.partial(_changed, shot.watched))


class _Shot:
    """The arguments of one save, and what keeps their memory."""

    def __init__(self, lazy: bool) -> None:
        self.lazy = lazy
        self.tensors: List[_native.Tensor] = []
        self.groups: List[Tuple[str, List[str], str]] = []
        self.documents: List[Tuple[str, str, str, List[str]]] = []
        self.kept: List[torch.Tensor] = []
        self.watched: List[Tuple[str, torch.Tensor, int, int]] = []

    def _add(self, tensor: torch.Tensor, lazy: bool, key: str = '', parameter: str = '',
             kind: str = '', optimizer: str = '', number: bool = False) -> None:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise NotHeld(f'{key or parameter} is not a strided tensor')
        plain = tensor.detach()
        if lazy:  # as it lies; the alias keeps its storage
            name = parameter if kind == 'weight' else f'{kind} of {parameter}'
            self.watched.append((name, tensor, tensor._version, tensor.data_ptr()))
        else:
            plain = plain.resolve_conj().resolve_neg().cpu().contiguous()
        self.kept.append(plain)
        self.tensors.append((key, parameter, kind, optimizer, number,
                             str(plain.dtype).removeprefix('torch.'),
                             list(plain.shape), plain.data_ptr(), lazy))

    def add_state(self, one: State) -> None:
        """A parameter's state; lazily where it lies as it is stored."""
        tensor = one.tensor
        lazy = (self.lazy and one.updated and tensor.nbytes >= SMALL
                and tensor.device.type == 'cpu' and tensor.is_contiguous()
                and not tensor.is_inference() and not tensor.is_neg())
        self._add(tensor, lazy, '', one.parameter, one.kind, one.optimizer, one.number)

    def _add_pickle(self, key: str, text: bytes) -> str:
        self._add(torch.frombuffer(bytearray(text), dtype=torch.uint8), False, key)
        return key

    def add_group(self, optimizer: str, names: List[str], pickled: bytes) -> None:
        """A parameter group."""
        key = self._add_pickle(f'ckptfs.group/{len(self.groups)}', pickled)
        self.groups.append((optimizer, names, key))

    def add_document(self, name: str, scope: str, pickled: bytes,
                     tensors: List[torch.Tensor]) -> None:
        """A document and the tensors in it."""
        keys = [f'ckptfs.document/{name}/{i}' for i in range(len(tensors))]
        for key, tensor in zip(keys, tensors):
            self._add(tensor, False, key)
        self.documents.append(
            (name, scope, self._add_pickle(f'ckptfs.document/{name}', pickled), keys))


def _changed(watched: List[Tuple[str, torch.Tensor, int, int]]) -> str:
    """The first tensor that is not what it was when it was saved."""
    for name, tensor, version, address in watched:
        if tensor._version != version or tensor.data_ptr() != address:
            return name
    return ''


@atexit.register
def _close_all() -> None:
    for snapshotter in list(_ALIVE):
        snapshotter.close()
