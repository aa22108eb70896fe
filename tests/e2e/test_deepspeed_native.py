# SPDX-License-Identifier: Apache-2.0
"""deepspeed_native/ loads into unmodified engines that do not have load_universal.

Engines of another dp, stage, tp or precision than the source's load the directory by
engine.load_checkpoint, strictly: masters, moments and counts of steps, weights, buffers and frozen
parameters must equal what the source's engines had in memory, bit for bit, the settings of each
group those of the source's own file.  DeepSpeed's own zero_to_fp32 and ds_to_universal read it too.
"""
import glob
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file

import launch
import load_deepspeed
import odd_engines
from daemon import TALLY, Ckptfs, checkpoint, step_of, truth_of
from test_rank_files import degrees
from test_universal import TAG, bits, run_converter, same
from variants import VARIANTS

ALL = 10**9  # elements of a sub-group: DeepSpeed's own default
# (source, layout, what the engine's configuration has besides)
SOME = [
    ('zero1', 'dp2_zero1_bf16', {'dtype': 'bf16', 'grad32': True}),
    ('zero1_bf16', 'dp3_zero1', {}),  # BF16_Optimizer, as the source's
    ('zero1_bf16', 'dp4_zero3', {'sub_group': ALL}),
    ('zero2', 'dp3_zero1', {'grad32': True}),
    ('zero2', 'dp3_zero2_fp32', {'dtype': 'fp32'}),
    ('zero2_rr', 'dp3_zero2_plain', {}),  # names as the source's
    ('zero2_rr', 'dp2_zero1', {}),
    ('zero2_rr', 'dp2_zero3', {'sub_group': ALL}),
    ('zero2_tied', 'dp2_zero3', {'sub_group': ALL}),
    ('zero2_aligned', 'dp2_zero2', {}),
    ('zero2_low', 'dp3_zero2', {}),
    ('zero2_momentum', 'dp2_zero3', {'sub_group': ALL}),
    ('zero2_frozen', 'dp3_zero1', {}),
    ('zero2_frozen', 'dp3_zero3', {'sub_group': ALL}),
    ('zero3', 'dp2_zero2', {}),
    ('zero3_2groups', 'dp3_zero3', {}),
    ('zero3_frozen', 'dp2_zero2', {}),
    ('stage0', 'dp2_zero2', {}),
    ('stage0_fused', 'dp2_zero3', {'sub_group': ALL}),
    ('tp2', 'dp3_zero2', {}),
    ('tp2', 'tp4_dp2_zero1', {'grad32': True}),
    ('autotp2', 'tp2_dp3_zero1', {}),
    ('autotp2', 'tp2_dp2_zero3', {'sub_group': ALL}),
    ('autotp3_uneven', 'tp3_dp2_zero2', {}),
]
MORE = [
    ('zero1', 'dp3_zero2', {}),
    ('zero1', 'dp2_zero1_bf16', {'dtype': 'bf16'}),
    ('zero1_bf16', 'dp2_zero2', {}),
    ('zero2', 'zero1', {}),
    ('zero2', 'dp3_zero3', {'sub_group': ALL}),
    ('zero2_tied', 'dp2_zero2', {}),
    ('zero2_aligned', 'dp2_zero3', {'sub_group': ALL}),
    ('zero2_momentum', 'dp3_zero2', {}),
    ('zero2_frozen', 'dp3_zero2', {}),
    ('zero3', 'dp3_zero3', {}),
    ('zero3_2groups', 'dp2_zero2', {}),
    ('zero3_frozen', 'dp2_zero3', {}),
    ('stage0_unfused', 'dp3_zero1', {}),
    ('tp2', 'tp2_dp3_zero2', {}),
    ('autotp2', 'dp2_zero2', {}),
    ('autotp2_zero3', 'tp2_zero3', {}),
    ('autotp2_zero3', 'tp2_dp3_zero1', {}),
]
LOADS = SOME + (MORE if os.environ.get('CKPTFS_LONG') else [])
# (source, layout, words of the refusal)
REFUSED = [
    ('zero2', 'dp3', 'ask for zero1, zero2 or zero3'),
    ('zero2', 'pp3_zero1', 'not made for pipeline stages'),
    ('zero2', 'dp2_cp2_zero1', "a sequence's ranks apart, which dp counts"),
    ('zero2', 'dp2_zero2_pipe', "other names than the source's"),
    ('pp2', 'dp2_zero1', 'is a PipelineModule'),
    ('moe', 'dp2_zero2', "DeepSpeed's own experts lie in groups"),
    ('zero1_elastic', 'dp2_zero1', 'has no hyper-parameters, as in an elastic save'),
    ('autotp3_uneven', 'tp2_zero2', 'cut it by rules of its own'),
    ('autotp2', 'tp4_zero1', 'cut it by rules of its own'),
    ('zero2', 'tp2_dp2_zero2', 'nothing tells how one of tp2 does'),
]


@pytest.fixture(scope='module')
def shown(tmp_path_factory):
    """(program, mount) of every source."""
    program = Ckptfs(str(tmp_path_factory.mktemp('native')))
    for variant in dict.fromkeys(v for v, *_ in [*LOADS, *REFUSED]):
        program.adopt_variant(variant)
    yield program, program.mount()
    program.close()


def view(mount, variant, layout, form='deepspeed_native'):
    """A directory of the mount."""
    return os.path.join(step_of(mount, variant), 'view', layout, form)


def engine_of(variant, layout, more):
    """The Layout of the engine that loads."""
    source, deg = VARIANTS[variant], degrees(layout)
    auto = deg['tp'] if source.autotp and deg['tp'] > 1 else 0
    made = replace(source, stage=deg['zero'], dp=deg['dp'], tp=1 if source.autotp else deg['tp'],
                   autotp=auto, elastic=False, fused=False, named=False)
    return replace(made, **more)


def groups_of(variant):
    """The settings of each group in the source's own file, but for names of members."""
    name = sorted(glob.glob(os.path.join(checkpoint(variant), TAG, '*zero_pp_rank_0_mp_rank_00_optim_states.pt')))
    if not name:  # without ZeRO
        name = [os.path.join(checkpoint(variant), TAG, 'mp_rank_00_model_states.pt')]
    saved = torch.load(name[0], weights_only=False)
    saved = saved['optimizer'] if 'optimizer' in saved else saved['optimizer_state_dict']
    saved = saved.get('base_optimizer_state') or saved.get('optimizer_state_dict') or saved
    return [{k: v for k, v in g.items() if k not in ('params', 'param_names')} for g in saved['param_groups']]


@pytest.mark.parametrize('variant,layout,more', LOADS)
def test_an_engine_loads_it(shown, variant, layout, more):
    code, report = load_deepspeed.load(view(shown[1], variant, layout), truth_of(variant),
                                       engine_of(variant, layout, more), steps=2)
    assert code == 0, report
    assert report['not_compared'] == 0 or more.get('dtype')
    assert report['groups'] == repr(groups_of(variant))
    assert report['global_steps'] == 5 and 'iteration' in report['client_keys']
    assert report['loss_diff'] < 0.01


@pytest.mark.parametrize('variant,layout', [
    ('zero1_bf16', 'dp3_zero1'), ('zero2', 'dp3_zero2'), ('tp2', 'tp4_dp2_zero1'), ('zero3', 'dp2_zero2')])
def test_its_losses_are_those_of_a_universal_load(shown, variant, layout):
    engine = engine_of(variant, layout, {})
    native, universal = (
        load_deepspeed.load(view(shown[1], variant, layout, form), truth_of(variant), lay, steps=3)[1]['losses']
        for form, lay in (('deepspeed_native', engine), ('deepspeed', replace(engine, universal=True))))
    assert native == universal


def test_it_goes_on_as_the_source_did(shown):
    """At the source's own degrees the next losses are those of the run that never stopped."""
    for variant, layout in (('zero2_rr', 'dp4_zero2'), ('zero3_2groups', 'dp2_zero3'), ('zero1_bf16', 'dp2_zero1')):
        code, report = load_deepspeed.load(view(shown[1], variant, layout), truth_of(variant),
                                           engine_of(variant, layout, {}), steps=4)
        assert code == 0 and report['loss_diff'] == 0, (variant, report)


def test_a_changed_element_is_reported(shown, tmp_path):
    """The comparison sees one wrong element of one master."""
    copy = tmp_path / 'copy'
    shutil.copytree(view(shown[1], 'zero2', 'dp3_zero2'), copy)
    name = copy / TAG / 'bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt'
    saved = torch.load(name, weights_only=False)
    saved['optimizer_state_dict']['single_partition_of_fp32_groups'][0][7] += 1
    torch.save(saved, name)
    code, report = load_deepspeed.load(str(copy), truth_of('zero2'), engine_of('zero2', 'dp3_zero2', {}), steps=0)
    assert code == 1 and report['tensors_different'] == 1, report


def test_other_engines_say_that_it_is_not_theirs(shown):
    """Another dp, another size of sub-groups and other groups end in an error of the engine's."""
    cases = [
        ('zero2', 'dp3_zero2', {'dp': 2}, ''),  # ZeRORuntimeException
        ('zero3', 'dp3_zero3', {'sub_group': ALL}, "doesn't match the size of optimizer's group"),
        ('zero2', 'dp3_zero2', {'groups': 2}, 'parameter-alignment layout does not match'),
        ('zero2', 'dp3_zero1', {'frozen': True}, 'parameter-alignment layout does not match'),
    ]
    for variant, layout, more, words in cases:
        engine = engine_of(variant, layout, more)
        code, report = load_deepspeed.load(view(shown[1], variant, layout), truth_of(variant), engine, steps=0)
        assert code == 2 and (not words or any(words in line for line in report['errors'])), (more, report)


@pytest.mark.parametrize('variant,layout,words', REFUSED)
def test_what_no_engine_would_take_is_refused_by_name(shown, variant, layout, words):
    assert not os.path.exists(view(shown[1], variant, layout))
    said = shown[0].run('explain', layout, '--json', '--step', f'{variant}/{TAG}', '--store', shown[0].store,
                        check=False).stdout
    assert words in json.loads(said)['formats']['deepspeed_native'], said


def test_other_sources_are_refused_by_name(shown):
    """A universal directory does not say in which order an engine flattens."""
    out = os.path.join(shown[0].folder, 'universal')
    shown[0].run('export', f'zero2/{TAG}', 'dp2_zero2/deepspeed', out, '--store', shown[0].store)
    shown[0].adopt(out, 'universal')
    said = shown[0].run('explain', 'dp2_zero2', '--json', '--step', f'universal/{TAG}', '--store', shown[0].store).stdout
    assert 'in an order that only' in json.loads(said)['formats']['deepspeed_native']


def test_readers_are_told_of_engines_that_it_is_not_for(shown):
    for variant, layout, words in (('zero2_rr', 'dp2_zero2', 'an engine without round_robin_gradients'),
                                   ('zero3', 'dp3_zero3', 'sub_group_size is not 3000'),
                                   ('zero2', 'dp2_zero2', None), ('zero2_rr', 'dp2_zero3', None)):
        said = json.loads(shown[0].run('explain', layout, '--json', '--step', f'{variant}/{TAG}', '--store',
                                       shown[0].store).stdout)
        lines = [line['what'] for line in said['left_out'] if line['format'] == 'deepspeed_native']
        assert any(words in line for line in lines) if words else not lines, (variant, lines)


@pytest.mark.parametrize('variant,layout', [
    ('zero2_frozen', 'dp3_zero2'), ('zero2_rr', 'dp3_zero2'), ('zero1_bf16', 'dp3_zero1'), ('zero2_tied', 'dp2_zero3'),
    ('zero3_frozen', 'dp2_zero3'), ('zero3', 'dp5_zero1')])
def test_zero_to_fp32_reads_it(shown, variant, layout):
    """DeepSpeed's script gives every master, frozen parameter and second name."""
    truth = load_file(truth_of(variant))
    got = get_fp32_state_dict_from_zero_checkpoint(view(shown[1], variant, layout))
    names = {k.split('/', 1)[1] for k in truth if k.startswith(('model/', 'buffer/', 'weight/'))}
    if VARIANTS[variant].tied:
        assert torch.equal(got.pop('lm_head.weight'), got['model.embed_tokens.weight'])
    assert set(got) == names
    for name, value in got.items():
        want = truth.get(f'model/{name}', truth.get(f'weight/{name}', truth.get(f'buffer/{name}')))
        assert torch.equal(value.float(), want.float()), name


@pytest.mark.parametrize('variant,layout', [
    ('zero2_rr', 'dp3_zero2'), ('zero1_bf16', 'dp3_zero1'), ('tp2', 'tp4_dp2_zero1'), ('autotp2', 'tp2_dp3_zero1')])
def test_the_stock_converter_reads_it(shown, tmp_path, variant, layout):
    """ds_to_universal makes the same whole tensors of it."""
    out = tmp_path / 'out' / TAG
    run_converter(os.path.join(view(shown[1], variant, layout), TAG), out)
    truth = load_file(truth_of(variant))
    kinds = {'fp32': 'model', 'exp_avg': 'exp_avg', 'exp_avg_sq': 'exp_avg_sq'}
    compared = 0
    for name in sorted(k.removeprefix('model/') for k in truth if k.startswith('model/')):
        for file, kind in kinds.items():
            got = torch.load(out / 'zero' / name / f'{file}.pt', weights_only=False)['param']
            want = truth[f'{kind}/{name}']
            assert same(got.view(want.shape) if got.dim() == 1 else got, want, True), (name, file)
            compared += 1
    assert compared == sum(k.split('/')[0] in kinds.values() for k in truth)


@pytest.mark.parametrize('variant,layout', [
    ('zero2_rr', 'dp3_zero2'), ('zero2_frozen', 'dp3_zero3'), ('zero1_bf16', 'dp3_zero1'), ('tp2', 'tp4_dp2_zero3')])
def test_it_is_adopted_again(shown, ckptfs, variant, layout):
    """An exported directory gives the atoms of the source, whichever way they are dealt out."""
    out = os.path.join(ckptfs.folder, 'exported')
    shown[0].run('export', f'{variant}/{TAG}', f'{layout}/deepspeed_native', out, '--store', shown[0].store)
    ckptfs.adopt(out, 'again', extra=TALLY)
    mount = ckptfs.mount()
    files = [load_file(os.path.join(step_of(m, v), 'view', 'tp1', 'rank0', f'{kind}.safetensors'))
             for m, v in ((mount, 'again'), (shown[1], variant)) for kind in ('model', 'optimizer')]
    for again, first in zip(files[:2], files[2:]):
        assert set(again) == set(first)
        for key, value in again.items():
            assert torch.equal(bits(value), bits(first[key])), key


@pytest.mark.parametrize('stage,dp,optimizer,zero,empty', [
    (2, 2, 'nadam', {}, False), (1, 3, 'amsgrad', {'round_robin_gradients': True}, False), (3, 3, 'rmsprop', {}, False),
    (0, 1, 'amsgrad', {}, False), (0, 1, 'rmsprop', {}, True), (2, 3, 'nadam', {}, True)])
def test_other_optimizers_and_odd_groups(ckptfs, tmp_path, stage, dp, optimizer, zero, empty):
    """An engine that loaded the view saves what the source's saved, and goes on alike."""
    def run(ranks, stage, view, name):
        save, log = str(tmp_path / name), str(tmp_path / f'{name}.log')
        assert launch.launch(odd_engines.job, ranks, (stage, optimizer, zero, view, save, empty), log), launch.errors_of(log, ranks)
        return odd_engines.whole(save)
    want, groups, losses = run(dp, stage, None, 'source')
    assert all(torch.isfinite(value).all() for value in want.values())
    ckptfs.adopt(tmp_path / 'source', 'odd', extra=('--replicated', '.*'))
    step = step_of(ckptfs.mount(), 'odd', 'global_step4')
    for to, ranks in ((1, 4), (2, 5), (3, 4))[:2 if empty else 3]:
        layout = f'dp{ranks}_zero{to}'
        got = run(ranks, to, os.path.join(step, 'view', layout, 'deepspeed_native'), layout)
        assert set(got[0]) == set(want) and got[1] == groups and got[2] == losses, layout
        for key, value in got[0].items():
            assert torch.equal(value.float(), want[key].float()), (layout, key)


def test_a_parameter_that_nothing_saved_is_named(ckptfs, tmp_path):
    """At ZeRO 3 the module has an empty tensor for each parameter, also for one that no group has."""
    shutil.copytree(checkpoint('zero3'), tmp_path / 'ckpt')
    for file in glob.glob(str(tmp_path / 'ckpt' / TAG / '*model_states.pt')):
        state = torch.load(file, weights_only=False)
        state['module']['late.weight'] = torch.empty(0)
        torch.save(state, file)
    said = ckptfs.adopt(tmp_path / 'ckpt', 'run', extra=TALLY).stderr
    assert "left out: parameter 'late.weight': it is in no group of the optimizer" in said, said
