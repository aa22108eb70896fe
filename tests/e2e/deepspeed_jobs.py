# SPDX-License-Identifier: Apache-2.0
"""Jobs of real DeepSpeed engines whose configuration names a store."""
import os

import torch

import launch
from engine import build_engine


def engine_of(dims, lay, store, run='job', more=None, **settings):
    """An engine that the import hook has met.  Every tensor is copied lazily, however
    small; `more`: of its configuration."""
    import _ckptfs_hook
    from ckptfs import shot
    _ckptfs_hook.install()
    shot.SMALL = 0
    torch.manual_seed(dims.seed)
    checkpoint = {'load_universal': True} if lay.universal else {}
    if store:
        checkpoint['ckptfs'] = {'store': store, 'run': run, 'fallback': False, **settings}
    return build_engine(dims, lay, {'checkpoint': checkpoint, **(more or {})})


def stock_save(engine, folder, tag, client):
    """Saves as the engine would without us."""
    ours, every = engine.checkpoint_engine, engine.save_non_zero_checkpoint
    engine.checkpoint_engine, engine.save_non_zero_checkpoint = ours.stock, ours.writes
    engine.save_checkpoint(folder, tag=tag, client_state=client)
    engine.checkpoint_engine, engine.save_non_zero_checkpoint = ours, every


def run(worker, world, args, out):
    """Ranks, which have to return."""
    log = os.path.join(out, 'rank')
    if launch.launch(worker, world, args, log):
        return
    with open(f'{log}.0', errors='replace', encoding='utf-8') as file:
        raise AssertionError(f'{launch.errors_of(log, world)}\n{file.read()[-4000:]}')
