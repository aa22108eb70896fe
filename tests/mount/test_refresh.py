# SPDX-License-Identifier: Apache-2.0
"""A step whose source, or what lies beside it, is not what it was."""
import errno
import json
import os
import pathlib
import shutil

import pytest

from hostile import TAG


def big_file(source):
    """The largest file of the checkpoint's step."""
    return max((os.path.join(source, TAG, n)
                for n in os.listdir(f'{source}/{TAG}')), key=os.path.getsize)


def states(ckptfs):
    """Returns what `list` says of each step."""
    return {s['id']: s['state'] for s in ckptfs.list()['steps']}


def test_logs_and_markers_are_no_part_of_a_step(ckptfs, source):
    with open(f'{source}/{TAG}/train.log', 'w') as f:
        f.write('begun')
    ckptfs.adopt(source)
    with open(f'{source}/{TAG}/train.log', 'a') as f:
        f.write('; done')
    with open(f'{source}/{TAG}/.uploaded', 'w') as f:
        f.write('yes')
    os.chmod(big_file(source), 0o600)
    assert ckptfs.adopt(source).stdout.split() == [f'run7/{TAG}']
    assert states(ckptfs) == {TAG: 'sound'}


def test_refresh_takes_notes_that_changed(ckptfs, source):
    log = f'{source}/{TAG}/train.log'
    with open(log, 'w') as f:
        f.write('begun')
    mount = ckptfs.mount(adopt=[source])
    shown = pathlib.Path(f'{mount}/run/run7/step/{TAG}/source/{TAG}')
    with open(log, 'a') as f:
        f.write('; done')
    with open(f'{source}/{TAG}/.uploaded', 'w') as f:
        f.write('yes')
    with pytest.raises(OSError) as error:
        (shown / 'train.log').read_bytes()
    assert error.value.errno == errno.ESTALE and '.uploaded' not in os.listdir(shown)
    for _ in range(2):
        done = ckptfs.adopt(source, extra=['--refresh'])
        assert done.stdout.split() == [f'run7/{TAG}'] and done.stderr == ''
        assert (shown / 'train.log').read_bytes() == b'begun; done' and (shown / '.uploaded').read_bytes() == b'yes'
    inode = os.stat(f'{mount}/view/dp2_zero1/rank0/optimizer.safetensors').st_ino
    ckptfs.adopt(source, extra=['--refresh'])  # nothing changed, small pieces are packed as before
    assert os.stat(f'{mount}/view/dp2_zero1/rank0/optimizer.safetensors').st_ino == inode
    assert states(ckptfs) == {TAG: 'sound'}


def test_refresh_replaces_a_step_and_tells_its_mounts(ckptfs, source):
    mount = ckptfs.mount(adopt=[source])
    path = f'{mount}/view/dp2_zero1/rank0/optimizer.safetensors'
    with open(path, 'rb') as f:
        before = f.read()
    inode = os.stat(path).st_ino
    done = ckptfs.adopt(source, extra=['--refresh'])  # nothing changed
    assert done.stdout.split() == [f'run7/{TAG}']
    assert os.stat(path).st_ino == inode
    for name in os.listdir(f'{source}/{TAG}'):
        where = f'{source}/{TAG}/{name}'
        shutil.copy(where, where + '.new')  # the same bytes, other files
        os.rename(where + '.new', where)
    assert states(ckptfs) == {TAG: 'stale'}
    done = ckptfs.adopt(source)
    assert done.stdout.split() == [f'run7/{TAG}-1']
    assert '--refresh' in done.stderr
    ckptfs.run('remove', f'run7/{TAG}-1', '--store', ckptfs.store)
    done = ckptfs.adopt(source, extra=['--refresh'])
    assert done.stdout.split() == [f'run7/{TAG}']
    assert states(ckptfs) == {TAG: 'sound'}
    with open(path, 'rb') as f:  # below /view, of the mount that was there
        assert f.read() == before
    assert os.stat(path).st_ino != inode


def test_a_file_that_went_is_missing_wherever_it_is_said(ckptfs, source):
    """In `list`, `info` and a mount's `status` alike."""
    mount = ckptfs.mount(adopt=[source])
    with open(f'{mount}/view/dp3_zero1/rank1/optimizer.safetensors', 'rb') as f:
        assert f.read(10)
    path = big_file(source)
    os.unlink(path)
    assert states(ckptfs) == {TAG: 'missing'}
    assert 'missing' in ckptfs.run('list', '--store', ckptfs.store).stdout
    step = (f'run7/{TAG}', '--store', ckptfs.store)
    assert f'missing: {path}' in ckptfs.run('info', *step).stdout
    said = json.loads(ckptfs.run('info', *step, '--json').stdout)
    assert said['state'] == 'missing' and path in said['reason']
    status = json.loads(ckptfs.run('status', '--store', ckptfs.store, '--json').stdout)
    unsound = status[0]['status']['unsound'][f'run7/{TAG}']
    assert unsound['state'] == 'missing' and path in unsound['reason']
    assert f'missing run7/{TAG}: ' in ckptfs.run('status', '--store', ckptfs.store).stdout


@pytest.mark.parametrize('again', ['adopt', 'refresh', 'mount'])
@pytest.mark.parametrize('how', ['--link', '--copy'])
def test_what_the_store_has_files_of_stays_the_store_s_own(ckptfs, source, how, again):
    """It was taken so that it outlives its source: nobody who adopts it again means otherwise."""
    ckptfs.adopt(source, extra=[how])
    before = ckptfs.list()['steps']
    if again == 'mount':
        mount = ckptfs.mount(adopt=[source])
    else:
        ckptfs.adopt(source, extra=['--refresh'] if again == 'refresh' else [])
        mount = ckptfs.mount()
    assert [step['id'] for step in ckptfs.list()['steps']] == [step['id'] for step in before] == [TAG]
    with open(f'{mount}/view/tp1/rank0/model.safetensors', 'rb') as f:
        held = f.read()
    ckptfs.umount(mount)
    shutil.rmtree(source)
    with open(f'{ckptfs.mount()}/view/tp1/rank0/model.safetensors', 'rb') as f:
        assert f.read() == held


def test_what_is_saved_again_is_kept_as_the_save_before(ckptfs, source):
    ckptfs.adopt(source, extra=['--copy'])
    for name in os.listdir(f'{source}/{TAG}'):
        where = f'{source}/{TAG}/{name}'
        shutil.copy(where, where + '.new')  # the same bytes, other files
        os.rename(where + '.new', where)
    ckptfs.adopt(source, extra=['--refresh'])
    shutil.rmtree(source)
    assert states(ckptfs) == {TAG: 'sound'}
