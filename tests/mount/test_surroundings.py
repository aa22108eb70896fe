# SPDX-License-Identifier: Apache-2.0
"""Commands in odd surroundings: closed descriptors, full disks, no descriptors left."""
import json
import os
import resource
import subprocess
import tempfile
import time

import pytest

from daemon import BIN, Ckptfs, is_mounted, public_program


@pytest.mark.parametrize('words', [['list'], ['info', 'run7/latest', '--json'],
                                   ['--help'], ['--version']])
def test_output_that_is_lost_is_a_failure(ckptfs, source, words):
    ckptfs.adopt(source)
    store = [] if words[0].startswith('-') else ['--store', ckptfs.store]
    with open('/dev/full', 'w') as full:
        done = subprocess.run([BIN, *words, *store], stdout=full, stderr=subprocess.PIPE,
                              text=True, timeout=60)
    assert done.returncode == 1
    assert 'standard output' in done.stderr


@pytest.mark.parametrize('closed', ['<&-', '<&- >&-', '<&- >&- 2>&-', '>&- 2>&-'])
def test_a_mount_without_standard_files(ckptfs, source, closed):
    ckptfs.adopt(source)
    path = ckptfs.mountpoint()
    command = f'exec "$@" {closed}'
    done = subprocess.run(['sh', '-c', command, 'sh', BIN, 'mount', '--store', ckptfs.store,
                           *ckptfs.reserve, path], timeout=60)
    assert done.returncode == 0
    assert is_mounted(path)
    pid, = ckptfs.running()
    for number in range(3):
        assert os.readlink(f'/proc/{pid}/fd/{number}') == '/dev/null'
    ckptfs.umount(path)


def test_a_closed_output_is_a_failure(ckptfs, source):
    ckptfs.adopt(source)
    done = subprocess.run(['sh', '-c', 'exec "$@" >&-', 'sh', BIN, 'list', '--store',
                           ckptfs.store], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and 'standard output' in done.stderr


@pytest.mark.skipif('undefined' in os.environ.get('CKPTFS_SANITIZE', ''),
                    reason='its vptr check opens a pipe, and ends the process without one')
def test_the_daemon_answers_after_descriptors_ran_out(ckptfs, source):
    ckptfs.mount(adopt=[source])
    words = [BIN, 'status', '--json', '--store', ckptfs.store]
    pid, = ckptfs.running()
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    # More than it has threads: those may have taken their descriptors already.
    asking = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    time.sleep(0.5)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    answers = [json.loads(process.communicate(timeout=30)[0] or '[]') for process in asking]
    assert any(answer and answer[0]['pid'] == pid for answer in answers)
    assert json.loads(subprocess.run(words, capture_output=True, timeout=30).stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason='becomes another user')
def test_a_mount_of_somebody_else_is_not_permitted(source):
    with tempfile.TemporaryDirectory(dir='/tmp') as folder:
        program = public_program(folder)
        c = Ckptfs(folder)
        try:
            mount = c.mount(adopt=[source])
            for words in (['umount', mount], ['umount', '--lazy', mount],
                          ['status', '--mountpoint', mount], ['warm', 'tp1', '--mountpoint', mount]):
                done = subprocess.run([program, *words], user=65534, group=65534, extra_groups=[],
                                      capture_output=True, text=True, timeout=60)
                assert done.returncode == 6 and 'user 0 mounted it' in done.stderr
            assert is_mounted(mount)
        finally:
            c.close()


@pytest.mark.skipif(os.geteuid() != 0, reason='takes a capability away')
@pytest.mark.parametrize('missing, wrapper', [
    ('CAP_SYS_ADMIN', ['setpriv', '--bounding-set', '-sys_admin']),
    ('/dev/fuse', ['unshare', '-m', 'sh', '-c', 'mount -t tmpfs none /dev && touch /dev/null && exec "$@"', 'sh'])])
def test_where_fuse_is_missing_mount_says_what_a_container_needs(ckptfs, source, missing, wrapper):
    def run(*words):
        return subprocess.run([*wrapper, BIN, *map(str, words)], capture_output=True, text=True, timeout=60)
    done = run('mount', '--store', ckptfs.store, '--adopt', source, ckptfs.mountpoint())
    assert done.returncode != 0 and f'does not have {missing};' in done.stderr, done.stderr
    for word in ('--device /dev/fuse --cap-add SYS_ADMIN', '`ckptfs export`', '`ckptfs read`', 'ckptfs://'):
        assert word in done.stderr
    # The commands that it names work there.
    out = os.path.join(ckptfs.folder, 'out')
    assert run('export', '--store', ckptfs.store, source, 'tp1/rank0', out).returncode == 0 and os.listdir(out)
