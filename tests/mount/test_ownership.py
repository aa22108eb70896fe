# SPDX-License-Identifier: Apache-2.0
"""The files that `adopt --copy` and `--link` put into the store."""
import fcntl
import glob
import os
import shutil
import subprocess
import tempfile

import pytest

from daemon import Ckptfs
from hostile import GOLDEN

NOBODY = 65534


@pytest.fixture
def public():
    """A store and mounts where everybody may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        program = Ckptfs(path)
        yield program
        program.close()


def as_nobody(path):
    """True if somebody else may read a file."""
    done = subprocess.run(
        ['setpriv', f'--reuid={NOBODY}', f'--regid={NOBODY}',
         '--clear-groups', 'cat', path], capture_output=True, check=False)
    return done.returncode == 0


def restat(path, info):
    """Give a file the times it had."""
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.skipif(os.geteuid() != 0, reason='other users need root')
def test_directories_keep_their_modes(public):
    source = shutil.copytree(GOLDEN, public.folder + '/run7')
    mount = public.mount(adopt=[source])
    universal = public.folder + '/universal'
    assert public.run('export', 'run7/latest', 'dp2_zero1/deepspeed',
                      universal, '--store', public.store).returncode == 0
    zero, = glob.glob(universal + '/*/zero')
    for mode, run, allowed in ((0o755, 'open', True),
                               (0o700, 'closed', False)):
        os.chmod(zero, mode)
        public.adopt(universal, run, extra=['--copy'])
        view, = glob.glob(f'{mount}/run/{run}/step/*/view')
        path = f'{view}/dp1/rank0/model.safetensors'
        assert os.path.exists(path)
        assert as_nobody(path) == allowed, run


@pytest.mark.skipif(os.geteuid() != 0, reason='other users need root')
@pytest.mark.parametrize('how', [[], ['--copy']], ids=['reference', 'copy'])
def test_a_closed_directory_of_one_node_closes_the_step(public, how):
    """Each of the directories that are joined must let a user pass."""
    parts = [f'{public.folder}/n{i}/run7' for i in range(2)]
    for part in parts:
        shutil.copytree(GOLDEN, part)
    for path in glob.glob(f'{parts[0]}/*/*optim*') + glob.glob(f'{parts[1]}/*/*model*'):
        os.unlink(path)
    mount = public.mount()
    for mode, run, allowed in ((0o755, 'open', True), (0o700, 'closed', False)):
        os.chmod(f'{public.folder}/n1', mode)
        public.adopt('--union', run, extra=[*how, *parts])
        view, = glob.glob(f'{mount}/run/{run}/step/*/view')
        path = f'{view}/dp1/rank0/model.safetensors'
        assert os.path.exists(path)
        assert as_nobody(path) == allowed, run


def test_a_repaired_file_is_copied_again(ckptfs, source):
    ckptfs.adopt(source, 'run7', extra=['--copy'])
    path, = glob.glob(f'{source}/*/*_00_model_states.pt')
    info = os.stat(path)
    with open(path, 'r+b') as f:
        f.seek(info.st_size // 2)
        byte = f.read(1)[0]
        f.seek(info.st_size // 2)
        f.write(bytes([byte ^ 1]))
    restat(path, info)
    ckptfs.adopt(source, 'again', extra=['--copy'])
    with open(path, 'rb') as f:
        now = f.read()
    kept = []
    for name in glob.glob(f'{ckptfs.store}/blobs/*/*/*_00_model_states.pt'):
        with open(name, 'rb') as f:
            kept.append(f.read())
    assert len(kept) == 2 and now in kept


def test_what_another_process_is_copying_is_left_alone(ckptfs, source):
    blobs = ckptfs.store + '/blobs'
    name = '0123456789abcdef' * 2
    parts = f'{blobs}/{name}.partial-abc'
    os.makedirs(parts)
    os.mkdir(ckptfs.store + '/holds', 0o700)
    fd = os.open(f'{ckptfs.store}/holds/{name}', os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    ckptfs.adopt(source, 'one', extra=['--copy'])
    assert os.path.exists(parts)
    os.close(fd)
    os.utime(glob.glob(f'{source}/*/*_00_model_states.pt')[0])
    ckptfs.adopt(source, 'two', extra=['--copy'])
    assert not os.path.exists(parts)
    assert not [n for n in os.listdir(blobs) if 'partial' in n]


def test_a_copied_store_reads_its_own_bytes(ckptfs, source):
    """Copies have neither times nor inodes to be told by."""
    ckptfs.adopt(source, 'run7', extra=['--copy'])
    shutil.rmtree(source)
    moved = ckptfs.folder + '/restored'
    subprocess.run(['cp', '-r', ckptfs.store, moved], check=True)
    shutil.rmtree(ckptfs.store)
    ckptfs.run('verify', 'run7/latest', '--store', moved)
    path = next(p for p in glob.glob(f'{moved}/blobs/*/*/*_model_states.pt'))
    info = os.stat(path)
    with open(path, 'r+b') as f:
        f.seek(info.st_size - 1)
        byte = f.read(1)[0]
        f.seek(info.st_size - 1)
        f.write(bytes([byte ^ 1]))
    restat(path, info)
    done = ckptfs.run('verify', 'run7/latest', '--store', moved, check=False)
    assert done.returncode != 0
    assert f'{path}: ' in done.stdout
