# SPDX-License-Identifier: Apache-2.0
"""Directories that hold parts of two saves: of one that died over a whole step, and of one that leaves parts of the earlier one."""
import json
import os
import shutil
import time
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import format_utils

from daemon import TALLY, checkpoint

PAUSE = 1.3  # a job trains between two saves


class Killed(Exception):
    """A save dies here."""


def dies_at(call, name):
    """A wrapper of a function that saves: dies before it saves to a file of that name."""
    def save(*args, **kwargs):
        if any(name in str(argument) for argument in args):
            raise Killed(name)
        return call(*args, **kwargs)
    return save


def killed(module, name, at, save):
    """Runs `save`, killed before `module.name` writes the file `at`."""
    with mock.patch.object(module, name, dies_at(getattr(module, name), at)), pytest.raises(Killed):
        save()


def copies(folder, kept):
    """Returns what programs that copy make of a folder: with its times, and without them in two orders."""
    shutil.copytree(folder, kept / 'times')
    for order in (False, True):
        target = kept / f'sorted-{order}' / os.path.basename(folder)
        target.mkdir(parents=True)
        for name in sorted(os.listdir(folder), reverse=order):
            if os.path.isfile(folder / name):
                shutil.copyfile(folder / name, target / name)
    return [kept / 'times', kept / 'sorted-False', kept / 'sorted-True']


def llama(seed):
    torch.manual_seed(seed)
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                              num_attention_heads=4, num_key_value_heads=4))


# ---- a save over a whole step that died -----------------------------------------------------------

def accelerated():
    """An accelerator with a model and its optimizer, and what trains them once."""
    job = accelerate.Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    net, optimizer = job.prepare(net, torch.optim.AdamW(net.parameters(), lr=.1))

    def train():
        optimizer.zero_grad()
        net(torch.ones(3, 8)).sum().backward()
        optimizer.step()
    train()
    return job, train


def test_weights_that_a_dead_save_replaced_are_named(ckptfs, tmp_path):
    """safetensors renames its file into place, so it was made after the file that is written last; so is a copy."""
    job, train = accelerated()
    step = tmp_path / 'run' / 'step_1'
    job.save_state(step)
    assert 'anew' not in ckptfs.adopt(step).stderr
    for i, copy in enumerate(copies(step, tmp_path / 'copies')):
        assert 'anew' not in ckptfs.adopt(copy, name=f'copy{i}').stderr
    time.sleep(PAUSE)
    train()
    killed(accelerate.checkpointing, 'save', 'optimizer', lambda: job.save_state(step))
    said = ckptfs.adopt(step, extra=['--refresh']).stderr
    anew = 'model.safetensors: written anew after random_states_0.pkl, which its tool writes last'
    assert anew in said and all(anew in ckptfs.run('info', what, '--store', ckptfs.store).stdout for what in ('run/latest', step))
    train()
    job.save_state(step)  # the next one is whole
    assert 'anew' not in ckptfs.adopt(step, extra=['--refresh']).stderr


# ---- shards ------------------------------------------------------------------------------------------

def test_shards_of_two_saves_are_named(ckptfs, tmp_path):
    step = tmp_path / 'model'
    llama(1).save_pretrained(step, max_shard_size='40KB')
    shards = sorted(step.glob('*.safetensors'))
    assert len(shards) > 2
    assert 'anew' not in ckptfs.adopt(step).stderr
    for i, copy in enumerate(copies(step, tmp_path / 'copies')):
        assert 'anew' not in ckptfs.adopt(copy, name=f'copy{i}').stderr
    time.sleep(PAUSE)
    killed(hf.modeling_utils, 'safe_save_file', shards[1].name, lambda: llama(2).save_pretrained(step, max_shard_size='40KB'))
    said = ckptfs.adopt(step, extra=['--refresh']).stderr
    assert f'{shards[0].name}: written anew after model.safetensors.index.json, which is written after all shards' in said
    llama(2).save_pretrained(step, max_shard_size='40KB')
    assert 'anew' not in ckptfs.adopt(step, extra=['--refresh']).stderr


def test_shards_of_two_types_that_contradict_their_index_are_refused(ckptfs, tmp_path):
    """Without times, as after a download: the second save was in bf16, with as many shards."""
    step = tmp_path / 'model'
    llama(1).save_pretrained(step, max_shard_size='40KB')
    shards = sorted(step.glob('*.safetensors'))
    killed(hf.modeling_utils, 'safe_save_file', shards[1].name, lambda: llama(2).bfloat16().save_pretrained(step, max_shard_size='20KB'))
    for name in step.iterdir():
        os.utime(name, (1e9, 1e9))
    refused = ckptfs.adopt(step, check=False)
    assert refused.returncode == 4, refused.stderr
    assert f'{shards[0].name} has bf16 where {shards[1].name} has fp32: parts of two saves are in one directory' in refused.stderr
    index = step / 'model.safetensors.index.json'
    said = json.loads(index.read_text())
    said['metadata']['total_size'] = sum(value.nbytes for name in shards for value in load_file(name).values())
    index.write_text(json.dumps(said))  # a model of two types
    assert ckptfs.adopt(step).returncode == 0


# ---- a whole save that leaves parts of an earlier one -----------------------------------------------

def train(output, seed, **more):
    """transformers' Trainer saves checkpoint-2 into `output`."""
    arguments = hf.TrainingArguments(output, max_steps=2, save_steps=2, per_device_train_batch_size=1, use_cpu=True, report_to=[],
                                     disable_tqdm=True, **more)
    rows = [{'input_ids': torch.arange(8) + i, 'labels': torch.arange(8) + i} for i in range(4)]
    hf.Trainer(llama(seed), arguments, train_dataset=rows).train()


def test_states_beside_weights_that_trainer_saved_alone_are_refused(ckptfs, tmp_path):
    """save_only_model over a run that saved all: Trainer itself would go on with the moments of the run before."""
    train(tmp_path / 'out', 1)
    step = tmp_path / 'out' / 'checkpoint-2'
    train(tmp_path / 'alone', 1, save_only_model=True)
    for whole in (step, tmp_path / 'alone' / 'checkpoint-2'):
        assert ckptfs.adopt(whole).returncode == 0
    train(tmp_path / 'out', 2, save_only_model=True)
    refused = ckptfs.adopt(step, extra=['--refresh'], check=False)
    assert refused.returncode == 4, refused.stderr
    assert ('optimizer.pt, rng_state.pth, scheduler.pt beside a training_args.bin that says save_only_model: '
            'parts of two saves are in one directory') in refused.stderr
    for name in ('optimizer.pt', 'rng_state.pth', 'scheduler.pt'):
        os.unlink(step / name)
    assert ckptfs.adopt(step, extra=['--refresh']).returncode == 0


def test_an_optimizer_of_newer_weights_of_another_form_is_refused(ckptfs, tmp_path):
    """accelerate's safe_serialization, and then not: accelerate itself would load the older weights."""
    job, another = accelerated()
    step = tmp_path / 'run' / 'step_1'
    job.save_state(step)
    another()
    job.save_state(step, safe_serialization=False)
    refused = ckptfs.adopt(step, check=False)
    assert refused.returncode == 4, refused.stderr
    assert ('pytorch_model.bin, which optimizer.bin was written after, is newer than model.safetensors, which loaders take first: '
            'parts of two saves are in one directory') in refused.stderr
    assert "'pytorch_model.bin': it is newer than model.safetensors" in ckptfs.adopt(step, extra=['--weights-only']).stderr
    another()
    job.save_state(step)  # the newer weights are those that loaders take
    assert 'newer' not in ckptfs.adopt(step, extra=['--refresh']).stderr


def test_an_optimizer_that_a_later_save_left_is_named(ckptfs, tmp_path):
    """accelerate saves what was prepared: later the model alone, and what is written last is new."""
    job, _ = accelerated()
    step = tmp_path / 'run' / 'step_1'
    job.save_state(step)
    time.sleep(2 * PAUSE)  # accelerate writes its last file, which was made after the optimizer, in its place
    job._optimizers.clear()
    job.save_state(step)
    said = ckptfs.adopt(step).stderr
    assert 'model.safetensors: written anew after optimizer.bin, which its tool writes after the weights' in said


def test_the_same_weights_in_a_newer_form_are_not_a_second_save(ckptfs, tmp_path):
    job, _ = accelerated()
    step = tmp_path / 'run' / 'step_1'
    job.save_state(step)
    job.save_state(step, safe_serialization=False)
    assert 'newer' not in ckptfs.adopt(step).stderr


def test_weights_that_were_saved_beside_a_dcp_step_later_are_named(ckptfs, tmp_path):
    """By dcp_to_torch, and by save_pretrained; those that lay there before are an earlier save's."""
    step = tmp_path / 'run' / 'step-1'
    llama(1).save_pretrained(step)
    dcp.save({'model': llama(1).state_dict()}, checkpoint_id=step, no_dist=True)
    assert 'newer' not in ckptfs.adopt(step).stderr
    format_utils.dcp_to_torch_save(step, step / 'pytorch_model.bin')
    os.unlink(step / 'model.safetensors')
    said = ckptfs.adopt(step, extra=['--refresh']).stderr
    assert "left out: 'pytorch_model.bin': it is newer than .metadata: the step is what torch.distributed.checkpoint saved" in said
    llama(2).save_pretrained(step)
    said = ckptfs.adopt(step, extra=['--refresh']).stderr
    assert "left out: 'model.safetensors': it is newer than .metadata" in said


WTE = torch.randn(10, 4)
FORMS = {  # what is taken, and the newer .bin of the same weights
    'tied': ({'wte.weight': WTE}, {'wte.weight': WTE, 'lm_head.weight': WTE}),
    'mask': ({'wte.weight': WTE}, {'wte.weight': WTE, 'attn.bias': torch.ones(1, 1, 4, 4, dtype=torch.uint8)}),
    'wider': ({'wte.weight': WTE.bfloat16()}, {'wte.weight': WTE}),
    'narrower': ({'wte.weight': WTE}, {'wte.weight': WTE.bfloat16()})}


@pytest.mark.parametrize('form', FORMS)
def test_weights_that_were_converted_are_not_mentioned(ckptfs, tmp_path, form):
    taken, newer = FORMS[form]
    save_file(taken, tmp_path / 'model.safetensors', {'format': 'pt'})
    torch.save(newer, tmp_path / 'pytorch_model.bin')
    os.utime(tmp_path / 'model.safetensors', (1.7e9,) * 2)
    assert 'newer' not in ckptfs.adopt(str(tmp_path), 'run').stderr
    torch.save({name: tensor.float() + 1 for name, tensor in newer.items()}, tmp_path / 'pytorch_model.bin')
    assert 'newer' in ckptfs.adopt(str(tmp_path), 'other').stderr


def test_a_shard_that_somebody_added_is_not_of_another_save(ckptfs, tmp_path):
    shards = {'model-00001-of-00002.safetensors': ('a', torch.bfloat16), 'model-00002-of-00002.safetensors': ('b', torch.bfloat16),
              'mtp.safetensors': ('mtp', torch.float32)}
    for file, (name, dtype) in shards.items():
        save_file({name: torch.ones(8, 8, dtype=dtype)}, tmp_path / file, {'format': 'pt'})
    with open(tmp_path / 'model.safetensors.index.json', 'w', encoding='utf-8') as f:
        json.dump({'metadata': {'total_size': 256}, 'weight_map': {name: file for file, (name, _) in shards.items()}}, f)
    assert ckptfs.adopt(str(tmp_path), 'run').stderr == ''


@pytest.mark.parametrize('part', ['model', 'optim'])
def test_files_of_zero_3_that_a_dead_save_replaced_are_named(ckptfs, tmp_path, part):
    """No tensor of the ranks' model states is read; the script's own state and the iteration are."""
    run = tmp_path / 'run'
    shutil.copytree(checkpoint('zero3'), run)
    for file in run.rglob('*'):
        os.utime(file, (time.time() - 3600,) * 2)
    assert 'written anew' not in ckptfs.adopt(run, 'whole', extra=TALLY).stderr
    for file in run.glob(f'*/*zero_pp_rank_[1-3]_*{part}_states.pt'):
        shutil.copy(file, tmp_path / 'new')
        os.replace(tmp_path / 'new', file)
    said = ckptfs.adopt(run, 'run', extra=TALLY).stderr
    assert f'{part}_states.pt (and 2 more files): written anew after latest, which' in said, said
