# SPDX-License-Identifier: Apache-2.0
"""`cmake --install` into an empty prefix: it runs from there, and shells and man find the rest."""
import os
import pty
import re
import select
import shutil
import subprocess
import time

import pytest

from conftest import GOLDEN
from daemon import BIN, is_mounted

INSTALLED = {
    'bin/ckptfs', 'sbin/mount.ckptfs', 'share/man/man1/ckptfs.1', 'share/doc/ckptfs/ckptfs.1.md', 'share/doc/ckptfs/LICENSE', 'share/doc/ckptfs/recipes.md',
    'share/bash-completion/completions/ckptfs', 'share/zsh/site-functions/_ckptfs',
    'share/fish/vendor_completions.d/ckptfs.fish'}


@pytest.fixture(scope='module')
def prefix(tmp_path_factory):
    """An installation, under a path with a space."""
    if shutil.which('cmake') is None:
        pytest.skip('no cmake')
    into = tmp_path_factory.mktemp('pre fix')
    subprocess.run(['cmake', '--install', os.path.dirname(os.path.abspath(BIN)), '--prefix', into], check=True,
                   capture_output=True)
    return into


@pytest.fixture
def env(prefix):
    """The installed program is the one that is found."""
    return {**os.environ, 'PATH': f"{prefix}/bin:{os.environ['PATH']}", 'LC_ALL': 'C.UTF-8'}


@pytest.fixture
def with_steps(env, tmp_path):
    """A default store with steps in two runs."""
    env['CKPTFS_STORE'] = str(tmp_path / 'store')
    for run in 'first', 'second':
        subprocess.run(['ckptfs', 'adopt', '--name', run, GOLDEN], check=True, capture_output=True, env=env)
    return env


def test_all_of_it_is_there_and_nothing_else(prefix):
    found = {str(p.relative_to(prefix)) for p in prefix.rglob('*') if p.is_file()}
    assert found == INSTALLED
    assert 'Apache License' in (prefix / 'share/doc/ckptfs/LICENSE').read_text()


def test_the_program_runs(prefix, env, ckptfs, tmp_path):
    program, store, mnt = prefix / 'bin/ckptfs', tmp_path / 'store', tmp_path / 'mnt'

    def run(*words):
        return subprocess.run([program, *words], check=True, capture_output=True, text=True, env=env, cwd='/')
    run('adopt', '--store', store, '--name', 'run', GOLDEN)
    run('mount', '--store', store, '--mkdir', mnt)
    try:
        assert os.listdir(mnt / 'view/tp2/rank0')
    finally:
        run('umount', mnt)
    assert not is_mounted(str(mnt))


def test_the_helper_of_mount8(prefix, ckptfs):
    """By the words that `mount -t ckptfs` gives its helper."""
    helper, mnt = prefix / 'sbin/mount.ckptfs', ckptfs.mountpoint()
    subprocess.run([helper, ckptfs.store, mnt, '-o', 'rw,allow_other'], check=True, env={}, cwd='/')
    assert is_mounted(mnt)
    ckptfs.umount(mnt)


def test_man_displays_the_page(prefix, env):
    if shutil.which('man') is None:
        pytest.skip('no man')
    page = subprocess.run(['man', '--warnings', '-l', prefix / 'share/man/man1/ckptfs.1'], check=True, text=True,
                          capture_output=True, env={**env, 'MANPAGER': 'cat', 'MANWIDTH': '80'})
    assert 'NAME' in page.stdout and 'ckptfs - show training checkpoints' in page.stdout
    assert not page.stderr
    assert all(len(line) <= 132 for line in page.stdout.splitlines())


def test_bash_finds_its_completions(prefix, env):
    """By the rule of bash-completion: share/bash-completion/completions beside the program's bin."""
    script = 'source "$1/share/bash-completion/completions/ckptfs" && complete -p ckptfs'
    done = subprocess.run(['bash', '-c', script, 'bash', prefix], check=True, capture_output=True, text=True, env=env)
    assert '-F _ckptfs ckptfs' in done.stdout


def test_fish_completes(prefix, with_steps):
    env = with_steps
    if shutil.which('fish') is None:
        pytest.skip('no fish')

    def completed(line):
        script = f"set -p fish_complete_path '{prefix}/share/fish/vendor_completions.d'; complete -C '{line}'"
        done = subprocess.run(['fish', '--no-config', '-c', script], check=True, capture_output=True, text=True,
                              env=env, cwd=prefix)
        return [row.split('\t')[0] for row in done.stdout.splitlines()]
    assert completed('ckptfs stat') == ['stats', 'status']
    assert completed('ckptfs adopt --li') == ['--link']
    assert completed('ckptfs help dif') == ['diff']
    assert completed('ckptfs completions ') == ['bash', 'fish', 'zsh']
    assert completed('ckptfs mount --mode str') == ['stream']
    assert completed('ckptfs list ') == completed('ckptfs list --store x ') == ['first', 'second']
    assert completed('ckptfs gc --run ') == ['first', 'second'] and completed('ckptfs list first ') == []
    assert completed('ckptfs resolve second ') == ['global_step3'] and completed('ckptfs map ') == []
    assert completed('ckptfs switch ') == ['first/global_step3', 'second/global_step3']
    assert {'first', 'second/global_step3', 'bin/'} <= set(completed('ckptfs diff first '))
    assert 'bin/' in completed('ckptfs export first tp1 ') and 'first' not in completed('ckptfs export first tp1 ')


class Zsh:
    """An interactive zsh, which says what it has made of a line."""

    def __init__(self, prefix, env, tmp_path):
        pid, self.fd = pty.fork()
        if pid == 0:
            os.execvpe('zsh', ['zsh', '-f', '-i'], {**env, 'TERM': 'dumb', 'PS1': '', 'HOME': str(tmp_path)})
        self.pid = pid
        self.said('unsetopt zle_bracketed_paste beep; stty -echo; '
                  f"fpath=('{prefix}/share/zsh/site-functions' $fpath); autoload -Uz compinit; compinit -u -d '{tmp_path}/dump'; "
                  'tell() { print -r -- "<$BUFFER>"; BUFFER= }; zle -N tell; bindkey "^X" tell; print "<re""ady>"\n', 'ready')

    def said(self, typed, expected='[^<>]*'):
        """Returns what stands in <> next."""
        os.write(self.fd, typed.encode())
        text, end = '', time.monotonic() + 30
        while time.monotonic() < end:
            if select.select([self.fd], [], [], 1)[0]:
                text += os.read(self.fd, 4096).decode(errors='replace')
            found = re.search(f'<({expected})>', text)
            if found:
                return found[1]
        raise AssertionError(text)

    def close(self):
        """It ends with its terminal."""
        os.close(self.fd)
        os.waitpid(self.pid, 0)


def test_zsh_completes(prefix, with_steps, tmp_path):
    env = with_steps
    if shutil.which('zsh') is None:
        pytest.skip('no zsh')
    zsh = Zsh(prefix, env, tmp_path)
    try:
        for typed, line in [('ckptfs expl', 'ckptfs explain '), ('ckptfs adopt --li', 'ckptfs adopt --link '),
                            ('ckptfs help dif', 'ckptfs help diff '), ('ckptfs completions fi', 'ckptfs completions fish '),
                            ('ckptfs mount --mode str', 'ckptfs mount --mode stream '),
                            ('ckptfs list fi', 'ckptfs list first '), ('ckptfs gc --run s', 'ckptfs gc --run second '),
                            ('ckptfs resolve --json second g', 'ckptfs resolve --json second global_step3 '),
                            ('ckptfs switch se', 'ckptfs switch second/global_step3 '),
                            ('ckptfs diff first second/', 'ckptfs diff first second/global_step3 '),
                            ('ckptfs list second/', 'ckptfs list second/'), ('ckptfs warm fi', 'ckptfs warm fi')]:
            assert zsh.said(typed + '\t\x18') == line
    finally:
        zsh.close()
