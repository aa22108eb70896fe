# SPDX-License-Identifier: Apache-2.0
"""Snapshotter: the one line that a PyTorch training loop adds."""
from typing import Any, List, Mapping, Optional, Sequence, Union

import torch
from torch import nn

from . import deepspeed
from .collector import TorchCollector
from .saved_values import OWN
from .saver import Saver

Modules = Union[nn.Module, Sequence[nn.Module]]
Optimizers = Union[torch.optim.Optimizer, Sequence[torch.optim.Optimizer]]


def _as_list(given: Any) -> List[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


class Snapshotter(Saver):
    """Hands the state of a training job to the ckptfs daemon of a store.

    model, optimizer: one each, or lists; None where nothing is optimized.  With several
        ranks, modules have to be in DDP or to have DTensor parameters: fully_shard (FSDP2),
        with replicas (HSDP), tensor parallelism (parallelize_module), or both.
        torch.compile and activation checkpointing may be around them.  An optimizer has no
        parameters but those of the models.  Or one DeepSpeedEngine, which has its
        optimizer: save(step) is then collective, and takes what
        engine.save_checkpoint would write as tag global_step<step>.
    run: the name under which the steps appear, /run/<run>/step/<step>.
    store: the directory of the store; `ckptfs mount --store STORE MNT` receives.
    documents: what else belongs to the job, by name: values that can be pickled
        (tensors in them included), objects with a state_dict(), or functions that
        return one of these.  They are taken at every save; docs/reference/snapshots.md says which
        values are loaded again.
    rank, world: if torch.distributed is not initialised and there are several ranks;
        then job: a text that all ranks of this life of the job share, and no other.
        Where torch.distributed is initialised it is not used.
    slots: how many snapshots the memory has room for: 1 is being written to disk
        while the next is taken.
    update_limit: seconds that an update waits for a copy before the snapshot is
        dropped instead.
    full: what a save does while that memory is full of steps that are being written:
        'drop' the snapshot, or 'wait' for room, update_limit seconds at most.
    pace: bytes per second that are read for snapshots while no update waits; 0: as
        fast as it goes.

    With torch.distributed initialised the constructor is collective.  It raises for
    arguments that make no sense; nothing else here raises: a snapshot that cannot
    be taken is dropped, and the logger `ckptfs` says so once.
    """

    def __init__(self, model: Modules, optimizer: Optional[Optimizers] = None,
                 run: str = 'job', store: str = '',
                 documents: Optional[Mapping[str, Any]] = None, *,
                 rank: Optional[int] = None, world: Optional[int] = None,
                 job: Optional[str] = None, slots: int = 2,
                 update_limit: float = 60.0, full: str = 'drop',
                 pace: int = 0) -> None:
        if not store:
            raise TypeError('store= is needed: the directory of the store')
        for key in documents or {}:
            if key.startswith((OWN, 'extra_state/')):
                raise ValueError(f'a document cannot be called {key}: names that begin with '
                                 f'{OWN} or extra_state/ are those of documents that a save makes')
        collector = (deepspeed.EngineCollector(model) if deepspeed.is_engine(model)
                     else TorchCollector(_as_list(model), _as_list(optimizer)))
        super().__init__(collector, run, store, documents, rank=rank, world=world, job=job,
                         slots=slots, update_limit=update_limit, full=full, pace=pace)
