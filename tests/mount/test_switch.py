# SPDX-License-Identifier: Apache-2.0
"""`ckptfs switch` and `remove` have been heard when they return."""
import os
import shutil
import threading

ROUNDS = 20


def test_the_view_is_the_new_one_at_once(ckptfs, source, tmp_path):
    other = shutil.copytree(source, tmp_path / 'other')
    mount = ckptfs.mount(adopt=[source, other])
    done = threading.Event()

    def look():
        while not done.is_set():
            for name in ('run7', 'other', 'nothing'):
                os.path.exists(f'{mount}/view/dp1/rank0/{name}')
    # Somebody walks there all the time, so that the names are being asked for.
    walkers = [threading.Thread(target=look) for _ in range(3)]
    for walker in walkers:
        walker.start()
    try:
        for n in range(ROUNDS):
            run = ('run7', 'other')[n % 2]
            ckptfs.run('switch', f'{run}/latest', '--store', ckptfs.store)
            assert os.readlink(f'{mount}/view').startswith(f'run/{run}/'), n
    finally:
        done.set()
        for walker in walkers:
            walker.join()


def test_a_removed_step_is_gone_at_once(ckptfs, source):
    mount = ckptfs.mount(adopt=[source])
    tag = os.listdir(f'{mount}/run/run7/step')[0]
    for _ in range(ROUNDS // 2):
        assert os.path.exists(f'{mount}/run/run7/step/{tag}/info.json')
        ckptfs.run('remove', '--force', f'run7/{tag}', '--store', ckptfs.store)
        assert not os.path.exists(f'{mount}/run/run7/step/{tag}')
        ckptfs.adopt(source, 'run7')
