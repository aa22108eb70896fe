# SPDX-License-Identifier: Apache-2.0
"""Ordinary tools on a mount: every size, type and byte is what it says."""
import hashlib
import os
import stat
import subprocess
import tarfile

import pytest

from daemon import Ckptfs, checkpoint, step_of

VIEW = 'tp2_dp2_zero1'


@pytest.fixture(scope='module')
def mount(tmp_path_factory):
    """One small checkpoint, mounted."""
    program = Ckptfs(str(tmp_path_factory.mktemp('posix')))
    program.adopt(checkpoint('zero2'), 'zero2')
    program.adopt(checkpoint('tp2_pp2'), 'tp2_pp2')
    yield program.mount()
    program.close()


@pytest.fixture
def view(mount):
    """A view's directory."""
    return os.path.join(step_of(mount, 'zero2'), 'view', VIEW)


def tool(*words):
    """Run a tool; it must be silent on stderr and succeed."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, (words, done.stderr)
    return done.stdout


def digests(root):
    """{relative path: digest of the content} of the files below root."""
    out = {}
    for base, _, names in os.walk(root):
        for name in names:
            path = os.path.join(base, name)
            if os.path.islink(path):
                out[os.path.relpath(path, root)] = os.readlink(path)
                continue
            with open(path, 'rb') as f:
                data = f.read()
            assert len(data) == os.stat(path).st_size, path
            out[os.path.relpath(path, root)] = hashlib.sha256(data).hexdigest()
    return out


def test_copies_are_whole(view, tmp_path):
    want = digests(view)
    assert len(want) > 100
    tool('cp', '-r', view, str(tmp_path / 'cp'))
    assert digests(tmp_path / 'cp') == want
    tool('rsync', '-a', view + '/', str(tmp_path / 'rsync'))
    assert digests(tmp_path / 'rsync') == want
    tool('tar', '-cf', str(tmp_path / 'a.tar'), '-C', view, '.')
    with tarfile.open(tmp_path / 'a.tar') as f:
        # Python before 3.11.4 has no filters, and 3.14 takes this one anyway.
        how = {'filter': 'data'} if hasattr(tarfile, 'data_filter') else {}
        f.extractall(tmp_path / 'tar', **how)
    assert digests(tmp_path / 'tar') == want
    again = tool('rsync', '-ani', view + '/', str(tmp_path / 'rsync'))
    assert again == '', again


def test_listings(mount, view):
    assert 'model.safetensors' in tool('ls', '-lR', view)
    tool('ls', '-lR', mount)
    files = tool('find', view, '-type', 'f').splitlines()
    assert len(files) == len(set(files)) > 100
    assert tool('find', view, '-newermt', '2100-01-01') == ''


def test_du_and_blocks_are_honest(view):
    total = 0
    for base, _, names in os.walk(view):
        for name in names:
            info = os.lstat(os.path.join(base, name))
            if stat.S_ISREG(info.st_mode):
                total += info.st_size
                assert info.st_blocks * 512 >= info.st_size * 0.9 or (
                    info.st_blocks == 0), name
    apparent = int(tool('du', '-sb', '--apparent-size', view).split()[0])
    assert total <= apparent < total * 1.5
    tool('du', '-s', view)


def test_checksums_and_cat(view):
    path = os.path.join(view, 'rank0', 'model.safetensors')
    first = tool('sha256sum', path)
    assert tool('sha256sum', path) == first
    with open(path, 'rb') as f:
        assert hashlib.sha256(f.read()).hexdigest() == first.split()[0]
    data = subprocess.run(['cat', path], capture_output=True, timeout=60)
    assert hashlib.sha256(data.stdout).hexdigest() == first.split()[0]


def test_times_owner_and_mode(mount, view):
    source = os.path.join(checkpoint('zero2'), 'global_step5')
    newest = max(os.stat(os.path.join(source, n)).st_mtime
                 for n in os.listdir(source))
    info = os.stat(os.path.join(view, 'rank0', 'model.safetensors'))
    assert abs(info.st_mtime - newest) < 2
    assert info.st_uid == os.stat(source).st_uid
    assert not info.st_mode & 0o222, oct(info.st_mode)


def test_writing_is_refused(view):
    for words in (['touch', view + '/x'], ['mkdir', view + '/x'],
                  ['rm', view + '/rank0/model.pt'],
                  ['mv', view + '/rank0', view + '/rank9'],
                  ['truncate', '-s', '0', view + '/rank0/model.pt'],
                  ['ln', '-s', 'a', view + '/x']):
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode, words
        assert any(t in done.stderr for t in (
            'Read-only', 'Permission denied', 'not permitted',
            'not implemented')), done.stderr


def test_wrong_names_are_no_files(view, mount):
    step = os.path.dirname(os.path.dirname(view))
    for path in ('view/tp0', 'view/nonsense', 'view/tp2_tp2', 'view/tp3x',
                 f'view/{VIEW}/rank99', f'view/{VIEW}/deepspeed/nothing',
                 'param/none', 'view/../view/tp1/nope'):
        with pytest.raises(FileNotFoundError):
            os.stat(os.path.join(step, path))
    with pytest.raises(NotADirectoryError):
        os.stat(os.path.join(view, 'rank0', 'model.pt', 'x'))


def test_other_orders_of_a_layout_are_the_same(view):
    other = os.path.join(os.path.dirname(view), 'zero1_dp2_tp2', 'rank0')
    assert os.path.samefile(os.path.join(other, 'model.pt'),
                            os.path.join(view, 'rank0', 'model.pt'))


def test_inodes_survive_a_restart(tmp_path):
    program = Ckptfs(str(tmp_path))
    program.adopt(checkpoint('zero2'), 'zero2')
    seen = []
    try:
        for _ in range(2):
            mount = program.mount()
            view = os.path.join(step_of(mount, 'zero2'), 'view', VIEW)
            seen.append({os.path.join(os.path.relpath(b, mount), n): os.stat(
                os.path.join(b, n)).st_ino for b, _, ns in os.walk(view)
                for n in ns})
            program.umount(mount)
    finally:
        program.close()
    assert seen[0] == seen[1]
    assert len(set(seen[0].values())) == len(seen[0])


def test_source_files_are_the_source(mount):
    source = os.path.join(checkpoint('zero2'), 'global_step5')
    shown = os.path.join(step_of(mount, 'zero2'), 'source')
    want = {k: v for k, v in digests(source).items()}
    got = {os.path.basename(k): v for k, v in digests(shown).items()}
    assert {k: got[k] for k in want} == want
