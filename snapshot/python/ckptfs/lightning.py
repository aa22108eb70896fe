# SPDX-License-Identifier: Apache-2.0
"""Lightning saves into ckptfs:

    Trainer(..., callbacks=[ckptfs.lightning.SnapshotCallback(store="/data/store", run="job",
                                                              every=100)])
"""
import importlib
import sys
from typing import Any, Dict, List, Mapping, Optional

import torch

from . import resume
from .callbacks import LateSaver, rng_state
from .saver import Saver
from .snapshotter import Snapshotter


def _package() -> Any:
    """The one that the script has imported: `lightning.pytorch` and `pytorch_lightning` are
    two."""
    names = ('lightning.pytorch', 'pytorch_lightning')
    for name in names:
        if name in sys.modules:
            return sys.modules[name]
    try:
        return importlib.import_module(names[0])
    except ImportError:
        return importlib.import_module(names[1])


PACKAGE = _package()


def _precision(plugin: Any) -> Dict[str, Any]:
    """As a checkpoint of Lightning's has it: under the plugin's name, if there is anything."""
    state = plugin.state_dict()
    return {type(plugin).__qualname__: state} if state else {}


class SnapshotCallback(PACKAGE.Callback):  # type: ignore[misc, name-defined]
    """A snapshot of the module, its optimizers and schedulers, the gradient scaler (fp16), the
    loops' progress and each rank's random numbers, as step `trainer.global_step`.

    store, run, documents: as Snapshotter has them.
    every: one each so many updates.
    options: what else Snapshotter takes (slots, update_limit, full, pace).

    For one device, DDP, ModelParallelStrategy (FSDP2) and DeepSpeed; names are those of the
    LightningModule.  Nothing here raises in a training.
    """

    def __init__(self, store: str, run: str = 'job', every: int = 1,
                 documents: Optional[Mapping[str, Any]] = None, **options: Any) -> None:
        if every < 1:
            raise ValueError(f'every={every} is not a number of updates')
        super().__init__()
        self._store, self._run, self._every = store, run, every
        self._documents, self._options = dict(documents or {}), options
        self._late = LateSaver()

    @property
    def snap(self) -> Optional[Saver]:
        """While a training runs."""
        return self._late.snap

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The strategy has wrapped what it trains.  Collective."""
        documents = {
            'rng': rng_state,
            'loops': lambda: {'fit_loop': trainer.fit_loop.state_dict()},
            'precision': lambda: _precision(trainer.precision_plugin),
            'progress': lambda: {'epoch': trainer.current_epoch,
                                 'global_step': trainer.global_step},
            'schedulers': lambda: [one.scheduler.state_dict()
                                   for one in trainer.lr_scheduler_configs]}

        def make() -> Saver:
            model = trainer.strategy.model
            return Snapshotter(model, trainer.optimizers, self._run, self._store,
                               {**documents, **self._documents}, **self._options)

        self._late.begin(make)
        self._late.last = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """After a batch, which need not have ended in an update."""
        if trainer.global_step % self._every == 0:
            self._late.save(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The memory goes; what was handed over becomes durable."""
        self._late.end()


def checkpoint(url: str, path: str) -> str:
    """Writes a step as the file that trainer.fit(ckpt_path=...) takes, and returns its path.

    url: ckptfs://STORE/RUN/STEP.  RuntimeError for a step that SnapshotCallback did not save.
    It needs the program `ckptfs`, and room for everything in memory; one rank calls it.
    """
    with resume.SavedStep(url) as step:
        optimizers: List[Any] = [step.optimizer(label) for label in step.optimizers()]
        precision = step.document('precision') if 'precision' in step.documents() else {}
        torch.save({'state_dict': step.weights(aliases=True), 'optimizer_states': optimizers, **precision,
                    'lr_schedulers': step.document('schedulers'), 'callbacks': {},
                    'loops': step.document('loops'), **step.document('progress'),
                    'pytorch-lightning_version': PACKAGE.__version__}, path)
    return path
