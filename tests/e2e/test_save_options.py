# SPDX-License-Identifier: Apache-2.0
"""Options of a save, and what it says of itself, from Python."""
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import threading
import time

import ckptfs as snapshots
import pytest
import torch
from ckptfs import _native
from daemon import wait_until
from safetensors import safe_open
from test_snapshot import block_store

SIZE = 300


@pytest.fixture(name='snapshotter')
def snapshotter_fixture(ckptfs):
    """snapshotter(**options) of a small model after one update."""
    made = []

    def make(**options):
        torch.manual_seed(0)
        net = torch.nn.Linear(SIZE, SIZE)
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.ones(1, SIZE)).sum().backward()
        optimizer.step()
        made.append(snapshots.Snapshotter(net, optimizer, run='job', store=ckptfs.store,
                                          **options))
        return made[-1]

    yield make
    for snap in made:
        snap.close()


@pytest.fixture(name='gate')
def gate_fixture(monkeypatch):
    """Copies that the writer's own thread makes wait for this event."""
    opened, writer = threading.Event(), _native.Writer

    def before_copy():
        if threading.current_thread() is not threading.main_thread():
            opened.wait(60)

    monkeypatch.setattr(_native, 'Writer', lambda *args: writer(*args[:-1], before_copy))
    yield opened
    opened.set()


def daemon_counts(ckptfs):
    """Returns what `ckptfs status` says of snapshots."""
    said = ckptfs.run('status', '--store', ckptfs.store, '--json').stdout
    return json.loads(said)[0]['status']['snapshots']


def receive(ckptfs):
    """A mount that takes snapshots."""
    ckptfs.start()
    assert daemon_counts(ckptfs) is not None


def test_a_dry_run_needs_no_daemon(snapshotter):
    size = snapshotter(slots=3).size()
    assert size['lazy_bytes'] == 3 * 4 * SIZE * SIZE
    assert size['lazy_bytes'] < size['file_bytes'] < size['lazy_bytes'] + 20_000
    assert size['arena_bytes'] == 3 * (16 << 20)


def test_progress_and_cancel(ckptfs, snapshotter):
    receive(ckptfs)
    snap = snapshotter()
    assert snap.progress(1) == {'bytes': 0, 'copied': 0, 'durable': 0}
    assert snap.save(1) and snap.wait_durable(1)
    done = snap.progress(1)
    assert done['bytes'] == done['copied'] == done['durable'] == snap.status()['file_bytes']
    assert not snap.cancel(1)  # it is durable


def test_a_deadline_that_is_over(ckptfs, snapshotter):
    receive(ckptfs)
    snap = snapshotter()
    assert snap.save(1, deadline=0)
    assert not snap.wait_durable(1)
    assert 'its time limit has passed' in snap.status()['last_drop']
    assert snap.save(2, deadline=60) and snap.wait_durable(2)


def receive_and_keep_nothing(ckptfs):
    """Starts a daemon that no step becomes durable at until the file that is returned goes."""
    receive(ckptfs)
    return block_store(ckptfs)


@pytest.mark.parametrize('step', [-1, 1.5, '7', None, 1 << 64, float('nan'), torch.ones(2)])
def test_what_is_no_step(ckptfs, snapshotter, caplog, step):
    receive(ckptfs)
    snap = snapshotter()
    assert not snap.save(step)
    assert 'is not a step: a whole number' in caplog.text
    status = snap.status()
    assert (status['saves'], status['dropped'], status['under_way']) == (1, 1, 0)
    assert snap.save(torch.tensor(0)) and snap.wait_durable(0)


def test_a_full_arena(ckptfs, snapshotter):
    block = receive_and_keep_nothing(ckptfs)
    snap = snapshotter(slots=1)
    patient = snapshotter(slots=1, full='wait', update_limit=0.05)
    assert snap.save(1) and patient.save(2)
    assert not snap.save(3) and not patient.save(4)
    assert (snap.status()['full_drops'], snap.status()['full_waits']) == (1, 0)
    assert (patient.status()['full_drops'], patient.status()['full_waits']) == (1, 1)
    wait_until(lambda: daemon_counts(ckptfs)['full_drops'] == 2, 'the daemon to hear of it')
    os.unlink(block)
    assert snap.wait_durable(1) and patient.wait_durable(2)


def test_signals_are_handled_while_a_step_is_waited_for(ckptfs, snapshotter):
    block = receive_and_keep_nothing(ckptfs)
    snap = snapshotter()
    assert snap.save(1)
    begun, ran = time.monotonic(), []
    before = signal.signal(signal.SIGALRM, lambda *_: ran.append(time.monotonic() - begun))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        assert not snap.wait_durable(1, 8)
        assert ran and ran[0] < 6 <= time.monotonic() - begun
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            snap.wait_durable(1, 20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    os.unlink(block)
    assert snap.wait_durable(1)


@contextlib.contextmanager
def interrupted(waits=lambda: True):
    """Ctrl-C, a little after `waits` is true, ends what would take a minute."""
    begun, over = time.monotonic(), threading.Event()

    def interrupt():
        while not over.is_set() and not waits():
            time.sleep(0.01)
        time.sleep(0.3)
        if not over.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            yield
        assert time.monotonic() - begun < 30
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGALRM, before)


def test_signals_are_handled_while_an_update_waits(ckptfs, gate, snapshotter):
    """Ctrl-C ends the wait for a copy that hangs, and the step before it wrote anything."""
    receive(ckptfs)
    snap = snapshotter()
    assert snap.save(1)
    try:
        with interrupted():
            snap.before_update()
    finally:
        gate.set()
    snap.before_update()
    assert snap.wait_durable(1)


def test_signals_are_handled_while_a_save_waits_for_room(ckptfs, snapshotter):
    block = receive_and_keep_nothing(ckptfs)
    snap = snapshotter(slots=1, full='wait')
    assert snap.save(1)
    with interrupted(lambda: snap.status()['full_waits'] == 1):
        snap.save(2)
    assert snap.status()['last_drop'] == 'step 2: interrupted while it waited for room'
    assert (snap.status()['full_drops'], snap.status()['dropped']) == (0, 1)
    os.unlink(block)
    assert snap.wait_durable(1)
    assert snap.save(3) and snap.wait_durable(3)


def test_what_is_written_while_a_save_waits_for_room_is_not_saved(ckptfs):
    """A step of what was there at the call and of what came later never was."""
    block = receive_and_keep_nothing(ckptfs)
    net = torch.nn.Linear(SIZE, SIZE)
    snap = snapshots.Snapshotter(net, torch.optim.SGD(net.parameters()), run='job', store=ckptfs.store, slots=1, full='wait')
    assert snap.save(1)
    snap.before_update()

    def write():
        while snap.status()['full_waits'] == 0:
            time.sleep(0.01)
        net.weight.detach().numpy()[SIZE // 2] = 7.
        os.unlink(block)

    writer = threading.Thread(target=write)
    writer.start()
    snap.save(2)
    writer.join()
    assert snap.wait_durable(1) and not snap.wait_durable(2)
    assert 'weight was written' in snap.status()['last_drop'], snap.status()
    assert snap.save(3) and snap.wait_durable(3)
    snap.close()


def test_a_save_after_close_is_counted(ckptfs, snapshotter):
    receive(ckptfs)
    snap = snapshotter()
    snap.close()
    assert not snap.save(1)
    status = snap.status()
    assert (status['saves'], status['dropped']) == (1, 1)
    assert status['last_drop'] == 'step 1: it was saved after close()'


def test_signals_are_handled_while_a_daemon_is_greeted(ckptfs, snapshotter):
    receive(ckptfs)
    said = json.loads(ckptfs.run('status', '--store', ckptfs.store, '--json').stdout)
    daemon, snap = said[0]['pid'], snapshotter()
    os.kill(daemon, signal.SIGSTOP)
    try:
        with interrupted(lambda: snap.status()['saves'] == 1):
            snap.save(1)
        with interrupted(lambda: snap.status()['saves'] == 2):
            snap.save(2)  # it is asked again
    finally:
        os.kill(daemon, signal.SIGCONT)
    assert snap.status()['dropped'] == 2
    assert snap.save(3) and snap.wait_durable(3)


def test_a_step_that_is_dropped_is_not_waited_for(ckptfs, snapshotter):
    receive(ckptfs)
    begun = time.monotonic()
    assert not snapshotter().wait_durable(1)  # nobody saved it
    assert time.monotonic() - begun < 10


def save_in_a_cycle(store):
    """A Saver that nothing but the end of the process closes."""
    net = torch.nn.Linear(3000, 3000)
    job = {'net': net}
    job['snap'] = snapshots.Snapshotter(net, torch.optim.SGD(net.parameters()), store=store, pace=1)
    job['itself'] = job
    assert job['snap'].save(7)


@pytest.mark.parametrize('way', ['fork', 'spawn'])
def test_the_last_save_of_a_process_of_multiprocessing(ckptfs, way):
    receive(ckptfs)
    child = multiprocessing.get_context(way).Process(target=save_in_a_cycle, args=(ckptfs.store,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    wait_until(lambda: [step['id'] for step in ckptfs.list()['steps']] == ['7'], 'the step', seconds=20)


def test_no_other_policy(snapshotter):
    with pytest.raises(ValueError, match='neither'):
        snapshotter(full='hope')


@pytest.mark.parametrize('run', ['', 'a/b', '..', 'a' * 201, 'a\nb'])
def test_no_other_run(ckptfs, run):
    net = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match='run name'):
        snapshots.Snapshotter(net, torch.optim.SGD(net.parameters()), run=run, store=ckptfs.store)


def test_a_pace_is_kept_but_by_updates(ckptfs, snapshotter):
    receive(ckptfs)
    snap = snapshotter(pace=1)  # a byte a second
    assert snap.save(1)
    snap.before_update()
    assert snap.save(2)  # a chunk costs years from here on
    snap.before_update()
    assert snap.wait_durable(1) and snap.wait_durable(2)


def test_the_store_takes_bytes_as_they_come(ckptfs):
    """The copy stops after a chunk; what came of it is written, and kept or taken back."""
    receive(ckptfs)
    net = torch.nn.Linear(2048, 2048)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    parts, files = (os.path.join(ckptfs.store, *path) for path in
                    (['.tmp'], ['blobs', 'snapshots']))
    known = set()
    for step, whole in ((1, True), (2, False), (3, True)):
        truth = {name: value.clone() for name, value in net.state_dict().items()}
        with snapshots.Snapshotter(net, optimizer, run='job', store=ckptfs.store, pace=1) as snap:
            assert snap.save(step)
            wait_until(lambda: len(os.listdir(parts)) == 1, 'the first chunk')
            assert whole or snap.cancel(step)
            optimizer.step()
            assert snap.wait_durable(step) == whole
        wait_until(lambda: not os.listdir(parts), 'nothing half')
        if not whole:
            continue
        (new,) = set(os.listdir(files)) - known
        known.add(new)
        with safe_open(os.path.join(files, new, 'rank-00000.safetensors'), 'pt') as file:
            for name, value in truth.items():
                assert torch.equal(file.get_tensor(name), value)
        ckptfs.run('verify', '--store', ckptfs.store, f'job/{step}')


def test_documents_of_any_shape(ckptfs, snapshotter):
    receive(ckptfs)
    odd = {'1': torch.ones(3), 'a|b': (torch.zeros(0, 4), [torch.ones(2, 2).t()]),
           7: {'deep': (torch.tensor(5),)}, '': None}
    snap = snapshotter(documents={'odd|name/7': odd})
    assert snap.save(1) and snap.wait_durable(1), snap.status()
    folder = os.path.join(ckptfs.store, 'blobs', 'snapshots')
    step, = os.listdir(folder)
    with safe_open(os.path.join(folder, step, 'rank-00000.safetensors'), 'pt') as f:
        held = [f.get_tensor(f'ckptfs.document/odd|name/7/{i}') for i in range(4)]
    assert [list(t.shape) for t in held] == [[3], [0, 4], [2, 2], []]
    assert held[3] == 5
    ckptfs.run('verify', '--store', ckptfs.store, 'job/1')


def test_garbage_is_collected_again(ckptfs, snapshotter):
    receive(ckptfs)
    before = gc.get_threshold()
    seen = []

    def document():
        seen.append(gc.get_threshold()[0])
        child = os.fork()  # a data loader's, in another thread
        if child == 0:
            os._exit(gc.get_threshold() != before)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    snap = snapshotter(documents={'x': document})
    assert snap.save(1) and snap.wait_durable(1)
    with snapshots.SavedStep(f'ckptfs://{ckptfs.store}/job/1') as step:
        assert step.document('x') == 0, 'the child looks for garbage'
    assert seen == [0] and gc.get_threshold() == before and gc.isenabled()

    def switched():
        gc.disable()  # whoever else does
        return 1

    snap = snapshotter(documents={'x': switched})
    assert snap.save(2)
    assert not gc.isenabled() and gc.get_threshold() == before
    gc.enable()
    gc.set_threshold(0)
    try:
        assert snap.save(3) and gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
