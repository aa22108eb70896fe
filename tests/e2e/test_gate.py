# SPDX-License-Identifier: Apache-2.0
"""The one thing this project is for, on a real checkpoint.

A ZeRO-2 checkpoint of four ranks is adopted and mounted; an unmodified engine
of two ranks at ZeRO-1 loads it from the mount and goes on training.
"""
import os
from dataclasses import replace

import load_deepspeed
from daemon import checkpoint, truth_of


def test_zero2_dp4_goes_on_as_zero1_dp2(ckptfs):
    mount = ckptfs.mount(adopt=[checkpoint('zero2')])
    view = os.path.join(mount, 'view', 'dp2_zero1', 'deepspeed')
    truth = truth_of('zero2')
    source = load_deepspeed.recorded(truth)[1]
    target = replace(source, stage=1, dp=2, universal=True)
    code, report = load_deepspeed.load(view, truth, target)
    assert code == 0, report
    assert report['tensors_equal'] == 96
    assert report['global_steps'] == 5
    # Two ranks add gradients in another order than four: noise, no more.
    assert report['loss_diff'] < 0.01


def test_same_degrees_give_the_same_losses(ckptfs):
    mount = ckptfs.mount(adopt=[checkpoint('zero2')])
    view = os.path.join(mount, 'view', 'dp4_zero2', 'deepspeed')
    truth = truth_of('zero2')
    target = replace(load_deepspeed.recorded(truth)[1], universal=True)
    code, report = load_deepspeed.load(view, truth, target)
    assert code == 0, report
    assert report['loss_diff'] == 0
