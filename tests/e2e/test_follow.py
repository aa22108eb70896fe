# SPDX-License-Identifier: Apache-2.0
"""A mount that follows a job: steps appear as they are saved, and what dies never does."""
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time

import pytest
import torch
from daemon import BIN, checkpoint, is_mounted, wait_until
from rotating_job import DIES
from safetensors.torch import load_file

HERE = os.path.dirname(os.path.abspath(__file__))


def shown(mount):
    """The step that /view leads to; nothing if there is none."""
    try:
        return os.readlink(os.path.join(mount, 'view')).split('/')[3]
    except FileNotFoundError:
        return None


def following(ckptfs):
    """Returns what the status says of it."""
    status = json.loads(ckptfs.run('status', '--store', ckptfs.store, '--json').stdout)
    return status[0]['status']['following'][0]


def watch(ckptfs, *words):
    """`adopt --watch`, whose lines can be read."""
    process = subprocess.Popen([BIN, 'adopt', '--watch', '--store', ckptfs.store,
                                *map(str, words)], stdout=subprocess.PIPE, text=True)
    ckptfs.processes.append(process)
    return process


def steps(ckptfs):
    """All of the store."""
    return {f"{step['run']}/{step['id']}" for step in ckptfs.list()['steps']}


def save_as(variant, folder, tag):
    """A DeepSpeed save of another iteration: its files one by one, then the pointer."""
    source = os.path.join(checkpoint(variant), 'global_step5')
    os.makedirs(os.path.join(folder, tag))
    for name in sorted(os.listdir(source), reverse=True):
        shutil.copyfile(os.path.join(source, name), os.path.join(folder, tag, name))
        yield name
    with open(os.path.join(folder, 'latest'), 'w', encoding='ascii') as f:
        f.write(tag)


def test_a_mount_follows_a_job(ckptfs, tmp_path):
    job = tmp_path / 'job'  # the job makes the directory itself
    mount = ckptfs.mountpoint()
    ckptfs.run('mount', '--store', ckptfs.store, '--reserve', '0', '--follow', job, mount)
    assert shown(mount) is None
    assert following(ckptfs)['adopted'] == 0
    for _ in save_as('zero2', job, 'global_step5'):
        assert shown(mount) is None and not steps(ckptfs)
    wait_until(lambda: shown(mount) == 'global_step5', '/view')
    view = os.path.join(mount, 'view', 'dp1', 'rank0', 'model.safetensors')
    assert os.path.getsize(view) > 0
    half = save_as('zero2', job, 'global_step6')
    next(half)
    for _ in save_as('zero2', job, 'global_step7'):
        pass
    wait_until(lambda: shown(mount) == 'global_step7', '/view')
    assert steps(ckptfs) == {'job/global_step5', 'job/global_step7'}
    wait_until(lambda: following(ckptfs)['waiting'], 'the step that died')
    wait_until(lambda: following(ckptfs)['waiting'][0]['left_behind'], 'and that it did')
    told = following(ckptfs)
    assert told['adopted'] == 2 and told['run'] == 'job' and told['path'] == str(job)
    assert [step['id'] for step in told['waiting']] == ['global_step6']
    assert 'global_step6' in told['waiting'][0]['why']
    shown_to_people = ckptfs.run('status', '--store', ckptfs.store).stdout
    assert f'follows {job}: 2 steps adopted' in shown_to_people
    assert 'died: global_step6' in shown_to_people
    for _ in half:  # somebody finished it after all: it is not a later step
        pass
    wait_until(lambda: 'job/global_step6' in steps(ckptfs), 'the late step')
    wait_until(lambda: not following(ckptfs)['waiting'], 'nothing to be waited for')
    ckptfs.umount(mount)


def test_tags_in_folders_are_steps_of_one_run(ckptfs, tmp_path):
    """save_checkpoint(dir, tag='epoch_1/step_5'): `latest` of the job says that its tags lie in folders."""
    job = tmp_path / 'job'
    ckptfs.mount()  # the store is there
    watch(ckptfs, job)
    for tag in ('epoch_1/step_5', 'epoch_1/step_6', 'epoch_2/step_7'):
        for _ in save_as('zero2', job, tag):
            pass
        wait_until(lambda tag=tag: f"job/{tag.replace('/', '-')}" in steps(ckptfs), tag)
    assert steps(ckptfs) == {'job/epoch_1-step_5', 'job/epoch_1-step_6', 'job/epoch_2-step_7'}


def test_a_linked_step_outlives_the_jobs_own_retention(ckptfs, tmp_path):
    output, truth = tmp_path / 'output', tmp_path / 'truth'
    output.mkdir()
    truth.mkdir()
    mount = ckptfs.mount()
    saves, lost = 6, set(range(DIES, 7, DIES))
    watcher = watch(ckptfs, '--link', output)
    job = [sys.executable, os.path.join(HERE, 'rotating_job.py'), output, truth, saves, 5, 2]
    subprocess.run(list(map(str, job)), check=True, stdout=subprocess.DEVNULL)
    kept = {f'output/checkpoint-{n}' for n in range(1, saves + 1) if n not in lost}
    wait_until(lambda: steps(ckptfs) == kept, 'every whole step')
    assert sorted(os.listdir(output)) == ['checkpoint-5', 'checkpoint-6']
    watcher.send_signal(signal.SIGINT)
    assert watcher.wait(20) == 0
    assert {line.strip() for line in watcher.stdout} == kept
    for number in set(range(1, saves + 1)) - lost:
        view = os.path.join(mount, 'run', 'output', 'step', f'checkpoint-{number}', 'view')
        found = load_file(os.path.join(view, 'tp1', 'rank0', 'model.safetensors'))
        there = load_file(truth / f'{number}.safetensors')
        assert found.keys() == there.keys()
        assert all(torch.equal(found[name], value) for name, value in there.items()), number
    assert shown(mount) is None or shown(mount) == 'checkpoint-1'  # it does not follow


def test_a_watcher_tells_each_step_as_json(ckptfs, tmp_path):
    job = tmp_path / 'job'
    for _ in save_as('zero2', job, 'global_step5'):
        pass
    watcher = watch(ckptfs, '--json', job)
    first = json.loads(watcher.stdout.readline())
    for _ in save_as('zero2', job, 'global_step7'):
        pass
    second = json.loads(watcher.stdout.readline())
    watcher.send_signal(signal.SIGINT)
    assert watcher.wait(20) == 0 and watcher.stdout.read() == ''
    assert [told['step'] for told in (first, second)] == ['job/global_step5', 'job/global_step7']
    kept = {step['id']: step for step in ckptfs.list()['steps']}
    for told in first, second:
        assert told['source'] == str(job / told['id']) and told['run'] == 'job'
        assert (told['manifest'], told['iteration']) == (kept[told['id']]['manifest'], kept[told['id']]['iteration'])


def test_a_link_that_leads_elsewhere_is_told(ckptfs, tmp_path):
    """A launcher makes `current` lead to each new run; the one that it led to stays followed."""
    runs = tmp_path / 'runs'
    for name in ('first', 'second'):
        (runs / name).mkdir(parents=True)
    (runs / 'current').symlink_to('first')
    mount = ckptfs.mountpoint()
    ckptfs.run('mount', '--store', ckptfs.store, '--reserve', '0', '--follow', runs / 'current', mount)
    assert following(ckptfs)['switched'] is None
    (runs / 'next').symlink_to('second')
    os.replace(runs / 'next', runs / 'current')
    wait_until(lambda: following(ckptfs)['switched'], 'a line')
    assert f'{runs}/current leads to {runs}/second now' in following(ckptfs)['switched']
    assert 'leads to' in ckptfs.run('status', '--store', ckptfs.store).stdout


@pytest.mark.parametrize('how', ['by reference', '--copy'])
def test_a_log_that_grows_in_a_steps_directory_keeps_it_from_nobody(ckptfs, tmp_path, how):
    job = tmp_path / 'job'
    for _ in save_as('zero2', job, 'global_step5'):
        pass
    log = job / 'global_step5' / 'train.log'
    mount = ckptfs.mount()  # this makes the store
    watch(ckptfs, *[word for word in [how] if word.startswith('-')], job)

    def grow():
        with open(log, 'a', encoding='ascii') as f:
            f.write('and on\n')
        return steps(ckptfs)
    grow()
    wait_until(grow, 'the step')
    step = os.path.join(mount, 'run', 'job', 'step', 'global_step5')
    wait_until(lambda: os.listdir(step), 'the step in the mount')
    assert os.path.getsize(os.path.join(step, 'view', 'dp1', 'rank0', 'model.safetensors')) > 0
    assert 'train.log' in os.listdir(os.path.join(step, 'source', 'global_step5'))
    for _ in range(30):
        assert grow() == {'job/global_step5'}
        time.sleep(0.1)


def test_a_daemon_that_dies_while_it_follows_goes_on(ckptfs, tmp_path):
    job = tmp_path / 'job'
    job.mkdir()
    daemon, mount = ckptfs.start('--follow', '--copy', job)
    for _ in save_as('zero2', job, 'global_step5'):
        pass
    wait_until(lambda: shown(mount) == 'global_step5', '/view', daemon)
    for _ in save_as('zero2', job, 'global_step6'):
        pass
    daemon.kill()
    daemon.wait()
    for _ in save_as('zero2', job, 'global_step7'):
        pass
    shutil.rmtree(job / 'global_step5')
    ckptfs.start('--follow', '--copy', job, path=mount)
    wait_until(lambda: shown(mount) == 'global_step7', '/view')
    kept = {f'job/global_step{n}' for n in (5, 6, 7)}
    wait_until(lambda: steps(ckptfs) == kept, 'the others')
    view = os.path.join(mount, 'run', 'job', 'step', 'global_step5', 'view', 'dp1', 'rank0')
    with open(os.path.join(view, 'model.safetensors'), 'rb') as f:
        assert f.read()


@pytest.mark.skipif(os.geteuid() != 0, reason='mounts a filesystem')
def test_a_filesystem_that_tells_nothing_is_looked_at(ckptfs, tmp_path):
    job = tmp_path / 'job'
    job.mkdir()
    subprocess.run(['mount', '-t', 'ramfs', 'none', job], check=True)
    try:
        daemon, mount = ckptfs.start('--follow', job)
        assert following(ckptfs)['by'] == 'polling'
        for _ in save_as('zero2', job, 'global_step5'):
            pass
        wait_until(lambda: shown(mount) == 'global_step5', '/view', daemon)
        ckptfs.umount(mount)
        daemon.wait(20)
    finally:
        subprocess.run(['umount', '-l', job], check=True)


def begin_copy(folder):
    """A model of a program that copies: it has its size and half of its bytes; its file, which is open."""
    size = 1 << 20
    header = json.dumps({'w': {'dtype': 'F32', 'shape': [size // 4], 'data_offsets': [0, size]}}).encode()
    header += b' ' * (-len(header) % 8)
    folder.mkdir()
    (folder / 'config.json').write_text('{"model_type": "x"}')
    file = open(folder / 'model.safetensors', 'wb')
    os.posix_fallocate(file.fileno(), 0, 8 + len(header) + size)
    file.write(struct.pack('<Q', len(header)) + header + b'x' * (size // 2))
    file.flush()
    return file


def test_a_copy_that_goes_on_is_no_step(ckptfs, tmp_path):
    model = tmp_path / 'epoch_1'
    copy = begin_copy(model)
    mount = ckptfs.mountpoint()
    for words in (['adopt'], ['adopt', '--copy'], ['adopt', '--link'], ['mount']):
        more = [mount] if words[0] == 'mount' else []
        done = ckptfs.run(*words, model, *more, '--store', ckptfs.store, check=False)
        assert done.returncode != 0 and 'model.safetensors: a process has it open for writing' in done.stderr, done
        assert not os.path.exists(ckptfs.store)
    assert not is_mounted(mount)
    copy.close()  # it died
    done = ckptfs.adopt(model)
    assert done.stderr.startswith(f'ckptfs: {tmp_path.name}/epoch_1: {model}/model.safetensors: ')
    assert 'bytes were never written; they read as zeros' in done.stderr
    assert [step['provisional'] for step in ckptfs.list()['steps']] == [False]


def test_what_cannot_be_followed_is_refused(ckptfs, tmp_path):
    file = tmp_path / 'file'
    file.write_text('x')
    mount = ckptfs.mountpoint()
    for path, said in ((file, 'not a directory'), (tmp_path / 'no' / 'such', 'neither does')):
        for words in (['adopt', '--watch', path], ['mount', '--follow', path, mount]):
            done = ckptfs.run(*words, '--store', ckptfs.store, check=False)
            assert done.returncode != 0 and said in done.stderr, done.stderr
