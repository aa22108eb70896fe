# SPDX-License-Identifier: Apache-2.0
"""A step of a store, whole, as the state dicts that it was saved of.

    with ckptfs.SavedStep("ckptfs:///data/store/job/latest") as step:
        model.load_state_dict(step.model())
        optimizer.load_state_dict(step.optimizer())
        scheduler.load_state_dict(step.document("scheduler"))
"""
import pickle
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from . import url as urls
from .plain_pickle import Unreadable
from .saved_values import ADDED, OWN, TENSORS, SavedValues, document_of, hyper_parameters, numbers_of, with_tensors
from .step_files import Program, Stored, tensors_of


class SavedStep:
    """url: ckptfs://STORE/RUN/STEP; STEP may be `latest`, or `memory`: the step that daemons
    of several machines hold in memory, durable or not.

    Tensors are in host memory and whole, at whatever degrees they were saved; it needs the
    program `ckptfs`, and room for what it is asked for.  RuntimeError for what the step does
    not have or what cannot be loaded.  One thread's.
    """

    def __init__(self, url: str) -> None:
        self._url, self._files = url, Program(*urls.parse(url))
        self._description = self._files.describe()
        self._tensors: Optional[Dict[Tuple[str, str, str], Stored]] = None
        self._numbers = numbers_of(self._description)

    def __enter__(self) -> 'SavedStep':
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def load(self, stored: Stored, box: Sequence[slice], target: torch.Tensor) -> None:
        """Copies a box of a tensor."""
        stored.load(self._files, box, target)

    def _load(self, stored: Stored) -> torch.Tensor:
        whole = torch.empty(stored.shape, dtype=stored.dtype, device='cpu')
        self.load(stored, tuple(slice(0, size) for size in stored.shape), whole)
        return whole

    def tensors(self) -> Dict[Tuple[str, str, str], Stored]:
        """By (optimizer, kind, parameter); weights and buffers are of kind weight."""
        if self._tensors is None:
            saved = SavedValues(self._description, self._files.tensor)
            self._tensors = {('', 'weight', name): one for name, one in tensors_of(
                self._files, 'rank0/model.safetensors').items()}
            for key, one in tensors_of(self._files, 'rank0/optimizer.safetensors').items():
                place = saved.place_of(key)
                if place is None:
                    raise RuntimeError(f'{self._url}: nothing says which parameter {key} belongs to')
                self._tensors[place] = one
        return self._tensors

    def weights(self, aliases: bool = False) -> Dict[str, torch.Tensor]:
        """By name, buffers too; of names that share a tensor the parameter's, or all."""
        members = {name for group in self._description['groups'] for name in group['parameters']}
        sharing: Dict[int, List[str]] = {}
        weights = [(name, one) for (_, kind, name), one in self.tensors().items() if kind == 'weight']
        for name, stored in weights:
            sharing.setdefault(id(stored), []).append(name)
        own = {one: next((n for n in names if n in members), names[0]) for one, names in sharing.items()}
        loaded = {id(stored): self._load(stored) for name, stored in weights if name == own[id(stored)]}
        return {name: loaded[id(stored)] for name, stored in weights
                if aliases or name == own[id(stored)]}

    def model(self) -> Dict[str, Any]:
        """Returns what its state_dict() was: weights and buffers under all their names, extra
        states."""
        found: Dict[str, Any] = dict(self.weights(aliases=True))
        for key in self.documents():
            if key.startswith('extra_state/'):
                name = key.removeprefix('extra_state/').removesuffix('_extra_state')
                found[f'{name}_extra_state'] = self.document(key)
        return found

    def optimizer(self, label: str = '', named: bool = False) -> Dict[str, Any]:
        """Returns what its state_dict() was: parameters have numbers, in the order of the groups;
        or their names."""
        numbers: Dict[str, Any] = {}
        groups: List[Dict[str, Any]] = []
        tensors = self.document(TENSORS) if TENSORS in self._documents() else None
        for group in self._description['groups']:
            if group['optimizer'] != label:
                continue
            hyper = self._hyper_parameters(group, f'parameter group {len(groups)}')
            hyper = with_tensors(hyper, tensors, label, len(groups))
            members = [numbers.setdefault(name, name if named else len(numbers))
                       for name in group['parameters']]
            groups.append({**hyper, 'params': members})
        states: Dict[Any, Dict[str, Any]] = {}
        for (owner, kind, name), stored in self.tensors().items():
            if kind != 'weight' and owner == label:
                value = self._load(stored)
                number = (owner, kind, name) in self._numbers
                states.setdefault(numbers[name], {})[kind] = value.item() if number else value
        added = self.document(ADDED).get(label, {}) if ADDED in self._documents() else {}
        return {'state': states, 'param_groups': groups, **added}

    def _hyper_parameters(self, group: Mapping[str, Any], where: str) -> Dict[str, Any]:
        where += f" of optimizer {group['optimizer']}" * bool(group['optimizer'])
        try:
            hyper = hyper_parameters(group)
        except pickle.UnpicklingError as error:
            raise RuntimeError(f'{self._url}: {where} cannot be loaded: {error}') from None
        for key, value in hyper.items():
            if isinstance(value, Unreadable):
                raise RuntimeError(f'{self._url}: {key} of {where} cannot be loaded: it holds a '
                                   f'{value.what}')
        return hyper

    def optimizers(self) -> List[str]:
        """Labels, in order."""
        return list(dict.fromkeys(group['optimizer'] for group in self._description['groups']))

    def ranks(self, key: str) -> int:
        """How many ranks have this document."""
        return sum(one['key'] == key for one in self._description['documents'])

    def _documents(self) -> Dict[str, str]:
        return {one['key']: one['scope'] for one in self._description['documents']}

    def documents(self) -> Dict[str, str]:
        """By key, whose they are: the scope of the one that is written last."""
        return {key: scope for key, scope in self._documents().items()
                if not key.startswith(OWN)}

    def document(self, key: str, rank: int = 0) -> Any:
        """A rank's document."""
        return self.scoped(key, f'dp{rank}' if rank else '')

    def scoped(self, key: str, scope: str) -> Any:
        """The document of a scope."""
        try:
            return document_of(self._description, self._files.tensor, key, scope)
        except KeyError:
            raise RuntimeError(f'{self._url} has no {key}') from None
        except pickle.UnpicklingError as error:
            raise RuntimeError(f'{self._url}: {key} cannot be loaded: {error}') from None


def rng_of(saved: Dict[str, Any], every: bool = False) -> Dict[str, Any]:
    """callbacks.rng_state() as random, numpy and torch take it back.  every: CUDA's state is a
    list, one of each device (set_rng_state_all), else the one of the device that was used."""
    out = dict(saved)
    used = out.pop('cuda_device', 0)
    if 'cuda' in out:
        devices = out['cuda'] if isinstance(out['cuda'], list) else [out['cuda']]
        out['cuda'] = devices if every else devices[min(used, len(devices) - 1)]
    if 'numpy' in out:
        import numpy
        name, keys, *rest = out['numpy']
        out['numpy'] = (name, numpy.array(keys.tolist(), dtype=numpy.uint32), *rest)
    return out
