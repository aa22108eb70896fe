# SPDX-License-Identifier: Apache-2.0
"""Small pieces packed at adopt: the same bytes, fewer places, nothing left.

32 ZeRO-3 ranks, written by torch, with values that numpy knows.
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from daemon import BIN, wait_until

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'bench'))

import synthetic  # noqa: E402

RANKS = 32
SMALL = {'layers.0.norm.weight': (256,), 'layers.0.attn.bias': (70,),
         'layers.1.norm.weight': (256,)}
LARGE = {'embed.weight': (65, 1024)}


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    """(save directory, {kind: {parameter: tensor}}) of 32 ranks."""
    out = tmp_path_factory.mktemp('pieces') / 'ckpt'
    rng = torch.Generator().manual_seed(5)
    states = {kind: {name: torch.randn(shape, generator=rng)
                     for name, shape in {**LARGE, **SMALL}.items()}
              for kind in ('master', 'exp_avg', 'exp_avg_sq')}
    synthetic.make_filled(out, states, RANKS)
    return out, states


def side_files(ckptfs):
    """The side blobs of the store."""
    folder = os.path.join(ckptfs.store, 'blobs', 'side')
    if not os.path.isdir(folder):
        return []
    return [os.path.join(folder, n) for n in sorted(os.listdir(folder))]


def both(ckptfs, source):
    """Adopt packed and not; returns a mount of both."""
    ckptfs.adopt(source, 'packed')
    ckptfs.run('adopt', source, '--name', 'plain', '--pack', 'never',
               '--store', ckptfs.store)
    return ckptfs.mount()


def tree(top):
    """{relative path: bytes} of all files below."""
    found = {}
    for base, _, names in os.walk(top):
        for name in names:
            path = os.path.join(base, name)
            with open(path, 'rb') as f:
                found[os.path.relpath(path, top)] = f.read()
    return found


def test_the_side_blob_is_a_safetensors_file(ckptfs, checkpoint):
    source, states = checkpoint
    ckptfs.adopt(source, 'packed')
    path, = side_files(ckptfs)
    wanted = {f'{kind}/{name}' for kind in states for name in SMALL}
    with safe_open(path, 'numpy') as f:
        assert set(f.keys()) == wanted
        for key in wanted:
            kind, name = key.split('/')
            assert np.array_equal(f.get_tensor(key), states[kind][name].numpy())
    info = json.loads(ckptfs.run('info', 'packed/latest', '--json', '--store',
                                 ckptfs.store).stdout)
    assert info['side_blob'] == {'file': path, 'tensors': len(wanted),
                                 'bytes': os.path.getsize(path)}


def test_packed_and_plain_read_the_same(ckptfs, checkpoint):
    source, states = checkpoint
    mount = both(ckptfs, source)
    packed, plain = (f'{mount}/run/{run}/step/{synthetic.TAG}'
                     for run in ('packed', 'plain'))
    for kind, tensors in states.items():
        for name, tensor in tensors.items():
            for step in (packed, plain):
                got, = load_file(f'{step}/param/{name}/{kind}.safetensors').values()
                assert np.array_equal(got, tensor.numpy()), (name, kind)
    assert sorted(os.listdir(f'{packed}/source')) == sorted(
        os.listdir(f'{plain}/source'))
    for layout in ('dp2_zero1', 'dp3_zero3', 'tp1_bf16'):
        ours = tree(f'{packed}/view/{layout}')
        assert len(ours) > 3 and ours.keys() == tree(f'{plain}/view/{layout}').keys()
        other = tree(f'{plain}/view/{layout}')
        for name, data in ours.items():
            if not name.endswith('info.json'):  # names its run
                assert data == other[name], (layout, name)
    ckptfs.umount(mount)
    for run in ('packed', 'plain'):
        done = ckptfs.run('verify', f'{run}/latest', '--finite', '--json',
                          '--store', ckptfs.store)
        assert json.loads(done.stdout)['defect_count'] == 0


def test_explain_shows_the_side_blob_and_its_pieces(ckptfs, checkpoint):
    source, _ = checkpoint
    ckptfs.adopt(source, 'packed')
    said = json.loads(ckptfs.run(
        'explain', 'dp1', 'rank0/optimizer.safetensors', '--limit', '10000',
        '--json', '--store', ckptfs.store).stdout)
    packed = [o for o in said['origins'] if 'packed_from' in o]
    assert {o['file'] for o in packed} == set(side_files(ckptfs))
    for origin in packed:
        assert sum(p['length'] for p in origin['packed_from']) == origin['length']
        for piece in origin['packed_from']:
            with open(piece['file'], 'rb') as f:
                f.seek(piece['offset'])
                data = f.read(piece['length'])
            assert len(data) == piece['length']
    data = b''
    for piece in packed[0]['packed_from']:
        with open(piece['file'], 'rb') as f:
            f.seek(piece['offset'])
            data += f.read(piece['length'])
    with open(packed[0]['file'], 'rb') as f:
        f.seek(packed[0]['offset'])
        assert f.read(packed[0]['length']) == data
    text = ckptfs.run('explain', 'dp1', 'rank0/optimizer.safetensors',
                      '--limit', '10000', '--store', ckptfs.store).stdout
    assert 'packed from 32 pieces, first ' in text


@pytest.mark.parametrize('how', ['--link', '--copy'])
def test_owned_steps_are_packed_too(ckptfs, checkpoint, how, tmp_path):
    source, states = checkpoint
    mine = shutil.copytree(source, tmp_path / 'mine')
    for _ in range(2):
        ckptfs.run('adopt', mine, how, '--name', 'run', '--store', ckptfs.store)
    assert len(side_files(ckptfs)) == 1
    assert len(ckptfs.list()['steps']) == 1
    shutil.rmtree(mine)
    mount = ckptfs.mount()
    name = 'layers.0.norm.weight'
    got, = load_file(f'{mount}/run/run/step/{synthetic.TAG}/param/{name}/'
                     'exp_avg.safetensors').values()
    assert np.array_equal(got, states['exp_avg'][name].numpy())


def test_the_side_blob_goes_with_the_step_but_not_from_under_a_reader(
        ckptfs, checkpoint):
    source, states = checkpoint
    ckptfs.adopt(source, 'packed')
    mount = ckptfs.mount()
    name = 'layers.0.norm.weight'
    path = (f'{mount}/run/packed/step/{synthetic.TAG}/param/{name}/'
            'master.safetensors')
    with open(path, 'rb') as held:
        ckptfs.run('remove', '--force', f'packed/{synthetic.TAG}', '--store', ckptfs.store)
        wait_until(lambda: 'packed' not in os.listdir(f'{mount}/run'),
                   'the removal')
        assert states['master'][name].numpy().tobytes() in held.read()
    ckptfs.umount(mount)
    ckptfs.adopt(source, 'again')
    assert len(side_files(ckptfs)) == 1
    ckptfs.run('remove', f'again/{synthetic.TAG}', '--store', ckptfs.store)
    assert side_files(ckptfs) == []


def test_a_killed_adopt_leaves_a_whole_step_or_none(ckptfs, checkpoint):
    source, states = checkpoint
    words = [BIN, 'adopt', source, '--name', 'run', '--store', ckptfs.store]
    start = time.monotonic()
    ckptfs.adopt(source, 'other')
    whole = time.monotonic() - start
    for part in range(1, 13):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        time.sleep(whole * part / 12)
        process.send_signal(signal.SIGKILL)
        process.wait()
        steps = [s['step'] for s in ckptfs.list()['steps']]
        if f'run/{synthetic.TAG}' in steps:
            done = ckptfs.run('verify', 'run/latest', '--json', '--store',
                              ckptfs.store)
            assert json.loads(done.stdout)['defect_count'] == 0
            ckptfs.run('remove', f'run/{synthetic.TAG}', '--store', ckptfs.store)
    ckptfs.run('remove', f'other/{synthetic.TAG}', '--store', ckptfs.store)
    assert side_files(ckptfs) == []
    ckptfs.adopt(source, 'run')
    assert len(side_files(ckptfs)) == 1
