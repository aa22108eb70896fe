# SPDX-License-Identifier: Apache-2.0
"""Each command on a real mount: what it does, prints and exits with."""
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time

import pytest

from daemon import BIN, is_mounted, public_program, wait_until

TAG = 'global_step3'
FILE = os.path.join('view', 'dp2_zero1', 'rank0', 'model.safetensors')


def content(*parts):
    with open(os.path.join(*map(str, parts)), 'rb') as f:
        return f.read()


def rc(ckptfs, *words):
    """Exit code and stderr of a command that may fail."""
    done = ckptfs.run(*words, check=False)
    return done.returncode, done.stderr


def test_mount_adopts_and_shows_the_view(ckptfs, source):
    mount = ckptfs.mount(adopt=[source])
    assert os.readlink(f'{mount}/view') == f'run/run7/step/{TAG}/view'
    assert len(content(mount, FILE)) > 1000
    with open('/proc/mounts', errors='surrogateescape') as f:
        line = next(l.split() for l in f if l.split()[1] == mount)
    assert line[0] == ckptfs.store and line[2] == 'fuse.ckptfs'
    assert 'ro' in line[3].split(',')
    ckptfs.umount(mount)
    assert os.listdir(mount) == []


def test_adopting_twice_changes_nothing(ckptfs, source):
    first = ckptfs.adopt(source).stdout
    assert first == f'run7/{TAG}\n'
    assert ckptfs.adopt(source).stdout == first
    assert ckptfs.adopt(source / TAG).stdout == first
    assert [s['step'] for s in ckptfs.list()['steps']] == [f'run7/{TAG}']


def test_a_live_mount_sees_adopt_switch_and_remove(ckptfs, source):
    mount = ckptfs.mount()
    assert not os.path.lexists(f'{mount}/view')
    ckptfs.adopt(source)
    # Said to the daemon, not found by polling: it is there at once.
    assert os.listdir(f'{mount}/run') == ['run7']
    ckptfs.adopt(source, 'other', check=False)
    ckptfs.run('switch', f'run7/latest', '--store', ckptfs.store)
    assert os.readlink(f'{mount}/view') == f'run/run7/step/{TAG}/view'
    before = content(mount, FILE)
    with open(f'{mount}/{FILE}', 'rb') as held:
        ckptfs.run('remove', '--force', f'run7/{TAG}', '--store', ckptfs.store)
        wait_until(lambda: 'run7' not in os.listdir(f'{mount}/run'), 'the removal')
        assert held.read() == before
    assert rc(ckptfs, 'remove', f'run7/{TAG}', '--store', ckptfs.store)[0] == 3


def test_resolve_and_list(ckptfs, source):
    ckptfs.adopt(source)
    assert ckptfs.run('resolve', 'run7', 'latest', '--store', ckptfs.store).stdout == TAG + '\n'
    code, said = rc(ckptfs, 'resolve', 'nobody', '--store', ckptfs.store)
    assert code == 3 and 'nobody' in said
    code, said = rc(ckptfs, 'list', '--store', ckptfs.folder + '/none')
    assert code == 3 and not os.path.exists(ckptfs.folder + '/none')


def test_info_of_a_path_and_of_a_step(ckptfs, source):
    path = json.loads(ckptfs.run('info', source, '--json').stdout)
    ckptfs.adopt(source)
    step = json.loads(ckptfs.run('info', 'run7/latest', '--json', '--store', ckptfs.store).stdout)
    assert path['framework'] == 'deepspeed' and path['kinds'] == step['kinds']
    views = step['views']['rank']
    assert 'tp2' in views['shown']
    assert any('tp8' in layouts for layouts in views['refused'].values())
    short = ckptfs.run('info', source).stdout
    line, = [line for line in short.splitlines() if line.startswith('not shown: ')]
    assert 'huggingface' in line and 'tp8' in line and '--verbose' in line
    said = ckptfs.run('info', source, '--verbose').stdout
    reasons = [line for line in said.split('not shown:\n')[1].splitlines() if line.startswith('  ')]
    assert any('tp8' in line for line in reasons)
    assert len({line.split(': ', 1)[1] for line in reasons}) == len(reasons) and said.count('not saved by') == 1


def test_explain_names_files_and_offsets(ckptfs, source):
    ckptfs.adopt(source)
    told = json.loads(ckptfs.run('explain', 'dp2_zero1', 'rank1/optimizer.safetensors', '--json',
                                 '--limit', '1000', '--store', ckptfs.store).stdout)
    origins = told['origins']
    assert origins[0]['from'] == 'literal' and origins[-1]['end'] == told['size']
    assert all(a['end'] == b['begin'] for a, b in zip(origins, origins[1:]))
    one = next(o for o in origins if o['from'] == 'source' and o['length'] == o['end'] - o['begin'])
    mount = ckptfs.mount()
    view = content(mount, 'view/dp2_zero1/rank1/optimizer.safetensors')
    with open(one['file'], 'rb') as f:
        f.seek(one['offset'])
        assert f.read(one['length']) == view[one['begin']:one['end']]
    at = json.loads(ckptfs.run('explain', 'dp2_zero1', 'rank1/optimizer.safetensors', '--json', '--at',
                               one['begin'] + 5, '--store', ckptfs.store).stdout)['origins']
    # Whole elements are told: the one that holds the byte.
    assert len(at) == 1 and at[0]['begin'] <= one['begin'] + 5 < at[0]['end']
    assert at[0]['offset'] - one['offset'] == at[0]['begin'] - one['begin']
    code, _ = rc(ckptfs, 'explain', 'pp16', '--store', ckptfs.store)
    assert code == 4


def test_export_equals_the_mount(ckptfs, source):
    ckptfs.adopt(source)
    mount = ckptfs.mount()
    to = os.path.join(ckptfs.folder, 'out')
    ckptfs.run('export', 'run7/latest', 'dp2_zero1/rank0', to, '--store', ckptfs.store)
    for name in os.listdir(f'{mount}/view/dp2_zero1/rank0'):
        assert content(to, name) == content(mount, 'view/dp2_zero1/rank0', name)
    code, said = rc(ckptfs, 'export', 'run7/latest', 'tp2/rank0', to, '--store', ckptfs.store)
    assert code == 7, said


def test_read_answers_a_program(ckptfs, source):
    ckptfs.adopt(source)
    ckptfs.adopt(source, name='run7', extra=['--averaged', 'norm'])  # the tag again: another attempt
    mount = ckptfs.mount('--step', TAG, '--run', 'run7')
    name = 'rank0/model.safetensors'
    whole = content(mount, 'view/dp2_zero1', name)
    asked = [f'file 0 {len(whole)} {name}', f'file 7 100 {name}', f'file {len(whole) - 3} 100 {name}',
             'file 0 8 rank0/none', 'file 0 8', 'file x 8 ' + name, 'tensor 100000 0', 'nonsense', '', 'step']
    done = subprocess.run([BIN, 'read', '--store', ckptfs.store, f'run7/{TAG}', 'dp2_zero1'],
                          input=('\n'.join(asked) + '\n').encode(), capture_output=True, check=True)
    replies, rest = [], done.stdout
    while rest:
        head, _, rest = rest.partition(b'\n')
        if head.startswith(b'-'):
            replies.append(None)
            continue
        replies.append(rest[:int(head)])
        rest = rest[int(head):]
    assert replies[:3] == [whole, whole[7:107], whole[-3:]]
    assert replies[3:-1] == [None] * 6
    told = json.loads(replies[-1])
    assert told['id'] == TAG and told['groups'][0]['parameters'] and told['documents']
    for words, code in ((['run7/none', 'tp1'], 3), (['run7/latest', 'pp16'], 4),
                        (['./run7', 'tp1'], 4), (['--newest', f'run7/{TAG}', 'tp1'], 4)):
        assert rc(ckptfs, 'read', '--store', ckptfs.store, *words)[0] == code, words


def test_verify_finds_a_changed_source(ckptfs, source):
    ckptfs.adopt(source)
    done = ckptfs.run('verify', 'run7/latest', '--finite', '--json', '--store', ckptfs.store)
    assert json.loads(done.stdout)['defect_count'] == 0
    path = source / TAG / 'bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt'
    with open(path, 'r+b') as f:
        f.seek(os.path.getsize(path) // 2)
        f.write(b'\xff' * 16)
    code, said = rc(ckptfs, 'verify', 'run7/latest', '--store', ckptfs.store)
    assert code in (5, 9), said


@pytest.mark.parametrize('how', ['--link', '--copy'])
def test_an_owned_step_survives_its_source(ckptfs, source, how):
    for _ in range(2):
        done = ckptfs.run('adopt', source, how, '--store', ckptfs.store)
        assert done.stdout == f'run7/{TAG}\n'
    mount = ckptfs.mount()
    before = content(mount, FILE)
    ckptfs.umount(mount)
    shutil.rmtree(source)
    mount = ckptfs.mount()
    assert content(mount, FILE) == before
    assert json.loads(ckptfs.run('verify', 'run7/latest', '--json', '--store',
                                 ckptfs.store).stdout)['defect_count'] == 0
    assert not [n for n in os.listdir(ckptfs.store + '/blobs') if 'partial' in n]


def test_a_changed_source_is_told(ckptfs, source):
    assert ckptfs.adopt(source).stderr == ''
    done = ckptfs.run('adopt', source, '--link', '--store', ckptfs.store)
    assert (f'run7/{TAG}-1: the source, the options or the version of ckptfs changed since '
            f'run7/{TAG} was adopted') in done.stderr


def test_links_leave_a_step_adopted_before_sound(ckptfs, source):
    """They move the change times of its files and no byte."""
    ckptfs.adopt(source)
    mount = ckptfs.mount()
    before = content(mount, FILE)
    done = ckptfs.run('adopt', source, '--link', '--store', ckptfs.store)
    assert 'adopted again' not in done.stderr
    assert [s['state'] for s in ckptfs.list()['steps']] == ['sound', 'sound']
    time.sleep(1.1)  # files are looked at once a second
    assert content(mount, FILE) == before


def test_a_copy_from_another_filesystem(ckptfs, source):
    """A copy that the kernel does not make by itself (EXDEV)."""
    if os.stat('/dev/shm').st_dev == os.stat(ckptfs.folder).st_dev:
        pytest.skip('/dev/shm is the filesystem of the temporary directory')
    with tempfile.TemporaryDirectory(dir='/dev/shm') as other:
        far = os.path.join(other, 'run7')
        shutil.copytree(source, far)
        ckptfs.adopt(far, extra=['--copy'])
    mount = ckptfs.mount()
    got = content(mount, FILE)
    ckptfs.adopt(source, 'near')
    assert got == content(mount, 'run/near/step', TAG, FILE)


def test_status_counts(ckptfs, source):
    mount = ckptfs.mount(adopt=[source])
    size = len(content(mount, FILE))
    status, = json.loads(ckptfs.run('status', '--json', '--store', ckptfs.store).stdout)
    assert status['mountpoint'] == mount
    assert status['status']['bytes_served'] >= size
    assert json.loads(content(mount, '.ckptfs/status'))['requests']['open'] >= 1
    ckptfs.umount(mount)
    assert rc(ckptfs, 'status', '--store', ckptfs.store)[0] == 3


def test_usage_errors_are_2(ckptfs):
    assert rc(ckptfs)[0] == 2
    assert rc(ckptfs, 'nonsense')[0] == 2
    assert rc(ckptfs, 'mount')[0] == 2
    assert rc(ckptfs, 'adopt', '/x', '--link', '--copy')[0] == 2
    assert ckptfs.run('--help').returncode == 0
    assert ckptfs.run('--version').stdout.startswith('ckptfs ')


@pytest.mark.parametrize('words, named', [
    ('mount --mode fast /m', 'fast'), ('mount --budget 3X /m', '3X'),
    ('mount --reserve -1 /m', '-1'), ('mount --root foo /m', 'foo'),
    ('mount --layout tp0 /m', 'tp0'), ('mount --threads -1 /m', '--threads'),
    ('mount --follow --step global_step5 /m', 'global_step5'),
    ('adopt /x --replicated (a', "'(a'"), ('info /x --averaged [b', "'[b'"),
    ('adopt /x --family-set heads', 'heads'), ('adopt /x --name a/b', '--name'), ('switch ckpt', 'ckpt'),
    ('remove ckpt', 'ckpt'), ('remove a/latest', 'latest'), ('export a/b tp0 /x', 'tp0'),
    ('explain tp0', 'tp0'), ('explain tp1 --limit -3', '--limit'),
    ('explain tp1 f --at -1', '--at'), ('explain tp1 f --length -1', '--length')])
def test_values_that_mean_nothing_are_2(ckptfs, words, named):
    code, said = rc(ckptfs, *words.split())
    assert code == 2 and named in said


def test_explain_wants_a_step_where_there_are_several_runs(ckptfs, source):
    ckptfs.adopt(source)
    shutil.copytree(source, os.path.join(ckptfs.folder, 'other'))
    ckptfs.adopt(os.path.join(ckptfs.folder, 'other'))
    code, said = rc(ckptfs, 'explain', 'tp1', '--store', ckptfs.store)
    assert code == 2 and '--step' in said


def test_explain_of_several_runs_is_of_what_a_mount_shows(ckptfs, source, tmp_path):
    other = shutil.copytree(source, tmp_path / 'run8')
    ckptfs.adopt(other, 'run8')
    ckptfs.mount(adopt=[source])
    for words in ['tp2', 'rank0/model.pt'], ['tp2/rank0/model.pt']:
        told = ckptfs.run('explain', *words, '--store', ckptfs.store).stdout
        assert f'{source}/' in told and f'{other}/' not in told
    second = ckptfs.mount('--run', 'run8')
    code, error = rc(ckptfs, 'explain', 'tp2', '--store', ckptfs.store)
    assert code == 2 and 'no mount shows one of their steps' in error
    ckptfs.umount(second)


def test_a_step_whose_directory_is_gone_is_told(ckptfs, source):
    ckptfs.mount(adopt=[source])
    found = ckptfs.run('resolve', 'run7/', '--store', ckptfs.store)
    assert (found.stdout, found.stderr) == ('global_step3\n', '')
    shutil.rmtree(source)
    for words in ['resolve', 'run7'], ['switch', 'run7/latest']:
        code, error = rc(ckptfs, *words, '--store', ckptfs.store)
        assert code == 0 and f'run7/global_step3: {source}' in error and 'is gone' in error


def test_list_knows_what_a_daemon_compared(ckptfs, source):
    """A changed byte between the samples is found by the one who reads it."""
    mount = ckptfs.mount('--mode', 'stream', adopt=[source])
    name = max((f for f in source.rglob('*.pt')), key=os.path.getsize)
    with open(name, 'r+b') as f:
        f.seek(os.path.getsize(name) // 2 + 1000)
        byte = f.read(1)
        f.seek(-1, 1)
        f.write(bytes([byte[0] ^ 1]))
    failed = 0
    for folder, _, files in os.walk(f'{mount}/view/tp1'):
        for file in files:
            try:
                with open(f'{folder}/{file}', 'rb') as f:
                    f.read()
            except OSError:
                failed += 1
    assert failed
    state = json.loads(ckptfs.run('list', '--json', '--store', ckptfs.store).stdout)['steps'][0]
    assert state['state'] == 'stale' and str(name) in state['reason']


def test_a_converter_is_named_what_replaces_it(ckptfs):
    for name in 'zero_to_fp32', 'convert':
        code, error = rc(ckptfs, name)
        assert code == 2 and '`ckptfs export`' in error and 'instead-of.md' in error


def test_the_directory_of_a_config_is_asked_for(ckptfs, source):
    (source / 'config.json').write_text('{}')
    code, error = rc(ckptfs, 'info', str(source), '--hf-config', str(source / 'config.json'))
    assert code == 2 and f'is a file; give its directory, {source}' in error


def test_a_run_that_is_called_as_a_path_is_named(ckptfs, source, tmp_path, monkeypatch):
    ckptfs.adopt(source)
    os.mkdir(tmp_path / 'here')
    monkeypatch.chdir(tmp_path / 'here')
    os.mkdir('run7')
    code, said = rc(ckptfs, 'verify', 'run7', '--store', ckptfs.store)
    assert code == 3 and "the store's run of that name is written run7/latest" in said
    shutil.copytree(source, 'run7', dirs_exist_ok=True)
    code, said = rc(ckptfs, 'verify', 'run7', '--store', ckptfs.store)
    assert code == 0 and "run7 is a path here; the store's run of that name is written run7/latest" in said


def test_what_is_missing_is_named_first(ckptfs, source):
    ckptfs.adopt(source)
    code, said = rc(ckptfs, 'export', 'run7', 'out', '--store', ckptfs.store)
    assert code == 2 and 'DEST is required: `ckptfs export STEP VIEW DEST`' in said
    code, said = rc(ckptfs, 'info', 'nix/latest', '--store', ckptfs.store)
    assert code == 3 and 'shows what there is' in said


def test_an_unknown_command_is_named(ckptfs):
    code, said = rc(ckptfs, 'adpot', '/x')
    assert code == 2 and 'adpot' in said and 'adopt?' in said
    code, said = rc(ckptfs, 'frobnicate')
    assert code == 2 and 'frobnicate' in said and 'umount' in said and 'verify' in said


def test_paths_are_paths(ckptfs, source):
    store = ['--store', ckptfs.folder + '/none']
    for words in (['info'], ['verify'], ['explain', 'tp1', '--step']):
        for path in ('/nonexist', './nope', '../nope', 'nope', 'a/b/c', 'nope/'):
            code, said = rc(ckptfs, *words, path, *store)
            assert code == 3 and f'{path}: No such file' in said
    code, said = rc(ckptfs, 'export', './nope', 'tp1', ckptfs.folder + '/out', *store)
    assert code == 3 and './nope: No such file' in said
    code, said = rc(ckptfs, 'info', 'run7/latest', *store)
    assert code == 3 and 'no store' in said
    code, said = rc(ckptfs, 'info', source / TAG / 'latest', *store)
    assert code == 3 and 'No such file' in said
    (source / 'file').touch()
    code, said = rc(ckptfs, 'info', source / 'file', *store)
    assert code == 3 and 'a file of weights' in said


@pytest.mark.skipif(os.geteuid() != 0, reason='becomes another user')
def test_a_closed_directory_is_not_permitted(ckptfs, source):
    os.chmod(ckptfs.folder, 0o700)
    with tempfile.TemporaryDirectory() as public:
        done = subprocess.run([public_program(public), 'info', str(source)], user=65534, group=65534,
                              extra_groups=[], capture_output=True, text=True, timeout=60)
    assert done.returncode == 6 and f'{source}: Permission denied' in done.stderr


def test_refusals_of_mount(ckptfs, source):
    mount = ckptfs.mount(adopt=[source])
    store = ['--store', ckptfs.store]
    code, said = rc(ckptfs, 'mount', *store, mount)
    assert code == 7 and 'umount' in said
    missing = ckptfs.folder + '/missing'
    code, said = rc(ckptfs, 'mount', *store, missing)
    assert code == 3 and '--mkdir' in said
    other = ckptfs.mountpoint()
    code, said = rc(ckptfs, 'mount', *store, '--run', 'nobody', other)  # it may come later
    assert code == 0 and 'nobody' in said and not os.path.lexists(f'{other}/view')
    assert '--run' not in said
    ckptfs.umount(other)
    code, said = rc(ckptfs, 'mount', *store, '--step', 'never', other)
    assert code == 0 and "no step 'run7/never' yet" in said and '--run' not in said
    ckptfs.umount(other)
    log = ckptfs.folder + '/missing/log'
    code, said = rc(ckptfs, 'mount', *store, '--log', log, other)
    assert code == 3 and log in said and not os.path.exists(os.path.dirname(log))
    empty = ckptfs.folder + '/empty'
    os.mkdir(empty)
    code, said = rc(ckptfs, 'mount', *store, '--adopt', empty, other)
    assert code == 3 and 'the directory is empty' in said and not is_mounted(other)
    assert rc(ckptfs, 'umount', other)[0] == 3


def test_a_layout_that_cannot_be_shown_is_told(ckptfs, source):
    ckptfs.adopt(source)
    path = ckptfs.mountpoint()
    done = ckptfs.run('mount', '--store', ckptfs.store, '--layout', 'pp16', '--layout', 'tp2', path)
    told = [line for line in done.stderr.splitlines() if '--layout' in line]
    assert len(told) == 1 and 'pp16' in told[0] and 'stages' in told[0]


def test_warm_says_what_it_did_not_fill(ckptfs, source):
    ckptfs.adopt(source)
    mount = ckptfs.mount()
    store = ['--store', ckptfs.store]
    code, said = rc(ckptfs, 'warm', 'pp16', *store)
    assert code == 4 and 'pp16' in said and 'stages' in said
    assert rc(ckptfs, 'warm', 'bogus', *store)[0] == 2
    assert rc(ckptfs, 'warm', 'run7/never/tp2', *store)[0] == 3
    if not json.loads(content(mount, '.ckptfs/status'))['passthrough']:
        pytest.skip('files are streamed here')
    for layout in ('tp2', 'run7/latest/tp2'):
        told = ckptfs.run('warm', layout, *store).stdout.splitlines()
        assert told[0] == f'{mount}: 0 files, 0 B in memory'
        assert told[1].endswith(' files not filled: stream: small file')


def test_umount_of_a_busy_mount(ckptfs, source):
    mount = ckptfs.mount(adopt=[source])
    with open(os.path.join(mount, FILE), 'rb') as held:
        code, said = rc(ckptfs, 'umount', mount)
        assert code == 7 and '--lazy' in said
        ckptfs.run('umount', '--lazy', mount)
        assert not is_mounted(mount)
        assert len(held.read()) > 1000


def test_mount8_words(ckptfs, source):
    ckptfs.adopt(source)
    path = ckptfs.mountpoint()
    ckptfs.run(ckptfs.store, path, '-n', '-o',
               'rw,nofail,_netdev,run=run7,step=latest,layout=tp2,layout=dp8,snapshot-memory=64M,family-set=head_dim=8')
    assert is_mounted(path)
    assert {'tp2', 'dp8'} <= set(os.listdir(f'{path}/view/'))


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_signals_unmount_and_end(ckptfs, source, number):
    ckptfs.adopt(source)
    process, mount = ckptfs.start()
    with open(os.path.join(mount, FILE), 'rb'):
        process.send_signal(number)
        assert process.wait(20) == 0
    assert not is_mounted(mount)


def test_a_dead_mount_is_cleaned_up(ckptfs, source):
    ckptfs.adopt(source)
    process, mount = ckptfs.start()
    process.kill()
    process.wait()
    wait_until(lambda: 'DEAD' in ckptfs.run('status', '--store', ckptfs.store, check=False).stdout, 'the end')
    ckptfs.run('mount', '--store', ckptfs.store, mount)
    assert len(content(mount, FILE)) > 1000
    status, = json.loads(ckptfs.run('status', '--json', '--store', ckptfs.store).stdout)
    os.kill(status['pid'], signal.SIGKILL)
    time.sleep(0.2)
    ckptfs.run('umount', mount)
    assert not is_mounted(mount)


def test_the_background_daemon_lets_go_of_its_parent(ckptfs, source):
    ckptfs.adopt(source)
    path = ckptfs.mountpoint()
    # A pipe that the daemon kept open would hang communicate().
    process = subprocess.Popen([BIN, 'mount', '--store', ckptfs.store, path],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.communicate(timeout=30)
    assert process.returncode == 0
    status, = json.loads(ckptfs.run('status', '--json', '--store', ckptfs.store).stdout)
    pid = status['pid']
    assert os.getsid(pid) == pid
    assert os.readlink(f'/proc/{pid}/cwd') == '/'
    ckptfs.umount(path)
    try:  # gone, or waiting for a lazy init to notice
        assert content(f'/proc/{pid}/stat').rsplit(b') ', 1)[1].startswith(b'Z')
    except (FileNotFoundError, ProcessLookupError):
        pass
    logs = os.listdir(ckptfs.store + '/log')
    assert len(logs) == 1 and b'unmounted' in content(ckptfs.store, 'log', logs[0])


def test_reads_through_every_mode(ckptfs, source):
    ckptfs.adopt(source)
    want = None
    for mode in ('stream', 'materialise', 'direct'):
        mount = ckptfs.mount('--mode', mode)
        got = content(mount, FILE)
        want = want or got
        assert got == want, mode
        path = f'{mount}/run/run7/step/{TAG}/source/{TAG}'
        if os.path.isdir(path):
            for name in os.listdir(path):
                assert content(path, name) == content(source, TAG, name)
        ckptfs.umount(mount)
