# SPDX-License-Identifier: Apache-2.0
"""Snapshotter: the one line that a PyTorch training loop adds."""
from typing import Any, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from . import deepspeed, state
from .saver import Group, Saver
from .state import State

Modules = Union[nn.Module, Sequence[nn.Module]]
Optimizers = Union[torch.optim.Optimizer, Sequence[torch.optim.Optimizer]]


def _as_list(given: Any) -> List[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


class TorchCollector:
    """What modules and torch.optim optimizers hold, where all ranks hold the same.

    TypeError for what it does not know.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        self._models = models
        self._optimizers = optimizers
        self.lazy = all(map(state.waits_for_hooks, optimizers))
        for module in models:
            state.refuse_sharded(module)

    def start(self, rank: int, world: int) -> None:
        """As Collector has it."""
        del rank
        if world > 1 and not all(map(state.is_data_parallel, self._models)):
            raise TypeError('with several ranks every model has to be in '
                            'DistributedDataParallel')

    def collect(self) -> Tuple[state.Model, List[State], List[Group]]:
        """As Collector has it."""
        model = state.model_state(self._models)
        names = {id(tensor): name for name, tensor in model.tensors.items()}
        updated, states, groups = set(), [], []
        for index, optimizer in enumerate(self._optimizers):
            label = str(index) if len(self._optimizers) > 1 else ''
            states += state.optimizer_states(optimizer, label, names)
            for group in optimizer.param_groups:
                updated.update(id(p) for p in group['params'] if p.requires_grad)
                groups.append((label, [names[id(p)] for p in group['params']],
                               state.hyper_parameters(group)))
        weights = [State(name, 'weight', '', tensor, updated=id(tensor) in updated)
                   for name, tensor in model.tensors.items()]
        return model, weights + states, groups


class Snapshotter(Saver):
    """Hands the state of a training job to the ckptfs daemon of a store.

    model, optimizer: one each, or lists.  Modules may be wrapped in DDP and
        torch.compile; with several ranks they have to be in DDP.  Or one
        DeepSpeedEngine, which has its optimizer: save(step) is then collective, and
        takes what engine.save_checkpoint would write as tag global_step<step>.
    run: the name under which the steps appear, /run/<run>/step/<step>.
    store: the directory of the store; `ckptfs mount --store STORE MNT` receives.
    documents: what else belongs to the job, by name: values that can be pickled
        (tensors in them included), objects with a state_dict(), or functions that
        return one of these.  They are taken at every save.
    rank, world: if torch.distributed is not initialised and there are several ranks;
        then job: a text that all ranks of this life of the job share, and no other.
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
        collector = (deepspeed.EngineCollector(model) if deepspeed.is_engine(model)
                     else TorchCollector(_as_list(model), _as_list(optimizer)))
        super().__init__(collector, run, store, documents, rank=rank, world=world, job=job,
                         slots=slots, update_limit=update_limit, full=full, pace=pace)
