# SPDX-License-Identifier: Apache-2.0
"""Memory of the daemon outside caches after it has served a whole restart."""
import os

from context import absolute_row


def anonymous_mb(pid):
    """Anonymous resident memory of a process in MB."""
    with open(f'/proc/{pid}/status') as f:
        kib = next(int(x.split()[1]) for x in f if x.startswith('RssAnon'))
    return kib / 1000


def read_all(path):
    """Read a file and forget it."""
    buffer = bytearray(1 << 20)
    with open(path, 'rb', buffering=0) as f:
        while f.readinto(buffer):
            pass


def after_a_restart(context):
    """The daemon's anonymous memory in MB when all of tp2 dp2 was read."""
    with context.mounted(context.checkpoint('zero2')) as (mount, process):
        view = os.path.join(mount, 'view', 'tp2_dp2_zero1')
        served = 0
        for base, _, names in os.walk(view):
            for name in names:
                # Each rank's files once, and all that an engine reads.
                if 'rank' not in base or name.endswith('.safetensors'):
                    read_all(os.path.join(base, name))
                    served += 1
        assert served > 100, f'{served} files below {view}'
        return anonymous_mb(process.pid)


def run(context):
    """Row (f)."""
    return [absolute_row('memory', 'anonymous memory of the daemon, 223 M '
                         'parameters read at tp2 dp2',
                         after_a_restart(context), 'MB', 300)]
