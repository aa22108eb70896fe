# SPDX-License-Identifier: Apache-2.0
"""Bytes that changed without a trace: `verify` finds them by their checksums."""
import glob
import json
import os
import pathlib
import shutil

import pytest
import torch

import hostile
from daemon import checkpoint
from hostile import MODEL, TAG, inside, zero_file

DATA_LOSS = 9
CHUNK = 256 << 10


@pytest.fixture
def good(tmp_path):
    """A copy of a good checkpoint."""
    return hostile.copy_of_golden(str(tmp_path))


def verify(ckptfs, subject, code=0):
    """Returns what `ckptfs verify` prints, which must be one line per fact."""
    done = ckptfs.run('verify', subject, '--store', ckptfs.store, check=False)
    assert done.returncode == code, done
    return done.stdout.splitlines()


def damage(path):
    """Flip a bit in the middle of the largest record."""
    begin, end = hostile.extent(path, hostile.largest(path))
    hostile.flip(path, (begin + end) // 2, 3)


def test_nothing_is_wrong(ckptfs, good):
    ckptfs.adopt(good, 'run')
    lines = verify(ckptfs, f'run/{TAG}')
    assert len(lines) == 1 and lines[0].endswith(': 0 defects')
    report = json.loads(ckptfs.run('verify', good, '--json').stdout)
    assert report['unsummed_blobs'] == 0
    assert report['summed_bytes'] > 0.5 * report['blob_bytes']


def test_damaged_before_it_was_adopted(ckptfs, good):
    path = inside(good, zero_file(2))
    damage(path)
    ckptfs.adopt(good, 'run')
    lines = verify(ckptfs, f'run/{TAG}', DATA_LOSS)
    assert len(lines) == 2 and lines[1].endswith(': 1 defect')
    assert lines[0].startswith(f'{path}: record ')
    assert f"{hostile.largest(path)}' is damaged" in lines[0]


@pytest.mark.parametrize('how', ['--link', '--copy'])
def test_damaged_in_the_store(ckptfs, good, how):
    """With its old mtime: neither is known by its ctime, a copy by none."""
    ckptfs.adopt(good, 'run', extra=(how, '--pack', 'never'))
    path, = glob.glob(f'{ckptfs.store}/blobs/*/{TAG}/{zero_file(1)}')
    info = os.stat(path)
    os.chmod(path, 0o600)
    damage(path)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    lines = verify(ckptfs, f'run/{TAG}', DATA_LOSS)
    assert len(lines) == 2
    assert lines[0].startswith(f'{path}: record ')


@pytest.mark.parametrize('how', ['--link', '--copy'])
def test_digests_beside_the_files_of_the_store(ckptfs, tmp_path, how):
    """The digests of a file's chunks lie beside it; the file is proved without them."""
    source = shutil.copytree(checkpoint('zero1_bf16'), f'{tmp_path}/run')
    ckptfs.adopt(source, 'run', extra=(how, '--pack', 'never'))
    lists = glob.glob(f'{ckptfs.store}/blobs/*/*.digests')
    large = [path for path in glob.glob(f'{ckptfs.store}/blobs/*/global_step5/*')
             if os.path.getsize(path) > 2 * CHUNK]
    assert lists and len(lists) == len(large)
    assert {os.path.getsize(path) for path in lists} == {
        16 * -(-os.path.getsize(path) // CHUNK) for path in large}
    assert len(verify(ckptfs, 'run/global_step5')) == 1

    good = pathlib.Path(lists[0]).read_bytes()
    for damaged in (None, good[:-1], good[16:] + good[:16]):
        if damaged is None:
            os.unlink(lists[0])
        else:
            pathlib.Path(lists[0]).write_bytes(damaged)
        lines = verify(ckptfs, 'run/global_step5', DATA_LOSS)
        assert len(lines) == 2 and lines[0].startswith(f'{lists[0]}: the digests of ')
        assert ('missing' if damaged is None else 'damaged') in lines[0]
        assert lines[0].endswith('; all bytes of that file are what was stored')
    ckptfs.adopt(source, 'run', extra=(how, '--pack', 'never'))
    assert pathlib.Path(lists[0]).read_bytes() == good
    assert len(verify(ckptfs, 'run/global_step5')) == 1


def without_sums(path):
    """Write a torch file again as torch does with checksums switched off."""
    content = torch.load(path, weights_only=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content, path)
    finally:
        torch.serialization.set_crc32_options(True)


def test_written_without_checksums(ckptfs, good):
    """Not damage; said once for all of them."""
    for rank in range(4):
        without_sums(inside(good, zero_file(rank)))
    ckptfs.adopt(good, 'run')
    lines = verify(ckptfs, f'run/{TAG}')
    assert lines[0] == ('note: 4 files written without checksums, '
                        f'such as {inside(good, zero_file(0))}')
    assert len(lines) == 2
    damage(inside(good, MODEL))
    lines = verify(ckptfs, good, DATA_LOSS)
    assert lines[0].startswith(inside(good, MODEL))


def test_a_legacy_file_has_nothing_to_compare(ckptfs, good):
    path = inside(good, zero_file(0))
    torch.save(torch.load(path, weights_only=False), path,
               _use_new_zipfile_serialization=False)
    assert len(verify(ckptfs, good)) == 1


def test_one_line_per_changed_file(ckptfs, good):
    ckptfs.adopt(good, 'run')
    for rank in range(4):
        with open(inside(good, zero_file(rank)), 'ab') as f:
            f.write(b'more')
    os.unlink(inside(good, MODEL))
    lines = verify(ckptfs, f'run/{TAG}', DATA_LOSS)
    assert len(lines) == 6 and lines[-1].endswith(': 5 defects')
    for rank in range(4):
        path = inside(good, zero_file(rank))
        assert sum(line.startswith(f'{path}: changed since it was adopted: ')
                   for line in lines) == 1
    assert sum(line.startswith(f'{inside(good, MODEL)}: ') for line in lines) == 1


def test_an_enum_as_python_3_11_0_stored_it(ckptfs, good, monkeypatch):
    """getattr(ZeroStageEnum, 'gradients') instead of ZeroStageEnum(2)."""
    from deepspeed.runtime.zero.config import ZeroStageEnum
    monkeypatch.setattr(ZeroStageEnum, '__reduce_ex__', lambda self, _: (
        getattr, (type(self), self.name)))
    for rank in range(4):
        path = inside(good, zero_file(rank))
        torch.save(torch.load(path, weights_only=False), path)
        report = json.loads(ckptfs.run('info', good, '--json').stdout)
        assert 'zero2' in report['layout']
