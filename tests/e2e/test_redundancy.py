# SPDX-License-Identifier: Apache-2.0
"""`ckptfs redundancy` of real checkpoints, against sums over what torch.load finds in their files."""
import json
import os
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from daemon import checkpoint, truth_of

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'formats', 'deepspeed'))

from shards import Shards  # noqa: E402
from tiny_model import kind_of  # noqa: E402

UNIT = 64 << 10
KINDS = ('weight', 'master', 'exp_avg', 'exp_avg_sq')


def truth_tensor(truth, kind, name):
    """The live engine's tensor: fixtures call the masters the model."""
    if f'buffer/{name}' in truth:
        return truth[f'buffer/{name}']
    return truth[f"{'model' if kind == 'master' else kind}/{name}"]


def raw(tensor):
    """Its bytes, a row per element."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(len(flat), flat.element_size()) if len(flat) else flat.reshape(0, 1)


def contents_of(variant):
    """What torch.load gives, by file name, and the fixture's notes."""
    folder = checkpoint(variant)
    with open(os.path.join(folder, 'latest')) as f:
        tag = os.path.join(folder, f.read().strip())
    with open(os.path.join(os.path.dirname(folder), 'meta.json')) as f:
        meta = json.load(f)
    return {name: torch.load(os.path.join(tag, name), weights_only=False)
            for name in os.listdir(tag) if name.endswith('.pt')}, meta


def copies_of(contents, meta):
    """{(kind, name): [(tensor, file of each element)]} of a stage 1 or 2 engine's ranks: what each holds of a parameter."""
    shards = Shards(contents, meta)
    copies = {}
    for mp in range(shards.tp):
        model = f'mp_rank_{mp:02d}_model_states.pt'
        for name, tensor in contents[model]['module'].items():
            copies.setdefault(('weight', name), []).append((tensor, [model] * tensor.numel()))
        for g, group in enumerate(contents[model]['param_shapes']):
            names = {int(re.search(r'pp_rank_(\d+)', f)[1]): f for f in contents if f'_mp_rank_{mp:02d}_optim' in f}
            for kind, parts in shards.partitions(mp, g):
                if parts[0].dim() == 0:
                    continue
                whole = torch.cat(parts)
                files = [names[rank] for rank, part in enumerate(parts) for _ in range(len(part))]
                at = 0
                for name, shape in group.items():
                    size = shape.numel()
                    copies.setdefault((kind, name), []).append((whole[at:at + size], files[at:at + size]))
                    at += size
    return copies, shards


def expected(copies):
    """stored, unique, {holders: bytes} of replicas, unit by unit."""
    width = copies[0][0].element_size()
    bytes_of = [raw(tensor) for tensor, _ in copies]
    files_of = [files for _, files in copies]
    size, held, begin = len(files_of[0]), {}, 0
    while begin < size:
        end = min(size, (begin * width // UNIT + 1) * UNIT // width)
        for files in files_of:
            end = next((i for i in range(begin, end) if files[i] != files[begin]), end)
        alike = {}
        for data, files in zip(bytes_of, files_of):
            alike.setdefault(bytes(data[begin:end].reshape(-1).tolist()), set()).add(files[begin])
        for holders in alike.values():
            held[frozenset(holders)] = held.get(frozenset(holders), 0) + (end - begin) * width
        begin = end
    return size * width * len(copies), sum(held.values()), held


@pytest.mark.parametrize('variant', ['tp2', 'zero2_tied'])
def test_classes_are_those_of_the_files(ckptfs, variant):
    ckptfs.adopt_variant(variant)
    told = json.loads(ckptfs.run('redundancy', variant, '--json', '--store', ckptfs.store).stdout)
    copies, shards = copies_of(*contents_of(variant))
    truth = load_file(truth_of(variant))
    tensors = {(t['kind'], t['name']): t for t in told['tensors']}
    files = {kind: {f for (k, _), held in copies.items() if k == kind for _, of in held for f in of} for kind in KINDS}
    sums = {kind: [0, 0, {'full': 0, 'partial': 0, 'none': 0}] for kind in KINDS}
    replicas = 0
    for (kind, name), held in copies.items():
        if kind not in KINDS or (kind, name) not in tensors:
            continue  # a second name of a tied weight
        told_of = tensors[kind, name]
        if len(held) > 1 and kind_of(name, shards.dims)[0] != 'rep':
            whole = truth_tensor(truth, kind, name)  # cut over the ranks
            stored = unique = whole.numel() * held[0][0].element_size()
            by_holders = {frozenset('x'): unique}
        else:
            stored, unique, by_holders = expected(held)
            replicas += len(held) > 1
        sizes = {len(h) for h in by_holders}
        every = len(files[kind])
        sharing = 'full' if sizes == {every} and every > 1 else 'none' if sizes == {1} else 'partial'
        assert (told_of['stored'], told_of['unique'], told_of['sharing'], told_of['holders']) == (
            stored, unique, sharing, [min(sizes), max(sizes)]), (kind, name)
        sums[kind][0] += stored
        sums[kind][1] += unique
        sums[kind][2][sharing] += 1
    assert (replicas > 0) == (shards.tp > 1)
    for one in told['classes']:
        if one['class'] in KINDS:
            assert [one['stored'], one['unique'], one['tensors']] == sums[one['class']], one['class']
            assert one['files'] == len(files[one['class']]) and one['differing'] == 0
    assert sum(f['keeps'] for f in told['files']) == sum(t['unique'] for t in told['tensors'])
    assert sum(f['stored'] for f in told['files']) == sum(t['stored'] for t in told['tensors'])
    for one in told['tensors']:  # who keeps what is shared, and nobody anything twice
        assert sum(k['bytes'] for k in one['keeps']) <= one['unique']
        assert bool(one['keeps']) == (one['sharing'] != 'none')


def test_experts_are_not_merged(ckptfs):
    """Expert parallelism: each expert is one rank's; equal bytes are those that are equal in the truth."""
    ckptfs.adopt_variant('moe')
    told = json.loads(ckptfs.run('redundancy', 'moe', '--json', '--store', ckptfs.store).stdout)
    truth = load_file(truth_of('moe'))
    experts = [t for t in told['tensors'] if 'deepspeed_experts' in t['name']]
    assert len(experts) > 12
    for one in told['tensors']:
        assert one['sharing'] == 'none' and one['stored'] == one['unique'], one
    alike = {}
    for one in told['tensors']:
        tensor = truth_tensor(truth, one['kind'], one['name'])
        assert one['unique'] == tensor.numel() * tensor.element_size(), one
        key = (tensor.dtype, bytes(raw(tensor).reshape(-1).tolist()))
        alike.setdefault(key, set()).add((one['kind'], one['name']))
    assert {frozenset((t['kind'], t['name']) for t in g['tensors']) for g in told['equal_bytes']} == {
        frozenset(group) for group in alike.values() if len(group) > 1}


def test_an_adapter_leaves_its_base_unchanged(ckptfs, tmp_path):
    """Three saves of a model of which 1 % is trained: by torch's own comparison, unit by unit."""
    torch.manual_seed(3)
    model = {'base.weight': torch.randn(300, 256), 'base.bias': torch.zeros(300), 'lora_A': torch.randn(4, 256),
             'table': torch.randn(64, 512)}
    saves = []
    for step in range(3):
        folder = tmp_path / f'step{step}'
        folder.mkdir()
        model = {name: tensor.clone() for name, tensor in model.items()}
        model['lora_A'] += 1
        model['table'][step] += 1  # rows of one unit of two
        save_file(model, folder / 'model.safetensors')
        saves.append((str(folder), model))
    words = [w for folder, _ in saves[1:] for w in ('--across', folder)]
    told = json.loads(ckptfs.run('redundancy', saves[0][0], *words, '--json').stdout)['across']
    assert [(t['before'], t['step']) for t in told] == [(saves[0][0], saves[1][0]), (saves[1][0], saves[2][0])]
    for i, pair in enumerate(told):
        for one in pair['tensors']:
            before, after = raw(saves[i][1][one['name']]), raw(saves[i + 1][1][one['name']])
            rows = UNIT // after.shape[1]
            same = sum(after[r:r + rows].numel() for r in range(0, len(after), rows)
                       if torch.equal(after[r:r + rows], before[r:r + rows]))
            assert one['bytes'] == after.numel() and one['unchanged'] == same, one
            assert one['since'] == ('unchanged' if same == after.numel() else 'partly' if same else 'changed')
        assert {t['name']: t['since'] for t in pair['tensors']} == {
            'base.weight': 'unchanged', 'base.bias': 'unchanged', 'lora_A': 'changed', 'table': 'partly'}
    # All steps of a run, by its name.
    for folder, _ in saves:
        ckptfs.adopt(folder, 'lora')
    of_run = json.loads(ckptfs.run('redundancy', 'lora', '--across', 'all', '--json', '--store', ckptfs.store).stdout)
    assert [[t['unchanged'] for t in pair['tensors']] for pair in of_run['across']] == [
        [t['unchanged'] for t in pair['tensors']] for pair in told]
    text = ckptfs.run('redundancy', 'lora', '--across', 'all', '--tensors', '--store', ckptfs.store).stdout
    assert re.search(r'table +weight +partly +128', text) and text.count(' since ') == 2
