# SPDX-License-Identifier: Apache-2.0
"""Universal directories as input: DeepSpeed's own and ours, against truth.

The stock converter is run as users run it; every atom of what it wrote, and of
our own universal views adopted again, is compared bit for bit with what the
saving engine held in memory.
"""
import json
import os
import shutil
import sys

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from safetensors.torch import load_file

import launch
from daemon import Ckptfs, TALLY, checkpoint, step_of, truth_of
from load_deepspeed import recorded
from test_rank_files import bits, check_rank, degrees, read, want_of, \
    wanted_keys
from variants import VARIANTS

TAG = 'global_step5'
UNIVERSAL = f'{TAG}_universal'

# Where the stock converter is right: dicts with cutting rules below stage 3,
# bare flat tensors at stage 3.
STOCK = ['zero1_bf16', 'zero2_frozen', 'tp2', 'pp2', 'zero3_2groups',
         'zero3_frozen']
# One of each kind of source: a layout to export from, which must not matter.
OWN = [('zero2_rr', 'dp2_zero1'), ('zero2_low', 'tp2'),
       ('zero2_momentum', 'dp3_zero2'), ('zero2_frozen', 'tp2_dp2_zero3'),
       ('zero3_2groups', 'tp4'), ('stage0', 'pp2'),
       ('tp2_pp2', 'tp2_dp2_zero1'), ('autotp2_zero3', 'dp2_zero1'),
       ('moe', 'dp4_zero2')]
FILES = {'fp32': 'model'}
KINDS = {'master': 'model'}


def converter(*words):
    """Runs what `python -m deepspeed.checkpoint.ds_to_universal` runs."""
    sys.argv = ['ds_to_universal', *words]
    ds_to_universal.main(ds_to_universal.parse_arguments())


def run_converter(source, target):
    """The stock converter on one step, in a process that has it loaded."""
    os.makedirs(os.path.dirname(target))
    log = f'{target}.log'
    done = launch.launch(converter, 1, (
        '--input_folder', source, '--output_folder', str(target),
        '--num_extract_workers', '1', '--num_merge_workers', '1'), log)
    with open(log + '.0', errors='replace') as f:
        assert done, f.read()[-3000:]
    os.unlink(log + '.0')


def plain(variant):
    """The token that gives a pipeline's parameters their plain names."""
    source = VARIANTS[variant]
    return '_plain' if source.pipe or source.pp > 1 else ''


def lacking(variant, own):
    """Kinds of weight that such a directory does not hold.

    Frozen parameters: the stock form has them below stage 3, ours never.
    Buffers: the stock converter leaves a pipeline's layer files behind.
    """
    out = set()
    if own or VARIANTS[variant].stage == 3:
        out.add('frozen')
    if not own and plain(variant):
        out.add('buffer')
    return out


def expected(truth, variant, own):
    """The (file, key) pairs that the unsharded rank files must hold."""
    without = lacking(variant, own)

    def kind(file, key):
        if file == 'optimizer' or f'model/{key}' in truth:
            return 'trained'
        return 'buffer' if f'buffer/{key}' in truth else 'frozen'
    return {(f, k) for f, k in wanted_keys(truth) if kind(f, k) not in without}


def same(got, want, state):
    """Equal in shape and every bit; a state may be held wider."""
    if state and got.dtype == torch.float32:
        want = want.to(got.dtype)
    return (got.dtype == want.dtype and got.shape == want.shape
            and torch.equal(bits(got), bits(want)))


def check_whole(step, variant, own=False):
    """Every tensor of the unsharded rank files, and none too few."""
    truth = load_file(truth_of(variant))
    tensors, _ = read(os.path.join(step, 'view', 'tp1' + plain(variant),
                                   'rank0'))
    for (file, key), got in tensors.items():
        want = want_of(truth, file, key)[1]
        if key.startswith('step/'):
            assert float(got) == float(want), key
        else:
            assert same(got, want, file == 'optimizer'), (file, key)
    missing = expected(truth, variant, own) - set(tensors)
    assert not missing, sorted(missing)[:5]
    assert len(tensors) > 48


def check_atoms(step, variant):
    """Every file below param/."""
    truth = load_file(truth_of(variant))
    seen = set()
    for name in os.listdir(os.path.join(step, 'param')):
        folder = os.path.join(step, 'param', name)
        for file in [] if os.path.islink(folder) else os.listdir(folder):
            kind = file.removesuffix('.safetensors')
            (got,) = load_file(os.path.join(folder, file)).values()
            if kind == 'step':
                assert float(got) == float(truth['step']), name
                continue
            key = f'{KINDS.get(kind, kind)}/{name}'
            want = truth[key if key in truth else f'buffer/{name}']
            assert same(got, want, kind != 'weight'), key
            seen.add(key)
    missing = {k for k in truth
               if '/' in k and k.split('/')[0] not in ('weight', 'buffer')}
    assert not missing - seen, sorted(missing - seen)[:5]


def check_shards(step, variant, layout, own=False):
    """Every rank of another layout, cut by the fixture model's own rules."""
    layout += plain(variant)
    truth = load_file(truth_of(variant))
    dims, deg = recorded(truth_of(variant))[0], degrees(layout)
    deg['auto'] = VARIANTS[variant].autotp
    seen = set()
    for rank in range(deg['tp'] * deg['dp'] * deg['pp']):
        seen |= check_rank(os.path.join(step, 'view', layout, f'rank{rank}'),
                           rank, truth, dims, deg)
    missing = expected(truth, variant, own) - seen
    assert not missing, sorted(missing)[:5]


def check_deepspeed_view(step, variant, layout):
    """Every tensor of a universal view of what was adopted."""
    truth = load_file(truth_of(variant))
    top = os.path.join(step, 'view', layout + plain(variant), 'deepspeed')
    with open(os.path.join(top, 'latest_universal')) as f:
        zero = os.path.join(top, f.read(), 'zero')
    compared = 0
    for name in os.listdir(zero):
        folder = os.path.join(zero, name)
        if os.path.islink(folder) or not os.path.isdir(folder):
            continue
        for file in os.listdir(folder):
            kind = file.removesuffix('.pt')
            got = torch.load(os.path.join(folder, file), weights_only=False)
            if kind == 'step':
                assert float(got) == float(truth['step']), name
                continue
            want = truth.get(f'{FILES.get(kind, kind)}/{name}')
            if want is None:  # SGD: a stage-3 loader asks for Adam's names
                assert not got['param'].any(), (name, kind)
                continue
            assert same(got['param'], want, True), (name, kind)
            compared += 1
    wanted = [k for k in truth
              if '/' in k and k.split('/')[0] not in ('weight', 'buffer')]
    assert compared == len(wanted) > 0


@pytest.mark.parametrize('variant', STOCK)
def test_what_the_stock_converter_wrote(ckptfs, tmp_path, variant):
    save = tmp_path / variant
    run_converter(os.path.join(checkpoint(variant), TAG), save / UNIVERSAL)
    ckptfs.adopt(save, 'stock', extra=TALLY)
    step = step_of(ckptfs.mount(), 'stock')
    assert os.path.basename(step) == UNIVERSAL
    check_whole(step, variant)
    if not plain(variant):
        check_atoms(step, variant)
    check_shards(step, variant, 'tp2_dp2_zero1')
    check_deepspeed_view(step, variant, 'tp2_dp3_zero1')


@pytest.fixture(scope='module')
def native(tmp_path_factory):
    """(program, mount) of the native checkpoints of OWN."""
    program = Ckptfs(str(tmp_path_factory.mktemp('own')))
    for variant, _ in OWN:
        program.adopt_variant(variant)
    yield program, program.mount()
    program.close()


def notes_of(step):
    """Returns what is said of a step."""
    with open(os.path.join(step, 'info.json')) as f:
        return ' '.join(json.load(f)['notes'])


@pytest.mark.parametrize('variant,layout', OWN)
def test_our_universal_view_adopted_again(native, ckptfs, variant, layout):
    out = os.path.join(ckptfs.folder, 'exported')
    native[0].run('export', f'{variant}/{TAG}', f'{layout}/deepspeed', out,
                  '--store', native[0].store)
    ckptfs.adopt(out, 'again', extra=TALLY)
    step = step_of(ckptfs.mount(), 'again')
    check_whole(step, variant, own=True)
    if not plain(variant):
        check_atoms(step, variant)
    other = 'dp4_ep2_zero1' if VARIANTS[variant].moe else 'tp2_dp2_zero1'
    check_shards(step, variant, other, own=True)
    if not VARIANTS[variant].moe:
        check_deepspeed_view(step, variant, other)
    assert ('frozen parameters' in notes_of(step)) == VARIANTS[variant].frozen


def test_an_engine_that_deals_gradients_is_warned_of(ckptfs):
    """0.19.7 loads such a directory into partitions of another order, and says nothing."""
    ckptfs.adopt_variant('zero2_rr')
    for layout, told in (('dp2_zero2', True), ('tp1', False), ('dp2_zero3', False)):
        said = ckptfs.run('explain', layout, '--step', f'zero2_rr/{TAG}', '--store', ckptfs.store).stdout
        assert ('round_robin_gradients' in said) == told, (layout, said)


@pytest.mark.parametrize('family', [(), ('--family', 'llama')])
def test_joined_experts_are_refused(native, ckptfs, family):
    """With ep one tensor has the experts of several ranks under one name,
    whether the family knows the name or not."""
    out = os.path.join(ckptfs.folder, 'exported')
    native[0].run('export', f'moe/{TAG}', 'dp4_ep2/deepspeed', out,
                  '--store', native[0].store)
    done = ckptfs.adopt(out, check=False, extra=family)
    assert done.returncode == 4
    assert 'deepspeed_experts.' in done.stderr and 'ep' in done.stderr


def view_of(native, variant):
    """Our universal view of a variant, in the mount."""
    return os.path.join(step_of(native[1], variant), 'view', 'dp2_zero1',
                        'deepspeed')


def test_a_copy_of_the_view(native, ckptfs):
    out = os.path.join(ckptfs.folder, 'copied')
    shutil.copytree(view_of(native, 'zero2_rr'), out, symlinks=True)
    ckptfs.adopt(out, 'again')
    check_whole(step_of(ckptfs.mount(), 'again'), 'zero2_rr', own=True)


def test_the_view_in_the_mount_itself(native, ckptfs):
    """Another store may refer to it; its own only with copies."""
    view = view_of(native, 'zero2_rr')
    done = native[0].adopt(view, 'self', check=False)
    assert done.returncode == 4
    assert '--copy' in done.stderr and view in done.stderr, done.stderr
    native[0].adopt(view, 'self', extra=['--copy'])
    check_whole(step_of(native[1], 'self'), 'zero2_rr', own=True)
    ckptfs.adopt(view, 'again')
    mount = ckptfs.mount()
    check_whole(step_of(mount, 'again'), 'zero2_rr', own=True)
    ckptfs.umount(mount)
