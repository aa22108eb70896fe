# SPDX-License-Identifier: Apache-2.0
"""Random reads from many threads, by pread and by mmap, equal an export.

The export is made by the program without a mount, so that the kernel's and
the daemon's caches, splits and races have something to be compared with.
"""
import mmap
import os
import random
import threading

import pytest

from daemon import Ckptfs, checkpoint, step_of

THREADS = 64
VIEW = 'tp2_dp2_zero1'


@pytest.fixture(scope='module')
def both(tmp_path_factory):
    """(view in a mount, the same view exported)."""
    folder = tmp_path_factory.mktemp('reads')
    program = Ckptfs(str(folder))
    program.adopt(checkpoint('zero2_rr'), 'rr')
    mount = program.mount()
    dest = str(folder / 'export')
    program.run('export', 'rr/global_step5', VIEW, dest, '--store',
                program.store)
    yield os.path.join(step_of(mount, 'rr'), 'view', VIEW), dest
    program.close()


def files(root):
    """{relative path: content} of the regular files below root."""
    out = {}
    for base, _, names in os.walk(root):
        for name in names:
            path = os.path.join(base, name)
            if not os.path.islink(path):
                with open(path, 'rb') as f:
                    out[os.path.relpath(path, root)] = f.read()
    return out


def pread_some(view, want, names, rng, errors):
    """Random ranges of random files, as one thread reads them."""
    handles = {n: os.open(os.path.join(view, n), os.O_RDONLY) for n in names}
    for _ in range(120):
        name = rng.choice(names)
        size = len(want[name])
        offset = rng.randrange(size + 10)
        length = rng.choice((1, 7, 512, 4096, 5000, 100_000))
        got = os.pread(handles[name], length, offset)
        if got != want[name][offset:offset + length]:
            errors.append((name, offset, length))
    for handle in handles.values():
        os.close(handle)


def mmap_some(view, want, names, rng, errors):
    """The same through a mapping."""
    for name in names:
        if not want[name]:
            continue
        with open(os.path.join(view, name), 'rb') as f:
            with mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
                for _ in range(20):
                    offset = rng.randrange(len(want[name]))
                    length = rng.choice((1, 300, 9000))
                    if m[offset:offset + length] != want[name][
                            offset:offset + length]:
                        errors.append((name, offset, length))


@pytest.mark.parametrize('way', [pread_some, mmap_some])
def test_many_threads_read_what_an_export_holds(both, way):
    view, dest = both
    want = files(dest)
    assert len(want) > 50
    errors, threads = [], []
    for number in range(THREADS):
        rng = random.Random(number)
        names = rng.sample(sorted(want), 8)
        threads.append(threading.Thread(
            target=way, args=(view, want, names, rng, errors)))
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors[:5]


def test_the_mount_holds_the_exported_files(both):
    view, dest = both
    shown = files(view)
    del shown['info.json']  # says what the layout is; no format's file
    assert shown == files(dest)
