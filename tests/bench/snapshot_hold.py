# SPDX-License-Identifier: Apache-2.0
"""Saves one step and keeps it until the input ends.

Usage: snapshot_hold.py STORE PARAMETERS
"""
import sys

import ckptfs
import snapshot_trainer as shape
from snapshot_job import make

net, optimizer = make(float(sys.argv[2]))
snap = ckptfs.Snapshotter(net, optimizer, run='job', store=sys.argv[1],
                          documents={'args': {'num_attention_heads': shape.HEADS}})
assert snap.save(0), snap.status()
snap.close()
print('saved', flush=True)
sys.stdin.read()
