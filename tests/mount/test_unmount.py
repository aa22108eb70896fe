# SPDX-License-Identifier: Apache-2.0
"""A mount ends while something of it is still at work."""
import json
import os
import signal
import struct
import subprocess

from daemon import BIN, wait_until


def sparse_model(folder, gib=1):
    """A step that takes a moment to copy: one tensor of zeros."""
    size = gib << 30
    header = json.dumps({'w': {'dtype': 'F32', 'shape': [size // 4], 'data_offsets': [0, size]}}).encode()
    header += b' ' * (-len(header) % 8)
    folder.mkdir(parents=True)
    with open(folder / 'model.safetensors', 'wb') as f:
        f.write(struct.pack('<Q', len(header)) + header)
        f.truncate(8 + len(header) + size)
    (folder / 'config.json').write_text('{"model_type": "x"}')
    (folder / 'trainer_state.json').write_text('{"global_step": 2}')


def test_a_copy_that_goes_on_when_nothing_is_mounted_any_more(ckptfs, tmp_path):
    job = tmp_path / 'job'
    job.mkdir()
    process, mount = ckptfs.start('--follow', '--copy', job)
    sparse_model(tmp_path / 'made' / 'checkpoint-2')
    os.rename(tmp_path / 'made' / 'checkpoint-2', job / 'checkpoint-2')
    copies = os.path.join(ckptfs.store, 'blobs')
    wait_until(lambda: any('.partial-' in name for name in os.listdir(copies)), 'the copy', process)
    ckptfs.umount(mount)
    assert process.wait(60) == 0
    assert [step['id'] for step in ckptfs.list()['steps']] == ['checkpoint-2']


def test_started_by_somebody_who_ignores_children(ckptfs, source):
    mount = ckptfs.mountpoint()
    subprocess.run([BIN, 'mount', '--store', ckptfs.store, '--adopt', str(source), *ckptfs.reserve, mount], check=True,
                   preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert os.listdir(f'{mount}/view')
