# SPDX-License-Identifier: Apache-2.0
"""Failures that must not happen when things break while a checkpoint is in use."""
import errno
import os
import random
import shutil
import signal
import subprocess
import threading
import time

import pytest

import hostile
from daemon import BIN, Ckptfs, checkpoint, is_mounted, step_of, wait_until

VIEW = 'dp2_zero1'
FILE = os.path.join('view', VIEW, 'rank0', 'model.safetensors')


def content(path):
    """All bytes of a file."""
    with open(path, 'rb') as f:
        return f.read()


@pytest.fixture
def source(tmp_path):
    """A checkpoint of one's own to break."""
    return hostile.copy_of_golden(str(tmp_path))


def steps(ckptfs):
    """The list command's lines, without the headings."""
    return ckptfs.run('list', '--store', ckptfs.store).stdout.splitlines()[1:]


def test_killed_while_adopting(ckptfs, source):
    """At any instant: no step or the whole step, and adopting again works."""
    start = time.monotonic()
    ckptfs.adopt(source, 'first')
    whole = time.monotonic() - start
    rng, left = random.Random(1), 0
    for number in range(25):
        process = subprocess.Popen(
            [BIN, 'adopt', source, '--store', ckptfs.store, '--name',
             f'run{number}'], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        time.sleep(rng.random() * whole * 1.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        left += process.returncode == -signal.SIGKILL
        start = time.monotonic()
        ckptfs.adopt(source, f'run{number}')
        whole = min(whole, time.monotonic() - start)
    assert left > 3, 'no run was killed in time'
    mount = ckptfs.mount()
    want = content(os.path.join(step_of(mount, 'first'), FILE))
    for number in range(25):
        assert content(os.path.join(step_of(mount, f'run{number}'),
                                    FILE)) == want


def test_killed_while_mounted_and_read(ckptfs, source):
    ckptfs.adopt(source, 'run')
    process, path = ckptfs.start()
    file = os.path.join(step_of(path, 'run'), FILE)
    want, errors, stop = content(file), [], threading.Event()

    def reader():
        while not stop.is_set():
            try:
                if content(file) != want:
                    errors.append('other bytes')
            except OSError as e:
                if e.errno not in (errno.ENOTCONN, errno.ECONNABORTED,
                                   errno.EIO, errno.ENOENT):
                    errors.append(e)
                return
    threads = [threading.Thread(target=reader) for _ in range(8)]
    for t in threads:
        t.start()
    time.sleep(0.3)
    process.kill()
    process.wait()
    stop.set()
    for t in threads:
        t.join(30)
        assert not t.is_alive(), 'a reader hangs after the kill'
    assert not errors, errors[:3]
    # The stale mount point is taken over by the next mount.
    _, again = ckptfs.start(path=path)
    assert content(os.path.join(step_of(again, 'run'), FILE)) == want


def test_killed_while_mounting(ckptfs, source):
    ckptfs.adopt(source, 'run')
    rng = random.Random(2)
    for _ in range(6):
        path = ckptfs.mountpoint()
        process = subprocess.Popen(
            [BIN, 'mount', '--foreground', '--store', ckptfs.store, path],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.random() * 0.15)
        process.kill()
        process.wait()
        ckptfs.start(path=path)
        assert content(os.path.join(step_of(path, 'run'), FILE))


def damaged(ckptfs, source, damage):
    """Mount, read, break a source file; returns (error of a read, message)."""
    ckptfs.adopt(source, 'run')
    log = os.path.join(ckptfs.folder, 'log')
    with open(log, 'wb') as stderr:
        _, mount = ckptfs.start(stderr=stderr)
    step = step_of(mount, 'run')
    first = os.path.join(step, 'view', 'dp2_zero1', 'rank0')
    content(os.path.join(first, 'model.safetensors'))
    # Nobody has looked at it since it was adopted: no interval has to pass.
    damage(hostile.inside(source, hostile.zero_file(1)))
    # A layout that nobody has opened: no cache can answer for it.
    file = os.path.join(step, 'view', 'dp3_zero2', 'rank1',
                        'optimizer.safetensors')
    with pytest.raises(OSError) as error:
        content(file)
    assert content(os.path.join(first, 'model.safetensors'))
    return error.value, content(log).decode(errors='replace')


@pytest.mark.parametrize('damage', ['deleted', 'truncated', 'replaced',
                                    'touched'])
def test_changed_source_is_an_error_for_its_files(ckptfs, source, damage):
    def change(path):
        if damage == 'deleted':
            os.unlink(path)
        elif damage == 'truncated':
            hostile.truncate(path, 1000)
        elif damage == 'replaced':
            shutil.copy(path, path + '.new')
            os.replace(path + '.new', path)
        else:
            hostile.flip(path, os.path.getsize(path) // 2, 3)
    error, log = damaged(ckptfs, source, change)
    assert error.errno in (errno.EIO, errno.ESTALE, errno.ENOENT), error
    assert hostile.zero_file(1) in log, log[-2000:]


def test_a_step_replaced_under_its_name(ckptfs, source, tmp_path):
    """Readers of the old step keep the old bytes, openers get the new ones."""
    ckptfs.adopt(source, 'run')
    _, mount = ckptfs.start()
    file = os.path.join(step_of(mount, 'run'), 'view', VIEW, 'rank0',
                        'optimizer.safetensors')
    old_handle = open(file, 'rb')
    old = old_handle.read()
    other = str(tmp_path / 'other')
    shutil.copytree(checkpoint('zero2'), other)
    os.rename(os.path.join(other, 'global_step5'),
              os.path.join(other, hostile.TAG))
    with open(os.path.join(other, 'latest'), 'w') as f:
        f.write(hostile.TAG)
    ckptfs.run('remove', '--force', f'run/{hostile.TAG}', '--store', ckptfs.store)
    wait_until(lambda: not os.path.exists(file), 'the removal')
    ckptfs.adopt(other, 'run')
    wait_until(lambda: os.path.exists(file), 'the new step')
    new = content(file)
    assert new != old
    for _ in range(3):
        assert os.pread(old_handle.fileno(), len(old), 0) == old
        assert content(file) == new
    old_handle.close()


def test_store_full(tmp_path, source):
    """No space: a clear error, no step, and it works once there is room."""
    small = tmp_path / 'small'
    small.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'none',
                    str(small)], check=True)
    try:
        program = Ckptfs(str(small))
        filler = small / 'filler'
        with open(filler, 'wb', buffering=0) as f:
            try:
                while f.write(b'x' * 4096):
                    pass
            except OSError:
                pass
        done = program.adopt(source, 'run', check=False)
        assert 0 < done.returncode < 126
        assert 'space' in done.stderr.lower(), done.stderr
        filler.unlink()
        assert 'run/' not in program.run('list', '--store', program.store,
                                         check=False).stdout
        copied = program.run('adopt', source, '--copy', '--store',
                             program.store, '--name', 'run', check=False)
        assert 0 < copied.returncode < 126, copied
        assert 'run/' not in program.run('list', '--store', program.store,
                                         check=False).stdout
        program.adopt(source, 'run')
    finally:
        subprocess.run(['umount', '-l', str(small)], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason='needs to become another user')
def test_unreadable_source(tmp_path, source):
    """A user who may not read a source file gets an error that names it."""
    bad = hostile.inside(source, hostile.zero_file(2))
    os.chmod(bad, 0)
    for path in (tmp_path, *tmp_path.parents):
        if path != path.parent and os.stat(path).st_uid == 0:
            os.chmod(path, os.stat(path).st_mode | 0o055)
    store = tmp_path / 'user'
    store.mkdir()
    os.chmod(store, 0o777)
    program = shutil.copy(BIN, tmp_path / 'ckptfs')
    os.chmod(program, 0o755)
    done = subprocess.run(
        ['setpriv', '--reuid=65534', '--regid=65534', '--clear-groups',
         str(program), 'adopt', source, '--store', str(store / 's'),
         '--name', 'run'], capture_output=True, text=True,
        env={**os.environ, 'HOME': str(store)})
    assert 0 < done.returncode < 126, done
    assert hostile.zero_file(2) in done.stderr, done.stderr


def test_nothing_stays_mounted(ckptfs, source):
    ckptfs.adopt(source, 'run')
    process, path = ckptfs.start()
    process.terminate()
    assert process.wait(30) == 0
    assert not is_mounted(path)
