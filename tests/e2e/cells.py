# SPDX-License-Identifier: Apache-2.0
"""Code that the parts of the matrix share: its columns, a pair, and what the program says of a view
that it does not show."""
import json
import os
import re
from dataclasses import dataclass

ENGINES = ('zero1', 'zero1_autotp', 'zero1_bf16', 'zero2', 'zero3', 'zero3_autotp')
# mesh -> the layout that is cut for it
MESHES = {'fsdp2': 'dp2', 'fsdp3': 'dp3', 'hsdp2x2': 'dp2', 'fsdp2_tp2': 'tp2_dp2', 'ddp1': 'tp1'}
TOOLS = ('trainer', 'accelerate', 'lightning')
GIVEN = 'hf_config'  # huggingface/ of a mount with --hf-config
RANKS = 'rank<N>'
MEGATRON = 'megatron'
COLUMNS = (*ENGINES, *MESHES, MEGATRON, 'huggingface', GIVEN, *TOOLS, RANKS)
NOT_OF_MEGATRON = "no config.json says that the model is one which Megatron has: its names are not proved (`mount --hf-config`)"
ALIKE = "not tried: Megatron's ranks load such models from engines' checkpoints and from directories of Hugging Face"
NOT_TRIED = 'not tried: engines of these models are made at ZeRO 1, 2 and 3'
NOT_OF_TRANSFORMERS = 'the model is none of transformers'
OWN_CONFIG = 'the step has a config.json of its own, which --hf-config does not replace'
VIEWS = 'rank|deepspeed_native|deepspeed|huggingface|trainer|accelerate|lightning|dcp|megatron_legacy|megatron'
# Words of a reason for which a view cannot be asked of a source at all.
NOT_OF_THIS = ('not saved by', 'no config.json')


@dataclass(frozen=True)
class Target:
    """One pair: a source, a column of the page, and what is loaded there."""
    source: str
    column: str
    target: object

    @property
    def key(self):
        """Its name in the results."""
        return f'{self.source} | {self.column} | {self.target}'


def cause_of(said, view):
    """Returns the cause for one format, or the first if others are named, out of what the program
    says of a layout that no format shows ('no format ...; rank, dcp: why; trainer: why')."""
    words, causes = re.split(rf'; ((?:{VIEWS})(?:, (?:{VIEWS}))*): ', said), {}
    for names, why in zip(words[1::2], words[2::2]):
        for name in names.split(', '):
            causes.setdefault(name, why.strip())
    return causes.get(view) or next(iter(causes.values()), said)


def said_of(step, layout, view):
    """Why the program does not show a view, or None if it does."""
    folder = os.path.join(step, 'view', layout)
    if os.path.isdir(os.path.join(folder, view)):
        return None
    if not os.path.isdir(folder):  # no format shows it, and the attribute says why of each
        said = os.getxattr(os.path.dirname(folder), 'user.ckptfs.reason').decode().splitlines()
        return cause_of(next(line for line in said if line.startswith(f'{layout}: ')), view)
    with open(os.path.join(folder, 'info.json'), encoding='utf-8') as f:
        formats = json.load(f)['formats']
    return formats[view].removeprefix('no: ')


def probe(step, layout, view):
    """The record of a view that is not expected: refused or not applicable, as the program says."""
    why = said_of(step, layout, view)
    if why is None:
        return {'layout': layout, 'ok': False, 'errors': ['it is shown, and nothing compares it']}
    state = 'n/a' if any(words in why for words in NOT_OF_THIS) else 'refused'
    return {'layout': layout, 'ok': True, 'state': state, 'why': why}
