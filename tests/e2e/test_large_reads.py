# SPDX-License-Identifier: Apache-2.0
"""Large files in every serving mode: torch.load, and reads at odd offsets.

The checkpoint is a ZeRO-3 one of 3 ranks whose files torch.save writes from
random arrays, so the truth of every universal file is known without us: tens
of megabytes, where READs are large enough to be answered with pages of the
source files themselves.
"""
import errno
import os
import random
import struct
import sys
import threading
import zipfile

import numpy as np
import pytest
import torch

from daemon import step_of

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                '..', 'bench'))
import synthetic  # noqa: E402

RANKS = 3
KINDS = {'fp32': 0, 'exp_avg': 1, 'exp_avg_sq': 2}
VIEW = os.path.join('view', 'dp2_zero1', 'deepspeed')


def slices(full):
    """Returns what each rank holds of one parameter, padded as ZeRO 3 does."""
    flat = full.reshape(-1)
    each = -(-flat.size // RANKS)
    return np.pad(flat, (0, each * RANKS - flat.size)).reshape(RANKS, each)


def make(out, monkeypatch):
    """Save the checkpoint; returns {(parameter, kind): array}."""
    monkeypatch.setattr(synthetic, 'HIDDEN', 509)
    monkeypatch.setattr(synthetic, 'FFN', 3001)
    monkeypatch.setattr(synthetic, 'VOCAB', 1009)
    names = synthetic.shapes(1)
    rng = np.random.default_rng(7)
    truth = {(name, kind): rng.standard_normal(shape, dtype=np.float32)
             for name, shape in names.items() for kind in KINDS}
    folder = os.path.join(out, synthetic.TAG)
    os.makedirs(folder)
    model = synthetic.model_states(names, RANKS)
    for rank in range(RANKS):
        flat = {kind: torch.from_numpy(np.concatenate(
            [slices(truth[n, kind])[rank] for n in names])) for kind in KINDS}
        states = synthetic.optimizer_states(
            RANKS, flat['fp32'], flat['exp_avg'], flat['exp_avg_sq'])
        mine = os.path.join(folder, f'zero_pp_rank_{rank}_mp_rank_00_')
        torch.save(model, mine + 'model_states.pt')
        torch.save(states, os.path.join(
            folder, f'bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt'))
    with open(os.path.join(out, 'latest'), 'w') as f:
        f.write(synthetic.TAG)
    return truth


def mounted(ckptfs, tmp_path, monkeypatch, options):
    """(universal directory's zero/, truth, checkpoint) of a new mount."""
    source = str(tmp_path / 'source')
    truth = make(source, monkeypatch)
    ckptfs.adopt(source, 'large')
    step = step_of(ckptfs.mount(*options), 'large')
    return os.path.join(step, VIEW, synthetic.TAG, 'zero'), truth, source


MODES = [(), ('--mode', 'stream'), ('--mode', 'materialise')]


@pytest.mark.parametrize('options', MODES)
def test_torch_load_gives_the_truth(ckptfs, tmp_path, monkeypatch, options):
    zero, truth, _ = mounted(ckptfs, tmp_path, monkeypatch, options)
    for (name, kind), want in truth.items():
        path = os.path.join(zero, name, kind + '.pt')
        for mapped in (False, True):
            got = torch.load(path, weights_only=False, mmap=mapped)['param']
            assert np.array_equal(got.numpy().reshape(want.shape), want), path


def read_some(path, want, rng, errors):
    """Ranges of one file, mostly larger than a request."""
    handle = os.open(path, os.O_RDONLY)
    for _ in range(30):
        offset = rng.randrange(len(want))
        length = rng.choice((1, 5000, 65536, 70_001, 1 << 20, 3_333_333))
        if os.pread(handle, length, offset) != want[offset:offset + length]:
            errors.append((path, offset, length))
    os.close(handle)


@pytest.mark.parametrize('options', MODES)
def test_any_range_is_that_of_the_whole(ckptfs, tmp_path, monkeypatch,
                                        options):
    zero, truth, _ = mounted(ckptfs, tmp_path, monkeypatch, options)
    errors, threads = [], []
    for number, ((name, kind), array) in enumerate(truth.items()):
        if array.size < 1 << 18:
            continue
        path = os.path.join(zero, name, kind + '.pt')
        with open(path, 'rb') as f:
            whole = f.read()
        assert array.tobytes() in whole, path
        threads.append(threading.Thread(target=read_some, args=(
            path, whole, random.Random(number), errors)))
    assert len(threads) > 8
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[:5]


def payload_offset(path):
    """Where the bytes of a .pt file's only tensor begin."""
    with zipfile.ZipFile(path) as archive:
        entry = next(e for e in archive.infolist()
                     if e.filename.endswith('/data/0'))
    with open(path, 'rb') as f:
        f.seek(entry.header_offset + 26)  # lengths of the name and extra
        name, extra = struct.unpack('<HH', f.read(4))
    return entry.header_offset + 30 + name + extra


@pytest.mark.parametrize('kept', [0.4, 0.99])
def test_a_source_cut_short_is_an_error_and_never_zeros(
        ckptfs, tmp_path, monkeypatch, kept):
    """The file is open, and was checked, before its source shrinks."""
    zero, truth, source = mounted(ckptfs, tmp_path, monkeypatch,
                                  ('--mode', 'stream'))
    name, kind = 'lm_head.weight', 'exp_avg_sq'
    path = os.path.join(zero, name, kind + '.pt')
    last = os.path.join(source, synthetic.TAG,
                        f'bf16_zero_pp_rank_{RANKS - 1}_mp_rank_00_'
                        'optim_states.pt')
    want = truth[name, kind].tobytes()
    start = payload_offset(path)
    handle = os.open(path, os.O_RDONLY)
    os.truncate(last, int(os.path.getsize(last) * kept))
    right = failed = 0
    for offset in range(0, len(want), 200_000):
        part = want[offset:offset + 200_000]
        try:
            assert os.pread(handle, len(part), start + offset) == part, offset
            right += 1
        except OSError as error:
            assert error.errno in (errno.EIO, errno.ESTALE), error
            failed += 1
    os.close(handle)
    assert failed and (right or kept < 0.5)
