# SPDX-License-Identifier: Apache-2.0
"""A frozen base beside a small head (as LoRA has it): what did not change is written once, and no
removal of an older step, collection, damage or second job takes it away unseen."""
import os

import ckptfs as library
import torch
from daemon import wait_until
from test_retention import blob_folders, gc
from torch import nn

SIZE = 512


class Job:
    """A training whose steps are saved and remembered."""

    def __init__(self, store, run, dtype=torch.float32):
        torch.manual_seed(len(run))
        self.model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False),
                                   nn.Linear(SIZE, 4, bias=False)).to(dtype)
        for one in self.model[:2].parameters():
            one.requires_grad = False
        self.optimizer = torch.optim.AdamW(self.model[2].parameters(), lr=1e-2)
        self.snap = library.Snapshotter(self.model, self.optimizer, run=run, store=store)
        self.store, self.run, self.truths = store, run, {}

    def step(self, number):
        """Trains and saves one step; returns the bytes of the run's newest file."""
        self.model(torch.randn(2, SIZE).to(self.model[0].weight.dtype)).float().square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.truths[number] = {k: v.clone() for k, v in self.model.state_dict().items()}
        assert self.snap.save(number) and self.snap.wait_durable(number, 60)
        return self.snap.status()['file_bytes']

    def check(self, *numbers):
        """These steps hold what the model held."""
        for number in numbers:
            with library.SavedStep(f'ckptfs://{self.store}/{self.run}/{number}') as saved:
                found = saved.model()
            for name, value in self.truths[number].items():
                assert found[name].dtype == value.dtype and torch.equal(found[name], value), (number, name)


def test_a_frozen_base_is_written_once(ckptfs):
    ckptfs.start()
    wait_until(lambda: 'snapshots' in ckptfs.run('status', '--store', ckptfs.store, '--json').stdout,
               'the receiver')
    job, other = Job(ckptfs.store, 'lora'), Job(ckptfs.store, 'second', torch.bfloat16)
    first = job.step(1)
    assert first > 2 * SIZE * SIZE * 4 and other.step(1) > 2 * SIZE * SIZE * 2
    assert job.step(2) < first // 20 and other.step(2) < first // 20
    with torch.no_grad():
        job.model[0].weight[SIZE // 2] += 1  # a part of the base
    assert first // 20 < job.step(3) < first * 3 // 4
    assert job.step(4) < first // 20
    job.check(1, 2, 3, 4)
    other.check(1, 2)
    # Steps 2 to 4 need files of steps 1 and 3, whoever removes these.
    for number in (1, 3):
        ckptfs.run('remove', '--force', '--store', ckptfs.store, f'lora/{number}')
    gc(ckptfs)
    job.check(2, 4)
    assert job.step(5) < first // 20
    job.check(5)
    ckptfs.run('verify', '--store', ckptfs.store, 'lora/5')
    kept = [os.path.join(base, name) for base, _, names in os.walk(os.path.join(ckptfs.store, 'blobs'))
            for name in names if os.path.getsize(os.path.join(base, name)) > first // 3]
    assert len(kept) == 3, kept  # steps 1 and 3 of one run, step 1 of the other
    for number in (2, 4, 5):
        ckptfs.run('remove', '--force', '--store', ckptfs.store, f'lora/{number}')
    gc(ckptfs)
    wait_until(lambda: len(blob_folders(ckptfs)) == 2, 'the blobs to go')
    other.check(1, 2)
    # What step 6 points into has gone: it is dropped, and step 7 is whole.
    assert not (job.snap.save(6) and job.snap.wait_durable(6, 60))
    assert job.step(7) > first // 2
    job.check(7)
    job.snap.close()
    other.snap.close()


def test_damage_of_an_older_file_is_every_steps_damage(ckptfs):
    ckptfs.start()
    wait_until(lambda: 'snapshots' in ckptfs.run('status', '--store', ckptfs.store, '--json').stdout,
               'the receiver')
    job = Job(ckptfs.store, 'lora')
    job.step(1)
    job.step(2)
    job.snap.close()
    large = [os.path.join(base, name) for base, _, names in os.walk(os.path.join(ckptfs.store, 'blobs'))
             for name in names if os.path.getsize(os.path.join(base, name)) > SIZE * SIZE]
    assert len(large) == 1
    with open(large[0], 'r+b') as file:
        file.seek(SIZE * SIZE * 2)
        file.write(b'damage')
    done = ckptfs.run('verify', '--store', ckptfs.store, 'lora/2', check=False)
    assert done.returncode != 0 and 'rank-00000' in done.stdout + done.stderr, done


def test_a_compacted_step_needs_no_other(ckptfs):
    ckptfs.start()
    wait_until(lambda: 'snapshots' in ckptfs.run('status', '--store', ckptfs.store, '--json').stdout,
               'the receiver')
    job = Job(ckptfs.store, 'lora')
    for number in (1, 2, 3):
        job.step(number)
    # All its tensors are whole, and the store's: they stay where they are, shared with other steps.
    said = ckptfs.run('compact', '--store', ckptfs.store, 'lora/2').stdout
    assert 'nothing to do' in said and 'stay where they are' in said
    job.check(1, 2, 3)
