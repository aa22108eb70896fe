# SPDX-License-Identifier: Apache-2.0
"""`ckptfs compact`: every file of every view stays as it was, without the source."""
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile

import pytest
import torch
from safetensors import safe_open

from daemon import BIN, FIXTURES, TALLY, Ckptfs, checkpoint, step_of

LAYOUTS = ('tp1', 'tp2_dp2_zero1', 'dp3_zero3', 'pp2_tp2', 'dp4_fp32_flat', 'dp2_numbered', 'bf16', 'hf', 'mcore_tp2')


def digests(mount, run, layouts=LAYOUTS, own=True):
    """{path below the step: digest or link} of every file of the views, of what is told of
    them, and of the tensors for inspection."""
    step = step_of(mount, run)
    found = {}
    with open(f'{step}/info.json', encoding='utf-8') as f:
        layouts = (*layouts, *([json.load(f)['layout']] if own else []))
    tops = [f'view/{layout}' for layout in layouts if os.path.isdir(f'{step}/view/{layout}')]
    assert len(tops) > 1, tops
    for top in (*tops, 'param'):
        for folder, _, names in os.walk(f'{step}/{top}'):
            for name in names:
                path = os.path.join(folder, name)
                if os.path.islink(path):
                    found[path] = os.readlink(path)
                    continue
                if name == 'info.json':
                    continue
                with open(path, 'rb') as f:
                    found[path] = hashlib.file_digest(f, 'sha256').hexdigest()
    for name in ('README.txt', 'layouts.json'):
        with open(f'{step}/view/{name}', encoding='utf-8') as f:
            found[name] = f.read()
    return {os.path.relpath(path, step): value for path, value in found.items()}


def compact(c, step, *words, **more):
    """Returns what `ckptfs compact --json` says."""
    return json.loads(c.run('compact', '--store', c.store, '--json', *words, step, **more).stdout)


def source_of(path, tmp_path):
    """A copy that may go."""
    return shutil.copytree(path, tmp_path / 'source' / 'run', symlinks=True)


SOURCES = {
    **{name: (lambda name=name: checkpoint(name), TALLY) for name in (
        'zero1', 'zero2_frozen', 'zero3', 'zero3_2groups', 'tp2', 'tp2_pp2', 'pp2', 'stage0', 'zero2_rr', 'moe',
        'autotp3_uneven', 'zero2_low')},
    **{f'dcp_{name}': (lambda name=name: f'{FIXTURES}/dcp/{name}', ()) for name in (
        'fsdp2', 'fsdp2_tp', 'hsdp', 'ddp', 'accelerate', 'titan')},
    **{f'hf_{name}': (lambda name=name: f'{FIXTURES}/huggingface/{name}', ()) for name in ('llama', 'gpt2')},
    **{f'megatron_{name}': (lambda name=name: f'{FIXTURES}/megatron/{name}', ()) for name in ('llama', 'qwen2_moe')},
}


def tool_step(tmp_path, *parts):
    """A directory as Trainer saves it, with an engine's or transformers' own files in it."""
    step = tmp_path / 'tool' / 'run' / 'checkpoint-5'
    for part in parts:
        shutil.copytree(part, step, dirs_exist_ok=True)
    state = {'global_step': 5, 'epoch': 1.0, 'log_history': [], 'max_steps': 9, 'is_world_process_zero': True}
    (step / 'trainer_state.json').write_text(json.dumps(state))
    torch.save({'x': torch.arange(9)}, step / 'rng_state_0.pth')
    torch.save({'last_epoch': 5}, step / 'scheduler.pt')
    (step / 'notes.txt').write_text('read me')
    return str(step.parent)


def steps_below(path):
    """The directory of a fixture that `adopt` is given."""
    for inner in ('ckpt', 'model', 'checkpoint', ''):
        if os.path.isdir(os.path.join(path, inner)):
            return os.path.join(path, inner)
    return path


# One of each kind and cut; CKPTFS_LONG=1: all of them.
SAMPLE = SOURCES if os.environ.get('CKPTFS_LONG') else (
    'zero2_frozen', 'zero3_2groups', 'tp2_pp2', 'moe', 'dcp_fsdp2_tp', 'dcp_titan', 'hf_llama', 'megatron_llama')


@pytest.mark.parametrize('name', SAMPLE)
def test_views_are_the_same_files_without_the_source(ckptfs, tmp_path, name):
    where, words = SOURCES[name]
    source = source_of(steps_below(where()), tmp_path)
    adopted = ckptfs.adopt(source, 'run', extra=words, check=False)
    assert adopted.stdout, adopted.stderr
    step = adopted.stdout.splitlines()[-1]
    for other in ckptfs.list()['steps']:
        if other['step'] != step:
            ckptfs.run('remove', '--store', ckptfs.store, other['step'])
    mount = ckptfs.mount()
    before = digests(mount, 'run')
    report = compact(ckptfs, step, '--file-size', '1M', '--incomplete')
    assert report['done'] and report['step'] == step
    assert digests(mount, 'run') == before
    shutil.rmtree(tmp_path / 'source')
    ckptfs.umount(mount)
    mount = ckptfs.mount()
    assert digests(mount, 'run') == before
    said = ckptfs.run('verify', '--store', ckptfs.store, step)
    assert ': 0 defects' in said.stdout
    listed = ckptfs.list()['steps']
    assert [one['state'] for one in listed] == ['sound']
    again = compact(ckptfs, step, '--incomplete')
    assert not again['done'] and again['packed_files'] == again['kept_files'] == 0


@pytest.mark.parametrize('kind', ['engine', 'plain'])
def test_what_a_tool_resumes_from_stays_too(ckptfs, tmp_path, kind):
    parts = [checkpoint('zero2')] if kind == 'engine' else [f'{FIXTURES}/huggingface/llama/ckpt']
    source = tool_step(tmp_path, *parts)
    step = ckptfs.adopt(source, 'run', extra=(TALLY if kind == 'engine' else ())).stdout.splitlines()[-1]
    mount = ckptfs.mount()
    before = digests(mount, 'run')
    assert any(path.startswith('view/tp1/trainer/') for path in before)
    assert any(path.endswith('trainer/notes.txt') for path in before)
    report = compact(ckptfs, step, '--incomplete')
    assert report['kept_files'] >= 3 and (kind == 'plain' or report['packed_files'])
    shutil.rmtree(source)
    ckptfs.umount(mount)
    assert digests(ckptfs.mount(), 'run') == before


def test_packed_files_are_plain_safetensors(ckptfs, tmp_path):
    source = source_of(checkpoint('zero3'), tmp_path)
    step = ckptfs.adopt(source, extra=TALLY).stdout.splitlines()[-1]
    report = compact(ckptfs, step, '--file-size', '1M')
    files = sorted(os.listdir(f'{report["directory"]}/packed'))
    assert len(files) == report['packed_files']
    with safe_open(f'{FIXTURES}/zero3/truth.safetensors', 'pt') as truth:
        wanted = {name: truth.get_tensor(name) for name in truth.keys()}
    found = {}
    for name in files:
        with safe_open(f'{report["directory"]}/packed/{name}', 'pt') as f:
            found |= {key: f.get_tensor(key) for key in f.keys() if not key.startswith('document/')}
    masters = {key.split('/', 1)[1]: tensor for key, tensor in found.items() if key.startswith('master/')}
    assert masters
    equal = 0
    for name, tensor in masters.items():
        same = [one for key, one in wanted.items() if name in key and one.shape == tensor.shape and one.dtype == tensor.dtype
                and (one == tensor).all()]
        equal += bool(same)
    assert equal == len(masters)


def test_a_dry_run_writes_nothing(ckptfs, tmp_path):
    step = ckptfs.adopt(source_of(checkpoint('zero2'), tmp_path), extra=TALLY).stdout.splitlines()[-1]
    before = sorted(os.walk(ckptfs.store))
    said = ckptfs.run('compact', '--store', ckptfs.store, '--dry-run', step).stdout
    assert re.search(r'would write \d+ tensors in 1 file', said)
    assert sorted(os.walk(ckptfs.store)) == before


@pytest.mark.parametrize('words', [(), ('--copy',), ('--link',)])
def test_gc_and_remove_know_it(ckptfs, tmp_path, words):
    source = source_of(checkpoint('zero2'), tmp_path)
    step = ckptfs.adopt(source, extra=(*TALLY, *words)).stdout.splitlines()[-1]
    report = compact(ckptfs, step)
    gc = json.loads(ckptfs.run('gc', '--store', ckptfs.store, '--json').stdout)
    assert gc['directories'] == len(words)  # what the copy or the links had
    assert os.listdir(f'{ckptfs.store}/blobs') == [os.path.basename(report['directory'])]
    # The same save is the same step, whatever lies where; refreshing changes nothing.
    for more in ((), ('--refresh',)):
        assert ckptfs.adopt(source, extra=(*TALLY, *words, *more)).stdout.split() == [step]
    assert [one['manifest'] for one in ckptfs.list()['steps']] == [report['manifest']]
    ckptfs.run('verify', '--store', ckptfs.store, step)
    ckptfs.run('remove', '--store', ckptfs.store, step)
    ckptfs.run('gc', '--store', ckptfs.store)
    assert os.listdir(f'{ckptfs.store}/blobs') == []


def test_a_source_that_is_written_again_takes_no_compacted_step_away(ckptfs, tmp_path):
    source = source_of(checkpoint('zero2'), tmp_path)
    step = ckptfs.adopt(source, extra=TALLY).stdout.splitlines()[-1]
    report = compact(ckptfs, step)
    path = next(os.path.join(d, n) for d, _, names in os.walk(source) for n in names if 'model_states' in n)
    saved = torch.load(path, weights_only=False)
    saved['module'] = {k: v + 1 for k, v in saved['module'].items()}
    torch.save(saved, path)
    again = ckptfs.adopt(source, extra=(*TALLY, '--refresh', '--check', 'never'))
    assert again.stdout.split() == [f'{step}-1'] and 'compacted' in again.stderr
    assert {one['step']: one['manifest'] for one in ckptfs.list()['steps']}[step] == report['manifest']
    ckptfs.run('gc', '--store', ckptfs.store)
    ckptfs.run('verify', '--store', ckptfs.store, step)


def test_a_changed_source_is_refused(ckptfs, tmp_path):
    source = source_of(checkpoint('zero2'), tmp_path)
    step = ckptfs.adopt(source, extra=TALLY).stdout.splitlines()[-1]
    path = next(os.path.join(d, n) for d, _, names in os.walk(source) for n in names if 'optim_states' in n)
    with open(path, 'r+b') as f:
        f.truncate(os.path.getsize(path) - 1)
    done = ckptfs.run('compact', '--store', ckptfs.store, step, check=False)
    assert done.returncode == 5 and os.path.basename(path) in done.stderr
    assert [one['step'] for one in ckptfs.list()['steps']] == [step]


def test_killed_anywhere_the_step_is_as_it_was_or_as_it_will_be(ckptfs, tmp_path):
    source = source_of(checkpoint('zero3'), tmp_path)
    step = ckptfs.adopt(source, extra=TALLY).stdout.splitlines()[-1]
    first = ckptfs.list()['steps'][0]['manifest']
    words = [BIN, 'compact', '--store', ckptfs.store, '--file-size', '1M', '--threads', '1', step]
    manifests, killed = set(), 0
    for point in range(1, 200):
        ended = subprocess.run(words, env={**os.environ, 'CKPTFS_KILL_AT': str(point)}, check=False,
                               capture_output=True, timeout=120)
        (one,) = ckptfs.list()['steps']
        manifests.add(one['manifest'])
        ckptfs.run('verify', '--store', ckptfs.store, step)
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        killed += 1
    assert killed >= 4 and ended.returncode == 0
    assert manifests == {first, one['manifest']} and one['manifest'] != first
    assert not [n for n in os.listdir(f'{ckptfs.store}/blobs') if 'partial' in n]
    shutil.rmtree(source)
    ckptfs.run('verify', '--store', ckptfs.store, step)


def test_a_killed_one_goes_on_or_is_reclaimed(ckptfs, tmp_path):
    source = source_of(checkpoint('zero3'), tmp_path)
    step = ckptfs.adopt(source, extra=TALLY).stdout.splitlines()[-1]
    words = [BIN, 'compact', '--store', ckptfs.store, '--file-size', '1M', '--threads', '1', step]
    kill = {**os.environ, 'CKPTFS_KILL_AT': '6'}  # after the second piece
    assert subprocess.run(words, env=kill, check=False, timeout=120).returncode == -signal.SIGKILL
    assert [n for n in os.listdir(f'{ckptfs.store}/blobs') if 'partial' in n]
    report = compact(ckptfs, step, '--file-size', '1M')
    assert report['resumed_bytes'] > 0
    ckptfs.run('remove', '--store', ckptfs.store, step)
    step = ckptfs.adopt(source, extra=TALLY).stdout.splitlines()[-1]
    ckptfs.run('gc', '--store', ckptfs.store)
    assert subprocess.run(words, env=kill, check=False, timeout=120).returncode == -signal.SIGKILL
    gc = json.loads(ckptfs.run('gc', '--store', ckptfs.store, '--json').stdout)
    assert gc['directories'] == 1 and os.listdir(f'{ckptfs.store}/blobs') == []


@pytest.mark.skipif(os.geteuid() != 0, reason='mounts a tmpfs')
def test_a_full_store_keeps_the_step(tmp_path):
    folder = tmp_path / 'fs'
    folder.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'none', folder], check=True)
    c = Ckptfs(str(folder))
    try:
        source = source_of(checkpoint('zero3'), tmp_path)
        step = c.adopt(source, extra=(*TALLY, '--pack', 'never')).stdout.splitlines()[-1]
        used = os.statvfs(folder).f_bfree
        done = c.run('compact', '--store', c.store, step, check=False)
        assert done.returncode == 8 and 'No space' in done.stderr and step in done.stderr, done.stderr
        assert used - os.statvfs(folder).f_bfree <= 4  # a lock and its folder
        assert c.list()['steps'][0]['state'] == 'sound'
        c.run('verify', '--store', c.store, step)
    finally:
        c.close()
        subprocess.run(['umount', folder], check=True)


@pytest.fixture
def public():
    """A store and mounts that other users may reach, as pytest's own folder is not."""
    with tempfile.TemporaryDirectory(prefix='ckptfs-compact-') as path:
        os.chmod(path, 0o755)
        program = Ckptfs(path)
        yield program
        program.close()


@pytest.mark.skipif(os.geteuid() != 0, reason='becomes other users')
def test_who_saw_the_step_still_does_and_nobody_else(public):
    source = source_of(checkpoint('zero2'), pathlib.Path(public.folder))
    os.chmod(os.path.dirname(source), 0o755)
    for folder, _, names in os.walk(source):
        for name in names:
            os.chmod(os.path.join(folder, name), 0o640)
            os.chown(os.path.join(folder, name), 1234, 5678)
    step = public.adopt(source, extra=TALLY).stdout.splitlines()[-1]
    mount = public.mount('--allow-other')

    def sees(uid, gid):
        code = f'import os; os.setgroups([]); os.setgid({gid}); os.setuid({uid}); os.listdir({step_of(mount, "run")!r} + "/view")'
        return subprocess.run(['python3', '-c', code], capture_output=True, check=False).returncode == 0
    users = [(1234, 1), (1, 5678), (1, 1)]
    before = [sees(*user) for user in users]
    assert before == [True, True, False]
    compact(public, step)
    assert [sees(*user) for user in users] == before
    shutil.rmtree(source)
    assert [sees(*user) for user in users] == before
