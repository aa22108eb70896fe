# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of torch.distributed.checkpoint, as every kind of job saves them.

The tests compare what the views show of one, bit for bit, with what torch gathered out of the
live model and optimizer (tests/fixtures/dcp).
"""
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load, load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import daemon

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, '..', 'fixtures', kind) for kind in ('dcp', 'deepspeed')]
from make_dcp import STEPS, VARIANTS  # noqa: E402
from ports import held_port  # noqa: E402

FIXTURES = os.path.join(daemon.FIXTURES, 'dcp')
STEP = f'step-{STEPS}'
# Options for what a config.json would say, and for what no rule of a Llama knows.
SAID = ('--family-set', 'head_dim=8', '--replicated', r'model\.(gain|seen|running_mean)')


def source(variant):
    """The step's directory."""
    return os.path.join(FIXTURES, variant, 'ckpt', STEP)


def truth_of(variant):
    """{kind: {name: tensor}} of the live job."""
    out = {}
    for key, tensor in load_file(os.path.join(FIXTURES, variant, 'truth.safetensors')).items():
        kind, name = key.split('/', 1)
        out.setdefault(kind, {})[name] = tensor
    return out


@pytest.fixture(scope='module')
def mounted(tmp_path_factory):
    """All variants in one mount."""
    program = daemon.Ckptfs(str(tmp_path_factory.mktemp('dcp')))
    for variant in VARIANTS:
        program.adopt(os.path.join(FIXTURES, variant, 'ckpt'), variant, extra=SAID)
    yield program.mount()
    program.close()


def view_of(mount, variant, layout, step=STEP):
    """The directory of a layout."""
    return os.path.join(daemon.step_of(mount, variant, step), 'view', layout)


def differ(got, want):
    """Names of tensors that are not equal in dtype, shape and every bit."""
    return sorted(
        k for k in set(got) | set(want)
        if k not in got or k not in want or got[k].dtype != want[k].dtype
        or got[k].shape != want[k].shape
        or not torch.equal(got[k].contiguous().view(-1).view(torch.uint8),
                           want[k].contiguous().view(-1).view(torch.uint8)))


def optimizer_of(truth):
    """Keys as the optimizer's rank files have them."""
    return {f'{kind}/{name}': t for kind, names in truth.items() if kind != 'weight'
            for name, t in names.items()}


@pytest.mark.parametrize('variant', VARIANTS)
def test_a_rank_alone_holds_what_the_job_held(mounted, variant):
    truth = truth_of(variant)
    rank = os.path.join(view_of(mounted, variant, 'tp1'), 'rank0')
    assert differ(load_file(os.path.join(rank, 'model.safetensors')), truth['weight']) == []
    assert differ(torch.load(os.path.join(rank, 'model.pt'), mmap=True), truth['weight']) == []
    if variant == 'shards':  # the writer of safetensors saves weights alone
        return
    assert differ(load_file(os.path.join(rank, 'optimizer.safetensors')),
                  optimizer_of(truth)) == []


def cut(name, tensor, tp, rank):
    """Returns what a Llama's tensor-parallel rank holds."""
    if any(word in name for word in ('q_proj', 'k_proj', 'v_proj', 'gate_proj', 'up_proj')):
        return tensor.chunk(tp, 0)[rank]
    if any(word in name for word in ('o_proj', 'down_proj')):
        return tensor.chunk(tp, 1)[rank]
    if any(word in name for word in ('embed_tokens', 'lm_head')):
        rows = -(-tensor.shape[0] // tp)
        padded = torch.cat([tensor, tensor.new_zeros(rows * tp - tensor.shape[0],
                                                     tensor.shape[1])])
        return padded[rank * rows:(rank + 1) * rows]
    return tensor


@pytest.mark.parametrize('variant', ['fsdp2', 'fsdp2_tp', 'ddp', 'titan', 'ranks'])
def test_tensor_parallel_ranks_hold_their_parts(mounted, variant):
    truth = truth_of(variant)
    for rank in range(2):
        folder = os.path.join(view_of(mounted, variant, 'tp2'), f'rank{rank}')
        want = {k: cut(k, t, 2, rank) for k, t in truth['weight'].items()}
        assert differ(load_file(os.path.join(folder, 'model.safetensors')), want) == []
        want = {k: cut(k, t, 2, rank) if t.ndim else t for k, t in optimizer_of(truth).items()}
        assert differ(load_file(os.path.join(folder, 'optimizer.safetensors')), want) == []


@pytest.mark.parametrize('variant', ['fsdp2_tp', 'accelerate', 'fsdp1'])
def test_data_parallel_ranks_hold_flat_parts(mounted, variant):
    truth = optimizer_of(truth_of(variant))
    parts = [load_file(os.path.join(view_of(mounted, variant, 'dp3_zero1'), f'rank{rank}',
                                    'optimizer.safetensors')) for rank in range(3)]
    for key, tensor in truth.items():
        if tensor.ndim == 0:
            assert all(torch.equal(part[key], tensor) for part in parts)
            continue
        flat = torch.cat([part[key] for part in parts])
        assert torch.equal(flat[:tensor.numel()], tensor.flatten()), key
        assert not flat[tensor.numel():].any(), key


def test_other_things_beside_the_model_are_kept(mounted):
    with open(os.path.join(daemon.step_of(mounted, 'fsdp2', STEP), 'info.json')) as f:
        info = json.load(f)
    assert info['framework'] == 'dcp' and info['iteration'] == STEPS
    folder = os.path.join(view_of(mounted, 'fsdp2', 'dp2_zero1'), 'deepspeed')
    with open(os.path.join(folder, 'latest')) as f:
        tag = f.read()
    states = torch.load(os.path.join(folder, tag, 'mp_rank_00_model_states.pt'),
                        weights_only=False)
    assert states['train_state']['step'] == STEPS
    assert states['train_state']['ntokens'].item() == 12345
    assert states['lr_scheduler']['last_epoch'] == STEPS
    assert sorted(states['rng']) == [f'rank_{r}' for r in range(4)]


@pytest.mark.parametrize('variant', ['fsdp2', 'fsdp2_flat', 'hsdp', 'accelerate', 'titan'])
def test_a_universal_directory_has_every_state(mounted, variant):
    truth = truth_of(variant)
    folder = os.path.join(view_of(mounted, variant, 'dp2_zero1'), 'deepspeed')
    with open(os.path.join(folder, 'latest')) as f:
        zero = os.path.join(folder, f.read(), 'zero')
    for kind, file in (('weight', 'fp32'), ('exp_avg', 'exp_avg'), ('exp_avg_sq', 'exp_avg_sq')):
        for name in truth['exp_avg']:
            got = torch.load(os.path.join(zero, name, f'{file}.pt'))['param']
            assert torch.equal(got, truth[kind][name].float()), (kind, name)
    rates = torch.load(os.path.join(zero, 'optimizer_state.pt'), weights_only=False)
    assert rates['param_groups'][0]['lr'] == 1e-2


def test_verify_export_and_param(ckptfs, tmp_path):
    for variant in ('fsdp2_tp', 'ranks'):
        ckptfs.adopt(source(variant), variant)
        ckptfs.run('verify', f'{variant}/{STEP}', '--store', ckptfs.store)
    truth = truth_of('fsdp2_tp')
    ckptfs.run('export', f'fsdp2_tp/{STEP}', 'tp1', str(tmp_path / 'out'), '--store', ckptfs.store)
    got = load_file(tmp_path / 'out' / 'rank0' / 'model.safetensors')
    assert differ(got, truth['weight']) == []
    mount = ckptfs.mount()
    folder = os.path.join(daemon.step_of(mount, 'fsdp2_tp', STEP), 'param')
    assert 'lm_head.weight' in os.listdir(folder)


# ---- what is changed ------------------------------------------------------------------


def small_checkpoint(folder):
    """Two weights in one directory, by torch itself."""
    state = {'model': {'a': torch.arange(24.).view(6, 4), 'b': torch.arange(5.).view(5) + 100},
             'step': 3}
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)


def torch_reads(folder):
    """{name: tensor} as torch loads them; nothing where it refuses."""
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    state = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            assert entry.size.numel() < 1 << 20
            # Elements that no chunk covers stay as they are.
            state[key] = torch.full(entry.size, 7, dtype=entry.properties.dtype)
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


READ_BY_TORCH = '''
import os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
sys.path[:0] = [sys.argv[1]]
import torch
from test_dcp_source import torch_reads
for name in sorted(os.listdir(sys.argv[2])):
    try:
        read = torch_reads(os.path.join(sys.argv[2], name))
    except BaseException:
        continue
    torch.save(read, os.path.join(sys.argv[3], name))
'''


def compare_with_torch(ckptfs, folder, tmp_path):
    """How many of the changed directories we take; what we take, torch reads so."""
    ours, theirs = {}, tmp_path / 'theirs'
    done = ckptfs.adopt(str(folder), 'changed', check=False)
    assert done.returncode in (0, 1, 3, 4, 5, 6, 9), done.stderr
    mount = ckptfs.mount()
    steps = os.path.join(mount, 'run', 'changed', 'step')
    for name in os.listdir(steps) if os.path.isdir(steps) else ():
        rank = os.path.join(steps, name, 'view', 'tp1', 'rank0', 'model.safetensors')
        ours[name] = load_file(rank)
    theirs.mkdir()
    subprocess.run([sys.executable, '-c', READ_BY_TORCH, HERE, str(folder), str(theirs)],
                   check=True, stderr=subprocess.DEVNULL, timeout=300)
    compared = 0
    for name, tensors in ours.items():
        if not (theirs / name).exists():
            continue
        want = torch.load(theirs / name)
        compared += 1
        for key, tensor in tensors.items():
            full = next(k for k in (f'model.{key}', key) if k in want)
            assert not differ({key: tensor}, {key: want[full]}), (name, key)
    return len(ours), compared


@pytest.mark.parametrize('what', ['.metadata', '__0_0.distcp'])
def test_changed_files_are_refused_or_mean_the_same(ckptfs, tmp_path, what):
    pick = random.Random(len(what))
    small_checkpoint(tmp_path / 'sound')
    sound = (tmp_path / 'sound' / what).read_bytes()
    folder = tmp_path / 'changed'
    count = 60
    for i in range(count):
        shutil.copytree(tmp_path / 'sound', folder / f'step-{i + 1}')
        changed = bytearray(sound)
        for _ in range(pick.choice((1, 1, 1, 2))):
            at = pick.randrange(len(changed))
            changed[at] = pick.choice((changed[at] ^ (1 << pick.randrange(8)),
                                       pick.randrange(256), changed[at] + 1 & 255))
        (folder / f'step-{i + 1}' / what).write_bytes(bytes(changed))
    taken, compared = compare_with_torch(ckptfs, folder, tmp_path)
    assert 0 < taken < count and compared > 0


def test_shards_that_contradict_each_other_are_refused(ckptfs, tmp_path):
    for old, new in ((b'"saved_offsets"', b'"Saved_offsets"'), (b'DCP_SHARDING_INFO', b'DCP_SHARDING_INFX')):
        folder = tmp_path / new.decode().strip('"')
        shutil.copytree(source('shards'), folder)
        shard = folder / sorted(os.listdir(folder))[1]
        data = shard.read_bytes()
        assert old in data or old.replace(b'"', b'\\"') in data
        for text in (old, old.replace(b'"', b'\\"')):
            data = data.replace(text, new if text == old else new.replace(b'"', b'\\"'))
        shard.write_bytes(data)
        done = ckptfs.adopt(str(folder), check=False)
        assert done.returncode != 0 and shard.name in done.stderr, done.stderr
    folder = tmp_path / 'gap'
    shutil.copytree(source('shards'), folder)
    os.unlink(folder / sorted(os.listdir(folder))[1])
    done = ckptfs.adopt(str(folder), check=False)
    assert done.returncode != 0 and 'in no file' in done.stderr, done.stderr


def test_a_save_that_died_is_skipped_and_said(ckptfs, tmp_path):
    shutil.copytree(source('ddp'), tmp_path / 'run' / 'step-1')
    shutil.copytree(source('ddp'), tmp_path / 'run' / 'step-2')
    os.rename(tmp_path / 'run' / 'step-2' / '.metadata', tmp_path / 'run' / 'step-2' / '.metadata.tmp')
    done = ckptfs.adopt(str(tmp_path / 'run'))
    assert done.stdout.split() == ['run/step-1']
    assert 'step-2' in done.stderr and 'did not finish' in done.stderr


def test_a_save_over_a_whole_one_that_died_is_said(ckptfs, tmp_path):
    """torch writes data files in their places and .metadata last; a copy's files are all made after what they copy was sealed."""
    shutil.copytree(source('ddp'), tmp_path / 'run' / 'step-1', copy_function=shutil.copyfile)
    os.utime(tmp_path / 'run' / 'step-1' / '.metadata')
    assert 'written anew' not in ckptfs.adopt(str(tmp_path / 'run')).stderr
    time.sleep(.3)
    data = next((tmp_path / 'run' / 'step-1').glob('*.distcp'))
    with open(data, 'r+b') as f:
        first = f.read(1)
        f.seek(0)
        f.write(first)
    said = ckptfs.adopt(str(tmp_path / 'run'), extra=['--refresh']).stderr
    assert f'{data.name}: written anew after .metadata, which its tool writes last' in said


def small_weights(mount, run):
    """Returns what a mount shows of a small checkpoint; an OSError where it cannot."""
    rank = os.path.join(daemon.step_of(mount, run, 'step-1'), 'view', 'tp1', 'rank0')
    with open(os.path.join(rank, 'model.safetensors'), 'rb') as f:
        return load(f.read())


def same_weights(got):
    """Those of small_checkpoint."""
    return not differ(got, {'a': torch.arange(24.).view(6, 4), 'b': torch.arange(5.) + 100})


@pytest.mark.parametrize('name', ['.metadata', '__0_0.distcp'])
def test_a_file_that_vanishes_while_it_is_adopted_is_named(ckptfs, tmp_path, name):
    small_checkpoint(tmp_path / 'step-1')
    file, away = tmp_path / 'step-1' / name, tmp_path / 'away'
    done = threading.Event()

    def come_and_go():
        while not done.is_set():
            os.rename(file, away)
            time.sleep(pick.random() * 0.01)
            os.rename(away, file)
            time.sleep(pick.random() * 0.02)
    pick = random.Random(4)
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        tries = [ckptfs.adopt(str(tmp_path / 'step-1'), f'try{i}', check=False) for i in range(20)]
    finally:
        done.set()
        thread.join()
    taken = [i for i, one in enumerate(tries) if one.returncode == 0]
    for one in tries:
        assert one.returncode in (0, 1, 3, 4, 5, 6), one.stderr
        assert one.returncode == 0 or 'step-1' in one.stderr, one.stderr
    mount = ckptfs.mount()
    assert all(same_weights(small_weights(mount, f'try{i}')) for i in taken)
    assert sorted(os.listdir(os.path.join(mount, 'run'))) == sorted(f'try{i}' for i in taken)


def test_files_that_go_or_change_after_the_mount_are_errors(ckptfs, tmp_path):
    for run in ('gone', 'changed', 'kept', 'listless'):
        small_checkpoint(tmp_path / run / 'step-1')
        ckptfs.adopt(str(tmp_path / run), run, extra=['--link'] if run == 'kept' else [])
    mount = ckptfs.mount()
    os.unlink(tmp_path / 'gone' / 'step-1' / '__0_0.distcp')
    file = tmp_path / 'changed' / 'step-1' / '__0_0.distcp'
    data = bytearray(file.read_bytes())
    at = data.index(torch.arange(24.).numpy().tobytes())
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
    shutil.rmtree(tmp_path / 'kept')  # as retention does
    os.unlink(tmp_path / 'listless' / 'step-1' / '.metadata')
    for run in ('gone', 'changed'):
        with pytest.raises(OSError):
            small_weights(mount, run)
        done = ckptfs.run('verify', f'{run}/step-1', '--store', ckptfs.store, check=False)
        assert done.returncode != 0 and '__0_0.distcp' in done.stderr + done.stdout
    for run in ('kept', 'listless'):  # nothing of .metadata is read once a step is taken
        assert same_weights(small_weights(mount, run))


def test_steps_that_differ_are_told_where_a_target_counts_once(ckptfs, tmp_path):
    """A DeepSpeed engine and a fused optimizer count the steps of a group once."""
    model = {name: torch.arange(6.) + i for i, name in enumerate(('early', 'late'))}
    states = {name: {'step': torch.tensor(2. + i), 'exp_avg': torch.ones(6), 'exp_avg_sq': torch.ones(6)}
              for i, name in enumerate(model)}
    for run, groups in (('one', [['early', 'late']]), ('two', [['early'], ['late']])):
        group = {'lr': 0.1, 'betas': (0.9, 0.99)}
        dcp.save({'model': model, 'optim': {
            'state': states, 'param_groups': [{**group, 'params': names} for names in groups]}},
                 checkpoint_id=str(tmp_path / run / 'step-1'), no_dist=True)
        ckptfs.adopt(str(tmp_path / run), run)
    mount = ckptfs.mount()
    for run, layout, why in (('one', 'dp2', 'group 0'), ('two', 'dp2_zero3', 'ZeRO-3')):
        view = view_of(mount, run, layout, 'step-1')
        assert not os.path.exists(os.path.join(view, 'deepspeed'))
        done = ckptfs.run('explain', os.path.join(view, 'deepspeed'), check=False)
        said = done.stdout + done.stderr
        assert why in said and "2 steps of parameter 'early' and 3 of 'late'" in said, said
    assert os.path.exists(os.path.join(view_of(mount, 'two', 'dp2_zero1', 'step-1'), 'deepspeed'))
    asked = {'optim': {'state': {'late': {'step': torch.tensor(0.)}}, 'param_groups': [{'lr': 0}]}}
    view = os.path.join(view_of(mount, 'one', 'dp2', 'step-1'), 'dcp')
    dcp.load(asked, storage_reader=dcp.FileSystemReader(view), no_dist=True)
    assert float(asked['optim']['state']['late']['step']) == 3  # by parameter, as it is
    asked['optim']['param_groups'][0]['step'] = 0
    with pytest.raises(dcp.CheckpointException, match='param_groups.0.step'):
        dcp.load(asked, storage_reader=dcp.FileSystemReader(view), no_dist=True)


RESUME = '''
import os, sys
os.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1',
                  MASTER_PORT=sys.argv[4], DS_ACCELERATOR='cpu', TORCHDYNAMO_DISABLE='1')
sys.path[:0] = [sys.argv[1]]
import torch, deepspeed
from safetensors.torch import load, load_file
import dcp_model
deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
deepspeed.init_distributed('gloo', verbose=False)
model = dcp_model.Model(seed=99)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={
    'train_micro_batch_size_per_gpu': 1, 'gradient_accumulation_steps': 1,
    'zero_allow_untested_optimizer': True, 'zero_optimization': {'stage': 1},
    'checkpoint': {'load_universal': True}})
engine.load_checkpoint(sys.argv[2])
truth = load_file(sys.argv[3])
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
for name, parameter in engine.module.named_parameters():
    assert torch.equal(safe_get_full_fp32_param(parameter), truth['weight/' + name]), name
    for kind in ('exp_avg', 'exp_avg_sq'):
        got = safe_get_full_optimizer_state(parameter, kind)
        assert torch.equal(got.view(-1), truth[kind + '/' + name].view(-1)), (kind, name)
group = engine.optimizer.param_groups[0]
assert group['lr'] == dcp_model.RATE, group['lr']
steps = {float(s['step']) for s in engine.optimizer.optimizer.state.values()}
assert steps == {2.0}, steps
print('resumed')
'''


def test_a_deepspeed_engine_resumes_an_fsdp_job(mounted, tmp_path):
    folder = os.path.join(view_of(mounted, 'accelerate', 'tp1_zero1'), 'deepspeed')
    with held_port() as port:
        done = subprocess.run(
            [sys.executable, '-c', RESUME, os.path.join(HERE, '..', 'fixtures', 'dcp'), folder,
             os.path.join(FIXTURES, 'accelerate', 'truth.safetensors'), str(port)],
            capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and 'resumed' in done.stdout, done.stderr[-3000:]
