# SPDX-License-Identifier: Apache-2.0
"""A libtorch job's snapshots against what libtorch itself saved of it."""
import os
import pickle
import subprocess

import pytest
import torch
from daemon import BIN, step_of
from safetensors.torch import load_file

EXAMPLE = os.path.join(os.path.dirname(BIN), 'torch_example')
STEPS = 4


def truth(folder):
    """Every tensor that module and optimizer hold, by the names of a view."""
    found = dict(torch.jit.load(os.path.join(folder, 'module.pt')).state_dict())
    trainable = [n for n in found if n.split('.')[-1] in ('weight', 'bias')]
    saved = torch.jit.load(os.path.join(folder, 'optimizer.pt'))
    group = getattr(saved.param_groups, 'param_groups/0')
    for i, name in enumerate(trainable):
        state = getattr(saved.state, getattr(group, f'params/{i}'))
        found[f'step/{name}'] = torch.tensor(state.step)
        for kind in ('exp_avg', 'exp_avg_sq'):
            found[f'{kind}/{name}'] = getattr(state, kind)
    return found


@pytest.mark.parametrize('world', [1, 2])
def test_a_libtorch_job_is_saved_as_it_is(ckptfs, tmp_path, world):
    _, mount = ckptfs.start()
    ranks = []
    for rank in range(world):
        (tmp_path / str(rank)).mkdir()
        words = [EXAMPLE, ckptfs.store, str(STEPS), str(tmp_path / str(rank))]
        words += [str(rank), str(world), 'job'] if world > 1 else []
        ranks.append(subprocess.Popen(words))
    assert [rank.wait(120) for rank in ranks] == [0] * world
    run = step_of(mount, 'example', str(STEPS - 1))
    assert sorted(os.listdir(os.path.dirname(run))) == [str(n) for n in range(STEPS)]
    expected = truth(tmp_path / '0')
    assert len(expected) == 27
    for rank in range(world):  # all hold the same
        view = os.path.join(run, 'view', f'dp{world}', f'rank{rank}')
        shown = {**load_file(os.path.join(view, 'model.safetensors')),
                 **load_file(os.path.join(view, 'optimizer.safetensors'))}
        assert shown.keys() == expected.keys()
        for name, value in expected.items():
            assert shown[name].dtype == value.dtype, name
            assert torch.equal(shown[name], value), name
    blobs = sorted(os.path.join(folder, name)
                   for folder, _, names in os.walk(os.path.join(ckptfs.store, 'blobs', 'snapshots'))
                   for name in names if name.endswith('.safetensors'))
    assert len(blobs) == STEPS * world
    sizes = [os.path.getsize(blob) for blob in blobs]
    assert max(sizes) < 1.1 * min(sizes), 'ranks write even parts'
    group = load_file(blobs[0])['ckptfs.group/0']
    assert pickle.loads(bytes(group.tolist())) == {
        'lr': 1e-2, 'betas': (0.8, 0.95), 'eps': 1e-8, 'weight_decay': 1e-2, 'amsgrad': False}
