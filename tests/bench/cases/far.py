# SPDX-License-Identifier: Apache-2.0
"""Sources that cannot be mapped, 20 ms away behind 200 MB/s (far_bench.cc)."""
import os
import subprocess

from context import Row


def run(_context):
    """A row per way of reading: time, fetched bytes, bytes fetched twice."""
    tool = os.path.join(os.path.dirname(os.environ['CKPTFS_BIN']), 'far_bench')
    done = subprocess.run([tool], capture_output=True, text=True, check=True)
    rows = []
    for line in done.stdout.splitlines()[1:]:
        what, (took, _, ratio, fetched, most, flying) = line[:44].strip(), line[44:].split()
        ratio, fetched = float(ratio.rstrip('x')), float(fetched)
        rows.append(Row('far', f'{what} ({flying} requests at a time at most)',
                        f'{took} s', 'the distinct source bytes on that line',
                        f'{ratio:.2f}x, fetched {fetched:.3f}x', '<= 1.3x, 1.1x, none twice',
                        ratio <= 1.3 and fetched <= 1.1 and most == '1'))
    return rows
