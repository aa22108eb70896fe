# SPDX-License-Identifier: Apache-2.0
"""`adopt` and `mount --adopt` with more than one good checkpoint."""
import errno
import glob
import json
import os
import pathlib
import shutil
import struct
import subprocess
import tempfile
import time
import zipfile

import pytest

import hostile
from daemon import is_mounted, public_program, wait_until
from hostile import TAG

REFUSED = 4
NOT_FOUND = 3
NOT_PERMITTED = 6


def names(folder):
    """All files below a folder."""
    return sorted(os.path.join(top, name) for top, _, here in os.walk(folder)
                  for name in here)


@pytest.fixture
def both(ckptfs, source):
    """One iteration saved, and converted beside it, later."""
    ckptfs.run('export', source, 'dp2_zero1/deepspeed',
               ckptfs.folder + '/made')
    made, = [p for p in os.listdir(ckptfs.folder + '/made')
             if os.path.isdir(f'{ckptfs.folder}/made/{p}')]
    shutil.copytree(f'{ckptfs.folder}/made/{made}',
                    f'{source}/{TAG}_universal')
    with open(f'{source}/latest_universal', 'w') as f:
        f.write(f'{TAG}_universal')
    return str(source)


def test_what_was_converted_comes_second(ckptfs, both):
    done = ckptfs.adopt(both)
    assert done.stdout.split() == [f'run7/{TAG}_universal', f'run7/{TAG}']
    resolved = ckptfs.run('resolve', 'run7', '--store', ckptfs.store)
    assert resolved.stdout.strip() == TAG
    mount = ckptfs.mount()
    assert os.readlink(f'{mount}/view') == f'run/run7/step/{TAG}/view'
    info = json.loads(ckptfs.run('info', both, '--json').stdout)
    assert info['step'] == TAG


def test_a_conversion_alone_is_the_latest(ckptfs, both):
    shutil.rmtree(f'{both}/{TAG}')
    os.unlink(f'{both}/latest')
    ckptfs.adopt(both)
    resolved = ckptfs.run('resolve', 'run7', '--store', ckptfs.store)
    assert resolved.stdout.strip() == f'{TAG}_universal'


def test_each_path_has_its_own_result(ckptfs, source, tmp_path):
    other = shutil.copytree(source, tmp_path / 'other')
    bad = hostile.copy_of_golden(str(tmp_path))
    hostile.truncate(hostile.inside(bad, hostile.MODEL), 100)
    done = ckptfs.run('adopt', bad, source, other,
                      '--store', ckptfs.store, '--json', check=False)
    assert done.returncode == REFUSED  # of the first that failed
    result = json.loads(done.stdout)
    assert [len(p['steps']) for p in result['paths']] == [0, 1, 1]
    assert [len(p['refused']) for p in result['paths']] == [1, 0, 0]
    assert [s['run'] for s in result['steps']] == ['run7', 'other']
    assert hostile.MODEL in done.stderr
    again = ckptfs.adopt(source)  # nothing changes
    assert again.stdout.split() == [f'run7/{TAG}']


def test_all_paths_are_checked_before_the_first_is_adopted(ckptfs, source, tmp_path):
    (tmp_path / 'notes').mkdir()
    (tmp_path / 'notes' / 'train.log').write_text('hello')
    for wrong in 'none', 'notes':
        words = ['adopt', source, tmp_path / wrong, '--store', ckptfs.store]
        done = ckptfs.run(*words, check=False)
        assert done.returncode == NOT_FOUND and done.stdout == ''
        assert str(tmp_path / wrong) in done.stderr
        assert 'nothing was adopted of 2 paths' in done.stderr
        assert not os.path.exists(ckptfs.store)
    assert 'it holds 1 file (train.log)' in done.stderr
    mnt = ckptfs.mountpoint()
    done = ckptfs.run('mount', source, tmp_path / 'notes', mnt, '--store', ckptfs.store,
                      check=False)
    assert done.returncode == NOT_FOUND
    assert not os.path.exists(ckptfs.store) or ckptfs.list()['steps'] == []


def test_several_paths_of_one_mount_are_one_run_where_it_is_named(ckptfs, source, tmp_path):
    other = shutil.copytree(source, tmp_path / 'other')
    os.rename(f'{other}/{TAG}', f'{other}/global_step9')
    mnt = ckptfs.mountpoint()
    ckptfs.run('mount', source, other, mnt, '--store', ckptfs.store, '--name', 'both')
    assert os.listdir(f'{mnt}/run') == ['both']
    assert sorted(os.listdir(f'{mnt}/run/both/step')) == [TAG, 'global_step9']
    assert os.readlink(f'{mnt}/view').startswith('run/both/step/')


def test_runs_one_level_below_are_found_and_said(ckptfs, source, tmp_path):
    runs = tmp_path / 'experiments'
    runs.mkdir()
    for name in 'a', 'b':
        shutil.copytree(source, runs / name)
    for name, file in ('unet', 'diffusion_pytorch_model.safetensors'), ('logs', 'events.txt'):
        (runs / name).mkdir()
        (runs / name / file).write_bytes(b'')
    done = ckptfs.adopt(runs)
    assert done.stdout.split() == [f'a/{TAG}', f'b/{TAG}']
    assert ('not taken, since no step is recognised there: 1 directory (unet (diffusion_pytorch_model.safetensors))'
            in done.stderr)
    assert f'{runs}: no step of its own; one level below: 2 runs (a, b)' in done.stderr
    done = ckptfs.adopt(runs, 'mixed', check=False)
    assert done.returncode == REFUSED and 'adopt --name mixed' in done.stderr


def write_model(folder, file='model.safetensors'):
    """Weights of one element."""
    os.makedirs(folder, exist_ok=True)
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    with open(f'{folder}/{file}', 'wb') as f:
        f.write(struct.pack('<Q', len(header)) + header + b'wwww')


def test_directories_that_are_named_as_steps_are_one_run(ckptfs, tmp_path):
    """A script saves by save_pretrained; a model beside the steps is named, and nothing else."""
    for name in 'epoch_1', 'epoch_2', 'step_500', 'best':
        write_model(tmp_path / 'out' / name)
    (tmp_path / 'out' / 'logs').mkdir()
    done = ckptfs.adopt(tmp_path / 'out')
    assert done.stdout.split() == ['out/epoch_1', 'out/epoch_2', 'out/step_500']
    assert 'beside these steps, separate models lie in 1 directory (best)' in done.stderr
    assert 'not whole' not in done.stderr
    assert ckptfs.adopt(tmp_path / 'out' / 'best').stdout.split() == ['best/best']
    assert ckptfs.adopt(tmp_path / 'out' / 'step_500').stdout.split() == ['out/step_500']


def test_an_adapter_is_a_step(ckptfs, tmp_path):
    file = 'adapter_model.safetensors'
    for number in 10, 20:
        write_model(tmp_path / f'out/checkpoint-{number}', file)
    done = ckptfs.adopt(tmp_path / 'out')
    assert done.stdout.split() == ['out/checkpoint-10', 'out/checkpoint-20']
    assert 'an adapter (PEFT)' in ckptfs.run('info', 'out/checkpoint-10', '--store', ckptfs.store).stdout
    assert ckptfs.adopt(tmp_path / 'out/checkpoint-10' / file).stdout.split() == [f'checkpoint-10/{file}']


def test_many_steps_of_a_run_are_not_all_told(ckptfs, tmp_path):
    for number in range(1, 12):
        write_model(tmp_path / 'out' / f'step_{number}')
    ckptfs.adopt(tmp_path / 'out')
    said = ckptfs.run('info', 'out', '--store', ckptfs.store).stdout
    assert 'run: out (11 steps: step_1 to step_11; `ckptfs list` names all); this is the latest\n' in said
    assert len(json.loads(ckptfs.run('info', 'out', '--json', '--store', ckptfs.store).stdout)['run_steps']) == 11


def test_what_is_known_and_not_read_is_named(ckptfs, tmp_path):
    step = tmp_path / 'run' / 'iter_0000500'
    step.mkdir(parents=True)
    for name in 'common.pt', 'metadata.json':
        (step / name).touch()
    for path in step, step.parent:
        done = ckptfs.adopt(path, check=False)
        assert done.returncode == REFUSED
        assert done.stderr == f'ckptfs: {step}: Megatron dist_checkpointing (zarr): not readable yet\n'


def test_a_follower_says_what_it_sees_and_waits_for(ckptfs, tmp_path):
    step = tmp_path / 'megatron' / 'iter_0000500'
    step.mkdir(parents=True)
    for name in 'common.pt', 'metadata.json':
        (step / name).touch()
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'logs').mkdir()
    (tmp_path / 'logs' / 'train.log').touch()
    seen = {'megatron': f'{step}: Megatron dist_checkpointing (zarr): not readable yet; nothing of it is adopted',
            'empty': 'waits for the first step: the directory is empty',
            'logs': 'waits for the first step: it holds 1 file (train.log)',
            'none': 'waits for the first step: the directory is not there yet'}
    for name, line in seen.items():
        mount = ckptfs.mountpoint()
        said = ckptfs.run('mount', '--store', ckptfs.store, '--reserve', '0', '--follow', tmp_path / name, mount).stderr
        assert said.count(line) == 1 and '--run' not in said and 'it appears when its step' in said, said
        assert line in ckptfs.run('status', '--mountpoint', mount).stdout
        ckptfs.umount(mount)


@pytest.mark.parametrize('below', ['checkpoints', 'late', ''])
def test_view_appears_with_a_run_of_another_name(ckptfs, source, tmp_path, below):
    """The folder that a job saves in has no telling name, or the job makes its own directory in
    there."""
    top = tmp_path / 'exp'
    followed = top / 'checkpoints' if below == 'checkpoints' else top
    followed.mkdir(parents=True)
    mount = ckptfs.mountpoint()
    ckptfs.run('mount', '--store', ckptfs.store, '--reserve', '0', '--follow', followed, mount)
    shutil.copytree(source, top / below, dirs_exist_ok=True)
    run = below if below == 'late' else 'exp'
    wait_until(lambda: os.readlink(f'{mount}/view') == f'run/{run}/step/{TAG}/view', 'the view')
    status = json.loads(ckptfs.run('status', '--mountpoint', mount, '--json').stdout)[0]['status']
    assert [one['run'] for one in status['following']] == [run]
    shutil.copytree(f'{source}/{TAG}', f'{top}/{below}/global_step7')
    wait_until(lambda: os.readlink(f'{mount}/view') == f'run/{run}/step/global_step7/view', 'the next')


def test_one_broken_step_refuses_no_other(ckptfs, source):
    later = shutil.copytree(f'{source}/{TAG}', f'{source}/global_step4')
    hostile.truncate(os.path.join(later, hostile.zero_file(2)), 2000)
    with open(f'{source}/latest', 'w') as f:
        f.write('global_step4')
    done = ckptfs.adopt(source, check=False)
    assert done.returncode == REFUSED
    assert done.stdout.split() == [f'run7/{TAG}']
    assert 'global_step4' in done.stderr


def test_what_cannot_be_linked_leaves_no_store(ckptfs, source, tmp_path):
    other = tmp_path / 'other'
    other.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', other], check=True)
    try:
        for words in (['adopt'], ['mount', '--adopt']):
            more = [] if words[0] == 'adopt' else [ckptfs.mountpoint()]
            done = ckptfs.run(*words, source, *more, '--store', f'{other}/store', '--link', check=False)
            assert done.returncode == REFUSED and 'use --copy, or a store on the same filesystem' in done.stderr
            assert os.listdir(other) == []
    finally:
        subprocess.run(['umount', other], check=True)


def test_where_none_is_complete_each_is_named(ckptfs, source):
    later = shutil.copytree(f'{source}/{TAG}', f'{source}/global_step7')
    os.unlink(f'{later}/mp_rank_00_model_states.pt')
    hostile.truncate(os.path.join(f'{source}/{TAG}', hostile.zero_file(2)), 2000)
    done = ckptfs.adopt(source, check=False)
    assert done.returncode == REFUSED
    assert hostile.zero_file(2) in done.stderr and 'global_step7' in done.stderr


def test_an_order_that_is_not_there(ckptfs, source):
    done = ckptfs.adopt(source, check=False, extra=('--parameter-order', '/nonexistent'))
    assert (done.returncode, done.stderr) == (3, 'ckptfs: --parameter-order /nonexistent: No such file or directory\n')


def test_a_step_without_weights_is_named(ckptfs, source):
    os.mkdir(f'{source}/global_step500')
    done = ckptfs.adopt(source)
    assert done.stdout.split() == [f'run7/{TAG}']
    assert done.stderr == 'ckptfs: skipped global_step500: not whole: no weights yet\n'
    mount = ckptfs.mountpoint()
    said = ckptfs.run('mount', source, mount, '--store', ckptfs.store).stderr
    assert said.count('skipped global_step500: not whole: no weights yet') == 1
    done = ckptfs.adopt(f'{source}/global_step500', check=False)
    assert done.returncode == REFUSED and done.stderr == f'ckptfs: {source}/global_step500: not whole: no weights yet\n'


def test_a_follower_waits_for_the_step_that_was_begun(ckptfs, source):
    os.makedirs(f'{source}/global_step500')
    os.utime(source / TAG / 'mp_rank_00_model_states.pt', (1e9, 1e9))
    ckptfs.mount('--follow', source)
    said = ckptfs.run('status', '--store', ckptfs.store).stdout
    assert 'not whole yet: global_step500: no weights yet' in said


def test_a_pointer_to_no_step_is_no_step(ckptfs, tmp_path):
    job = tmp_path / 'job'
    job.mkdir()
    (job / 'latest').write_text('global_step9')
    mount = ckptfs.mountpoint()
    said = ckptfs.run('mount', '--store', ckptfs.store, '--reserve', '0', '--follow', job, mount).stderr
    line = f"waits for the first step: {job}/latest: names the tag 'global_step9', but that directory does not exist"
    status = ckptfs.run('status', '--store', ckptfs.store).stdout
    assert line in said and line in status and 'not whole' not in status, status
    (job / 'latest').unlink()
    (job / 'global_step9').mkdir()
    begun = 'not whole yet: global_step9: no weights yet'
    wait_until(lambda: begun in ckptfs.run('status', '--store', ckptfs.store).stdout, 'the step that was begun')
    log, = glob.glob(f'{ckptfs.store}/log/*.log')
    with open(log, encoding='utf-8') as f:
        assert 'disappeared before' not in f.read()


@pytest.mark.skipif(os.geteuid() != 0, reason='becomes another user')
@pytest.mark.parametrize('name', ['mp_rank_00_model_states.pt', hostile.zero_file(2), ''])
def test_what_may_not_be_read_is_not_incomplete(source, name):
    later = shutil.copytree(f'{source}/{TAG}', f'{source}/global_step4')
    os.chmod(os.path.join(later, name), 0o600)
    with tempfile.TemporaryDirectory() as public:
        shutil.move(source, f'{public}/run7')
        os.mkdir(f'{public}/theirs')
        os.chown(f'{public}/theirs', 65534, 65534)
        done = subprocess.run([public_program(public), 'adopt', f'{public}/run7', '--store', f'{public}/theirs/store'],
                              user=65534, group=65534, extra_groups=[], capture_output=True, text=True, timeout=60)
    assert done.returncode == NOT_PERMITTED and done.stdout == f'run7/{TAG}\n', done
    assert 'global_step4' in done.stderr and 'incomplete' not in done.stderr


def test_one_shard_of_a_model_is_no_step(ckptfs, tmp_path):
    model = tmp_path / 'llama'
    model.mkdir()
    shards = [model / f'model-0000{n}-of-00003.safetensors' for n in (1, 2, 3)]
    for n, shard in enumerate(shards):
        header = json.dumps({f'w{n}': {'dtype': 'F32', 'shape': [4], 'data_offsets': [0, 16]}}).encode()
        shard.write_bytes(struct.pack('<Q', len(header)) + header + bytes(16))
    alone = shutil.copy(shards[0], tmp_path / 'alone.safetensors')
    index = model / 'model.safetensors.index.json'
    index.write_text(json.dumps({'metadata': {}, 'weight_map': {f'w{n}': s.name for n, s in enumerate(shards)}}))
    for paths in shards, shards[:1]:
        done = ckptfs.adopt(paths[0], extra=paths[1:], check=False)
        assert done.returncode == REFUSED and not done.stdout
        for shard in paths:
            line = f'{shard}: is one of 3 shards of model.safetensors.index.json; adopt the directory {model}\n'
            assert done.stderr.count(line) == 1, done.stderr
        assert not os.path.exists(ckptfs.store)
    assert 'w1' in ckptfs.run('ls', shards[1]).stdout  # it may be looked at
    assert ckptfs.adopt(model).stdout.split() == ['llama/llama']
    ckptfs.adopt(alone)
    index.unlink()
    done = ckptfs.adopt(shards[0], check=False)
    assert done.returncode == REFUSED
    assert f'{shards[0]}: is shard 1 of 3 by its name, but an index' in done.stderr
    ckptfs.adopt(shutil.copy(shards[0], model / 'model-00001-of-00001.safetensors'), name='only')


def test_a_checkpoint_is_no_store(ckptfs, source, tmp_path):
    before = names(source)
    mnt = ckptfs.mountpoint()
    for words in (['mount', '--store', source, mnt],
                  ['adopt', source, '--store', source],
                  ['list', '--store', source]):
        done = ckptfs.run(*words, check=False)
        assert done.returncode == REFUSED, words
        assert f'do you mean --adopt {source}?' in done.stderr
    assert names(source) == before
    assert not os.path.exists(f'{source}/.tmp')


def test_mount_of_a_checkpoint_adopts_it(ckptfs, source):
    path = ckptfs.mountpoint()
    ckptfs.run('mount', source, path, '--store', ckptfs.store)
    assert os.listdir(f'{path}/view')
    assert os.path.exists(f'{path}/run/run7/step/{TAG}')
    done = ckptfs.run('mount', ckptfs.store, ckptfs.mountpoint(), check=False)
    assert done.returncode == REFUSED
    assert f'do you mean --store {ckptfs.store}?' in done.stderr


def test_nothing_is_hidden_by_a_mount_that_was_given_no_place(ckptfs, source, tmp_path):
    other = shutil.copytree(source, tmp_path / 'other')
    for words in ([source], [source, other], ['--follow', source], [source, tmp_path / 'none']):
        done = ckptfs.run('mount', '--store', ckptfs.store, *words, check=False)
        assert done.returncode != 0, words
        assert str(words[-1]) in done.stderr
        assert not os.path.exists(ckptfs.store), words
    assert 'not empty' in ckptfs.run('mount', source, check=False, env={'CKPTFS_STORE': ckptfs.store}).stderr
    mnt = ckptfs.mountpoint()
    with open(f'{mnt}/mine', 'w', encoding='utf-8'):
        pass
    ckptfs.run('mount', source, '--nonempty', mnt, '--store', ckptfs.store)
    assert 'mine' not in os.listdir(mnt)
    ckptfs.umount(mnt)
    assert os.listdir(mnt) == ['mine']


def test_what_cannot_be_followed_leaves_no_store(ckptfs, source, tmp_path):
    file = tmp_path / 'file'
    file.write_text('x')
    for words in (['adopt', '--watch', tmp_path / 'no/such'], ['adopt', '--watch', file],
                  ['mount', '--follow', file, ckptfs.mountpoint()]):
        done = ckptfs.run(*words, '--store', ckptfs.store, check=False)
        assert done.returncode != 0 and str(tmp_path) in done.stderr
        assert ('make that directory first' in done.stderr) == ('no/such' in str(words[2])), done.stderr
        assert not os.path.exists(ckptfs.store), words


@pytest.mark.skipif(os.geteuid() != 0, reason='mounts a filesystem')
def test_links_to_another_filesystem_are_refused_at_the_start(ckptfs, tmp_path):
    job, mnt = tmp_path / 'elsewhere', ckptfs.mountpoint()
    job.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', job], check=True)
    try:
        for path in job, job / 'later':
            for words in (['mount', '--follow', path, mnt], ['adopt', '--watch', path]):
                done = ckptfs.run(*words, '--link', '--store', ckptfs.store, check=False, timeout=20)
                assert done.returncode == REFUSED, done
                assert f'{path}: cannot be linked into the store' in done.stderr and '--copy' in done.stderr
                assert not os.path.exists(ckptfs.store) and not is_mounted(mnt)
        ckptfs.run('mount', '--follow', job, mnt, '--link', '--store', job / 'store')
        ckptfs.umount(mnt)
    finally:
        subprocess.run(['umount', job], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason='mounts a filesystem')
def test_a_whole_step_that_is_refused_is_not_called_unfinished(ckptfs, source):
    for folder, _, files in os.walk(source):
        for name in files:
            os.utime(f'{folder}/{name}', (1e9, 1e9))
    tag = source / TAG
    copy = shutil.copytree(tag, source.parent / 'copy')
    subprocess.run(['mount', '--bind', copy, tag], check=True)  # a mount that no link leads out of
    try:
        ckptfs.mount('--follow', source, '--link')
        said = ckptfs.run('status', '--store', ckptfs.store).stdout
        assert f'cannot be adopted: {TAG}: ' in said and 'not whole' not in said, said
        told = json.loads(ckptfs.run('status', '--json', '--store', ckptfs.store).stdout)
        assert told[0]['status']['following'][0]['waiting'][0]['refused'] is True
    finally:
        for mount in ckptfs.mounts:
            ckptfs.umount(mount)
        subprocess.run(['umount', tag], check=True)


def big_file(source):
    """The largest file of the checkpoint's step."""
    return max((os.path.join(source, TAG, n)
                for n in os.listdir(f'{source}/{TAG}')), key=os.path.getsize)


def states(ckptfs):
    """Returns what `list` says of each step."""
    return {s['id']: s['state'] for s in ckptfs.list()['steps']}


def rewrite(path):
    """Other bytes of the same number in the same file, its ends kept."""
    with open(path, 'r+b') as f:
        data = f.read()
        f.seek(4096)
        f.write(bytes(b ^ 1 for b in data[4096:-4096]))


def change_times(path, folder):
    """Yields what moves a file's change time and no byte."""
    os.chmod(path, 0o640)
    yield 'chmod'
    os.link(path, os.path.join(folder, 'link'))
    yield 'link'
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        yield 'chown'


def test_change_times_alone_stop_no_mount(ckptfs, source, tmp_path):
    mount = ckptfs.mount(adopt=[source])
    view = f'{mount}/view/dp3_zero1/rank1/model.safetensors'
    with open(view, 'rb') as f:
        before = f.read()
    for name in os.listdir(f'{source}/{TAG}'):
        where = tmp_path / 'links' / name
        os.makedirs(where)
        for what in change_times(f'{source}/{TAG}/{name}', where):
            assert states(ckptfs) == {TAG: 'sound'}, what
    time.sleep(1.1)  # files are looked at once a second
    for rank in range(3):
        with open(f'{mount}/view/dp3_zero1/rank{rank}/optimizer.pt',
                  'rb') as f:
            assert f.read()
    with open(view, 'rb') as f:
        assert f.read() == before
    status = json.loads(ckptfs.run('status', '--store', ckptfs.store,
                                   '--json').stdout)
    assert status[0]['status']['unsound'] == {}


def touched(ckptfs):
    """Returns what the daemon has read because of touched files."""
    status = json.loads(ckptfs.run('status', '--store', ckptfs.store,
                                   '--json').stdout)[0]['status']
    assert status['unsound'] == {}
    return status['touched']


def test_a_touch_stops_no_mount(ckptfs, source):
    mount = ckptfs.mount(adopt=[source])
    views = [f'{mount}/view/dp3_zero1/rank{rank}/{name}' for rank in range(3)
             for name in ('optimizer.pt', 'model.safetensors')]
    held = [open(path, 'rb') for path in views[:2]]
    before = [open(path, 'rb').read() for path in views]
    files = sorted(glob.glob(f'{source}/{TAG}/*.pt'))
    for path in files:
        os.utime(path)
    assert states(ckptfs) == {TAG: 'touched'}
    assert touched(ckptfs) == {'files': 0, 'bytes': 0}
    info = ckptfs.run('info', f'run7/{TAG}', '--store', ckptfs.store)
    assert 'touched: ' in info.stdout
    time.sleep(1.1)  # files are looked at once a second
    for _ in range(2):
        assert [open(path, 'rb').read() for path in views] == before
    assert [f.read() for f in held] == before[:2]
    at_first = touched(ckptfs)
    assert 0 < at_first['files'] <= len(files)  # once each
    os.utime(files[0])  # one of many is read, not all
    time.sleep(1.1)
    assert [open(path, 'rb').read() for path in views] == before
    assert touched(ckptfs)['files'] <= at_first['files'] + 1
    done = ckptfs.run('verify', f'run7/{TAG}', '--store', ckptfs.store)
    assert ': 0 defects' in done.stdout
    ckptfs.run('export', f'run7/{TAG}', 'dp3_zero1', ckptfs.folder + '/out',
               '--store', ckptfs.store)


@pytest.mark.parametrize('share', [0.1, 0.5, 0.9, 0.999])
def test_a_touch_hides_no_flipped_bit(ckptfs, source, share):
    mount = ckptfs.mount(adopt=[source])
    path = big_file(source)
    os.utime(path)
    view = f'{mount}/view/dp3_zero1/rank0/optimizer.safetensors'
    with open(view, 'rb') as f:
        f.read()
    with open(path, 'r+b') as f:
        at = int(os.path.getsize(path) * share)
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 0x10]))
    os.utime(path)
    time.sleep(1.1)
    with pytest.raises(OSError) as error:
        for rank in range(3):
            for name in ('optimizer.safetensors', 'model.safetensors'):
                with open(f'{mount}/view/dp3_zero1/rank{rank}/{name}',
                          'rb') as f:
                    f.read()
    assert error.value.errno == errno.ESTALE
    status = json.loads(ckptfs.run('status', '--store', ckptfs.store,
                                   '--json').stdout)
    assert status[0]['status']['unsound'][f'run7/{TAG}']['state'] == 'stale'


def test_without_checksums_a_touch_is_a_change(ckptfs, source):
    """As torch writes with set_crc32_options(False): the fields are 0."""
    path = big_file(source)
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    data = bytearray(open(path, 'rb').read())
    start = data.rfind(b'PK\5\6')
    at = int.from_bytes(data[start + 16:start + 20], 'little')
    if at == 0xffffffff:
        end64 = data.rfind(b'PK\6\6')
        at = int.from_bytes(data[end64 + 48:end64 + 56], 'little')
    for _ in records:  # of the central directory
        assert data[at:at + 4] == b'PK\1\2'
        data[at + 16:at + 20] = bytes(4)
        at += 46 + sum(int.from_bytes(data[at + i:at + i + 2], 'little')
                       for i in (28, 30, 32))
    with open(path, 'wb') as f:
        f.write(data)
    ckptfs.adopt(source)
    assert states(ckptfs) == {TAG: 'sound'}
    os.utime(path)
    assert states(ckptfs) == {TAG: 'stale'}


@pytest.mark.parametrize('old_times', [False, True])
def test_a_file_written_anew_is_stale(ckptfs, source, old_times):
    mount = ckptfs.mount(adopt=[source])
    view = f'{mount}/view/dp3_zero1/rank1/optimizer.safetensors'
    with open(view, 'rb') as f:
        assert f.read(10)
    path = big_file(source)
    info = os.stat(path)
    rewrite(path)
    if old_times:
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    time.sleep(1.1)
    with pytest.raises(OSError) as error:
        for rank in range(3):
            with open(f'{mount}/view/dp3_zero1/rank{rank}/'
                      'optimizer.safetensors', 'rb') as f:
                f.read()
    assert error.value.errno == errno.ESTALE
    # `list` asks the daemon, which read it; `info` does not, and knows only that it was touched.
    assert states(ckptfs) == {TAG: 'stale'}
    assert 'stale' in ckptfs.run('list', '--store', ckptfs.store).stdout
    seen = 'stale' if old_times else 'touched'
    info = ckptfs.run('info', f'run7/{TAG}', '--store', ckptfs.store)
    how = 'changed' if old_times else 'was touched'
    assert f'{seen}: {path} {how}' in info.stdout
    status = json.loads(ckptfs.run('status', '--store', ckptfs.store,
                                   '--json').stdout)
    assert status[0]['status']['unsound'][f'run7/{TAG}']['state'] == 'stale'
    ckptfs.umount(mount)
    assert states(ckptfs) == {TAG: seen}
    os.unlink(path)
    assert states(ckptfs) == {TAG: 'missing'}
