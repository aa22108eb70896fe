# SPDX-License-Identifier: Apache-2.0
"""Several mounts at one mount point at the same moment."""
import os
import signal
import subprocess

import pytest

from daemon import BIN, is_mounted, wait_until


def mounts_at(path):
    """How many there are, one over another."""
    path = os.path.realpath(path)
    with open('/proc/self/mountinfo', errors='surrogateescape') as f:
        return sum(line.split()[4] == path for line in f)


@pytest.mark.parametrize('dead', [False, True])
def test_one_of_several_mounts(ckptfs, source, dead):
    ckptfs.adopt(source)
    path = ckptfs.mountpoint()
    words = [BIN, 'mount', '--store', ckptfs.store, *ckptfs.reserve, path]
    if dead:
        subprocess.run(words, check=True, capture_output=True, timeout=60)
        pid, = ckptfs.running()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not os.path.exists(f'/proc/{pid}'), 'the end of the daemon')
    racing = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
              for _ in range(6)]
    said = [process.communicate(timeout=60)[1] for process in racing]
    codes = sorted(process.returncode for process in racing)
    assert codes == [0] + [7] * 5, said
    assert mounts_at(path) == 1
    assert os.path.lexists(f'{path}/view')
    ckptfs.umount(path)
    assert not is_mounted(path)
