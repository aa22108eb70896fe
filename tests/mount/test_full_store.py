# SPDX-License-Identifier: Apache-2.0
"""Making room in a store whose file system has none left: no byte, or no inode."""
import json
import os
import subprocess

import pytest

from daemon import Ckptfs
from plain_model import save

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason='mounts a tmpfs')


def fill(folder):
    """Until neither a file nor a byte has room."""
    number = 0
    try:
        for number in range(100000):
            with open(f'{folder}/other{number}', 'wb', buffering=0) as f:
                while f.write(bytes(4096)):
                    pass
    except OSError:
        pass
    with pytest.raises(OSError):
        for more in range(100000):
            with open(f'{folder}/more{more}', 'wb') as f:
                f.write(b'x' * 100)


@pytest.mark.parametrize('limit', ['size=800k', 'size=8m,nr_inodes=100'])
def test_removing_needs_no_room(tmp_path, limit):
    for number in range(1, 7):
        save(tmp_path / 'run' / f'checkpoint-{number}', number)
    folder = tmp_path / 'fs'
    folder.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', limit, 'none', folder], check=True)
    c = Ckptfs(str(folder))
    store = ['--store', c.store]
    try:
        c.adopt(tmp_path / 'run', extra=['--copy'])
        mount = tmp_path / 'mnt'
        mount.mkdir()
        c.run('mount', *store, *c.reserve, mount)
        fill(folder)
        c.run('remove', *store, 'run/checkpoint-1')
        c.run('remove', *store, 'run/checkpoint-2', 'run/checkpoint-3')
        steps = os.listdir(mount / 'run/run/step')
        assert sorted(steps) == ['checkpoint-4', 'checkpoint-5', 'checkpoint-6']
        done = c.run('gc', *store, '--keep-last', '1', '--json')
        report = json.loads(done.stdout)
        assert [step['id'] for step in report['removed']] == ['checkpoint-4', 'checkpoint-5']
        assert report['directories'] == 5 and report['notes'] == []
        c.run('verify', *store, 'run/checkpoint-6')
        # With room again the names are free, and the numbers stay used.
        c.run('gc', *store)
        assert not os.path.exists(f'{c.store}/steps/run/checkpoint-1')
        c.adopt(tmp_path / 'run/checkpoint-1', extra=['--copy', '--name', 'run'])
        assert os.listdir(f'{c.store}/steps/run/checkpoint-1') == ['1']
        c.run('umount', mount)
    finally:
        subprocess.run(['umount', '-l', tmp_path / 'mnt'], check=False, capture_output=True)
        subprocess.run(['umount', '-l', folder], check=True)
