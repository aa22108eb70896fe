# SPDX-License-Identifier: Apache-2.0
"""Hostile and broken checkpoints: a clear refusal, and nothing left behind.

Every checkpoint here must be refused with an exit code that is neither
success nor a signal, with a message that names the file, and without a step, a
hang or a crash.  docs/reference/untrusted-input.md lists the rules.
"""
import json
import os
import random
import shutil

import pytest

import hostile
from daemon import checkpoint
from hostile import MODEL, TAG, inside, zero_file

SECONDS = 60


def refusal(ckptfs, path, *words, sound=0):
    """Adopt and inspect `path`: both must refuse and say each of `words`.

    `sound` steps of it are adopted all the same.
    """
    for command in (['adopt', path, '--store', ckptfs.store, '--name', 'bad'],
                    ['info', path]):
        done = ckptfs.run(*command, check=False, timeout=SECONDS)
        assert 0 < done.returncode < 126, (command, done)
        assert 'Sanitizer' not in done.stderr, done.stderr
        for word in words:
            assert word.lower() in done.stderr.lower(), (word, done.stderr)
        assert len(done.stderr) < 20000
    assert steps(ckptfs) == sound
    return done.stderr


def steps(ckptfs):
    """Number of steps that the store lists."""
    if not os.path.isdir(ckptfs.store):
        return 0
    return len(ckptfs.list()['steps'])


@pytest.fixture
def bad(tmp_path):
    """A copy of a good checkpoint."""
    return hostile.copy_of_golden(str(tmp_path))


def test_the_undamaged_copy_is_adopted(ckptfs, bad):
    ckptfs.adopt(bad, 'good')
    assert steps(ckptfs) == 1


@pytest.mark.parametrize('name', [MODEL, zero_file(2)])
def test_truncated_at_every_boundary(ckptfs, bad, name):
    path = inside(bad, name)
    whole = path + '.whole'
    shutil.move(path, whole)
    for size in hostile.boundaries(whole):
        shutil.copy(whole, path)
        hostile.truncate(path, size)
        done = ckptfs.adopt(bad, 'bad', check=False, timeout=SECONDS)
        assert 0 < done.returncode < 126, (size, done)
        assert name in done.stderr, (size, done.stderr)
    assert steps(ckptfs) == 0


def test_flipped_bits_of_the_pickle(ckptfs, bad):
    path = inside(bad, MODEL)
    begin, end = hostile.pickle_extent(path)
    chosen = random.Random(5).sample(range(begin, end), 60)
    for offset in chosen:
        bit = offset % 8
        hostile.flip(path, offset, bit)
        done = ckptfs.adopt(bad, 'bad', check=False, timeout=SECONDS)
        hostile.flip(path, offset, bit)
        assert 0 < done.returncode < 126, (offset, done)
        assert MODEL in done.stderr, (offset, done.stderr)
    assert steps(ckptfs) == 0


def test_flipped_bits_of_the_zip_structures(ckptfs, bad, tmp_path):
    """Some fields mean nothing (times); no flip may crash or hang."""
    path = inside(bad, zero_file(0))
    size = os.path.getsize(path)
    with open(path, 'rb') as f:
        central = f.read().find(hostile.CENTRAL)
    rng = random.Random(6)
    refused = 0
    for offset in rng.sample(range(central, size), 80):
        hostile.flip(path, offset, offset % 8)
        done = ckptfs.adopt(bad, f'r{offset}', check=False, timeout=SECONDS)
        hostile.flip(path, offset, offset % 8)
        assert 0 <= done.returncode < 126, (offset, done)
        assert 'Sanitizer' not in done.stderr
        refused += done.returncode != 0
    assert refused > 10


@pytest.mark.parametrize('name', [MODEL, zero_file(0), zero_file(3)])
def test_missing_rank_file(ckptfs, bad, name):
    os.unlink(inside(bad, name))
    refusal(ckptfs, bad)


def cut_off(folder):
    """Leaves what a save leaves that crashed after the model states."""
    for rank in range(4):
        os.unlink(os.path.join(folder, zero_file(rank)))


def test_a_save_that_was_cut_off(ckptfs, bad):
    cut_off(inside(bad, ''))
    refusal(ckptfs, bad, MODEL, 'cut off', '--weights-only')


def test_a_save_that_was_cut_off_is_not_the_latest(ckptfs, bad):
    second = os.path.join(bad, 'global_step9')
    shutil.copytree(os.path.join(bad, TAG), second)
    cut_off(second)
    with open(os.path.join(bad, 'latest'), 'w') as f:
        f.write('global_step9')
    done = ckptfs.adopt(bad, 'run')
    assert 'skipped global_step9: incomplete' in done.stderr
    assert [s['id'] for s in ckptfs.list()['steps']] == [TAG]


def test_weights_only(ckptfs, bad):
    """Optimizer files that were removed on purpose."""
    cut_off(inside(bad, ''))
    ckptfs.run('adopt', bad, '--store', ckptfs.store, '--weights-only')
    assert steps(ckptfs) == 1
    info = ckptfs.run('info', bad, '--weights-only', '--json')
    assert set(json.loads(info.stdout)['kinds']) == {'weight'}


def test_latest_of_a_missing_tag(ckptfs, bad):
    with open(os.path.join(bad, 'latest'), 'w') as f:
        f.write('global_step99')
    done = ckptfs.adopt(bad, 'run')
    assert f'{bad}/latest' in done.stderr and 'global_step99' in done.stderr
    assert steps(ckptfs) == 1


def test_two_runs_in_one_directory(ckptfs, bad):
    """A fifth rank that a run of another size left behind."""
    shutil.copy(inside(bad, zero_file(3)), inside(bad, zero_file(4)))
    refusal(ckptfs, bad)


def test_two_models_in_one_directory(ckptfs, bad):
    other = os.path.join(checkpoint('zero2'), 'global_step5', zero_file(1))
    shutil.copy(other, inside(bad, zero_file(1)))
    refusal(ckptfs, bad, 'rank_1')


@pytest.mark.parametrize('inner', [False, True])
def test_a_pickle_that_runs_a_command(ckptfs, bad, tmp_path, inner):
    mark = tmp_path / 'ran'
    hostile.with_pickle(inside(bad, MODEL),
                        hostile.call_pickle(f'touch {mark}', inner))
    refusal(ckptfs, bad, MODEL)
    assert not mark.exists()


def test_names_that_climb_out(ckptfs, bad):
    def climb(entries):
        return {k.replace('/data/', '/../../../../tmp/'): v
                for k, v in entries.items()}
    hostile.rewrite(inside(bad, MODEL), climb)
    refusal(ckptfs, bad, MODEL)


def test_latest_that_climbs_out(ckptfs, bad, tmp_path):
    shutil.copytree(inside(bad, ''), tmp_path / 'elsewhere' / TAG)
    with open(os.path.join(bad, 'latest'), 'w') as f:
        f.write(f'../elsewhere/{TAG}')
    done = ckptfs.adopt(bad, 'bad', check=False, timeout=SECONDS)
    assert 'elsewhere' not in ckptfs.run(
        'list', '--store', ckptfs.store, check=False).stdout
    assert done.returncode < 126


def test_overlapping_records(ckptfs, bad):
    path = inside(bad, zero_file(1))
    first = hostile.entry_field(path, b'/data/0', 42, 4)
    hostile.patch_entry(path, b'/data/1', 42, first, 4)
    refusal(ckptfs, bad, zero_file(1))


@pytest.mark.parametrize('field', [20, 24])
def test_sizes_beyond_the_file(ckptfs, bad, field):
    hostile.patch_entry(inside(bad, zero_file(1)), b'/data/0', field,
                        0xfffffff0, 4)
    refusal(ckptfs, bad, zero_file(1))


def test_sizes_of_2_to_the_63(ckptfs, bad):
    """Tensor sizes whose product overflows."""
    path = inside(bad, MODEL)
    text = (b'\x80\x02}X\x06\x00\x00\x00modulectorch._utils\n'
            b'_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\n'
            b'FloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu'
            b'\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7ftQK\x00'
            b'\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fK\x04\x86'
            b'K\x04K\x01\x86\x89ccollections\nOrderedDict\n)RtRs.')
    hostile.with_pickle(path, text)
    refusal(ckptfs, bad, MODEL)


@pytest.mark.parametrize('depth', [10_000, 1_000_000])
def test_deep_nesting(ckptfs, bad, depth):
    hostile.with_pickle(inside(bad, MODEL), hostile.deep_pickle(depth))
    refusal(ckptfs, bad, MODEL)


def test_a_tree_that_prints_huge(ckptfs, bad):
    hostile.with_pickle(inside(bad, MODEL), hostile.bomb_pickle(200))
    refusal(ckptfs, bad, MODEL)


def test_empty_directory(ckptfs, tmp_path):
    (tmp_path / 'empty').mkdir()
    refusal(ckptfs, str(tmp_path / 'empty'), 'empty')


def test_directory_of_text(ckptfs, tmp_path):
    folder = tmp_path / 'words'
    folder.mkdir()
    for i in range(20):
        (folder / f'note{i}.txt').write_text('to be or not to be\n' * 100)
    refusal(ckptfs, str(folder), 'words')


def test_text_named_like_a_checkpoint(ckptfs, bad):
    for name in (MODEL, zero_file(0)):
        with open(inside(bad, name), 'w') as f:
            f.write('to be or not to be\n' * 100)
    refusal(ckptfs, bad, '.pt')


def test_a_path_that_is_not_there(ckptfs, tmp_path):
    done = ckptfs.adopt(str(tmp_path / 'nowhere'), check=False)
    assert 0 < done.returncode < 126
    assert 'nowhere' in done.stderr
    assert steps(ckptfs) == 0


@pytest.mark.parametrize('name', [MODEL, zero_file(0)])
def test_one_bad_tag_does_not_hide_the_good_one(ckptfs, bad, name):
    """A save directory with a second tag that was cut off."""
    second = os.path.join(bad, 'global_step2')
    shutil.copytree(os.path.join(bad, TAG), second)
    hostile.truncate(os.path.join(second, name), 100)
    done = ckptfs.adopt(bad, 'half', timeout=SECONDS)
    assert 'skipped global_step2' in done.stderr and name in done.stderr
    assert steps(ckptfs) == 1


def test_a_bad_tag_that_latest_names_is_no_cut_off_save(ckptfs, bad):
    second = os.path.join(bad, 'global_step2')
    shutil.copytree(os.path.join(bad, TAG), second)
    hostile.truncate(os.path.join(second, zero_file(0)), 100)
    with open(os.path.join(bad, 'latest'), 'w') as f:
        f.write('global_step2')
    refusal(ckptfs, bad, zero_file(0), sound=1)
