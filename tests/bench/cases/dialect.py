# SPDX-License-Identifier: Apache-2.0
"""A step of DeepSeek-V3's sizes under other names: 44,544 matrices of experts."""
import os
import statistics
import subprocess

from context import Row, absolute_row


def run(context):
    """Rows: processor time, and the memory that the translated step takes."""
    program = os.path.join(os.path.dirname(os.environ['CKPTFS_BIN']), 'dialect_bench')
    times, sizes = {}, {}
    for _ in range(min(context.repeat, 3)):
        done = subprocess.run([program], check=True, capture_output=True, text=True)
        for line in done.stdout.splitlines():
            what, shards, took, size = line.split()
            times.setdefault((what, shards), []).append(float(took) / 1000)
            sizes.setdefault((what, shards), []).append(float(size))
    rows = []
    for (what, shards), took in times.items():
        said = f'{what} of DeepSeek-V3 shown as {"modules" if what == "files" else "files"}, {shards} shards a tensor'
        rows.append(absolute_row('dialect', said, statistics.median(took), 's', 2))
        size = statistics.median(sizes[what, shards])
        rows.append(Row('dialect', said + ', memory', f'{size:.0f} MB', '', f'{size:.0f}', '<= 300 MB', size <= 300))
    return rows
