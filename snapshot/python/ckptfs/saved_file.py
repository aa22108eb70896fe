# SPDX-License-Identifier: Apache-2.0
"""The file that torch.save would write, without writing it: the pickle of a value, and where its
storages lie in memory (formats/rank_file/deepspeed_files.h reads it)."""
import pickle
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Callable, Dict, Iterator, List, Mapping, Tuple

import torch

from . import compat
from .state import NotHeld

Place = Tuple[Any, ...]


@dataclass
class Storage:
    """One storage of a file; `tensor` is its elements in order."""
    key: str
    tensor: torch.Tensor
    updated: bool = False      # nothing but an optimizer's step writes it


@dataclass
class SavedFile:
    """One file of a checkpoint, or the storages of it that this rank hands over."""
    name: str
    pickled: bytes             # b'' of a file that another rank has
    storages: List[Storage] = field(default_factory=list)
    # Tensors that several ranks have alike and compare, and the number of those ranks.
    replicated: List[torch.Tensor] = field(default_factory=list)
    replicas: int = 1


def place(tensor: torch.Tensor) -> Place:
    """Returns what tells one view of memory from another: a transposed one begins where the other
    does."""
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(),
            tensor.is_conj(), tensor.is_neg())


def _named(value: Any, path: str) -> Iterator[Tuple[str, torch.Tensor]]:
    """Every tensor in dicts, lists and tuples, by its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named(inner, f'{path}/{key}' if path else str(key))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _named(inner, f'{path}/{number}' if path else str(number))


def _storage_class(dtype: torch.dtype) -> Any:
    name = compat.storage_names().get(dtype)
    if name is None or 'Q' in name:
        raise NotHeld(f'a checkpoint cannot hold a tensor of {dtype}')
    return getattr(torch, name)


class _Elements:
    """Stands in a pickle for a storage that has a tensor's elements and no others."""

    def __init__(self, key: str, tensor: torch.Tensor) -> None:
        self.id = ('storage', _storage_class(tensor.dtype), key, 'cpu', tensor.numel())


def _row_major(shape: Tuple[int, ...]) -> Tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _plain(tensor: torch.Tensor) -> bool:
    return (type(tensor) is torch.Tensor and tensor.layout == torch.strided
            and not tensor.is_quantized and not compat.has_more_state(tensor))


class _FilePickler(pickle.Pickler):
    """Makes the pickle that torch.save makes, but that each tensor has a storage of its
    own: views of one flat buffer can then be handed over by several ranks.  With
    `whole`, storages stay what they are."""

    def __init__(self, file: BytesIO, keys: Dict[Place, str],
                 updated: Callable[[torch.Tensor], bool], whole: bool) -> None:
        super().__init__(file, protocol=2)
        self._keys, self._updated, self._whole = keys, updated, whole
        self.storages: Dict[str, Storage] = {}
        self._of_memory: Dict[int, str] = {}

    def reducer_override(self, value: Any) -> Any:
        """A tensor as torch's own rebuild call."""
        if not isinstance(value, torch.Tensor) or self._whole or not _plain(value):
            return NotImplemented
        shape = tuple(value.shape)
        key = self._keys.get(place(value)) or f'tensor/{len(self.storages)}'
        if value.numel() == 0:
            key = f'empty/{str(value.dtype).removeprefix("torch.")}'
        if key not in self.storages:
            self.storages[key] = Storage(key, value, self._updated(value))
        return compat.rebuild_tensor(), (
            _Elements(key, value), 0, shape, _row_major(shape), value.requires_grad, _hooks())

    def persistent_id(self, value: Any) -> Any:
        """A storage's place."""
        if isinstance(value, _Elements):
            return value.id
        if not isinstance(value, torch.storage.TypedStorage):
            return None
        address = value._untyped_storage.data_ptr()
        key = self._of_memory.setdefault(address, f'storage/{len(self._of_memory)}')
        elements = torch.empty(0, dtype=value.dtype, device=value.device)
        elements.set_(value._untyped_storage, 0, (value._size(),))
        if key not in self.storages:
            self.storages[key] = Storage(key, elements, self._updated(elements))
        return ('storage', _storage_class(value.dtype), key, 'cpu', elements.numel())


def _hooks() -> Any:
    from collections import OrderedDict
    return OrderedDict()


def saved_file(name: str, value: Any, updated: Callable[[torch.Tensor], bool],
               whole: bool = False) -> SavedFile:
    """`value` as torch.save(value, name) would have it.  `updated(tensor)`: nothing but
    an optimizer's step writes it.  Keys of storages are paths ("module/a.weight")."""
    keys: Dict[Place, str] = {}
    for path, tensor in _named(value, ''):
        keys.setdefault(place(tensor), path)
    file = BytesIO()
    pickler = _FilePickler(file, keys, updated, whole)
    pickler.dump(value)
    return SavedFile(name, file.getvalue(), list(pickler.storages.values()))
