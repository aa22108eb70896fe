# SPDX-License-Identifier: Apache-2.0
"""source/ is the step's directory as it is: somebody's notes, logs and scripts, too, which are not part of what
the step is."""
import contextlib
import json
import os
import pathlib
import shutil
import stat
import struct
import subprocess
import tempfile
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from daemon import wait_until

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, '..', 'golden', 'deepspeed_tiny', 'ckpt')
SCRIPT = '#!/bin/sh\nls "$(dirname "$0")"\n'


def tree(folder):
    """{path: content} of the regular files below a folder."""
    out = {}
    for above, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(above, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                with open(path, 'rb') as f:
                    out[os.path.relpath(path, folder)] = f.read()
    return out


NAMES = ["'zero_to_torch.py'", 'global_step3/private_too']


def notes_of(ckptfs, path):
    """Returns what a look at a step says that source/ does not have."""
    said = json.loads(ckptfs.run('info', path, '--json').stdout)
    private = [one['text'] for one in said['left_out'] if one.get('part') == 'document']
    if any(' more: some users who may read the step' in text for text in private):
        private += NAMES  # the first is named, and the others are counted
    return [note for note in said['notes'] if note.startswith('not in source/')] + private


def write(path, text, mode=0o644):
    """A file in folders that need not be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


@pytest.fixture
def folder():
    """One that all may search, as pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix='ckptfs-source-') as made:
        os.chmod(made, 0o755)
        yield pathlib.Path(made)


@pytest.fixture
def run(folder):
    """A run of DeepSpeed's with its only tag."""
    shutil.copytree(GOLDEN, folder / 'run')
    for above, _, names in os.walk(folder / 'run'):
        os.chmod(above, 0o755)
        for name in names:
            os.chmod(os.path.join(above, name), 0o644)
    tag, = [name for name in os.listdir(folder / 'run') if name.startswith('global_step')]
    return folder / 'run' / tag


def mounted(ckptfs, tag, *words):
    """source/ of the step."""
    ckptfs.adopt(tag.parent, extra=words)
    return f'{ckptfs.mount()}/run/run/step/{tag.name}/source'


def test_all_files_of_the_step_are_there(ckptfs, run):
    write(run / 'notes.txt', 'lr was too high\n')
    write(run / 'eval' / 'deep' / 'scores.json', '{}')
    write(run / '.hidden', 'x')
    write(run / 'bell\a\nline \udcff'.encode('utf-8', 'surrogateescape').decode('utf-8', 'surrogateescape'), 'odd')
    source = mounted(ckptfs, run)
    assert tree(f'{source}/{run.name}') == tree(run)
    assert not notes_of(ckptfs, run.parent)
    assert {s['state'] for s in ckptfs.list()['steps']} == {'sound'}


def test_scripts_are_executed_where_they_could_be(ckptfs, run):
    write(run / 'show.sh', SCRIPT, 0o755)
    write(run / 'mine.sh', SCRIPT, 0o744)
    write(run / 'text.sh', SCRIPT)
    write(run.parent / 'zero_to_fp32.py', '#!/bin/sh\nls "$1"\n', 0o775)
    source = mounted(ckptfs, run)
    modes = {name: stat.S_IMODE(os.stat(f'{source}/{run.name}/{name}').st_mode)
             for name in ('show.sh', 'mine.sh', 'text.sh')}
    assert modes == {'show.sh': 0o555, 'mine.sh': 0o544, 'text.sh': 0o444}
    assert stat.S_IMODE(os.stat(f'{source}/zero_to_fp32.py').st_mode) == 0o555
    assert stat.S_IMODE(os.stat(f'{source}/latest').st_mode) == 0o444
    said = subprocess.run([f'{source}/{run.name}/show.sh'], capture_output=True, text=True, check=True).stdout
    assert 'show.sh' in said.split()
    said = subprocess.run(['./zero_to_fp32.py', '.'], cwd=source, capture_output=True, text=True, check=True).stdout
    assert 'latest' in said.split()


def test_nobody_executes_what_only_another_may(ckptfs, run):
    """The bits of who may read the step, and no others."""
    write(run / 'show.sh', SCRIPT, 0o755)
    for name in os.listdir(run):
        os.chmod(run / name, 0o740 if name == 'show.sh' else 0o640)
    source = mounted(ckptfs, run)
    assert stat.S_IMODE(os.stat(f'{source}/{run.name}/show.sh').st_mode) == 0o540


def test_a_log_that_grows_is_no_other_step(ckptfs, run):
    log = run / 'train.log'
    write(log, 'begun\n')
    source = mounted(ckptfs, run)
    with open(log, 'a', encoding='utf-8') as f:
        f.write('goes on\n')
    write(run / 'uploaded', '')
    assert {s['state'] for s in ckptfs.list()['steps']} == {'sound'}
    with pytest.raises(OSError, match='Stale'):
        with open(f'{source}/{run.name}/train.log', 'rb') as f:
            f.read()
    view = source.replace('/source', '/view/tp1/rank0/model.pt')
    assert torch.load(view)
    done = ckptfs.adopt(run.parent)
    assert done.stdout.split() == [f'run/{run.name}']
    os.remove(log)
    assert {s['state'] for s in ckptfs.list()['steps']} == {'sound'}
    assert torch.load(view)


def test_what_cannot_be_shown_is_said(ckptfs, run):
    write(run.parent.parent / 'elsewhere', 'not ours')
    write(run / 'private.txt', 'fewer may read it', 0o600)
    write(run / 'closed' / 'inside.txt', 'x')
    (run / 'closed').chmod(0o700)
    write(run / 'global_step9' / 'notes.txt', 'of another step')
    os.symlink('../../elsewhere', run / 'out')
    os.symlink('..', run / 'up')
    os.symlink('nowhere', run / 'dangling')
    os.symlink('private.txt', run / 'private_too')
    os.mkfifo(run / 'fifo')
    write(run / 'kept.txt', 'x')
    os.symlink('kept.txt', run / 'second')
    said = '\n'.join(notes_of(ckptfs, run.parent))
    for name in 'private.txt', 'private_too', 'closed', 'global_step9', 'out', 'up', 'dangling':
        assert f'{run.name}/{name}' in said, name
    source = mounted(ckptfs, run)
    shown = set(os.listdir(f'{source}/{run.name}'))
    assert {'kept.txt', 'second'} <= shown
    assert not shown & {'private.txt', 'private_too', 'closed', 'global_step9', 'out', 'up', 'dangling', 'fifo'}
    assert oct(stat.S_IMODE(os.stat(f'{source}/{run.name}/kept.txt').st_mode)) == '0o444'


def test_a_note_of_what_is_not_shown_is_no_part_of_the_step(ckptfs, run):
    mounted(ckptfs, run)
    write(run / 'private.txt', 'fewer may read it', 0o600)
    assert notes_of(ckptfs, run.parent)
    assert ckptfs.adopt(run.parent).stdout.split() == [f'run/{run.name}']
    assert len(ckptfs.list()['steps']) == 1


def test_more_files_than_are_carried_are_said(ckptfs, run):
    for i in range(4100):
        (run / f'x{i:04}').touch()
    assert any('beyond the first 4096' in note for note in notes_of(ckptfs, run.parent))
    source = mounted(ckptfs, run)
    assert 4096 <= len(os.listdir(f'{source}/{run.name}')) < 4100 + len(os.listdir(GOLDEN))


@pytest.mark.parametrize('how', ['--copy', '--link'])
def test_they_go_with_what_the_store_takes(ckptfs, run, how):
    write(run / 'notes.txt', 'lr was too high\n')
    write(run / 'eval' / 'show.sh', SCRIPT, 0o755)
    source = mounted(ckptfs, run, how)
    saved = tree(run)
    shutil.rmtree(run.parent)
    assert tree(f'{source}/{run.name}') == saved
    assert stat.S_IMODE(os.stat(f'{source}/{run.name}/eval/show.sh').st_mode) == 0o555


def test_of_a_dcp_directory_too(ckptfs, folder):
    step = folder / 'job' / 'step-5'
    dcp.save({'model': torch.nn.Linear(4, 4).state_dict()}, checkpoint_id=step)
    for name in os.listdir(step):
        os.chmod(step / name, 0o644)
    write(step / 'config.yaml', 'lr: 1\n')
    write(step / 'logs' / 'rank0.log', 'begun\n')
    write(step / 'private.txt', 'fewer may read it', 0o600)
    ckptfs.adopt(step.parent)
    shown = tree(f'{ckptfs.mount()}/run/job/step/step-5/source/step-5')
    saved = tree(step)
    del saved['private.txt']
    assert shown == saved


@pytest.mark.parametrize('how', [[], ['--copy']])
def test_scripts_are_for_those_who_may_read_them(ckptfs, folder, run, how):
    write(folder / 'private' / 'secret', 'nobody else reads this')
    (folder / 'private').chmod(0o700)
    os.symlink('../private/secret', run.parent / 'zero_to_fp32.py')
    write(run.parent / 'zero_to_torch.py', 'nobody else reads this', 0o600)
    source = mounted(ckptfs, run, *how)
    assert set(os.listdir(source)) == {run.name, 'latest'}
    said = '\n'.join(notes_of(ckptfs, run.parent))
    assert "'zero_to_fp32.py'" in said and "'zero_to_torch.py'" in said
    (folder / 'private').chmod(0o755)
    (run.parent / 'zero_to_torch.py').chmod(0o644)
    ckptfs.adopt(run.parent, extra=['--refresh', *how])
    assert how or {'zero_to_fp32.py', 'zero_to_torch.py'} < set(os.listdir(source))


def test_a_note_in_a_closed_directory_hides_no_step(ckptfs, folder, run):
    write(folder / 'private' / 'secret', 'nobody else reads this')
    (folder / 'private').chmod(0o700)
    os.symlink('../../private/secret', run / 'via')
    write(run / 'later.txt', 'x')
    source = mounted(ckptfs, run)
    assert 'via' not in os.listdir(f'{source}/{run.name}') and f'{run.name}/via' in '\n'.join(notes_of(ckptfs, run.parent))
    mode = lambda: stat.S_IMODE(os.stat(source).st_mode)  # by who may see the step
    assert mode() == 0o555
    (run / 'later.txt').chmod(0o600)
    ckptfs.adopt(run.parent, extra=['--refresh'])
    assert mode() == 0o555 and 'later.txt' not in os.listdir(f'{source}/{run.name}')


def test_a_note_that_went_hides_no_step(ckptfs, run):
    write(run / 'eval' / 'deep' / 'scores.json', '{}')
    ckptfs.adopt(run.parent)
    shutil.rmtree(run / 'eval')
    source = f'{ckptfs.mount()}/run/run/step/{run.name}/source'
    assert stat.S_IMODE(os.stat(source).st_mode) == 0o555  # by who may see the step
    with pytest.raises(OSError, match='Stale'):
        with open(f'{source}/{run.name}/eval/deep/scores.json', 'rb') as f:
            f.read()
    (run / 'eval').mkdir()
    (run / 'eval').chmod(0o700)
    wait_until(lambda: stat.S_IMODE(os.stat(source).st_mode) == 0o500, 'a look at what lies there')


def test_a_folder_with_an_acl_hides_no_step(ckptfs, run):
    """In the mode of a file with an ACL the group bits are a mask, and not what the group may."""
    write(run / 'theirs' / 'notes.txt', 'x')
    entries = (0x01, 7, -1), (0x02, 5, 65534), (0x04, 0, -1), (0x10, 5, -1), (0x20, 5, -1)
    os.setxattr(run / 'theirs', 'system.posix_acl_access',
                struct.pack('<I', 2) + b''.join(struct.pack('<HHi', *entry) for entry in entries))
    assert f"the folder '{run.name}/theirs'" in '\n'.join(notes_of(ckptfs, run.parent))
    source = mounted(ckptfs, run)
    assert stat.S_IMODE(os.stat(source).st_mode) == 0o555


def test_a_link_that_is_no_name_costs_no_step(ckptfs, run):
    os.symlink('x' * 300, run / 'long')
    assert f'{run.name}/long' in '\n'.join(notes_of(ckptfs, run.parent))
    assert ckptfs.adopt(run.parent).returncode == 0


@pytest.fixture
def trainer(folder, run):
    """The same as a step of transformers' Trainer."""
    step = folder / 'out' / 'checkpoint-5'
    shutil.copytree(run.parent, step)
    write(step / 'trainer_state.json', '{}')
    return step


def test_links_to_folders_are_followed_nowhere(ckptfs, folder, trainer):
    write(folder / 'private' / 'customer.pdf', 'x')
    os.symlink('../../private', trainer / 'x')
    os.symlink('/proc', trainer / 'proc')
    said = '\n'.join(notes_of(ckptfs, trainer.parent))
    assert 'checkpoint-5/x' in said and 'checkpoint-5/proc' in said and 'customer' not in said and '/proc/' not in said
    ckptfs.adopt(trainer.parent)
    shown = f'{ckptfs.mount()}/run/out/step/checkpoint-5/source/checkpoint-5'
    assert not {'x', 'proc'} & set(os.listdir(shown))


def test_links_round_and_round_end(ckptfs, trainer):
    for here, there in ('a', 'b'), ('b', 'a'):
        os.makedirs(trainer / here, exist_ok=True)
        for i in range(400):
            os.symlink(f'../{there}', trainer / here / f'l{i}')
    assert len(notes_of(ckptfs, trainer.parent)) == 800
    assert ckptfs.adopt(trainer.parent).returncode == 0


def test_what_is_not_shown_is_said_a_thousand_times(ckptfs, run):
    for i in range(1100):
        os.symlink('..', run / f'l{i}')
    said = notes_of(ckptfs, run.parent)
    assert len(said) == 1001 and said[-1].endswith('and 100 more files and folders')


def test_more_folders_than_are_looked_into_are_said(ckptfs, trainer):
    for i in range(4100):
        (trainer / f'd{i:04}').mkdir()
    assert any('the content of folders around the step beyond' in note for note in notes_of(ckptfs, trainer.parent))


@contextlib.contextmanager
def meanwhile(act):
    """Does it again and again, in another thread."""
    end = threading.Event()

    def run():
        while not end.wait(0.001):
            act()
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize('how', ['--copy', '--link'])
def test_a_note_that_changes_costs_no_step(ckptfs, run, how):
    def act():
        with open(run / 'train.log', 'a', encoding='utf-8') as f:
            f.write('goes on\n')
        (run / 'passing').touch()
        (run / 'passing').unlink()
    write(run / 'kept.txt', 'x')
    weights = tree(run)
    with meanwhile(act):
        ckptfs.adopt(run.parent, extra=[how])
    assert len(ckptfs.list()['steps']) == 1
    shown = tree(f'{ckptfs.mount()}/run/run/step/{run.name}/source/{run.name}')
    log = shown.pop('train.log', b'goes on\n')
    assert (run / 'train.log').read_bytes().startswith(log) and log.startswith(b'goes on\n')
    shown.pop('passing', None)
    assert shown == weights
    assert ckptfs.run('verify', f'run/{run.name}', '--store', ckptfs.store).returncode == 0


@pytest.mark.parametrize('how', [None, '--link'])
def test_a_note_that_changed_is_no_defect(ckptfs, run, how):
    write(run / 'train.log', 'begun\n')
    ckptfs.adopt(run.parent, extra=[how] if how else [])
    with open(run / 'train.log', 'a', encoding='utf-8') as f:
        f.write('goes on\n')
    done = ckptfs.run('verify', f'run/{run.name}', '--store', ckptfs.store)
    assert 'note: 1 file beside the step' in done.stdout and 'train.log' in done.stdout and ': 0 defects' in done.stdout
    big = max((p for p in run.iterdir() if p.suffix == '.pt'), key=lambda p: p.stat().st_size)
    with open(big, 'ab') as f:
        f.write(b'x')
    assert ckptfs.run('verify', f'run/{run.name}', '--store', ckptfs.store, check=False).returncode == 9
