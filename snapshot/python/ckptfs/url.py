# SPDX-License-Identifier: Apache-2.0
"""ckptfs://STORE/RUN/STEP: a step of a run in a store, as one text.

STEP may be `memory`: what daemons hold in memory together (`ckptfs recover`)."""
import os
from typing import Tuple

PROTOCOL = 'ckptfs'
_BEGIN = f'{PROTOCOL}://'
_MEMORY = 'memory'


def is_url(text: object) -> bool:
    """True if it begins as one."""
    return isinstance(text, str) and text.startswith(_BEGIN)


def parse(text: object) -> Tuple[str, str, str]:
    """(store, run, step): the store is an absolute path, the step a number or any other
    name that a step has, `latest` among them; `memory` is the step that daemons hold in memory
    together, `memory/7` the same if it is step 7.  ValueError for anything else."""
    path = str(text)[len(_BEGIN):].rstrip('/') if is_url(text) else ''
    parts, longer = path.rsplit('/', 2), path.rsplit('/', 3)
    if len(longer) == 4 and longer[2] == _MEMORY and all(longer[1:]) and os.path.isabs(longer[0]):
        # RUN/memory/7, or step 7 of a run of that name.
        if not os.path.isfile(os.path.join(parts[0], 'format')):
            return longer[0], longer[1], f'{_MEMORY}/{longer[3]}'
        if os.path.isfile(os.path.join(longer[0], 'format')):
            raise ValueError(f'{text}: {longer[0]} and {parts[0]} are both stores')
    if len(parts) != 3 or not all(parts) or not os.path.isabs(parts[0]):
        raise ValueError(f'{text} is not ckptfs://STORE/RUN/STEP with an absolute path STORE '
                         '(ckptfs:///data/store/job/7)')
    return parts[0], parts[1], parts[2]
