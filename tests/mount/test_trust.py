# SPDX-License-Identifier: Apache-2.0
"""Bytes that a mount of root's shows, and to whom: forged stores, links, moved directories.

Everybody may look at these mounts; `nobody` is who attacks.
"""
import glob
import json
import os
import resource
import shutil
import stat
import subprocess
import time

import pytest

from daemon import BIN, public_program, wait_until
from hostile import GOLDEN
from plain_model import save
from test_ownership import NOBODY, as_nobody, public  # noqa: F401

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason='other users need root')
MODEL = 'rank0/model.safetensors'
SETPRIV = ['setpriv', f'--reuid={NOBODY}', f'--regid={NOBODY}', '--clear-groups']


def give(path, uid=NOBODY):
    """Make a tree somebody else's, links included."""
    subprocess.run(['chown', '-hR', f'{uid}:{uid}', path], check=True)


def checkpoint_at(path):
    """A checkpoint that everybody may read."""
    shutil.copytree(GOLDEN, path)
    subprocess.run(['chmod', '-R', 'a+rX', path], check=True)
    return path


def views(mount, run):
    """The directory of the layout dp1 of a run's only step."""
    found, = glob.glob(f'{mount}/run/{run}/step/*/view')
    return f'{found}/dp1'


def first_state(source):
    """A file of the checkpoint that every view needs."""
    return glob.glob(f'{source}/*/*_00_model_states.pt')[0]


def wait_until_closed(path):
    """Directories and files are looked at again every two seconds."""
    wait_until(lambda: not as_nobody(path), 'the loss of access', seconds=10)


def test_a_store_of_somebody_else_is_refused(public):  # noqa: F811
    source = checkpoint_at(public.folder + '/run7')
    public.adopt(source)
    give(public.store)
    for words in (['list'], ['mount', public.mountpoint()], ['info', 'run7/latest'],
                  ['export', 'run7/latest', 'dp1', public.folder + '/out'], ['adopt', source]):
        done = public.run(*words, '--store', public.store, check=False)
        assert done.returncode == 6, (words, done)
        assert public.store in done.stderr and f'user {NOBODY}' in done.stderr
    give(public.store, 0)
    record, = glob.glob(public.store + '/steps/*/*/0')
    give(record)
    os.unlink(public.store + '/catalogue.sqlite')
    done = public.run('list', '--store', public.store, check=False)
    assert done.returncode == 6 and record in done.stderr


def test_a_store_in_a_sticky_directory_is_its_owners(public):  # noqa: F811
    shared = public.folder + '/shared'
    os.mkdir(shared)
    os.chmod(shared, 0o1777)
    done = public.run('adopt', checkpoint_at(public.folder + '/run7'), '--store', shared,
                      check=False)
    assert done.returncode == 6 and 'chmod go-w' in done.stderr
    assert not os.listdir(shared)
    public.store = shared + '/store'
    public.adopt(public.folder + '/run7')
    assert public.list()['steps']


def test_a_link_leads_no_further_than_its_owner(public):  # noqa: F811
    source = checkpoint_at(public.folder + '/run7')
    state = first_state(source)
    secret = source + '/secret'
    shutil.move(state, secret)
    os.symlink('../secret', state)
    give(source)
    public.adopt(source)
    os.chmod(secret, 0o600)
    os.chown(secret, 0, 0)
    with pytest.raises(AssertionError, match='leads to a place that this user may not open'):
        public.adopt(source, 'again')
    path = f'{views(public.mount(), "run7")}/{MODEL}'
    assert not as_nobody(path)
    with pytest.raises(PermissionError), open(path, 'rb') as f:
        f.read()


@pytest.mark.parametrize('mode,allowed', [(0o755, True), (0o700, False)])
def test_files_behind_links_have_directories_too(public, mode, allowed):  # noqa: F811
    """As in the cache of a hub: snapshots/<id>/model.pt -> ../../blobs/<digest>."""
    source = checkpoint_at(public.folder + '/run7')
    blobs = source + '/blobs'
    os.mkdir(blobs)
    for i, path in enumerate(sorted(glob.glob(f'{source}/*/*.pt'))):
        shutil.move(path, f'{blobs}/{i}')
        os.symlink(f'../blobs/{i}', path)
    os.chmod(blobs, mode)
    public.adopt(source)
    mount = public.mount()
    path = f'{views(mount, "run7")}/{MODEL}'
    with open(path, 'rb') as f:
        assert f.read()
    assert as_nobody(path) == allowed
    public.adopt(source, 'copied', extra=['--copy'])
    assert as_nobody(f'{views(mount, "copied")}/{MODEL}') == allowed
    if allowed:
        os.chmod(blobs, 0o700)
        wait_until_closed(path)


def test_a_copy_keeps_the_directories_above_its_source(public):  # noqa: F811
    closed = public.folder + '/closed'
    os.mkdir(closed, 0o700)
    source = checkpoint_at(closed + '/run7')
    public.adopt(source, extra=['--copy'])
    path = f'{views(public.mount(), "run7")}/{MODEL}'
    assert not as_nobody(path)
    shutil.rmtree(closed)
    os.makedirs(source)
    for name in os.listdir(GOLDEN):
        os.makedirs(f'{source}/{name}', exist_ok=True)
    give(closed)
    subprocess.run(['chmod', '-R', '0777', closed], check=True)
    time.sleep(2.5)
    assert not as_nobody(path)
    with open(path, 'rb') as f:
        assert f.read()
    # Nor is it shown by another daemon that finds it so.
    assert not as_nobody(f'{views(public.mount(), "run7")}/{MODEL}')


def test_a_copy_of_what_all_may_read_outlives_its_source(public):  # noqa: F811
    source = checkpoint_at(public.folder + '/run7')
    public.adopt(source, extra=['--copy'])
    shutil.rmtree(source)
    assert as_nobody(f'{views(public.mount(), "run7")}/{MODEL}')


@pytest.mark.parametrize('what', ['run', 'step'])
def test_what_moves_into_a_closed_directory_is_closed(public, what):  # noqa: F811
    source = checkpoint_at(public.folder + '/run7')
    public.adopt(source)
    path = f'{views(public.mount(), "run7")}/{MODEL}'
    assert as_nobody(path)
    closed = public.folder + '/closed'
    os.mkdir(closed, 0o700)
    moved = source if what == 'run' else os.path.dirname(first_state(source))
    shutil.move(moved, closed)
    os.symlink(f'{closed}/{os.path.basename(moved)}', moved)
    wait_until_closed(path)


def test_the_mode_of_a_linked_file_counts_at_once(public):  # noqa: F811
    source = checkpoint_at(public.folder + '/run7')
    public.adopt(source, extra=['--link'])
    path = f'{views(public.mount(), "run7")}/{MODEL}'
    assert as_nobody(path)
    os.chmod(first_state(source), 0o600)
    time.sleep(1.1)  # each file is looked at once a second
    assert not as_nobody(path)
    assert as_nobody(path) is False


def test_the_log_is_not_written_through_a_link(public):  # noqa: F811
    public.adopt(checkpoint_at(public.folder + '/run7'))
    victim = public.folder + '/victim'
    with open(victim, 'w') as f:
        f.write('mine\n')
    link = public.folder + '/log'
    os.symlink(victim, link)
    done = public.run('mount', '--store', public.store, '--log', link, public.mountpoint(),
                      check=False)
    assert done.returncode != 0 and link in done.stderr
    os.makedirs(public.store + '/log', exist_ok=True)
    mount = public.mountpoint()
    os.symlink(victim, f'{public.store}/log/{mount[1:].replace("/", "-")}.log')
    public.run('mount', '--store', public.store, *public.reserve, mount)
    assert os.path.exists(mount + '/view')
    with open(victim) as f:
        assert f.read() == 'mine\n'


def test_logs_are_their_users_alone(public, tmp_path):  # noqa: F811
    public.adopt(checkpoint_at(public.folder + '/run7'))
    mine, old = tmp_path / 'mine.log', tmp_path / 'old.log'
    old.write_text('of a build that left it so\n')
    os.chmod(old, 0o644)
    before = os.umask(0)
    try:
        public.mount()
        public.mount('--log', mine)
        public.mount('--log', old)
    finally:
        os.umask(before)
    logs = [f'{public.store}/log/{name}' for name in os.listdir(f'{public.store}/log')]
    assert len(logs) == 1
    for log in (mine, old, *logs):
        assert stat.S_IMODE(os.stat(log).st_mode) == 0o600, log


def may_list(path):
    """True if somebody else sees what is in a directory."""
    return subprocess.run([*SETPRIV, 'ls', f'{path}/'], capture_output=True, check=False).returncode == 0


# safetensors gives its files mode 0600 whatever the umask is.
@pytest.mark.parametrize('closed,tool', [('model.safetensors', False), ('config.json', False),
                                         ('scheduler.pt', True), ('trainer_state.json', True)])
def test_a_private_file_that_hides_a_step_is_named(public, closed, tool):  # noqa: F811
    step = 'checkpoint-5' if tool else 'model5'
    folder = f'{public.folder}/run/{step}'
    made(folder, tool)
    os.chmod(f'{folder}/{closed}', 0o600)
    said = public.adopt(f'{public.folder}/run', 'run').stderr
    line, = [line for line in said.splitlines() if 'other users' in line]
    assert f'{folder}/{closed} (mode 0600)' in line and 'user 0' in line and f'run/{step}' in line
    mount = public.mountpoint()
    said = public.run('mount', '--store', public.store, '--run', 'run', *public.reserve, mount).stderr
    assert line.removeprefix('ckptfs: ') in said
    assert not may_list(f'{mount}/view')
    info = public.run('info', '--store', public.store, f'run/{step}').stdout
    assert f'{closed} (mode 0600)' in info
    os.chmod(f'{folder}/{closed}', 0o644)
    assert 'other users' not in public.run('info', '--store', public.store, f'run/{step}').stdout


def made(folder, tool):
    """A model, in a Trainer's directory if a tool wrote it."""
    save(folder, 5)
    names = ('trainer_state.json', 'scheduler.pt', 'training_args.bin') if tool else ()
    for name in (*names, 'notes.txt', 'tokenizer.json'):
        with open(f'{folder}/{name}', 'w', encoding='utf-8') as f:
            f.write('{"global_step": 5}')
    subprocess.run(['chmod', '-R', 'a+rX', os.path.dirname(folder)], check=True)


@pytest.mark.parametrize('closed,tool', [('notes.txt', False), ('notes.txt', True), ('tokenizer.json', False),
                                         ('tokenizer.json', True), ('training_args.bin', True)])
def test_a_private_file_that_is_not_needed_hides_nothing(public, closed, tool):  # noqa: F811
    step = 'checkpoint-5' if tool else 'model5'
    folder = f'{public.folder}/run/{step}'
    made(folder, tool)
    os.chmod(f'{folder}/{closed}', 0o600)
    said = public.adopt(f'{public.folder}/run', 'run').stderr
    assert 'other users' not in said and f"{closed}': some users who may read the step's files may not read this one" in said
    mount = public.mount('--run', 'run')
    assert may_list(f'{mount}/view')
    source = f'{mount}/run/run/step/{step}/source'
    shown = os.listdir(f'{source}/{step}' if tool else source)
    assert closed not in shown and 'model.safetensors' in shown
    assert f"{closed}': some users" in public.run('info', '--store', public.store, f'run/{step}').stdout


def test_steps_that_are_shared_with_a_group_are_so_on_purpose(public):  # noqa: F811
    folder = f'{public.folder}/run/checkpoint-5'
    made(folder, False)
    for name in os.listdir(folder):
        os.chmod(f'{folder}/{name}', 0o640)
    assert 'other users' not in public.adopt(f'{public.folder}/run').stderr


@pytest.mark.parametrize('how', ['by root', 'open', 'file', 'link'])
def test_a_runtime_directory_of_somebody_else_is_named_so(public, how):  # noqa: F811
    runtime = f'{public.folder}/runtime'
    os.mkdir(runtime)
    os.chown(runtime, NOBODY, NOBODY)
    place = f'{runtime}/ckptfs'
    if how == 'file':
        with open(place, 'w'):
            pass
    elif how == 'link':
        os.symlink('/tmp', place)
    else:
        os.mkdir(place)
    if how != 'by root':
        os.chown(place, NOBODY, NOBODY, follow_symlinks=False)
    if how == 'open':
        os.chmod(place, 0o777)
    os.mkdir(f'{public.folder}/of-nobody')
    os.chown(f'{public.folder}/of-nobody', NOBODY, NOBODY)
    done = subprocess.run([public_program(public.folder), 'status', '--store', f'{public.folder}/of-nobody'],
                          user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True,
                          timeout=60, env={**os.environ, 'XDG_RUNTIME_DIR': runtime})
    said = {'by root': 'belongs to user 0', 'open': 'can be written by its group or by others',
            'file': 'is not a directory', 'link': 'is a symbolic link'}[how]
    assert done.returncode == 6 and place in done.stderr and said in done.stderr, done.stderr
    assert 'XDG_RUNTIME_DIR' in done.stderr


def test_a_store_that_is_away_is_no_news(public):  # noqa: F811
    first = checkpoint_at(public.folder + '/run7')
    public.adopt(first)
    mount = public.mount()
    target = os.readlink(mount + '/view')
    with open(f'{mount}/view/dp1/{MODEL}', 'rb') as f:
        before = f.read()
    away = public.store + '-away'
    os.rename(public.store, away)
    # Another store in its place, whose adopt tells the daemon to look.
    public.adopt(checkpoint_at(public.folder + '/other'))
    assert os.listdir(mount + '/run') == ['run7']
    assert os.readlink(mount + '/view') == target
    shutil.rmtree(public.store)
    os.mkdir(public.store)  # an automounter's directory
    time.sleep(11)
    assert os.listdir(mount + '/run') == ['run7']
    with open(f'{mount}/view/dp1/{MODEL}', 'rb') as f:
        assert f.read() == before
    os.rmdir(public.store)
    os.rename(away, public.store)
    public.adopt(public.folder + '/other')
    assert sorted(os.listdir(mount + '/run')) == ['other', 'run7']
    assert os.readlink(mount + '/view') == target


def resident(pid):
    """Bytes of memory of a process."""
    with open(f'/proc/{pid}/statm') as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def test_listings_are_bounded(public):  # noqa: F811
    public.adopt(checkpoint_at(public.folder + '/run7'))
    mount = public.mount()
    for layout, why in (('dp200000', '200000 ranks'), ('tp100000', 'no dimension'),
                        ('pp1000', 'pipeline stages')):
        assert not os.path.exists(f'{mount}/view/{layout}')
        done = public.run('explain', layout, '--store', public.store, check=False)
        assert why in done.stdout + done.stderr, done
    pid, = public.running()
    before = resident(pid)
    for ranks in (60000, 60001, 60002, 60003):
        done = subprocess.run(SETPRIV + ['ls', '-U', f'{mount}/view/dp{ranks}'],
                              capture_output=True, text=True, check=True)
        assert len(done.stdout.split()) > ranks
    with open(mount + '/.ckptfs/status') as f:
        assert json.load(f)['listed_bytes'] < 2 << 20
    noise = 3 if os.environ.get('CKPTFS_SANITIZE') else 1  # keeps what was freed, and shadows
    assert resident(pid) - before < noise * 48 << 20


def test_the_control_groups_limit_is_the_pools(public):  # noqa: F811
    group = f'/sys/fs/cgroup/memory/ckptfs-test-{os.getpid()}'
    limit = group + '/memory.limit_in_bytes'
    if not os.path.isdir('/sys/fs/cgroup/memory'):
        pytest.skip('no memory controller of version 1 here')
    try:
        os.mkdir(group)
        with open(limit, 'w') as f:
            f.write(str(512 << 20))
    except OSError as error:
        pytest.skip(f'no control groups of our own: {error}')
    os.mkdir(group + '/inner')
    public.adopt(checkpoint_at(public.folder + '/run7'))
    mount = public.mountpoint()
    words = [BIN, 'mount', '--store', public.store, *public.reserve, '--mode', 'materialise', mount]
    subprocess.run(['sh', '-c', f'echo $$ > {group}/inner/cgroup.procs; exec "$@"', 'sh', *words],
                   check=True)
    try:
        with open(mount + '/.ckptfs/status') as f:
            assert json.load(f)['materialised']['budget'] == 128 << 20
    finally:
        public.umount(mount)
        wait_until(lambda: not public.running(), 'the end of the daemon')
        for path in (group + '/inner', group):
            wait_until(lambda p=path: os.rmdir(p) is None, 'an empty group')


@pytest.mark.parametrize('mode,written', [(0o644, 0o644), (0o600, 0o600), (0o640, 0o600)])
def test_exports_are_as_private_as_their_source(public, mode, written):  # noqa: F811
    source = checkpoint_at(public.folder + '/run7')
    os.chmod(first_state(source), mode)
    os.chown(first_state(source), 0, NOBODY)
    public.adopt(source)
    out = public.folder + '/out'
    old = os.umask(0o022)
    try:
        public.run('export', 'run7/latest', 'dp1', out, '--store', public.store)
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(f'{out}/{MODEL}').st_mode) == written
    directory = stat.S_IMODE(os.stat(os.path.dirname(f'{out}/{MODEL}')).st_mode)
    assert directory == (0o755 if written & 4 else 0o700)
    assert stat.S_IMODE(os.stat(public.store + '/catalogue.sqlite').st_mode) == 0o600


def test_nothing_printed_moves_the_cursor(public):  # noqa: F811
    evil = 'a\x1b]0;owned\x07\x9b2J\u202eb'
    source = checkpoint_at(f'{public.folder}/{evil}')
    public.adopt(source, 'run7')
    os.unlink(first_state(source))
    for words in (['list'], ['list', '--json'], ['info', source], ['info', 'run7/latest'],
                  ['adopt', source, '--name', 'again'], ['verify', 'run7/latest'],
                  ['explain', 'dp1', evil], ['nonsense' + evil], ['umount', source],
                  ['export', 'run7/latest', 'dp1', source + '/out']):
        if words[0] not in ('umount',):
            words = [*words, '--store', public.store]
        done = subprocess.run([BIN, *words], capture_output=True, check=False)
        said = done.stdout + done.stderr
        assert said, words
        for byte in (b'\x1b', b'\x07', b'\x9b', '\x9b'.encode(), '\u202e'.encode()):
            assert byte not in said, (words, said)
