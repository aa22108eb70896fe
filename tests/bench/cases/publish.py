# SPDX-License-Identifier: Apache-2.0
"""The cost of the 1,000th step of a store, against the 10th."""
import os
import statistics
import subprocess

from context import Row


def run(context):
    """Rows: publishing, and what a mount does to take the step in."""
    program = os.path.join(os.path.dirname(os.environ['CKPTFS_BIN']),
                           'publish_bench')
    times = {'publish': [], 'refresh': []}
    for _ in range(min(context.repeat, 3)):
        done = subprocess.run([program, context.work], check=True,
                              capture_output=True, text=True)
        for line in done.stdout.splitlines():
            what, *values = line.split()
            times[what].append([float(value) for value in values])
    rows = []
    for what, said in (('publish', 'publish the 1,000th step, against the 10th'),
                       ('refresh', 'a mount takes it in')):
        tenth, thousandth, first, last = (statistics.median(column)
                                          for column in zip(*times[what]))
        ratio = thousandth / tenth
        rows.append(Row('publish', said, f'{thousandth / 1000:.2f} ms',
                        f'{tenth / 1000:.2f} ms', f'{ratio:.2f}x', '<= 1.2x', ratio <= 1.2))
        rows.append(Row('publish', said + ', processor time', f'{last / 1000:.2f} ms',
                        f'{first / 1000:.2f} ms', f'{last / first:.2f}x', '', True))
    return rows
