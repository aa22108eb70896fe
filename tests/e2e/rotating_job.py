# SPDX-License-Identifier: Apache-2.0
"""A job that saves as transformers' Trainer does, and whose retention removes old steps.

Usage: rotating_job.py OUTPUT TRUTH SAVES SECONDS LIMIT

Saves checkpoint-N every SECONDS, SAVES times, its files in the Trainer's order; then the Trainer's
own rotation leaves LIMIT of them.  TRUTH/N.safetensors is a copy that was made before the save.
Every fifth save dies before its last file; for a moment that is empty in every second, and half
written in every third.
"""
import json
import os
import sys
import time

import torch
from safetensors.torch import save_file
from transformers.trainer_utils import rotate_checkpoints

DIES = 5


def save(output, truth, number):
    """One step: weights, optimizer, and, unless the save dies, the Trainer's state."""
    weights = {f'layers.{i}.weight': torch.randn(64, 256) for i in range(8)}
    save_file(weights, os.path.join(truth, f'{number}.safetensors'))
    folder = os.path.join(output, f'checkpoint-{number}')
    os.makedirs(folder)
    save_file(weights, os.path.join(folder, 'model.safetensors'), metadata={'format': 'pt'})
    torch.save({}, os.path.join(folder, 'training_args.bin'))
    torch.save({'state': {}, 'param_groups': []}, os.path.join(folder, 'optimizer.pt'))
    torch.save({'cpu': torch.get_rng_state()}, os.path.join(folder, 'rng_state.pth'))
    if number % DIES:
        with open(os.path.join(folder, 'trainer_state.json'), 'w', encoding='utf-8') as f:
            if number % 2:  # whoever looks finds it empty
                time.sleep(0.5)
            f.write('{')
            if number % 3 == 0:  # or half written
                f.flush()
                time.sleep(0.5)
            f.write(json.dumps({'global_step': number})[1:])


def main():
    """Save, rotate, sleep."""
    output, truth = sys.argv[1:3]
    saves, seconds, limit = int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    torch.manual_seed(0)
    os.makedirs(output, exist_ok=True)
    for number in range(1, saves + 1):
        end = time.monotonic() + seconds
        save(output, truth, number)
        rotate_checkpoints(output_dir=output, save_total_limit=limit, use_mtime=True)
        print(number, flush=True)
        time.sleep(max(0.0, end - time.monotonic()))


if __name__ == '__main__':
    main()
