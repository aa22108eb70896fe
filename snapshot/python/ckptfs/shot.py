# SPDX-License-Identifier: Apache-2.0
"""Shot: what one save hands to the writer, and what keeps its memory.

Each save looks at every one of a model's thousands of tensors, since anything about them may
have changed.  It describes to the writer again only those of which something has.
"""
import functools
import pickle
from itertools import repeat
from operator import attrgetter
from typing import Any, Iterable, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from . import _native
from .devices import streams
from .saved_file import SavedFile
from .state import NotHeld, State
from .strides import order
from .turns import Turn

# Below this many bytes a tensor is copied at once: looking at it again costs more.
SMALL = 64 << 10

# name, tensor, its version, its address (None: does not matter)
Watched = Tuple[str, torch.Tensor, int, Optional[int]]
# The fields of a tensor that plans have, as a tuple: a named one takes twice as long to make.
Planned = Tuple[Any, ...]
PLANNED = ('key', 'parameter', 'kind', 'optimizer', 'number', 'dtype', 'shape', 'device', 'lazy',
           'part')
# As the writer spells them: those whose bytes are all there is of them.
_NAMES = {dtype: str(dtype).removeprefix('torch.') for dtype in vars(torch).values()
          if isinstance(dtype, torch.dtype) and not str(dtype).startswith('torch.q')}
_COMPLEX = {dtype for dtype in _NAMES if dtype.is_complex}
_TYPES = {torch.Tensor, nn.Parameter}


@functools.lru_cache(maxsize=None)
def cuda_library() -> str:
    """NVIDIA's driver where torch computes with it, else ''."""
    used = torch.version.cuda is not None and torch.cuda.is_available()
    return 'libcuda.so.1' if used and _native.has_cuda('libcuda.so.1') else ''


def _tensor(planned: Planned, address: int = 0) -> _native.Tensor:
    fields = dict(zip(PLANNED, planned))
    part = fields['part']
    fields.update(address=address, shape=list(fields['shape']),
                  part=None if part is None else _native.Part(**part._asdict()))
    return _native.Tensor(**fields)


class Plans:
    """The plan of a save: all about its tensors but where they lie; made anew if that changed."""

    def __init__(self) -> None:
        self._planned: Sequence[Planned] = ()
        self._plan = _native.Plan([])

    def of(self, planned: List[Planned]) -> _native.Plan:
        """The plan of these tensors."""
        if planned != self._planned:
            self._plan = _native.Plan([_tensor(one) for one in planned])
            self._planned = planned
        return self._plan


def _is_stored_as_it_is(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


class Shot:
    """The capture of one save, and what keeps its memory."""

    def __init__(self, lazy: bool, turn: Turn) -> None:
        self.lazy = lazy and not turn.eager
        self._turn = turn
        self.raised: Optional[BaseException] = None  # by a handler of a signal, in the save
        self.capture = _native.Capture()
        self.planned: List[Planned] = []
        self.addresses: List[int] = []  # of what is planned
        self._tensors: List[_native.Tensor] = []  # all others
        self._groups = 0
        self.kept: List[Any] = []
        self._late: List[Watched] = []   # copied after the save
        self._early: List[Watched] = []  # and by it
        self.devices: Set[int] = set()

    def finish(self, plans: Plans) -> _native.Capture:
        """The capture, after everything was added."""
        self.capture.add_planned(plans.of(self.planned), self.addresses)
        self.capture.add_tensors(self._tensors)
        for device, handle in streams(self.devices) if self.devices else []:
            self.capture.add_stream(device, handle)
        return self.capture

    # ---- what was written meanwhile ------------------------------------------

    @staticmethod
    def _watch(watched: List[Watched], name: str, tensor: torch.Tensor,
               address: Optional[int]) -> None:
        if not tensor.is_inference():  # those do not count
            watched.append((name, tensor, tensor._version, address))

    def changed(self, late: bool) -> str:
        """The first tensor that is not what it was when it was collected: of those that
        are copied late, or of the others, of which it is asked once."""
        try:
            return self._find_change(late)
        except BaseException as error:  # pylint: disable=broad-except
            self.raised = error
            return 'something'

    def _find_change(self, late: bool) -> str:
        if self._turn.overtaken:
            return 'something'
        watched = self._late if late else self._early
        self._early = []
        for name, tensor, version, address in watched:
            if tensor._version != version or (address is not None
                                              and address != tensor.data_ptr()):
                return name
        return ''

    # ---- tensors -------------------------------------------------------------

    def _plan(self, asked: Iterable[Tuple[str, Optional[State], torch.Tensor, bool]]) -> None:
        """(key, state, tensor, whether only optimizers write it) of what lies in tensors of
        somebody's.  One loop: a call for each of them would take as long as all else."""
        names, lazies, cuda = _NAMES, self.lazy, bool(cuda_library())
        planned, addresses, kept = self.planned.append, self.addresses.append, self.kept.append
        early, strided = self._early.append, torch.strided
        for key, one, tensor, updated in asked:
            is_plain = type(tensor) in _TYPES
            plain = tensor if is_plain else tensor.detach()
            dtype = plain.dtype
            name, address, lies = names.get(dtype), 0, None
            on_cuda = cuda and plain.is_cuda
            if (name is not None and plain.layout is strided
                    and (plain.is_contiguous() or (lies := self._order(one, plain, updated)))
                    and (on_cuda or plain.is_cpu) and not plain.is_neg()
                    and not (dtype in _COMPLEX and plain.is_conj())):
                try:
                    version, address = tensor._version, plain.data_ptr()
                except RuntimeError:  # of inference mode
                    address = 0
            if not address:  # its bytes cannot be read from where it lies
                self._add(tensor, key, one)
                continue
            device = -1
            if on_cuda:
                device = plain.get_device()
                self.devices.add(device)
            lazy = lazies and updated and plain.nbytes >= SMALL
            addresses(address)
            if one is None:
                planned((key, '', '', '', False, name, plain.shape, device, lazy, None))
            elif lies:
                planned((key, one.parameter, one.kind, one.optimizer, one.number, name,
                         [plain.shape[dim] for dim in lies], device, lazy, one.part(lies)))
            else:
                planned((key, one.parameter, one.kind, one.optimizer, one.number, name,
                         plain.shape, device, lazy, None if one.shape is None else one.part()))
            # The memory, whatever the tensor is given meanwhile.
            kept(plain.untyped_storage() if is_plain else plain)
            if lazy:
                self._watch_late(key, one, tensor, version)
            else:
                early((key or one.parameter, tensor, version, None))

    def _order(self, one: Optional[State], plain: torch.Tensor,
               updated: bool) -> Optional[List[int]]:
        """How a tensor's dimensions lie that is copied late as it lies; None: it is not."""
        if (one is None or one.flat is not None or not updated or not self.lazy
                or plain.nbytes < SMALL):
            return None
        return order(plain)

    def _watch_late(self, key: str, one: Optional[State], tensor: torch.Tensor,
                    version: int) -> None:
        if one is not None:
            key = one.parameter if one.kind == 'weight' else f'{one.kind} of {one.parameter}'
        self._late.append((key, tensor, version, tensor.data_ptr()))
        for other in one.watched if one is not None else ():
            self._watch(self._late, key, other, None)

    def _add(self, tensor: torch.Tensor, key: str = '', one: Optional[State] = None) -> None:
        """One that is copied here, or by the save, whatever it is."""
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise NotHeld(f'{key or one.parameter} is not a strided tensor')
        self._watch(self._early, one.parameter if one else key, tensor, None)
        plain = tensor.detach()
        if tensor.device.type != 'cpu' or not _is_stored_as_it_is(tensor):
            plain = plain.resolve_conj().resolve_neg().cpu().contiguous()
        if plain.numel() and not plain.data_ptr():  # a subclass that wraps others
            raise NotHeld(f'{key or one.parameter} is a {type(tensor).__name__}, which has no '
                          'memory of its own')
        self.kept.append(plain)
        is_what = ('', '', '', False) if one is None else (
            one.parameter, one.kind, one.optimizer, one.number)
        self._tensors.append(_tensor(
            (key, *is_what, str(plain.dtype).removeprefix('torch.'), plain.shape, -1, False,
             one.part() if one else None), plain.data_ptr()))

    # ---- what a save is made of ----------------------------------------------

    def add_states(self, states: Sequence[State]) -> None:
        """Parameters' states, and parts of them."""
        self._plan(zip(repeat(''), states, map(attrgetter('tensor'), states),
                       map(attrgetter('updated'), states)))

    def add_file(self, file: SavedFile) -> None:
        """A file of a DeepSpeed checkpoint, or this rank's part of one."""
        keys = [f'{file.name}/{storage.key}' for storage in file.storages]
        self._plan((key, None, storage.tensor, storage.updated)
                   for key, storage in zip(keys, file.storages))
        self.capture.add_document(file.name, 'file' if file.pickled else 'part', self._add_pickle(
            f'ckptfs.file/{file.name}', file.pickled or pickle.dumps(None, 2)), keys)

    def _add_pickle(self, key: str, text: bytes) -> str:
        self._add(torch.frombuffer(bytearray(text), dtype=torch.uint8), key)
        return key

    def add_group(self, optimizer: str, names: List[str], pickled: bytes) -> None:
        """A parameter group."""
        key = self._add_pickle(f'ckptfs.group/{self._groups}', pickled)
        self._groups += 1
        self.capture.add_group(optimizer, names, key)

    def add_document(self, name: str, scope: str, pickled: bytes,
                     tensors: List[torch.Tensor]) -> None:
        """A document and the tensors in it."""
        keys = [f'ckptfs.document/{name}/{i}' for i in range(len(tensors))]
        for key, tensor in zip(keys, tensors):
            self._add(tensor, key)
        self.capture.add_document(
            name, scope, self._add_pickle(f'ckptfs.document/{name}', pickled), keys)
