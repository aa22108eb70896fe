# SPDX-License-Identifier: Apache-2.0
"""ckptfs://STORE/RUN/STEP: a step of a run in a store, as one text."""
import os
from typing import Tuple

PROTOCOL = 'ckptfs'
_BEGIN = f'{PROTOCOL}://'


def is_url(text: object) -> bool:
    """True if it begins as one."""
    return isinstance(text, str) and text.startswith(_BEGIN)


def parse(text: object) -> Tuple[str, str, str]:
    """(store, run, step): the store is an absolute path, the step a number or any other
    name that a step has, `latest` among them.  ValueError for anything else."""
    parts = str(text)[len(_BEGIN):].rstrip('/').rsplit('/', 2) if is_url(text) else []
    if len(parts) != 3 or not all(parts) or not os.path.isabs(parts[0]):
        raise ValueError(f'{text} is not ckptfs://STORE/RUN/STEP with an absolute path STORE '
                         '(ckptfs:///data/store/job/7)')
    return parts[0], parts[1], parts[2]
