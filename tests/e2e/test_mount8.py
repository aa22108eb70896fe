# SPDX-License-Identifier: Apache-2.0
"""The system's own mount(8) and fstab, through mount.fuse3.

mount(8) takes PATH away from its helpers, so the program stands in the type.  It takes what
follows the type's last dot for a type below that, so the program has a link without a dot.
"""
import os
import shutil
import subprocess
import tempfile

import pytest

import hostile
from daemon import BIN, is_mounted, wait_until

LINKS = tempfile.TemporaryDirectory(prefix='ckptfs', dir='/tmp')
TYPE = f'fuse.{LINKS.name}/ckptfs'
FILE = os.path.join('view', 'dp2_zero1', 'rank0', 'model.safetensors')


def missing():
    """Returns what the machine lacks for these tests, or None."""
    if os.geteuid() != 0:
        return 'mount(8) needs root'
    for tool in ('mount', 'umount', 'mount.fuse3'):
        if not shutil.which(tool, path='/usr/sbin:/usr/bin:/sbin:/bin'):
            return f'no {tool}'
    return None


@pytest.fixture(autouse=True, scope='module')
def link():
    """The program's name in the type."""
    os.symlink(os.path.realpath(BIN), f'{LINKS.name}/ckptfs')
    yield
    LINKS.cleanup()


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def mount8(*words):
    """Run mount(8)."""
    return subprocess.run(['mount', *map(str, words)], capture_output=True,
                          text=True, timeout=60)


def umount8(path):
    """Run umount(8), which must succeed."""
    done = subprocess.run(['umount', path], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not is_mounted(path), 'the unmount')


@pytest.fixture
def source(tmp_path):
    """A checkpoint whose path has what must be quoted."""
    path = tmp_path / "run 7,'x'"
    shutil.copytree(hostile.GOLDEN, path)
    return str(path)


def entry(path):
    """The mount's line in /proc/mounts, split."""
    with open('/proc/mounts', errors='surrogateescape') as f:
        return next(words for words in map(str.split, f) if words[1] == path)


def content(*parts):
    """A file's bytes."""
    with open(os.path.join(*parts), 'rb') as f:
        return f.read()


def test_mount_with_options(ckptfs, source):
    path = ckptfs.mountpoint()
    adopt = source.replace(',', '\\,')
    done = mount8('-t', TYPE, ckptfs.store, path, '-o',
                  f'adopt={adopt},layout=dp2_zero1,layout=tp2,mode=stream,'
                  'noatime,nofail,x-systemd.requires=a.mount')
    assert done.returncode == 0, done.stderr
    assert entry(path)[0] == ckptfs.store and entry(path)[2] == 'fuse.ckptfs'
    assert {'ro', 'nosuid', 'nodev'} <= set(entry(path)[3].split(','))
    assert {'dp2_zero1', 'tp2'} <= set(os.listdir(f'{path}/view'))
    got = content(path, FILE)
    assert len(got) > 1000
    umount8(path)
    assert os.listdir(path) == []
    other = ckptfs.mount()
    assert content(other, FILE) == got


def test_a_line_of_fstab(ckptfs, source, tmp_path):
    ckptfs.adopt(source, 'run7')
    ckptfs.adopt(source, 'other', check=False)
    path = ckptfs.mountpoint()
    fstab = tmp_path / 'fstab'
    fstab.write_text(f'{ckptfs.store}  {path}  {TYPE}  '
                     'run=run7,step=latest,_netdev,nofail  0 0\n')
    for _ in range(2):
        done = mount8('-T', fstab, path)
        assert done.returncode == 0, done.stderr
        assert os.readlink(f'{path}/view') == (
            f'run/run7/step/{hostile.TAG}/view')
        # -a passes over a mount that is there already.
        assert mount8('-T', fstab, '-a').returncode == 0
        with open('/proc/mounts', errors='surrogateescape') as f:
            assert sum(line.split()[1] == path for line in f) == 1
        umount8(path)


def test_our_umount_ends_it(ckptfs, source):
    ckptfs.adopt(source, 'run7')
    path = ckptfs.mountpoint()
    assert mount8('-t', TYPE, ckptfs.store, path).returncode == 0
    ckptfs.umount(path)


@pytest.mark.parametrize('options,code,said', [
    ('rnu=run7', 2, 'rnu'), ('remount', 2, 'remount'), ('run', 2, 'run'),
    ('mode=fast', 2, 'fast'), ('adopt=/no/such/place', 3, '/no/such/place')])
def test_errors_are_said_and_nothing_is_mounted(ckptfs, options, code, said):
    path = ckptfs.mountpoint()
    done = mount8('-t', TYPE, ckptfs.store, path, '-o', options)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert not is_mounted(path)


def test_a_second_mount_at_one_place_is_refused(ckptfs, source):
    ckptfs.adopt(source, 'run7')
    path = ckptfs.mountpoint()
    assert mount8('-t', TYPE, ckptfs.store, path).returncode == 0
    done = mount8('-t', TYPE, ckptfs.store, path)
    assert done.returncode == 7 and 'already' in done.stderr, done.stderr
    umount8(path)
