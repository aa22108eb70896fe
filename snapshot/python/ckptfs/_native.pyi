# SPDX-License-Identifier: Apache-2.0
from typing import Callable, List, Optional, Tuple

# Describes a part of a state: shape of the whole; pieces as (box's begins, box's ends, index in
# the tensor); shape of the local tensor that a flat range is of, where there are pieces, too;
# flat range; order of the dimensions in memory ([]: as they are).  As core/ingest/state_part.h
# has it.
Part = Tuple[List[int], List[Tuple[List[int], List[int], List[int]]], Optional[List[int]],
             Optional[Tuple[int, int]], List[int]]

# key, parameter, kind, optimizer, was a Python number, dtype as torch spells it, shape,
# address of the first element (row-major), device (-1: host), may be copied until the next
# update, part (None: whole)
Tensor = Tuple[str, str, str, str, bool, str, List[int], int, int, bool, Optional[Part]]

class Capture: ...  # empty after it was saved
class Plan: ...     # of tensors, their addresses left out

# Makes the part of captures that describes tensors, once; it does not use their addresses.
def plan(tensors: List[Tensor], /) -> Plan: ...

# Makes what a save takes.  `tensors`: beside those of the plan, which lie at `addresses`, in its
# order; `streams`: (device, CUstream) that may still be writing tensors;
# `alike`: of each set of ranks that share out what they hold, a digest of that and how many
# they are.
def capture(step: int, framework: str, framework_version: str, layout: str,
            tensors: List[Tensor], plan: Plan, addresses: List[int],
            parameters: List[Tuple[str, str]],
            aliases: List[Tuple[str, str]], groups: List[Tuple[str, List[str], str]],
            documents: List[Tuple[str, str, str, List[str]]],
            streams: List[Tuple[int, int]], alike: List[Tuple[str, int]], /) -> Capture: ...

# Digests the bytes at (address, size); of large pieces only places that move with `step`.
def replica_digest(memory: List[Tuple[int, int]], step: int, /) -> str: ...

# True if this library is a driver that copies can be made with.
def has_cuda(library: str, /) -> bool: ...

# Why no daemon of this user takes snapshots for the store, an absolute path without links; '' if
# one does.
def not_received(store: str, /) -> str: ...

class Writer:
    def __init__(self, store: str, run: str, job: str, rank: int, world: int, slots: int,
                 update_limit: float, wait_for_room: bool, pace: int,
                 cuda_library: str, before_copy: Optional[Callable[[], None]]) -> None: ...
    def save(self, capture: Capture, owner: object, changed: Callable[[bool], str],
             shot: object, limit: Optional[float] = None) -> bool: ...
    def size(self, capture: Capture, /) -> dict: ...
    def progress(self, step: int, /) -> dict: ...
    def cancel(self, step: int, /) -> bool: ...
    def drop(self, step: Optional[int], why: str) -> None: ...
    def wait_before_update(self, seconds: float, last: bool, /) -> bool: ...
    def wait_durable(self, step: int, seconds: float, /) -> bool: ...
    def status(self) -> dict: ...
    def take_log(self) -> List[str]: ...
    def close(self) -> None: ...
