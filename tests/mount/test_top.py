# SPDX-License-Identifier: Apache-2.0
"""`ckptfs top`: rates between two looks, for people and for programs."""
import json
import subprocess
import threading
import time

from daemon import BIN


def read_for(path, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with open(path, 'rb') as f:
            f.read()


def test_rates_between_two_looks(ckptfs, source):
    mount = ckptfs.mount('--mode', 'stream', adopt=[source])
    path = f'{mount}/view/dp2_zero1/rank0/model.safetensors'
    reader = threading.Thread(target=read_for, args=(path, 3))
    reader.start()
    top, = json.loads(ckptfs.run('top', '--once', '--json', '--interval', '1', '--store', ckptfs.store).stdout)
    reader.join()
    assert top['mountpoint'] == mount and 0.5 < top['seconds'] < 30
    assert top['rates']['opens']['stream'] > 0 == top['rates']['opens']['direct']
    assert top['now']['open_files'] <= 1
    text = ckptfs.run('top', '--once', '--interval', '0.1', '--store', ckptfs.store).stdout
    lines = text.splitlines()
    assert lines[0].startswith(f'{mount}: pid ') and '/view -> /run/run7' in lines[0]
    assert [line.split()[0] for line in lines[1:5]] == ['reads', 'opens', 'cache', 'indexes'] or 'cache' not in text
    assert '\x1b' not in text  # not a terminal


def test_it_goes_on_until_its_reader_goes(ckptfs, source):
    ckptfs.mount(adopt=[source])
    top = subprocess.Popen([BIN, 'top', '--json', '--interval', '0.1', '--store', ckptfs.store],
                           stdout=subprocess.PIPE, text=True)
    looks = [json.loads(top.stdout.readline()) for _ in range(3)]
    assert all(look[0]['rates'] is not None for look in looks)
    top.stdout.close()
    assert top.wait(20) is not None


def test_without_a_mount(ckptfs):
    done = ckptfs.run('top', '--once', '--store', ckptfs.store, check=False)
    assert done.returncode == 3 and 'no live mount' in done.stderr
    for wrong in ('0', 'x', '1e9', '-1'):
        assert ckptfs.run('top', '--interval', wrong, check=False).returncode == 2
