# SPDX-License-Identifier: Apache-2.0
"""Saves of a CUDA device's memory while the host runs ahead of the device: every step is what the
device had when save was called, or is dropped with a reason.  Without a device only what the memory for
them is foreseen to be."""
import threading
import time

import ckptfs as snapshots
import pytest
import torch
from ckptfs.collector import TorchCollector
from test_save_options import receive

on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')
DIM, LAYERS = 1024, 6


@pytest.mark.parametrize('make', [
    lambda p: torch.optim.AdamW(p), lambda p: torch.optim.Adam(p, amsgrad=True),
    lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    lambda p: torch.optim.RMSprop(p, momentum=0.1, centered=True), lambda p: torch.optim.Adagrad(p),
    lambda p: torch.optim.NAdam(p), lambda p: torch.optim.Adadelta(p)])
def test_a_saves_size_is_foreseen(ckptfs, make):
    net = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600), torch.nn.Linear(600, 600))
    net[2].bias.requires_grad_(False)
    optimizer = make(net.parameters())
    collector = TorchCollector([net], [optimizer])
    with snapshots.Snapshotter(net, optimizer, run='job', store=ckptfs.store) as snap:
        foreseen = snap.size()['file_bytes'] * collector.growth()
        net(torch.ones(2, 600)).sum().backward()
        optimizer.step()
        size = snap.size()['file_bytes']
        assert size * 0.99 < foreseen * 1.01 and foreseen < size * 1.02
        assert collector.growth() == 1


def test_another_optimizer_foretells_nothing():
    net = torch.nn.Linear(10, 10)

    class Mine(torch.optim.Optimizer):
        """Nobody knows what its first step makes."""

        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            """Nothing."""

    assert TorchCollector([net], [Mine(net.parameters())]).growth() == 0


class Job:
    """A training on the device, and clones of what it saved that the device made itself."""

    def __init__(self, ckptfs, **options):
        receive(ckptfs)
        torch.manual_seed(0)
        self.store, self.truths = ckptfs.store, {}
        self.net = torch.nn.Sequential(*[part for _ in range(LAYERS) for part in (
            torch.nn.Linear(DIM, DIM), torch.nn.BatchNorm1d(DIM))]).cuda()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-4, capturable=True)
        self.data = torch.randn(256, DIM, device='cuda')
        self.snap = snapshots.Snapshotter(self.net, self.optimizer, run='job', store=ckptfs.store, **options)
        self.update()

    def update(self):
        """An iteration."""
        self.net(self.data).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def clone(self):
        """Returns what the device has once it has come so far."""
        found = {('weight', name): value.clone() for name, value in self.net.state_dict().items()}
        for name, parameter in self.net.named_parameters():
            for kind, value in self.optimizer.state[parameter].items():
                found[kind, name] = value.clone()
        return found

    def save(self, step):
        """True if it was taken."""
        clone = self.clone()
        taken = self.snap.save(step)
        if taken:
            self.truths[step] = clone
        return taken

    def ready(self):
        """Until the memory is page-locked, so that devices wait."""
        end = time.monotonic() + 60
        while self.snap.status()['pinned_bytes'] < self.snap.status()['arena_bytes']:
            assert time.monotonic() < end
            time.sleep(0.01)

    def check(self, least):
        """Every step that became durable is the truth."""
        torch.cuda.synchronize()
        durable = [step for step in self.truths if self.snap.wait_durable(step, 60)]
        assert len(durable) >= least, self.snap.status()
        assert self.snap.status()['unproved'] == 0
        for step in durable:
            with snapshots.SavedStep(f'ckptfs://{self.store}/job/{step}') as saved:
                model = saved.model()
                states = saved.optimizer(named=True)['state']
            for (kind, name), value in self.truths[step].items():
                found = model[name] if kind == 'weight' else torch.as_tensor(states[name][kind])
                assert torch.equal(found.reshape(value.shape), value.cpu()), (step, kind, name)
        self.snap.close()


@on_device
def test_the_host_runs_ahead(ckptfs):
    job = Job(ckptfs, slots=6)
    job.ready()
    for step in range(12):
        job.save(step)
        job.update()
        if step % 5 == 4:
            job.update()
    job.check(least=4)


@on_device
def test_updates_on_streams_of_their_own(ckptfs):
    job = Job(ckptfs, full='wait')
    streams = [torch.cuda.Stream() for _ in range(3)]
    for step in range(9):
        stream = streams[step % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            job.update()
            job.save(step)
            job.update()
        torch.cuda.current_stream().wait_stream(stream)
    job.check(least=9)


@on_device
def test_a_graph_with_an_update_is_replayed(ckptfs):
    job = Job(ckptfs, full='wait')
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        job.update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.update()
    for step in range(6):
        graph.replay()
        job.save(step)
        graph.replay()
    job.check(least=6)


@on_device
def test_another_thread_captures_graphs(ckptfs):
    job = Job(ckptfs, full='wait')
    stop, captured = threading.Event(), []
    given = torch.randn(64, 64, device='cuda')

    def capture():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode='thread_local')
                held = given @ given
                time.sleep(0.002)
                captured.append((held + given).shape)
                graph.capture_end()

    torch.cuda.synchronize()
    thread = threading.Thread(target=capture)
    thread.start()
    try:
        for step in range(8):
            job.update()
            job.save(step)
    finally:
        stop.set()
        thread.join()
    assert captured
    job.check(least=8)
