# SPDX-License-Identifier: Apache-2.0
"""`ckptfs redundancy` on the command line: text, pictures, large files, Ctrl-C, files that change."""
import json
import os
import resource
import signal
import struct
import subprocess
import time

from daemon import BIN
from test_map import png


def safetensors(path, tensors, fill=True):
    """Writes {name: (shape, bytes)} as fp32; without `fill` {name: (shape, size)}, a file of one hole."""
    header, at = {}, 0
    for name, (shape, data) in tensors.items():
        size = len(data) if fill else data
        header[name] = {'dtype': 'F32', 'shape': shape, 'data_offsets': [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(path, 'wb') as f:
        f.write(struct.pack('<Q', len(text)) + text)
        for _, data in tensors.values() if fill else ():
            f.write(data)
        f.truncate(8 + len(text) + at)


def test_equal_bytes_are_told_apart(ckptfs, tmp_path):
    noise = os.urandom(4000)
    folder = tmp_path / 'model'
    folder.mkdir()
    safetensors(folder / 'model.safetensors', {
        'embed.weight': ([1000], noise), 'head.weight': ([10, 100], noise), 'other.weight': ([1000], os.urandom(4000)),
        'a.bias': ([8], bytes(32)), 'b.bias': ([8], bytes(32)), 'c.norm': ([8], struct.pack('<8f', *[1] * 8))})
    told = json.loads(ckptfs.run('redundancy', folder, '--json').stdout)
    groups = [(g['bytes'], g['constant'], [t['name'] for t in g['tensors']]) for g in told['equal_bytes']]
    assert groups == [(4000, False, ['embed.weight', 'head.weight']), (32, True, ['a.bias', 'b.bias'])]
    weights, = [c for c in told['classes'] if c['class'] == 'weight']
    assert weights['redundant'] == 0 and weights['tensors'] == {'full': 0, 'partial': 0, 'none': 6}
    text = ckptfs.run('redundancy', folder).stdout
    assert 'from which nothing follows' in text and '2 tensors of 32 B, each element the same: a.bias' in text


def test_pictures(ckptfs, source, store):
    ckptfs.adopt(source)
    svg, picture = ckptfs.folder + '/r.svg', ckptfs.folder + '/r.png'
    assert ckptfs.run('redundancy', 'run7', '--output', svg, *store).stdout == ''
    ckptfs.run('redundancy', 'run7', '--output', picture, *store)
    with open(svg) as f:
        drawn = f.read()
    assert drawn.startswith('<svg') and 'exp_avg_sq' in drawn and 'optim_states' in drawn
    width, height, rows = png(picture)
    assert f'width="{width}" height="{height}"' in drawn
    assert len({row[3 * x:3 * x + 3] for row in rows[::5] for x in range(0, width, 3)}) >= 3
    ckptfs.run('redundancy', 'run7', '--across', 'run7', '--output', svg, *store)
    with open(svg) as f:
        assert 'since the step before' in f.read()
    assert ckptfs.run('redundancy', 'run7', '--output', 'x.jpg', *store, check=False).returncode == 2


def test_all_needs_two_steps_of_a_run(ckptfs, source, store):
    ckptfs.adopt(source)
    done = ckptfs.run('redundancy', 'run7', '--across', 'all', *store, check=False)
    assert done.returncode == 2 and "run 'run7' has one step: there is nothing to compare it with" in done.stderr
    done = ckptfs.run('redundancy', 'no_run', '--across', 'all', *store, check=False)
    assert done.returncode in (2, 3) and 'no_run' in done.stderr


def large(folder):
    """Two equal tensors of 1 GiB, in a file of one hole."""
    folder.mkdir()
    size = 1 << 30
    safetensors(folder / 'model.safetensors', {'a': ([size // 4], size), 'b': ([size // 4], size)}, fill=False)
    return folder


def test_memory_is_bounded(ckptfs, tmp_path):
    """2 GiB are read in 192 MiB of data."""
    folder = large(tmp_path / 'large')
    limit = 192 << 20
    done = subprocess.run([BIN, 'redundancy', str(folder), '--json', '--threads', '2'], capture_output=True, text=True,
                          timeout=120, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told['bytes_read'] > 2 << 30
    assert [(g['constant'], len(g['tensors'])) for g in told['equal_bytes']] == [(True, 2)]


def test_ctrl_c_leaves_nothing(ckptfs, tmp_path):
    folder = large(tmp_path / 'large')
    before = sorted(os.listdir(tmp_path)), os.stat(folder / 'model.safetensors')
    process = subprocess.Popen([BIN, 'redundancy', str(folder), '--output', str(tmp_path / 'r.svg'), '--threads', '1'],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    maps = f'/proc/{process.pid}/maps'
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        with open(maps) as f:
            if 'model.safetensors' in f.read():
                break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and out == '' and 'ckptfs:' not in err
    after = sorted(os.listdir(tmp_path)), os.stat(folder / 'model.safetensors')
    assert before[0] == after[0] and before[1].st_mtime_ns == after[1].st_mtime_ns


def test_a_file_that_changed_is_named(ckptfs, source, store):
    ckptfs.adopt(source)
    path = source / 'global_step3' / 'bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt'
    with open(path, 'ab') as f:
        f.write(b'x')
    done = ckptfs.run('redundancy', 'run7', *store, check=False)
    assert done.returncode == 5 and path.name in done.stderr
    os.unlink(path)
    done = ckptfs.run('redundancy', 'run7', *store, check=False)
    assert done.returncode == 3 and path.name in done.stderr
