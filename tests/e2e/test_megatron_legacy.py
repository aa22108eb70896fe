# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that ranks of Megatron write each for itself (--ckpt-format torch): views have what the live engines had.

megatron_legacy_job.py has real ranks of megatron-core save them, and the same engines save by dist_checkpointing, so that truth is what
Megatron's own reader finds there.  Views are compared with it: files of ranks, dcp/, deepspeed/, huggingface/ (whose logits
transformers computes), and megatron/, which real ranks load at other degrees (megatron_loads.py).
"""
import glob
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import daemon
from dcp_reads import read_dcp
from test_megatron_buckets import JOBS, live_of
from test_megatron_source import KINDS, assert_same, by_layer, cut
from test_megatron_view import stacked

HERE = os.path.dirname(os.path.abspath(__file__))
STATES = 'optimizer.state.'
# Variants with distributed optimizers: (tp, experts' tp, experts of one rank)
FLAT = {'flat_tp2': (2, 2, 0), 'flat_vpp2': (1, 1, 0), 'flat_tied': (1, 1, 0), 'flat_ep2': (1, 1, 2), 'flat_etp2': (2, 2, 2), 'flat_etp1': (2, 1, 2),
        'flat_early': (2, 2, 0)}
JOBS |= FLAT
LONG = bool(os.environ.get('CKPTFS_LONG'))
# The variants of the job, and whether their optimizers are in distrib_optim.pt
NAMES = ['tp2pp2', 'flat_tp2', 'flat_vpp2', 'fp32_tied', 'flat_ep2', 'flat_early', 'uneven']
if LONG:
    NAMES += ['flat_tied', 'grouped_ep2', 'flat_etp2', 'fp32_tied_pp2', 'plain_ep2', 'flat_grouped', 'flat_etp1', 'plain_vpp2', 'plain_early']
LOGITS = [name for name in ('tp2pp2', 'flat_vpp2', 'flat_tied', 'flat_ep2', 'plain_vpp2', 'plain_ep2') if name in NAMES]
# (variant, what differs from make_megatron.BASE, [tp, pp, ep], layout)
CELLS = [('tp2pp2', {'bias': True}, [4, 1, 1], 'tp4'), ('flat_vpp2', {'norm': True, 'dtype': 'float16'}, [2, 1, 1], 'tp2'),
         ('flat_ep2', {'experts': 4}, [1, 2, 1], 'pp2_dp2')]
if LONG:
    CELLS += [('flat_tp2', {}, [1, 4, 1], 'pp4'), ('flat_etp2', {'experts': 4, 'shared': 24}, [1, 1, 4], 'dp4_ep4'),
              ('plain_vpp2', {'bias': True, 'groups': 2}, [2, 2, 1], 'tp2_pp2'), ('flat_tied', {'tied': True, 'dtype': 'float32'}, [1, 1, 1], 'tp1')]


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """The folder of all models."""
    folder = str(tmp_path_factory.mktemp('saved'))
    subprocess.run([sys.executable, '-W', 'ignore', f'{HERE}/megatron_legacy_job.py', folder, *NAMES], check=True, timeout=900)
    return folder


@pytest.fixture(scope='module')
def shown(saved, tmp_path_factory):
    """All of them in one mount."""
    program = daemon.Ckptfs(str(tmp_path_factory.mktemp('mount')))
    for name in NAMES:
        program.adopt(f'{saved}/{name}/run', name)
    yield program.mount(), program
    program.close()


def view(mount, run, layout):
    return os.path.join(daemon.step_of(mount, run), 'view', layout)


def truth_of(saved, name):
    """Weights, and states by our names of their kinds, layer by layer.

    Weights are those that Megatron's own reader finds.  So are states, but for those of which the live engine told where each is: core
    0.16.1 mixes up masters of several buckets where it saves them as fully_reshardable.
    """
    plain = {k.replace('.fp32_param.', '.param.'): v for k, v in torch.load(f'{saved}/{name}/plain.pt').items()}
    weights = {k: v for k, v in plain.items() if not k.startswith('optimizer.')}
    states = {ours: {k.removeprefix(f'{STATES}{kind}.'): v for k, v in plain.items() if k.startswith(f'{STATES}{kind}.')}
              for ours, kind in KINDS.items()}
    if name in FLAT:
        return by_layer(weights), live_of(saved, name)
    if not states['master']:  # parameters in fp32 are their masters
        states['master'] = weights
    return by_layer(weights), {kind: by_layer(v) for kind, v in states.items()}


def left_out(program, name):
    info = json.loads(program.run('info', name, '--store', program.store, '--json').stdout)
    return [one for one in info['left_out'] if one.get('part') == 'optimizer']


@pytest.mark.parametrize('name', NAMES)
def test_a_rank_has_the_weights_masters_and_moments_of_the_engines(shown, saved, name):
    weights, states = truth_of(saved, name)
    folder = view(shown[0], name, 'tp1') + '/rank0'
    assert_same(torch.load(f'{folder}/model.pt'), weights, name)
    assert left_out(shown[1], name) == []
    got = torch.load(f'{folder}/optimizer.pt')
    steps = {k: v for k, v in got.items() if k.startswith('step/')}
    assert_same({k: v for k, v in got.items() if k not in steps}, {f'{kind}/{k}': v for kind in KINDS for k, v in states[kind].items()}, name)
    assert len(steps) == len(states['exp_avg']) and {int(v) for v in steps.values()} == {2}


def test_ranks_of_other_degrees_have_their_parts(shown, saved):
    weights, states = truth_of(saved, 'tp2pp2')
    for rank in range(4):
        for kind, stored in {'': weights, **states}.items():
            got = torch.load(view(shown[0], 'tp2pp2', 'tp4') + f"/rank{rank}/{'optimizer' if kind else 'model'}.pt")
            for key, tensor in stored.items():
                if 'embeddings' not in key and 'output_layer' not in key:  # padded for four
                    assert torch.equal(got[f'{kind}/{key}' if kind else key], cut(key, tensor, rank, 4)), (kind, key)


def test_its_own_layout_has_what_its_ranks_wrote(shown, saved):
    """The names differ, the elements do not."""
    for rank, folder in enumerate(['mp_rank_00', 'mp_rank_01']):
        wrote = torch.load(f'{saved}/flat_tp2/run/iter_0000007/{folder}/model_optim_rng.pt', weights_only=False)['model']
        got = torch.load(view(shown[0], 'flat_tp2', 'tp2_dp2') + f'/rank{rank}/model.pt')
        tensors = [v for k, v in wrote.items() if v is not None]
        assert len(tensors) == len(got)
        for name, tensor in wrote.items():
            if tensor is not None and 'norm' not in name:
                assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize('name', LOGITS)
def test_transformers_computes_the_same_logits(shown, saved, name):
    want = torch.load(f'{saved}/{name}/logits.pt')
    model = AutoModelForCausalLM.from_pretrained(view(shown[0], name, 'tp1') + '/huggingface', dtype=torch.float32, attn_implementation='eager').eval()
    with torch.no_grad():
        got = model(want['tokens']).logits
    assert torch.allclose(got, want['logits'], atol=2e-5, rtol=1e-4), (got - want['logits']).abs().max()


def test_dcp_and_deepspeed_have_masters_and_moments(shown, saved):
    for name in ('tp2pp2', 'flat_vpp2'):
        weights, states = truth_of(saved, name)
        state = read_dcp(view(shown[0], name, 'dp2') + '/dcp')
        for kind in ('exp_avg', 'exp_avg_sq'):
            got = {k.removeprefix('optim.state.').removesuffix('.' + kind): v for k, v in state.items() if k.endswith('.' + kind)}
            assert_same(got, states[kind], kind)
        assert_same({k.removeprefix('model.'): v for k, v in state.items() if k.startswith('model.')}, weights, name)
        [zero] = glob.glob(view(shown[0], name, 'dp2_zero1') + '/deepspeed/*/zero')
        for key, master in states['master'].items():
            for kind, file in (('master', 'fp32'), ('exp_avg', 'exp_avg'), ('exp_avg_sq', 'exp_avg_sq')):
                got = torch.load(f'{zero}/{key}/{file}.pt', weights_only=False)['param']
                assert torch.equal(got.view(master.shape), states[kind][key]), (key, kind)


# (variant, model, [tp, pp, ep], chunks of a stage, layout)
VIEWS = [('tp2pp2', {'bias': True}, [1, 2, 1], 2, 'pp2_dp2_vpp2'), ('flat_vpp2', {'norm': True, 'dtype': 'float16'}, [2, 1, 1], 1, 'tp2_dp2'),
         ('fp32_tied', {'tied': True, 'channels': 8, 'dtype': 'float32'}, [1, 2, 1], 1, 'pp2_dp2'), ('flat_ep2', {'experts': 4}, [1, 1, 4], 1, 'dp4_ep4')]


def dist_tasks(mount, saved, folder):
    """megatron/ at other degrees, with the optimizer and its next step."""
    for name, model, degrees, layout in CELLS:
        weights, states = truth_of(saved, name)
        truth = f'{folder}/{name}.dist'
        torch.save(stacked(weights) | {f'{STATES}{KINDS[kind]}.{k}': v for kind in KINDS for k, v in stacked(states[kind]).items()}, truth)
        run = [next((int(t[2:]) for t in layout.split('_') if t.startswith(degree)), 1) for degree in ('tp', 'pp')]
        yield {'name': f'{name} {layout}', 'legacy': False, 'model': {**model, 'sharding': 'fully_reshardable'}, 'degrees': degrees,
               'step': view(mount, name, layout) + '/megatron/iter_0000007', 'strict': 'raise_all', 'truth': truth, 'optimizer': True, 'logits': None,
               'group': {'lr': 1e-2, 'eps': 1e-8, 'step': 2}, 'run': run, 'samples': None, 'chunks': 1, 'most': None}


def legacy_tasks(mount, saved, folder):
    """megatron_legacy/ at other degrees, strictly; and one with a truth that is not."""
    for name, model, degrees, chunks, layout in VIEWS:
        truth = f'{folder}/{name}.legacy'
        torch.save(stacked(truth_of(saved, name)[0]), truth)
        yield {'name': f'{name} {layout}', 'legacy': True, 'model': {**model, 'sharding': ''}, 'degrees': degrees, 'chunks': chunks,
               'step': view(mount, name, layout) + '/megatron_legacy/release', 'truth': truth, 'strict': True}
    wrong = stacked(truth_of(saved, VIEWS[0][0])[0])
    wrong['decoder.layers.mlp.linear_fc2.weight'][3, 31, 47] += 1
    torch.save(wrong, f'{folder}/wrong')
    name, model, degrees, chunks, layout = VIEWS[0]
    yield {'name': 'wrong', 'legacy': True, 'model': {**model, 'sharding': ''}, 'degrees': degrees, 'chunks': chunks,
           'step': view(mount, name, layout) + '/megatron_legacy/release', 'truth': f'{folder}/wrong', 'strict': True}


@pytest.fixture(scope='module')
def loaded(shown, saved, tmp_path_factory):
    """What is wrong with what real ranks have in memory that load views, by task."""
    folder = tmp_path_factory.mktemp('loads')
    tasks = [*dist_tasks(shown[0], saved, folder), *legacy_tasks(shown[0], saved, folder)]
    with open(f'{folder}/tasks.json', 'w', encoding='utf-8') as f:
        json.dump(tasks, f)
    subprocess.run([sys.executable, '-W', 'ignore', f'{HERE}/megatron_legacy_job.py', f'{folder}/out.json', '--load', f'{folder}/tasks.json'],
                   check=True, timeout=500)
    with open(f'{folder}/out.json', encoding='utf-8') as f:
        return json.load(f)


@pytest.mark.parametrize('name, layout', [(cell[0], cell[3]) for cell in CELLS])
def test_megatron_goes_on_at_other_degrees(loaded, name, layout):
    assert loaded[f'{name} {layout}'] == []


@pytest.mark.parametrize('name, layout', [(one[0], one[4]) for one in VIEWS])
def test_ranks_of_megatron_begin_with_the_legacy_view(loaded, name, layout):
    """By load_state_dict(strict=True) of real modules, of the file that torch.load takes without code."""
    assert loaded[f'{name} {layout}'] == []


def test_ranks_see_one_element_that_differs(loaded):
    assert loaded['wrong']


def test_the_legacy_view_is_a_release(shown):
    with open(view(shown[0], 'tp2pp2', 'tp2') + '/megatron_legacy/latest_checkpointed_iteration.txt', encoding='utf-8') as f:
        assert f.read() == 'release'


# ---- saves that something happened to --------------------------------------------------------

FILE = 'model_optim_rng.pt'


def changed(path, change):
    """Saves a rank's file anew."""
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def lost_rank(step):
    shutil.rmtree(f'{step}/mp_rank_01_001')


def lost_file(step):
    os.unlink(f'{step}/mp_rank_01_001/{FILE}')


def more_ranks(step):
    shutil.copytree(f'{step}/mp_rank_01_001', f'{step}/mp_rank_02_001')


def swapped_ranks(step):
    os.rename(f'{step}/mp_rank_00_001', f'{step}/x')
    os.rename(f'{step}/mp_rank_01_001', f'{step}/mp_rank_00_001')
    os.rename(f'{step}/x', f'{step}/mp_rank_01_001')


def other_degree(step):
    for path in glob.glob(f'{step}/*/{FILE}'):
        changed(path, lambda state: setattr(state['args'], 'tensor_model_parallel_size', 4))


def other_args(step):
    changed(f'{step}/mp_rank_01_000/{FILE}', lambda state: setattr(state['args'], 'num_query_groups', 8))


def other_iteration(step):
    changed(f'{step}/mp_rank_01_000/{FILE}', lambda state: state.update(iteration=8))


def other_layers(step):
    for path in glob.glob(f'{step}/*/{FILE}'):
        changed(path, lambda state: setattr(state['args'], 'num_layers', 5))


def other_stages(step):
    """The stages have unequal numbers of layers, and no argument says so."""
    for rank in range(2):
        first, last = f'{step}/mp_rank_0{rank}_000/{FILE}', f'{step}/mp_rank_0{rank}_001/{FILE}'
        of_last = torch.load(last, weights_only=False)['model']

        def add(state, of_last=of_last):
            state['model'].update({k.replace('layers.1.', 'layers.2.'): v for k, v in of_last.items() if 'layers.1.' in k})

        changed(first, add)
        changed(last, lambda state: [state['model'].pop(k) for k in list(state['model']) if 'layers.1.' in k])


def lost_tensor(step):
    changed(f'{step}/mp_rank_01_000/{FILE}', lambda state: state['model'].pop('decoder.layers.1.mlp.linear_fc1.weight'))


def old_version(step):
    changed(f'{step}/mp_rank_00_000/{FILE}', lambda state: state.update(checkpoint_version=1.0))


def no_args(step):
    changed(f'{step}/mp_rank_00_000/{FILE}', lambda state: state.pop('args'))


def cut_off(step):
    path = f'{step}/mp_rank_01_001/{FILE}'
    os.truncate(path, os.path.getsize(path) // 2)


REFUSED = {lost_rank: 'no mp_rank_01_001/model_optim_rng.pt', lost_file: 'no mp_rank_01_001/model_optim_rng.pt', more_ranks: 'mp_rank_02_001 is there',
           swapped_ranks: 'say that rank', other_degree: 'no mp_rank_02_000', other_args: 'another num_query_groups',
           other_iteration: "its 'iteration' is not that of mp_rank_00_000", other_layers: 'num_layers 5', other_stages: 'uneven',
           lost_tensor: "does not have 'decoder.layers.1.mlp.linear_fc1.weight'", old_version: 'checkpoint_version',
           no_args: 'tensor_model_parallel_size', cut_off: 'mp_rank_01_001'}


@pytest.mark.parametrize('change', REFUSED)
def test_files_that_do_not_belong_together_are_refused_by_name(saved, ckptfs, tmp_path, change):
    shutil.copytree(f'{saved}/tp2pp2/run', f'{tmp_path}/run')
    change(f'{tmp_path}/run/iter_0000007')
    done = ckptfs.adopt(f'{tmp_path}/run/iter_0000007', 'run', check=False)
    assert done.returncode != 0 and REFUSED[change] in done.stderr, done.stderr


def test_a_tracker_that_names_no_step_is_said(saved, ckptfs, tmp_path):
    shutil.copytree(f'{saved}/tp2pp2/run', f'{tmp_path}/run')
    with open(f'{tmp_path}/run/latest_checkpointed_iteration.txt', 'w', encoding='utf-8') as f:
        f.write('9')
    done = ckptfs.adopt(f'{tmp_path}/run', 'run', check=False)
    assert 'iter_0000009' in done.stderr and 'run/iter_0000007' in done.stdout, (done.stdout, done.stderr)


def swap_masters(step):
    """The masters of two layers' matrices."""

    def change(state):
        masters = state['optimizer']['fp32_from_fp16_params'][0]
        [one, other] = [i for i, m in enumerate(masters) if m.shape == (32, 24)][:2]
        masters[one], masters[other] = masters[other].clone(), masters[one].clone()

    changed(f'{step}/mp_rank_01_001/{FILE}', change)


def lose_group_members(step):

    def change(state):
        inner = state['optimizer']['optimizer']
        inner['param_groups'][0]['params'].pop()

    changed(f'{step}/mp_rank_01_001/{FILE}', change)


def reorder_members(step):
    """As if a script had given its parameters in another order: the states and masters of one group, the other way round."""

    def change(state):
        state['optimizer']['fp32_from_fp16_params'][0].reverse()
        state['optimizer']['optimizer']['param_groups'][0]['params'].reverse()

    changed(f'{step}/mp_rank_01_001/{FILE}', change)


def flip_master(step):
    """One element of one master."""

    def change(state):
        state['optimizer']['fp32_from_fp16_params'][0][0].view(-1)[5] += 1

    changed(f'{step}/mp_rank_01_001/{FILE}', change)


def flip_flat(step):

    def change(state):
        [buffer] = state[0].values()
        buffer['param'][7] += 1

    changed(f'{step}/mp_rank_01/distrib_optim.pt', change)


def shorten_flat(step):

    def change(state):
        [buffer] = state[0].values()
        for kind in ('param', 'exp_avg', 'exp_avg_sq'):
            buffer[kind] = buffer[kind][:-64].clone()

    changed(f'{step}/mp_rank_01/distrib_optim.pt', change)


def swap_flat(step):
    """The buffers of two ranks."""
    for one, other in (('00', 'x'), ('01', '00'), ('x', '01')):
        os.rename(f'{step}/mp_rank_{one}/distrib_optim.pt' if one != 'x' else f'{step}/x', f'{step}/mp_rank_{other}/distrib_optim.pt' if other != 'x' else f'{step}/x')


UNPROVED = [('tp2pp2', swap_masters), ('tp2pp2', lose_group_members), ('tp2pp2', reorder_members), ('tp2pp2', flip_master), ('flat_tp2', flip_flat),
            ('flat_tp2', shorten_flat), ('flat_tp2', swap_flat)]


@pytest.mark.parametrize('name, change', UNPROVED)
def test_an_optimizer_that_is_not_proved_is_left_out_and_the_weights_are_there(saved, ckptfs, tmp_path, name, change):
    shutil.copytree(f'{saved}/{name}/run', f'{tmp_path}/run')
    change(f'{tmp_path}/run/iter_0000007')
    ckptfs.adopt(f'{tmp_path}/run', 'run')
    [left] = left_out(ckptfs, 'run')
    assert 'nothing proves whose they are' in left['why'] and 'mp_rank_0' in left['why'], left
    folder = view(ckptfs.mount(), 'run', 'tp1') + '/rank0'
    assert not any(k.startswith('master/') for k in torch.load(f'{folder}/optimizer.pt')) if os.path.exists(f'{folder}/optimizer.pt') else True
    assert_same(torch.load(f'{folder}/model.pt'), truth_of(saved, name)[0], name)


def test_weights_alone_need_no_file_of_the_optimizer(saved, ckptfs, tmp_path):
    shutil.copytree(f'{saved}/flat_tp2/run', f'{tmp_path}/run')
    os.unlink(f'{tmp_path}/run/iter_0000007/mp_rank_01/distrib_optim.pt')
    done = ckptfs.adopt(f'{tmp_path}/run', 'run', check=False)
    assert done.returncode != 0 and 'no mp_rank_01/distrib_optim.pt' in done.stderr, done.stderr
    ckptfs.adopt(f'{tmp_path}/run', 'run', extra=('--weights-only', ))
    assert_same(torch.load(view(ckptfs.mount(), 'run', 'tp1') + '/rank0/model.pt'), truth_of(saved, 'flat_tp2')[0], 'weights')


def test_verify_compares_what_ranks_hold_alike(saved, ckptfs, tmp_path):
    """A norm that differs between tensor ranks."""
    shutil.copytree(f'{saved}/tp2pp2/run', f'{tmp_path}/run')

    def change(state):
        state['model']['decoder.layers.0.input_layernorm.weight'][3] += 1
        masters = state['optimizer']['fp32_from_fp16_params'][1]
        for master in masters:
            if torch.equal(master.bfloat16(), state['model']['decoder.layers.0.input_layernorm.weight']):
                break

    changed(f'{tmp_path}/run/iter_0000007/mp_rank_01_000/{FILE}', change)
    ckptfs.adopt(f'{tmp_path}/run', 'run', extra=('--weights-only', ))
    done = ckptfs.run('verify', 'run', '--store', ckptfs.store, check=False)
    assert done.returncode != 0 and 'linear_qkv.layer_norm_weight' in done.stdout + done.stderr, done.stdout + done.stderr
