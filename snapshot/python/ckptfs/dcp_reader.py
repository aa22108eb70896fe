# SPDX-License-Identifier: Apache-2.0
"""PyTorch Distributed Checkpoint loads of any step.

    dcp.load(state_dict, checkpoint_id="ckptfs:///data/store/job/7")
    dcp.load(state_dict, planner=Planner(),
             storage_reader=Reader("/mnt/ckpt/run/job/step/7/view/tp1"))

The first reads from the store, by the program `ckptfs`; a directory may be in a mount or what
`ckptfs export RUN/ID tp1 DIR` wrote.
"""
import io
import os
from typing import Any, Dict, List, Optional, Union

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (BytesStorageMetadata, ChunkStorageMetadata,
                                                   Metadata, TensorProperties,
                                                   TensorStorageMetadata)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from . import url
from .plain_pickle import Unreadable
from .saved_values import LaterTensor, SavedValues
from .step_files import Files, Program, Stored, open_files, tensors_of


class Planner(DefaultLoadPlanner):
    """Loads all tensors of a state dict, and leaves all else as it is."""

    def __init__(self) -> None:
        super().__init__(allow_partial_load=True)

    def create_local_plan(self) -> Any:
        """RuntimeError for a tensor that the step does not have."""
        for name, value in self.state_dict.items():
            if isinstance(value, torch.Tensor) and name not in self.metadata.state_dict_metadata:
                raise RuntimeError(f'the step has no tensor {name}')
        return super().create_local_plan()


def _describe(dtype: torch.dtype, shape: Any) -> TensorStorageMetadata:
    size = torch.Size(shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])


class Reader(StorageReader):
    """Reads each rank's parts, and nothing else, out of whole tensors.

    path: ckptfs://STORE/RUN/STEP, or a view of one rank (tp1), a directory with
    rank0/model.safetensors and optimizer.safetensors.  A state dict names things as the
    one that was saved did, if DCP saved it; else it holds 'model' (or is a model's) and
    'optim' or 'optimizer', as torch.distributed.checkpoint.state_dict makes them.
    From a store hyper-parameters and documents are loaded, too, but for those of ranks and those
    that are objects; a directory has none, and Planner keeps those of the state dict.
    ValueError for a view of several ranks.
    """

    def __init__(self, path: str = '') -> None:
        self._path = os.fspath(path)
        self._files: Optional[Files] = None
        self._tensors: Dict[str, Union[Stored, LaterTensor]] = {}
        self._values: Dict[str, Any] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Another step."""
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)
        self._close()
        self._tensors, self._values = {}, {}

    def _close(self) -> None:
        files, self._files = self._files, None
        if files is not None:
            files.close()

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        """Out of the files' headers.  Without more arguments: DCP would try a second time,
        and then as the only rank."""
        self.reset()
        self._files = files = open_files(self._path)
        saved = SavedValues(files.describe(),
                            files.tensor if isinstance(files, Program) else _no_tensor)
        self._values = saved.values
        twice = set()
        for file in ('model', 'optimizer'):
            for key, stored in tensors_of(files, f'rank0/{file}.safetensors').items():
                for name in _names(file, key, saved):
                    if file == 'optimizer' and saved.place_of(key) in saved.numbers:
                        self._values[name] = stored.number(files)
                    elif self._tensors.setdefault(name, stored) is not stored:
                        twice.add(name)
        for name in twice:  # nobody says which is meant
            del self._tensors[name]
        for name in [name for name, value in self._values.items() if isinstance(value, LaterTensor)]:
            later = self._values.pop(name)
            self._tensors.setdefault(name, later)
        known: Dict[str, Any] = {}
        for name, value in self._values.items():
            tensor = isinstance(value, torch.Tensor)
            known[name] = _describe(value.dtype, value.shape) if tensor else BytesStorageMetadata()
        known.update({name: _describe(one.dtype, one.shape)
                      for name, one in self._tensors.items()})
        return Metadata(known)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool,
                              *args: Any, **kwargs: Any) -> None:
        """Ranks that read no metadata know the files, too."""
        if self._files is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: Any) -> Any:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: List[Any]) -> List[Any]:
        """As planned."""
        return plans

    def read_data(self, plan: Any, planner: Any) -> Future:
        """Each item's box of a tensor."""
        try:
            for item in plan.items:
                self._read_item(item, planner)
        finally:
            self._close()
        done: Future = Future()
        done.set_result(None)
        return done

    def _read_item(self, item: Any, planner: Any) -> None:
        name = item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO:
            value = self._values[name]
            if isinstance(value, Unreadable):
                raise RuntimeError(f'{self._path}: {name} cannot be loaded: it holds a {value.what}')
            text = io.BytesIO()
            torch.save(value, text)
            text.seek(0)
            planner.load_bytes(item, text)
            return
        box = tuple(slice(at, at + size)
                    for at, size in zip(item.storage_offsets, item.lengths))
        target = planner.resolve_tensor(item).detach()
        if name in self._tensors:
            assert self._files is not None
            self._tensors[name].load(self._files, box, target)
        else:
            target.copy_(self._values[name][box])
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """True if it is such a step."""
        return url.is_url(checkpoint_id) or os.path.exists(
            os.path.join(str(checkpoint_id), 'rank0', 'model.safetensors'))


def _no_tensor(*_: Any) -> torch.Tensor:
    raise IndexError


def _names(file: str, key: str, saved: SavedValues) -> List[str]:
    """How state dicts spell a tensor of a rank file."""
    if file == 'model':
        return saved.spelling.model(key)
    place = saved.place_of(key)
    if place is None:
        return []
    label, kind, name = place
    return [f'{at}.state.{name}.{kind}' for at in saved.spelling.optimizer(label)]
