# SPDX-License-Identifier: Apache-2.0
"""Real checkpoints with one thing changed: read as torch reads them, or refused.

Two kinds of change.  A file stays one that torch may read (mutants.py: views,
exchanged and shared storages, other types, records that are not what the pickle
says): what is read must equal, byte for byte, what torch.load and a reader of
DeepSpeed's shards that is nothing of ours (shards.py) make of the same files;
what these refuse must be refused.  Or a file begins to contradict itself or its
neighbours: it must be refused, and by name.  Seeded; CKPTFS_FIXTURES and
CKPTFS_MODEL_TOOL as in test_truth.py; CKPTFS_MUTATIONS: how many kinds a variant
gets (100: all).
"""
import collections
import json
import os
import random
import re
import shutil
import struct
import sys

import pytest
import torch
from safetensors.torch import load_file

from test_truth import FIXTURES, VARIANTS, index, only, tag_of

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                '..', '..', 'fixtures', 'deepspeed'))
import mutants  # noqa: E402
from shards import Shards  # noqa: E402

# Files whose tensors belong to nothing: optimizers of experts without names
# at stage 0, and what the other ranks of stage 3 say of the model once more.
UNREAD = re.compile(r'expp_|zero_pp_rank_[1-9]\d*_mp_rank_\d+_model')
KINDS_PER_VARIANT = int(os.environ.get('CKPTFS_MUTATIONS', 7))

# Torch's own forms of tensors that are not plain runs of elements.
OTHERS = {
    'negated': torch._neg_view,
    'conjugated': lambda t: torch.complex(t.float(), t.float()).conj(),
    'quantised': lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    'sparse': lambda t: t.to_sparse(),
}


def load(path):
    return torch.load(path, weights_only=False)


@pytest.fixture(scope='session')
def originals(tmp_path_factory):
    """Variants of one's own: a link changes the times of a file that other programs read."""
    folder, made = tmp_path_factory.mktemp('originals'), set()

    def original(variant):
        if variant not in made:
            shutil.copytree(f'{FIXTURES}/{variant}/ckpt', folder / variant, ignore=shutil.ignore_patterns('*_universal'))
            made.add(variant)
        return folder / variant
    return original


@pytest.fixture
def copy(tmp_path, originals):
    """A variant's save directory of links; replace a file, never write into it."""
    def make(variant, name='copy'):
        target = tmp_path / name
        shutil.copytree(originals(variant), target, copy_function=os.link)
        return target
    return make


def replace(path, content):
    path.unlink()
    torch.save(content, path)


def atoms(save):
    """All atoms and what the step says of itself; or None and the error."""
    out = str(save) + '.safetensors'
    steps, error = index(str(save), '--step', 'global_step5', '--extract', out)
    return (load_file(out), steps[0]) if steps else (None, error)


def refused(save, *words):
    steps, error = index(str(save))
    assert steps is None, f'accepted, though {words}'
    assert any(w in error for w in words), error


def kinds_of(steps):
    """How many atoms a step has of each kind."""
    return collections.Counter(key.split('/', 1)[0] for key in steps[0]['atoms'])


def not_taken(save, kind, before, *words):
    """Refused, or without it: the step says what it leaves out, and has fewer of the kind."""
    steps, error = index(str(save))
    if steps is None:
        assert any(w in error for w in words), error
        return
    count = sum(key.startswith(f'{kind}/') for key in steps[0]['atoms'])
    assert steps[0]['left_out'] and count < before[kind], (kind, steps[0]['left_out'])


def same(a, b):
    """Equal in type, shape and every bit."""
    return (a.dtype == b.dtype and a.shape == b.shape
            and torch.equal(a.contiguous().reshape(-1).view(torch.uint8),
                            b.contiguous().reshape(-1).view(torch.uint8)))


def merged(contents, variant):
    """{key: [tensors]} as shards.py reads them, or None."""
    with open(f'{FIXTURES}/{variant}/meta.json') as file:
        meta = json.load(file)
    try:
        return Shards(contents, meta).merged()
    except (ValueError, RuntimeError, TypeError, AttributeError, KeyError):
        return None


def differences(ours, step, wanted):
    """Keys of either side that the other lacks or has otherwise, but for states that the step
    says it leaves out."""
    out = [key for key in ours if key not in wanted]
    aliases = step.get('aliases', {})
    for key, copies in wanted.items():
        kind, name = key.split('/', 1)
        got = ours.get(key, ours.get(f'{kind}/{aliases.get(name)}'))
        if got is None and step['left_out'] and kind != 'weight':
            continue
        if got is None or not any(same(got, t) for t in copies):
            out.append(key)
    return out


def contents_of(save):
    """Returns what torch.load gives for each file of the tag."""
    return {p.name: load(p) for p in only(tag_of(save), '.pt')}


@pytest.mark.parametrize('variant', VARIANTS)
def test_what_nobody_changed(copy, variant):
    """Both readers agree before anything is changed."""
    save = copy(variant)
    ours, said = atoms(save)
    assert not said['left_out'] or variant == 'moe_stage0'  # numbers that nobody names
    assert differences(ours, said, merged(contents_of(save), variant)) == []


def outcome(save, variant, path, contents):
    """'' if ours is as good as torch's of the files as they are now."""
    ours, said = atoms(save)
    try:
        wanted = merged({**contents, path.name: load(path)}, variant)
    except Exception:  # torch has many names for a file that it cannot read
        wanted = None
    if ours is None:
        named = path.name in said or any(f"'{key.split('/', 1)[1]}'" in said for key in wanted or ())
        return '' if named or wanted is None else f'refused without a name: {said}'
    if wanted is None:
        return 'taken, though torch or its neighbours refuse it'
    differing = differences(ours, said, wanted)
    return f'differ: {differing[:4]}' if differing else ''


@pytest.mark.parametrize('variant', VARIANTS)
def test_changed_files_are_read_as_torch_reads_them(copy, variant):
    rng = random.Random(variant)
    save = copy(variant)
    contents = contents_of(save)
    kinds = rng.sample(mutants.ALL, min(KINDS_PER_VARIANT, len(mutants.ALL)))
    files, wrong = [n for n in sorted(contents) if not UNREAD.match(n)], []
    for kind in kinds:
        path = tag_of(save) / rng.choice(files)
        whole = path.read_bytes()
        path.unlink()
        done = kind(rng, whole, path)
        if done:
            problem = outcome(save, variant, path, contents)
            if problem:
                wrong.append((kind.__name__, path.name, done, problem))
            path.unlink()
        path.write_bytes(whole)
    assert not wrong, '\n'.join(map(str, wrong))


def optimizer_files(save):
    return [p for p in only(tag_of(save), 'optim_states') if p.suffix == '.pt']


def states_of(content):
    """The state dict of the first partition of a ZeRO file."""
    zero = content['optimizer_state_dict']
    base = zero.get('optimizer_state_dict', zero.get('base_optimizer_state'))
    states = base['state'] if isinstance(base, dict) else base
    return states[0]


SHARDED = [v for v in VARIANTS if 'stage0' not in v]
LONE = ('pp2_untied', 'tp2_pp2')  # dp 1: a group has one rank

# One variant of each way in which masters and moments are stored.
FORMS = ['stage0', 'stage0_unfused', 'stage0_fused', 'zero1', 'zero1_bf16', 'zero1_elastic',
         'zero2', 'zero2_aligned', 'zero2_momentum', 'zero3', 'zero3_2groups', 'moe', 'tp2_pp2']
# Views that a reader may take, as torch does, and those whose elements torch reads otherwise
# than they lie.
LAID_OUT = {
    'expanded': lambda t: mutants.expanded(None, t, ()),
    'every_second': lambda t: mutants.every_second(None, t, ()),
    'transposed': lambda t: mutants.transposed(None, t, ()),
    'offset': lambda t: mutants.shifted(None, t, ()),
    'longer_storage': lambda t: torch.cat([t.reshape(-1), t.reshape(-1).flip(0)])[
        :t.numel()].reshape(t.shape),
}
OF_OTHER_LENGTH = {
    'longer': lambda t: torch.cat([t, t[:1]]),
    'much_longer': lambda t: torch.cat([t, t, t]),
    'shorter': lambda t: t[:-1].clone(),
    'nothing': lambda t: t[:0].clone(),
}


def optimizer_of(save):
    """The last file with optimizer states, what torch reads of it, and where its tensors lie:
    [(what it is in an error, its container, its key)], masters first."""
    files = optimizer_files(save) or only(tag_of(save), 'mp_rank')
    content = load(files[-1])
    found = content.get('optimizer_state_dict') or content['optimizer']
    base = found.get('base_optimizer_state', found.get('optimizer_state_dict', found))
    states = base['state'] if isinstance(base, dict) else base
    places = [('master', *held) for held in masters_of(found)]
    places += [(kind, states[0], kind) for kind, value in states[0].items()
               if isinstance(value, torch.Tensor) and value.dim()]
    return files[-1], content, places


def masters_of(found):
    """Where the first master lies; none where the weights are the masters."""
    for key in ('single_partition_of_fp32_groups', 'fp32_flat_groups', 'fp32_groups_flat'):
        if key in found:
            return [(found[key], 0)]
    return [(found['fp32_groups'][0], 0)] if 'fp32_groups' in found else []


@pytest.mark.parametrize('variant', SHARDED)
@pytest.mark.parametrize('change', ['longer', 'shorter', 'negated', 'missing', 'missing_first',
                                    'expanded'])
def test_flat_states_that_contradict_are_refused(copy, variant, change):
    save = copy(variant)
    path = optimizer_files(save)[0 if change == 'missing_first' else -1]
    before = kinds_of(index(str(save))[0])
    content = load(path)
    states = states_of(content)
    kind = next(k for k, v in states.items() if isinstance(v, torch.Tensor) and v.dim() == 1)
    old = states[kind]
    if change == 'longer':
        states[kind] = torch.cat([old, old, old])
    elif change == 'shorter':
        states[kind] = old[:-1].clone()
    elif change == 'negated':
        states[kind] = torch._neg_view(old.clone())
    elif change == 'expanded':
        states[kind] = old[:1].expand(old.numel())
    elif variant in LONE:
        return  # nobody else has it: other parameters, other states
    else:
        del states[kind]
    replace(path, content)
    if kind in ('exp_avg', 'exp_avg_sq'):
        refused(save, path.name, kind)
    else:
        not_taken(save, kind, before, path.name, kind)


@pytest.mark.parametrize('variant', FORMS)
@pytest.mark.parametrize('change', LAID_OUT)
def test_masters_and_moments_however_they_are_laid_out(copy, variant, change):
    """As torch reads them, or refused; never the bytes as they lie."""
    save = copy(variant)
    contents = contents_of(save)
    path, content, places = optimizer_of(save)
    assert len(places) >= 2
    whole, wrong = path.read_bytes(), []
    for what, holder, key in places:
        old = holder[key]
        holder[key] = LAID_OUT[change](old.detach())
        replace(path, content)
        holder[key] = old
        problem = outcome(save, variant, path, contents)
        taken, error = atoms(save)
        # Other values in one stage's file are another embedding than the other stage's.
        apart = taken is None and variant == 'tp2_pp2' and 'pipeline stages hold it with different values' in error
        if not problem and change in ('offset', 'longer_storage') and taken is None and not apart:
            problem = 'refused, though nothing is in its way'
        if problem:
            wrong.append((what, problem))
        path.unlink()
        path.write_bytes(whole)
    assert not wrong, wrong


@pytest.mark.parametrize('variant', FORMS)
@pytest.mark.parametrize('change', OF_OTHER_LENGTH)
def test_masters_and_moments_of_another_length_are_refused(copy, variant, change):
    save = copy(variant)
    path, content, places = optimizer_of(save)
    before = kinds_of(index(str(save))[0])
    for what, holder, key in places:
        old = holder[key]
        holder[key] = OF_OTHER_LENGTH[change](old.detach())
        replace(path, content)
        holder[key] = old
        if variant.startswith('stage0') or what not in ('master', 'exp_avg', 'exp_avg_sq'):
            not_taken(save, what, before, path.name)
        else:
            refused(save, path.name)


@pytest.mark.parametrize('variant', FORMS)
@pytest.mark.parametrize('change', ['record_shorter', 'record_longer', 'view_of_more'])
def test_storages_that_are_not_what_their_tensors_need(copy, variant, change):
    """The record of a master's or moment's storage is cut or has more, or a view reaches
    beyond its storage: what torch refuses is refused."""
    save = copy(variant)
    contents = contents_of(save)
    path, content, places = optimizer_of(save)
    whole, wrong = path.read_bytes(), []
    for what, holder, key in places:
        old = holder[key]
        # A length that no other tensor of the file has, to find it by.
        size = old.numel()
        holder[key] = torch.cat([old.reshape(-1), old.reshape(-1)[:1]])[:-1].reshape(old.shape)
        replace(path, content)
        holder[key] = old
        kept = mutants.records(path.read_bytes())
        path.unlink()
        spoil(kept, size + 1, old.element_size(), change)
        mutants.write(path, kept)
        problem = outcome(save, variant, path, contents)
        if problem:
            wrong.append((what, problem))
        path.unlink()
        path.write_bytes(whole)
    assert not wrong, wrong


def spoil(kept, elements, width, change):
    """Change the storage of this many elements in a torch file's records."""
    name, = (n for n, data in kept.items() if '/data/' in n and len(data) == elements * width)
    if change == 'record_shorter':
        kept[name] = kept[name][:-2 * width]
    elif change == 'record_longer':
        kept[name] += bytes(width)
    else:  # the tensor begins two elements before the storage's end
        pickle = kept[mutants.one(kept, 'data.pkl')]
        ends = [begin for begin, _, size in mutants.numbers(pickle, False) if size == elements]
        begin, end, _ = next(n for n in mutants.numbers(pickle, True) if n[0] > ends[0])
        kept[mutants.one(kept, 'data.pkl')] = (
            pickle[:begin] + b'J' + struct.pack('<i', elements - 2) + pickle[end:])


@pytest.mark.parametrize('variant', [v for v in SHARDED if v not in LONE])
@pytest.mark.parametrize('first', [True, False])
def test_a_step_that_a_rank_lacks_is_refused(copy, variant, first):
    save = copy(variant)
    path = optimizer_files(save)[0 if first else -1]
    content = load(path)
    states = states_of(content)
    if 'step' not in states:
        return
    del states['step']
    replace(path, content)
    refused(save, "'step'")


@pytest.mark.parametrize('variant', ['zero2', 'zero2_frozen', 'zero3', 'stage0', 'pp2_untied',
                                     'moe'])
@pytest.mark.parametrize('what', ['weight', 'buffer'])
@pytest.mark.parametrize('other', OTHERS)
def test_weights_and_buffers_that_are_no_plain_tensors(copy, variant, what, other):
    """They are refused: left out, a weight would be shown as its master's cast, and a buffer
    not at all."""
    save = copy(variant)
    for path in only(tag_of(save), '.pt'):
        content = load(path)
        module = content.get('module', content)
        if 'optim' in path.name or not module or UNREAD.match(path.name):
            continue
        name = next((k for k, v in module.items() if isinstance(v, torch.Tensor)
                     and v.is_floating_point() and v.numel() > 1
                     and (what == 'buffer') == k.endswith(('.inv_freq', '.tally.mean'))), None)
        if name is None:
            continue
        module[name] = OTHERS[other](module[name].clone())
        replace(path, content)
        refused(save, path.name)
        return
    # At stage 3 a weight is stored as its master only.
    assert (variant, what) == ('zero3', 'weight')


def test_a_module_dict_of_another_making(copy):
    """OrderedDict([...]) is called with its items; all of them are read."""
    class Made(dict):
        def __reduce__(self):
            import collections
            return collections.OrderedDict, ([list(i) for i in self.items()],)
    save = copy('zero2_frozen')
    path = only(tag_of(save), 'model_states')[0]
    before, _ = atoms(save)
    content = load(path)
    content['module'] = Made(content['module'])
    replace(path, content)
    after, error = atoms(save)
    assert after is not None, error
    assert before.keys() == after.keys()


@pytest.mark.parametrize('degree', [2**32 + 1, -1, 2**20 + 1])
def test_degrees_that_no_run_has(copy, degree):
    save = copy('zero2')
    path = only(tag_of(save), 'model_states')[0]
    content = load(path)
    content['checkpoint_parallel_dimensions'] = {'tp_degree': degree, 'pp_degree': 1}
    replace(path, content)
    refused(save, 'tp_degree')


@pytest.mark.parametrize('kind', ['exp_avg', 'exp_avg_sq', 'fp32'])
def test_a_universal_shape_that_contradicts(tmp_path, kind):
    """A transposed tensor against param_shapes."""
    tag = tmp_path / 'run' / 'global_step5'
    folder = tag / 'zero' / 'a.weight'
    folder.mkdir(parents=True)
    torch.save({'dp_world_size': 1, 'mp_world_size': 1, 'global_steps': 5, 'module': {},
                'buffer_names': [], 'param_shapes': [{'a.weight': torch.Size([4, 6])}],
                'universal_checkpoint_info': {'universal_checkpoint_version': 0.2}},
               tag / 'mp_rank_00_model_states.pt')
    torch.save({'param_groups': [{'lr': 1.0, 'params': [0]}]}, tag / 'zero' / 'optimizer_state.pt')

    def write(wrong):
        for name in ('fp32', 'exp_avg', 'exp_avg_sq'):
            shape = (6, 4) if name == wrong else (4, 6)
            torch.save({'param': torch.rand(shape), 'cat_dim': 0}, folder / f'{name}.pt')
    write('')
    steps, error = index(str(tmp_path / 'run'))
    assert steps, error
    write(kind)
    refused(tmp_path / 'run', f'{kind}.pt', 'fp32.pt')
