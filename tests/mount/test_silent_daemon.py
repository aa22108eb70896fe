# SPDX-License-Identifier: Apache-2.0
"""A daemon that does not answer holds up no command on its store."""
import json
import os
import re
import signal
import subprocess
import time

import pytest

from daemon import is_mounted


@pytest.fixture
def silent(ckptfs, source):
    """(a mount that answers, one whose daemon is stopped, its pid)"""
    answers, mount = ckptfs.mount(adopt=[source]), ckptfs.mount()
    told = json.loads(ckptfs.run('status', '--json', '--store', ckptfs.store).stdout)
    pid = next(one['pid'] for one in told if one['mountpoint'] == mount)
    os.kill(pid, signal.SIGSTOP)
    yield answers, mount, pid
    os.kill(pid, signal.SIGCONT)


def soon(ckptfs, *words):
    """Returns what a command says, within the time that a greeting and a bit more take."""
    start = time.monotonic()
    done = ckptfs.run(*words, '--store', ckptfs.store, check=False)
    assert time.monotonic() - start < 30, words
    return done


def test_others_go_on_and_say_so(ckptfs, source, silent):
    answers, mount, pid = silent
    step = ckptfs.list()['steps'][0]['step']
    told = f'{mount}: its daemon (pid {pid}) does not answer'
    assert told in soon(ckptfs, 'adopt', str(source), '--name', 'again').stderr
    done = soon(ckptfs, 'switch', step)
    assert done.returncode == 0 and told in done.stderr and f'{answers}: /view' in done.stdout
    done = soon(ckptfs, 'switch', step, '--mountpoint', mount)
    assert done.returncode == 1 and told in done.stderr
    done = soon(ckptfs, 'remove', step)
    assert done.returncode == 7 and told in done.stderr and '--force' in done.stderr
    assert soon(ckptfs, 'remove', '--force', step).returncode == 0


def test_it_is_unmounted(ckptfs, silent):
    _, mount, pid = silent
    done = ckptfs.run('umount', '--lazy', mount, check=False)
    assert done.returncode == 0 and not is_mounted(mount), done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason='copies a mount')
def test_a_copy_in_another_namespace_is_named(ckptfs):
    mount = ckptfs.mount()
    told = json.loads(ckptfs.run('status', '--json', '--store', ckptfs.store).stdout)
    alone = 'findmnt -rno TARGET -t fuse.ckptfs | grep -vFx "$0" | xargs -r -n1 umount -l; echo; exec sleep 60'
    copy = subprocess.Popen(['unshare', '-m', 'sh', '-c', alone, mount], stdout=subprocess.PIPE)
    try:
        assert copy.stdout.readline()
        done = ckptfs.run('umount', mount, check=False)
        assert done.returncode == 0 and not is_mounted(mount), done.stderr
        # Others may have copied all mounts of this moment, too.
        assert re.search(f'{re.escape(mount)}: unmounted here; .*sleep \\(pid {copy.pid}\\).* it in a mount namespace of ',
                         done.stderr), done.stderr
        os.kill(told[0]['pid'], 0)  # it was not waited for
    finally:
        copy.kill()
        copy.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason='binds a mount')
def test_a_bind_mount_beside_it_is_named(ckptfs):
    mount, other = ckptfs.mount(), ckptfs.mountpoint()
    subprocess.run(['mount', '--bind', mount, other], check=True)
    done = ckptfs.run('umount', mount, check=False)
    assert done.returncode == 0 and f'unmounted here; {other} shows the same mount' in done.stderr, done.stderr
    assert os.listdir(other)
    ckptfs.run('umount', other)
