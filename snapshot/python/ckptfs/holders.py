# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks that hold the same parts of a model's parameters, by the meshes that its
DTensors lie on."""
import hashlib
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

import torch

from .dtensor import is_dtensor, mesh_key, replicas_of

PLAIN = -1


class Description:
    """One rank's description of its tensors: the names, and for each the place of its mesh in
    `meshes` (dtensor.mesh_key), PLAIN if it is not a DTensor."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.names: List[str] = []
        self.meshes: List[Tuple] = []
        self.where: List[int] = []
        for name, tensor in tensors.items():
            if is_dtensor(tensor) and tensor.device_mesh.get_coordinate() is None:
                continue  # another rank's
            self.names.append(name)
            self.where.append(self._mesh(mesh_key(tensor)) if is_dtensor(tensor) else PLAIN)

    def _mesh(self, key: Tuple) -> int:
        if key not in self.meshes:
            self.meshes.append(key)
        return self.meshes.index(key)

    def mesh_of(self, name: str) -> Any:
        """mesh_key of a name, or None."""
        at = self.where[self.names.index(name)]
        return None if at == PLAIN else self.meshes[at]


def gather(value: object, world: int) -> List[Any]:
    """Everybody's value, by rank."""
    out: List[Any] = [None] * world
    torch.distributed.all_gather_object(out, value)
    return out


def exchange(mine: Description, world: int,
             gather: Callable[[object, int], List[Any]]) -> List[Description]:
    """Everybody's description.  Names travel only where they differ."""
    digest = hashlib.sha256('\0'.join(mine.names).encode()).digest()
    sent = gather((digest, mine.meshes, mine.where), world)
    alike = all(s[0] == digest for s in sent)
    names = [mine.names] * world if alike else gather(mine.names, world)
    out = []
    for (_, meshes, where), held in zip(sent, names):
        one = Description({})
        one.names, one.meshes, one.where = held, meshes, where
        out.append(one)
    return out


class Holders:
    """Tells the ranks that hold the same bytes as this rank.

    Ranks are joined by a mesh or a DDP group that has both.  A parameter that lies on
    meshes of some of them only (a norm beside tensor-parallel layers) is the same on
    all by convention, which nothing keeps: the first mesh's ranks hold it, as a
    whole of one origin.  Ranks that nothing joins are of different pipeline stages, and
    have different names.
    """

    def __init__(self, rank: int, everybody: Sequence[Description],
                 groups: Sequence[Sequence[int]]) -> None:
        """groups: ranks of the DDP groups of all ranks."""
        self.rank, self._everybody = rank, everybody
        self.per_rank = any(one.names != everybody[0].names for one in everybody)
        sets = [key[0] for one in everybody for key in one.meshes] + list(groups)
        self.joined = self._join(sets)
        self._having: Dict[str, List[int]] = {}
        for other, one in enumerate(everybody):
            for name in one.names:
                self._having.setdefault(name, []).append(other)

    def _join(self, sets: Sequence[Sequence[int]]) -> List[int]:
        """For each rank the least rank that it is joined with."""
        least = list(range(len(self._everybody)))
        distinct = {tuple(ranks) for ranks in sets}
        changed = True
        while changed:
            changed = False
            for ranks in distinct:
                low = min(least[r] for r in ranks)
                for r in ranks:
                    changed |= least[r] != low
                    least[r] = low
        return least

    def having(self, name: str) -> Tuple[int, ...]:
        """The ranks that have a part of it.  TypeError: others have one of that name."""
        ranks = self._having.get(name, [])
        for other in ranks:
            if self.joined[other] != self.joined[self.rank]:
                raise TypeError(f'{name} is on ranks {self.rank} and {other}, but a mesh '
                                'with both does not exist: parameters of different stages need '
                                'different names')
        return tuple(ranks)

    def first(self, name: str, tensor: torch.Tensor) -> Tuple[int, ...]:
        """The ranks that hold it for all, rising.  TypeError if ranks hold it in different
        ways."""
        return tuple(sorted(self._first(name, tensor)))

    def of(self, name: str, tensor: torch.Tensor) -> Tuple[int, ...]:
        """Those of first() that hold this rank's part; this rank need not be one."""
        ranks = self._first(name, tensor)
        if not is_dtensor(tensor):
            return ranks
        return tuple(sorted(ranks[at] for at in replicas_of(tensor)))

    def _first(self, name: str, tensor: torch.Tensor) -> Tuple[int, ...]:
        """Returns the ranks that hold a tensor; those of a DTensor in the mesh's order."""
        ranks = self.having(name)
        if not is_dtensor(tensor):
            if any(self._everybody[r].mesh_of(name) is not None for r in ranks):
                raise TypeError(f'{name} is a DTensor on some ranks only')
            return ranks[:1]
        mine = mesh_key(tensor)
        first = mine[0]
        for other in ranks:
            theirs = self._everybody[other].mesh_of(name)
            alike = theirs is not None and theirs[1:] == mine[1:] and (
                theirs[0] == mine[0] or not set(theirs[0]) & set(mine[0]))
            if not alike:
                raise TypeError(f'{name} lies differently on ranks {self.rank} and {other}')
            first = min(first, theirs[0])
        return first
