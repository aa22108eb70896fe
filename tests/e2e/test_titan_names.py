# SPDX-License-Identifier: Apache-2.0
"""Names of torchtitan: a step of one spelling is a step of the other, weights and moments.

compare_titan.py holds the same table, read by the same Python, against torchtitan's own adapters.
"""
import json
import os
import shutil
import sys
import tomllib
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

import daemon

TABLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'formats', 'dialects')
sys.path.insert(0, TABLES)
import compare_titan  # noqa: E402  pylint: disable=wrong-import-position
import derive_hf5  # noqa: E402  pylint: disable=wrong-import-position

KINDS = ('llama', 'qwen3', 'qwen3_moe', 'deepseek_v3')
warnings.filterwarnings('ignore')


def titan_of(kind, model, files):
    with open(os.path.join(TABLES, 'titan.toml'), 'rb') as file:
        rules = [rule for rule in tomllib.load(file)['map'] if kind in rule['model_types']]
    sizes = {'heads': model.config.num_attention_heads, 'kv_heads': model.config.num_key_value_heads}
    return compare_titan.translated(files, rules, sizes)


def save_job(folder, weights, config):
    """As a job with FSDP2 saves it; moments are of the weights, so they tell where they belong."""
    states = {name: {'step': torch.tensor(3.), 'exp_avg': -tensor, 'exp_avg_sq': tensor / 2} for name, tensor in weights.items()}
    dcp.save({'model': weights, 'optimizer': {'state': states, 'param_groups': [{'lr': .1, 'params': list(weights)}]}},
             checkpoint_id=folder, no_dist=True)
    shutil.copy(config, folder)


@pytest.fixture(scope='module')
def shown(tmp_path_factory):
    """(program, mount, {kind: (model, tensors of files, tensors of torchtitan)})."""
    root = str(tmp_path_factory.mktemp('titan'))
    program, truth = daemon.Ckptfs(root), {}
    for kind in KINDS:
        model = derive_hf5.build(kind)
        files = derive_hf5.files_of(model, f'{root}/files-{kind}')
        truth[kind] = model, files, titan_of(kind, model, files)
        save_job(f'{root}/titan-{kind}', truth[kind][2], f'{root}/files-{kind}/config.json')
        for spelling in ('files', 'titan'):
            program.adopt(f'{root}/{spelling}-{kind}', f'{spelling}-{kind}')
    yield program, program.mount(), truth
    program.close()


def view(mount, run, *path):
    return os.path.join(daemon.step_of(mount, run), 'view', *path)


def assert_same(got, want):
    assert set(got) == set(want), sorted(set(got) ^ set(want))[:4]
    for name, tensor in want.items():
        assert got[name].shape == tensor.shape and torch.equal(got[name], tensor), name


@pytest.mark.parametrize('kind', KINDS)
def test_files_are_shown_as_torchtitans(shown, kind):
    _, mount, truth = shown
    assert_same(torch.load(view(mount, f'files-{kind}', 'torchtitan', 'rank0', 'model.pt')), truth[kind][2])


@pytest.mark.parametrize('kind', KINDS)
def test_torchtitans_are_shown_as_files(shown, kind):
    _, mount, truth = shown
    model, files, _ = truth[kind]
    assert_same(load_file(view(mount, f'titan-{kind}', 'tp1', 'huggingface', 'model.safetensors')), files)
    loaded = AutoModelForCausalLM.from_pretrained(view(mount, f'titan-{kind}', 'tp1', 'huggingface'), dtype=torch.float32)
    assert_same(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize('kind', KINDS)
def test_moments_follow(shown, kind):
    _, mount, truth = shown
    moments = load_file(view(mount, f'titan-{kind}', 'hf', 'rank0', 'optimizer.safetensors'))
    want = {f'exp_avg/{name}': -tensor for name, tensor in truth[kind][1].items()}
    want |= {f'exp_avg_sq/{name}': tensor / 2 for name, tensor in truth[kind][1].items()}
    assert_same({name: tensor for name, tensor in moments.items() if name.startswith('exp_avg')}, want)


@pytest.mark.parametrize('kind', KINDS)
def test_a_shard_is_a_shard_of_the_whole(shown, kind):
    """Rows of queries change places before they are cut."""
    _, mount, truth = shown
    ranks = [torch.load(view(mount, f'titan-{kind}', 'tp2_hf', f'rank{rank}', 'model.pt')) for rank in (0, 1)]
    cuts = 0
    for name, tensor in truth[kind][1].items():
        parts = [rank[name] for rank in ranks if name in rank]  # an expert is one rank's
        cut = [dim for dim in range(tensor.ndim) if parts[0].shape[dim] != tensor.shape[dim]]
        assert torch.equal(torch.cat(parts, cut[0]) if cut else parts[0], tensor), name
        cuts += bool(cut)
    assert cuts > 4


def test_what_is_said(shown):
    program, _, _ = shown
    said = program.run('info', '--store', program.store, 'titan-llama').stdout
    assert 'torchtitan' in said, said


def test_without_a_config_nothing_is_translated(shown, tmp_path):
    program, mount, truth = shown
    save_job(str(tmp_path / 'job'), truth['llama'][2], view(mount, 'titan-llama', 'tp1', 'huggingface', 'config.json'))
    os.remove(tmp_path / 'job' / 'config.json')
    program.adopt(tmp_path / 'job', 'bare')
    done = program.run('export', '--store', program.store, 'bare', 'tp1_hf/rank0', tmp_path / 'out', check=False)
    assert done.returncode != 0 and 'config.json' in done.stderr, done.stderr


def test_a_base_model_of_transformers_is_not_torchtitans(shown, tmp_path):
    """Its files have `norm.weight`, as torchtitan's have."""
    program, _, truth = shown
    model = AutoModel.from_config(truth['llama'][0].config, dtype=torch.float32)
    model.save_pretrained(tmp_path / 'base')
    with open(tmp_path / 'base' / 'config.json', encoding='utf-8') as file:
        assert json.load(file)['model_type'] == 'llama'
    program.adopt(tmp_path / 'base', 'base')
    program.run('export', '--store', program.store, 'base', 'tp1/huggingface', tmp_path / 'out')
    assert_same(load_file(tmp_path / 'out' / 'model.safetensors'), load_file(tmp_path / 'base' / 'model.safetensors'))
    save_job(str(tmp_path / 'job'), model.state_dict(), tmp_path / 'base' / 'config.json')
    program.adopt(tmp_path / 'job', 'base_job')
    program.run('export', '--store', program.store, 'base_job', 'tp1/huggingface', tmp_path / 'job_out')
    for out in (tmp_path / 'out', tmp_path / 'job_out'):
        assert_same(AutoModel.from_pretrained(out, dtype=torch.float32).state_dict(), model.state_dict())
    program.run('export', '--store', program.store, 'base_job', 'tp1_hf/rank0', tmp_path / 'rank')
    assert_same(torch.load(tmp_path / 'rank' / 'model.pt'), model.state_dict())
    done = program.run('export', '--store', program.store, 'base_job', 'tp1_mcore/rank0', tmp_path / 'mcore', check=False)
    assert done.returncode != 0, done.stderr
