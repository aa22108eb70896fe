# SPDX-License-Identifier: Apache-2.0
"""The content of a step beside tensors of parameters, as a state dict of DCP names it."""
import functools
import pickle
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import torch

from .compat import flatten_state_dict
from .plain_pickle import Unreadable, plain, unknown_in

# A document: which keys of a state dict the model and the optimizers stood under.
SPELLING = 'ckptfs.dcp'
# A document: hyper-parameters that hold tensors, by the optimizer's label, the group's number and
# their names.  The groups themselves have them as numbers.
TENSORS = 'ckptfs.hyper'
# A document: what the optimizers' state_dict() had beside states and groups, by their labels.
ADDED = 'ckptfs.optimizer'
REST = 'dcp/rest'      # a document: keys of a DCP step that are nobody's, as they were
STATES = 'dcp/states'  # a document: states that are not tensors, by optimizer, parameter and kind
CLIENT = 'client/'  # how those begin that a job put beside the model itself
OWN = 'ckptfs.'  # how the names of documents begin that are not the job's


def hyper_parameters(group: Mapping[str, Any]) -> Dict[str, Any]:
    """Those of a group, Unreadable where that would take code.  UnpicklingError for what is not
    a group."""
    values = plain(bytes.fromhex(group['pickle']), lambda _: torch.empty(0), True)
    if not isinstance(values, dict):
        raise pickle.UnpicklingError(f'it holds a {type(values).__name__}')
    unknown = {key: unknown_in(value) for key, value in values.items()}
    return {key: Unreadable(unknown[key]) if unknown[key] else value
            for key, value in values.items()}


def _numbers_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if type(value) in (list, tuple):
        return type(value)(_numbers_of(one) for one in value)
    return value


def with_tensors(hyper: Mapping[str, Any], document: Any, label: str, number: int) -> Dict[str, Any]:
    """A group's hyper-parameters, with the tensors that it had; document: TENSORS, or None."""
    given = document.get(label) if isinstance(document, dict) else None
    given = given.get(number) if isinstance(given, dict) else None
    made = dict(hyper)
    for key, value in (given if isinstance(given, dict) else {}).items():
        if key in made and _numbers_of(value) == made[key]:  # it is that group's
            made[key] = value
    return made


class LaterTensor:
    """A tensor of a document that is read when a rank asks for it: an average of the model is as
    large as that."""

    def __init__(self, read: Callable[[], torch.Tensor], dtype: torch.dtype,
                 shape: Sequence[int]) -> None:
        self._read, self.dtype, self.shape = read, dtype, list(shape)

    def load(self, _: Any, box: Sequence[slice], target: torch.Tensor) -> None:
        """As a stored tensor has it."""
        target.copy_(self._read()[tuple(box)])


def _load(description: Mapping[str, Any], index: int, tensor: Callable[..., torch.Tensor],
          later: bool = False) -> Any:
    """later: tensors that are the step's own are LaterTensors."""
    document = description['documents'][index]

    def get(number: int) -> Any:
        one = document['tensors'][number]
        dtype = getattr(torch, one['dtype'])
        read = functools.partial(tensor, index, number, dtype, one['shape'], one['strides'])
        return LaterTensor(read, dtype, one['shape']) if later and one.get('beside') else read()

    return plain(bytes.fromhex(document['pickle']), get)


def document_of(description: Mapping[str, Any], tensor: Callable[..., torch.Tensor], key: str,
                scope: str) -> Any:
    """The last of a key and a scope.  KeyError if there is none; UnpicklingError, with the
    class, for what takes code."""
    found = [index for index, one in enumerate(description.get('documents', []))
             if (one['key'], one['scope']) == (key, scope)]
    if not found:
        raise KeyError(key)
    return _load(description, found[-1], tensor)


def documents_of(description: Mapping[str, Any], tensor: Callable[..., torch.Tensor],
                 scope: str = '') -> Dict[str, Any]:
    """By the keys that a state dict has them under, those of a scope ('': rank 0's) that load
    without running code; what is as large as the model in LaterTensors."""
    found = {}
    for index, document in enumerate(description.get('documents', [])):
        if document['scope'] != scope:
            continue
        try:
            found[document['key'].removeprefix(CLIENT)] = _load(description, index, tensor, True)
        except pickle.UnpicklingError:
            continue
    return found


class Spelling:
    """Where in a state dict a model and optimizers stand: as the step was saved by DCP, or
    under the usual keys.  given: {"model": key ("": at the top), "optimizers": {label: key}}."""

    def __init__(self, given: Optional[Mapping[str, Any]]) -> None:
        self._models = ['model.', '']
        if given is not None:
            self._models = [f"{given['model']}." * bool(given['model'])]
        self._optimizers: Dict[str, str] = dict(given['optimizers']) if given is not None else {}

    def model(self, name: str) -> List[str]:
        """A weight, buffer or extra state."""
        return [f'{model}{name}' for model in self._models]

    def optimizer(self, label: str) -> List[str]:
        """An optimizer, by its label in the step."""
        if self._optimizers:
            return [self._optimizers[label]] if label in self._optimizers else []
        return [label] if label else ['optim', 'optimizer']


def numbers_of(description: Mapping[str, Any]) -> Set[Tuple[str, str, str]]:
    """(optimizer, kind, parameter) of the states that were Python numbers."""
    return {tuple(one) for one in description.get('numbers', [])}


class SavedValues:
    """description: what `ckptfs read` says of a step; tensor(document, number, dtype, shape,
    strides): of a document's.

    values: by name; documents that cannot be loaded without running code are left out, and
        hyper-parameters are Unreadable.
    labels: the optimizers that have a parameter, by its name.
    numbers: (optimizer, kind, parameter) of the states that were Python numbers.
    """

    def __init__(self, description: Mapping[str, Any], tensor: Callable[..., Any]) -> None:
        self.values: Dict[str, Any] = {}
        self.labels: Dict[str, List[str]] = {}
        documents = documents_of(description, tensor)
        self.numbers = numbers_of(description)
        self._owners = {(kind, name): label
                        for label, kind, name in description.get('owners', [])}
        self.spelling = Spelling(description.get('spelling'))
        self._tensors = documents.pop(TENSORS, None)
        added = documents.pop(ADDED, None)
        for label, entries in (added if isinstance(added, dict) else {}).items():
            for at in self.spelling.optimizer(label):
                self.values.update(flatten_state_dict({at: entries})[0])
        self.values.update(flatten_state_dict(documents.pop(REST, {}))[0])
        for label, states in documents.pop(STATES, {}).items():
            for at in self.spelling.optimizer(label):
                self.values.update(flatten_state_dict({at: {'state': states}})[0])
        for key, value in documents.items():
            if key.startswith('extra_state/'):
                place = key[len('extra_state/'):]
                if not place or place.endswith('.'):  # as modules are named
                    place += '_extra_state'
                for at in self.spelling.model(place):
                    self.values.update(flatten_state_dict({at: value})[0])
            else:
                self.values.update(flatten_state_dict({key: value})[0])
        # Each rank loads the keys that it alone had, and of others rank 0's.
        for scope in dict.fromkeys(one['scope'] for one in description.get('documents', [])):
            for key, value in documents_of(description, tensor, scope).items() if scope else ():
                if not key.startswith((OWN, 'extra_state/')):
                    for name, one in flatten_state_dict({key: value})[0].items():
                        self.values.setdefault(name, one)
        counts: Dict[str, int] = {}
        for group in description.get('groups', []):
            label = group['optimizer']
            for name in group['parameters']:
                self.labels.setdefault(name, []).append(label)
            self._add_group(group, counts.setdefault(label, 0))
            counts[label] += 1

    def place_of(self, key: str) -> Optional[Tuple[str, str, str]]:
        """(optimizer, kind, name) of a key of a rank's optimizer file: "<kind>/<name>" or, of
        what a second optimizer has of a parameter, "<optimizer>/<kind>/<name>".  None where
        nobody says whose it is."""
        first, _, rest = key.partition('/')
        if (first, rest) in self._owners:
            return self._owners[first, rest], first, rest
        kind, _, name = rest.partition('/')
        of_second = first in self.labels.get(name, [])
        owners = self.labels.get(rest, [] if of_second else [''])
        of_one = len(set(owners)) == 1  # else the step's description has it
        if of_one == of_second:
            return None
        return (owners[0], first, rest) if of_one else (first, kind, name)

    def _add_group(self, group: Mapping[str, Any], index: int) -> None:
        """Adds a group of state dicts that number groups, and of flattened ones."""
        try:
            hyper = hyper_parameters(group)
        except pickle.UnpicklingError:
            return
        hyper = with_tensors(hyper, self._tensors, group['optimizer'], index)
        for key in self.spelling.optimizer(group['optimizer']):
            numbered = {key: {'param_groups': [{**hyper, 'params': list(group['parameters'])}]}}
            for name, value in flatten_state_dict(numbered)[0].items():
                at = f'{key}.param_groups.'
                self.values[f'{at}{index}{name[len(at) + 1:]}'] = value
            for name in group['parameters']:
                for kind, value in hyper.items():
                    self.values[f'{key}.param_groups.{name}.{kind}'] = value
