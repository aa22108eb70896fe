# SPDX-License-Identifier: Apache-2.0
"""The work of CUDA devices: the streams that updates run on, and graphs that hold updates.

A graph that is replayed calls no hook of an optimizer.  One that was captured while a hooked step
ran waits before its replay as that step would; so does one of which nobody saw the capture.
"""
import functools
import weakref
from typing import Any, Callable, Dict, Iterable, List, Set, Tuple

import torch

# By device: the stream that the last step, or the last replay of a graph, was given to.
_LAST: Dict[int, Any] = {}
_USED: Set[int] = set()  # devices that were saved
_CAPTURING: 'weakref.WeakSet[Any]' = weakref.WeakSet()
UPDATES = '_ckptfs_updates'


def note_step() -> None:
    """Before a step, by its thread."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    if torch.cuda.is_current_stream_capturing():
        for graph in list(_CAPTURING):
            setattr(graph, UPDATES, True)
        return
    for device in {torch.cuda.current_device(), *_USED}:
        _LAST[device] = torch.cuda.current_stream(device)


def streams(devices: Iterable[int]) -> List[Tuple[int, int]]:
    """(device, CUstream) that may still write what lies on these: the saving thread's own first,
    then that of the last step, which may be another thread's."""
    found: List[Tuple[int, int]] = []
    for device in sorted(devices):
        _USED.add(device)
        for stream in (torch.cuda.current_stream(device), _LAST.get(device)):
            if stream is not None and (device, stream.cuda_stream) not in found:
                found.append((device, stream.cuda_stream))
    return found


def current(devices: Iterable[int]) -> List[Tuple[int, int]]:
    """(device, CUstream) that this thread gives work to."""
    return [(device, torch.cuda.current_stream(device).cuda_stream) for device in devices]


def watch_graphs(before_replay: Callable[[], None]) -> None:
    """Has replays of graphs that may hold an update call this first.  Once."""
    graph = getattr(torch.cuda, 'CUDAGraph', None)
    if torch.version.cuda is None or graph is None or 'replay' not in vars(graph):
        return
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = begin(self, *args, **kwargs)
        setattr(self, UPDATES, False)
        _CAPTURING.add(self)
        return done

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        _CAPTURING.discard(self)
        return end(self, *args, **kwargs)

    @functools.wraps(replay)
    def watched_replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, UPDATES, True):
            before_replay()
        return replay(self, *args, **kwargs)

    graph.capture_begin, graph.capture_end = capture_begin, capture_end
    graph.replay = watched_replay
