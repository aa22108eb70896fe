# SPDX-License-Identifier: Apache-2.0
"""Lets DeepSpeed find ckptfs: every interpreter imports this at its start (ckptfs.pth).

It imports nothing and does nothing until somebody imports deepspeed.runtime.engine.
Engines whose configuration or environment names a store then save through
ckptfs.deepspeed; any trouble leaves DeepSpeed as it is.
"""
import sys

ENGINE = 'deepspeed.runtime.engine'


def _warn(error):
    import logging
    logging.getLogger('ckptfs').warning('DeepSpeed saves without ckptfs: %s', error)


def _take_place(engine):
    """Takes the place of our package `datastates`, which saves nothing itself.  Returns its
    settings; None if DeepSpeed chose another engine."""
    named = getattr(engine.checkpoint_engine, 'ckpt_engine', None)
    if not hasattr(named, 'ckptfs_stock'):
        return None
    engine.checkpoint_engine = named.ckptfs_stock
    return named.ckptfs_settings


def selected(engine, settings=None):
    """The settings of an engine, None if nothing names a store.  `settings`: those that it
    has if its configuration says nothing under "checkpoint"."""
    import os
    given = ((getattr(engine, 'config', None) or {}).get('checkpoint') or {}).get('ckptfs')
    given = settings if given is None else given
    if given is None and not os.environ.get('CKPTFS_STORE'):
        return None
    settings = dict(given or {})
    for key, name in (('store', 'CKPTFS_STORE'), ('run', 'CKPTFS_RUN'),
                      ('mount', 'CKPTFS_MOUNT')):
        if os.environ.get(name):
            settings.setdefault(key, os.environ[name])
    return settings


def _all(engine, made):
    """True if it was made on all ranks: they save alike or wait for each other."""
    from torch import distributed, tensor
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return made is not None
    agreed = tensor(int(made is not None), device=engine.device)
    distributed.all_reduce(agreed, op=distributed.ReduceOp.MIN)
    return bool(agreed)


def _attach(engine, settings):
    plan = made = None
    try:
        from ckptfs import deepspeed
        plan = deepspeed.plan(engine, settings)
    except Exception as error:
        _warn(error)
    if not _all(engine, plan):
        return
    try:
        made = plan()
    except Exception as error:
        _warn(error)
    if _all(engine, made):
        made.install()


def patch(module):
    """Has the engines of the module `deepspeed.runtime.engine` save through ckptfs."""
    original = module.DeepSpeedEngine._configure_checkpointing
    if hasattr(original, '_ckptfs_original'):
        return

    def configure(self, *args, **kwargs):
        original(self, *args, **kwargs)
        try:
            settings = selected(self, _take_place(self))
            if settings is not None:
                _attach(self, settings)
        except Exception as error:
            _warn(error)

    configure._ckptfs_original = original
    module.DeepSpeedEngine._configure_checkpointing = configure


class Finder:
    """Sees one module come, and lets everybody else's way of finding it be."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Returns what the other finders say of the engine's module, with our patch after it."""
        if name != ENGINE:
            return None
        for finder in sys.meta_path:
            if finder is Finder or not hasattr(finder, 'find_spec'):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _patch_after(spec.loader)
                return spec
        return None


def _patch_after(loader):
    try:
        run = loader.exec_module

        def exec_module(module):
            run(module)
            try:
                patch(module)
            except Exception as error:
                _warn(error)

        loader.exec_module = exec_module
    except Exception as error:
        _warn(error)


def install():
    """Once per interpreter."""
    if ENGINE in sys.modules:
        patch(sys.modules[ENGINE])
    elif Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
