# SPDX-License-Identifier: Apache-2.0
"""Names that users give: `ckptfs tag` and `ckptfs rename`; and who sees a step."""
import json
import os
import pathlib
import shutil
import tempfile

import pytest

from plain_model import save


@pytest.fixture
def run(tmp_path):
    """A run of four steps."""
    for number in range(1, 5):
        save(tmp_path / 'run' / f'checkpoint-{number}', number)
    return tmp_path / 'run'


def names(c):
    """{step: its tags}"""
    return {step['step']: step['tags'] for step in c.list()['steps']}


def test_a_tag_stands_wherever_an_id_may(ckptfs, store, run, tmp_path):
    ckptfs.adopt(run)
    assert ckptfs.run('tag', *store, 'run/checkpoint-2', 'best').stdout == 'run/best: run/checkpoint-2\n'
    assert names(ckptfs)['run/checkpoint-2'] == ['best']
    assert 'TAGS' in ckptfs.run('list', *store).stdout
    assert ckptfs.run('resolve', *store, 'run', 'best').stdout == 'checkpoint-2\n'
    assert 'tags: best' in ckptfs.run('info', *store, 'run/best').stdout
    assert json.loads(ckptfs.run('ls', *store, '--json', 'run/best').stdout)
    ckptfs.run('export', *store, 'run/best', 'tp1/rank0', tmp_path / 'out')
    assert 'model.safetensors' in os.listdir(tmp_path / 'out')
    mount = ckptfs.mount('--run', 'run')
    ckptfs.run('switch', *store, 'run/best')
    assert os.readlink(f'{mount}/view').split('/')[3] == 'checkpoint-2'
    named = ckptfs.mount('--step', 'best')
    assert os.readlink(f'{named}/view').split('/')[3] == 'checkpoint-2'
    ckptfs.run('tag', *store, 'run/checkpoint-3', 'best')  # it moves
    assert ckptfs.run('resolve', *store, 'run', 'best').stdout == 'checkpoint-3\n'
    ckptfs.run('tag', *store, '--delete', 'run/best')
    assert ckptfs.run('resolve', *store, 'run', 'best', check=False).returncode == 3
    assert 'TAGS' not in ckptfs.run('list', *store).stdout


@pytest.mark.parametrize('name, code', [('latest', 4), ('a/b', 2), ('..', 2), ('a\nb', 2), ('x' * 201, 2),
                                        ('checkpoint-1', 7), ('', 2)])
def test_hostile_names_are_refused(ckptfs, store, run, name, code):
    ckptfs.adopt(run)
    assert ckptfs.run('tag', *store, 'run/checkpoint-2', name, check=False).returncode == code
    if name != 'checkpoint-1' and name != 'latest':
        assert ckptfs.run('rename', *store, 'run', name, check=False).returncode == 2
    assert set(map(tuple, names(ckptfs).values())) == {()}


def test_retention_and_remove_keep_what_has_a_name(ckptfs, store, run):
    ckptfs.adopt(run, extra=['--copy'])
    ckptfs.run('tag', *store, 'run/checkpoint-1', 'first')
    gone = json.loads(ckptfs.run('gc', *store, '--keep-last', '1', '--json').stdout)['removed']
    assert [step['id'] for step in gone] == ['checkpoint-2', 'checkpoint-3']
    refused = ckptfs.run('remove', *store, 'run/first', check=False)
    assert refused.returncode == 7 and 'first' in refused.stderr and 'tag --delete' in refused.stderr
    ckptfs.run('remove', *store, '--force', 'run/checkpoint-1')
    assert names(ckptfs) == {'run/checkpoint-4': []}
    # The name does not come back with another step of that id.
    ckptfs.adopt(run / 'checkpoint-1', extra=['--copy', '--name', 'run'])
    assert names(ckptfs)['run/checkpoint-1'] == []


def test_a_run_is_renamed(ckptfs, store, run):
    ckptfs.adopt(run)
    ckptfs.run('tag', *store, 'run/checkpoint-2', 'best')
    mount = ckptfs.mount('--run', 'run')
    refused = ckptfs.run('rename', *store, 'run', 'new', check=False)
    assert refused.returncode == 7 and mount in refused.stderr
    ckptfs.umount(mount)
    mount = ckptfs.mount('--run', 'other')  # shows nothing
    manifests = {step['id']: step['manifest'] for step in ckptfs.list()['steps']}
    assert ckptfs.run('rename', *store, 'run', 'new').stdout == 'run -> new (4 steps)\n'
    assert {step['id']: step['manifest'] for step in ckptfs.list()['steps']} == manifests
    assert {step['run'] for step in ckptfs.list()['steps']} == {'new'}
    assert os.listdir(f'{mount}/run') == ['new']
    assert ckptfs.run('resolve', *store, 'new', 'best').stdout == 'checkpoint-2\n'
    ckptfs.run('verify', *store, 'new/checkpoint-2')
    assert ckptfs.adopt(run, name='new').stdout.split() == [f'new/checkpoint-{n}' for n in range(1, 5)]
    assert ckptfs.run('rename', *store, 'run', 'x', check=False).returncode == 3
    ckptfs.adopt(run, name='run')
    assert ckptfs.run('rename', *store, 'run', 'new', check=False).returncode == 7


def test_a_followed_run_keeps_its_name(ckptfs, store, run, tmp_path):
    ckptfs.adopt(run)
    (tmp_path / 'elsewhere').mkdir()
    mount = ckptfs.mountpoint()
    ckptfs.run('mount', *store, *ckptfs.reserve, '--follow', run, mount)
    refused = ckptfs.run('rename', *store, 'run', 'new', check=False)
    assert refused.returncode == 7 and 'keeps its name' in refused.stderr


@pytest.fixture
def public_run(run):
    """The same where other users may enter, unlike pytest's own folder."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield shutil.copytree(run, pathlib.Path(path) / 'run')


def test_info_says_who_sees_a_step_and_what_keeps_others_out(ckptfs, store, public_run):
    run = public_run
    for folder, _, files in os.walk(run):
        os.chmod(folder, 0o755)
        for name in files:
            os.chmod(os.path.join(folder, name), 0o644)
    info = json.loads(ckptfs.run('info', '--json', run).stdout)
    assert info['seen_by'] == 'all users' and 'kept_out_by' not in info
    os.chmod(run, 0o700)
    info = json.loads(ckptfs.run('info', '--json', run).stdout)
    assert info['kept_out_by'].startswith(f'{run} (') and 'mode 0700' in info['kept_out_by']
    assert str(os.geteuid()) in info['seen_by']
    os.chmod(run, 0o755)
    weights = next(os.path.join(d, n) for d, _, ns in os.walk(run / 'checkpoint-4') for n in ns if n.endswith('.safetensors'))
    os.chmod(weights, 0o640)
    said = ckptfs.run('info', run).stdout
    line = next(one for one in said.splitlines() if one.startswith('seen by: '))
    assert weights in line and '0640' in line and 'group' in line


def test_status_says_who_sees_what_is_shown(ckptfs, store, public_run):
    ckptfs.mount(adopt=[public_run])
    told = ckptfs.run('status', '--verbose', *store).stdout
    assert 'view_seen_by: all users' in told and 'view_kept_out_by' not in told
    os.chmod(public_run, 0o700)
    told = ckptfs.run('status', '--verbose', *store).stdout
    assert 'view_seen_by: all users' not in told and f'view_kept_out_by: {public_run} (' in told


def test_a_name_of_another_directory_is_asked_about_at_once(ckptfs, store, run, tmp_path):
    ckptfs.adopt(run)
    other = tmp_path / 'b' / 'run'
    save(other / 'checkpoint-9', 9)
    done = ckptfs.adopt(other, check=False)
    assert done.returncode == 7 and str(run) in done.stderr and '--name' in done.stderr


@pytest.mark.parametrize('how', ['tag', 'compact'])
def test_a_step_that_the_store_keeps_is_not_replaced(ckptfs, store, run, how):
    """The job began anew: `--refresh` shows what is there now, beside the copy that was to stay."""
    ckptfs.adopt(run, extra=['--copy'])
    said = ckptfs.run(how, *store, 'run/checkpoint-1', *(['best'] if how == 'tag' else [])).stdout
    assert ('does not need' in said) == (how == 'compact')
    before = ckptfs.run('stats', *store, '--json', 'run/checkpoint-1').stdout
    shutil.rmtree(run / 'checkpoint-1')
    save(run / 'checkpoint-1', 77)
    said = ckptfs.adopt(run, extra=['--refresh']).stderr
    assert 'run/checkpoint-1-1' in names(ckptfs) and 'stays as it is' in said
    ckptfs.run('gc', *store)
    assert ckptfs.run('stats', *store, '--json', 'run/checkpoint-1').stdout == before
    ckptfs.run('verify', *store, 'run/checkpoint-1')
