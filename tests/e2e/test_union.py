# SPDX-License-Identifier: Apache-2.0
"""One save whose ranks lie in several directories, as on the disks of a job's nodes.

`adopt --union` shows the directories as one: every file of every view equals the one that the same
save has in one directory.  A file that two of them have is equal in both, or there is no step.
"""
import json
import os
import re
import shutil

import pytest

import daemon

DEEPSPEED = ('zero1', 'zero2', 'zero3', 'tp2', 'moe')
FSDP = 'fsdp2'


def source(variant):
    return os.path.join(daemon.FIXTURES, *(('dcp', variant) if variant == FSDP else (variant,)), 'ckpt')


def rank_of(name):
    """The number of the rank that writes a file; none for what one writes for all."""
    number = re.match(r'(?:bf16_)?zero_pp_rank_(\d+)|__(\d+)_\d+\.distcp|mp_rank_(\d+)|layer_\d+_expert_(\d+)', name)
    return next((int(n) for n in number.groups() if n), 0) if number else None


def divide(variant, folder, nodes=2):
    """The save as that many nodes have it: files of a rank at one node, what one rank writes for all at the first.
    Scripts and notes are at both."""
    parts = [folder / f'n{i}' / 'ckpt' for i in range(nodes)]
    for base, _, files in os.walk(source(variant)):
        for name in files:
            here = os.path.join(base, name)
            rank = rank_of(name)
            wanted = [parts[rank % nodes]] if rank is not None else parts if name.endswith('.py') else parts[:1]
            for part in wanted:
                there = part / os.path.relpath(here, source(variant))
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(here, there)
    assert all(any(files for _, _, files in os.walk(part)) for part in parts)
    return parts


def said(variant):
    return ('--family-set', 'head_dim=8', '--replicated', r'model\.(gain|seen|running_mean)') if variant == FSDP \
        else daemon.TALLY


def join(ckptfs, variant, parts, *words, **more):
    return ckptfs.adopt('--union', 'joined', extra=(*words, *said(variant), *parts), **more)


def content(ckptfs, step, layout, out):
    ckptfs.run('export', '--store', ckptfs.store, step, layout, out)
    return {os.path.relpath(os.path.join(base, name), out): open(os.path.join(base, name), 'rb').read()
            for base, _, files in os.walk(out) for name in files}


def only(done):
    step, = done.stdout.split()
    return step


@pytest.mark.parametrize('how', [(), ('--copy',), ('--link',)], ids=['reference', 'copy', 'link'])
@pytest.mark.parametrize('variant', [*DEEPSPEED, FSDP])
def test_the_directories_of_nodes_are_one_step(ckptfs, tmp_path, variant, how):
    parts = divide(variant, tmp_path)
    whole = only(ckptfs.adopt(source(variant), 'whole', extra=said(variant)))
    joined = only(join(ckptfs, variant, parts[::-1], *how))
    assert joined.split('/')[1] == whole.split('/')[1]
    if how == ('--copy',):
        for part in parts:
            shutil.rmtree(part)
    layout = 'dp2' if variant != 'moe' else 'ep2_dp2'
    shown = content(ckptfs, joined, layout, tmp_path / 'joined')
    assert shown == content(ckptfs, whole, layout, tmp_path / 'whole') and shown
    assert '0 defects' in ckptfs.run('verify', '--store', ckptfs.store, joined).stdout
    mount = ckptfs.mount()
    files = {}
    for run in ('joined', 'whole'):
        top = os.path.join(daemon.step_of(mount, run, whole.split('/')[1]), 'source')
        files[run] = {os.path.relpath(os.path.join(base, name), top): open(os.path.join(base, name), 'rb').read()
                      for base, _, names in os.walk(top) for name in names}
    assert files['joined'] == files['whole']
    ckptfs.run('remove', '--store', ckptfs.store, joined)
    assert [one['run'] for one in ckptfs.list()['steps']] == ['whole']


def test_their_order_makes_no_other_step(ckptfs, tmp_path):
    parts = divide('zero2', tmp_path, 3)
    first = only(join(ckptfs, 'zero2', parts))
    assert only(join(ckptfs, 'zero2', parts[::-1])) == first
    info = json.loads(ckptfs.run('info', '--store', ckptfs.store, '--json', first).stdout)
    assert json.dumps(info).count('/n') >= 3  # it names all three directories


def test_a_file_of_two_nodes_is_the_same_or_refused(ckptfs, tmp_path):
    parts = divide('zero2', tmp_path)
    step, = [p for p in parts[0].iterdir() if p.is_dir()]
    model = step / 'mp_rank_00_model_states.pt'
    twin = parts[1] / step.name / model.name
    shutil.copy2(model, twin)
    only(join(ckptfs, 'zero2', parts))
    bytes_ = bytearray(twin.read_bytes())
    bytes_[len(bytes_) // 2] ^= 1
    twin.write_bytes(bytes_)
    done = join(ckptfs, 'zero2', parts, check=False)
    assert done.returncode and str(model) in done.stderr and str(twin) in done.stderr
    assert 'differ: they cannot be files of one save' in done.stderr
    twin.write_bytes(bytes_ + b'0')
    assert 'differ in size' in join(ckptfs, 'zero2', parts, check=False).stderr


@pytest.mark.parametrize('variant, gone, said_so', [('zero2', 'zero_pp_rank_3', 'data-parallel rank 3 of 4'),
                                                    ('zero3', 'zero_pp_rank_1', 'data-parallel rank 1 of 4'),
                                                    (FSDP, '__1_0.distcp', '__1_0.distcp')])
def test_a_file_that_no_directory_has_is_named(ckptfs, tmp_path, variant, gone, said_so):
    parts = divide(variant, tmp_path)
    for part in parts:
        for base, _, files in os.walk(part):
            for name in files:
                if gone in name:
                    os.unlink(os.path.join(base, name))
    done = join(ckptfs, variant, parts, check=False)
    assert done.returncode and not done.stdout
    assert said_so in done.stderr


@pytest.mark.parametrize('variant', ['zero2', FSDP])
def test_a_part_alone_is_refused_with_the_remedy(ckptfs, tmp_path, variant):
    parts = divide(variant, tmp_path)
    done = ckptfs.adopt(parts[0], extra=(parts[1], *said(variant)), check=False)
    assert done.returncode and not done.stdout
    assert 'adopt --union' in done.stderr


def test_what_is_not_one_save_is_refused(ckptfs, tmp_path):
    parts = divide('zero2', tmp_path)
    step, = [p for p in parts[0].iterdir() if p.is_dir()]
    other = parts[1] / 'global_step99'
    (parts[1] / step.name).rename(other)
    done = join(ckptfs, 'zero2', [step, other], check=False)
    assert done.returncode and 'must have one name' in done.stderr
    for pair, why in ((parts[:1] * 2, 'is or lies in'), ([parts[0], step], 'is or lies in'),
                      ([parts[0], step / 'mp_rank_00_model_states.pt'], 'only directories are joined'),
                      ([parts[0], tmp_path / 'gone'], 'gone')):
        done = join(ckptfs, 'zero2', pair, check=False)
        assert done.returncode and why in done.stderr, done.stderr
    done = join(ckptfs, 'zero2', parts, '--watch', check=False)
    assert done.returncode == 2 and '--watch' in done.stderr


def test_a_changed_file_of_the_second_node_is_found(ckptfs, tmp_path):
    parts = divide('zero2', tmp_path)
    step = only(join(ckptfs, 'zero2', parts))
    inner, = [p for p in parts[1].iterdir() if p.is_dir()]
    victim = next(p for p in inner.iterdir() if 'optim' in p.name)
    bytes_ = bytearray(victim.read_bytes())
    bytes_[len(bytes_) // 2] ^= 1
    victim.write_bytes(bytes_)
    done = ckptfs.run('verify', '--store', ckptfs.store, step, check=False)
    assert done.returncode == 9 and str(victim) in done.stdout + done.stderr
