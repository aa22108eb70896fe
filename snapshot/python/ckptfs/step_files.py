# SPDX-License-Identifier: Apache-2.0
"""The files of a view of one rank, from a directory or, without a mount, from the store."""
import json
import logging
import math
import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Union

import torch

from . import url

LOG = logging.getLogger('ckptfs')
# The most that is asked for at once; mount/commands/read.cc has the protocol.
PIECE = 16 << 20
LARGEST_HEADER = 100 << 20  # of safetensors

_DTYPES = {
    'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16,
    'I64': torch.int64, 'I32': torch.int32, 'I16': torch.int16, 'I8': torch.int8,
    'U8': torch.uint8, 'BOOL': torch.bool, 'C64': torch.complex64}
for _key, _name in (('U16', 'uint16'), ('U32', 'uint32'), ('U64', 'uint64'),
                    ('F8_E4M3', 'float8_e4m3fn'), ('F8_E5M2', 'float8_e5m2'),
                    ('F8_E4M3FNUZ', 'float8_e4m3fnuz'), ('F8_E5M2FNUZ', 'float8_e5m2fnuz'),
                    ('F8_E8M0', 'float8_e8m0fnu')):
    if hasattr(torch, _name):
        _DTYPES[_key] = getattr(torch, _name)


class Directory:
    """A view in a mount, or what `ckptfs export RUN/ID tp1 DIR` wrote."""

    def __init__(self, path: str) -> None:
        self._path = path
        if os.path.exists(os.path.join(path, 'rank1')):
            raise ValueError(f'{path} is a view of several ranks: take tp1')

    def read(self, file: str, offset: int, out: memoryview) -> None:
        """Fills `out` from `offset` on.  EOFError if the file ends before."""
        with open(os.path.join(self._path, file), 'rb', buffering=0) as opened:
            opened.seek(offset)
            while out:
                count = opened.readinto(out)
                if not count:
                    raise EOFError(f'{self._path}/{file} is shorter than its header says')
                out = out[count:]

    def describe(self) -> Dict[str, Any]:
        """No file of a view has groups and documents."""
        return {}

    def close(self) -> None:
        """Nothing is open."""


def _find_program() -> Optional[str]:
    """$CKPTFS_BIN, else the program that was installed with this package, since it knows the same
    words, else the PATH's."""
    if os.environ.get('CKPTFS_BIN'):
        return os.environ['CKPTFS_BIN']
    beside = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for folder in sysconfig.get_path('scripts'), f'{beside}/bin':  # the second: pip install --target
        if os.access(f'{folder}/ckptfs', os.X_OK):
            return f'{folder}/ckptfs'
    return shutil.which('ckptfs')


class Program:
    """A step of a store by the program `ckptfs read`.

    A number means the newest attempt of that step: what a later life of the job saved.
    RuntimeError with its text for what it refuses.  One thread at a time.
    """

    def __init__(self, store: str, run: str, step: str) -> None:
        program = _find_program()
        if not program:
            raise RuntimeError('the program ckptfs is not on the PATH: a load without a mount '
                               'needs it')
        self._what = f'{run}/{step} of {store}'
        newest = ['--newest'] if step.isdecimal() else []
        self._process = subprocess.Popen(
            [program, 'read', '--store', store, *newest, '--', f'{run}/{step}', 'tp1'],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def _ask(self, request: str) -> int:
        """Bytes that follow."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(request.encode() + b'\n')
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its standard error has the reason
        line = self._process.stdout.readline()
        if not line.endswith(b'\n'):
            assert self._process.stderr is not None
            why = self._process.stderr.read().decode(errors='replace').strip()
            raise RuntimeError(f'{self._what}: {why or "ckptfs read has ended"}')
        if line.startswith(b'-'):
            raise RuntimeError(f'{self._what}: {line[1:].decode(errors="replace").strip()}')
        return int(line)

    def _fill(self, out: memoryview) -> None:
        assert self._process.stdout is not None
        while out:
            count = self._process.stdout.readinto(out)  # type: ignore[attr-defined]
            if not count:
                raise RuntimeError(f'{self._what}: ckptfs read has ended')
            out = out[count:]

    def read(self, file: str, offset: int, out: memoryview) -> None:
        """As Directory's."""
        while out:
            count = self._ask(f'file {offset} {min(len(out), PIECE)} {file}')
            if not 0 < count <= len(out):
                raise EOFError(f'{self._what}: {file} is shorter than its header says')
            self._fill(out[:count])
            out, offset = out[count:], offset + count

    def describe(self) -> Dict[str, Any]:
        """{"groups": [...], "documents": [...]} of the step."""
        text = bytearray(self._ask('step'))
        self._fill(memoryview(text))
        return json.loads(text)

    def tensor(self, document: int, number: int, dtype: torch.dtype, shape: Sequence[int],
               strides: Sequence[int]) -> torch.Tensor:
        """A tensor that a document mentions."""
        memory = bytearray(self._ask(f'tensor {document} {number}'))
        self._fill(memoryview(memory))
        if not memory:
            return torch.empty(tuple(shape), dtype=dtype, device='cpu')
        flat = torch.frombuffer(memory, dtype=dtype)
        return flat.as_strided(tuple(shape), tuple(strides)).clone()

    def close(self) -> None:
        """The program ends."""
        self._process.communicate()


Files = Union[Directory, Program]


def open_files(place: str) -> Files:
    """place: a directory, or ckptfs://STORE/RUN/STEP.  ValueError for a view of several
    ranks, and for a URL that is not one."""
    return Program(*url.parse(place)) if url.is_url(place) else Directory(place)


@dataclass
class Stored:
    """A tensor in a safetensors file; `begin` is the offset of its first byte."""
    file: str
    dtype: torch.dtype
    shape: List[int]
    begin: int

    def load(self, files: Files, box: Sequence[slice], target: torch.Tensor) -> None:
        """Copies a box of it; rows that the box needs are read whole."""
        rows = (box[0].start, box[0].stop) if box else (0, 1)
        row = math.prod(self.shape[1:])
        inner = tuple(box[1:])
        whole = all(cut == slice(0, size) for cut, size in zip(inner, self.shape[1:]))
        if whole and target.device.type == 'cpu' and target.dtype == self.dtype and (
                target.is_contiguous()):
            self._read(files, rows[0] * row, target)
            return
        step = max(1, (4 * PIECE) // max(1, row * self.dtype.itemsize))
        for first in range(rows[0], rows[1], step):
            last = min(first + step, rows[1])
            some = torch.empty([last - first, *self.shape[1:]], dtype=self.dtype, device='cpu')
            self._read(files, first * row, some)
            if not box:
                target.copy_(some.view(()))
            else:
                target[first - rows[0]:last - rows[0]].copy_(some[(slice(None), *inner)])

    def number(self, files: Files) -> Union[bool, int, float]:
        """Returns the value of a state that was a Python number."""
        value = torch.empty(self.shape, dtype=self.dtype, device='cpu')
        self.load(files, tuple(slice(0, size) for size in self.shape), value)
        return value.item()

    def _read(self, files: Files, element: int, out: torch.Tensor) -> None:
        if out.numel():
            memory = out.reshape(-1).view(torch.uint8).numpy()
            files.read(self.file, self.begin + element * self.dtype.itemsize, memoryview(memory))


def tensors_of(files: Files, file: str) -> Dict[str, Stored]:
    """By key, and by the names that share it; the logger `ckptfs` names what torch has no dtype
    for.  ValueError for a malformed header."""
    length = bytearray(8)
    files.read(file, 0, memoryview(length))
    size = int.from_bytes(length, 'little')
    if size > LARGEST_HEADER:
        raise ValueError(f'{file} is not a safetensors file')
    text = bytearray(size)
    files.read(file, 8, memoryview(text))
    header = json.loads(text)
    aliases = header.pop('__metadata__', {})
    aliases.pop('format', None)  # "pt", in every file of tensors of torch
    found = {}
    for key, one in header.items():
        dtype, shape, (begin, end) = one['dtype'], one['shape'], one['data_offsets']
        if dtype not in _DTYPES:
            LOG.warning('%s: %s is left out: this torch has no dtype for %s', file, key, dtype)
            continue
        stored = Stored(file, _DTYPES[dtype], shape, 8 + size + begin)
        if end - begin != math.prod(shape) * stored.dtype.itemsize or min([begin, *shape]) < 0:
            raise ValueError(f'{file}: {key} has {end - begin} bytes')
        found[key] = stored
    return {**{alias: found[key] for alias, key in aliases.items() if key in found}, **found}
