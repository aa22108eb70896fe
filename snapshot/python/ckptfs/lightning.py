# SPDX-License-Identifier: Apache-2.0
"""Lightning saves into ckptfs:

    Trainer(..., callbacks=[ckptfs.lightning.SnapshotCallback(store="/data/store", run="job",
                                                              every=100)])
"""
import copy
import importlib
import logging
import sys
from typing import Any, Dict, List, Mapping, Optional, Set

import torch

from . import resume, state
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
LOG = logging.getLogger('ckptfs')


def _precision(plugin: Any) -> Dict[str, Any]:
    """As a checkpoint of Lightning's has it: under the plugin's name, if there is anything."""
    state = plugin.state_dict()
    return {type(plugin).__qualname__: state} if state else {}


def _refusal(value: Any) -> str:
    try:
        return state.refusal(*state.document(value))
    except Exception as error:  # pylint: disable=broad-except
        return str(error) or type(error).__name__


class _Others:
    """Collects what a checkpoint of Lightning's has beside weights, optimizers, schedules and the
    precision's state: progress, loops, callbacks' states, hyper-parameters, the data module's
    state, and what on_save_checkpoint adds."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._call = importlib.import_module(f'{PACKAGE.__name__}.trainer.call')
        self._told: Set[str] = set()
        kinds = [(PACKAGE.LightningModule, trainer.lightning_module),
                 *((PACKAGE.Callback, one) for one in trainer.callbacks)]
        self._asked = any(type(one).on_save_checkpoint is not kind.on_save_checkpoint
                          for kind, one in kinds)

    def __call__(self) -> Dict[str, Any]:
        """Without what could not be loaded again, which is said once."""
        trainer = self._trainer
        connector = copy.copy(trainer._checkpoint_connector)
        # A user's on_save_checkpoint may look at the weights; nothing is moved for it.
        weights = trainer.lightning_module.state_dict() if self._asked else {}
        connector._get_lightning_module_state_dict = lambda: dict(weights)
        try:
            checkpoint = connector.dump_checkpoint(weights_only=True)
        except KeyError as error:
            raise state.NotHeld(
                f'saving asked for {error} of the checkpoint (on_save_checkpoint of the module, of its '
                'data or of Lightning): a snapshot has the states of optimizers and schedulers by '
                'itself, and calls it without them; test that the key is there') from error
        checkpoint['callbacks'] = self._call._call_callbacks_state_dict(trainer)
        self._call._call_callbacks_on_save_checkpoint(trainer, checkpoint)
        # It may have put others in their place: an average (WeightAveraging), fewer (an adapter).
        shown = checkpoint['state_dict']
        if shown.keys() == weights.keys() and all(shown[name] is one for name, one in weights.items()):
            del checkpoint['state_dict']  # the step's own
        return self._loadable(checkpoint, '')

    def _loadable(self, values: Mapping[str, Any], prefix: str) -> Dict[str, Any]:
        found = {}
        for key, value in values.items():
            why = _refusal(value)
            if not why:
                found[key] = value
            elif type(value) is dict:
                found[key] = self._loadable(value, f'{prefix}{key}.')
            elif f'{prefix}{key}' not in self._told:
                self._told.add(f'{prefix}{key}')
                LOG.warning('%s%s of the checkpoint is left out, since it could not be loaded again: %s',
                            prefix, key, why)
        return found


class SnapshotCallback(PACKAGE.Callback):  # type: ignore[misc, name-defined]
    """A snapshot of the module, its optimizers and schedulers, the gradient scaler (fp16), what
    else Lightning's own checkpoint has (progress, hyper-parameters, states of callbacks and of the
    data module) and each rank's random numbers, as step `trainer.global_step`.

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

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Behind all callbacks but Lightning's checkpoints, as Lightning places those: what others
        do at the end of a batch (averages) is done when it saves."""
        others = [one for one in trainer.callbacks if one is not self]
        own = PACKAGE.callbacks.Checkpoint
        at = next((i for i, one in enumerate(others) if isinstance(one, own)), len(others))
        trainer.callbacks = [*others[:at], self, *others[at:]]  # anew: a loop goes over the list

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The strategy has wrapped what it trains.  Collective."""
        documents = {
            'rng': rng_state,
            'checkpoint': _Others(trainer),
            'precision': lambda: _precision(trainer.precision_plugin),
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

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._late.before_others()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._late.before_others()  # the last one: StochasticWeightAveraging swaps behind it

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
        others = step.document('checkpoint')
        torch.save({**others, **step.document('precision'),
                    'state_dict': others['state_dict'] if 'state_dict' in others else step.model(),
                    'optimizer_states': optimizers,
                    'lr_schedulers': step.document('schedulers')}, path)
    return path
