# SPDX-License-Identifier: Apache-2.0
"""ckptfs under the name that DeepSpeed imports for `"datastates_ckpt": {...}`.

DeepSpeed's own engine around it says that it is decoupled, but has nothing to commit: nobody
would wait before the update, nobody write `latest`.  So nothing is saved through it:
_ckptfs_hook puts ckptfs.deepspeed in its place.
"""
import logging
from typing import Any


class CheckpointEngine:
    """The object that DeepSpeed makes once per engine.

    deepspeed_config: a DeepSpeedConfig.  It leaves out settings that
        ckptfs.deepspeed does not know (host_cache_size, ...).
    rank: not asked for.

    ckptfs_settings: for ckptfs.deepspeed.
    ckptfs_stock: the engine that saves where ckptfs cannot.
    RuntimeError where this interpreter has no hook, and DeepSpeed's engine would stay.
    """

    def __init__(self, deepspeed_config: Any, rank: int) -> None:
        from ckptfs.deepspeed import KEYS
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
        from deepspeed.runtime.engine import DeepSpeedEngine
        if not hasattr(DeepSpeedEngine._configure_checkpointing, '_ckptfs_original'):
            raise RuntimeError('ckptfs is not installed where Python looks for .pth files '
                               '(ckptfs.pth): DeepSpeed would never write `latest`')
        given = deepspeed_config.datastates_config.config
        given = given if isinstance(given, dict) else {}
        self.ckptfs_settings = {key: value for key, value in given.items() if key in KEYS}
        self.ckptfs_stock = TorchCheckpointEngine(deepspeed_config)
        if len(self.ckptfs_settings) < len(given):
            logging.getLogger('ckptfs').info('datastates_ckpt: ckptfs ignores %s',
                                             sorted(set(given) - KEYS))

    def wait(self, persist: bool = False) -> None:
        """Called when DeepSpeed lets go of its engine: nothing is under way here."""
