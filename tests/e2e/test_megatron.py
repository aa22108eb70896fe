# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core saves by our strategy: the step holds what Megatron's own checkpoint of that
moment does, and Megatron loads either the same."""
import os
import sys

import torch
from daemon import run_ranks, step_of, wait_until
from gathered import assert_equal, gathered

HERE = os.path.dirname(os.path.abspath(__file__))
STATE = 'optimizer.state.'
KINDS = ('plain', 'distributed', 'stages', 'replicas', 'shards', 'buckets', 'experts')


def key_of(name):
    """How a rank file names what Megatron's files hold under a key."""
    if not name.startswith(STATE):
        return name
    kind, _, parameter = name[len(STATE):].partition('.')
    return f"{'master' if kind in ('param', 'fp32_param') else kind}/{parameter}"


def test_two_ranks(ckptfs, tmp_path):
    _, mount = ckptfs.start()
    wait_until(lambda: 'snapshots' in ckptfs.run('status', '--store', ckptfs.store, '--json').stdout,
               'the receiver')
    said = run_ranks(
        [[sys.executable, '-W', 'ignore', '-c', 'import megatron_trainer as job; job.main()',
          str(tmp_path), ckptfs.store, str(rank), '2'] for rank in range(2)],
        tmp_path / 'log', 800, cwd=HERE)
    for kind in KINDS:
        compared = [line.split()[2] for line in said.splitlines() if f'compared {kind}' in line]
        assert len(compared) == 4 and min(map(int, compared)) > 30, said
        for step in '12':
            truth = torch.load(tmp_path / f'truth-{kind}-{step}.pt')
            view = os.path.join(step_of(mount, kind, step), 'view', 'tp1')
            assert_equal(gathered(view, 1), {key_of(k): v for k, v in truth.items()
                                             if isinstance(v, torch.Tensor)})
    assert said.count('fallback [] 7') == 2, said
