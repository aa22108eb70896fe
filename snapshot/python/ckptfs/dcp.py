# SPDX-License-Identifier: Apache-2.0
"""PyTorch Distributed Checkpoint saves into ckptfs.

    dcp.async_save(state_dict, storage_writer=ckptfs.dcp.Writer(store=..., run=..., step=step))

The state dict holds a model's under 'model' (or is one itself) and optimizers' as
torch.distributed.checkpoint.state_dict makes them, by names, flattened or not; all else is
kept as documents.
"""
import dataclasses
import logging
import os
import pickle
import threading
import time
from datetime import timedelta
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter
from torch.futures import Future

from . import _native, compat, state, url
from .collector import PlacingCollector
from .saved_values import SPELLING, TENSORS
from .saver import Group, Saver, own_job
from .state import NotHeld, State
from .stepped import Stepped

LOG = logging.getLogger('ckptfs')
# By store and run, the one that was used last at the end; all ranks use them in one order.
_SAVERS: Dict[Tuple[str, str], Saver] = {}
KEPT_RUNS = 4
# async_save may be called again while it still saves: one at a time tells a Saver what.
_SAVING = threading.RLock()  # a handler of a signal may save, too
# How often ranks have met, by run: all count alike.
_MEETINGS: Dict[Tuple[str, str], int] = {}
# Seconds that ranks wait for each other.
MEETING = timedelta(seconds=60)


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value:
        return False
    if 'param_groups' in value and 'state' in value:
        return True
    return all(str(key).startswith(('state.', 'param_groups.')) for key in value)


def _is_model(value: Any) -> bool:
    """Not a configuration of one."""
    return isinstance(value, Mapping) and (
        not value or any(isinstance(one, torch.Tensor) for one in value.values()))


class StateDict:
    """A state dict taken apart: a model's tensors, optimizers, all else."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self.model: Dict[str, torch.Tensor] = {}
        self.model_key = ''
        self.optimizers: Dict[str, Mapping[str, Any]] = {}
        self.rest: Dict[str, Any] = {}
        bare = bool(state_dict) and all(isinstance(v, torch.Tensor) for v in state_dict.values())
        self._take({'model': state_dict} if bare else state_dict, '')
        if bare:
            self.model_key = ''

    def _take(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """The model of a dict comes before those of dicts in it, whatever stands first."""
        own = state_dict.get('model') if _is_model(state_dict.get('model')) else None
        another = own is not None and bool(self.model)
        if own is not None and not another:
            self._take_model(own)
            self.model_key = f'{prefix}model'
        for key, value in state_dict.items():
            name = f'{prefix}{key}'
            if own is not None and value is own and not another:
                continue
            if _is_optimizer(value) and another:
                raise NotHeld(f'{name} belongs to {prefix}model, not to {self.model_key}: save each '
                              'model as a run of its own')
            if _is_optimizer(value):
                self.optimizers[name] = value
            elif isinstance(value, Mapping) and _is_model(value.get('model')):
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
    """Returns what two names of one tensor have alike."""
    local = compat.local_of(tensor)
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
        self.ahead = True  # the optimizers step while the copy is under way
        self._stepped = Stepped()

    @property
    def staged(self) -> bool:
        """As Collector has it: torch has made a copy."""
        return not self.ahead

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
        stepped = self._stepped if self.ahead else Stepped()
        if self.ahead:
            stepped.update()
        states, groups, trained = [], [], set()
        tensors: Dict[str, Dict[int, Any]] = {}
        for key, value in self.given.optimizers.items():
            label = key if len(self.given.optimizers) > 1 else ''
            optimizer = _Optimizer(key, value, names)
            for name, kind, one in optimizer.states:
                states += state.state_of(names[name], kind, label, one, stepped.has(one))
            for number, (members, hyper) in enumerate(optimizer.groups):
                members = list(dict.fromkeys(names[name] for name in members))
                trained.update(members)
                groups.append((label, members, state.hyper_parameters(
                    hyper, f'parameter group {number} of {key}')))
                if state.tensor_hyper_parameters(hyper):
                    tensors.setdefault(label, {})[number] = state.tensor_hyper_parameters(hyper)
        self.lazy = bool(stepped)
        for name in model.tensors:
            role = 'trainable' if name in trained or not trained else 'frozen'
            model.parameters.append((name, role))
        weights = [State(name, 'weight', '', tensor,
                         updated=name in trained and stepped.has(tensor),
                         ranks=None if name in trained else self.first_of(name))
                   for name, tensor in model.tensors.items()]
        model.extra = dict(self.given.rest)
        if tensors:
            model.extra[TENSORS] = tensors
        labels = {k if len(self.given.optimizers) > 1 else '': k for k in self.given.optimizers}
        model.extra[SPELLING] = {'model': self.given.model_key, 'optimizers': labels}
        return model, self._place_all(model, weights + states), groups


class Meeting:
    """Ranks tell each other by the store that they met in, as the save is not in the
    training's thread: its collectives would mix with those of the training."""

    def __init__(self, store: str, run: str) -> None:
        number = _MEETINGS[store, run] = _MEETINGS.get((store, run), 0) + 1
        self._name, self._said = f'ckptfs/{store}/{run}/{number}', 0

    def gather(self, value: object, world: int) -> List[Any]:
        """Everybody's value, by rank.  An error of the store if somebody does not come."""
        store = compat.default_store()
        self._said += 1
        rank, name = torch.distributed.get_rank(), f'{self._name}/{self._said}'
        store.set(f'{name}/{rank}', pickle.dumps(value))
        if rank:
            store.wait([f'{name}/all'], MEETING)
            return pickle.loads(store.get(f'{name}/all'))
        keys = [f'{name}/{other}' for other in range(world)]
        store.wait(keys, MEETING)
        values = [pickle.loads(store.get(key)) for key in keys]
        store.set(f'{name}/all', pickle.dumps(values))
        return values


def _is_joined() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _make_saver(collector: StateDictCollector, store: str, run: str,
                options: Mapping[str, Any]) -> Saver:
    if collector.ahead or not _is_joined():
        return Saver(collector, run, store, **options)
    meeting = Meeting(store, run)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    collector.gather = meeting.gather
    job = meeting.gather(own_job(), world)[0]
    return Saver(collector, run, store, rank=rank, world=world, job=job, **options)


def _saver(store: str, run: str, given: StateDict, ahead: bool,
           options: Mapping[str, Any]) -> Saver:
    """One for all saves of a run: its memory is used again, while few other runs are saved."""
    key = (os.path.realpath(store), run)
    saver = _SAVERS.pop(key, None)
    collector = StateDictCollector() if saver is None else saver._collector
    collector.given, collector.ahead = given, ahead
    _SAVERS[key] = _make_saver(collector, *key, options) if saver is None else saver
    while len(_SAVERS) > KEPT_RUNS:
        old = _SAVERS.pop(next(iter(_SAVERS)))
        threading.Thread(target=_retire, args=[old], daemon=True).start()
    return _SAVERS[key]


def _retire(saver: Saver) -> None:
    """Its memory goes when what was saved is durable or dropped: somebody may wait for that."""
    while saver.status()['under_way']:
        time.sleep(1)
    saver.close()


class NotSaved(RuntimeError):
    """A save that was waited for, and of which there is no step."""


class Writer(StorageWriter, AsyncStager):
    """A StorageWriter of DCP that is its own AsyncStager: the step of a run in a store.

    store, run, step: as Snapshotter has them.  A checkpoint_id of
        "ckptfs://STORE/RUN/STEP" says the same, where a save is not staged by the writer.
    options: what else Saver takes (slots, update_limit).

    async_save returns before parameters and optimizer states are copied; the next
    optimizer.step() waits for what is left.  Its future is done when the step is
    durable; its result says nothing of tensors.  Where the step was dropped the future
    raises, and so does save: scripts remove older checkpoints after it (NotSaved, in a
    CheckpointException where torch wraps it; `taken` is False then).  async_save itself
    raises nothing of ours in a training loop.
    """

    def __init__(self, store: str = '', run: str = '', step: Optional[int] = None,
                 **options: Any) -> None:
        self._store, self._run, self._step, self._options = store, run, step, options
        self._saver: Optional[Saver] = None
        self._staged = False
        self._trouble = ''
        self._why = ''  # it was not saved
        self.taken = False

    def __getstate__(self) -> Dict[str, Any]:
        """For async_save's process: what it staged is taken, and ours to end."""
        return {**self.__dict__, '_saver': None}

    # ---- AsyncStager -----------------------------------------------------------

    _synchronize_after_execute = False

    def stage(self, state_dict: Mapping[str, Any]) -> Dict[str, Any]:
        """Takes the snapshot; what is left to plan is nothing."""
        self._staged = True
        self._save(state_dict, True)
        return {}

    def synchronize_staging(self) -> None:
        """The optimizer's step waits by itself."""

    def close(self) -> None:
        """The memory is kept for the next save."""

    def _save(self, state_dict: Mapping[str, Any], ahead: bool) -> None:
        self._why = ''
        try:
            if self._trouble:
                raise NotHeld(self._trouble)
            if not self._store or not self._run or self._step is None:
                raise NotHeld('store, run and step are needed')
            given = StateDict(state_dict)
            with _SAVING:
                self._saver = _saver(self._store, self._run, given, ahead, self._options)
                self.taken = self._saver.save(self._step)
        except Exception as error:  # pylint: disable=broad-except
            LOG.warning('snapshot dropped: step %s: %s', self._step, error)
            self.taken, self._why = False, str(error) or type(error).__name__

    def _reason(self) -> str:
        """Why it was not saved."""
        if self._why or self._saver is None:
            return self._why or 'it was dropped when it was staged'
        now = self._saver.status()
        return now['last_drop'] or f"{now['under_way']} saves are not durable yet"

    # ---- StorageWriter ---------------------------------------------------------

    def reset(self, checkpoint_id: Any = None) -> None:
        """A checkpoint_id says store, run and step."""
        if checkpoint_id is None or self._staged:  # too late: it is being saved
            return
        self._trouble = ''
        try:
            self._store, self._run, step = url.parse(checkpoint_id)
            self._step = int(step)
        except ValueError as error:
            self._trouble = f'{error}; the step must be a number'
        # DCP hides what its ranks raise in an exception that `except Exception` does not see.  A
        # rank of several must not leave the others alone.
        why = '' if self._trouble or _is_joined() else _native.not_received(os.path.realpath(self._store))
        if why:
            raise NotSaved(f'step {self._step} of the run {self._run!r} is not saved: {why}')

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: List[Any]) -> List[Any]:
        """As planned, and how many ranks save."""
        return [dataclasses.replace(plan, storage_data=len(plans)) for plan in plans]

    def write_data(self, plan: Any, planner: Any) -> Future:
        """Waits until the step is durable.  NotSaved if it does not become that."""
        if not self._staged:
            world = torch.distributed.get_world_size() if _is_joined() else 1
            if plan.storage_data != world and not self._trouble:
                self._trouble = f'only {plan.storage_data} of {world} ranks save it'
            flat, paths = getattr(planner, 'state_dict', {}), getattr(planner, 'mappings', None)
            self._save(compat.unflatten_state_dict(flat, paths) if paths else flat, False)
        self._staged = False
        if self.taken and self._saver is not None and self._step is not None:
            self.taken = self._saver.wait_durable(self._step)
        if not self.taken:
            raise NotSaved(f'step {self._step} of the run {self._run!r} is not in the store '
                           f'{self._store}: {self._reason()}')
        done: Future = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Any, results: Any) -> None:
        """The daemon publishes the step when all ranks' parts are there."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """True if it is one of ours."""
        return url.is_url(checkpoint_id)
