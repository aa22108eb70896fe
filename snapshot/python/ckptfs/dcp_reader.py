# SPDX-License-Identifier: Apache-2.0
"""PyTorch Distributed Checkpoint loads of any step, from a view of one rank.

    dcp.load(state_dict, planner=Planner(),
             storage_reader=Reader("/mnt/ckpt/run/job/step/7/view/tp1"))

The directory may be in a mount or what `ckptfs export RUN/ID tp1 DIR` wrote.
"""
import os
from typing import Any, Dict, List, Tuple

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (ChunkStorageMetadata, Metadata,
                                                   TensorProperties, TensorStorageMetadata)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future


def _names(key: str) -> List[str]:
    """How state dicts spell a tensor of a rank file, "<name>" or "<kind>/<name>"."""
    kind, slash, name = key.partition('/')
    if not slash:
        return [f'model.{key}', key]
    return [f'{optimizer}.state.{name}.{kind}' for optimizer in ('optim', 'optimizer')]


class Planner(DefaultLoadPlanner):
    """Loads all tensors of a state dict, and leaves what is none as it is."""

    def __init__(self) -> None:
        super().__init__(allow_partial_load=True)

    def create_local_plan(self) -> Any:
        """RuntimeError for a tensor that the step does not have."""
        for name, value in self.state_dict.items():
            if isinstance(value, torch.Tensor) and name not in self.metadata.state_dict_metadata:
                raise RuntimeError(f'the step has no tensor {name}')
        return super().create_local_plan()


class Reader(StorageReader):
    """Reads each rank's parts, and nothing else, out of whole tensors.

    path: a view of one rank (tp1), with rank0/model.safetensors and optimizer.safetensors.
    A state dict holds 'model' (or is a model's) and 'optim' or 'optimizer', as
    torch.distributed.checkpoint.state_dict makes them.  Hyper-parameters and documents
    are not read: Planner keeps those of the state dict.  ValueError for a view of
    several ranks.
    """

    def __init__(self, path: str) -> None:
        self._path = os.fspath(path)
        self._tensors: Dict[str, Tuple[str, str]] = {}  # file, key

    def reset(self, checkpoint_id: Any = None) -> None:
        """Another directory."""
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Out of the files' headers."""
        if os.path.exists(os.path.join(self._path, 'rank1')):
            raise ValueError(f'{self._path} is a view of several ranks: take tp1')
        known = {}
        self._tensors = {}
        for file in ('model', 'optimizer'):
            path = os.path.join(self._path, 'rank0', f'{file}.safetensors')
            with safe_open(path, 'pt') as opened:
                keys = {key: key for key in opened.keys()}
                aliases = (opened.metadata() or {}).items()
                keys.update({alias: key for alias, key in aliases if key in keys})
                for shown, key in keys.items():
                    for name in _names(shown):
                        known[name] = self._describe(opened, key)
                        self._tensors[name] = (path, key)
        return Metadata(known)

    @staticmethod
    def _describe(opened: Any, key: str) -> TensorStorageMetadata:
        part = opened.get_slice(key)
        size = torch.Size(part.get_shape())
        dtype = opened.get_tensor(key).dtype if not size else part[tuple(
            slice(0, 0) for _ in size)].dtype
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool,
                              *args: Any, **kwargs: Any) -> None:
        """Ranks that read no metadata know the files, too."""
        if not self._tensors:
            self.read_metadata()

    def prepare_local_plan(self, plan: Any) -> Any:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: List[Any]) -> List[Any]:
        """As planned."""
        return plans

    def read_data(self, plan: Any, planner: Any) -> Future:
        """Each item's box of a tensor."""
        files: Dict[str, Any] = {}
        for item in plan.items:
            path, key = self._tensors[item.storage_index.fqn]
            opened = files.setdefault(path, None) or safe_open(path, 'pt')
            files[path] = opened
            box = tuple(slice(at, at + size)
                        for at, size in zip(item.storage_offsets, item.lengths))
            value = opened.get_slice(key)[box] if box else opened.get_tensor(key)
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)
        done: Future = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether it is such a view."""
        return os.path.exists(os.path.join(str(checkpoint_id), 'rank0', 'model.safetensors'))
