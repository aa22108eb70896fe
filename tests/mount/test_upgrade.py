# SPDX-License-Identifier: Apache-2.0
"""`ckptfs upgrade`: another program serves a mount, and whoever has files open does not notice; a
daemon that was killed is started again with its mount by a service manager."""
import hashlib
import mmap
import os
import shutil
import signal
import subprocess
import threading

import pytest

import daemon
from daemon import wait_until
from service_manager import ServiceManager

RANK = 'view/tp1/rank0'


def files_of(mount):
    """Path below the mount and digest of every file of two layouts, and of the step's own."""
    found = {}
    step = os.path.dirname(os.path.realpath(f'{mount}/view'))
    for top in (f'{mount}/view/tp1', f'{mount}/view/dp2_zero1', f'{step}/source'):
        for folder, _, names in os.walk(top):
            for name in names:
                path = os.path.join(folder, name)
                with open(path, 'rb') as f:
                    found[os.path.relpath(path, mount)] = hashlib.sha256(f.read()).hexdigest()
    assert len(found) > 10
    return found


def upgrade(ckptfs, mount, *more, check=True):
    """Has the program under test, or another one, serve the mount."""
    return ckptfs.run('upgrade', '--store', ckptfs.store, '--mountpoint', mount, *more, check=check)


@pytest.mark.parametrize('mode', ['stream', 'materialise', 'direct'])
def test_open_files_go_on(ckptfs, source, mode):
    mount = ckptfs.mount('--mode', mode, adopt=[source])
    truth = files_of(mount)
    step = os.path.dirname(os.path.realpath(f'{mount}/view'))
    names = [f'{mount}/{RANK}/model.pt', f'{mount}/{RANK}/optimizer.pt',
             *(os.path.join(f'{step}/source', n, m) for n in os.listdir(f'{step}/source')
               if os.path.isdir(f'{step}/source/{n}') for m in os.listdir(f'{step}/source/{n}'))]
    wanted = {}
    for name in names:
        with open(name, 'rb') as f:
            wanted[name] = f.read()
    opened = {name: open(name, 'rb', buffering=0) for name in names}
    mapped = {name: mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) for name, f in opened.items()}
    inodes = {name: os.stat(name).st_ino for name in names}
    begun = {name: f.read(4096) for name, f in opened.items()}
    daemon_pid = ckptfs.running()
    folder = os.open(f'{mount}/{RANK}', os.O_RDONLY | os.O_DIRECTORY)
    # The kernel drops what it has read of files that are open: only the daemon can answer from here on.
    for f in opened.values():
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for _ in range(2):
        assert 'serves it now' in upgrade(ckptfs, mount).stdout
    assert ckptfs.running() == daemon_pid
    for name, f in opened.items():
        assert begun[name] + f.read() == wanted[name], name
        assert bytes(mapped[name]) == wanted[name], name
        assert os.fstat(f.fileno()).st_ino == os.stat(name).st_ino == inodes[name]
        with open(name, 'rb') as again:  # beside the open that is older than the program
            assert again.read() == wanted[name], name
    assert sorted(os.listdir(folder)) == sorted(os.listdir(f'{mount}/{RANK}'))
    os.close(folder)
    for name, f in opened.items():
        mapped[name].close()
        f.close()
    assert files_of(mount) == truth
    ckptfs.umount(mount)


def test_readers_never_see_it(ckptfs, source):
    """They open, list and read all the time."""
    mount = ckptfs.mount('--mode', 'stream', adopt=[source])
    truth = files_of(mount)
    done, failed, rounds = threading.Event(), [], [0]

    def read():
        while not done.is_set():
            try:
                if files_of(mount) != truth:
                    failed.append('other bytes')
            except OSError as error:
                failed.append(repr(error))
            rounds[0] += 1
    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(8):
            before = rounds[0]
            upgrade(ckptfs, mount)
            wait_until(lambda least=before + 3: rounds[0] >= least, 'a round')
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert not failed


def test_the_view_stays(ckptfs, source, tmp_path):
    other = shutil.copytree(source, tmp_path / 'other')
    mount = ckptfs.mount('--run', 'run7', adopt=[source, other])
    ckptfs.run('switch', 'other/latest', '--store', ckptfs.store)
    shown = os.readlink(f'{mount}/view')
    assert shown.startswith('run/other/')
    upgrade(ckptfs, mount)
    assert os.readlink(f'{mount}/view') == shown


def test_another_program(ckptfs, source, tmp_path):
    """The file that served first may be gone."""
    programs = [shutil.copy(daemon.BIN, tmp_path / name) for name in ('first', 'second')]
    mount = ckptfs.mountpoint()
    subprocess.run([programs[0], 'mount', '--store', ckptfs.store, *ckptfs.reserve, source, mount],
                   check=True)
    truth = files_of(mount)
    os.unlink(programs[0])
    with open(f'{mount}/{RANK}/model.pt', 'rb', buffering=0) as f:
        half = f.read(1000)
        upgrade(ckptfs, mount, '--program', programs[1])
        [pid] = [p for p in map(int, filter(str.isdigit, os.listdir('/proc')))
                 if os.path.exists(f'/proc/{p}/exe')
                 and os.path.realpath(f'/proc/{p}/exe') == str(programs[1])]
        assert pid
        rest = f.read()
    assert hashlib.sha256(half + rest).hexdigest() == truth[f'{RANK}/model.pt']
    assert files_of(mount) == truth
    ckptfs.umount(mount)
    wait_until(lambda: not os.path.exists(f'/proc/{pid}'), 'the end of the daemon')


@pytest.mark.parametrize('program', ['missing', 'text', 'older', 'endless', 'another'])
def test_a_program_that_cannot(ckptfs, source, tmp_path, program):
    """The one that serves goes on."""
    mount = ckptfs.mount(adopt=[source])
    path = tmp_path / program
    if program != 'missing':
        path.write_text({'text': 'nothing', 'older': '#!/bin/sh\nexit 2\n',
                         'another': '#!/bin/sh\necho ckptfs 1.0\n',
                         'endless': '#!/bin/sh\nexec sleep 1000\n'}[program])
        path.chmod(0o644 if program == 'text' else 0o755)
    refused = upgrade(ckptfs, mount, '--program', path, check=False)
    assert refused.returncode != 0
    assert str(path) in refused.stderr
    assert files_of(mount)
    upgrade(ckptfs, mount)


def test_a_step_that_is_removed_beside(ckptfs, source):
    mount = ckptfs.mount('--mode', 'stream', adopt=[source])
    truth = files_of(mount)
    tag = os.listdir(f'{mount}/run/run7/step')[0]
    with open(f'{mount}/{RANK}/model.pt', 'rb', buffering=0) as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        ckptfs.run('remove', '--force', f'run7/{tag}', '--store', ckptfs.store)
        upgrade(ckptfs, mount)
        with pytest.raises(OSError, match='Stale file handle'):
            f.read()
        assert os.listdir(f'{mount}/run') == []
        ckptfs.adopt(source, 'run7')
    assert files_of(mount) == truth


def test_a_killed_daemon_is_started_again(ckptfs, source, tmp_path):
    """The mount stays; files are found again by their paths, and the kernel goes on with what it reads
    by itself."""
    manager = ServiceManager(tmp_path)
    mount = ckptfs.mountpoint()
    command = [daemon.BIN, 'mount', '--foreground', '--store', ckptfs.store, *ckptfs.reserve, '--mode',
               'direct', source, mount]

    def started():
        process = manager.start(command)
        ckptfs.processes.append(process)
        wait_until(lambda: ckptfs.run('status', '--store', ckptfs.store, '--mountpoint', mount,
                                      check=False).returncode == 0, 'its answer', process)
        return process
    process = started()
    truth = files_of(mount)
    step = os.path.dirname(os.path.realpath(f'{mount}/view'))
    [direct] = [os.path.join(folder, n) for folder, _, names in os.walk(f'{step}/source')
                for n in names if n == 'mp_rank_00_model_states.pt']
    assert {'mount.device', 'mount.state'} <= set(manager.hear())
    passed, streamed = open(direct, 'rb', buffering=0), open(f'{mount}/{RANK}/model.pt', 'rb', buffering=0)
    os.posix_fadvise(streamed.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    process.send_signal(signal.SIGKILL)
    process.wait()
    asked = []
    waiting = threading.Thread(target=lambda: asked.append(os.listdir(f'{mount}/run/run7/step')))
    waiting.start()  # the kernel has nobody to ask
    process = started()
    waiting.join(60)
    assert asked and asked[0] == os.listdir(f'{mount}/run/run7/step')
    try:
        assert hashlib.sha256(passed.read()).hexdigest() == truth[os.path.relpath(direct, mount)]
        with pytest.raises(OSError, match='Stale file handle'):
            streamed.read()
    finally:
        passed.close()
        streamed.close()
    assert files_of(mount) == truth
    ckptfs.umount(mount)
    process.wait(60)
    assert not [name for name in manager.hear() if name.startswith('mount.')]
    manager.close()
