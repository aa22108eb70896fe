# SPDX-License-Identifier: Apache-2.0
"""Where the parts of DTensors lie: boxes of the whole tensor, and which ranks hold the
same ones."""
import math
from itertools import product
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from .compat import DTensor, local_of, local_shape_and_offset
from .state import Box, NotHeld

Run = Tuple[int, int]  # [begin, end) of a dimension's indexes


def is_dtensor(tensor: object) -> bool:
    """True if it is one, a Parameter's data or the Parameter itself."""
    return isinstance(tensor, DTensor)


def is_dtensor_type(kind: type) -> bool:
    """True if its objects are."""
    return issubclass(kind, DTensor)


def _cut(runs: Sequence[Run], begin: int, end: int) -> List[Run]:
    """The indexes that stand at places [begin, end) of `runs`."""
    out, at = [], 0
    for first, last in runs:
        lower, upper = max(begin - at, 0), min(end - at, last - first)
        if lower < upper:
            out.append((first + lower, first + upper))
        at += last - first
    return out


def _chunk(runs: Sequence[Run], chunks: int, at: int) -> List[Run]:
    """As torch.chunk cuts, with empty chunks where there are fewer."""
    size = sum(last - first for first, last in runs)
    step = math.ceil(size / chunks)
    return _cut(runs, min(step * at, size), min(step * (at + 1), size))


def _joined(runs: Iterable[Run]) -> List[Run]:
    out: List[Run] = []
    for first, last in runs:
        if out and out[-1][1] == first:
            out[-1] = (out[-1][0], last)
        else:
            out.append((first, last))
    return out


def _is_shard(placement: Any) -> bool:
    """Shard, or _StridedShard as FSDP2 makes it over tensor parallelism.  Anything
    else but Replicate is refused."""
    if placement.is_replicate():
        return False
    if type(placement).__name__ in ('Shard', '_StridedShard'):
        return True
    raise NotHeld(f'is placed as {placement}')


def _runs(size: int, dim: int, mesh_shape: Sequence[int], coordinate: Sequence[int],
          placements: Sequence[Any]) -> List[Run]:
    """The indexes of dimension `dim` that a rank holds, in its order; placements
    count from left to right.  _StridedShard: the dimension is cut for later placements
    first, into split_factor chunks, each of which is cut for this one."""
    runs: List[Run] = [(0, size)] if size else []
    for ranks, at, placement in zip(mesh_shape, coordinate, placements):
        if not _is_shard(placement) or placement.dim != dim:
            continue
        if type(placement).__name__ == '_StridedShard':
            inner = placement.split_factor
            runs = _joined(run for i in range(inner)
                           for run in _chunk(_chunk(runs, inner, i), ranks, at))
        else:
            runs = _chunk(runs, ranks, at)
    return runs


def is_cut(tensor: Any) -> bool:
    """True if its ranks have parts of it.  One may have all of it, where it has fewer rows than
    there are ranks: the others have an empty part each."""
    return any(ranks > 1 and _is_shard(placement)
               for ranks, placement in zip(tensor.device_mesh.shape, tensor.placements))


def boxes_of(shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int],
             placements: Sequence[Any]) -> List[Box]:
    """The boxes of a whole of `shape` that the rank at `coordinate` holds, and where
    they lie in its local tensor; an empty one if it holds nothing."""
    dims = []
    for dim, size in enumerate(shape):
        at, runs = 0, []
        for first, last in _runs(size, dim, mesh_shape, coordinate, placements):
            runs.append((first, last, at))
            at += last - first
        dims.append(runs or [(size, size, 0)])
    return [tuple(map(list, zip(*box))) if box else ([], [], []) for box in product(*dims)]


class Boxes:
    """boxes_of DTensors, compared with what torch says, remembered."""

    def __init__(self) -> None:
        self._known: Dict[Any, List[Box]] = {}

    def of(self, tensor: Any) -> Optional[List[Box]]:
        """None: this rank is not of the tensor's mesh.  NotHeld for a placement that
        is not known, or a local tensor that is not what the placements say."""
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return None
        key = (tuple(tensor.shape), tuple(mesh.shape), tuple(coordinate), str(placements))
        if key not in self._known:
            boxes = boxes_of(*key[:3], placements)
            self._compare(tensor, boxes)
            self._known[key] = boxes
        boxes = self._known[key]
        held = _extent(boxes)
        if held != list(local_of(tensor).shape):
            raise NotHeld(f'holds {list(local_of(tensor).shape)}, not the {held} of its '
                          'placements')
        return boxes

    @staticmethod
    def _compare(tensor: Any, boxes: List[Box]) -> None:
        shape, offset = local_shape_and_offset(tensor)
        first = boxes[0][0]
        if list(shape) != _extent(boxes) or (0 not in shape and list(offset) != list(first)):
            raise NotHeld(f'{tensor.placements}: torch has {shape} at {offset}, not {boxes}')


def _extent(boxes: List[Box]) -> List[int]:
    """Shape of the local tensor that boxes of boxes_of make up."""
    return [max(box[2][d] + box[1][d] - box[0][d] for box in boxes)
            for d in range(len(boxes[0][0]))]


def mesh_key(tensor: Any) -> Tuple:
    """Returns what ranks of one mesh say alike of a DTensor: its ranks in order, the mesh's shape,
    the placements."""
    mesh = tensor.device_mesh
    return (tuple(mesh.mesh.flatten().tolist()), tuple(mesh.shape), str(tuple(tensor.placements)))


def replicas_of(tensor: Any) -> List[int]:
    """Places in the mesh's order of the ranks that hold this rank's part."""
    mesh = tensor.device_mesh
    places = torch.arange(mesh.size()).view(tuple(mesh.shape))
    index = tuple(at if _is_shard(placement) else slice(None)
                  for at, placement in zip(mesh.get_coordinate(), tensor.placements))
    return places[index].flatten().tolist()
