# SPDX-License-Identifier: Apache-2.0
"""Stored weights prove their masters, and the other way round."""
import json
import os
import shutil

import pytest
import torch

import hostile
from hostile import MODEL, TAG, inside, zero_file
from variants import VARIANTS

DATA_LOSS = 9


@pytest.fixture
def good(tmp_path):
    """A copy of a good checkpoint."""
    return hostile.copy_of_golden(str(tmp_path))


def exchange_files(save_dir):
    """Two data-parallel ranks' optimizer files under each other's names."""
    one, other = inside(save_dir, zero_file(1)), inside(save_dir, zero_file(3))
    os.rename(one, one + '.old')
    os.rename(other, one)
    os.rename(one + '.old', other)


def double_file(save_dir):
    """One rank's optimizer file under another one's name, too."""
    shutil.copy(inside(save_dir, zero_file(2)),
                inside(save_dir, zero_file(0)))


def exchange_names(save_dir):
    """Two names of equal shape in param_shapes."""
    path = inside(save_dir, MODEL)
    state = torch.load(path, weights_only=False)
    group = state['param_shapes'][0]
    by_shape = {}
    for name, shape in group.items():
        if len(shape) > 1:
            by_shape.setdefault(shape, []).append(name)
    one, other = next(n for n in by_shape.values() if len(n) > 1)[:2]
    swap = {one: other, other: one}
    state['param_shapes'][0] = type(group)(
        (swap.get(name, name), shape) for name, shape in group.items())
    torch.save(state, path)


@pytest.mark.parametrize('damage',
                         [exchange_files, double_file, exchange_names])
@pytest.mark.parametrize('how', [(), ('--copy',)])
def test_refused_with_parameter_element_and_files(ckptfs, good, damage, how):
    damage(good)
    done = ckptfs.run('adopt', good, '--store', ckptfs.store, *how,
                      check=False)
    assert done.returncode == DATA_LOSS
    assert "parameter '" in done.stderr and 'element ' in done.stderr
    assert inside(good, MODEL) in done.stderr
    assert f'{good}/{TAG}/bf16_zero_pp_rank_' in done.stderr
    assert '--check never' in done.stderr
    blobs = os.path.join(ckptfs.store, 'blobs')
    assert not os.path.exists(blobs) or not os.listdir(blobs)
    assert not os.path.exists(ckptfs.store)
    verified = ckptfs.run('verify', good, check=False)
    assert verified.returncode == DATA_LOSS
    assert 'but its master, cast to bf16, is ' in verified.stdout


def test_taken_if_asked_for(ckptfs, good):
    exchange_files(good)
    ckptfs.run('adopt', good, '--store', ckptfs.store, '--check', 'never')
    step = ckptfs.run('list', '--store', ckptfs.store).stdout.splitlines()[1].split()[0]
    done = ckptfs.run('verify', step, '--store', ckptfs.store, check=False)
    assert done.returncode == DATA_LOSS


FP32 = ('moe_stage0',)


@pytest.mark.parametrize('variant', VARIANTS)
def test_no_good_checkpoint_is_called_damaged(ckptfs, variant):
    """Weights that DeepSpeed saves equal their masters, and are compared where both exist."""
    ckptfs.adopt_variant(variant)
    done = ckptfs.run('verify', f'{variant}/latest', '--store', ckptfs.store,
                      '--json')
    report = json.loads(done.stdout)
    assert report['defect_count'] == 0 and report['weights_skipped'] == 0
    # ZeRO 3 stores no weights, stage 0 in fp32 no masters.
    both = VARIANTS[variant].stage != 3 and variant not in FP32
    assert (report['weights_compared'] > 0) == both
