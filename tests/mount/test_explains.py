# SPDX-License-Identifier: Apache-2.0
"""The tool says of itself: refusals where people look, health, inspection."""
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile

import pytest

from daemon import BIN, is_mounted, public_program, wait_until
from plain_model import save

TAG = 'global_step3'
REASON = 'user.ckptfs.reason'


def rc(ckptfs, *words, **more):
    """Exit code, stdout and stderr of a command that may fail."""
    done = ckptfs.run(*words, check=False, **more)
    return done.returncode, done.stdout, done.stderr


# ---- refusals where people look --------------------------------------------------


def test_readme_and_index(ckptfs, source, store):
    mount = ckptfs.mount(adopt=[source])
    view = f'{mount}/view'
    assert {'README.txt', 'layouts.json'} < set(os.listdir(view))
    with open(f'{view}/README.txt') as f:
        text = f.read()
    assert os.path.getsize(f'{view}/README.txt') == len(text.encode())
    assert f'run7/{TAG}' in text and 'dp4_zero2_plain' in text and '--hf-config' in text
    assert all(c == '\n' or c.isprintable() for c in text)
    assert max(map(len, text.splitlines())) <= 100 and '\n  any layout (huggingface): ' in text
    reasons = ' '.join(text.split())
    assert reasons.count('would cut through a unit of 8 (a slice is 4)') == 3  # dim 0 of tp4 and tp8, dim 1 of tp8
    for whole in '`--hf-config DIR`', f'ckptfs explain LAYOUT --step run7/{TAG}':
        assert whole in text
    with open(f'{view}/layouts.json') as f:
        index = json.load(f)
    assert index['source_layout'] == 'dp4_zero2_plain'
    for name, layout in index['layouts'].items():
        shown = os.path.isdir(f'{view}/{name}')
        assert shown == bool(layout['formats']), name
        if shown:
            assert (layout['world'] > 0) and 'info.json' in os.listdir(f'{view}/{name}')
    refused = next(c for c in index['layouts']['tp1']['refused'] if c['formats'] == ['huggingface'])
    assert refused['code'] == 'unsupported'
    assert '--hf-config DIR' in refused['needs'] and refused['parameter'] is None
    cut = next(c for c in index['layouts']['tp8']['refused'] if 'rank' in c['formats'])
    assert cut['parameter'] == 'model.layers.0.self_attn.qkv_proj.weight'
    assert cut['formats'] == ['rank', 'deepspeed'] and cut['layout'] == 'tp8'
    told = json.loads(ckptfs.run('info', 'run7', '--json', *store).stdout)['refusals']
    assert told == sum((layout['refused'] for layout in index['layouts'].values()), [])
    with open(f'{view}/tp2/info.json') as f:
        assert json.load(f)['refused'] == index['layouts']['tp2']['refused']


@pytest.mark.parametrize('words, code', [
    (['explain', 'pp3'], 0), (['map', 'pp3'], 4), (['export', 'run7/latest', 'pp3/rank0', 'OUT'], 4),
    (['export', 'run7/latest', 'tp8/rank0', 'OUT'], 4), (['map', 'tp8'], 4), (['explain', 'tp8'], 0),
    (['explain', 'tp2', 'huggingface'], 4), (['explain', 'dp2', 'rank7'], 3)])
def test_a_refusal_has_one_structure(ckptfs, source, store, words, code):
    """Layout, code, parameter and needs, where the command refuses as where it explains."""
    ckptfs.adopt(source)
    words = [w.replace('OUT', ckptfs.folder + '/out') for w in words]
    done, text, said = rc(ckptfs, *words, *store)
    _, out, said_json = rc(ckptfs, *words, '--json', *store)
    assert done == code and said == said_json
    told = json.loads(out)
    refusal = told['error'] if 'error' in told else told['refused'][0]
    layout = words[2 if words[0] == 'export' else 1].split('/')[0]
    assert refusal['layout'] == layout and refusal['code'] in ('invalid', 'unsupported', 'not found')
    reason = refusal.get('message') or refusal['reason']
    assert reason in said + text
    needs = {'pp3': 'add a split such as split1-1-0', 'tp2': '`--hf-config DIR` of `mount`, `export` and `explain` gives one'}.get(layout)
    assert refusal['needs'] == needs
    cut = 'model.layers.0.self_attn.qkv_proj.weight'
    assert refusal['parameter'] == (cut if layout == 'tp8' else None)
    if layout == 'tp8':
        assert reason.count('dim 0') == 1 and f"'{cut}' and 3 more: " in reason


def test_the_reason_is_an_attribute(ckptfs, source):
    mount = ckptfs.mount(adopt=[source])
    view = f'{mount}/view/'
    assert os.listxattr(view) == []
    with pytest.raises(OSError):
        os.getxattr(view, REASON)
    for name in ('pp16', 'TP2', '.hidden', 'nonsense', 'tp2'):
        os.path.exists(view + name)
    lines = os.getxattr(view, REASON).decode().splitlines()
    assert os.listxattr(view) == [REASON]
    assert [line.split(':')[0] for line in lines] == ['nonsense', 'TP2', 'pp16']
    assert 'do you mean tp2?' in lines[1] and 'no format can show layout pp16' in lines[2]
    assert '--hf-config' in os.getxattr(view + 'tp2', REASON).decode()
    for path in (mount, view + 'tp2/rank0', view + 'tp2/rank0/model.pt'):
        assert os.listxattr(path) == []
    for n in range(40):  # the last ones are kept
        os.path.exists(f'{view}tp2_x{n}')
    assert len(os.getxattr(view, REASON).decode().splitlines()) == 16


def test_hostile_names_move_no_cursor(ckptfs, source):
    mount = ckptfs.mount(adopt=[source])
    name = 'tp2\x1b[2Jx\n\u202e'
    os.path.exists(f'{mount}/view/{name}')
    text = os.getxattr(f'{mount}/view/', REASON).decode()
    assert '\\x1b' in text and text.count('\n') == 1 and '\x1b' not in text and '\u202e' not in text


@pytest.mark.skipif(os.geteuid() != 0, reason='becomes another user')
def test_reasons_are_for_those_who_see_the_step(ckptfs, source):
    os.chmod(ckptfs.folder, 0o755)
    mount = ckptfs.mount(adopt=[source])
    view = f'{mount}/run/run7/step/{TAG}/view'
    os.path.exists(view + '/pp16')
    for name in os.listdir(source / TAG):
        os.chmod(source / TAG / name, 0o600)
    look = 'import os, sys\ntry:\n print(os.getxattr(sys.argv[1], "user.ckptfs.reason"))\nexcept OSError as e:\n print(e.errno)'
    for word in (view, view + '/README.txt'):
        done = subprocess.run(['python3', '-c', look, word], user=65534, group=65534, extra_groups=[],
                              capture_output=True, text=True)
        assert done.stdout.strip() in ('2', '13'), done


def test_errors_as_json(ckptfs, source, store):
    ckptfs.adopt(source)
    code, out, _ = rc(ckptfs, 'export', 'run7/latest', 'pp16', ckptfs.folder + '/out', '--json', *store)
    error = json.loads(out)['error']
    assert code == 4 and error['code'] == 'unsupported' and 'pp16' in error['message']
    code, out, _ = rc(ckptfs, 'explain', 'pp16', '--json', *store)
    told = json.loads(out)
    assert code == 4 and told['shown'] == [] and told['layout'] == 'pp16'
    assert sum((c['formats'] for c in told['refused']), []) and len(told['refused']) >= 2
    code, out, _ = rc(ckptfs, 'adopt', '/nonexist', '--json', *store)
    assert json.loads(out)['refusals'][0]['code'] == 'not found' and code == 3
    done = ckptfs.run('explain', 'pp4', *store, check=False)
    assert 'add a split such as split' in done.stdout


# ---- words that were misspelt ----------------------------------------------------


@pytest.mark.parametrize('words, meant', [
    ('adopt /x --lnik', '--link'), ('mount /m --runn a', '--run'), ('export a/b tp2 /x --thread 2', '--threads'),
    ('lst', 'list'), ('statsu', 'status'), ('explain TP2', 'tp2?'), ('export a/b tp2-dp4 /x', 'tp2_dp4?'),
    ('warm tp2dp4', 'tp2_dp4?'), ('completions tcsh', 'bash, zsh or fish'),
    ('mount --adpot /x /m', '--adopt?'), ('export --outptu X', 'export'), ('map --outptu x.svg tp2', '--output?'),
    ('info --familly x /x', '--family?'), ('export --thread 2', '--threads?'), ('gc --keep-lats=3', '--keep-last?'),
    ('--stroe /x list', '--store?'), ('--json list', 'options follow the command')])
def test_what_was_meant_is_told(ckptfs, words, meant):
    code, _, said = rc(ckptfs, *words.split())
    assert code == 2 and meant in said


@pytest.mark.parametrize('words, message', [
    (['map', 'xx', '--json'], "layout token 'xx'"),
    (['explain', 'tp2.0', '--json'], "'tp' must be followed by a whole number"),
    (['gc', '--keep-last', '-1', '--json'], '--keep-last'),
    (['nothing', '--json'], "no command 'nothing'"),
    (['list', '--json', '--nothing'], "'--nothing'"),
])
def test_usage_errors_as_json(ckptfs, words, message):
    done = ckptfs.run(*words, check=False)
    error = json.loads(done.stdout)['error']
    assert done.returncode == 2 and error['code'] == 'usage' and message in error['message']
    assert message in done.stderr


def test_names_in_a_mount_that_were_meant(ckptfs, source):
    mount = ckptfs.mount(adopt=[source])
    step = f'run/run7/step/{TAG}'
    for name, meant in [('view/tp2/deepspede', 'deepspeed'), ('view/tp2/rank0/modle.pt', 'model.pt'),
                        ('view/tp2/deepspeed/latset', 'latest'), (f'{step}/param/model.norm.wieght', 'model.norm.weight'),
                        (f'{step}/param/model.norm.weight/exp_avgg.safetensors', 'exp_avg.safetensors'),
                        (f'{step}/source/lastest', 'latest'), (f'{step}/source/global_setp3/x', 'global_step3'),
                        (f'{step}/source/{TAG}/mp_rank_00_model_state.pt', 'mp_rank_00_model_states.pt'),
                        (f'{step}/veiw', 'view'), ('vew', 'view'), ('run/rnu7', 'run7')]:
        code, _, said = rc(ckptfs, 'explain', f'{mount}/{name}')
        assert code == 3 and f'do you mean {meant}' in said, (name, said)


def test_a_diff_of_nothing_is_refused(ckptfs, source, store):
    ckptfs.adopt(source, 'run7')
    for words, named in (['no_such'], "'no_such'"), (['--kind', 'exp_avgg'], "kind 'exp_avgg'"):
        done = ckptfs.run('diff', *store, 'run7', 'run7', *words, check=False)
        assert done.returncode == 3 and 'no tensor' in done.stderr and named in done.stderr


def test_places_where_nothing_can_be_made(ckptfs, source, store):
    ckptfs.adopt(source, 'run7')
    done = ckptfs.run('export', *store, 'run7', 'dp2_zero1', '/proc/nothing', check=False)
    assert done.returncode == 3 and '/proc/nothing' in done.stderr, done
    done = ckptfs.run('export', *store, 'run7', 'huggingface', str(source / 'out'), check=False)
    assert done.returncode == 2 and 'such as tp1/huggingface' in done.stderr
    done = ckptfs.run('export', *store, 'run7', 'dp2_zero1/rank9', str(source / 'out'), check=False)
    assert done.returncode == 3 and 'there are rank0 to rank1' in done.stderr
    ckptfs.run('export', *store, 'run7', 'dp2_zero1/rank0/', str(source / 'out'))
    assert 'model.safetensors' in os.listdir(source / 'out')


def test_a_picture_that_cannot_be_written_is_none(ckptfs, source, store, tmp_path):
    small = tmp_path / 'small'
    small.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=4k', 'tmpfs', small], check=True)
    try:
        done = ckptfs.run('map', 'dp2_zero1', '--step', str(source), '--output', str(small / 'map.svg'), check=False)
        assert done.returncode == 8 and not os.listdir(small), done
    finally:
        subprocess.run(['umount', small], check=True)


def test_small_things(ckptfs, source, store):
    code, _, said = rc(ckptfs, 'explain', 'tp2 dp4', *store)
    assert code == 2 and 'do you mean tp2_dp4?' in said
    assert ckptfs.run('-V').stdout == ckptfs.run('--version').stdout
    assert ckptfs.run('help', 'adopt').stdout == ckptfs.run('adopt', '--help').stdout
    assert 'SUBCOMMAND' in ckptfs.run('help').stdout
    for words in (['adopt', 's3://b/x', *store], ['info', 's3://b/x'], ['mount', 's3://b/x', ckptfs.folder]):
        code, _, said = rc(ckptfs, *words)
        assert code == 4 and 'object stores are not read yet' in said
    empty = ckptfs.mountpoint()
    code, _, said = rc(ckptfs, 'adopt', empty, *store)
    assert code == 3 and not os.path.exists(ckptfs.store)  # nothing adopted, no store
    code, _, said = rc(ckptfs, 'mount', '--adopt', empty, ckptfs.mountpoint(), *store)
    assert code == 3 and not os.path.exists(ckptfs.store)
    ckptfs.run('adopt', source, env={'CKPTFS_STORE': ckptfs.store})
    listed = ckptfs.run('list', env={'CKPTFS_STORE': ckptfs.store}).stdout.splitlines()
    assert listed[0].split() == ['STEP', 'ITERATION', 'SAVED', 'AGE', 'STATE', 'SOURCE']
    assert listed[1].startswith(f'run7/{TAG} ') and ' ago ' in listed[1]


def test_an_adopt_whose_sample_differs_leaves_no_store(ckptfs, source, store):
    folder = source / TAG
    names = sorted(n for n in os.listdir(folder) if 'zero_pp_rank' in n)
    os.rename(folder / names[0], folder / 'x')
    os.rename(folder / names[1], folder / names[0])
    os.rename(folder / 'x', folder / names[1])
    code, _, said = rc(ckptfs, 'adopt', source, *store)
    assert code == 9 and '--check never' in said and not os.path.exists(ckptfs.store)


def test_info_of_a_run_and_of_an_incomplete_step(ckptfs, source, store):
    shutil.copytree(source / TAG, source / 'global_step9')
    for name in os.listdir(source / 'global_step9'):
        if 'zero_pp_rank_1' in name:
            os.unlink(source / 'global_step9' / name)
    text = ckptfs.run('info', source).stdout
    assert 'step: global_step3 ' in text and 'skipped: global_step9: incomplete' in text
    told = json.loads(ckptfs.run('info', source, '--json').stdout)
    assert 'global_step9' in told['skipped'][0]
    ckptfs.adopt(source)
    assert f'run: run7 (1 step: {TAG})' in ckptfs.run('info', 'run7', *store).stdout
    assert json.loads(ckptfs.run('info', 'run7', '--json', *store).stdout)['run_steps'] == [TAG]
    assert rc(ckptfs, 'info', 'run8', *store)[0] == 3


def test_a_truncated_step_refuses_no_other(ckptfs, source, store):
    """Not even the one that the framework's pointer names."""
    shutil.copytree(source / TAG, source / 'global_step9')
    bad = source / 'global_step9' / 'mp_rank_00_model_states.pt'
    os.truncate(bad, os.path.getsize(bad) // 2)
    (source / 'latest').write_text('global_step9')
    code, out, said = rc(ckptfs, 'info', source, '--json')
    assert code == 4 and json.loads(out)['step'] == TAG and 'global_step9' in said
    code, out, said = rc(ckptfs, 'adopt', source, *store)
    assert code == 4 and out == f'run7/{TAG}\n' and 'global_step9' in said and 'incomplete' not in said
    mount = ckptfs.mount()
    assert os.listdir(f'{mount}/run/run7/step') == [TAG]


def test_a_finished_export_is_success(ckptfs, source, store):
    ckptfs.adopt(source)
    to = os.path.join(ckptfs.folder, 'out')
    words = ['export', 'run7/latest', 'dp2_zero1/deepspeed', to, *store]
    first = ckptfs.run(*words).stdout
    again = ckptfs.run(*words).stdout
    assert 'were there' in again and first.split(' in ')[0] == again.split(' in ')[0]
    name = next(os.path.join(f, n) for f, _, ns in os.walk(to) for n in ns if n.endswith('.pt'))
    with open(name, 'r+b') as f:
        f.seek(-1, 2)
        last = f.read(1)
        f.seek(-1, 2)
        f.write(bytes([last[0] ^ 1]))
    code, _, said = rc(ckptfs, *words)
    assert code == 7 and f"'deepspeed/{os.path.relpath(name, to)}' holds other bytes" in said
    os.unlink(name)
    code, out, said = rc(ckptfs, *words, '--json')
    assert code == 7 and f"'deepspeed/{os.path.relpath(name, to)}' is missing" in said
    assert json.loads(out)['error']['needs'] == 'choose an empty directory'
    code, _, said = rc(ckptfs, 'export', 'run7/latest', 'dp2_zero1/rank0', to, *store)
    assert code == 7 and 'not an export' in said and 'missing' not in said


def test_a_model_of_ones_own_is_not_called_an_export(ckptfs, store, tmp_path):
    mine = tmp_path / 'mine'
    save(tmp_path / 'run/checkpoint-5', 5)
    save(mine, 7)
    before = {name: (mine / name).read_bytes() for name in os.listdir(mine)}
    ckptfs.adopt(tmp_path / 'run')
    words = ['export', 'run/checkpoint-5', 'tp1/huggingface', mine, *store]
    code, _, said = rc(ckptfs, *words)
    assert code == 7 and "'huggingface/model.safetensors' holds other bytes" in said, said
    for wrong in ('this export', 'finished', 'remove'):
        assert wrong not in said
    (mine / 'model.safetensors').write_bytes(b'longer' * 10000)
    code, _, said = rc(ckptfs, *words)
    assert code == 7 and 'bytes instead of' in said and 'remove' not in said
    (mine / 'model.safetensors').write_bytes(before['model.safetensors'])
    assert {name: (mine / name).read_bytes() for name in os.listdir(mine)} == before


# ---- incidents -------------------------------------------------------------------


def test_status_begins_with_health(ckptfs, source, store):
    mount = ckptfs.mountpoint()
    said = ckptfs.run('mount', '--reserve', '0', *store, source, mount).stderr
    log = re.search(r'; log: (\S+)', said)[1]
    assert os.path.exists(log)
    with open(f'{mount}/view/tp1/rank0/model.pt', 'rb') as f:
        f.read()
    text = ckptfs.run('status', *store).stdout
    first = text.splitlines()[0]
    for part in (f'{mount}: alive for ', ', ckptfs ', f'/view -> /run/run7/step/{TAG}/view', 'no stale sources',
                 'memory: ', ' GiB filled', f'log: {log}'):
        assert part in first, (part, first)
    assert 'recent_opens' not in text and 'served: ' in text
    assert 'recent_opens' in ckptfs.run('status', '--verbose', *store).stdout
    os.utime(source / TAG / 'mp_rank_00_model_states.pt')
    with open(source / TAG / 'mp_rank_00_model_states.pt', 'ab') as f:
        f.write(b'x')
    assert '1 STALE sources' in ckptfs.run('status', *store).stdout.splitlines()[0]
    assert json.loads(ckptfs.run('status', '--json', *store).stdout)[0]['daemon']['log'] == log


def test_a_dead_mount_is_told(ckptfs, source, store):
    ckptfs.adopt(source)
    process, mount = ckptfs.start()
    wait_until(lambda: 'started_ns' in rc(ckptfs, 'status', '--json', *store)[1], 'its record', process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: 'DEAD' in rc(ckptfs, 'status', *store)[1], 'the end')
    for words in (store, ['--mountpoint', mount]):
        code, out, _ = rc(ckptfs, 'status', *words)
        assert code == 3 and f'{mount}: DEAD: its daemon is gone since 20' in out
        assert f'`ckptfs umount {mount}`' in out and f'`ckptfs mount --store {ckptfs.store} --reserve 0 {mount}`' in out
    dead, = json.loads(rc(ckptfs, 'status', '--json', *store)[1])
    assert not dead['alive'] and dead['daemon']['seen_ns'] > 0
    ckptfs.run('umount', mount)
    assert rc(ckptfs, 'status', *store)[1] == ''


@pytest.mark.parametrize('name', ["a job's", 'job\n\x1b[2J', 'job'])
def test_the_cure_of_a_dead_mount_restores_it(ckptfs, source, tmp_path, name):
    """Typed in any directory, whatever the names hold, and the dead mount still there."""
    job = tmp_path / name
    os.rename(source, job)
    mount = ckptfs.mountpoint()
    words = ['mount', '--store', ckptfs.store, '--reserve', '0', '--layout', 'tp2', '--run', 'mine', '--name', 'mine',
             '--read-ahead', '0', '--follow', name, os.path.relpath(mount, tmp_path)]
    subprocess.run([BIN, *words], cwd=tmp_path, check=True, capture_output=True)
    wait_until(lambda: os.path.exists(f'{mount}/view/tp2'), 'the step', seconds=20)
    before, = json.loads(ckptfs.run('status', '--store', ckptfs.store, '--json').stdout)
    os.kill(before['pid'], signal.SIGKILL)
    wait_until(lambda: 'DEAD' in rc(ckptfs, 'status', '--store', ckptfs.store)[1], 'the end')
    cure = json.loads(rc(ckptfs, 'status', '--store', ckptfs.store, '--json')[1])[0]['cure']
    assert cure.split('`')[1] in rc(ckptfs, 'status', '--store', ckptfs.store)[1]
    for given in '--layout tp2', '--run mine', '--follow', '--name mine', '--read-ahead 0', '--reserve 0':
        assert given in cure
    os.makedirs(tmp_path / 'bin')
    os.symlink(os.path.abspath(BIN), tmp_path / 'bin' / 'ckptfs')
    subprocess.run(['bash', '-c', cure.split('`')[1]], cwd='/', check=True, capture_output=True,
                   env={**os.environ, 'PATH': f"{tmp_path}/bin:{os.environ['PATH']}"})
    after, = json.loads(ckptfs.run('status', '--store', ckptfs.store, '--json').stdout)
    assert after['mountpoint'] == mount and after['status']['following'][0]['path'] == before['status']['following'][0]['path']
    assert after['status']['view'] == before['status']['view'] and 'tp2' in os.listdir(f'{mount}/view')


def test_busy_mounts_name_who_uses_them(ckptfs, source, store):
    mount = ckptfs.mount(adopt=[source])
    name = f'run/run7/step/{TAG}/view/tp1/rank0/model.pt'
    with open(f'{mount}/{name}', 'rb'):
        code, _, said = rc(ckptfs, 'umount', mount)
        assert code == 7 and f'(pid {os.getpid()}: {name})' in said and '--lazy' in said
        code, _, said = rc(ckptfs, 'remove', f'run7/{TAG}', *store)
        assert code == 7 and mount in said and '--force' in said and 'Nothing was removed' in said
        assert [s['step'] for s in ckptfs.list()['steps']] == [f'run7/{TAG}']
        told = json.loads(ckptfs.run('remove', '--force', '--json', f'run7/{TAG}', *store).stdout)
        removed, = told['removed']
        assert removed['shown_by'] == [mount] and removed['users'][0]['pid'] == os.getpid()


def test_switch_and_remove_check_all_first(ckptfs, source, store, tmp_path):
    other = shutil.copytree(source, tmp_path / 'other')
    mount = ckptfs.mount(adopt=[source])
    ckptfs.adopt(other)
    with open(f'{mount}/view/tp1/rank0/model.pt', 'rb'):
        out = ckptfs.run('switch', f'other/{TAG}', *store).stdout
    assert out.splitlines()[0] == f'{mount}: /view: run7/{TAG} -> other/{TAG}'
    assert f'(pid {os.getpid()}) goes on with 1 file of run7/{TAG}' in out
    assert 'showed that already' in ckptfs.run('switch', f'other/{TAG}', *store).stdout
    assert rc(ckptfs, 'switch', 'other/none', *store)[0] == 3
    assert rc(ckptfs, 'remove', f'run7/{TAG}', 'other/none', *store)[0] == 3
    assert len(ckptfs.list()['steps']) == 2
    assert ckptfs.run('remove', f'run7/{TAG}', f'run7/{TAG}', *store).stdout == f'removed run7/{TAG}\n'
    assert len(ckptfs.list()['steps']) == 1


# ---- inspection ------------------------------------------------------------------


def test_ls_names_every_tensor(ckptfs, source, store):
    ckptfs.adopt(source)
    told = json.loads(ckptfs.run('ls', 'run7', '--json', *store).stdout)['tensors']
    mount = ckptfs.mount()
    names = {(t['name'], t['kind']) for t in told}
    params = f'{mount}/run/run7/step/{TAG}/param'
    assert names == {(p, k.removesuffix('.safetensors')) for p in os.listdir(params) for k in os.listdir(f'{params}/{p}')}
    for tensor in told:
        with open(f"{params}/{tensor['name']}/{tensor['kind']}.safetensors", 'rb') as f:
            size, = struct.unpack('<Q', f.read(8))
            header, = (v for k, v in json.loads(f.read(size)).items() if k != '__metadata__')
        assert header['shape'] == tensor['shape']
        assert header['data_offsets'][1] - header['data_offsets'][0] == tensor['bytes']
    master = next(t for t in told if t['kind'] == 'master')
    assert master['held_by']['files'] >= 1
    text = ckptfs.run('ls', 'run7', '*.bias', '--kind', 'weight', *store).stdout.splitlines()
    assert text[0].split()[:5] == ['NAME', 'KIND', 'SHAPE', 'DTYPE', 'BYTES'] and len(text) == 4
    code, _, said = rc(ckptfs, 'ls', 'run7', 'model.norm.wieght', *store)
    assert code == 3 and 'do you mean model.norm.weight?' in said


def test_explain_any_path(ckptfs, source, store):
    mount = ckptfs.mount(adopt=[source])
    step = f'{mount}/run/run7/step/{TAG}'
    for path in (mount, f'{mount}/run', f'{mount}/run/run7', step, f'{mount}/.ckptfs/status', f'{mount}/ingest'):
        assert ckptfs.run('explain', path).stdout, path
        assert json.loads(ckptfs.run('explain', path, '--json').stdout)['mountpoint'] == mount
    for folder, folders, files in os.walk(step):
        for name in folders[:2] + files[:2]:
            path = os.path.join(folder, name)
            assert ckptfs.run('explain', path, '--limit', '2').stdout, path
        folders[:] = folders[:2]
    by_path = ckptfs.run('explain', f'{mount}/view/tp2/rank1/model.pt', '--json').stdout
    by_name = ckptfs.run('explain', 'tp2', 'rank1/model.pt', '--json', *store).stdout
    assert json.loads(by_path) == json.loads(by_name)
    code, out, _ = rc(ckptfs, 'explain', f'{mount}/view/pp16')
    assert code == 4 and ': no: ' in out
    assert rc(ckptfs, 'explain', f'{mount}/view/tp2/rank9')[0] in (3, 4)
    for none in ('vew', 'run/nope', 'run/run7/stp', '.ckptfs/nope', f'run/run7/step/{TAG}/veiw'):
        code, _, said = rc(ckptfs, 'explain', f'{mount}/{none}')
        assert code == 3 and none in said, none
    for below in '', '/view', '/view/tp1/rank0/model.pt':
        code, out, said = rc(ckptfs, 'explain', f'{mount}/run/run7/step/latest{below}')
        assert code == 3 and not out
        assert f"'latest' is not a name in the mount; it means {mount}/run/run7/step/{TAG}{below}\n" in said
    latest = f'{mount}/run/run7/step/{TAG}/source/latest'
    assert f'latest as it was when the step was adopted, {os.path.getsize(latest)} bytes' in (
        ckptfs.run('explain', latest).stdout)
    assert rc(ckptfs, 'explain', f'{mount}/view/tp2/rank0/none')[0] in (3, 4)
    done = subprocess.run([BIN, 'explain', 'README.txt'], cwd=f'{mount}/view', capture_output=True, text=True)
    assert done.returncode == 0 and 'which layouts work here' in done.stdout
    code, _, said = rc(ckptfs, 'explain', ckptfs.folder + '/x')
    assert code == 3 and 'not in a mount' in said
    with open(f'{step}/source/{TAG}/mp_rank_00_model_states.pt', 'rb'):
        out = ckptfs.run('explain', f'{step}/source/{TAG}/mp_rank_00_model_states.pt').stdout
    assert f'{source}/{TAG}/mp_rank_00_model_states.pt as it is' in out


def test_the_latest_step_is_not_the_pointer_file_of_a_run_that_lies_here(ckptfs, source):
    """DeepSpeed's run7/latest is a file, and run7/latest a step."""
    ckptfs.adopt(source)
    for words in ['map', 'tp1'], ['explain', 'tp1'], ['ls', 'run7/latest'], ['info', 'run7/latest']:
        done = subprocess.run([BIN, *words, '--store', ckptfs.store], cwd=source.parent, capture_output=True, text=True)
        assert done.returncode == 0 and 'no checkpoint' not in done.stderr, done


def test_an_adapter_is_not_told_to_take_a_config(ckptfs, tmp_path):
    """No config.json makes an adapter's parameters a model of transformers."""
    header = {f'base_model.model.q.{name}.weight': {'dtype': 'F32', 'shape': [1], 'data_offsets': [4 * i, 4 * i + 4]}
              for i, name in enumerate(('base_layer', 'lora_A.default', 'lora_B.default'))}
    text = json.dumps(header).encode()
    (tmp_path / 'peft').mkdir()
    (tmp_path / 'peft/model.safetensors').write_bytes(len(text).to_bytes(8, 'little') + text + bytes(12))
    ckptfs.adopt(tmp_path / 'peft')
    code, _, said = rc(ckptfs, 'explain', 'tp1', 'hf', '--store', ckptfs.store)
    assert code != 0 and 'PEFT' in said and '--hf-config' not in said, said


def test_completions(ckptfs, source):
    script = ckptfs.run('completions', 'bash').stdout
    complete = script + '''
ckptfs() { "$BIN" "$@"; }
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ckptfs; printf '%s\\n' "${COMPREPLY[@]}"'''

    def completed(*words):
        done = subprocess.run(['bash', '-c', complete, 'bash', *words], capture_output=True, text=True, check=True,
                              env={**os.environ, 'BIN': BIN, 'CKPTFS_STORE': ckptfs.store}, cwd=ckptfs.folder)
        assert done.stderr == ''
        return done.stdout.split()
    assert set(completed('ckptfs', 'st')) == {'stats', 'status'}
    assert completed('ckptfs', 'adopt', '--li') == ['--link']
    assert completed('ckptfs', 'mount', '--mode', '') == ['stream', 'materialise', 'direct']
    ckptfs.adopt(source)
    assert set(completed('ckptfs', 'verify', 'run7/g')) == {f'run7/{TAG}'}
    store = ckptfs.store
    for words in (['list'], ['resolve'], ['list', '--store', store], ['gc', '--run'], ['list', '--store', '=', store]):
        assert completed('ckptfs', *words, 'r') == ['run7'], words
    assert completed('ckptfs', 'list', 'run7/') == [] == completed('ckptfs', 'warm', 'r')
    assert completed('ckptfs', 'resolve', 'run7', '') == [TAG] == completed('ckptfs', 'resolve', '--json', 'run7', 'g')
    assert completed('ckptfs', 'switch', 'r') == [f'run7/{TAG}']
    assert {'run7', f'run7/{TAG}'} <= set(completed('ckptfs', 'diff', 'run7', 'r'))
    assert completed('ckptfs', 'export', 'run7/latest', 'r') == []
    assert 'store' in completed('ckptfs', 'export', 'run7/latest', 'tp1', 's')
    spaced = source.parent / 'my run'
    shutil.copytree(source, spaced)
    ckptfs.adopt(spaced)
    done = subprocess.run(['bash', '-c', complete, 'bash', 'ckptfs', 'info', 'my\\ r'], capture_output=True, text=True,
                          check=True, env={**os.environ, 'BIN': BIN, 'CKPTFS_STORE': ckptfs.store})
    assert set(done.stdout.splitlines()) == {f'my run/{TAG}', 'my run'}, done
    assert completed('ckptfs', 'resolve', 'my\\ run', '') == [TAG] == completed('ckptfs', 'resolve', "'my run'", '')
    hostile = source.parent / '$(touch made)`touch made`'
    shutil.copytree(source, hostile)
    ckptfs.adopt(hostile)
    assert f'{hostile.name}/{TAG}'.split()[0] in completed('ckptfs', 'info', '$')
    assert set(completed('ckptfs', 'info', 'run7/g')) == {f'run7/{TAG}'}
    assert not os.path.exists(os.path.join(ckptfs.folder, 'made'))
    assert subprocess.run(['bash', '-n'], input=script, text=True).returncode == 0
    for shell in ('zsh', 'fish'):
        text = ckptfs.run('completions', shell).stdout
        if shutil.which(shell):
            assert subprocess.run([shell, '-n'], input=text, text=True).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason='becomes another user')
def test_inspection_obeys_the_files(ckptfs, source):
    """A user who cannot read the source's files reads no value of them."""
    os.chmod(ckptfs.folder, 0o755)
    for name in os.listdir(source / TAG):
        os.chmod(source / TAG / name, 0o600)
    with tempfile.TemporaryDirectory() as public:
        program = public_program(public)
        for words in (['stats', str(source)], ['diff', str(source), str(source)], ['ls', str(source)],
                      ['map', 'tp2', '--step', str(source)]):
            done = subprocess.run([program, *words], user=65534, group=65534, extra_groups=[],
                                  capture_output=True, text=True, timeout=60)
            assert done.returncode != 0 and 'denied' in done.stderr, done


def test_names_that_are_not_utf8_are_those_that_were_meant(ckptfs, source, tmp_path):
    """A daemon hears of a run and of a mount point what they are called, byte by byte."""
    run = tmp_path / os.fsdecode(b'exp\xe9')
    shutil.copytree(source, run)
    mount = str(tmp_path / os.fsdecode(b'mnt\xff'))
    os.mkdir(mount)
    try:
        ckptfs.run('mount', run, mount, '--store', ckptfs.store, '--reserve', '0')
        step = ckptfs.list()['steps'][0]['id']
        step = f'{run.name}/{step}'
        done = ckptfs.run('remove', '--store', ckptfs.store, step, check=False)
        assert done.returncode == 7 and 'shows it' in done.stderr
        ckptfs.run('switch', '--mountpoint', mount, step)
        assert 'alive' in ckptfs.run('status', '--mountpoint', mount).stdout
    finally:
        subprocess.run(['fusermount3', '-uz', mount], check=False)
