# SPDX-License-Identifier: Apache-2.0
"""Makes bad checkpoints out of a good one, a byte at a time."""
import os
import pickle
import shutil
import struct
import zipfile

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..',
                      'golden', 'deepspeed_tiny', 'ckpt')
TAG = 'global_step3'
MODEL = 'mp_rank_00_model_states.pt'
LOCAL, CENTRAL, END = b'PK\3\4', b'PK\1\2', b'PK\5\6'


def zero_file(rank):
    """Name of a rank's optimizer file."""
    return f'bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt'


def copy_of_golden(folder):
    """A checkpoint of one's own to damage; returns its save directory."""
    path = os.path.join(folder, 'bad')
    shutil.copytree(GOLDEN, path)
    return path


def inside(save_dir, name):
    """A file of the checkpoint's one tag."""
    return os.path.join(save_dir, TAG, name)


def boundaries(path):
    """Offsets in a zip file at which one structure ends and another begins."""
    with open(path, 'rb') as f:
        data = f.read()
    cuts = {0, 1, len(data) - 1}
    with zipfile.ZipFile(path) as z:
        for entry in z.infolist():
            head = entry.header_offset
            names = struct.unpack_from('<HH', data, head + 26)
            start = head + 30 + sum(names)
            cuts |= {head, head + 30, start, start + entry.compress_size}
        central = z.start_dir
    cuts |= {central, central + 46, data.rindex(END), data.rindex(END) + 8}
    return sorted(c for c in cuts if c < len(data))


def truncate(path, size):
    """Cut a file off."""
    with open(path, 'r+b') as f:
        f.truncate(size)


def flip(path, offset, bit):
    """Invert one bit."""
    with open(path, 'r+b') as f:
        f.seek(offset)
        byte = f.read(1)[0] ^ (1 << bit)
        f.seek(offset)
        f.write(bytes([byte]))


def pickle_extent(path):
    """[begin, end) of data.pkl in a torch file."""
    return extent(path, 'data.pkl')


def extent(path, needle):
    """[begin, end) of the record of a torch file whose name ends so."""
    with zipfile.ZipFile(path) as z:
        entry = next(e for e in z.infolist() if e.filename.endswith(needle))
    with open(path, 'rb') as f:
        f.seek(entry.header_offset + 26)
        names = struct.unpack('<HH', f.read(4))
    begin = entry.header_offset + 30 + sum(names)
    return begin, begin + entry.file_size


def largest(path):
    """Name of the largest record, '/data/N'."""
    with zipfile.ZipFile(path) as z:
        entry = max(z.infolist(), key=lambda e: e.file_size)
    return entry.filename[entry.filename.index('/'):]


def rewrite(path, change):
    """Write a torch file again; change({entry name: bytes}) edits it."""
    with zipfile.ZipFile(path) as z:
        entries = {n: z.read(n) for n in z.namelist()}
    entries = change(entries) or entries
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_STORED) as z:
        for name, data in entries.items():
            z.writestr(name, data)


def with_pickle(path, data):
    """Replace a torch file's data.pkl."""
    def change(entries):
        name = next(n for n in entries if n.endswith('data.pkl'))
        entries[name] = data
    rewrite(path, change)


class Command:
    """Pickles as a call of os.system."""

    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        return os.system, (self.text,)


def call_pickle(text, inner=False):
    """A pickle that calls os.system when it is loaded."""
    value = Command(text)
    return pickle.dumps({'iteration': value} if inner else value, 2)


def deep_pickle(depth):
    """Lists in lists, `depth` of them."""
    return b'\x80\x02' + b']' * depth + b'a' * (depth - 1) + b'.'


def bomb_pickle(levels):
    """A tree of `levels` pairs of the pair below: it prints 2**levels long."""
    text = b'\x80\x02Nq\x00'
    for level in range(levels):
        text += b'0h' + bytes([level]) + b'h' + bytes([level])
        text += b'\x86q' + bytes([level + 1])
    return text + b'.'


def patch_entry(path, needle, field, value, width):
    """Overwrite a field of the central directory entry of an archive member.

    field: its offset inside the 46-byte entry header.
    """
    with open(path, 'r+b') as f:
        data = f.read()
        at = data.find(CENTRAL)
        while at >= 0:
            size = struct.unpack_from('<HHH', data, at + 28)
            name = data[at + 46:at + 46 + size[0]]
            if name.endswith(needle):
                f.seek(at + field)
                f.write(value.to_bytes(width, 'little'))
                return
            at = data.find(CENTRAL, at + 46 + sum(size))
    raise AssertionError(f'no member {needle!r} in {path}')


def entry_field(path, needle, field, width):
    """Read what patch_entry writes."""
    with open(path, 'rb') as f:
        data = f.read()
    at = data.find(CENTRAL)
    while at >= 0:
        size = struct.unpack_from('<HHH', data, at + 28)
        if data[at + 46:at + 46 + size[0]].endswith(needle):
            return int.from_bytes(data[at + field:at + field + width], 'little')
        at = data.find(CENTRAL, at + 46 + sum(size))
    raise AssertionError(f'no member {needle!r} in {path}')
