# SPDX-License-Identifier: Apache-2.0
"""PyTorch Distributed Checkpoint saves into ckptfs.

    dcp.async_save(state_dict, storage_writer=ckptfs.dcp.Writer(store=..., run=..., step=step))

The state dict holds a model's under 'model' (or is one itself) and optimizers' as
torch.distributed.checkpoint.state_dict makes them, by names, flattened or not; all else is
kept as documents.
"""
import logging
import os
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter
from torch.futures import Future

from . import state
from .collector import PlacingCollector
from .dtensor import is_dtensor, local_of
from .saver import Group, Saver
from .state import NotHeld, State

LOG = logging.getLogger('ckptfs')
_SAVERS: Dict[Tuple[str, str], Saver] = {}


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value:
        return False
    if 'param_groups' in value and 'state' in value:
        return True
    return all(str(key).startswith(('state.', 'param_groups.')) for key in value)


class StateDict:
    """A state dict taken apart: a model's tensors, optimizers, all else."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self.model: Dict[str, torch.Tensor] = {}
        self.optimizers: Dict[str, Mapping[str, Any]] = {}
        self.rest: Dict[str, Any] = {}
        if state_dict and all(isinstance(v, torch.Tensor) for v in state_dict.values()):
            state_dict = {'model': state_dict}
        self._take(state_dict, '')

    def _take(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        for key, value in state_dict.items():
            name = f'{prefix}{key}'
            if key == 'model' and isinstance(value, Mapping) and not self.model:
                self._take_model(value)
            elif _is_optimizer(value):
                self.optimizers[name] = value
            elif isinstance(value, Mapping) and 'model' in value:
                self._take(value, f'{name}.')
            else:
                self.rest[name] = value

    def _take_model(self, model: Mapping[str, Any]) -> None:
        for name, value in model.items():
            if isinstance(value, torch.Tensor):
                self.model[name] = value
            else:
                self.rest[f'extra_state/{name}'] = value


def _place_of(tensor: torch.Tensor) -> Optional[Tuple]:
    """What two names of one tensor have alike."""
    local = local_of(tensor) if is_dtensor(tensor) else tensor
    if local.layout != torch.strided or not local.untyped_storage().data_ptr():
        return None
    return (local.untyped_storage().data_ptr(), local.storage_offset(), tuple(local.shape),
            tuple(tensor.shape), local.dtype, local.stride())


class _Optimizer:
    """An optimizer's state dict by names: states (name, kind, value) and groups (names,
    hyper-parameters).  NotHeld for one by numbers."""

    def __init__(self, key: str, value: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        self._key, self._names = key, names
        self.states: List[Tuple[str, str, Any]] = []
        self.groups: List[Tuple[List[str], Dict[str, Any]]] = []
        if 'state' in value and 'param_groups' in value:
            self._nested(value)
        else:
            self._flat(value)

    def _nested(self, value: Mapping[str, Any]) -> None:
        for name, kinds in value['state'].items():
            self._check(name)
            self.states += [(name, kind, one) for kind, one in kinds.items()]
        for group in value['param_groups']:
            for name in group['params']:
                self._check(name)
            hyper = {k: v for k, v in group.items() if k != 'params'}
            self.groups.append((list(group['params']), hyper))

    def _flat(self, value: Mapping[str, Any]) -> None:
        hyper: Dict[str, Dict[str, Any]] = {}
        for key, one in value.items():
            begin, _, rest = key.partition('.')
            name, _, kind = rest.rpartition('.')
            self._check(name)
            if begin == 'state':
                self.states.append((name, kind, one))
            else:
                hyper.setdefault(name, {})[kind] = one
        for name, given in hyper.items():
            for names, known in self.groups:
                if known == given:
                    names.append(name)
                    break
            else:
                self.groups.append(([name], given))

    def _check(self, name: Any) -> None:
        if name not in self._names and str(name).isdecimal():
            raise NotHeld(f"{self._key} numbers its parameters: take it from torch.distributed."
                          'checkpoint.state_dict, which names them')
        if name not in self._names:
            raise NotHeld(f"{self._key} has a state of {name}, which is not in 'model'")


class StateDictCollector(PlacingCollector):
    """A Collector of the state dict that was given last."""

    def __init__(self) -> None:
        super().__init__()
        self.given = StateDict({})

    def start(self, rank: int, world: int) -> None:
        """As Collector has it.  Collective."""
        if world > 1 and torch.distributed.is_initialized():
            self._meet(rank, world, self._model()[0].tensors, [], '')

    def _model(self) -> Tuple[state.Model, Dict[str, str]]:
        """The model, and the name that is kept for each name."""
        model, first, names = state.Model(), {}, {}
        for name, tensor in self.given.model.items():
            place = _place_of(tensor)
            known = first.setdefault(place, name) if place else name
            names[name] = known
            if known != name:
                model.aliases.append((name, known))
            else:
                model.tensors[name] = tensor
        return model, names

    def collect(self) -> Tuple[state.Model, List[State], List[Group]]:
        """As Collector has it."""
        model, names = self._model()
        states, groups, trained = [], [], set()
        for key, value in self.given.optimizers.items():
            label = key if len(self.given.optimizers) > 1 else ''
            optimizer = _Optimizer(key, value, names)
            for name, kind, one in optimizer.states:
                states += state.state_of(names[name], kind, label, one)
            for members, hyper in optimizer.groups:
                members = list(dict.fromkeys(names[name] for name in members))
                trained.update(members)
                groups.append((label, members, state.hyper_parameters(hyper)))
        # Somebody's optimizer updates them, and waits for us.
        self.lazy = bool(trained)
        for name in model.tensors:
            role = 'trainable' if name in trained or not trained else 'frozen'
            model.parameters.append((name, role))
        weights = [State(name, 'weight', '', tensor, updated=name in trained,
                         ranks=None if name in trained else self.first_of(name))
                   for name, tensor in model.tensors.items()]
        model.extra = dict(self.given.rest)
        return model, self._place_all(model, weights + states), groups


def _saver(store: str, run: str, given: StateDict, options: Mapping[str, Any]) -> Saver:
    """One for all saves of a run: its memory is used again."""
    key = (os.path.realpath(store), run)
    saver = _SAVERS.get(key)
    if saver is None:
        collector = StateDictCollector()
        collector.given = given
        saver = _SAVERS[key] = Saver(collector, run, store, **options)
    saver._collector.given = given
    return saver


class Writer(StorageWriter, AsyncStager):
    """A StorageWriter of DCP that is its own AsyncStager: the step of a run in a store.

    store, run, step: as Snapshotter has them.  For dcp.save alone, a checkpoint_id of
        "ckptfs://STORE/RUN/STEP" says the same.
    options: what else Saver takes (slots, update_limit).

    async_save returns before parameters and optimizer states are copied; the next
    optimizer.step() waits for what is left.  Its future is done when the step is
    durable, or was dropped (the logger `ckptfs` says why; `taken` is False then);
    its result says nothing of tensors.  Nothing here raises in a training loop.
    """

    def __init__(self, store: str = '', run: str = '', step: Optional[int] = None,
                 **options: Any) -> None:
        self._store, self._run, self._step, self._options = store, run, step, options
        self._saver: Optional[Saver] = None
        self._staged = False
        self.taken = False

    # ---- AsyncStager -----------------------------------------------------------

    _synchronize_after_execute = False

    def stage(self, state_dict: Mapping[str, Any]) -> Dict[str, Any]:
        """Takes the snapshot; what is left to plan is nothing."""
        self._staged = True
        self._save(state_dict)
        return {}

    def synchronize_staging(self) -> None:
        """The optimizer's step waits by itself."""

    def close(self) -> None:
        """The memory is kept for the next save."""

    def _save(self, state_dict: Mapping[str, Any]) -> None:
        try:
            if not self._store or not self._run or self._step is None:
                raise NotHeld('store, run and step are needed')
            given = StateDict(state_dict)
            self._saver = _saver(self._store, self._run, given, self._options)
            self.taken = self._saver.save(self._step)
        except Exception as error:  # pylint: disable=broad-except
            LOG.warning('snapshot dropped: step %s: %s', self._step, error)
            self.taken = False

    # ---- StorageWriter ---------------------------------------------------------

    def reset(self, checkpoint_id: Any = None) -> None:
        """A checkpoint_id says store, run and step."""
        if checkpoint_id is None or self._staged:  # too late: it is being saved
            return
        parts = str(checkpoint_id).removeprefix('ckptfs://').rsplit('/', 2)
        if len(parts) == 3 and parts[2].isdecimal():
            self._store, self._run, self._step = parts[0], parts[1], int(parts[2])
        else:
            LOG.warning('%s is not ckptfs://STORE/RUN/STEP', checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: List[Any]) -> List[Any]:
        """As planned."""
        return plans

    def write_data(self, plan: Any, planner: Any) -> Future:
        """Waits until the step is durable."""
        if not self._staged:
            flat, paths = getattr(planner, 'state_dict', {}), getattr(planner, 'mappings', None)
            self._save(unflatten_state_dict(flat, paths) if paths else flat)
        self._staged = False
        if self.taken and self._saver is not None and self._step is not None:
            self.taken = self._saver.wait_durable(self._step)
        done: Future = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Any, results: Any) -> None:
        """The daemon publishes the step when all ranks' parts are there."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether it is one of ours."""
        return str(checkpoint_id).startswith('ckptfs://')
