# SPDX-License-Identifier: Apache-2.0
"""Steps that torchtitan wrote, saved and loaded by its own CheckpointManager.  They are a run and
hold what the live job had; a training goes on from their views as one that never stopped."""
import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file

import daemon
from daemon import run_ranks, step_of
from zygote import Zygote

HERE = os.path.dirname(os.path.abspath(__file__))
MIDDLE, UPDATES = 4, 6
ZYGOTE = Zygote(['torch', 'torch.distributed.fsdp', 'torch.distributed.tensor.parallel', 'torchtitan.components.checkpointer',
                 'torchtitan.components.dataloader', 'torchtitan.components.optimizer'])
HEADS = ('--family-set', 'head_dim=8', '--replicated', r'model\.(gain|seen|running_mean)')


@pytest.fixture(scope='module', autouse=True)
def end_of_zygote():
    """It waits for programs to start."""
    yield
    ZYGOTE.close()


def train(folder, mesh, ranks, *path, **more):
    """The losses of a training; with a path, of one that goes on from it."""
    os.makedirs(folder, exist_ok=True)
    meeting = os.path.join(folder, f'meeting{len(os.listdir(folder))}')
    words = [sys.executable, os.path.join(HERE, 'titan_job.py'), folder, mesh]
    run_ranks([[*words, str(rank), meeting, *path] for rank in range(ranks)], f'{folder}/log', 300, ZYGOTE.start,
              env={**os.environ, 'GLOO_SOCKET_IFNAME': 'lo', **more})
    with open(f'{folder}/{"resumed" if path else "losses"}.json', encoding='utf-8') as f:
        return json.load(f)


class Job:
    """A run of two ranks and a mount of it, which shows the step that was saved on the way."""

    def __init__(self, folder, ckptfs, mesh):
        self.folder = folder
        self.losses = train(folder, mesh, 2)
        self.same = mesh
        self.saved = f'{folder}/checkpoint'
        self.adopted = ckptfs.adopt(self.saved, extra=HEADS)
        self.mount = ckptfs.mount('--step', f'step-{MIDDLE}')
        self.run = os.path.basename(folder)

    def step(self, number):
        return step_of(self.mount, self.run, f'step-{number}')

    def resumed(self, mesh, ranks, path):
        """torchtitan takes a data loader's place at the same number of data-parallel ranks alone."""
        more = {} if mesh.startswith(self.same) else {'TITAN_EXCLUDE': 'dataloader'}
        return train(self.folder, mesh, ranks, path, **more)


def made(tmp_path_factory, mesh):
    """A Job."""
    folder = tmp_path_factory.mktemp('titan')
    ckptfs = daemon.Ckptfs(str(folder))
    yield Job(str(folder / 'job'), ckptfs, mesh)
    ckptfs.close()


@pytest.fixture(scope='module')
def job(tmp_path_factory):
    """FSDP2, made once."""
    yield from made(tmp_path_factory, 'fsdp=2')


@pytest.fixture(scope='module')
def staged(tmp_path_factory):
    """Two stages of a pipeline, made once."""
    yield from made(tmp_path_factory, 'pp=2')


def test_a_run_is_named_after_what_it_lies_in(job):
    assert job.adopted.stdout.split() == [f'job/step-{MIDDLE}', f'job/step-{UPDATES}']
    assert 'skipped' not in job.adopted.stderr


@pytest.mark.parametrize('kind', ['job', 'staged'])
def test_every_tensor_is_the_live_jobs(request, kind):
    job = request.getfixturevalue(kind)
    truth = load_file(f'{job.folder}/truth.safetensors')
    rank = f'{job.step(MIDDLE)}/view/tp1/rank0'
    held = {f'weight/{name}': tensor for name, tensor in load_file(f'{rank}/model.safetensors').items()}
    held.update(load_file(f'{rank}/optimizer.safetensors'))
    assert held.keys() == truth.keys()
    assert {key.split('/')[0] for key in truth} == {'weight', 'exp_avg', 'exp_avg_sq', 'step'}
    for key, tensor in truth.items():
        assert held[key].dtype == tensor.dtype and torch.equal(held[key].view(-1), tensor.view(-1)), key


def test_the_last_step_is_weights_alone(job):
    """As torchtitan saves it unless it is told otherwise, cast."""
    with open(f'{job.step(UPDATES)}/info.json', encoding='utf-8') as f:
        assert json.load(f)['iteration'] == UPDATES
    rank = f'{job.step(UPDATES)}/view/tp1/rank0'
    floats = [tensor for tensor in load_file(f'{rank}/model.safetensors').values() if tensor.is_floating_point()]
    assert floats and all(tensor.dtype == torch.bfloat16 for tensor in floats)
    assert not os.path.exists(f'{rank}/optimizer.safetensors') or not load_file(f'{rank}/optimizer.safetensors')


@pytest.mark.parametrize('mesh, ranks, layout', [('fsdp=2', 2, 'dp2'), ('fsdp=3', 3, 'dp3'), ('fsdp=2,tp=2', 4, 'tp2_dp2')])
def test_a_training_goes_on_from_a_view(job, mesh, ranks, layout):
    """The step has optimizers of two kinds, their schedule, and the states of the training and the
    data loader."""
    losses = job.resumed(mesh, ranks, f'{job.step(MIDDLE)}/view/{layout}/dcp')
    if mesh == 'fsdp=2':
        assert losses == job.losses[MIDDLE:]
    else:  # as torch itself cuts the source for that mesh
        assert losses == job.resumed(mesh, ranks, f'{job.saved}/step-{MIDDLE}')
        assert losses == pytest.approx(job.losses[MIDDLE:], abs=1e-4)


@pytest.mark.parametrize('mesh, ranks, layout', [('pp=2', 2, 'dp1'), ('fsdp=2', 2, 'dp2'), ('fsdp=2,tp=2', 4, 'tp2_dp2')])
def test_a_pipeline_goes_on_from_a_view(staged, mesh, ranks, layout):
    """Each of its stages loads what is its."""
    losses = staged.resumed(mesh, ranks, f'{staged.step(MIDDLE)}/view/{layout}/dcp')
    if mesh == 'pp=2':
        assert losses == staged.losses[MIDDLE:]
    else:
        assert losses == staged.resumed(mesh, ranks, f'{staged.saved}/step-{MIDDLE}')
        assert losses == pytest.approx(staged.losses[MIDDLE:], abs=1e-4)


def test_a_fsdp_job_goes_on_as_a_pipeline(job):
    losses = job.resumed('pp=2', 2, f'{job.step(MIDDLE)}/view/dp1/dcp')
    assert losses == job.resumed('pp=2', 2, f'{job.saved}/step-{MIDDLE}')
    assert losses == pytest.approx(job.losses[MIDDLE:], abs=1e-4)


def test_a_last_step_in_safetensors_is_one_of_the_run(ckptfs, tmp_path):
    """With `last_save_in_hf`; the shards that its ranks wrote lie beside it."""
    folder = str(tmp_path / 'job')
    train(folder, 'fsdp=2', 2, TITAN_HF='1')
    assert os.path.isdir(f'{folder}/checkpoint/step-{UPDATES}/sharded')
    done = ckptfs.adopt(f'{folder}/checkpoint', extra=HEADS)
    assert done.stdout.split() == [f'job/step-{MIDDLE}', f'job/step-{UPDATES}']
    assert 'skipped' not in done.stderr
    mount = ckptfs.mount()
    assert os.readlink(f'{mount}/view') == f'run/job/step/step-{UPDATES}/view'
    weights = load_file(f'{mount}/view/tp1/rank0/model.safetensors')
    own = load_file(f'{folder}/checkpoint/step-{UPDATES}/model-00001-of-00001.safetensors')
    assert weights.keys() == own.keys() and all(torch.equal(weights[name], own[name]) for name in own)
