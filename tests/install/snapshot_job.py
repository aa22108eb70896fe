# SPDX-License-Identifier: Apache-2.0
"""A tiny job.  `snapshot_job.py save STORE` trains and saves by a snapshot, `resume` goes on
from it in another process, by the program that the wheel brought; both have one result."""
import sys

import ckptfs
import torch

STEPS = 3


def job():
    """A model, its optimizer, and a step of training."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number):
        generator = torch.Generator().manual_seed(number)
        loss = model(torch.randn(16, 256, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()
    return model, optimizer, step


def main(part, store):
    """Saves after three steps, or goes on from them; compares with a run that never stopped."""
    model, optimizer, step = job()
    if part == 'save':
        snap = ckptfs.Snapshotter(model, optimizer, run='job', store=store)
        for number in range(STEPS):
            step(number)
        assert snap.save(STEPS), 'not saved'
        assert snap.wait_durable(STEPS), 'not durable'
        return
    with ckptfs.SavedStep(f'ckptfs://{store}/job/{STEPS}') as saved:
        model.load_state_dict(saved.model())
        optimizer.load_state_dict(saved.optimizer())
    went_on = [step(number) for number in range(STEPS, STEPS + 3)]
    _, _, step = job()
    never_stopped = [step(number) for number in range(STEPS + 3)][STEPS:]
    assert went_on == never_stopped, f'{went_on} after the resume, {never_stopped} without a stop'
    print(f'losses after the resume are those of a run that never stopped: {went_on}')


if __name__ == '__main__':
    main(*sys.argv[1:])
