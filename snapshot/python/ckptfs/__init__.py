# SPDX-License-Identifier: Apache-2.0
"""Snapshots of training jobs into a ckptfs store, while they train.

    snap = ckptfs.Snapshotter(model, optimizer, run="job", store="/path")
    for step in range(steps):
        ...                       # forward, backward, optimizer.step()
        snap.save(step)           # returns before the copy is done

Snapshotter is for PyTorch loops.  For others: Saver, which takes a Collector.  SavedStep reads
what was saved.
"""
import importlib

from .resume import SavedStep
from .saver import Collector, Saver
from .snapshotter import Snapshotter

__version__ = '0.1.0'  # as pyproject.toml has it
__all__ = ['Collector', 'SavedStep', 'Saver', 'Snapshotter']


def __getattr__(name: str) -> object:
    """Loads modules that import another package, when somebody asks for them."""
    if name in ('dcp', 'dcp_reader', 'lightning', 'megatron', 'transformers'):
        return importlib.import_module(f'.{name}', __name__)
    raise AttributeError(name)
