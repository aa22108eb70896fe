# SPDX-License-Identifier: Apache-2.0
"""Sources that cannot be mapped, 20 ms away behind 200 MB/s (far_bench.cc)."""
import os
import subprocess

from context import Row


# A file larger than the cache, which fetches it for each rank anew, has no bound.
UNBOUNDED = "8 ranks' columns, one after the other"


def run(_context):
    """A row per way of reading: time, fetched bytes, bytes fetched twice."""
    tool = os.path.join(os.path.dirname(os.environ['CKPTFS_BIN']), 'far_bench')
    done = subprocess.run([tool], capture_output=True, text=True, check=True)
    rows = []
    for line in done.stdout.splitlines()[1:]:
        what, (took, _, ratio, distinct, asked, most, flying) = line[:44].strip(), line[44:].split()
        free = what == UNBOUNDED
        good = float(ratio.rstrip('x')) <= 1.3 and float(distinct) <= 1.1 and most == '1'
        rows.append(Row('far', f'{what} ({flying} requests at a time at most)',
                        f'{took} s', 'the distinct source bytes on that line',
                        f'{ratio}, fetched {distinct}x, {asked}x of what is shown',
                        '' if free else '<= 1.3x, 1.1x, none twice', free or good))
    return rows
