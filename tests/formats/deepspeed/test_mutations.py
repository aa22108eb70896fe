# SPDX-License-Identifier: Apache-2.0
"""Real checkpoints with one thing changed: read as torch reads them, or refused.

Two kinds of change.  A tensor becomes a view with the strides or the offset of
another: what is read must equal what is read when torch itself has made that
view contiguous.  Or a file begins to contradict itself or its neighbours: it
must be refused, and by name.  Seeded; CKPTFS_FIXTURES and CKPTFS_MODEL_TOOL
as in test_truth.py.
"""
import os
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file

from test_truth import FIXTURES, VARIANTS, index, only, tag_of

VIEWS_PER_VARIANT = 3


def expanded(t):
    """Every element the first: stride 0."""
    return t.reshape(-1)[:1].expand(t.numel()) if t.dim() == 1 else t[:1].expand_as(t)


def every_second(t):
    """Stride 2."""
    return torch.cat([t, t.flip(-1)], -1)[..., ::2]


def transposed(t):
    """Column-major; a flat one as the columns of a matrix."""
    if t.dim() > 1:
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    return t.repeat_interleave(3).reshape(-1, 3)[:, 1]


def shifted(t):
    """From the middle of a larger storage."""
    return torch.cat([t.reshape(-1), t.reshape(-1)])[3:3 + t.numel()].reshape(t.shape)


VIEWS = [expanded, every_second, transposed, shifted]
# Torch's own forms of tensors that are no plain runs of elements.
OTHERS = [torch._neg_view, lambda t: t.to_sparse(),
          lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)]


def tensors(value, path=()):
    """(container, key, path) of every tensor with more than four elements."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        if isinstance(child, torch.Tensor):
            if child.numel() > 4 and child.is_floating_point():
                yield value, key, path + (key,)
        elif isinstance(child, (dict, list)):
            yield from tensors(child, path + (key,))


def load(path):
    return torch.load(path, weights_only=False)


@pytest.fixture
def copy(tmp_path):
    """A variant's save directory of links; replace a file, never write into it."""
    def make(variant, name='copy'):
        target = tmp_path / name
        shutil.copytree(f'{FIXTURES}/{variant}/ckpt', target, copy_function=os.link,
                        ignore=shutil.ignore_patterns('*_universal'))
        return target
    return make


def replace(path, content):
    path.unlink()
    torch.save(content, path)


def atoms(save):
    """All atoms, or None and the error."""
    out = str(save) + '.safetensors'
    steps, error = index(str(save), '--step', 'global_step5', '--extract', out)
    return (load_file(out) if steps else None), error


def refused(save, *words):
    steps, error = index(str(save))
    assert steps is None, f'accepted, though {words}'
    assert any(w in error for w in words), error


@pytest.mark.parametrize('variant', VARIANTS)
def test_views_are_read_as_torch_reads_them(copy, variant, tmp_path):
    rng = random.Random(variant)
    save = copy(variant)
    files = [p for p in only(tag_of(save), '.pt')]
    for case in range(VIEWS_PER_VARIANT):
        path = rng.choice(files)
        content = load(path)
        places = list(tensors(content))
        if not places:
            continue
        holder, key, where = rng.choice(places)
        view = rng.choice(VIEWS)
        changed = view(holder[key].detach())
        whole = path.read_bytes()
        holder[key] = changed
        replace(path, content)
        ours, error = atoms(save)
        holder[key] = changed.clone(memory_format=torch.contiguous_format)
        replace(path, content)
        wanted, _ = atoms(save)
        path.unlink()
        path.write_bytes(whole)
        if ours is None:
            assert path.name in error or str(where[-1]) in error, error
            continue
        assert wanted is not None, (path.name, where, view.__name__)
        assert ours.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(ours[name].view(torch.uint8) if tensor.dim() else ours[name],
                               tensor.view(torch.uint8) if tensor.dim() else tensor), (
                path.name, where, view.__name__, name)


def optimizer_files(save):
    return [p for p in only(tag_of(save), 'optim_states') if p.suffix == '.pt']


def states_of(content):
    """The state dict of the first partition of a ZeRO file."""
    zero = content['optimizer_state_dict']
    base = zero.get('optimizer_state_dict', zero.get('base_optimizer_state'))
    states = base['state'] if isinstance(base, dict) else base
    return states[0]


SHARDED = [v for v in VARIANTS if not v.startswith('stage0')]
LONE = ('pp2_untied', 'tp2_pp2')  # dp 1: a group has one rank


@pytest.mark.parametrize('variant', SHARDED)
@pytest.mark.parametrize('change', ['longer', 'shorter', 'negated', 'missing', 'missing_first',
                                    'expanded'])
def test_flat_states_that_contradict_are_refused(copy, variant, change):
    save = copy(variant)
    path = optimizer_files(save)[0 if change == 'missing_first' else -1]
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
    refused(save, path.name, kind)


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


@pytest.mark.parametrize('variant', ['zero2', 'zero2_frozen', 'stage0', 'pp2_untied', 'moe'])
@pytest.mark.parametrize('other', range(len(OTHERS)))
def test_weights_and_buffers_that_are_no_plain_tensors(copy, variant, other):
    save = copy(variant)
    files = [p for p in only(tag_of(save), '.pt') if 'optim' not in p.name]
    for path in files:
        content = load(path)
        module = content.get('module') if 'module' in content else content
        names = [k for k, v in (module or {}).items()
                 if isinstance(v, torch.Tensor) and v.is_floating_point() and v.numel() > 4]
        if not names:
            continue
        whole = path.read_bytes()
        module[names[-1]] = OTHERS[other](module[names[-1]].clone())
        replace(path, content)
        refused(save, path.name)
        path.unlink()
        path.write_bytes(whole)
        break


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
