# SPDX-License-Identifier: Apache-2.0
"""Pickles of plain values: numbers, texts, containers, arrays, types; never anything that takes code."""
import argparse
import io
import math
import pickle
import pickletools
import re
from collections import Counter, OrderedDict, defaultdict
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

# Numbers of numpy, without byte order.
_NUMPY = re.compile(r'b1|[iu][1248]|f[248]|c8|c16')
# Exceptions that a malformed pickle may raise.
_MALFORMED = (pickle.UnpicklingError, AttributeError, EOFError, ImportError, LookupError,
              MemoryError, OverflowError, RecursionError, RuntimeError, TypeError, ValueError)
# Bytes that arrays of one pickle may share.
_MOST_COPIED = 64 << 20


def _check(holds: Any, what: str) -> None:
    if not holds:
        raise pickle.UnpicklingError(f'it holds a {what}')


class Unreadable(NamedTuple):
    """Stands for a value that only code can make: `what` is the class."""
    what: str


class _Type(NamedTuple):
    """Stands for a builtin type until the pickle is read: a value, or what a defaultdict makes.
    Called, it makes what pickle calls the type for, and nothing else."""
    type: Any
    make: Optional[Callable[..., Any]] = None

    def __call__(self, *args: Any) -> Any:
        _check(self.make, self.type.__name__)
        assert self.make is not None
        return self.make(*args)


class _DType:
    """Stands for a dtype of numpy, whose own __setstate__ believes what it is told of memory."""

    def __init__(self, name: Any) -> None:
        _check(type(name) is str, 'numpy.dtype')
        _check(_NUMPY.fullmatch(name), f'numpy.dtype {name[:20]}')
        self.name, self.order = name, '='

    def __setstate__(self, state: Any) -> None:
        _, self.order, *rest = state
        _check(type(self.order) is str and self.order in ('<', '>', '|', '=')
               and all(one is None for one in rest[:3])
               and all(type(one) is int and one == -1 for one in rest[3:5]), 'numpy.dtype')

    def made(self) -> Any:
        """The dtype."""
        import numpy
        return numpy.dtype(self.order + self.name)


class _Closed:
    """Holds one thing; nothing can be written into it."""
    __slots__ = ('held',)
    held: Any

    def __init__(self, held: Any) -> None:
        object.__setattr__(self, 'held', held)

    def __setattr__(self, *_: Any) -> None:
        raise pickle.UnpicklingError('it writes into the functions that make its values')

    __setstate__ = __setattr__


class _Call(_Closed):
    """A function that pickle calls."""
    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        return self.held(*args)


class _Tensor(_Closed):
    """Stands for a tensor, by its number: its own __setstate__ believes what it is told of memory."""
    __slots__ = ()


class _Array:
    """Stands for an array of numpy, of numbers alone."""

    def __init__(self, room: List[int]) -> None:
        """room: bytes that all arrays of the pickle may have together, one number."""
        self.state: Tuple = ()
        self.room = room

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        _check(type(shape) is tuple and all(type(size) is int for size in shape)
               and type(dtype) is _DType and type(data) is bytes, 'numpy.ndarray')
        self.state = (shape, dtype, fortran, data)

    def made(self) -> Any:
        """The array."""
        import numpy
        _check(self.state, 'numpy.ndarray')
        shape, stands, fortran, data = self.state
        dtype = stands.made()
        _check(min(shape, default=0) >= 0 and math.prod(shape) * dtype.itemsize == len(data),
               'numpy.ndarray of another size')
        self.room[0] -= len(data)
        _check(self.room[0] >= 0, 'value many times over')
        return numpy.ndarray(shape, dtype, bytearray(data), order='F' if fortran else 'C')


def _real(value: Any) -> Any:
    """Returns the value that it stands for.  UnpicklingError for a function of ours, which is a
    class that is a value."""
    _check(type(value) is not _Call, 'class')
    if type(value) is _Type:
        return value.type
    return value.made() if type(value) in (_DType, _Array) else value


class _Unknown:
    """Takes what pickle does to an object of a class that is not loaded; `what` is its name."""

    what = ''

    def __new__(cls, *_: Any, **__: Any) -> '_Unknown':
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _take(self, *_: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = _take


class _Plain(pickle.Unpickler):
    """Loads values that no code is run for.

    A pickle may call with anything what find_class returns, and BUILD may write its attributes.
    So it is a value; a type of C, which cannot be written, with a harmless constructor; a class
    that is made for this pickle alone; or a _Call, which cannot be written either and
    looks at its arguments: a list that is there is copied, nothing is asked for its items,
    size or text.  Tensors come in at the end.
    """

    def __init__(self, text: bytes, tensor: Callable[[int], torch.Tensor],
                 lenient: bool = False) -> None:
        """lenient: what is not loaded becomes an _Unknown."""
        super().__init__(io.BytesIO(text))
        self._tensor, self._lenient = tensor, lenient
        self._stands = False  # something for something else
        self._made: Dict[int, torch.Tensor] = {}
        self._room = [len(text) + _MOST_COPIED]
        self._namespace: Any = type('Namespace', (), {})
        self._found: Dict[Tuple[str, str], Any] = {
            ('_codecs', 'encode'): self._bytes,
            ('argparse', 'Namespace'): self._namespace,  # NEWOBJ wants a class
            ('collections', 'Counter'): self._counter,
            ('collections', 'defaultdict'): self._defaultdict,
            ('numpy', 'dtype'): self._dtype,
            ('torch', 'Size'): self._size,
            ('torch', 'device'): self._device}
        for multiarray in ('numpy.core.multiarray', 'numpy._core.multiarray'):
            self._found[multiarray, '_reconstruct'] = self._array
            self._found[multiarray, 'scalar'] = self._scalar
        for where, found in self._found.items():
            if found is not self._namespace:
                self._found[where] = _Call(found)

    def find_class(self, module: str, name: str) -> Any:
        """UnpicklingError for all but a few."""
        if (module, name) == ('collections', 'OrderedDict'):
            return OrderedDict
        if module == 'torch' and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        self._stands = True
        if (module, name) in self._found:
            return self._found[module, name]
        if (module, name) == ('numpy', 'ndarray'):  # an argument of _reconstruct
            import numpy
            return _Type(numpy.ndarray)
        if module in ('builtins', '__builtin__') and name in _BUILTINS:
            return _BUILTINS[name]
        if not self._lenient:
            raise pickle.UnpicklingError(f'it holds a {module}.{name}')
        return type('Unknown', (_Unknown,), {'what': f'{module}.{name}'})

    def persistent_load(self, pid: Any) -> Any:
        """A tensor by its number."""
        _check(type(pid) in (str, int), 'tensor without a number')
        number = re.match(r'\d{1,9}(?!\d)', str(pid)[:99])
        if number is None:
            raise pickle.UnpicklingError(f'it holds a tensor {str(pid)[:99]}')
        self._stands = True
        return _Tensor(int(number.group()))

    def load(self) -> Any:
        """The value, without what stood for others."""
        value = super().load()
        if not self._stands:
            return value
        value = self._finished(value, {})
        for one in _inside(value):
            _check(type(one) not in (_Type, _Call, _Tensor, _DType, _Array), 'value that holds itself')
        return value

    def _stood_for(self, value: Any) -> Any:
        if type(value) is not _Tensor:
            return _real(value)
        if value.held not in self._made:
            self._made[value.held] = self._tensor(value.held)
        return self._made[value.held]

    def _finished(self, value: Any, known: Dict[int, Tuple[Any, Any]]) -> Any:
        """known: by id what was finished, which stays alive, and what it has become."""
        if id(value) not in known:
            become = argparse.Namespace() if isinstance(value, self._namespace) else self._stood_for(value)
            _check(value is not self._namespace, 'class')
            known[id(value)] = (value, become)
            if isinstance(value, self._namespace):
                vars(become).update(self._finished(vars(value), known))
            elif type(value) is tuple:
                made = tuple(self._finished(one, known) for one in value)
                known[id(value)] = (value, made)
            elif isinstance(value, list):
                value[:] = [self._finished(one, known) for one in value]
            elif isinstance(value, dict):
                items = [(self._finished(key, known), self._finished(one, known))
                         for key, one in value.items()]
                value.clear()
                for key, one in items:
                    value[key] = one
                for name, one in list(getattr(value, '__dict__', {}).items()):
                    vars(value)[name] = self._finished(one, known)
            elif type(value) is set:
                members = [self._finished(one, known) for one in value]
                value.clear()
                value.update(members)
            elif type(value) is frozenset:
                known[id(value)] = (value, frozenset(self._finished(one, known) for one in value))
        return known[id(value)][1]

    # ---- what pickle calls; none of these takes more than pickle gives it ----

    @staticmethod
    def _text(args: Tuple[Any, ...]) -> bytes:
        """Bytes as protocol 2 has them."""
        if not args:
            return b''
        if len(args) == 1 and type(args[0]) is bytes:
            return args[0]
        _check(len(args) == 2 and type(args[0]) is str and args[1] in ('latin1', 'latin-1'),
               'text in an encoding')
        return args[0].encode('latin1')

    def _bytes(self, *args: Any) -> bytes:
        return self._text(args)

    def _counter(self, *counts: Any) -> Any:
        _check(all(type(one) is dict for one in counts), 'collections.Counter')
        made: Any = Counter()
        for one in counts:  # as they are: adding them up would be theirs
            dict.update(made, one)
        return made

    def _defaultdict(self, factory: Any = None) -> Any:
        _check(factory is None or type(factory) is _Type, 'collections.defaultdict')
        return defaultdict(None if factory is None else factory.type)

    def _dtype(self, name: Any, *_: Any) -> _DType:
        return _DType(name)

    def _array(self, *_: Any) -> _Array:
        return _Array(self._room)

    def _scalar(self, dtype: Any, data: Any) -> Any:
        _check(type(dtype) is _DType and type(data) is bytes, 'numpy.generic')
        import numpy
        return numpy.frombuffer(data, dtype.made())[0]

    def _size(self, sizes: Any) -> torch.Size:
        _check(type(sizes) is tuple, 'torch.Size')
        return torch.Size(sizes)

    def _device(self, name: Any, *index: Any) -> torch.device:
        _check(type(name) is str and all(type(one) is int for one in index), 'torch.device')
        try:
            return torch.device(name, *index)
        except RuntimeError as error:
            raise pickle.UnpicklingError(f'it holds a torch.device {name}') from error


def _collection(kind: Any) -> _Type:
    def make(items: Any = ()) -> Any:
        _check(type(items) in (list, tuple), kind.__name__)
        return kind(map(_real, items))

    return _Type(kind, make)


def _of_numbers(kind: Any, number: Any) -> _Type:
    def make(*args: Any) -> Any:
        _check(all(type(one) is number for one in args), kind.__name__)
        return kind(*args)

    return _Type(kind, make)


# By the names that protocol 2 has for them, too.
_BUILTINS: Dict[str, _Type] = {
    one.__name__: _Type(one) for one in (bool, dict, float, int, list, str, tuple)}
_BUILTINS.update({
    'bytearray': _Type(bytearray, lambda *args: bytearray(_Plain._text(args))),
    'bytes': _Type(bytes, lambda *args: _Plain._text(args)),
    'complex': _of_numbers(complex, float), 'frozenset': _collection(frozenset),
    'long': _BUILTINS['int'], 'range': _of_numbers(range, int), 'set': _collection(set),
    'unicode': _BUILTINS['str'], 'xrange': _of_numbers(range, int)})


def _puts_beyond(text: bytes) -> bool:
    """True if it numbers its memo beyond its own length, which the unpickler makes room for."""
    at = text.find(b'r')
    while at >= 0:
        if int.from_bytes(text[at + 1:at + 5], 'little') > len(text):
            return any(code.name == 'LONG_BINPUT' and put > len(text)
                       for code, put, _ in pickletools.genops(text))
        at = text.find(b'r', at + 1)
    return False


def plain(text: bytes, tensor: Callable[[int], torch.Tensor], lenient: bool = False) -> Any:
    """Returns the value of a pickle.  UnpicklingError if that takes code: it names the class."""
    try:
        _check(not _puts_beyond(text), 'memo that is longer than the pickle')
        return _Plain(text, tensor, lenient).load()
    except _MALFORMED as error:
        why = str(error) or f'it is malformed ({type(error).__name__})'
        raise pickle.UnpicklingError(why) from error


def _inside(value: Any) -> Iterator[Any]:
    """It and all that it holds, each once."""
    left: List[Any] = [value]
    seen: Dict[int, Any] = {}
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        yield one
        if isinstance(one, (dict, list, tuple, set, frozenset)) and type(one) is not _Type:
            left += [*one, *one.values()] if isinstance(one, dict) else one
        if isinstance(one, (dict, argparse.Namespace)):
            left += getattr(one, '__dict__', {}).values()


def unknown_in(value: Any) -> str:
    """The first class in it that is not loaded, or ''."""
    for one in _inside(value):
        if isinstance(one, _Unknown) or isinstance(one, type) and issubclass(one, _Unknown):
            return one.what
    return ''
