# SPDX-License-Identifier: Apache-2.0
"""TorchCollector: what modules and torch.optim optimizers hold on one rank."""
import logging
from dataclasses import replace
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from . import compat, state, stepped
from .dtensor import Boxes, is_cut, is_dtensor, is_dtensor_type, mesh_key
from .holders import Description, Holders, exchange, gather
from .saved_values import ADDED, TENSORS
from .saver import Group
from .state import NotHeld, State

LOG = logging.getLogger('ckptfs')


def _fsdp_params(models: Sequence[nn.Module]) -> Iterator[Any]:
    """FSDP2's own record of each parameter that it shards."""
    return (param for model in models for module in model.modules()
            for param in compat.fsdp_params(module))


def _sharded(models: Sequence[nn.Module]) -> Dict[Tuple[int, str], torch.Tensor]:
    """By id of the module and name: the sharded parameters of FSDP2, which a module
    does not have while they are gathered (reshard_after_forward=False, the root
    after a forward without backward)."""
    return {(id(module), name): param.sharded_param for param in _fsdp_params(models)
            for module, name in compat.fsdp_places(param)}


def _holds(given: Any, optimizer: Any, depth: int = 8) -> bool:
    """True if it is what was given, or in it: wrappers keep one, or several in lists and dicts."""
    if given is optimizer or getattr(given, 'state', given) is optimizer.state:
        return True
    inner: Iterable[Any] = ()
    if isinstance(given, dict):
        inner = given.values()
    elif isinstance(given, (list, tuple)):
        inner = given
    elif hasattr(given, 'param_groups'):
        inner = [one for key, one in vars(given).items() if key not in ('state', 'param_groups')]
    return depth > 0 and any(_holds(one, optimizer, depth - 1) for one in inner)


class PlacingCollector:
    """Base of the collectors of DTensors: finds out once which ranks hold what."""

    lazy = False

    def __init__(self) -> None:
        self._boxes = Boxes()
        self._rank = 0
        self._holders: Optional[Holders] = None
        # By name: who holds this rank's part, and who all parts.
        self._ranks: Dict[str, Tuple[int, ...]] = {}
        self._firsts: Dict[str, Tuple[int, ...]] = {}
        self._layout = ''
        self.gather = gather

    def _meet(self, rank: int, world: int, tensors: Dict[str, torch.Tensor],
              groups: Sequence[Sequence[int]], trouble: str) -> None:
        """Collective.  groups: ranks of this one's DDP groups; trouble: why this rank
        cannot go on.  TypeError for what cannot be saved."""
        self._rank = rank
        for name, tensor in tensors.items():
            if is_dtensor(tensor) and not trouble:
                try:
                    self._boxes.of(tensor)
                except NotHeld as error:
                    trouble = f'{name} {error}'
        # Nobody waits for a rank that cannot go on.
        told = self.gather((trouble, groups), world)
        trouble = next((why for why, _ in told if why), '')
        if trouble:
            raise TypeError(trouble)
        everybody = exchange(Description(tensors), world, self.gather)
        plain = not any(one.meshes for one in everybody)
        if plain and all(one.names == everybody[0].names for one in everybody):
            return  # all hold all
        self._holders = Holders(rank, everybody, [g for _, held in told for g in held])
        for name, tensor in tensors.items():
            if not is_dtensor(tensor) or tensor.device_mesh.get_coordinate() is not None:
                self._ranks[name] = self._holders.of(name, tensor)
                self._firsts[name] = self._holders.first(name, tensor)

    def first_of(self, name: str) -> Optional[Tuple[int, ...]]:
        """Returns who holds a tensor, for all that nobody keeps alike; rank 0 if all hold it."""
        return self._ranks.get(name) if self._holders is not None else (0,)

    def _place_all(self, model: state.Model, states: Sequence[State]) -> List[State]:
        if self._holders is not None:
            model.per_rank, model.layout = self._holders.per_rank, self._layout
        elif not any(map(is_dtensor_type, {type(one.tensor) for one in states})):
            return [one for one in states if one.ranks is None or self._rank in one.ranks]
        placed = []
        for one in states:
            try:
                placed += self._placed(one, model.tensors[one.parameter])
            except NotHeld as error:
                raise NotHeld(f'{one.kind} of {one.parameter} {error}') from error
        return placed

    def _placed(self, one: State, weight: torch.Tensor) -> List[State]:
        """The part of a state that this rank holds, if it holds any."""
        if self._holders is None and not is_dtensor(one.tensor):
            return [one] * (one.ranks is None or self._rank in one.ranks)
        ranks = None
        if self._holders is not None:
            if is_dtensor(weight) and weight.device_mesh.get_coordinate() is None:
                return []
            ranks = self._ranks.get(one.parameter)
            if ranks is None:
                raise NotHeld('was not there when the Snapshotter was made')
            if self._rank not in ranks:
                return []
        if not is_dtensor(one.tensor):
            if not is_dtensor(weight):
                return [replace(one, ranks=ranks)]
            if one.tensor.numel() != 1:
                raise NotHeld('is not a DTensor, its parameter is one')
            return [replace(one, ranks=self._firsts[one.parameter])]
        if not is_dtensor(weight) or mesh_key(weight) != mesh_key(one.tensor) or (
                weight.shape != one.tensor.shape):
            raise NotHeld('is not placed as the parameter is')
        boxes = self._boxes.of(one.tensor)
        if boxes is None:
            return []
        local = replace(one, tensor=compat.local_of(one.tensor), watched=(one.tensor,), ranks=ranks)
        if not is_cut(one.tensor):
            return [local]
        return [replace(local, shape=list(weight.shape), pieces=boxes)]


class TorchCollector(PlacingCollector):
    """A Collector of modules on one device, in DDP, or of DTensors: fully_shard (FSDP2),
    with or without replicas, tensor parallelism, both.

    replicated: all ranks hold the same, though the models do not show the
        DistributedDataParallel that they are in.
    TypeError for what it does not know.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Any],
                 replicated: bool = False) -> None:
        super().__init__()
        self._replicated = replicated
        self._told = False  # why all is copied at once
        self._steps = stepped.steps()  # before the last save
        self._ids: Set[int] = set()  # of the models' tensors
        self._models = models
        self._optimizers = optimizers
        for module in models:
            state.refuse_unknown(module)
        state.refuse_keepers(optimizers)

    # ---- once ----------------------------------------------------------------

    def start(self, rank: int, world: int) -> None:
        """As Collector has it.  Collective where parameters are DTensors."""
        try:
            tensors = self._model().tensors
        except NotHeld as error:
            raise TypeError(str(error)) from None
        foreign = state.foreign(self._optimizers, {id(one): '' for one in tensors.values()})
        if world == 1 or not any(map(is_dtensor, tensors.values())):
            if foreign:
                raise TypeError(foreign)
        if world == 1:
            return
        if not any(map(is_dtensor, tensors.values())):
            if not (self._replicated or all(map(state.is_data_parallel, self._models))):
                raise TypeError('with several ranks every model has to be in '
                                'DistributedDataParallel or to have DTensor parameters '
                                '(fully_shard, parallelize_module)')
            trouble = self._apart(world)
            if trouble:
                raise TypeError(trouble)
            return
        if not torch.distributed.is_initialized():
            raise TypeError('a model with DTensors of several ranks needs torch.distributed')
        groups = [torch.distributed.get_process_group_ranks(m.process_group)
                  for m in map(state.data_parallel, self._models) if m is not None]
        self._meet(rank, world, tensors, groups, foreign or self._trouble(tensors))
        self._layout = self._layout_of(world, groups)

    def _apart(self, world: int) -> str:
        """Says what DistributedDataParallel does not keep alike on all ranks."""
        for ddp in filter(None, map(state.data_parallel, self._models)):
            ranks = torch.distributed.get_process_group_ranks(ddp.process_group)
            if len(ranks) != world:
                return (f'DistributedDataParallel has ranks {ranks} only: the other ranks have '
                        'a model of their own')
            for name, parameter in ddp.module.named_parameters():
                if name in ddp.parameters_to_ignore and parameter.requires_grad:
                    return f'DistributedDataParallel ignores {name}: each rank has its own'
        return ''

    def _trouble(self, tensors: Dict[str, torch.Tensor]) -> str:
        """Says what of the model cannot be saved."""
        sharding = any(True for _ in _fsdp_params(self._models))
        for name, tensor in tensors.items():
            if sharding and isinstance(tensor, nn.Parameter) and not is_dtensor(tensor):
                return (f'{name} is not sharded by fully_shard as others are, so nothing '
                        'says that ranks keep it alike')
        return ''

    def _layout_of(self, world: int, groups: Sequence[Sequence[int]]) -> str:
        """The job's degrees, where they multiply to its world."""
        assert self._holders is not None
        stages = len(set(self._holders.joined))
        sizes = {param.mesh_info.mesh.size() for param in _fsdp_params(self._models)}
        sharding = bool(sizes)
        sizes = sizes or {len(group) for group in groups} or {1}
        dp, per_stage = max(sizes), world // stages
        if len(sizes) > 1 or per_stage % dp or per_stage * stages != world:
            return ''
        tokens = {'tp': per_stage // dp, 'pp': stages, 'dp': dp}
        return '_'.join([f'{k}{v}' for k, v in tokens.items()] + ['zero3'] * sharding)

    # ---- at every save -------------------------------------------------------

    def touches(self, optimizer: Any) -> bool:
        """True if it updates what is saved."""
        return any(id(parameter) in self._ids for group in getattr(optimizer, 'param_groups', [])
                   for parameter in group['params'])

    def growth(self) -> float:
        """As Collector has it."""
        now, later = 0, 0
        for tensor in self._model().tensors.values():
            now += compat.local_of(tensor).nbytes
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                made = state.first_states(optimizer, group)
                if made is None:
                    return 0.0
                for parameter in group['params']:
                    held = sum(compat.local_of(one).nbytes for one in
                               optimizer.state.get(parameter, {}).values() if torch.is_tensor(one))
                    now += held
                    if not held and parameter.requires_grad:
                        later += made * compat.local_of(parameter).nbytes
        return (now + later) / now if now else 0.0

    def _is_lazy(self, tensors: Iterable[torch.Tensor]) -> bool:
        # Somebody may have put a step or a hook of their own there meanwhile.
        hook = state.updates_in_backward(tensors)
        if hook and not self._told:
            self._told = True
            LOG.warning('save returns after all is copied: %s may write in the backward pass',
                        hook)
        return not hook and all(map(state.waits_for_hooks, self._optimizers))

    def _model(self) -> state.Model:
        model = state.model_state(self._models, _sharded(self._models))
        self._ids = {id(tensor) for tensor in model.tensors.values()}
        return model

    def _refuse_strangers(self) -> None:
        """NotHeld where an optimizer that was not given updates the parameters, and no given one."""
        since, self._steps = self._steps, stepped.steps()
        active = stepped.stepped_since(since)
        strangers = [one for one in active if self.touches(one)
                     and not any(_holds(given, one) for given in self._optimizers)]
        if strangers and len(strangers) == len(active) and self._optimizers:
            given = ', '.join(type(one).__name__ for one in self._optimizers)
            raise NotHeld(f'since the save before, {type(strangers[0]).__name__} updated the '
                          f'parameters, which was not given here, and what was ({given}) made no '
                          'step: its states are of other weights; make a Snapshotter of the new '
                          'optimizer')

    def collect(self) -> Tuple[state.Model, List[State], List[Group]]:
        """As Collector has it."""
        model = self._model()
        names = {id(tensor): name for name, tensor in model.tensors.items()}
        foreign = state.foreign(self._optimizers, names)
        if foreign:  # since a later add_param_group
            raise NotHeld(foreign)
        self.lazy = self._is_lazy(model.tensors.values())
        forward = state.written_by_forward(self._models)
        self._refuse_strangers()
        updated, states, groups = set(), [], []
        for index, optimizer in enumerate(self._optimizers):
            label = str(index) if len(self._optimizers) > 1 else ''
            added = state.added_entries(optimizer)
            if added:
                model.extra.setdefault(ADDED, {})[label] = added
            states += state.optimizer_states(optimizer, label, names)
            for number, group in enumerate(optimizer.param_groups):
                where = f'parameter group {number}' + f' of optimizer {label}' * bool(label)
                updated.update(id(p) for p in group['params']
                               if p.requires_grad and id(p) not in forward)
                groups.append((label, [names[id(p)] for p in group['params']],
                               state.hyper_parameters(group, where)))
                tensors = state.tensor_hyper_parameters(group)
                if tensors:
                    model.extra.setdefault(TENSORS, {}).setdefault(label, {})[number] = tensors
        weights = [State(name, 'weight', '', tensor, updated=id(tensor) in updated)
                   for name, tensor in model.tensors.items()]
        return model, self._place_all(model, weights + states), groups
