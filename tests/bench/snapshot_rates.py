# SPDX-License-Identifier: Apache-2.0
"""Saves when it is told to, with nothing beside it.

Usage: snapshot_rates.py STORE PARAMETERS

Each line of the input is a number of steps to save, one right behind the other; the answer is
[BYTES, SECONDS] until all of them are durable.
"""
import json
import sys
import time

from snapshot_job import Job

job = Job('ckptfs, waiting', sys.argv[1], float(sys.argv[2]), 'cpu')
snap = job.saver.snap
for line in sys.stdin:
    start = time.perf_counter()
    for _ in range(int(line)):
        job.save()
        # No update waits: then memory is copied before any of it is handed over.
        while snap.progress(job.step - 1)['copied'] < snap.status()['file_bytes']:
            assert not snap.status()['dropped'], snap.status()['last_drop']
            time.sleep(0.002)
    job.saver.drain()
    seconds = time.perf_counter() - start
    print(json.dumps([int(line) * snap.status()['file_bytes'], seconds]), flush=True)
snap.close()
