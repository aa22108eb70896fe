# SPDX-License-Identifier: Apache-2.0
"""Files that tools wrote of more than one model and its optimizer: nobody's states are given to another."""
import json

import pytest
import torch
from accelerate import Accelerator
from torch import nn


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def info(ckptfs, path):
    return json.loads(ckptfs.run('info', path, '--json').stdout)


@pytest.mark.parametrize('safe', [True, False])
def test_one_optimizer_beside_two_models_is_nobodys(ckptfs, tmp_path, safe):
    accelerator = Accelerator(cpu=True)
    teacher, student = net(), net()
    optimizer = torch.optim.AdamW(student.parameters())
    teacher, student, optimizer = accelerator.prepare(teacher, student, optimizer)
    accelerator.backward((student(torch.ones(2, 8)) - teacher(torch.ones(2, 8))).pow(2).mean())
    optimizer.step()
    accelerator.save_state(tmp_path / 'step_3', safe_serialization=safe)
    said = info(ckptfs, tmp_path / 'step_3')
    assert set(said['kinds']) == {'weight'}
    assert any('several models or optimizers' in note for note in said['notes'])


def test_an_average_is_not_what_lightnings_optimizer_trains(ckptfs, tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    whole = {'pytorch-lightning_version': '2.6.0', 'global_step': 5, 'epoch': 0, 'state_dict': model.state_dict(),
             'optimizer_states': [optimizer.state_dict()], 'lr_schedulers': [], 'loops': {}}
    torch.save(whole, tmp_path / 'plain.ckpt')
    assert 'exp_avg' in info(ckptfs, tmp_path / 'plain.ckpt')['kinds']
    average = {name: tensor / 2 for name, tensor in model.state_dict().items()}
    torch.save({**whole, 'state_dict': average, 'current_model_state': model.state_dict()}, tmp_path / 'average.ckpt')
    said = info(ckptfs, tmp_path / 'average.ckpt')
    assert set(said['kinds']) == {'weight'}
    assert any('average' in note and 'current_model_state' in note for note in said['notes'])
