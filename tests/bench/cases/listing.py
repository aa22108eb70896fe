# SPDX-License-Identifier: Apache-2.0
"""ls -lR of a view with 1,024 ranks."""
import os
import subprocess

from context import absolute_row, clock


def first_listing(context):
    """Seconds of the first one of a new mount."""
    with context.mounted(context.checkpoint('zero2')) as (mount, _):
        view = os.path.join(mount, 'view', 'dp1024_zero1')
        took, done = clock(lambda: subprocess.run(
            ['ls', '-lR', view], capture_output=True, check=True))
        assert done.stdout.count(b'model.safetensors') == 1024
    return took


def run(context):
    """Row (d)."""
    return [absolute_row('listing', 'ls -lR of 1,024 ranks, first time',
                         first_listing(context), 's', 1)]
