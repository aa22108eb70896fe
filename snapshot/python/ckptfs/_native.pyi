# SPDX-License-Identifier: Apache-2.0
from typing import Callable, List, Optional, Tuple

# Of a part of a state: shape of the whole; pieces as (box's begins, box's ends, index in
# the tensor); shape of the local tensor that a flat range is of, where there are pieces, too;
# flat range.  As core/ingest/state_part.h has it.
Part = Tuple[List[int], List[Tuple[List[int], List[int], List[int]]], Optional[List[int]],
             Optional[Tuple[int, int]]]

# key, parameter, kind, optimizer, was a Python number, dtype as torch spells it, shape,
# address of the first element (row-major), may be copied until the next update, part (None: whole)
Tensor = Tuple[str, str, str, str, bool, str, List[int], int, bool, Optional[Part]]

class Writer:
    def __init__(self, store: str, run: str, job: str, rank: int, world: int,
                 slots: int, update_limit: float,
                 before_copy: Optional[Callable[[], None]]) -> None: ...
    def save(self, step: int, framework: str, framework_version: str, layout: str, tensors: List[Tensor],
             parameters: List[Tuple[str, str]], aliases: List[Tuple[str, str]],
             groups: List[Tuple[str, List[str], str]],
             documents: List[Tuple[str, str, str, List[str]]],
             owner: object, changed: Callable[[], str]) -> bool: ...
    def drop(self, step: int, why: str) -> None: ...
    def wait_before_update(self) -> None: ...
    def wait_durable(self, step: int, seconds: float) -> bool: ...
    def status(self) -> dict: ...
    def take_log(self) -> List[str]: ...
    def close(self) -> None: ...
