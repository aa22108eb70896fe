# SPDX-License-Identifier: Apache-2.0
"""Files that tools wrote of more than one model and its optimizer: nobody's states are given to another."""
import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors.torch import save_file
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
    assert any('several models or optimizers' in one['text'] for one in said['left_out'])


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
    assert any('average' in one['text'] and 'current_model_state' in one['text'] for one in said['left_out'])


def save_ambiguous(folder, step):
    """A Trainer's directory whose optimizer numbers two parameters of one shape."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    own = folder / f'checkpoint-{step}'
    own.mkdir(parents=True)
    save_file(model.state_dict(), own / 'model.safetensors')
    torch.save(optimizer.state_dict(), own / 'optimizer.pt')
    (own / 'trainer_state.json').write_text('{}')
    return [name for name, _ in model.named_parameters()]


def test_moments_that_are_not_taken_are_told_where_people_look(ckptfs, tmp_path):
    names = [save_ambiguous(tmp_path / 'output', step) for step in (1, 2)][0]
    done = ckptfs.adopt(tmp_path / 'output')
    line, = done.stderr.splitlines()
    assert line.startswith('ckptfs: output/checkpoint-1 (and 1 other step): ')
    assert 'left out: the optimizer in optimizer.pt' in line and '--parameter-order FILE' in line
    mount = ckptfs.mountpoint()
    said = ckptfs.run('mount', '--store', ckptfs.store, '--reserve', '0', tmp_path / 'output', mount).stderr
    assert said.count('--parameter-order FILE') == 1
    with open(f'{mount}/view/README.txt', encoding='utf-8') as f:
        assert '--parameter-order' in f.read()
    assert '--parameter-order FILE' in ckptfs.run('info', 'output', '--store', ckptfs.store).stdout
    refused = ckptfs.adopt(tmp_path / 'output', check=False, extra=('--name', 'whole', '--require', 'optimizer'))
    assert refused.returncode != 0 and '--require' in refused.stderr
    (tmp_path / 'order').write_text('\n'.join(names))
    done = ckptfs.adopt(tmp_path / 'output', extra=['--refresh', '--parameter-order', tmp_path / 'order'])
    assert done.stderr == ''
    with open(f'{mount}/view/README.txt', encoding='utf-8') as f:
        assert '--parameter-order' not in f.read()


def test_a_mount_that_follows_tells_it_too(ckptfs, tmp_path):
    output = tmp_path / 'output'
    save_ambiguous(output, 1)
    for name in (output / 'checkpoint-1').iterdir():  # long ago, so that it is taken at once
        os.utime(name, (1e9, 1e9))
    said = ckptfs.run('mount', '--store', ckptfs.store, '--reserve', '0', '--follow', output,
                      ckptfs.mountpoint()).stderr
    assert said.count('--parameter-order FILE') == 1


def test_parts_of_two_saves_are_refused_by_name(ckptfs, tmp_path):
    """A directory that was saved into with sharded states before, and without them now."""
    model = nn.Linear(4, 4)
    own = tmp_path / 'run' / 'step_5'
    dcp.save({'model': model.state_dict()}, checkpoint_id=own / 'pytorch_model_fsdp_0', no_dist=True)
    torch.save({'step': 0}, own / 'random_states_0.pkl')
    assert ckptfs.adopt(own).returncode == 0
    torch.save(torch.optim.AdamW(model.parameters()).state_dict(), own / 'optimizer.bin')
    refused = ckptfs.adopt(own, check=False)
    assert refused.returncode == 4 and 'optimizer.bin lies beside sharded states of an optimizer: parts of two saves' in refused.stderr
