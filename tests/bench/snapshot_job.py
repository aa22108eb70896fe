# SPDX-License-Identifier: Apache-2.0
"""A training job that saves: one of the sides of the snapshot case.

Usage: snapshot_job.py SIDE OUT PARAMETERS ITERATIONS DEVICE

SIDE is one of SIDES below.  OUT is the store (ckptfs) or the directory that it saves
into.  Trains without saving, saving every iteration, saving every tenth; prints one
JSON object of seconds.
"""
import json
import os
import shutil
import statistics
import sys
import tempfile
import time

import snapshot_trainer as shape
import torch
from torch import nn

KEPT = 2  # directories of the stock ways that are left on disk
REDUCED = 1 << 26  # elements of four bytes that a collective beside a save is of


def make(parameters, device='cpu'):
    """A model of about that many parameters, and its Adam."""
    if parameters >= 50e6:
        shape.HIDDEN, shape.HEADS, shape.MLP, shape.VOCAB = 1024, 16, 2816, 32000
    layer = 4 * shape.HIDDEN ** 2 + 3 * shape.HIDDEN * shape.MLP
    ends = 2 * shape.VOCAB * shape.HIDDEN
    shape.LAYERS = max(1, -(-int(parameters - ends) // layer))
    net = shape.Net().to(device)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)


def state_of(net, optimizer):
    """Returns what every side saves."""
    return {'model': dict(net.state_dict()), 'optimizer': optimizer.state_dict(),
            'args': {'num_attention_heads': shape.HEADS}}


class Nothing:
    """Training alone."""

    def __init__(self, out, net, optimizer):
        self.out, self.net, self.optimizer = out, net, optimizer
        self.blocked, self.saves, self.folders = 0.0, 0, []

    def save(self, step):
        """Nothing to do."""

    def before_update(self):
        """Before the optimizer's step."""

    def backward(self, loss):
        """Gradients."""
        loss.backward()

    def update(self):
        """An optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drain(self):
        """All that was begun is on its way to disk or there."""

    def close(self):
        """The end."""

    def folder(self, step):
        """A new directory; older ones go."""
        self.folders.append(os.path.join(self.out, str(step)))
        while len(self.folders) > KEPT:
            shutil.rmtree(self.folders.pop(0), ignore_errors=True)
        os.makedirs(self.folders[-1])
        return self.folders[-1]


class TorchSave(Nothing):
    """torch.save, which returns when the kernel has the bytes."""

    def save(self, step):
        path = os.path.join(self.folder(step), 'all.pt')
        torch.save(state_of(self.net, self.optimizer), path)


class AsyncSave(Nothing):
    """dcp.async_save; the one before has to be done first."""
    stager = None

    def __init__(self, *args):
        super().__init__(*args)
        torch.distributed.init_process_group(
            'gloo', init_method=f'file://{self.out}/rendezvous', rank=0, world_size=1)
        self.future = None

    def save(self, step):
        import torch.distributed.checkpoint as dcp
        self.drain()
        self.future = dcp.async_save(
            state_of(self.net, self.optimizer), checkpoint_id=self.folder(step),
            async_stager=self.stager)

    def drain(self):
        if self.future is not None:
            self.future.result()
        self.future = None

    def close(self):
        torch.distributed.destroy_process_group()


class SharedAsyncSave(AsyncSave):
    """The same, staged into shared memory that is used again."""

    def __init__(self, *args):
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        super().__init__(*args)
        self.stager = DefaultStager(StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False,
            use_non_blocking_copy=False))


class PinnedAsyncSave(AsyncSave):
    """The same, staged into page-locked memory beside the training."""

    def __init__(self, *args):
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        class KeptStager(DefaultStager):
            """torch 2.11 closes a stager when a save is done, and a closed one copies nothing more:
            the next save would fail, or page-lock its memory anew."""

            def close(self):
                """Not before the process ends."""

        super().__init__(*args)
        self.stager = KeptStager(StagingOptions())
        self.stager._state_dict_stager.close = lambda: None

    def save(self, step):
        super().save(step)
        self.staged = self.future.staging_completion
        self.future = self.future.upload_completion

    def before_update(self):
        """Does what a user of it has to do before the next step."""
        if self.future is not None:
            self.staged.result()


class Ckptfs(Nothing):
    """Our own, with the policy that drops."""
    policy = {}

    def __init__(self, *args):
        import ckptfs
        super().__init__(*args)
        self.snap = ckptfs.Snapshotter(
            self.net, self.optimizer, run=f'job{os.getpid()}', store=self.out,
            documents={'args': {'num_attention_heads': shape.HEADS}}, **self.policy)
        self.last, self.waited = None, 0.0

    def save(self, step):
        if self.snap.save(step):
            self.last = step
        self.count()

    def count(self):
        """Waiting before updates is time in our calls, too."""
        waited = self.snap.status()['wait_seconds']
        self.blocked += waited - self.waited
        self.waited = waited

    def drain(self):
        self.count()
        if self.last is not None:
            self.snap.wait_durable(self.last)

    def close(self):
        self.snap.close()


class WaitingCkptfs(Ckptfs):
    """The same, with the policy that keeps every step."""
    policy = {'full': 'wait'}


class DeepSpeed(Nothing):
    """A DeepSpeed engine (ZeRO 0, which copies nothing) and the checkpoint engine that it has by
    itself."""
    checkpoint = {}

    def __init__(self, out, net, optimizer):
        super().__init__(out, net, optimizer)
        os.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', LOCAL_SIZE='1',
                          CROSS_RANK='0', CROSS_SIZE='1',
                          MASTER_ADDR='127.0.0.1', MASTER_PORT='0', DS_ACCELERATOR='cpu')
        import _ckptfs_hook
        import deepspeed
        _ckptfs_hook.install()
        deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
        deepspeed.init_distributed('gloo', verbose=False, rank=0, world_size=1,
                                   init_method=f'file://{tempfile.mkdtemp()}/rendezvous')
        self.engine = deepspeed.initialize(model=net, optimizer=optimizer, config={
            'train_micro_batch_size_per_gpu': 8, 'zero_allow_untested_optimizer': True,
            'steps_per_print': 10 ** 6, 'checkpoint': self.checkpoint_of(out)})[0]

    def checkpoint_of(self, out):
        """Returns the checkpoint of the engine's configuration."""
        return self.checkpoint

    def backward(self, loss):
        self.engine.backward(loss)

    def update(self):
        self.engine.step()

    def save(self, step):
        folder = os.path.dirname(self.folder(step))
        self.engine.save_checkpoint(folder, tag=str(step))

    def close(self):
        self.engine.destroy()


class FastDeepSpeed(DeepSpeed):
    """FastPersist, by its writer that asks for no accelerator."""
    checkpoint = {'writer': {'type': 'python', 'data_parallel': 'replica'}}


class DecoupledDeepSpeed(DeepSpeed):
    """The same in a process beside the trainer, for which the next update waits."""
    checkpoint = {'writer': {**FastDeepSpeed.checkpoint['writer'], 'decoupled': True}}

    def before_update(self):
        self.engine._commit_decoupled_checkpoint()  # as the engine does in step(), where nobody counts

    def drain(self):
        self.before_update()


class CkptfsDeepSpeed(DeepSpeed):
    """Our engine in its place."""

    def checkpoint_of(self, out):
        return {'ckptfs': {'store': out, 'run': f'job{os.getpid()}', 'fallback': False}}

    def __init__(self, out, net, optimizer):
        super().__init__(out, net, optimizer)
        self.snap = self.engine.checkpoint_engine.snap
        self.saves_folder = os.path.join(os.path.dirname(out), 'saves')

    def save(self, step):
        self.engine.save_checkpoint(self.saves_folder, tag=str(step))

    def before_update(self):
        self.snap.before_update()

    def drain(self):
        self.snap.wait_durable(self.engine.global_steps)


SIDES = {'nothing': Nothing, 'torch.save': TorchSave, 'dcp.async_save': AsyncSave,
         'dcp.async_save, shared': SharedAsyncSave,
         'dcp.async_save, pinned': PinnedAsyncSave, 'ckptfs': Ckptfs,
         'ckptfs, waiting': WaitingCkptfs, 'deepspeed': DeepSpeed,
         'deepspeed, fast': FastDeepSpeed, 'deepspeed, decoupled': DecoupledDeepSpeed,
         'ckptfs, deepspeed': CkptfsDeepSpeed}


class Job:
    """A training loop and who saves it."""

    def __init__(self, side, out, parameters, device):
        torch.manual_seed(0)
        self.device = device
        self.net, self.optimizer = make(parameters, device)
        self.tokens = torch.randint(shape.VOCAB, (8, 16), device=device)
        self.saver = SIDES[side](out, self.net, self.optimizer)
        self.step = 0
        self.train(1)

    def backward(self):
        """Forward and backward."""
        loss = nn.functional.cross_entropy(
            self.net(self.tokens).flatten(0, 1), self.tokens.flatten())
        self.saver.backward(loss)

    def train(self, iterations, every=0):
        """Seconds of a loop, and of the end of what it began."""
        start = time.perf_counter()
        for i in range(iterations):
            self.backward()
            start_update = time.perf_counter()
            if every:
                self.saver.before_update()
                self.saver.blocked += time.perf_counter() - start_update
            self.saver.update()
            if every and i % every == 0:
                self.save()
        self.synchronize()
        end = time.perf_counter()
        if every:
            self.saver.drain()
        return end - start, time.perf_counter() - end

    def synchronize(self):
        """The device has done all that it was told."""
        if self.device != 'cpu':
            torch.cuda.synchronize()

    def save(self):
        """One save, its time counted."""
        start = time.perf_counter()
        self.saver.save(self.step)
        self.saver.blocked += time.perf_counter() - start
        self.saver.saves += 1
        self.step += 1

    def loop(self, iterations, every):
        """Returns what saving at this rate costs."""
        plain = self.train(iterations)[0]
        self.saver.blocked, self.saver.saves, first = 0.0, 0, self.durable()
        saving, drain = self.train(iterations, every)
        return {'plain': plain, 'saving': saving, 'drain': drain, 'saves': self.saver.saves,
                'blocked': self.saver.blocked / self.saver.saves,
                'kept': self.durable() - first if first is not None else self.saver.saves}

    def ready(self):
        """Seconds until the memory for saves of a device is made and page-locked, which begins with the
        Snapshotter."""
        start = time.perf_counter()
        while True:
            now, waited = self.saver.snap.status(), time.perf_counter() - start
            if waited > 60 or 0 < now['arena_bytes'] <= now['pinned_bytes']:
                return waited
            time.sleep(0.005)

    def durable(self):
        """Ours say how many were kept."""
        return self.saver.snap.status()['durable'] if hasattr(self.saver, 'snap') else None


def rate(job, saves):
    """Bytes per second from memory to disk, of saves without training between them."""
    snap, ends = job.saver.snap, []
    for _ in range(saves):
        job.save()
        snap.before_update()
        job.saver.drain()
        ends.append(time.perf_counter())
    return (saves - 1) * snap.status()['file_bytes'] / (ends[-1] - ends[0])


def copy_rates(job):
    """Bytes per second from the device into the arena, and into page-locked memory."""
    snap = job.saver.snap
    job.synchronize()
    start = time.perf_counter()
    job.save()
    snap.before_update()
    ours = snap.status()['file_bytes'] / (time.perf_counter() - start)
    source = torch.empty(1 << 28, dtype=torch.uint8, device=job.device)
    target = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    best = 0.0
    for _ in range(5):
        job.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        job.synchronize()
        best = max(best, source.nbytes / (time.perf_counter() - start))
    return {'ours': ours, 'pinned': best}


def backward_seconds(job):
    """Returns the seconds of a forward and a backward pass, which a copy has to hide behind."""
    times = []
    for _ in range(5):
        job.synchronize()
        start = time.perf_counter()
        job.backward()
        job.synchronize()
        times.append(time.perf_counter() - start)
        job.saver.optimizer.zero_grad()
    return statistics.median(times)


def join(rank, world, folder, device, elements):
    """Into a group of one process a device; the tensor that is reduced over it."""
    at = f'{device}:{rank}' if device != 'cpu' else device
    if device != 'cpu':
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group('gloo' if device == 'cpu' else 'nccl', rank=rank, world_size=world,
                                         init_method=f'file://{folder}/rendezvous')
    return torch.ones(elements, device=at), torch.ones(1, device=at)


def peer(index, *group):
    """Another rank: takes part until rank 0 says that it is enough."""
    given, more = join(index + 1, *group)
    while torch.distributed.broadcast(more, 0) or more.item():
        torch.distributed.all_reduce(given)
    torch.distributed.destroy_process_group()


def collectives(job, elements=REDUCED):
    """Median seconds of an all_reduce over all devices, alone and while a save is copied."""
    snap, device = job.saver.snap, job.device
    world = 2 if device == 'cpu' else torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        group = (world, folder, device, elements)
        peers = torch.multiprocessing.spawn(peer, group, world - 1, join=False) if world > 1 else None
        given, more = join(0, *group)

        def one():
            torch.distributed.broadcast(more, 0)
            job.synchronize()
            start = time.perf_counter()
            torch.distributed.all_reduce(given)
            job.synchronize()
            return time.perf_counter() - start

        alone, beside = [one() for _ in range(25)][5:], []
        job.save()
        while snap.progress(job.step - 1)['copied'] < snap.status()['file_bytes']:
            beside.append(one())
        snap.before_update()
        more.zero_()
        torch.distributed.broadcast(more, 0)
        while peers is not None and not peers.join():
            pass
        torch.distributed.destroy_process_group()
    job.saver.drain()
    return {'world': world, 'alone': statistics.median(alone), 'times': len(beside),
            'beside': statistics.median(beside) if beside else None}


def main():
    """Measure one side."""
    side, out = sys.argv[1:3]
    parameters, iterations = float(sys.argv[3]), int(sys.argv[4])
    job = Job(side, out, parameters, sys.argv[5])
    result = {'parameters': sum(p.numel() for p in job.net.parameters())}
    if job.device != 'cpu' and hasattr(job.saver, 'snap'):
        result['ready'] = job.ready()
    if side != 'nothing':
        first = time.perf_counter()
        job.save()
        result['first'] = time.perf_counter() - first  # a processor's memory is made here
        job.train(1)
        job.saver.drain()
        result['each'] = job.loop(iterations, 1)
        result['tenth'] = job.loop(10, 10)
    if side == 'ckptfs':
        result['rate'] = rate(job, 4)
        if job.device != 'cpu':
            result['copy'] = {**copy_rates(job), 'backward': backward_seconds(job)}
            result['collective'] = collectives(job)
        result['status'] = job.saver.snap.status()
    job.saver.close()
    print(json.dumps(result))


if __name__ == '__main__':
    main()
