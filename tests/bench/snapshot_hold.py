# SPDX-License-Identifier: Apache-2.0
"""Saves one step, weights and Adam's states, and keeps it until the input ends.

Usage: snapshot_hold.py STORE PARAMETERS
"""
import sys

import ckptfs
import snapshot_trainer as shape
import torch
from snapshot_job import make

net, optimizer = make(float(sys.argv[2]))
for parameter in net.parameters():
    parameter.grad = torch.zeros_like(parameter)
optimizer.step()
optimizer.zero_grad()
snap = ckptfs.Snapshotter(net, optimizer, run='job', store=sys.argv[1],
                          documents={'args': {'num_attention_heads': shape.HEADS}})
assert snap.save(0), snap.status()
snap.close()
print('saved', flush=True)
sys.stdin.read()
