# SPDX-License-Identifier: Apache-2.0
"""Callbacks of training frameworks: what they save is what the live job had, and a training
that goes on from it has the losses of one that never stopped."""
import json
import os
import sys

import callback_trainer
import pytest
import torch
from callback_trainer import EVERY, UPDATES
from daemon import run_ranks, step_of, wait_until
from gathered import assert_equal, gathered
from ports import held_port
from zygote import Zygote

HERE = os.path.dirname(os.path.abspath(__file__))


@pytest.fixture(scope='module')
def zygote():
    """Has imported what the trainings need."""
    one = Zygote(['callback_trainer', 'transformers.trainer', 'transformers.models.llama.modeling_llama',
                  'lightning.pytorch'])
    yield one
    one.close()


def receiving(ckptfs):
    """Mounts, and waits until it receives."""
    _, mount = ckptfs.start()
    wait_until(lambda: 'snapshots' in ckptfs.run('status', '--store', ckptfs.store,
                                                 '--json').stdout, 'the receiver')
    return mount


def check_steps(mount, folder, framework):
    """Every step is what the job had, bit for bit."""
    steps = range(EVERY, UPDATES + 1, EVERY)
    listed = os.path.join(mount, 'run', framework, 'step')
    wait_until(lambda: set(os.listdir(listed)) >= set(map(str, steps)), 'the steps')
    for step in steps:
        truth = torch.load(os.path.join(folder, f'truth-{step}.pt'))
        view = os.path.join(step_of(mount, framework, str(step)), 'view', 'tp1')
        assert_equal(gathered(view, 1), truth)


@pytest.mark.parametrize('framework', ['transformers', 'lightning'])
def test_one_process(ckptfs, tmp_path, framework):
    mount = receiving(ckptfs)
    whole, middle = getattr(callback_trainer, framework)(str(tmp_path), ckptfs.store)
    assert whole[-len(middle):] == middle and middle, (whole, middle)
    check_steps(mount, tmp_path, framework)


@pytest.mark.parametrize('framework', ['transformers', 'lightning'])
@pytest.mark.parametrize('way', ['ddp', 'fsdp2'])
def test_several_ranks(ckptfs, tmp_path, zygote, framework, way):
    mount = receiving(ckptfs)
    with held_port() as port:
        run_ranks([[sys.executable, os.path.join(HERE, 'callback_trainer.py'), framework,
                    str(tmp_path), ckptfs.store, rank, '2', way] for rank in '01'],
                  tmp_path / 'log', 240, zygote.start, env={**os.environ, 'CALLBACK_PORT': str(port)})
    whole, middle = json.loads((tmp_path / 'losses.json').read_text(encoding='utf-8'))
    assert whole[-len(middle):] == middle and middle, (whole, middle)
    check_steps(mount, tmp_path, framework)
