# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core saves into ckptfs:

    strategy = ckptfs.megatron.SaveStrategy(store="/data/store", run="job")
    dist_checkpointing.save(sharded_state_dict, ".../iter_0000007", strategy)   # or async
    dist_checkpointing.load(sharded_state_dict, ".../iter_0000007")             # imported: ckptfs.megatron

Tensors become the step of a run, whole under their global keys, in the store; the directory
keeps what Megatron itself writes (common.pt, metadata.json) and where the step is.
"""
import io
import json
import logging
import os
import re
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import (dict_list_map_inplace, nested_values)
from megatron.core.dist_checkpointing.mapping import (ShardedObject, ShardedTensor,
                                                      is_main_replica)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import (AsyncSaveShardedStrategy,
                                                              LoadShardedStrategy,
                                                              StrategyAction,
                                                              get_default_strategy,
                                                              register_default_strategy)

from . import resume, state
from .holders import gather
from .saver import Group, Saver
from .state import NotHeld, State
from .stepped import Stepped

LOG = logging.getLogger('ckptfs')
BACKEND, VERSION = 'ckptfs', 1
POINTER = 'ckptfs.json'       # in the directory: which step it is
TOKEN = 'ckptfs.megatron'     # a document: the save that made it
OBJECT = 'object/'            # documents: pickles of ShardedObjects
MASTERS = ('fp32_param', 'param')  # of DistributedOptimizer the second
DURABLE = 600.0               # seconds that a save waits for the disk
_STATE = re.compile(r'(?:(.*)\.)?optimizer\.state\.([^.]+)\.(.+)')


def place_of(key: str) -> Tuple[str, str, str]:
    """(optimizer, kind, parameter) of a global key; what is not an optimizer's is a weight."""
    found = _STATE.fullmatch(key)
    if found is None:
        return '', 'weight', key
    label, kind, name = found.groups()
    return label or '', 'master' if kind in MASTERS else kind, name


def key_of(label: str, kind: str, name: str, master: str) -> str:
    """The key that place_of takes apart; `master` is that kind as the optimizer calls it."""
    if kind == 'weight' and not label:
        return name
    kind = master if kind == 'master' else kind
    return f"{label}{'.' if label else ''}optimizer.state.{kind}.{name}"


def _shape(tensor: ShardedTensor) -> List[int]:
    """The local one, with the axes of the global one."""
    return [1] * tensor.prepend_axis_num + list(tensor.local_shape)


def _states(key: str, parts: Sequence[ShardedTensor], rank: int, stepped: Stepped) -> State:
    """Returns what this rank writes of a global tensor."""
    label, kind, name = place_of(key)
    shape = list(parts[0].global_shape)
    boxes, at, tensors = [], 0, []
    for part in parts:
        local = _shape(part)
        end = [o + size for o, size in zip(part.global_offset, local)]
        boxes.append((list(part.global_offset), end, [at] + [0] * (len(local) - 1)))
        at += local[0]
        tensors.append(part.data.view(local) if part.flattened_range is None else part.data)
    # Weights may be gathered beside the training.
    updated = kind != 'weight' and stepped.has(tensors[0])
    one = State(name, kind, label, tensors[0], updated=updated, ranks=(rank,))
    if not shape:
        return one
    one.shape, one.pieces = shape, boxes
    flat = parts[0].flattened_range
    if len(parts) > 1:
        if any(part.flattened_range is not None for part in parts):
            raise NotHeld(f'{key}: its parts have several flat ranges')
        one.tensor, one.updated = torch.cat(tensors), False
    elif flat is not None:
        one.local_shape, one.flat = _shape(parts[0]), (flat.start, flat.stop)
    return one


class _Collector:
    """A Collector of the sharded state dict that was given last."""

    lazy = True

    def __init__(self) -> None:
        self.rank, self.token = 0, ''
        self._stepped = Stepped()
        self.tensors: Dict[str, List[ShardedTensor]] = {}
        self.objects: List[ShardedObject] = []

    def start(self, rank: int, world: int) -> None:
        """As Collector has it."""
        self.rank = rank

    def give(self, sharded: Any, token: str) -> None:
        """Takes what this rank is the main replica of."""
        self.tensors, self.objects, self.token = {}, [], token
        for one in nested_values(sharded):
            if not is_main_replica(one.replica_id):
                continue
            if isinstance(one, ShardedTensor):
                self.tensors.setdefault(one.key, []).append(one)
            elif isinstance(one, ShardedObject):
                self.objects.append(one)
            else:
                raise NotHeld(f'{one.key} is a {type(one).__name__}')

    def master(self) -> str:
        """Returns the optimizer's name for masters; '' if this rank writes none."""
        kinds = (found.group(2) for found in map(_STATE.fullmatch, self.tensors) if found)
        return next((kind for kind in kinds if kind in MASTERS), '')

    def collect(self) -> Tuple[state.Model, List[State], List[Group]]:
        """As Collector has it."""
        model = state.Model(framework='megatron', framework_version='core', per_rank=True)
        self._stepped.update()
        states = [_states(key, parts, self.rank, self._stepped) for key, parts in self.tensors.items()]
        model.parameters = [(name, 'trainable')
                            for name in dict.fromkeys(one.parameter for one in states)]
        model.extra[TOKEN] = self.token
        for one in self.objects:
            text = io.BytesIO()
            torch.save(one.data, text)
            model.extra[OBJECT + one.unique_key] = torch.frombuffer(
                bytearray(text.getvalue()), dtype=torch.uint8)
        return model, states, []


def _await(marker: str, seconds: float) -> None:
    """In the process in which Megatron waits for its saves: until `marker` is there."""
    end = time.monotonic() + seconds
    while not os.path.exists(marker) and time.monotonic() < end:
        time.sleep(0.1)


class SaveStrategy(AsyncSaveShardedStrategy):
    """A save strategy of dist_checkpointing whose tensors are snapshots.

    store, run: as Snapshotter has them.  The step's number is the one that the directory's name
        ends in (iter_0000007).
    options: what else Saver takes (slots, update_limit, full, pace).

    Masters and optimizer states are copied until the next optimizer.step(), weights before
    save or async_save returns.  If any rank's snapshot cannot be taken, all ranks save
    this one with Megatron's own strategy; the logger `ckptfs` says so.  If the daemon later
    loses what an async_save has taken, it is lost: loading its directory says so.
    FullyParallelSaveStrategyWrapper may be around it.
    """

    can_handle_sharded_objects = True  # documents of the step

    def __init__(self, store: str, run: str = 'job', **options: Any) -> None:
        super().__init__(BACKEND, VERSION)
        self._store, self._run, self._options = os.path.realpath(store), run, options
        self._collector = _Collector()
        self._snap: Optional[Saver] = None
        self._master = ''

    def _stock(self) -> Any:
        return get_default_strategy(StrategyAction.SAVE_SHARDED, 'torch_dist', 1)

    def _all(self, done: bool) -> bool:
        told = gather((done, self._collector.master()), torch.distributed.get_world_size())
        self._master = next((master for _, master in told if master), MASTERS[0])
        return all(others for others, _ in told)

    def _take(self, sharded: Any, folder: Path, token: str) -> Tuple[int, bool]:
        """(step, whether this rank's part was taken)."""
        if torch.distributed.get_rank() == 0:  # of an earlier save into this directory
            (Path(folder) / POINTER).unlink(missing_ok=True)
        number = re.search(r'(\d+)$', Path(folder).name)
        step = int(number.group(1)) if number else -1
        try:
            if self._snap is None:
                self._snap = Saver(self._collector, self._run, self._store, **self._options)
            self._collector.give(sharded, token)
            return step, self._snap.save(step)
        except Exception as error:  # pylint: disable=broad-except
            LOG.warning('snapshot dropped: step %s: %s', step, error)
            return step, False

    def _token(self) -> str:
        shared = [uuid.uuid4().hex]
        torch.distributed.broadcast_object_list(shared, src=0)
        return shared[0]

    def _point(self, folder: Path, step: int, token: str) -> None:
        """Says where the step is; rank 0."""
        if torch.distributed.get_rank() == 0:
            text = json.dumps({'url': f'ckptfs://{self._store}/{self._run}/{step}',
                               'token': token, 'master': self._master})
            temporary = Path(folder) / f'.{POINTER}'
            temporary.write_text(text, encoding='utf-8')
            os.replace(temporary, Path(folder) / POINTER)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Returns when the step is durable, or saved by Megatron's own strategy."""
        token = self._token()
        step, taken = self._take(sharded_state_dict, checkpoint_dir, token)
        if taken and self._snap is not None:
            taken = self._snap.wait_durable(step, DURABLE)
        ours = self._all(taken)
        self.backend = BACKEND if ours else 'torch_dist'
        if ours:
            self._point(checkpoint_dir, step, token)
        else:
            self._stock().save(sharded_state_dict, checkpoint_dir)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """As AsyncSaveShardedStrategy has it."""
        token = self._token()
        step, taken = self._take(sharded_state_dict, checkpoint_dir, token)
        if not self._all(taken):
            request = self._stock().async_save(sharded_state_dict, checkpoint_dir)
            request.finalize_fns.insert(0, lambda: self._named('torch_dist'))
            return request
        marker = os.path.join(checkpoint_dir, f'.ckptfs-{torch.distributed.get_rank()}')
        done: List[bool] = []

        def wait() -> None:
            done.append(self._snap is not None and self._snap.wait_durable(step, DURABLE))
            try:
                Path(marker).touch()
            except OSError as error:
                LOG.warning('%s: %s', marker, error)

        waiting = threading.Thread(target=wait, name='ckptfs-durable', daemon=True)
        waiting.start()

        def finish() -> None:
            waiting.join(DURABLE)
            Path(marker).unlink(missing_ok=True)
            self._named(BACKEND)
            if self._all(done == [True]):
                self._point(checkpoint_dir, step, token)
            else:
                LOG.warning('%s: the snapshot was dropped: this step cannot be loaded',
                            checkpoint_dir)

        return AsyncRequest(_await, (marker, DURABLE), [finish])

    def _named(self, backend: str) -> None:
        # metadata.json, which is written next, has the name.
        self.backend = backend


class LoadStrategy(LoadShardedStrategy):
    """Loads what SaveStrategy saved, at any degrees, from the store: no mount is needed, but
    the program `ckptfs`.  Found by dist_checkpointing.load once this module is imported."""

    can_handle_sharded_objects = True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """CheckpointingException for another's."""
        if loaded_backend != BACKEND:
            raise CheckpointingException(f'{loaded_backend} is not {BACKEND}')

    def check_version_compatibility(self, loaded_version: int) -> None:
        """CheckpointingException for a newer one."""
        if loaded_version > VERSION:
            raise CheckpointingException(f'{BACKEND} has the unknown version {loaded_version}')

    @staticmethod
    def _stock(folder: Any) -> Optional[Any]:
        """Returns what loads a directory that Megatron's own strategy has written: a wrapper around
        ours has named ours for it."""
        if (Path(folder) / POINTER).exists() or not (Path(folder) / '.metadata').exists():
            return None
        return get_default_strategy(StrategyAction.LOAD_SHARDED, 'torch_dist', 1)

    @staticmethod
    def _pointer(folder: Any) -> Dict[str, str]:
        try:
            return json.loads((Path(folder) / POINTER).read_text(encoding='utf-8'))
        except FileNotFoundError:
            raise CheckpointingException(
                f'{folder} has no {POINTER}: its snapshot was dropped') from None

    def _open(self, folder: Any) -> resume.SavedStep:
        pointer = self._pointer(folder)
        step = resume.SavedStep(pointer['url'])
        if step.document(TOKEN) != pointer['token']:
            raise CheckpointingException(f"{pointer['url']} was saved again, by another job")
        return step

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """The same dict, with tensors and objects."""
        stock = self._stock(checkpoint_dir)
        if stock is not None:
            return stock.load(sharded_state_dict, checkpoint_dir)
        with self._open(checkpoint_dir) as step:
            return dict_list_map_inplace(lambda one: self._one(step, one), sharded_state_dict)

    @staticmethod
    def _one(step: resume.SavedStep, one: Any) -> Any:
        if isinstance(one, ShardedObject):
            key = OBJECT + one.unique_key
            text = step.scoped(key, step.documents().get(key, ''))
            return torch.load(io.BytesIO(text.numpy().tobytes()), weights_only=False)
        stored = step.tensors().get(place_of(one.key))
        if stored is None:
            raise CheckpointingException(f'the step has no {one.key}')
        if list(stored.shape) != list(one.global_shape) and not one.allow_shape_mismatch:
            raise CheckpointingException(f'{one.key} has shape {stored.shape} in the step, '
                                         f'{list(one.global_shape)} here')
        local = _shape(one)
        whole = torch.zeros(local, dtype=stored.dtype, device='cpu')
        box = tuple(slice(min(at, size), min(at + length, size)) for at, length, size
                    in zip(one.global_offset, local, stored.shape))
        part = tuple(slice(0, cut.stop - cut.start) for cut in box)
        step.load(stored, box, whole[part])
        whole = whole.view(one.local_shape)
        if one.flattened_range is not None:
            whole = whole.flatten()[one.flattened_range]
        if one.data is not None:  # in place where there is a place
            one.data.detach().copy_(whole.view(one.data.shape))
            return one.data
        return whole

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Mapping[str, Any]:
        """Empty ShardedTensors, by key; load_plain_tensors fills them.  Memory that nobody writes costs none."""
        stock = self._stock(checkpoint_dir)
        if stock is not None:
            return stock.load_tensors_metadata(checkpoint_dir)
        master = self._pointer(checkpoint_dir)['master']
        with self._open(checkpoint_dir) as step:
            known = {key_of(*place, master): one for place, one in step.tensors().items()}
        return {key: ShardedTensor.from_rank_offsets(
                    key, torch.empty(one.shape, dtype=one.dtype, device='cpu'))
                for key, one in known.items()}

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Mapping[str, Any]:
        """Returns the metadata of tensors and of objects."""
        stock = self._stock(checkpoint_dir)
        if stock is not None:
            return stock.load_sharded_metadata(checkpoint_dir)
        found = dict(self.load_tensors_metadata(checkpoint_dir))
        with self._open(checkpoint_dir) as step:
            for key in step.documents():
                if key.startswith(OBJECT):
                    name = key[len(OBJECT):]
                    found[name] = ShardedObject.empty_from_unique_key(name)
        return found

    def remove_sharded_tensors(self, checkpoint_dir: Any, key_prefix: str) -> None:
        """CheckpointingException: a step does not change."""
        raise CheckpointingException('steps of a store do not change')


if os.environ.get('CKPTFS_STORE'):  # sharded_strategy=('ckptfs', 1)
    register_default_strategy(
        StrategyAction.SAVE_SHARDED, BACKEND, VERSION,
        SaveStrategy(os.environ['CKPTFS_STORE'], os.environ.get('CKPTFS_RUN', 'job')))
register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, LoadStrategy())
