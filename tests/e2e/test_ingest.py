# SPDX-License-Identifier: Apache-2.0
"""`ckptfs ingest`: frameworks and tools save into a mount, and whole saves are steps.

Each save is compared with itself: its files are copied to a plain directory and adopted from there
by a store of its own, and every file of the views is the same.  CKPTFS_LONG=1: more kinds, more
kills.
"""
import errno
import filecmp
import json
import mmap
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

import pytest
import torch
from daemon import BIN, Ckptfs, checkpoint, is_mounted, public_program, run_ranks, wait_until
from ports import held_port
from safetensors.torch import load_file
from test_follow import DIES, following, save_as, steps
from zygote import Zygote

HERE = os.path.dirname(os.path.abspath(__file__))
LONG = bool(os.environ.get('CKPTFS_LONG'))
ZYGOTE = Zygote(['torch', 'torch.distributed.checkpoint', 'torch.distributed.fsdp', 'deepspeed',
                 'transformers.models.llama.modeling_llama'])
ROOT = os.geteuid() == 0


@pytest.fixture(scope='module', autouse=True)
def end_of_zygote():
    """It waits for programs to start."""
    yield
    ZYGOTE.close()


@pytest.fixture
def public():
    """A store, mounts and a folder where everybody may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        program = Ckptfs(path)
        yield program, pathlib.Path(path)
        program.close()


def ingest(ckptfs, directory, *options):
    """The mount into which jobs save."""
    mount = ckptfs.mountpoint()
    ckptfs.run('ingest', '--store', ckptfs.store, *options, directory, mount)
    return mount


def status_of(mount):
    """The lines of .status."""
    with open(os.path.join(mount, '.status'), encoding='utf-8') as f:
        return f.read().splitlines()


def mirror(ckptfs):
    """What the status says of the mirror."""
    told = json.loads(ckptfs.run('status', '--store', ckptfs.store, '--json').stdout)
    return next(one['status']['ingest'] for one in told if 'ingest' in one['status'])


def files_below(folder):
    """{relative path: path}; what links lead to is listed where it is."""
    return {os.path.relpath(os.path.join(top, name), folder): os.path.join(top, name)
            for top, _, names in os.walk(folder) for name in names}


def compare_with_plain(ckptfs, directory, run, step, tmp_path, layouts=('dp1', 'tp2')):
    """The views of a step are those of the same files in a plain directory."""
    plain = tmp_path / 'plain' / os.path.basename(directory)
    shutil.copytree(directory, plain, symlinks=True)
    other = Ckptfs(str(tmp_path / 'plain'))
    try:
        other.adopt(plain)
        mine, theirs = ckptfs.mount(), other.mount()
        compared = 0
        for layout in layouts:
            below = os.path.join('run', run, 'step', step, 'view', layout)
            got, want = (files_below(os.path.join(top, below)) for top in (mine, theirs))
            assert got.keys() == want.keys()
            for name in want:
                if name.endswith('info.json'):  # it names the store's paths
                    continue
                assert filecmp.cmp(got[name], want[name], shallow=False), (layout, name)
                compared += 1
        assert compared
    finally:
        other.close()


def run_job(kind, folder, world, log):
    """A training that saves into the folder, to its end."""
    with held_port() as port:
        run_ranks([[sys.executable, os.path.join(HERE, 'ingest_jobs.py'), kind, folder, str(rank), str(world), str(port)]
                   for rank in range(world)], log, 300, ZYGOTE.start)


COPIES = {
    'cp': 'cp -r {0}/. {1}',
    'rsync': 'rsync -a {0}/ {1}/',
    'tar': 'mkdir -p {1} && tar c -C {0} . | tar x -C {1}',
}


@pytest.mark.parametrize('tool', COPIES)
def test_a_copy_into_the_mount_is_a_step(ckptfs, tmp_path, tool):
    if shutil.which(tool) is None:
        pytest.skip(f'{tool} is not installed')
    directory = tmp_path / 'saves'
    mount = ingest(ckptfs, directory)
    subprocess.run(COPIES[tool].format(checkpoint('zero2'), mount), shell=True, check=True)
    assert not subprocess.run(['diff', '-r', checkpoint('zero2'), mount], capture_output=True, check=False).stdout
    wait_until(lambda: steps(ckptfs) == {'saves/global_step5'}, 'the step')
    # Nothing orders a copy: it may be one that nothing proves to be over.
    wait_until(lambda: status_of(mount)[0].startswith('committed') and 'saves/global_step5' in status_of(mount)[0], 'its line')
    if tool == 'cp':
        compare_with_plain(ckptfs, directory, 'saves', 'global_step5', tmp_path)


JOBS = [('zero2', 2, 'global_step2'), ('zero3', 2, 'global_step2'), ('dcp', 2, 'step_1'),
        ('pretrained', 1, 'final'), ('trainer', 1, 'checkpoint-2'), ('megatron', 2, 'iter_0000007')]
LONGER = [('zero2', 3, 'global_step2'), ('dcp', 3, 'step_1')]


@pytest.mark.parametrize('kind, world, step', JOBS + LONGER * LONG)
def test_a_framework_saves_into_the_mount(ckptfs, tmp_path, kind, world, step):
    directory = tmp_path / 'saves'
    mount = ingest(ckptfs, directory)
    run_job(kind, mount, world, tmp_path / 'log')
    run = 'final' if kind == 'pretrained' else 'saves'  # a model alone is a run
    wait_until(lambda: f'{run}/{step}' in steps(ckptfs), 'the step')
    told = mirror(ckptfs)
    if told['passthrough']:
        assert told['write_requests'] == 0 and told['not_passed_through'] == 0
    compare_with_plain(ckptfs, directory, run, step, tmp_path)


def test_a_job_that_is_killed_leaves_no_step(ckptfs, tmp_path):
    """Each step that there is is the truth, whenever the job dies."""
    truth, directory = tmp_path / 'truth', tmp_path / 'saves'
    truth.mkdir()
    mount = ingest(ckptfs, directory, '--link')
    chance = random.Random(int(os.environ.get('CKPTFS_SEED', '1')))
    for life in range(20 if LONG else 3):
        output = os.path.join(mount, f'life{life}')
        (truth / str(life)).mkdir()
        job = subprocess.Popen([sys.executable, os.path.join(HERE, 'rotating_job.py'), output, str(truth / str(life)),
                                '100', '0.2', '3'], stdout=subprocess.PIPE)
        job.stdout.readline()  # the first is saved
        time.sleep(chance.uniform(0, 2))
        job.send_signal(signal.SIGKILL)
        job.wait()
    time.sleep(3)  # what is whole is taken after a second
    view = ckptfs.mount()
    found = steps(ckptfs)
    for name in found:
        run, step = name.split('/')
        number = int(step.rsplit('-', 1)[1])
        assert number % DIES
        got = load_file(os.path.join(view, 'run', run, 'step', step, 'view', 'tp1', 'rank0', 'model.safetensors'))
        want = load_file(truth / run.removeprefix('life') / f'{number}.safetensors')
        assert got.keys() == want.keys() and all(torch.equal(got[key], value) for key, value in want.items()), name
    assert any('in progress' in line or 'not taken' in line for line in status_of(mount)) or found


def test_two_jobs_save_at_once(ckptfs, tmp_path):
    directory = tmp_path / 'saves'
    mount = ingest(ckptfs, directory)
    jobs = [save_as('zero2', os.path.join(mount, name), 'global_step5') for name in ('a', 'b')]
    for _ in zip(*jobs):
        assert not steps(ckptfs)
    for job in jobs:
        for _ in job:
            pass
    wait_until(lambda: steps(ckptfs) == {'a/global_step5', 'b/global_step5'}, 'both')


@pytest.mark.skipif(not ROOT, reason='becomes another user')
def test_another_users_files_are_that_users(public):
    ckptfs, folder = public
    directory = folder / 'saves'
    directory.mkdir()
    os.chmod(directory, 0o1777)
    mount = ingest(ckptfs, directory)

    def as_user(uid, *words):
        return subprocess.run(words, user=uid, group=uid, extra_groups=[4800], capture_output=True, text=True, umask=0o027)
    source = folder / 'source'
    shutil.copytree(checkpoint('zero2'), source)
    assert as_user(4711, 'cp', '-r', source, f'{mount}/job').returncode == 0
    for top, folders, names in os.walk(directory / 'job'):
        for name in (*folders, *names):
            info = os.lstat(os.path.join(top, name))
            assert (info.st_uid, info.st_gid) == (4711, 4711) and not info.st_mode & 0o007
    wait_until(lambda: steps(ckptfs) == {'job/global_step5'}, 'the step')
    wait_until(lambda: any('committed' in line for line in status_of(mount)), 'its line')
    # Others see nothing of it, and change nothing.
    assert 'job' in as_user(4711, 'cat', f'{mount}/.status').stdout
    assert 'job' not in as_user(4712, 'cat', f'{mount}/.status').stdout
    for words in (['ls', f'{mount}/job'], ['rm', '-rf', f'{mount}/job'], ['touch', f'{mount}/job/x'],
                  ['mv', f'{mount}/job', f'{mount}/mine']):
        assert as_user(4712, *words).returncode != 0, words
    assert as_user(4711, 'rm', '-r', f'{mount}/job').returncode == 0


def acl(*entries):
    """The attribute of an ACL: (tag, permissions, number) each; in the kernel's order."""
    return struct.pack('<I', 2) + b''.join(struct.pack('<HHI', *entry) for entry in entries)


ANY = 0xffffffff  # no number


@pytest.mark.skipif(not ROOT, reason='becomes another user')
def test_acls_umasks_and_set_user_id_bits_are_the_disks(public):
    ckptfs, folder = public
    directory = folder / 'saves'
    mount = ingest(ckptfs, directory)
    os.chmod(mount, 0o755)
    file = os.path.join(mount, 'f')

    def as_user(uid, gid, line):
        return subprocess.run(['sh', '-c', line], user=uid, group=gid, extra_groups=[], capture_output=True).returncode
    with open(file, 'w', encoding='ascii') as f:
        f.write('x')
    os.chown(file, 0, 4713)
    # The user 4711 by name; the group itself nothing, though the mode's bits say so (they are the mask).
    named = acl((1, 6, ANY), (2, 6, 4711), (4, 0, ANY), (16, 6, ANY), (32, 0, ANY))
    try:
        os.setxattr(file, 'system.posix_acl_access', named)
    except OSError as error:
        pytest.skip(f'the disk has no ACLs: {error}')
    assert os.getxattr(directory / 'f', 'system.posix_acl_access') == named and os.stat(file).st_mode & 0o777 == 0o660
    assert as_user(4711, 4711, f'cat {file} && echo y >> {file}') == 0
    assert as_user(4712, 4712, f'cat {file}') != 0 and as_user(4714, 4713, f'cat {file}') != 0
    # A default ACL takes the place of the umask.
    os.mkdir(os.path.join(mount, 'd'))
    os.setxattr(os.path.join(mount, 'd'), 'system.posix_acl_default', acl((1, 7, ANY), (4, 7, ANY), (32, 5, ANY)))
    before = os.umask(0o077)
    try:
        os.mkdir(os.path.join(mount, 'd', 'mirrored'))
        os.mkdir(directory / 'd' / 'plain')
        os.mkdir(os.path.join(mount, 'closed'))
    finally:
        os.umask(before)
    assert os.stat(directory / 'd' / 'mirrored').st_mode == os.stat(directory / 'd' / 'plain').st_mode
    assert os.stat(directory / 'closed').st_mode & 0o777 == 0o700
    # Another user's write clears the bit, though root opened the file first.
    with open(os.path.join(mount, 's'), 'wb') as f:
        os.fchmod(f.fileno(), 0o4777)
        assert as_user(4712, 4712, f'echo y >> {mount}/s') == 0
        assert os.stat(directory / 's').st_mode & 0o7777 == 0o777


@pytest.mark.skipif(not ROOT, reason='becomes another user')
def test_without_root_it_serves_its_own_user():
    if os.stat('/dev/fuse').st_mode & 0o006 != 0o006:
        pytest.skip('/dev/fuse is for root alone')
    with tempfile.TemporaryDirectory(dir='/tmp') as folder:
        program, mount = public_program(folder), os.path.join(folder, 'mnt')
        shutil.copytree(checkpoint('zero2'), os.path.join(folder, 'source'))
        os.mkdir(mount)
        for path in (folder, mount):
            os.chown(path, 65534, 65534)

        def run(*words):
            return subprocess.run(words, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, timeout=60)
        store = os.path.join(folder, 'store')
        done = run(program, 'ingest', '--store', store, os.path.join(folder, 'saves'), mount)
        assert done.returncode == 0 and 'kernel passthrough needs root' in done.stderr, done.stderr
        try:
            assert run('cp', '-r', os.path.join(folder, 'source', '.'), mount).returncode == 0
            assert run('diff', '-r', os.path.join(folder, 'source'), mount).returncode == 0
            wait_until(lambda: 'saves/global_step5' in run(program, 'list', '--store', store).stdout, 'the step')
            assert not os.path.exists(os.path.join(mount, 'latest'))  # root is somebody else
        finally:
            assert run(program, 'umount', mount).returncode == 0


def test_a_writer_learns_that_the_disk_is_full(ckptfs, tmp_path):
    if not ROOT:
        pytest.skip('mounts a filesystem')
    directory = tmp_path / 'saves'
    directory.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1M', 'none', directory], check=True)
    try:
        mount = ingest(ckptfs, directory)
        done = subprocess.run(['dd', 'if=/dev/zero', f'of={mount}/f', 'bs=64K', 'count=64'], capture_output=True,
                              text=True, check=False)
        assert done.returncode != 0 and os.strerror(errno.ENOSPC) in done.stderr
        assert os.path.getsize(directory / 'f') == os.path.getsize(os.path.join(mount, 'f')) <= 1 << 20
        ckptfs.umount(mount)
    finally:
        subprocess.run(['umount', '-l', directory], check=True)


def write_in_each_way(folder):
    """{name: bytes that the file has}, written in all ways that programs have."""
    want = {}

    def keep(name, value):
        want[name] = value
        return os.path.join(folder, name)
    with open(keep('write', b'a' * 10000 + b'b'), 'wb') as f:
        f.write(b'a' * 10000)
        f.write(b'b')
        f.flush()
        os.fsync(f.fileno())
    for part in (b'one', b'two'):
        with open(keep('append', b'onetwo'), 'ab') as f:
            f.write(part)
    with open(keep('random', b'x' * 4096 + b'\0' * 4096 + b'y'), 'wb') as f:
        os.pwrite(f.fileno(), b'y', 8192)
        os.pwrite(f.fileno(), b'x' * 4096, 0)
    with open(keep('mapped', b'm' * 8192), 'w+b') as f:
        f.truncate(8192)
        with mmap.mmap(f.fileno(), 8192) as view:
            view[:] = b'm' * 8192
            view.flush()
    with open(keep('allocated', b'z' + b'\0' * 65535), 'wb') as f:
        os.posix_fallocate(f.fileno(), 0, 65536)
        f.write(b'z')
    with open(os.path.join(folder, 'temporary'), 'wb') as f:
        f.write(b'begun')
        os.rename(os.path.join(folder, 'temporary'), keep('renamed', b'begun, renamed'))
        f.write(b', renamed')
    with open(keep('copied', b'q' * 70000), 'wb') as f, open(os.path.join(folder, 'from'), 'w+b') as source:
        source.write(keep('from', b'q' * 70000) and b'q' * 70000)
        source.flush()
        source.seek(0)
        assert os.copy_file_range(source.fileno(), f.fileno(), 70000, 0, 0) > 0
        f.truncate(0)
        os.sendfile(f.fileno(), source.fileno(), 0, 70000)
    page = mmap.mmap(-1, 4096)
    page[:] = b'd' * 4096
    try:
        fd = os.open(keep('direct', b'd' * 4096), os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        os.write(fd, page)
        os.close(fd)
    except OSError as error:
        assert error.errno == errno.EINVAL  # the disk has no direct I/O
        del want['direct']
    with open(keep('cut', b'123'), 'wb') as f:
        f.write(b'123456')
        f.flush()
        os.truncate(os.path.join(folder, 'cut'), 3)
    return want


@pytest.mark.parametrize('how', ['by the kernel', '--no-passthrough'])
def test_every_way_to_write_is_the_disks(ckptfs, tmp_path, how):
    directory = tmp_path / 'saves'
    mount = ingest(ckptfs, directory, *([how] if how.startswith('-') else []))
    want = write_in_each_way(mount)
    assert set(os.listdir(mount)) == set(os.listdir(directory)) == set(want)
    for name, value in want.items():
        for folder in (mount, directory):
            with open(os.path.join(folder, name), 'rb') as f:
                assert f.read() == value, (name, folder)
        with open(os.path.join(mount, name), 'rb') as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as view:
            assert view[:] == value, name
    told = mirror(ckptfs)
    assert told['open_for_writing'] == 0
    assert (told['write_requests'] == 0) == told['passthrough'] == (ROOT and how == 'by the kernel')


def test_a_daemon_that_is_killed_leaves_the_files_and_no_step(ckptfs, tmp_path):
    directory = tmp_path / 'saves'
    mount = ingest(ckptfs, directory)
    half = save_as('zero2', mount, 'global_step5')
    next(half)
    open_file = open(os.path.join(mount, 'global_step5', 'note'), 'wb', buffering=0)
    open_file.write(b'before')
    (pid,) = [one['pid'] for one in json.loads(ckptfs.run('status', '--store', ckptfs.store, '--json').stdout)]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f'/proc/{pid}/exe'), 'its end')
    with pytest.raises(OSError) as failed:
        next(half)
    assert failed.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    with pytest.raises(OSError):
        open_file.close()
    assert (directory / 'global_step5' / 'note').read_bytes() == b'before'
    assert 'DEAD' in ckptfs.run('status', '--store', ckptfs.store, check=False).stdout
    ckptfs.run('ingest', '--store', ckptfs.store, directory, mount)
    time.sleep(2)
    assert not steps(ckptfs)
    shutil.rmtree(os.path.join(mount, 'global_step5'))
    for _ in save_as('zero2', mount, 'global_step5'):
        pass
    wait_until(lambda: steps(ckptfs) == {'saves/global_step5'}, 'the step')


def test_what_cannot_be_a_mirror_is_refused(ckptfs, tmp_path):
    directory, mount = tmp_path / 'saves', ckptfs.mountpoint()
    inside = directory / 'in'
    inside.mkdir(parents=True)
    file = tmp_path / 'file'
    file.write_text('x')
    for said, words in {
            'must not lie in each other': (directory, inside),
            'Not a directory': (file, mount),
            'No such file': (tmp_path / 'no' / 'such', mount)}.items():
        done = ckptfs.run('ingest', '--store', ckptfs.store, *words, check=False)
        assert done.returncode != 0 and said in done.stderr, (words, done.stderr)
        assert not is_mounted(words[1])
    done = ckptfs.run('ingest', '--store', directory / 'store', directory, mount, check=False)
    assert done.returncode != 0 and 'would write into the store' in done.stderr
    ckptfs.run('ingest', '--store', ckptfs.store, directory, mount)
    done = ckptfs.run('upgrade', '--mountpoint', mount, check=False)
    assert done.returncode != 0 and 'jobs save there' in done.stderr
    done = ckptfs.run('ingest', '--store', ckptfs.store, mount, ckptfs.mountpoint(), check=False)
    assert done.returncode != 0 and 'lies in the ckptfs mount' in done.stderr
    assert 'jobs save here into' in ckptfs.run('status', '--store', ckptfs.store).stdout


def test_many_files_take_few_descriptors(ckptfs, tmp_path):
    directory = tmp_path / 'saves'
    mount = ckptfs.mountpoint()
    count = 100_000 if LONG else 3000
    subprocess.run(['bash', '-c', f'ulimit -n 1024; exec "$@"', 'bash', BIN, 'ingest', '--store', ckptfs.store, directory,
                    mount], check=True)
    for folder in range(count // 1000):
        os.mkdir(os.path.join(mount, str(folder)))
        for number in range(1000):
            with open(os.path.join(mount, str(folder), str(number)), 'wb') as f:
                f.write(b'%d' % number)
    (pid,) = [one['pid'] for one in json.loads(ckptfs.run('status', '--store', ckptfs.store, '--json').stdout)]
    assert len(os.listdir(f'/proc/{pid}/fd')) < 1024
    for folder in range(count // 1000):
        for number in range(0, 1000, 7):
            with open(os.path.join(mount, str(folder), str(number)), 'rb') as f:
                assert f.read() == b'%d' % number
    shutil.rmtree(os.path.join(mount, '0'))
    assert not (directory / '0').exists()
