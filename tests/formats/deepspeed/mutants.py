# SPDX-License-Identifier: Apache-2.0
"""Changes to a torch file that leave it one, or nearly.

Each takes (rng, the file's bytes, where to write) and says what it did; nothing
if the file has no place for it, and then nothing is written.  The first ones
change what is saved, the others the zip and its pickle as they lie.
"""
import io
import pickletools
import struct
import zipfile

import torch


def tensors(value, path=()):
    """(container, key, path) of every tensor with more than four elements."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        if isinstance(child, torch.Tensor):
            if child.numel() > 4 and child.is_floating_point():
                yield value, key, path + (key,)
        elif isinstance(child, (dict, list)):
            yield from tensors(child, path + (key,))


def in_place_of(change, name):
    """A mutant that saves another tensor in place of one; `change`: (rng, the
    tensor, all of the file's) -> tensor or None."""
    def mutant(rng, whole, path):
        content = torch.load(io.BytesIO(whole), weights_only=False)
        places = list(tensors(content))
        if not places:
            return None
        holder, key, where = rng.choice(places)
        others = [h[k].detach() for h, k, _ in places if h[k] is not holder[key]]
        changed = change(rng, holder[key].detach(), others)
        if changed is None:
            return None
        holder[key] = changed
        torch.save(content, path)
        return '/'.join(map(str, where))
    mutant.__name__ = name
    return mutant


def expanded(rng, t, others):
    """Every element the first: stride 0."""
    return t.reshape(-1)[:1].expand(t.numel()) if t.dim() == 1 else t[:1].expand_as(t)


def every_second(rng, t, others):
    """Stride 2."""
    return torch.cat([t, t.flip(-1)], -1)[..., ::2]


def transposed(rng, t, others):
    """Column-major; a flat one as the columns of a matrix."""
    if t.dim() > 1:
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    return t.repeat_interleave(3).reshape(-1, 3)[:, 1]


def shifted(rng, t, others):
    """From the middle of a larger storage."""
    return torch.cat([t.reshape(-1), t.reshape(-1)])[3:3 + t.numel()].reshape(t.shape)


def another(rng, t, others):
    """Another tensor of the file, whose storage both have now."""
    fits = [o for o in others if o.shape == t.shape]
    return rng.choice(fits) if fits else None


def part_of_another(rng, t, others):
    """A piece of another tensor's storage."""
    fits = [o for o in others if o.numel() > t.numel() and o.is_contiguous()]
    if not fits:
        return None
    other = rng.choice(fits)
    at = rng.randrange(other.numel() - t.numel())
    return other.reshape(-1)[at:at + t.numel()].reshape(t.shape)


def other_type(rng, t, others):
    types = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32]
    return t.to(rng.choice([d for d in types if d != t.dtype]))


def reshaped(rng, t, others):
    """The same elements in another shape."""
    return t.reshape(1, -1) if t.dim() == 1 else t.reshape(t.shape[1:] + t.shape[:1])


def exchanged(rng, whole, path):
    """Two tensors of one shape in each other's place."""
    content = torch.load(io.BytesIO(whole), weights_only=False)
    places = list(tensors(content))
    rng.shuffle(places)
    for i, (a, ka, where) in enumerate(places):
        for b, kb, other in places[i + 1:]:
            if a[ka].shape == b[kb].shape and a[ka].dtype == b[kb].dtype:
                a[ka], b[kb] = b[kb], a[ka]
                torch.save(content, path)
                return f'{where} and {other}'
    return None


# ---- the zip and its pickle as they lie


def records(whole):
    """{name: bytes} in order."""
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        return {i.filename: archive.read(i) for i in archive.infolist()}


def write(path, kept, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, 'w', method) as archive:
        for name, data in kept.items():
            archive.writestr(name, data)


def one(kept, end):
    """The record of this name below the archive's folder."""
    return next(n for n in kept if n.split('/', 1)[1] == end)


def storages(kept):
    """Records of storages that hold more than a few bytes."""
    return sorted(n for n, data in kept.items() if '/data/' in n and len(data) > 16)


def numbers(pickle, behind):
    """(begin, end, value) of the numbers of storages' elements in a pickle, or of
    the offsets into them that stand behind."""
    ops = [(op.name, arg, at) for op, arg, at in pickletools.genops(pickle)]
    ends = [at for _, _, at in ops[1:]] + [len(pickle)]
    for i, (name, _, _) in enumerate(ops):
        if name != 'BINPERSID':
            continue
        at = i + 1 if behind else i - 1
        while not ops[at][0].startswith('BININT'):
            at += 1 if behind else -1
        yield ops[at][2], ends[at], ops[at][1]


def with_number(name, behind, change):
    """A mutant that changes one such number."""
    def mutant(rng, whole, path):
        kept = records(whole)
        pickle = kept[one(kept, 'data.pkl')]
        places = [n for n in numbers(pickle, behind) if behind or n[2] > 4]
        if not places:
            return None
        begin, end, value = rng.choice(places)
        new = change(value)
        kept[one(kept, 'data.pkl')] = (pickle[:begin] + b'J' + struct.pack('<i', new)
                                       + pickle[end:])
        write(path, kept)
        return f'{value} -> {new}'
    mutant.__name__ = name
    return mutant


def of_type(old, new):
    """A mutant that names another class for all storages of one."""
    def mutant(rng, whole, path):
        kept = records(whole)
        pickle = kept[one(kept, 'data.pkl')]
        before, after = (b'ctorch\n' + n.encode() + b'Storage\n' for n in (old, new))
        if before not in pickle:
            return None
        kept[one(kept, 'data.pkl')] = pickle.replace(before, after)
        write(path, kept)
        return f'{old} -> {new}'
    mutant.__name__ = f'{old}_as_{new}'.lower()
    return mutant


def byte_order(text):
    """A mutant whose byteorder record says `text`, or is gone."""
    def mutant(rng, whole, path):
        kept = records(whole)
        if text is None:
            del kept[one(kept, 'byteorder')]
        else:
            kept[one(kept, 'byteorder')] = text
        write(path, kept)
        return str(text)
    mutant.__name__ = f'byteorder_{text and text.decode()}'
    return mutant


def swapped_records(rng, whole, path):
    """The bytes of two storages in each other's record."""
    kept = records(whole)
    names = storages(kept)
    if len(names) < 2:
        return None
    a, b = rng.sample(names, 2)
    kept[a], kept[b] = kept[b], kept[a]
    write(path, kept)
    return f'{a} {b}'


def on_record(change):
    """A mutant that changes the records so that one storage's is another."""
    def mutant(rng, whole, path):
        kept = records(whole)
        names = storages(kept)
        if not names:
            return None
        name = rng.choice(names)
        change(rng, kept, name)
        write(path, kept)
        return name
    mutant.__name__ = change.__name__
    return mutant


@on_record
def cut_record(rng, kept, name):
    kept[name] = kept[name][:-rng.choice((1, 4, 16))]


@on_record
def longer_record(rng, kept, name):
    kept[name] += b'\1' * rng.choice((1, 4, 64))


@on_record
def missing_record(_, kept, name):
    del kept[name]


def written_anew(rng, whole, path):
    """By another program: nothing is aligned."""
    write(path, records(whole))
    return 'stored'


def compressed(rng, whole, path):
    write(path, records(whole), zipfile.ZIP_DEFLATED)
    return 'deflated'


ALL = [*(in_place_of(change, change.__name__) for change in (
            expanded, every_second, transposed, shifted, another, part_of_another, other_type,
            reshaped)),
       exchanged, swapped_records, cut_record, longer_record, missing_record, written_anew,
       compressed,
       with_number('fewer_elements', False, lambda n: n - 1),
       with_number('more_elements', False, lambda n: n + 5),
       with_number('offset_moved', True, lambda n: n + 1),
       with_number('offset_outside', True, lambda n: n + 2**28),
       with_number('offset_negative', True, lambda n: -1),
       of_type('Float', 'Int'), of_type('Float', 'Half'), of_type('Float', 'Double'),
       of_type('BFloat16', 'Half'), of_type('BFloat16', 'Float'),
       byte_order(b'big'), byte_order(b'middle'), byte_order(None)]
