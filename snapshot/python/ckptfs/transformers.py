# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer saves into ckptfs:

    Trainer(..., callbacks=[ckptfs.transformers.SnapshotCallback(store="/data/store", run="job")])
"""
import json
import os
from dataclasses import asdict
from typing import Any, Dict, Mapping, Optional, Sequence

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, ExportableState

from . import resume
from .callbacks import LateSaver, caller_of, rng_state
from .collector import TorchCollector
from .saver import Saver


def _is_replicated() -> bool:
    """True if Trainer trains in DistributedDataParallel: it shows callbacks the module inside."""
    from accelerate.state import AcceleratorState
    kind = AcceleratorState().distributed_type.value
    if kind == 'DEEPSPEED':
        raise TypeError("with DeepSpeed, name the store in DeepSpeed's own configuration")
    return kind.startswith('MULTI_')


def _states_of(callbacks: Sequence[Any]) -> Dict[str, Any]:
    """As the Trainer keeps them; of several of one class a list."""
    found: Dict[str, Any] = {}
    for one in callbacks:
        if not isinstance(one, ExportableState):
            continue
        name, state = type(one).__name__, one.state()
        if name not in found:
            found[name] = state
        elif isinstance(found[name], list):
            found[name].append(state)
        else:
            found[name] = [found[name], state]
    return found


class SnapshotCallback(TrainerCallback):
    """A snapshot of the model, the optimizer, the scheduler, the gradient scaler (fp16), each
    rank's random numbers and the Trainer's own state, as step `global_step`.

    store, run, documents: as Snapshotter has them.
    every: one each so many updates; None: whenever the Trainer saves (save_strategy).
    options: what else Saver takes (slots, update_limit, full, pace).

    Accumulation of gradients does not count; DDP and FSDP2 are known, FSDP1 is refused
    and DeepSpeed has a plug-in of its own.  Nothing here raises in a training.
    """

    def __init__(self, store: str, run: str = 'job', every: Optional[int] = None,
                 documents: Optional[Mapping[str, Any]] = None, **options: Any) -> None:
        if every is not None and every < 1:
            raise ValueError(f'every={every} is not a number of updates')
        self._store, self._run, self._every = store, run, every
        self._documents, self._options = dict(documents or {}), options
        self._late = LateSaver()
        self._state: Any = None
        self._control: Any = None

    @property
    def snap(self) -> Optional[Saver]:
        """While a training runs."""
        return self._late.snap

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Model and optimizer are as they will be trained.  Collective."""
        self._state, self._control = state, control
        self._late.begin(lambda: self._make(**kwargs))

    def _make(self, model: Any = None, optimizer: Any = None, lr_scheduler: Any = None,
              **_: Any) -> Saver:
        documents = {'rng': rng_state, 'trainer_state': self._trainer_state}
        if lr_scheduler is not None:
            documents['scheduler'] = lr_scheduler
        if hasattr(model, 'config'):
            documents['args'] = json.loads(model.config.to_json_string(use_diff=False))
        if type(optimizer).__name__ == 'AcceleratedOptimizer':
            if optimizer.scaler is not None:
                documents['scaler'] = optimizer.scaler
            optimizer = optimizer.optimizer
        collector = TorchCollector([model], [optimizer], replicated=_is_replicated())
        return Saver(collector, self._run, self._store, {**documents, **self._documents},
                     **self._options)

    def _trainer_state(self) -> Any:
        state = asdict(self._state)
        handler = caller_of(CallbackHandler)
        if handler is not None and self._every:  # else the Trainer has done so in its own save
            state['stateful_callbacks'] = _states_of([*handler.callbacks, self._control])
        return json.loads(json.dumps(state))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After an update."""
        if self._every and state.global_step % self._every == 0:
            self._save(state, control)
        self._before_others(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before_others(control)

    def _before_others(self, control: Any) -> None:
        if control.should_evaluate or control.should_training_stop:
            self._late.before_others()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the Trainer's own save."""
        if not self._every:
            self._save(state, control)
        self._before_others(control)

    def _save(self, state: Any, control: Any) -> None:
        self._state, self._control = state, control
        self._late.save(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The memory goes; what was handed over becomes durable."""
        self._late.end()


def checkpoint(url: str, folder: str, fsdp: bool = False) -> str:
    """Writes a step as the directory that trainer.train(resume_from_checkpoint=...) takes,
    FOLDER/checkpoint-N, and returns it.

    url: ckptfs://STORE/RUN/STEP.
    fsdp: for a training in FSDP2 (state_dict_type FULL_STATE_DICT), else for one process and
        DDP, however the step was saved.
    RuntimeError for a step that SnapshotCallback did not save.  It needs the program
    `ckptfs`, and room for the weights in memory; one rank calls it.
    """
    from safetensors.torch import save_file
    with resume.SavedStep(url) as step:
        state = step.document('trainer_state')
        target = os.path.join(folder, f'checkpoint-{state["global_step"]}')
        os.makedirs(target, exist_ok=True)
        if fsdp:
            torch.save(step.weights(aliases=True), os.path.join(target, 'pytorch_model_fsdp.bin'))
            torch.save(step.optimizer(named=True), os.path.join(target, 'optimizer.bin'))
        else:
            save_file(step.weights(), os.path.join(target, 'model.safetensors'),
                      {'format': 'pt'})
            torch.save(step.optimizer(), os.path.join(target, 'optimizer.pt'))
        torch.save(step.document('scheduler'), os.path.join(target, 'scheduler.pt'))
        scaler = step.document('scaler') if 'scaler' in step.documents() else {}
        if scaler:  # Trainer takes the file for one
            torch.save(scaler, os.path.join(target, 'scaler.pt'))
        ranks = step.ranks('rng')
        for rank in range(ranks):
            name = f'rng_state_{rank}.pth' if ranks > 1 else 'rng_state.pth'
            saved = resume.rng_of(step.document('rng', rank), ranks > 1)
            torch.save(saved, os.path.join(target, name))
        with open(os.path.join(target, 'trainer_state.json'), 'w', encoding='utf-8') as file:
            json.dump(state, file)
    return target
