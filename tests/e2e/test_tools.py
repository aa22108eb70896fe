# SPDX-License-Identifier: Apache-2.0
"""What training tools wrote, made by the tools themselves: it is a run, holds what the live
job had, and a training goes on from its views as one that never stopped."""
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tool_jobs import MIDDLE, UPDATES, model

from daemon import checkpoint, run_ranks

HERE = os.path.dirname(os.path.abspath(__file__))

# (tool, way, ranks) -> the directory of its runs, the run's name, and the step's id
MADE = {
    ('trainer', 'plain', 1): ('output', 'output', f'checkpoint-{MIDDLE}'),
    ('trainer', 'zero2', 2): ('output', 'output', f'checkpoint-{MIDDLE}'),
    ('accelerate', 'zero1', 1): ('project', 'project', 'checkpoint_0'),
    ('lightning', 'plain', 1): ('logs', 'logs', f'epoch=0-step={MIDDLE}.ckpt'),
}
if os.environ.get('CKPTFS_LONG') == '1':
    MADE['accelerate', 'plain', 1] = ('project', 'project', 'checkpoint_0')
    MADE['lightning', 'zero1', 1] = ('logs', 'logs', f'epoch=0-step={MIDDLE}.ckpt')


def train(folder, tool, way, ranks, *path, **more):
    """The losses of a training; with a path, of one that goes on from it."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    words = [sys.executable, os.path.join(HERE, 'tool_jobs.py'), tool, way, folder]
    run_ranks([[*words, str(rank), str(ranks), *path] for rank in range(ranks)],
              f'{folder}/log', 300, env={**os.environ, 'TOOL_PORT': str(port), **more})
    with open(f'{folder}/{"resumed" if path else "losses"}.json', encoding='utf-8') as f:
        return json.load(f)


class Job:
    """One tool's job, its losses, and a mount of what it wrote."""

    def __init__(self, folder, tool, way, ranks):
        self.folder, self.tool, self.way, self.ranks = folder, tool, way, ranks
        self.losses = train(folder, tool, way, ranks)
        path, self.run, self.id = MADE[tool, way, ranks]
        self.path = os.path.join(folder, path)
        self.order = os.path.join(folder, 'order')
        with open(self.order, 'w', encoding='utf-8') as f:
            for name, _ in model().named_parameters():
                f.write(f'{name}\n')

    def adopt(self, ckptfs, *more):
        """The step's directory in a mount of what the job wrote."""
        done = ckptfs.adopt(self.path, extra=more)
        assert f'{self.run}/{self.id}' in done.stdout.split(), done.stdout
        return os.path.join(ckptfs.mount(), 'run', self.run, 'step', self.id)

    def resumed(self, path, way=None, ranks=None, **more):
        """The losses of a training that goes on from a path."""
        return train(self.folder, self.tool, way or self.way, ranks or self.ranks, path, **more)

    def expected(self):
        """Of a training that goes on.  Lightning's DeepSpeedStrategy does not go on as one that
        never stopped even from its own directory: then as from that."""
        if self.tool != 'lightning' or self.way == 'plain':
            return self.losses[MIDDLE:]
        return self.resumed(f'{self.path}/checkpoints/{self.id}', TOOL_NATIVE='1')


@pytest.fixture(scope='module', params=MADE, ids=lambda one: '-'.join(map(str, one)))
def job(request, tmp_path_factory):
    """Each tool's job, made once."""
    return Job(str(tmp_path_factory.mktemp('job')), *request.param)


def shown(step):
    """{parameter: {kind: tensor}} of a step's rank files."""
    folder = f'{step}/view/tp1/rank0'
    out = {k: {'weight': t} for k, t in load_file(f'{folder}/model.safetensors').items()}
    for key, tensor in load_file(f'{folder}/optimizer.safetensors').items():
        kind, name = key.split('/', 1)
        out[name][kind] = tensor
    return out


def info(ckptfs, path, *words):
    return json.loads(ckptfs.run('info', path, '--json', *words).stdout)


def test_a_step_is_found_and_is_what_the_job_had(ckptfs, job):
    if job.way != 'plain':
        said = info(ckptfs, job.path)
        assert said['kinds']['exp_avg']['atoms'] == said['parameters']['trainable']['number']
        assert said['iteration'] >= MIDDLE
        assert job.adopt(ckptfs)
        return
    plain = info(ckptfs, job.path)
    words = ()
    if job.tool != 'lightning':  # whose file has the model's order, and the states fit in one way
        assert 'exp_avg' not in plain['kinds']
        assert any('--parameter-order' in n and 'weights only' in n for n in plain['notes'])
        words = '--parameter-order', job.order
    step = shown(job.adopt(ckptfs, *words))
    truth = torch.load(f'{job.folder}/truth.pt')
    assert set(step) == set(truth)
    for name, states in truth.items():
        for kind, tensor in states.items():
            assert torch.equal(step[name][kind], tensor), (name, kind)
        assert torch.equal(step[name]['master'], states['weight']), name


def test_source_is_the_directory_as_it_is(ckptfs, job):
    step = job.adopt(ckptfs)
    made = subprocess.run(['find', job.path, '-name', job.id], capture_output=True, text=True,
                          check=True).stdout.strip()
    assert subprocess.run(['diff', '-r', made, f'{step}/source/{job.id}'], capture_output=True,
                          check=False).stdout == b''


def test_stock_scripts_run_in_source(ckptfs, tmp_path):
    """Of two steps, each with the pointer to itself though the job's names the last."""
    source = tmp_path / 'run'
    subprocess.run(['cp', '-r', checkpoint('zero2'), source], check=True)
    tag, = [p for p in os.listdir(source) if p.startswith('global_step')]
    subprocess.run(['cp', '-r', source / tag, source / 'global_step9'], check=True)
    script = importlib.util.find_spec('deepspeed.utils.zero_to_fp32').origin
    shutil.copy(script, source)  # as the engine does
    ckptfs.adopt(source, extra=('--replicated', r'.*\.tally\..*'))
    mount = ckptfs.mount()
    (source / 'latest').write_text('elsewhere')  # the job goes on
    (source / 'zero_to_fp32.py').write_text('')
    for name in tag, 'global_step9':
        folder = f'{mount}/run/run/step/{name}/source'
        assert 'zero_to_fp32.py' in os.listdir(folder)
        with open(f'{folder}/latest', encoding='utf-8') as f:
            assert f.read() == name
        subprocess.run([sys.executable, 'zero_to_fp32.py', '.', tmp_path / name], cwd=folder,
                       check=True, capture_output=True)
        assert os.listdir(tmp_path / name)
    assert {s['state'] for s in ckptfs.list()['steps']} == {'sound'}


def test_a_save_that_trainer_did_not_end_is_skipped(ckptfs, job):
    if job.tool != 'trainer' or job.way != 'plain':
        pytest.skip('of a plain Trainer')
    last = f'{job.path}/checkpoint-{UPDATES}'
    os.rename(f'{last}/trainer_state.json', f'{job.folder}/away')
    try:
        done = ckptfs.adopt(job.path)
        assert done.stdout.split() == [f'output/checkpoint-{MIDDLE}']
        assert 'no trainer_state.json, which Trainer writes last' in done.stderr
    finally:
        os.rename(f'{job.folder}/away', f'{last}/trainer_state.json')


def test_a_training_goes_on_as_one_that_never_stopped(ckptfs, job):
    """At the same degrees with the same losses, to the last bit."""
    step = job.adopt(ckptfs)
    layout = 'tp1' if job.way == 'plain' else f'dp{job.ranks}_{job.way}' if job.ranks > 1 else job.way
    path = f'{step}/view/{layout}/{job.tool}'
    if job.tool == 'lightning' and job.way == 'plain':
        path = f'{path}/{job.id}'
    assert job.resumed(path) == job.expected()


def test_a_training_goes_on_at_other_degrees(ckptfs, job):
    """Two ranks at ZeRO 2 as one at ZeRO 1, whose sums are rounded otherwise."""
    if job.ranks == 1:
        pytest.skip('one job will do')
    step = job.adopt(ckptfs)
    losses = job.resumed(f'{step}/view/zero1/trainer', 'zero1', 1)
    assert losses == pytest.approx(job.losses[MIDDLE:], abs=0.01)


def test_a_plain_training_goes_on_with_deepspeed(ckptfs, job):
    """Where its optimizer's states have names; sums are rounded otherwise after the first."""
    if job.tool != 'trainer' or job.way != 'plain':
        pytest.skip('of a plain Trainer')
    unnamed = job.adopt(ckptfs)
    assert not os.path.exists(f'{unnamed}/view/zero1/trainer/latest_universal')
    ckptfs.adopt(job.path, 'named', extra=('--parameter-order', job.order))
    step = os.path.join(ckptfs.mount(), 'run', 'named', 'step', job.id)
    losses = job.resumed(f'{step}/view/zero1/trainer', 'zero1')
    assert losses[0] == job.losses[MIDDLE]
    assert losses == pytest.approx(job.losses[MIDDLE:], abs=0.01)


def test_views_of_a_tool_are_its_own(ckptfs, job):
    step = job.adopt(ckptfs)
    for tool in 'trainer', 'accelerate', 'lightning':
        assert os.path.exists(f'{step}/view/tp1/{tool}') == (tool == job.tool)
    with open(f'{step}/view/tp1/info.json', encoding='utf-8') as f:
        assert 'not saved by' in f.read()
    if job.way == 'plain':  # whole tensors, for data parallelism alone
        assert not os.path.exists(f'{step}/view/tp2/{job.tool}')
