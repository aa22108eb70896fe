# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed saves into ckptfs: `"checkpoint": {"ckptfs": {"store": "/path", "run": "job"}}`
in its configuration, or CKPTFS_STORE and CKPTFS_RUN, and nothing in the script.

A snapshot is what engine.save_checkpoint would write, taken from the very dicts that it
hands to its checkpoint engine.  _ckptfs_hook puts this in its place.
"""
import logging
import os
import tempfile
import weakref
from typing import Any, Callable, List, Mapping, Optional, Set, Tuple

import torch

from . import pointer, state
from .saved_file import SavedFile, saved_file
from .saver import FileCollector, Saver
from .state import NotHeld

LOG = logging.getLogger('ckptfs')
# Bytes of a tensor that may be read as a number, in the file that mentions it.
NUMBER = 64
# The key of names in a group of which DeepSpeed's own file has none (formats/deepspeed reads it).
MEMBER_NAMES = 'ckptfs_member_names'
# Settings that are the Saver's own.
SAVER_KEYS = ('slots', 'update_limit', 'full', 'pace')
KEYS = {'store', 'run', 'mount', 'fallback', *SAVER_KEYS}
# Their step is that of a torch.optim.Optimizer within, by which a copy can be waited for.
LAZY = {'DeepSpeedZeroOptimizer', 'DeepSpeedZeroOptimizer_Stage3', 'BF16_Optimizer',
        'FP16_Optimizer', 'FP16_UnfusedOptimizer'}


def is_engine(model: Any) -> bool:
    """True if it is a DeepSpeedEngine; DeepSpeed is not imported for it."""
    return any(c.__name__ == 'DeepSpeedEngine' for c in type(model).__mro__)


def _base(engine: Any) -> Any:
    """The torch.optim.Optimizer within the engine's own, if we know that one."""
    optimizer = engine.optimizer
    return optimizer.optimizer if type(optimizer).__name__ in LAZY else optimizer


def is_lazy(engine: Any) -> bool:
    """True if the engine's states change in an optimizer's step and nowhere else."""
    return (state.waits_for_hooks(_base(engine))
            and not state.updates_in_backward(engine.module.parameters()))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def updated_memory(engine: Any) -> Set[int]:
    """Where the weights, masters and states lie that the optimizer's step writes."""
    found = [p.data for p in engine.module.parameters() if p.requires_grad]
    base = _base(engine)
    for group in getattr(base, 'param_groups', []):
        found += group['params']
    for master, values in getattr(base, 'state', {}).items():
        found += [v for v in (master, *values.values()) if isinstance(v, torch.Tensor)]
    return {_memory(t) for t in found if t.numel() > 1}


def own_memory(engine: Any) -> Set[int]:
    """The memory of optimizer states that each rank has of its own, though it is saved once."""
    optimizer = getattr(engine.optimizer, 'optimizer', engine.optimizer)
    return {_memory(value) for values in getattr(optimizer, 'state', {}).values()
            for kind, value in values.items()
            if isinstance(value, torch.Tensor) and str(kind).endswith('_error')}


def refusal(engine: Any) -> str:
    """Why the engine cannot be snapshotted; '' if it can."""
    if engine.zero_nvme_offload_optimizer():
        return 'optimizer states on NVMe are not in memory'
    if getattr(engine, 'zenflow', False) or 'SuperOffload' in type(engine.optimizer).__name__:
        return f'{type(engine.optimizer).__name__} updates states beside the training'
    partitioned = type(engine.optimizer).__name__ == 'BF16_Optimizer'
    if partitioned and not engine.zero_optimization_stage() and _data_parallel(engine)[1] > 1:
        return ('a BF16_Optimizer without ZeRO has parts on each data-parallel rank of which its '
                'files do not say whose they are: ZeRO 1 does')
    if engine.has_moe_layers and not engine.zero_optimization_stage():
        return 'without ZeRO nothing says whose the states of a mixture of experts are: ZeRO 1 does'
    return ''


def _with_names(engine: Any, state_dict: Any) -> Any:
    """A file of an engine without ZeRO whose optimizer's groups say whose its numbered states are,
    as torch's own do where it was given names."""
    given = state_dict.get('optimizer') if isinstance(state_dict, dict) else None
    if engine.zero_optimization_stage() or not isinstance(given, dict):
        return state_dict
    optimizer, inner = engine.optimizer, given.get('optimizer_state_dict')
    live = (getattr(optimizer, 'fp16_groups', None)  # FP16_UnfusedOptimizer; the others are masters
            if inner is not None else [group['params'] for group in getattr(optimizer, 'param_groups', [])])
    groups = (given if inner is None else inner).get('param_groups')
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    found = [[names.get(id(parameter)) for parameter in group] for group in live or []]
    if (not isinstance(groups, list) or any(None in one for one in found)
            or [len(one) for one in found] != [len(group['params']) for group in groups]):
        return state_dict
    named = [group if 'param_names' in group else {**group, MEMBER_NAMES: one}
             for group, one in zip(groups, found)]
    told = ({**given, 'param_groups': named} if inner is None else
            {**given, 'optimizer_state_dict': {**inner, 'param_groups': named}})
    return {**state_dict, 'optimizer': told}


class Recorder:
    """Stands for DeepSpeed's checkpoint engine while engine.save_checkpoint runs, and
    keeps what it is given instead of writing it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.name = 'ckptfs'
        self.tag = ''
        self.folder = ''
        self.given: List[Tuple[Any, str]] = []
        self.files: List[SavedFile] = []
        self._updated: Set[int] = set()

    def create(self, info: Any) -> None:
        """A save begins."""
        if '/' in info.tag:
            raise NotHeld(f'the tag {info.tag} is not the name of a directory')
        self.tag = info.tag
        self.folder = os.path.join(info.save_dir, info.tag)
        self.given, self.files = [], []
        self._updated = updated_memory(self.engine)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Only above the tag: nothing lies below it."""
        if path != self.folder:
            os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Keeps a file of the tag."""
        state_dict = _with_names(self.engine, state_dict)
        self.given.append((state_dict, path))
        name = os.path.relpath(path, self.folder)
        one = saved_file(name, state_dict, lambda t: _memory(t) in self._updated,
                         self._fused())
        if _is_replica(self.engine, name):
            one = self._part(one)
        self.files.append(one)

    def _fused(self) -> bool:
        # The storage that weights share tells which flat master of FP16_Optimizer they
        # belong to.
        return hasattr(self.engine.optimizer, 'fp32_groups_flat')

    def _part(self, whole: SavedFile) -> SavedFile:
        """Returns what this rank writes of a file that all data-parallel ranks have alike.  They
        share what the optimizer updates evenly, by bytes; the rest is the first rank's."""
        rank, world = _data_parallel(self.engine)
        sizes = [(s.key, s.tensor.nbytes) for s in whole.storages
                 if s.updated and s.tensor.nbytes > NUMBER]
        owners = state.share(sizes, world)
        mine = [s for s in whole.storages if owners.get(s.key, 0) == rank]
        # Errors of compressed gradients are each rank's own (1-bit optimizers).
        own = own_memory(self.engine)
        shared = [s.tensor for s in sorted(whole.storages, key=lambda s: s.key)
                  if s.key in owners and _memory(s.tensor) not in own]
        return SavedFile(whole.name, b'' if rank else whole.pickled, mine, shared, world)

    def preserves_storage_sharing(self) -> bool:
        """DeepSpeed need not clone tensors for us."""
        return False

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """As torch's engine."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """No commit, no `latest`: a snapshot becomes durable later."""
        return True

    def get_commit_info(self) -> Any:
        """Nothing is to be committed by DeepSpeed."""
        return None


def _data_parallel(engine: Any) -> Tuple[int, int]:
    from deepspeed.utils import groups
    return (groups._get_sequence_data_parallel_rank(),
            groups._get_sequence_data_parallel_world_size())


def _is_replica(engine: Any, name: str) -> bool:
    """True if all data-parallel ranks save this file, as spread() has them do."""
    return name.startswith('mp_rank_') and not engine.has_moe_layers and (
        not engine.zero_optimization_partition_weights())


def spread(engine: Any) -> bool:
    """Has all data-parallel ranks save what DeepSpeed has the first one save.  Returns
    whether this rank would have saved model states by itself."""
    before = engine.save_non_zero_checkpoint
    if not engine.has_moe_layers and not engine.zero_optimization_partition_weights():
        engine.save_non_zero_checkpoint = True
        if hasattr(engine.module, 'checkpoint_parallel_write_pipeline'):
            engine.module.checkpoint_parallel_write_pipeline = True
    return before


_RUNS: 'weakref.WeakKeyDictionary[Engine, Tuple[str, str]]' = weakref.WeakKeyDictionary()


class Engine(Recorder):
    """The checkpoint_engine of a DeepSpeedEngine: saves become snapshots.  `stock`, the engine that
    DeepSpeed chose, does loads and other files."""

    def __init__(self, collector: 'EngineCollector', stock: Any, snap: Saver,
                 fallback: bool, pointers: Optional[pointer.Pointers]) -> None:
        super().__init__(collector.engine)
        self._collector = collector
        self.stock, self.snap, self.writes = stock, snap, False
        self._fallback, self._pointers = fallback, pointers
        self._info: Any = None          # of the save under way
        self._uncommitted: Any = None   # of the one whose copies may be
        self._failed = False

    def __getattr__(self, name: str) -> Any:
        if name == 'stock':
            raise AttributeError(name)
        return getattr(self.stock, name)

    def install(self) -> None:
        """From now on the engine's."""
        self.writes = spread(self.engine)
        self.engine.checkpoint_engine = self

    def create(self, info: Any) -> None:
        """A save begins."""
        self._info, self._failed = info, False
        self.stock.create(info)
        try:
            super().create(info)
        except Exception as error:  # pylint: disable=broad-except
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        if not self._failed:
            self.snap.drop(self.engine.global_steps, error)
        self._failed = True

    def save(self, state_dict: Any, path: str) -> None:
        """Keeps a file of the tag; what lies elsewhere (save_16bit_model) is written."""
        if self._info is None or not path.startswith(self.folder + os.sep):
            self.stock.save(state_dict, path)
            return
        try:
            super().save(state_dict, path)
        except Exception as error:  # pylint: disable=broad-except
            self._drop(error)

    def load(self, path: str, map_location: Any = None) -> Any:
        """A load overwrites what may not be copied yet."""
        self.snap.before_update()
        return self.stock.load(path, map_location=map_location)

    def is_decoupled(self) -> bool:
        """Asked at the end of save_checkpoint, which is how we learn of it.  False if
        the save went the stock way: DeepSpeed then commits and writes `latest`."""
        info, self._info = self._info, None
        if info is None or getattr(
                self.engine, '_running_engine_step', False):  # a save that raised
            return True
        taken = self._snapshot()
        stock = self._fallback and not self._all(taken)
        if stock:
            self._save_stock()
        self.given, self.files = [], []
        if stock:
            return False
        self._uncommitted = type(info)(tag=info.tag, save_dir=info.save_dir, save_latest=False)
        if self._pointers and taken:
            self._pointers.point(self.engine.global_steps, info.save_dir, info.tag,
                                 info.save_latest)
        return True

    def _snapshot(self) -> bool:
        if self._failed:
            return False
        self._collector.recorded = self
        try:
            return self.snap.save(self.engine.global_steps)
        finally:
            self._collector.recorded = None

    def _all(self, taken: bool) -> bool:
        from deepspeed import comm
        if not comm.is_initialized() or comm.get_world_size() == 1:
            return taken
        agreed = torch.tensor(int(taken), device=self.engine.device)
        comm.all_reduce(agreed, op=comm.ReduceOp.MIN)
        return bool(agreed)

    def _save_stock(self) -> None:
        from deepspeed import comm
        if self._pointers:
            self._pointers.forget(self.folder)
        comm.barrier()
        from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
        for state_dict, path in self.given:
            name = os.path.relpath(path, self.folder)
            if name.startswith('mp_rank_') and not self.writes:
                continue
            self.stock.makedirs(os.path.dirname(path), exist_ok=True)
            if name.startswith('layer_'):
                state_dict = clone_tensors_for_torch_save(state_dict)
            self.stock.save(state_dict, path)

    def get_commit_info(self) -> Any:
        """The save whose copies DeepSpeed may wait for; it must not write `latest`."""
        return self._uncommitted

    def commit(self, info: Any) -> Any:
        """Waits for copies and for nothing else."""
        if self._info is not None:  # a file of its own, or the stock way
            self._info = None
            return self.stock.commit(info)
        self._uncommitted = None
        self.snap.before_update()
        return True

    def cleanup(self) -> None:
        """The engine goes."""
        _RUNS.pop(self, None)
        if self._pointers:
            self._pointers.close()
        self.snap.close()
        self.stock.cleanup()


def plan(engine: Any, settings: Mapping[str, Any]) -> Callable[[], Engine]:
    """Returns a function that makes an Engine for `engine`, collectively, to be installed if all
    ranks have theirs.  Raises for settings that make no sense and for engines that cannot be
    snapshotted: DeepSpeed then saves as ever."""
    unknown = set(settings) - KEYS
    if unknown:
        raise ValueError(f'unknown settings {sorted(unknown)}')
    if not settings.get('store'):
        raise ValueError('no store is named')
    stock = engine.checkpoint_engine
    if stock.is_decoupled():
        raise ValueError(f'DeepSpeed saves by a {type(stock).__name__}, which writes beside the '
                         'training itself')
    collector = EngineCollector(engine)
    layout = _layout(engine)
    run = _free_run(settings['store'], settings.get('run') or 'job')
    more = {key: settings[key] for key in SAVER_KEYS if key in settings}

    def make() -> Engine:
        snap = Saver(collector, run, settings['store'], **more)
        pointers = None
        if engine.global_rank == 0:
            pointers = pointer.Pointers(snap, run, settings.get('mount'), layout)
        made = Engine(collector, stock, snap, settings.get('fallback', True), pointers)
        _RUNS[made] = (settings['store'], run)
        return made

    return make


def _free_run(store: str, run: str) -> str:
    """Engines that live side by side are runs of their own; ranks make them alike."""
    names = [run, *(f'{run}-{n}' for n in range(2, 1000))]
    return next(n for n in names if (store, n) not in _RUNS.values())


def _layout(engine: Any) -> str:
    degrees = {'tp': 1, 'pp': 1, 'dp': _data_parallel(engine)[1]}
    from deepspeed.runtime.engine import _checkpoint_parallel_metadata
    dims = _checkpoint_parallel_metadata(engine.mpu).get('checkpoint_parallel_dimensions') or {}
    degrees.update(tp=dims.get('tp_degree', 1), pp=dims.get('pp_degree', 1))
    words = [f'{k}{n}' for k, n in degrees.items() if n > 1]
    return '_'.join(words + [f'zero{engine.zero_optimization_stage()}'])


class EngineCollector(FileCollector):
    """Collects what a DeepSpeedEngine's own save would write, now or as `recorded` has it."""

    framework = 'deepspeed'

    def __init__(self, engine: Any) -> None:
        from deepspeed import __version__
        why = refusal(engine)
        if why:
            raise TypeError(why)
        self.engine, self.version = engine, __version__
        self.recorded: Optional[Recorder] = None

    def files(self, step: int, documents: Mapping[str, Any]) -> Tuple[str, List[SavedFile]]:
        """As FileCollector has it; documents are the client state.  Collective, as
        engine.save_checkpoint is."""
        self.lazy = is_lazy(self.engine)
        if self.recorded is not None:
            return self.recorded.tag, self.recorded.files
        engine, recorder = self.engine, Recorder(self.engine)
        stock, writes = engine.checkpoint_engine, spread(engine)
        engine.checkpoint_engine = recorder
        client = {key: state.value_of(value) for key, value in documents.items()}
        try:
            with tempfile.TemporaryDirectory(prefix='ckptfs-') as folder:
                engine.save_checkpoint(folder, tag=f'global_step{step}', client_state=client,
                                       save_latest=False)
        finally:
            engine.checkpoint_engine, engine.save_non_zero_checkpoint = stock, writes
        return recorder.tag, recorder.files
