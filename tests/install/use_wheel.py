# SPDX-License-Identifier: Apache-2.0
"""Uses a wheel on a machine that has nothing but Python; try_wheel runs it inside.

Usage: use_wheel.py WHEEL, with /tmp/golden a checkpoint and its truth, and /tmp/torch empty or a
site-packages directory with torch.  Exits non-zero at the first thing that is wrong.
"""
import json
import os
import shutil
import struct
import subprocess
import sys
import time

VENV, STORE, MNT = '/tmp/venv', '/tmp/store', '/tmp/mnt'
CKPTFS, PYTHON = f'{VENV}/bin/ckptfs', f'{VENV}/bin/python'
TENSOR = 'model.embed_tokens.weight'
LIMIT = 60  # seconds from pip to the first tensor


def run(*words, **options):
    """Its standard output; a failure ends all."""
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False, **options)
    if done.returncode != 0:
        sys.exit(f'{" ".join(words)}: exit code {done.returncode}')
    return done.stdout


def tensor(path, name):
    """(dtype, shape, bytes) from a safetensors file, read by hand."""
    with open(path, 'rb') as f:
        size, = struct.unpack('<Q', f.read(8))
        entry = json.loads(f.read(size))[name]
        begin, end = entry['data_offsets']
        f.seek(8 + size + begin)
        return entry['dtype'], entry['shape'], f.read(end - begin)


class Clock:
    """Says how long each part took."""

    def __init__(self):
        self.start = self.last = time.monotonic()

    def tell(self, what):
        """Seconds since the one before."""
        now = time.monotonic()
        print(f'{now - self.last:7.2f} s  {what}', flush=True)
        self.last = now

    def whole(self):
        """Seconds since the start."""
        return self.last - self.start


def install(wheel, clock):
    """A virtual environment without network, with the wheel alone."""
    for compiler in 'cc', 'gcc', 'g++', 'clang':
        if shutil.which(compiler):
            sys.exit(f'this machine has a compiler: {compiler}')
    run('python3', '-m', 'venv', VENV)
    clock.tell('python3 -m venv')
    run(f'{VENV}/bin/pip', 'install', '-q', '--no-index', wheel)
    clock.tell('pip install')


def read_first(clock):
    """A mount, and a tensor that equals the truth to the last bit."""
    run(CKPTFS, 'mount', '--mkdir', '--store', STORE, '--adopt', '/tmp/golden/ckpt', MNT)
    clock.tell('ckptfs mount')
    got = tensor(f'{MNT}/view/tp1_fp32/rank0/model.safetensors', TENSOR)
    clock.tell(f'read {TENSOR}: {got[0]}{got[1]}')
    if got != tensor('/tmp/golden/truth.safetensors', f'model/{TENSOR}'):
        sys.exit(f'{TENSOR} is not the truth')
    print(f'{clock.whole():7.2f} s  from pip to the first tensor', flush=True)
    if clock.whole() > LIMIT:
        sys.exit(f'more than {LIMIT} s')


def look_around(clock):
    """The texts are there, and the program is found by nothing but the wheel."""
    if '--adopt' not in run(CKPTFS, 'help', 'mount'):
        sys.exit('no help')
    for text in 'man/man1/ckptfs.1', 'bash-completion/completions/ckptfs', 'doc/ckptfs/LICENSE':
        if not os.path.exists(f'{VENV}/share/{text}'):
            sys.exit(f'no share/{text}')
    link = '/usr/sbin/mount.ckptfs'
    os.symlink(CKPTFS, link)
    run('mount', '-t', 'ckptfs', STORE, '/mnt')
    if not os.listdir('/mnt/run'):
        sys.exit('mount(8) shows no run')
    run('umount', '/mnt')
    os.remove(link)
    clock.tell('help, texts, mount(8) with a link to the program')


def snapshot(clock):
    """A job saves by a snapshot; another one goes on from it."""
    if not os.listdir('/tmp/torch'):
        print('no torch: no snapshot')
        return
    env = {**os.environ, 'PYTHONPATH': '/tmp/torch'}
    del env['PATH']
    for part in 'save', 'resume':
        print(run(PYTHON, '-B', '/tmp/here/snapshot_job.py', part, STORE, env=env), end='')
        clock.tell(f'a job of torch: {part}')


def main(wheel):
    """All of it."""
    clock = Clock()
    install(wheel, clock)
    read_first(clock)
    look_around(clock)
    snapshot(clock)
    run(CKPTFS, 'umount', MNT)
    clock.tell('umount')
    print('1 passed, 0 failed')


if __name__ == '__main__':
    main(sys.argv[1])
