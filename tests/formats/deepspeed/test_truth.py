# SPDX-License-Identifier: Apache-2.0
"""Indexed checkpoints against the truth of the engines that saved them.

CKPTFS_FIXTURES is a directory of <variant>/{ckpt,truth.safetensors,meta.json},
CKPTFS_MODEL_TOOL the program that indexes a path and extracts its atoms.
"""
import json
import os
import re
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file

FIXTURES = os.environ['CKPTFS_FIXTURES']
TOOL = os.environ['CKPTFS_MODEL_TOOL']
VARIANTS = sorted(v for v in os.listdir(FIXTURES)
                  if os.path.exists(f'{FIXTURES}/{v}/truth.safetensors'))

# Kinds of the truth under other names here.
KINDS = {'model': 'master', 'buffer': 'weight', 'frozen': 'weight'}


def index(path, *flags):
    """(step description, error text) of a path."""
    run = subprocess.run([TOOL, path, *flags], capture_output=True, text=True,
                         timeout=300)
    assert run.returncode in (0, 1), run.stderr
    if run.returncode:
        return None, run.stderr
    return json.loads(run.stdout)['steps'], ''


def plain_name(name, layers):
    """Plain-model name of a pipeline parameter name."""
    if name.startswith('tied_modules.embed.'):
        return 'model.embed_tokens.' + name.split('.', 2)[2]
    found = re.match(r'(\d+)\.(.*)', name)
    if not found:
        return name
    layer, rest = int(found[1]), found[2]
    if layer == 0:
        return 'model.embed_tokens.' + rest
    if layer == layers + 1:
        return 'model.norm.' + rest
    if layer == layers + 2:
        return 'lm_head.' + rest
    return f'model.layers.{layer - 1}.{rest}'


@pytest.mark.parametrize('variant', VARIANTS)
def test_atoms_equal_the_truth(variant, tmp_path):
    """Every master, state, weight and buffer, bit for bit; the step number."""
    home = f'{FIXTURES}/{variant}'
    with open(f'{home}/meta.json') as file:
        meta = json.load(file)
    layers, lay = meta['dims']['layers'], meta['layout']
    out = str(tmp_path / 'atoms.safetensors')
    steps, error = index(f'{home}/ckpt', '--step', 'global_step5', '--extract', out)
    assert steps, error
    got = {}
    for key, tensor in load_file(out).items():
        kind, name = key.split('/', 1)
        got[f'{kind}/{plain_name(name, layers)}'] = tensor
    truth = load_file(f'{home}/truth.safetensors')
    compared = 0
    for key, tensor in truth.items():
        kind, _, name = key.partition('/')
        if not name:
            continue
        if lay['moe'] and lay['stage'] == 0 and kind not in ('weight', 'buffer'):
            continue  # numbered by an optimizer whose names are nowhere
        ours = got[f'{KINDS.get(kind, kind)}/{name}']
        assert ours.shape == tensor.shape, key
        assert torch.equal(ours.float(), tensor.float()), key
        compared += 1
    assert compared >= 40
    steps = {float(t) for k, t in got.items() if k.startswith('step/')}
    assert not steps or steps == {float(truth['step'])}


def test_a_split_of_layers_is_the_source_s_own():
    """Three layers: not even on two stages, and on one there is none."""
    layouts = {v: index(f'{FIXTURES}/{v}/ckpt')[0][0]['layout'] for v in VARIANTS}
    uneven = {v for v in VARIANTS if '_split2-1' in layouts[v]}
    assert uneven == {v for v in VARIANTS if 'pp2' in v}
    assert not [v for v in VARIANTS if 'split' in layouts[v] and v not in uneven]


def renumber(path, numbers):
    """A pipeline's model states with other layer numbers."""
    content = torch.load(path, weights_only=False)

    def of(name):
        first, rest = name.split('.', 1)
        return f'{numbers[int(first)]}.{rest}'
    content['param_shapes'] = [{of(k): v for k, v in g.items()}
                               for g in content['param_shapes']]
    content['buffer_names'] = [of(n) for n in content['buffer_names']]
    content.pop('args')  # they say how many layers there are
    torch.save(content, path)


def test_buffers_of_a_pipeline_stand_with_their_layers():
    """No rule covers them; the stage that lists them held them."""
    step = index(f'{FIXTURES}/pp2_untied/ckpt')[0][0]
    places = {p['name']: (p['stage'], p['layer'], p['source_stages'])
              for p in step['parameters']}
    for layer in 1, 2, 3:
        assert places[f'{layer}.tally.mean'] == places[f'{layer}.mlp.down_proj.weight']
        assert places[f'{layer}.tally.mean'][2] == [layer // 3]
    assert all(p['source_stages'] == [] for p in index(f'{FIXTURES}/tp2/ckpt')[0][0]['parameters'])


def test_layers_without_parameters_leave_gaps(copy):
    """A stage's layers 1 and 4, the next one's 5: those between have none."""
    save, numbers = copy('pp2_untied'), {0: 0, 1: 1, 2: 4, 3: 5, 4: 6, 5: 7}
    for path in only(tag_of(save), 'mp_rank'):
        if 'optim' not in path.name:
            renumber(path, numbers)
    for path in reversed(only(tag_of(save), 'layer_')):
        number = numbers[int(path.name.split('_')[1].split('-')[0])]
        path.rename(path.with_name(f'layer_{number:02d}-model_00-model_states.pt'))
    steps, error = index(str(save))
    assert steps, error
    assert '_split4-1' in steps[0]['layout']
    assert {p['name']: p['source_stages'] for p in steps[0]['parameters']
            if 'tally.mean' in p['name']} == {'1.tally.mean': [0], '4.tally.mean': [0],
                                              '5.tally.mean': [1]}


@pytest.fixture
def copy(tmp_path):
    """A variant's save directory that may be spoiled."""
    def make(variant, name='copy'):
        target = tmp_path / name
        shutil.copytree(f'{FIXTURES}/{variant}/ckpt', target,
                        ignore=shutil.ignore_patterns('*_universal'))
        return target
    return make


def tag_of(save):
    return save / 'global_step5'


def only(folder, part):
    """The files of a folder whose name contains a text."""
    return sorted(p for p in folder.iterdir() if part in p.name)


def test_a_missing_rank_is_named(copy):
    save = copy('zero2')
    only(tag_of(save), 'pp_rank_2')[0].unlink()
    assert 'rank 2' in index(str(save))[1]
    assert 'rank 2' in index(str(tag_of(save)))[1]


def test_a_missing_model_file_is_named(copy):
    save = copy('tp2')
    (tag_of(save) / 'mp_rank_01_model_states.pt').unlink()
    assert 'model-parallel rank 1' in index(str(save))[1]


def test_two_runs_in_one_directory(copy):
    """Another dp, another stage, another precision in the same tag."""
    save, other = copy('zero2'), copy('zero2_tied', 'other')
    shutil.copy(only(tag_of(other), 'pp_rank_1')[0], tag_of(save))
    assert 'two runs' in index(str(save))[1]


def test_two_precisions_of_one_rank(copy):
    save = copy('zero2')
    first = only(tag_of(save), 'pp_rank_1')[0]
    shutil.copy(first, tag_of(save) / first.name.removeprefix('bf16_'))
    assert 'same rank' in index(str(save))[1]


def test_swapped_model_states(copy):
    """Shapes that contradict the partitions."""
    save, other = copy('zero2'), copy('zero2_tied', 'other')
    name = 'mp_rank_00_model_states.pt'
    shutil.copy(tag_of(other) / name, tag_of(save) / name)
    assert name in index(str(save))[1] or 'optim_states' in index(str(save))[1]


@pytest.mark.parametrize('variant', VARIANTS)
def test_a_save_that_was_cut_off(copy, variant):
    """DeepSpeed writes model states first.  Stage 0 has its optimizer there."""
    save = copy(variant)
    sharded = only(tag_of(save), 'optim_states')
    for path in sharded:
        path.unlink()
    for path in (save, tag_of(save)):
        steps, error = index(str(path))
        assert bool(steps) == (not sharded), error
        assert not sharded or 'the save was cut off' in error
        assert not sharded or 'model_states.pt' in error


def test_a_bf16_optimizer_without_zero_was_cut_off(copy):
    """It leaves a part of itself in the model states, and no param_shapes."""
    save = copy('stage0')
    path = tag_of(save) / 'mp_rank_00_model_states.pt'
    content = torch.load(path, weights_only=False)
    content['optimizer'] = {'clip_grad': 0.0, 'base_optimizer_state': {},
                            'single_partition_of_fp32_groups': []}
    torch.save(content, path)
    assert 'the save was cut off' in index(str(save))[1]


def test_a_save_that_was_cut_off_is_skipped_beside_a_whole_one(copy):
    save = copy('zero2')
    shutil.copytree(tag_of(save), save / 'global_step6')
    for path in only(save / 'global_step6', 'optim_states'):
        path.unlink()
    steps, error = index(str(save))
    assert [s['id'] for s in steps] == ['global_step5'], error


@pytest.mark.parametrize('text', ['global_step99', '', '../elsewhere'])
@pytest.mark.parametrize('pointer', ['latest', 'latest_universal'])
def test_a_pointer_to_no_tag(copy, pointer, text):
    """It takes no good tag away; without one it is the refusal."""
    save = copy('zero1')
    (save / pointer).write_text(text)
    steps, error = index(str(save))
    assert [s['id'] for s in steps] == ['global_step5'], error
    shutil.rmtree(tag_of(save))
    steps, error = index(str(save))
    assert steps is None
    assert 'no complete step' in error and f'{save}/latest' in error


def test_links_that_leave_the_directory(copy, tmp_path):
    save = copy('zero1')
    victim = only(tag_of(save), 'pp_rank_1')[0]
    outside = tmp_path / 'outside.pt'
    victim.rename(outside)
    victim.symlink_to(outside)
    assert 'symbolic link' in index(str(save))[1]


def test_truncated_files(copy):
    save = copy('zero1')
    victim = only(tag_of(save), 'pp_rank_1')[0]
    data = victim.read_bytes()
    for size in (0, 1, len(data) // 2, len(data) - 1):
        victim.write_bytes(data[:size])
        assert victim.name in index(str(save))[1], size


def test_directories_that_are_no_checkpoint(tmp_path):
    assert 'no checkpoint found' in index(str(tmp_path))[1]
    (tmp_path / 'notes.txt').write_text('hello')
    assert 'no checkpoint found' in index(str(tmp_path))[1]


def test_an_incomplete_tag_is_skipped_beside_a_whole_one(copy):
    save = copy('zero1')
    shutil.copytree(tag_of(save), save / 'global_step6')
    only(save / 'global_step6', 'pp_rank_1')[0].unlink()
    steps, error = index(str(save))
    assert [s['id'] for s in steps] == ['global_step5'], error


def test_a_cut_that_no_rule_covers_is_refused(copy):
    """Without its lists a tensor-parallel checkpoint of unknown names."""
    save = copy('tp2')
    for path in only(tag_of(save), 'mp_rank'):
        content = torch.load(path, weights_only=False)
        if 'module' not in content:
            continue
        content.pop('universal_checkpoint_info')
        rename = lambda n: n.replace('model.layers', 'stack')
        content['module'] = {rename(k): v for k, v in content['module'].items()}
        content['param_shapes'] = [{rename(k): v for k, v in g.items()}
                                   for g in content['param_shapes']]
        content['buffer_names'] = [rename(n) for n in content['buffer_names']]
        torch.save(content, path)
    error = index(str(save))[1]
    assert '--replicated' in error and 'stack.' in error
