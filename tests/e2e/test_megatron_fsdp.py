# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of models that Megatron-FSDP wraps (--ckpt-format fsdp_dtensor): views have what the live ranks had.

megatron_fsdp_job.py has real ranks of megatron-core save them, and keeps what each had in Megatron-FSDP's buffers.  The truth is put
together of that, by ranges of buffers and Megatron's own cut of each tensor, so that it passes neither through DTensors and their chunks
nor through our reader.
"""
import glob
import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo

import daemon
import test_megatron_source
from dcp_reads import read_dcp
from megatron_forms import rewrite
from megatron_truth import stacked
from test_megatron_buckets import key_of
from test_megatron_source import KINDS, assert_same, cut, files_of

HERE = os.path.dirname(os.path.abspath(__file__))
STATES = ('master', 'exp_avg', 'exp_avg_sq')
# name: (tp, experts' tp, experts of one rank, experts, what transformers' files are of: groups, channels)
JOBS = {'dp4': (1, 1, 0, 0, (4, 4)), 'tp2': (2, 2, 0, 0, (2, 4)), 'tp4': (4, 4, 0, 0, (4, 8)), 'ep2': (1, 1, 2, 4, (4, 4)),
        'tp2ep2': (2, 1, 2, 4, (4, 4)), 'hsdp': (1, 1, 0, 0, (4, 8)), 'new': (1, 1, 0, 0, None), 'bridge': (2, 1, 2, 4, None)}
LONG = bool(os.environ.get('CKPTFS_LONG'))
if LONG:
    JOBS['etp2'] = (2, 2, 2, 4, None)
NO_MASTERS = ('hsdp', 'bridge')
ROWS = ('linear_qkv.weight', 'linear_qkv.bias', 'linear_fc1.weight', 'word_embeddings.weight', 'output_layer.weight')
COLUMNS = ('linear_proj.weight', 'linear_fc2.weight')
# (variant, what differs from make_megatron.BASE, [tp, pp, ep], layout)
CELLS = [('tp2', {'bias': True, 'groups': 2}, [1, 2, 1], 'pp2_dp2'), ('ep2', {'experts': 4}, [1, 1, 4], 'dp4_ep4')]
test_megatron_source.MODELS |= {name: (*sizes, experts) for name, (_, _, _, experts, sizes) in JOBS.items() if sizes}


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """The folder of all models."""
    folder = str(tmp_path_factory.mktemp('saved'))
    subprocess.run([sys.executable, '-W', 'ignore', f'{HERE}/megatron_fsdp_job.py', folder, *JOBS], check=True, timeout=300)
    return folder


@pytest.fixture(scope='module')
def shown(saved, tmp_path_factory):
    """All of them in one mount."""
    program = daemon.Ckptfs(str(tmp_path_factory.mktemp('mount')))
    for name in JOBS:
        program.adopt(f'{saved}/{name}/run', name)
    yield program.mount(), program
    program.close()


def view(mount, run, layout):
    return os.path.join(daemon.step_of(mount, run), 'view', layout)


def whole_shape(key, shape, ranks):
    """The shape of a tensor of which a tensor-parallel rank has `shape`."""
    shape = list(shape)
    if key.endswith(ROWS) and 'layer_norm' not in key:
        shape[0] *= ranks
    if key.endswith(COLUMNS):
        shape[1] *= ranks
    return shape


def truth_of(saved, name):
    """Returns what was in the buffers, put together: {kind: {key: tensor}}; kinds are states and `weight`."""
    tp, etp, per_rank, experts, _ = JOBS[name]
    out = {}
    for rank in range(4):
        live = torch.load(f'{saved}/{name}/live/{rank}.pt')
        for parameter, first, states in live['states']:
            key, expert = key_of(parameter)
            ranks = tp if expert is None else etp
            shape = whole_shape(key, live['shapes'][parameter], ranks)
            shape = shape if expert is None else [experts, *shape]
            places = torch.arange(torch.Size(shape).numel()).view(shape)
            if expert is None:
                places = cut(key, places, live['ranks']['tp'], tp)
            else:
                places = cut(key, places[live['ranks']['ep'] * per_rank + expert], live['ranks']['etp'], etp)
            for kind, value in states.items():
                of = out.setdefault(kind, {}).setdefault(key, torch.full(shape, torch.nan, dtype=value.dtype))
                of.view(-1)[places.reshape(-1)[first:first + value.numel()]] = value
    assert not any(tensor.isnan().any() for kind in out.values() for tensor in kind.values())
    if name == 'bridge':  # nothing says that the job computes in bf16
        out['weight'] = out.pop('master')
    if name == 'hsdp':  # the optimizer trains the weights themselves
        assert_same(out.pop('master'), out['weight'], name)
    return out


def left_out(program, name):
    info = json.loads(program.run('info', name, '--store', program.store, '--json').stdout)
    return [one for one in info['left_out'] if one.get('part') == 'optimizer']


@pytest.mark.parametrize('name', JOBS)
def test_a_rank_has_the_weights_masters_and_moments_of_the_buffers(shown, saved, name):
    truth = truth_of(saved, name)
    folder = view(shown[0], name, 'tp1') + '/rank0'
    assert_same(torch.load(f'{folder}/model.pt'), truth.pop('weight'), name)
    assert left_out(shown[1], name) == []
    got = torch.load(f'{folder}/optimizer.pt')
    steps = {k: v for k, v in got.items() if k.startswith('step/')}
    assert_same({k: v for k, v in got.items() if k not in steps}, {f'{kind}/{k}': v for kind, all_of in truth.items() for k, v in all_of.items()}, name)
    if name == 'new':
        assert set(truth) == {'master'}
    else:
        assert set(truth) == set(STATES) - ({'master'} if name in NO_MASTERS else set())
        assert len(steps) == len(truth['exp_avg']) and {int(v) for v in steps.values()} == {2}


@pytest.mark.parametrize('name, layout, ranks', [('dp4', 'tp4', 4), ('tp2', 'tp2', 2)] + [('etp2', 'tp2', 2)] * LONG)
def test_ranks_of_other_degrees_have_their_parts(shown, saved, name, layout, ranks):
    truth = truth_of(saved, name)
    for rank in range(ranks):
        folder = view(shown[0], name, layout) + f'/rank{rank}'
        got = {'weight': torch.load(f'{folder}/model.pt')} | dict.fromkeys(STATES, torch.load(f'{folder}/optimizer.pt'))
        compared = 0
        for kind, stored in truth.items():
            for key, tensor in stored.items():
                if any(word in key for word in ('embeddings', 'output_layer', 'experts')):  # padded for four; experts of another etp
                    continue
                assert torch.equal(got[kind][key if kind == 'weight' else f'{kind}/{key}'], cut(key, tensor, rank, ranks)), (kind, key)
                compared += 1
        assert compared > 40


def test_ranks_of_experts_have_theirs(shown, saved):
    truth = truth_of(saved, 'tp2ep2')
    for rank in range(4):
        got = torch.load(view(shown[0], 'tp2ep2', 'dp4_ep4') + f'/rank{rank}/optimizer.pt')
        for kind in STATES:
            for key in (k for k in truth[kind] if 'experts' in k):
                assert torch.equal(got[f'{kind}/{key}'], truth[kind][key][rank:rank + 1]), (kind, key)


@pytest.mark.parametrize('name', [name for name, job in JOBS.items() if job[4]])
def test_transformers_files_have_the_weights(shown, saved, name):
    """Under their own names: queries, keys and values apart, gate and up apart, each expert by itself."""
    experts, kind = JOBS[name][3], name
    if experts:
        kind = 'qwen3_moe' if name == 'tp2ep2' else 'mixtral'
    want = files_of(stacked(truth_of(saved, name)['weight']), kind)
    got = {}
    for file in glob.glob(view(shown[0], name, 'tp1') + '/huggingface/*.safetensors'):
        got |= load_file(file)
    if 'lm_head.weight' in got and 'lm_head.weight' not in want:
        assert torch.equal(got.pop('lm_head.weight'), want['model.embed_tokens.weight'])
    assert_same(got, want, name)


def test_dcp_and_deepspeed_have_masters_and_moments(shown, saved):
    for name in ('tp2', 'ep2'):
        truth = truth_of(saved, name)
        state = read_dcp(view(shown[0], name, 'dp2') + '/dcp')
        for kind in ('exp_avg', 'exp_avg_sq'):
            got = {k.removeprefix('optim.state.').removesuffix('.' + kind): v for k, v in state.items() if k.endswith('.' + kind)}
            assert_same(got, truth[kind], kind)
        assert_same({k.removeprefix('model.'): v for k, v in state.items() if k.startswith('model.')}, truth['weight'], name)
        [zero] = glob.glob(view(shown[0], name, 'dp2_zero1') + '/deepspeed/*/zero')
        for key, master in truth['master'].items():
            for kind, file in (('master', 'fp32'), ('exp_avg', 'exp_avg'), ('exp_avg_sq', 'exp_avg_sq')):
                got = torch.load(f'{zero}/{key}/{file}.pt', weights_only=False)['param']
                assert torch.equal(got.view(master.shape), truth[kind][key]), (key, kind)


def test_groups_have_the_parameters_that_the_save_says(shown):
    """Megatron-FSDP says the hyper-parameters of each parameter: norms and biases do not decay."""
    folder = view(shown[0], 'tp2', 'dp2_nested') + '/dcp'
    state = dict.fromkeys(k for k in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata if k.startswith('optim.param_groups.'))
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    groups = {}
    for key, value in state.items():
        groups.setdefault(key.split('.')[2], {})[key.split('.')[3]] = value
    assert sorted(one['weight_decay'] for one in groups.values()) == [0.0, 0.1]
    for one in groups.values():
        plain = [name for name in one['params'] if 'norm' in name or name.endswith('.bias')]
        assert len(one['params']) > 10 and len(plain) == (0 if one['weight_decay'] else len(one['params'])), one
        assert one['lr'] == 1e-2


@pytest.fixture(scope='module')
def loaded(shown, saved, tmp_path_factory):
    """Says what is wrong with what real ranks have in memory that load megatron/ at other degrees, by variant."""
    folder = tmp_path_factory.mktemp('loads')
    tasks = []
    for name, model, degrees, layout in CELLS:
        truth = truth_of(saved, name)
        whole = stacked(truth['weight']) | {f'optimizer.state.{KINDS[kind]}.{k}': v for kind in KINDS for k, v in stacked(truth[kind]).items()}
        torch.save(whole, f'{folder}/{name}')
        run = [next((int(t[2:]) for t in layout.split('_') if t.startswith(degree)), 1) for degree in ('tp', 'pp')]
        tasks.append({'name': name, 'model': {**model, 'sharding': 'fully_reshardable'}, 'degrees': degrees, 'chunks': 1,
                      'step': view(shown[0], name, layout) + '/megatron/iter_0000007', 'strict': 'raise_unexpected', 'truth': f'{folder}/{name}',
                      'optimizer': True, 'logits': None, 'group': {'lr': 1e-2, 'eps': 1e-8, 'step': 2}, 'run': run, 'samples': None, 'most': None})
    with open(f'{folder}/tasks.json', 'w', encoding='utf-8') as f:
        json.dump(tasks, f)
    subprocess.run([sys.executable, '-W', 'ignore', f'{HERE}/megatron_loads.py', f'{folder}/tasks.json', f'{folder}/out.json'], check=True, timeout=300)
    with open(f'{folder}/out.json', encoding='utf-8') as f:
        return json.load(f)


@pytest.mark.parametrize('name', [cell[0] for cell in CELLS])
def test_megatron_goes_on_without_fsdp_at_other_degrees(loaded, name):
    """From Megatron-FSDP to the distributed optimizer, which Megatron itself has no way for: weights, masters, moments, the next step."""
    assert loaded[name] == []


def test_a_job_that_went_back_is_told_by_the_tracker(saved, ckptfs, tmp_path):
    """It names a smaller iteration, which was saved later."""
    shutil.copytree(f'{saved}/new/run', f'{tmp_path}/run')
    other = f'{tmp_path}/run/iter_0000009'
    shutil.copytree(f'{tmp_path}/run/iter_0000007', other)
    replace(other, 'iteration', 9)
    for file in glob.glob(f'{other}/*') + [f'{other}/.metadata', other]:
        os.utime(file, (1.7e9, 1.7e9))
    ckptfs.adopt(f'{tmp_path}/run', 'run')
    info = ckptfs.run('info', 'run', '--store', ckptfs.store).stdout
    assert 'step: iter_0000007' in info, info


# ---- saves that something happened to --------------------------------------------------------

FC1 = 'decoder.layers.2.mlp.linear_fc1.weight'
IN_OPTIMIZER = 'module.module.module.'


def replace(step, key, value):
    """Has an object say something else."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    name = f'__9_{len(glob.glob(f"{step}/__9_*"))}.distcp'
    with open(f'{step}/{name}', 'wb') as f:
        f.write(buffer.getvalue())

    def change(metadata):
        [index] = [i for i in metadata.storage_data if i.fqn == key]
        metadata.storage_data[index] = _StorageInfo(name, 0, len(buffer.getvalue()))

    rewrite(step, change)


def change_args(step, **changes):
    args = {'args': None}
    dcp.load(args, checkpoint_id=step, no_dist=True)
    vars(args['args']).update(changes)
    replace(step, 'args', args['args'])


def drop(step, *keys):
    """Has the directory not have some keys."""

    def change(metadata):
        for key in keys:
            del metadata.state_dict_metadata[key]
            for index in [i for i in metadata.storage_data if i.fqn == key]:
                del metadata.storage_data[index]

    rewrite(step, change)


def no_gate(step):
    drop(step, f'model.module.{FC1}_w')
    return f"'{FC1}_v' is there without '_w'"


def a_layer_less(step):
    keys = [k for k in dcp.FileSystemReader(step).read_metadata().state_dict_metadata if k.startswith('model.module.decoder.layers.3.')]
    assert len(keys) > 5
    drop(step, *keys)
    return "'decoder.layers.' has 3 layers"


def more_layers(step):
    change_args(step, num_layers=8)
    return "'decoder.layers.' has 4 layers, the last with the number 3, of 8"


def not_gated(step):
    change_args(step, swiglu=False)
    return 'the arguments say that it is not gated'


def pipeline(step):
    change_args(step, pipeline_model_parallel_size=2)
    return '2 pipeline stages, which Megatron-FSDP does not have'


@pytest.mark.parametrize('change', [no_gate, a_layer_less, more_layers, not_gated, pipeline])
def test_a_save_that_contradicts_itself_is_refused_and_says_why(saved, ckptfs, tmp_path, change):
    shutil.copytree(f'{saved}/dp4/run', f'{tmp_path}/run')
    why = change(f'{tmp_path}/run/iter_0000007')
    done = ckptfs.adopt(f'{tmp_path}/run', 'run', check=False)
    assert done.returncode != 0 and why in done.stdout + done.stderr, done.stdout + done.stderr


def test_experts_that_are_not_there_are_missed(saved, ckptfs, tmp_path):
    shutil.copytree(f'{saved}/ep2/run', f'{tmp_path}/run')
    change_args(f'{tmp_path}/run/iter_0000007', num_experts=8)
    done = ckptfs.adopt(f'{tmp_path}/run', 'run', check=False)
    assert done.returncode != 0 and '4 experts, but the arguments say num_experts 8' in done.stdout + done.stderr, done.stderr


def test_a_half_of_a_moment_is_left_out_with_the_other_half_alone(saved, ckptfs, tmp_path):
    shutil.copytree(f'{saved}/dp4/run', f'{tmp_path}/run')
    drop(f'{tmp_path}/run/iter_0000007', f'optimizer.state.{IN_OPTIMIZER}{FC1}_v.exp_avg')
    ckptfs.adopt(f'{tmp_path}/run', 'run')
    [left] = left_out(ckptfs, 'run')
    assert f"the state 'exp_avg' of '{FC1}'" in left['what'] and f"'{FC1}_v' does not have it" in left['why'], left
    truth = truth_of(saved, 'dp4')
    got = torch.load(view(ckptfs.mount(), 'run', 'tp1') + '/rank0/optimizer.pt')
    assert_same({k: v for k, v in got.items() if not k.startswith('step/')},
                {f'{kind}/{k}': v for kind in STATES for k, v in truth[kind].items() if (kind, k) != ('exp_avg', FC1)}, 'rest')


def test_experts_whose_hyper_parameters_differ_have_none(saved, ckptfs, tmp_path):
    shutil.copytree(f'{saved}/ep2/run', f'{tmp_path}/run')
    one = 'decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight'
    replace(f'{tmp_path}/run/iter_0000007', f'optimizer.param_to_group_meta.{IN_OPTIMIZER}{one}.lr', 0.5)
    ckptfs.adopt(f'{tmp_path}/run', 'run')
    [left] = left_out(ckptfs, 'run')
    assert "the hyper-parameters of 'decoder.layers.1.mlp.experts.experts.linear_fc2.weight'" in left['what'], left
    assert 'different ones' in left['why'], left


def test_another_form_of_megatrons_is_what_it_was(saved, ckptfs, tmp_path):
    """The job's own word decides, not keys that look like it: torch_dcp has such objects, too."""
    shutil.copytree(f'{saved}/dp4/run', f'{tmp_path}/run')
    change_args(f'{tmp_path}/run/iter_0000007', ckpt_format='torch_dcp')
    ckptfs.adopt(f'{tmp_path}/run', 'run')
    info = json.loads(ckptfs.run('info', 'run', '--store', ckptfs.store, '--json').stdout)
    assert info['framework'] == 'dcp'


def test_trained_weights_of_a_type_that_needs_scales_are_refused(saved, ckptfs, tmp_path):
    """As Megatron-FSDP would save fp8 weights of which it keeps no masters; saved anew, by keys alone."""
    step = f'{saved}/new/run/iter_0000007'
    state = read_dcp(step)
    objects = dict.fromkeys(k for k, m in dcp.FileSystemReader(step).read_metadata().state_dict_metadata.items() if not hasattr(m, 'size'))
    dcp.load(objects, checkpoint_id=step, no_dist=True)
    for dtype in (torch.float32, torch.float8_e4m3fn):
        state['model.module.output_layer.weight'] = state['model.module.output_layer.weight'].to(dtype)
        dcp.save(state | objects, checkpoint_id=f'{tmp_path}/{dtype}', no_dist=True)
        done = ckptfs.adopt(f'{tmp_path}/{dtype}', str(dtype), check=False)
        assert (done.returncode == 0) == (dtype == torch.float32), done.stderr
    assert "'output_layer.weight' is trained, and saved as" in done.stderr and 'without the scales' in done.stderr, done.stderr


def test_a_cut_file_is_refused(saved, ckptfs, tmp_path):
    shutil.copytree(f'{saved}/dp4/run', f'{tmp_path}/run')
    file = f'{tmp_path}/run/iter_0000007/__1_0.distcp'
    os.truncate(file, os.path.getsize(file) // 2)
    assert ckptfs.adopt(f'{tmp_path}/run', 'run', check=False).returncode != 0
