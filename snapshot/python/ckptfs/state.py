# SPDX-License-Identifier: Apache-2.0
"""The states of a model and its optimizers, by name: nothing is copied here."""
import hashlib
import pickle
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import (Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional,
                    Sequence, Set, Tuple)

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from . import compat, replicas
from .plain_pickle import plain


class NotHeld(Exception):
    """Something that a snapshot cannot hold; the text says what."""


Box = Tuple[Sequence[int], Sequence[int], Sequence[int]]


class Part(NamedTuple):
    """As _native.Part, which cannot be compared."""
    shape: List[int]
    pieces: List[Box]
    local_shape: Optional[List[int]]
    flat: Optional[Tuple[int, int]]
    order: List[int]


@dataclass
class State:
    """One tensor: a parameter's or buffer's state of one kind, or a part of one.

    A part has `shape`, the whole state's, and one of
      offsets: the tensor is the box of the whole that begins at this index;
      flat: it is a row, elements [begin, end) of the row-major whole;
      pieces: it is made of boxes of the whole, each (begins, ends, index in the tensor
        where the box lies); what no box covers is padding.  With `flat` and
        `local_shape`, a tensor of that shape is, and this one is a row of its elements.
    The parts of all ranks have to be the whole state exactly once: what several
    ranks hold is said by `ranks`, and written by one of them.
    """
    parameter: str
    kind: str           # 'weight', 'exp_avg', 'step', ...
    optimizer: str      # '' of the only one
    tensor: torch.Tensor
    number: bool = False      # was a Python number
    updated: bool = False     # nothing but an optimizer's step writes it
    shape: Optional[Sequence[int]] = None
    offsets: Optional[Sequence[int]] = None
    flat: Optional[Tuple[int, int]] = None
    pieces: Optional[Sequence[Box]] = None
    local_shape: Optional[Sequence[int]] = None
    # The ranks that hold these very bytes, rising.  None: all ranks hold a whole state, and
    # this rank alone holds a part.
    ranks: Optional[Tuple[int, ...]] = None
    # Tensors beside `tensor` whose version counters tell of writes to it.
    watched: Sequence[torch.Tensor] = ()

    def part(self, order: Sequence[int] = ()) -> Optional[Part]:
        """The part of its state that it is; None if it is a whole state.  order: of the tensor's
        dimensions, if they do not lie as they are."""
        if self.shape is None:
            return Part(list(self.tensor.shape), [], None, None, list(order)) if order else None
        pieces = list(self.pieces or [])
        if self.offsets is not None:
            ends = [at + size for at, size in zip(self.offsets, self.tensor.shape)]
            pieces = [(self.offsets, ends, [0] * len(self.offsets))]
        return Part(list(self.shape), [tuple(map(list, box)) for box in pieces],
                    None if self.local_shape is None else list(self.local_shape),
                    None if self.flat is None else tuple(self.flat), list(order))


@dataclass
class Model:
    """Names and roles in the module's own order; tied weights are aliases."""
    parameters: List[Tuple[str, str]] = field(default_factory=list)  # name, role
    aliases: List[Tuple[str, str]] = field(default_factory=list)     # alias, name
    tensors: Dict[str, torch.Tensor] = field(default_factory=dict)   # by name
    extra: Dict[str, Any] = field(default_factory=dict)  # documents: get_extra_state()
    # Ranks have different parameters (pipelines): each declares its own.  Otherwise
    # rank 0 does for all.
    per_rank: bool = False
    # The layout of the whole job, as core/model/layout.h spells it; '': dp<world>.
    layout: str = ''
    framework: str = 'torch'
    framework_version: str = torch.__version__


def _without(module: nn.Module, wrappers: Sequence[str]) -> nn.Module:
    """The module inside of wrappers, by the attributes that these keep it under."""
    found = True
    while found:
        found = False
        for inner in wrappers:
            if isinstance(compat.children(module).get(inner), nn.Module) and compat.wraps(module):
                module, found = compat.children(module)[inner], True
    return module


# Around DDP: torch.compile, Lightning's Fabric.
_OUTER = ('_orig_mod', '_forward_module')
_BETWEEN = re.compile(r'\b(_orig_mod|_forward_module|_checkpoint_wrapped_module)\.')
# Their hooks put nothing into a state dict that is not theirs already.
_PACKAGES = {'torch', 'deepspeed', 'megatron', 'lightning', 'pytorch_lightning'}


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DDP, DataParallel, torch.compile, activation checkpointing, Fabric."""
    while True:
        module = _without(module, (*_OUTER, '_checkpoint_wrapped_module'))
        if not isinstance(module, (DistributedDataParallel, DataParallel)):
            return module
        module = module.module


def data_parallel(module: nn.Module) -> Optional[DistributedDataParallel]:
    """The DDP wrapper of a model, if it has one."""
    module = _without(module, _OUTER)
    return module if isinstance(module, DistributedDataParallel) else None


def is_data_parallel(module: nn.Module) -> bool:
    """True if all ranks hold the same parameters, as DDP keeps them."""
    return data_parallel(module) is not None


def refuse_unknown(module: nn.Module) -> None:
    """TypeError for modules whose parameters are not their own."""
    for child in module.modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise TypeError('a ScriptModule is not supported: its parameters have no names of a '
                            'module in Python; pass the module that was scripted or traced')
        if type(child).__name__ == 'FullyShardedDataParallel':
            raise TypeError('FullyShardedDataParallel (FSDP1) is not supported: use '
                            'torch.distributed.fsdp.fully_shard (FSDP2)')


def _walk(module: nn.Module, prefix: str) -> Iterator[Tuple[str, nn.Module]]:
    module = unwrap(module)
    yield prefix, module
    for name, child in compat.children(module).items():
        if child is not None:
            yield from _walk(child, f'{prefix}{name}.')


def _is_same(given: Any, held: torch.Tensor) -> bool:
    """True if both are the same elements in the same order."""
    if given is held or not isinstance(given, torch.Tensor):
        return given is held
    if isinstance(given, compat.DTensor) or isinstance(held, compat.DTensor):
        return type(given) is type(held)
    return (given.data_ptr(), given.shape, given.stride(), given.dtype) == (
        held.data_ptr(), held.shape, held.stride(), held.dtype)


def _add_unregistered(prefix: str, module: nn.Module, model: Model) -> None:
    """What a module's state dict has and it does not register (scales of quantised weights, a
    metric's sums) is held like a buffer; NotHeld for what is not a plain tensor, and for what is
    registered and given in another form (turned, cast)."""
    known = {*model.tensors, *(alias for alias, _ in model.aliases),
             *(f'{key.removeprefix("extra_state/")}_extra_state' for key in model.extra)}
    for key, value in module.state_dict(prefix=prefix, keep_vars=True).items():
        name = _BETWEEN.sub('', key)
        if name in model.tensors and not _is_same(value, model.tensors[name]):
            raise NotHeld(f'{name} stands in state_dict() in another form than its module, a '
                          f'{type(module).__name__}, has it')
        if value is None or name in known:
            continue
        if not isinstance(value, torch.Tensor) or value.is_quantized or value.layout != torch.strided:
            raise NotHeld(f'{name} stands in state_dict(), but is neither registered by its module, '
                          f'a {type(module).__name__}, nor a plain tensor')
        known.add(name)
        model.parameters.append((name, 'buffer'))
        model.tensors[name] = value


def model_state(modules: Sequence[nn.Module],
                instead: Optional[Dict[Tuple[int, str], torch.Tensor]] = None) -> Model:
    """Parameters and persistent buffers as named_parameters() of the unwrapped
    modules names them.  `instead`: of what stands in a module for a while, by the
    module's id and the name there."""
    model, seen = Model(), {}
    adding: List[Tuple[str, nn.Module]] = []
    for prefix, module in (place for m in modules for place in _walk(m, '')):
        compat.call_state_dict_pre_hooks(module, prefix, _PACKAGES)
        held = [(n, p, 'trainable' if p.requires_grad else 'frozen')
                for n, p in compat.parameters(module).items() if p is not None]
        held += [(n, b, 'buffer') for n, b in compat.buffers(module).items() if b is not None]
        for name, tensor, role in held:
            tensor = (instead or {}).get((id(module), name), tensor)
            name = prefix + name
            first = seen.setdefault(id(tensor), name)
            if first != name:
                model.aliases.append((name, first))
                continue
            if name in model.tensors:
                raise NotHeld(f'two modules have a {name}: save each as a run of its own')
            model.parameters.append((name, role))
            model.tensors[name] = tensor
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            if f'extra_state/{prefix}' in model.extra:
                raise NotHeld(f'two modules have a {prefix}_extra_state: save each as a run of '
                              'its own')
            model.extra[f'extra_state/{prefix}'] = module.get_extra_state()
        if compat.adds_to_state_dict(module, _PACKAGES):
            adding.append((prefix, module))
    for prefix, module in adding:
        _add_unregistered(prefix, module, model)
    return model


def _is_its_own(optimizer: object, step: Any) -> bool:
    """True if what is called as its step does nothing but what its class's does: that, bound,
    or inside of what torch's schedulers put around it."""
    while getattr(step, '__globals__', {}).get('__name__') == 'torch.optim.lr_scheduler':
        step = getattr(step, '__wrapped__', None)
    return getattr(step, '__func__', step) is type(optimizer).step


def first_states(optimizer: Any, group: Dict[str, Any]) -> Optional[int]:
    """How many states of a parameter's size the first step of torch's own optimizers makes; None:
    of another class."""
    optim = torch.optim
    if isinstance(optimizer, (optim.Adam, optim.AdamW)):
        return 2 + bool(group.get('amsgrad'))
    if isinstance(optimizer, (optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.Rprop)):
        return 2
    if isinstance(optimizer, optim.RMSprop):
        return 1 + bool(group.get('momentum')) + bool(group.get('centered'))
    if isinstance(optimizer, optim.SGD):
        return int(bool(group.get('momentum')))
    return 1 if isinstance(optimizer, optim.Adagrad) else None


def waits_for_hooks(optimizer: object) -> bool:
    """True if its step calls torch's global pre-hooks before it writes anything."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    own = type(optimizer).step
    # A patch of the class may have copied what marks a hooked one (functools.wraps).
    return (getattr(own, '__code__', None) is compat.HOOKED_STEP
            and _is_its_own(optimizer, vars(optimizer).get('step', own)))


# Their hooks of parameters write gradients, or call the step of an optimizer.
_KNOWN = {'torch', 'deepspeed', 'megatron'}


def updates_in_backward(parameters: Iterable[torch.Tensor]) -> str:
    """The first hook of the backward pass that a parameter has, by its place in somebody's
    code, which may update parameters beside every optimizer's step (LOMO); or ''."""
    for parameter in parameters:
        for hook in compat.backward_hooks(parameter):
            while isinstance(hook, partial):
                hook = hook.func
            module = getattr(hook, '__module__', None) or ''
            if module.partition('.')[0] not in _KNOWN:
                return f'{module}.{getattr(hook, "__qualname__", type(hook).__qualname__)}'
    return ''


def written_by_forward(modules: Iterable[nn.Module]) -> Set[int]:
    """The parameters, by id, that a forward pass writes: embeddings of bounded norm."""
    return {id(module.weight) for one in modules for module in one.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm}


def refuse_keepers(optimizers: Sequence[Any]) -> None:
    """TypeError for optimizers whose states are not where they say, or not all here."""
    for optimizer in optimizers:
        if any(c.__name__ == 'ZeroRedundancyOptimizer' for c in type(optimizer).__mro__):
            raise TypeError('ZeroRedundancyOptimizer is not supported: each rank has states of '
                            'its own; use torch.distributed.fsdp.fully_shard (FSDP2)')
        for inner in getattr(optimizer, '__dict__', {}).values():
            if (isinstance(inner, torch.optim.Optimizer)
                    and inner.state is not getattr(optimizer, 'state', None)
                    and not any(inner is one for one in optimizers)):
                raise TypeError(f'{type(optimizer).__name__} keeps states in a '
                                f'{type(inner).__name__} of its own: pass that, too')


def _number(value: object) -> torch.Tensor:
    dtype = (torch.bool if isinstance(value, bool) else
             torch.float64 if isinstance(value, float) else torch.int64)
    return torch.tensor(value, dtype=dtype, device='cpu')


def state_of(name: str, kind: str, label: str, value: Any,
             updated: bool = True) -> List[State]:
    """Returns an optimizer's states of a parameter; nothing for None.  updated: as State has it."""
    if isinstance(value, torch.Tensor):
        return [State(name, kind, label, value, updated=updated)]
    if isinstance(value, (bool, int, float)):
        return [State(name, kind, label, _number(value), number=True)]
    if value is not None:
        raise NotHeld(f"the optimizer's {kind} of {name} is a {type(value).__name__}")
    return []


def foreign(optimizers: Sequence[Any], names: Mapping[int, str]) -> str:
    """Describes a group's parameter that the model does not have, or ''; `names` by id()."""
    for optimizer in optimizers:
        for index, group in enumerate(getattr(optimizer, 'param_groups', [])):
            for parameter in group['params']:
                if id(parameter) not in names:
                    return (f'parameter group {index} of the {type(optimizer).__name__} has a '
                            f'parameter of shape {list(parameter.shape)} that the model does not '
                            'have: pass the module that has it, too')
    return ''


def added_entries(optimizer: Any) -> Dict[str, Any]:
    """Returns what its state_dict() has beside states and groups; called before these are read,
    since it may bring them up to date."""
    if not compat.adds_to_optimizer_state(optimizer):
        return {}
    return {key: value for key, value in optimizer.state_dict().items()
            if key not in ('state', 'param_groups')}


def optimizer_states(optimizer: torch.optim.Optimizer, label: str,
                     names: Dict[int, str]) -> List[State]:
    """The state of each parameter; `names` by id() of the parameters."""
    states = []
    kinds: Set[str] = set()
    for parameter, values in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor):
            raise NotHeld(f"the optimizer's state has an entry {parameter!r}, which is not a parameter's")
        kinds.update(values)
        name = names.get(id(parameter))
        if name is None:
            raise NotHeld(foreign([optimizer], names)
                          or 'the optimizer has states of a parameter that is in no group')
        for kind, value in values.items():
            if isinstance(value, torch.Tensor):  # most are: not a list for each
                states.append(State(name, kind, label, value, False, True))
            else:
                states += state_of(name, kind, label, value)
    for kind in kinds:
        if kind == 'weight':
            raise NotHeld("the optimizer has a state 'weight', which is what a parameter's own value is "
                          'called')
        if not isinstance(kind, str) or '/' in kind:
            raise NotHeld(f"the optimizer's states are called {kind!r}: only a text without a '/' "
                          'can be told from the name of a parameter')
    return states


def _copied(value: Any, leaf: Callable[[Any], Any], known: Dict[int, Any]) -> Any:
    """A copy with leaf(x) of everything in dicts, lists and tuples; known: by id."""
    if id(value) in known:
        return known[id(value)]
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        known[id(value)] = made = copy(value)
        made.clear()
        for key, one in value.items():
            made[_copied(key, leaf, known)] = _copied(one, leaf, known)
    elif type(value) is list:
        known[id(value)] = made = []
        made += [_copied(one, leaf, known) for one in value]
    elif type(value) is tuple:
        made = tuple(_copied(one, leaf, known) for one in value)
    else:
        made = leaf(value)
    return made


def _is_scalar(value: Any) -> bool:
    numpy = sys.modules.get('numpy')
    return numpy is not None and isinstance(value, numpy.generic)


def _number_of(value: Any) -> Any:
    """Numbers of numpy as Python has them."""
    return value.item() if _is_scalar(value) else value


def _numbers_of(value: Any) -> Any:
    """Tensors and arrays, too."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    numpy = sys.modules.get('numpy')
    if numpy is not None and isinstance(value, numpy.ndarray):
        return value.tolist()
    return _number_of(value)


def _unreadable(value: Any) -> str:
    """Why it could not be loaded again, or ''."""
    try:
        plain(pickle.dumps(value, protocol=2), lambda _: torch.empty(0))
    except pickle.UnpicklingError as error:
        return str(error)
    except Exception:  # pylint: disable=broad-except
        return f'it holds a {type(value).__name__}'  # no pickle, either
    return ''


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value).__name__ != 'DTensor'
    return type(value) in (list, tuple) and any(map(_holds_tensor, value))


def tensor_hyper_parameters(group: Mapping[str, Any]) -> Dict[str, Any]:
    """Those of a group that are tensors, or lists with tensors: a learning rate on a device, say."""
    return {key: value for key, value in group.items() if key != 'params' and _holds_tensor(value)}


def hyper_parameters(group: Dict[str, Any], where: str = 'a parameter group') -> bytes:
    """A parameter group without its parameters, as a pickle of values that are loaded without
    running code: numbers of tensors and of numpy are Python's.  NotHeld for others."""
    known: Dict[int, Any] = {}
    held = {key: _copied(value, _numbers_of, known) for key, value in group.items()
            if key != 'params'}
    if _unreadable(held):
        for key, value in held.items():
            what = _unreadable(value)
            if what:
                raise NotHeld(f'{key} of {where} could not be loaded again: {what}')
        raise NotHeld(f'{where} could not be loaded again')
    return pickle.dumps(held, protocol=2)


class _Scalar(Exception):
    """A number of numpy in a document."""


class _DocumentPickler(pickle.Pickler):
    """Tensors become their number in `tensors`."""

    def __init__(self, file: BytesIO, scalars: bool) -> None:
        super().__init__(file, protocol=2)
        self.tensors: List[torch.Tensor] = []
        self._scalars = scalars

    def reducer_override(self, value: Any) -> Any:
        """_Scalar for a number of numpy, unless these may be."""
        if not self._scalars and _is_scalar(value):
            raise _Scalar
        return NotImplemented

    def persistent_id(self, value: object) -> Any:
        """The tensor's number, with the marks of a parameter and of a gradient."""
        if not isinstance(value, torch.Tensor):
            return None
        if value.layout != torch.strided or value.is_quantized:
            raise NotHeld('a document holds a tensor that is not strided')
        if type(value).__name__ == 'DTensor':
            raise NotHeld('a document holds a DTensor')
        self.tensors.append(value.detach())
        marks = 'p' if isinstance(value, nn.Parameter) else ''
        return str(len(self.tensors) - 1) + marks + 'g' * value.requires_grad


def value_of(value: Any) -> Any:
    """A document as it is now: a state_dict(), what a function returns, or itself."""
    if callable(value) and not hasattr(value, 'state_dict'):
        value = value()
    return value.state_dict() if hasattr(value, 'state_dict') else value


def _pickled(value: Any, scalars: bool) -> Tuple[bytes, List[torch.Tensor]]:
    file = BytesIO()
    pickler = _DocumentPickler(file, scalars)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def document(value: Any) -> Tuple[bytes, List[torch.Tensor]]:
    """A pickle without tensors, and these.  A value with a state_dict() is that,
    one that can be called is what it returns; numbers of numpy are Python's."""
    value = value_of(value)
    try:
        return _pickled(value, False)
    except _Scalar:
        return _pickled(_copied(value, _number_of, {}), True)


def refusal(pickled: bytes, tensors: Sequence[torch.Tensor]) -> str:
    """Why a document could not be loaded again, or ''."""
    try:
        plain(pickled, tensors.__getitem__)
    except pickle.UnpicklingError as error:
        return str(error)
    return ''


NUMBER_BYTES = 16  # of the widest number, a complex one


def share(sizes: Sequence[Tuple[str, int]], world: int) -> Dict[str, int]:
    """Assigns each of the keys that all ranks hold to a rank, even by bytes.

    `sizes` are (key, bytes); all ranks get the same answer.  Numbers are the first rank's:
    spread over the ranks they would move what follows them in each file by another few bytes.
    """
    loads = [0] * world
    owners = {}
    for key, size in sorted(sizes, key=lambda item: (-item[1], item[0])):
        rank = min(range(world), key=loads.__getitem__) if size > NUMBER_BYTES else 0
        owners[key] = rank
        loads[rank] += size
    return owners


class Shares:
    """Chooses the states that a rank writes among those that it holds.

    All ranks that hold a state must see the same states of those ranks, by name and
    size; then each state is written by exactly one of them.  `alike` says what this one
    saw, for who has all ranks' parts to compare: a digest, and of how many ranks.  Another one is of
    the bytes: replicas that came apart would be put together to a model that nobody had.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._all = tuple(range(world))
        self._known: Dict[Tuple[int, ...], Tuple[Any, Dict[str, int], str]] = {}
        self.alike: List[Tuple[str, int]] = []
        self._step = 0

    def of(self, states: Sequence[State], roles: Dict[str, str], step: int = 0) -> List[State]:
        """Those that this rank writes: of what ranks hold alike an even part, by
        bytes; buffers, which nobody keeps alike, are the first rank's."""
        self.alike, self._step = [], step
        if len(self._all) == 1 and {one.ranks for one in states} == {None}:
            return list(states)
        held: Dict[Tuple[int, ...], List[State]] = {}
        mine = []
        for one in states:
            ranks = one.ranks or (self._all if one.shape is None else (self._rank,))
            if self._rank not in ranks:
                raise NotHeld(f'{one.kind} of {one.parameter} belongs to ranks {ranks}')
            if len(ranks) == 1 or roles[one.parameter] == 'buffer':
                mine += [one] * (ranks[0] == self._rank)
            else:
                held.setdefault(tuple(ranks), []).append(one)
        for ranks, alike in held.items():
            mine += self._spread(ranks, alike)
        return mine

    def _spread(self, ranks: Tuple[int, ...], alike: List[State]) -> List[State]:
        sizes = [(f'{s.optimizer}/{s.kind}/{s.parameter}', s.tensor.nbytes) for s in alike]
        known = self._known.get(ranks)
        if known is None or known[0] != sizes:
            digest = hashlib.sha256(repr((ranks, sorted(sizes))).encode()).hexdigest()
            known = self._known[ranks] = (sizes, share(sizes, len(ranks)), digest)
        self.alike.append((known[2], len(ranks)))
        order = sorted(range(len(alike)), key=lambda i: sizes[i][0])
        held = replicas.digest([alike[i].tensor for i in order], self._step)
        self.alike.append((f'bytes:{known[2]}:{held}', len(ranks)))
        return [s for s, (key, _) in zip(alike, sizes)
                if ranks[known[1][key]] == self._rank]
