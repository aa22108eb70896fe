# SPDX-License-Identifier: Apache-2.0
"""The view dcp/: torch.distributed.checkpoint.load at another mesh through a mount and from the
plain directory that it shows, which torch reshards; and a view of 3.5 million chunks, listed."""
import os
import shutil
import statistics
import subprocess
import tempfile
import time

import daemon
import dcp_loads
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import huge
from context import absolute_row, clock, ratio_row, warm
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

SAVED, LOADED = 4, (2, 3)  # shards
WIDTH, LAYERS = 1280, 13   # 64 M parameters with two states each: 0.77 GB
LAYOUT = 'dp{}'


class Layer(torch.nn.Module):
    """Norm and MLP of a decoder, as far as shapes go."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 3 * WIDTH // 2, bias=False)
        self.down = torch.nn.Linear(3 * WIDTH // 2, WIDTH)


class Net(torch.nn.Module):
    """Layers of them."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))


def load_of(shards):
    """FSDP2 on so many ranks."""
    return dcp_loads.Load(f'fsdp{shards}', Net, lambda model: torch.optim.AdamW(model.parameters()))


def asked_by(load):
    """Returns what a rank asks for."""
    dist.init_process_group('gloo')
    torch.set_num_threads(1)
    model, _, _ = dcp_loads.spread(load.model(), load)
    return dcp_loads.wanted(model, load.optimizer(model), load)


def local_parts(asked):
    """This rank's memory of every tensor."""
    return [v.to_local() if isinstance(v, DTensor) else v
            for v in flatten_state_dict(asked)[0].values() if isinstance(v, torch.Tensor)]


def save_worker(path, load, _):
    """One rank: values that are not zeros, saved by torch."""
    asked = asked_by(load)
    for part in local_parts(asked):
        part.detach().uniform_(0, 1) if part.is_floating_point() else None
    dcp.save(asked, checkpoint_id=path)
    dist.destroy_process_group()


def load_worker(paths, load, out):
    """One rank: for each path in turn the seconds of the slowest, and bytes read for each that
    all ranks got, beside `.metadata`."""
    asked = asked_by(load)
    parts = local_parts(asked)
    delivered = sum(p.numel() * p.element_size() for p in parts)
    found = []
    for path in paths:
        for part in parts:
            part.detach().zero_()
        dist.barrier()
        before, begin = dcp_loads.bytes_read(), time.perf_counter()
        dcp.load(asked, checkpoint_id=path)
        dist.barrier()
        took = time.perf_counter() - begin
        read = dcp_loads.bytes_read() - before - os.path.getsize(os.path.join(path, '.metadata'))
        totals = torch.tensor([read, delivered, sum(float(p.double().sum()) for p in parts)],
                              dtype=torch.float64)
        dist.all_reduce(totals)
        found.append((took, float(totals[0] / totals[1]), float(totals[2])))
    if dist.get_rank() == 0:
        torch.save(found, out)
    dist.destroy_process_group()


def loads(context):
    """A load from a new mount, and again, beside loads of the plain directory by the same
    processes."""
    plain = context.path('dcp_plain', 'step-1')
    if not os.path.exists(os.path.join(plain, '.metadata')):
        shutil.rmtree(plain, ignore_errors=True)
        dcp_loads.run(plain, load_of(SAVED), save_worker, result=False)
    warm(plain)
    rows = []
    for shards in LOADED:
        ours, again, theirs, ratios = [], [], [], []
        for number in range(max(3, context.repeat)):
            with context.mounted(plain) as (mount, _):
                context.settle(mount)
                view = os.path.join(mount, 'view', LAYOUT.format(shards), 'dcp')
                order = [plain, view, view, plain] if number % 2 else [view, plain, plain, view]
                found = dcp_loads.run(order, load_of(shards), load_worker)
            assert len({total for _, _, total in found}) == 1, found  # the same values
            first = [one for path, one in zip(order, found) if path == view]
            ours.append(first[0][0])
            again.append(first[1][0])
            ratios.append(first[0][1])
            theirs += [took for path, (took, _, _) in zip(order, found) if path == plain]
        stock = statistics.median(theirs)
        what = f'dcp.load on {shards} ranks of what {SAVED} saved'
        rows += [ratio_row('dcp_view', f'{what}: from a new mount, against torch\'s own reshard',
                           statistics.median(ours), stock, 1.1),
                 ratio_row('dcp_view', f'{what}: again', statistics.median(again), stock, 1.1),
                 absolute_row('dcp_view', f'{what}: bytes read for each delivered',
                              max(ratios), 'x', 1.1)]
    return rows


def length_of(path):
    """Returns the length of a file that is read to its end; opening it counts."""
    with open(path, 'rb') as f:
        return sum(iter(lambda: len(f.read(1 << 20)), 0))


def listing(context):
    """The listing, and reading all of `.metadata`."""
    folder = tempfile.mkdtemp(prefix='dcp', dir=context.work)
    program = daemon.Ckptfs(folder)
    try:
        program.adopt(huge.source(context), 'huge', extra=('--pack', 'never'))
        _, mount = program.start('--run', 'huge')
        view = os.path.join(mount, 'view', f'dp{huge.RANKS}', 'dcp')
        took, done = clock(lambda: subprocess.run(['ls', '-la', view], capture_output=True,
                                                  check=True))
        assert done.stdout.count(b'.distcp') == huge.RANKS
        size = os.path.getsize(os.path.join(view, '.metadata'))
        read, length = clock(lambda: length_of(os.path.join(view, '.metadata')))
        assert length == size
    finally:
        program.close()
        shutil.rmtree(folder, ignore_errors=True)
    return [absolute_row('dcp_view', 'ls -la of 1T parameters on 1,024 ranks: 3.5 million chunks, '
                         f'{size / 1e6:.0f} MB of .metadata', took, 's', 2),
            absolute_row('dcp_view', 'reading that .metadata', read, 's', 10)]


def run(context):
    """All rows."""
    return loads(context) + listing(context)
