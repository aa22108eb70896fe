# SPDX-License-Identifier: Apache-2.0
"""What the 1,000th step of a store costs, against the 10th."""
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
            what, tenth, thousandth = line.split()
            times[what].append((float(tenth), float(thousandth)))
    rows = []
    for what, said in (('publish', 'publish the 1,000th step, against the 10th'),
                       ('refresh', 'a mount takes it in')):
        tenth = statistics.median(t for t, _ in times[what])
        thousandth = statistics.median(t for _, t in times[what])
        ratio = thousandth / tenth
        rows.append(Row('publish', said, f'{thousandth / 1000:.2f} ms',
                        f'{tenth / 1000:.2f} ms', f'{ratio:.2f}x', '<= 1.2x',
                        ratio <= 1.2))
    return rows
