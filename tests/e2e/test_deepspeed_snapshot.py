# SPDX-License-Identifier: Apache-2.0
"""Snapshots of real DeepSpeed engines, by configuration alone.

A snapshot and a checkpoint that the stock engine writes are taken of one engine at one
step: every file of every view must be the same, byte for byte.
"""
import glob
import logging
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import daemon
from ckptfs import deepspeed as plugin
from daemon import step_of, wait_until
from deepspeed_jobs import engine_of, run, stock_save
from engine import train
from make_deepspeed import client_state
from ports import held_port
from tiny_model import Dims, Layout, Par
from variants import SIZES, VARIANTS

STEPS = 2
TAG = f'global_step{STEPS}'
DIMS = Dims(layers=1)
# Every form of a checkpoint once; CKPTFS_LONG=1: all variants.
SOME = ['stage0', 'stage0_unfused', 'stage0_fused', 'zero1_bf16', 'zero2_frozen', 'zero3_2groups', 'tp2_pp2', 'moe']
OFFLOADED = ['zero2_frozen', 'zero3_2groups']
CASES = [one for one in VARIANTS if one != 'moe_stage0'] if os.environ.get('CKPTFS_LONG') else SOME


def test_engines_whose_states_nobody_could_tell_are_refused():
    """DeepSpeed then saves as ever."""
    class FP16_UnfusedOptimizer:  # pylint: disable=invalid-name
        """As of a mixture of experts without ZeRO."""

    engine = SimpleNamespace(zero_nvme_offload_optimizer=lambda: False, has_moe_layers=True, optimizer=FP16_UnfusedOptimizer(),
                             zero_optimization_stage=lambda: 0)
    assert 'mixture of experts' in plugin.refusal(engine)
    engine.zero_optimization_stage = lambda: 1
    assert plugin.refusal(engine) == ''


def read(*path):
    """A small file."""
    with open(os.path.join(*path), encoding='utf-8') as file:
        return file.read()


def block(store):
    """No snapshot can be stored until the returned path is removed."""
    os.makedirs(os.path.join(store, 'blobs'), mode=0o700, exist_ok=True)
    path = os.path.join(store, 'blobs', 'snapshots')
    with open(path, 'w', encoding='utf-8'):
        return path


def watched(engine):
    """Events, in order: 'wait', when all copies are made, and 'update', when the
    optimizer begins to write."""
    events, base = [], engine.optimizer
    while not isinstance(base, torch.optim.Optimizer):
        base = base.optimizer
    snap = engine.checkpoint_engine.snap
    wait = snap.before_update

    def waited():
        wait()
        events.append('wait')

    snap.before_update = waited
    # Its own hooks come after those of all optimizers.
    base.register_step_pre_hook(lambda *_: events.append('update'))
    return events


def datastates_engine(lay, settings):
    """Returns an engine whose configuration knows DataStates alone: ours has that name here."""
    sys.path.insert(0, os.path.join(sources(), 'datastates'))
    return engine_of(DIMS, lay, '', more={'datastates_ckpt': settings})


def trap(out, store, mount, lay, shadowing):
    """Both defects of DataStates' engine in DeepSpeed: it is decoupled, but what
    get_commit_info() says (None) lets step() go on without a wait and leaves `latest`
    unwritten; and a pipeline's step asks nobody."""
    engine = (datastates_engine(lay, {'store': store, 'mount': mount, 'host_cache_size': 16})
              if shadowing else engine_of(DIMS, lay, store, mount=mount))
    ours = engine.checkpoint_engine
    blocked = block(store) if Par.rank == 0 else None
    train(engine, DIMS, lay, 0, 1)
    events, save = watched(engine), os.path.join(out, 'save')
    engine.save_checkpoint(save)
    assert events == []
    assert ours.is_decoupled() and not ours.get_commit_info().save_latest
    train(engine, DIMS, lay, 1, 1)
    assert events[0] == 'wait' and 'update' in events, events
    # With a pipeline DeepSpeed has not come by.
    assert (ours.get_commit_info() is None) == (lay.pp == 1)
    assert not os.path.exists(os.path.join(save, 'latest'))
    torch.distributed.barrier()  # all ranks have looked
    if Par.rank == 0:
        os.unlink(blocked)
    assert ours.snap.wait_durable(1, 60)
    engine.destroy()
    if Par.rank == 0:
        assert read(save, 'latest') == read(save, 'latest_universal') == 'global_step1'
        link = os.path.join(save, 'global_step1')
        assert os.path.islink(link) and 'zero' in os.listdir(link)


@pytest.mark.parametrize('lay', [Layout(stage=1, dp=2), Layout(stage=1, pp=2, pipe=True)],
                         ids=['zero', 'pipeline'])
@pytest.mark.parametrize('shadowing', [False, True], ids=['ckptfs', 'datastates'])
def test_the_update_waits_and_latest_follows_the_store(ckptfs, tmp_path, lay, shadowing):
    _, mount = ckptfs.start()
    run(trap, lay.world, (str(tmp_path), ckptfs.store, mount, lay, shadowing), str(tmp_path))


def shadowing_nothing(out):
    """`datastates_ckpt` without a store, and where no hook would put us in its place."""
    import deepspeed
    lay, save = Layout(stage=1), os.path.join(out, 'save')
    engine = datastates_engine(lay, True)
    assert type(engine.checkpoint_engine).__name__ == 'TorchCheckpointEngine'
    engine.save_checkpoint(save)
    assert read(save, 'latest') == 'global_step0'
    assert os.path.getsize(os.path.join(save, 'global_step0', 'mp_rank_00_model_states.pt'))
    hooked = deepspeed.DeepSpeedEngine._configure_checkpointing
    deepspeed.DeepSpeedEngine._configure_checkpointing = hooked._ckptfs_original
    sys.modules['_ckptfs_hook'].install = lambda: None
    with pytest.raises(RuntimeError, match='ckptfs.pth'):
        datastates_engine(lay, {'store': save})


def test_datastates_without_a_store_or_a_hook(tmp_path):
    run(shadowing_nothing, 1, (str(tmp_path),), str(tmp_path))


def kept(engine):
    """{key: storage} of what the next save keeps."""
    found, ours = {}, engine.checkpoint_engine
    save = ours.snap.save

    def seen(step):
        found.update((f'{file.name}/{s.key}', s) for file in ours.files for s in file.storages)
        return save(step)

    ours.snap.save = seen
    return found


def check_lazy(storages, lay):
    """Nothing but what the optimizer writes is copied lazily."""
    lazy = {key for key, storage in storages.items() if storage.updated}
    buffers = {k for k in storages if 'tally' in k or 'inv_freq' in k or '/rng' in k}
    assert not buffers & lazy
    if not lay.fused:  # its storages have no names
        assert buffers
    if not lay.elastic and not lay.fused:
        states = {k for k, s in storages.items() if 'exp_avg' in k or 'fp32_' in k}
        assert states <= lazy and (states or lay.momentum or lay.moe), states - lazy


def save_both(out, store, name):
    """A snapshot, then a checkpoint, then an update."""
    lay = VARIANTS[name]
    dims = Dims(**SIZES.get(name, {}))
    engine = engine_of(dims, lay, store, name)
    offloads = 'offload_optimizer' in engine.config['zero_optimization']
    assert bool(engine.zero_cpu_offload()) == offloads
    train(engine, dims, lay, 0, STEPS)
    client = {**client_state(dims, lay, STEPS), 'rng': torch.get_rng_state(), 'a|b': torch.ones(2),
              7: {'in/tuple': (torch.zeros(0, 3), [torch.tensor(5)])}}
    storages = kept(engine)
    engine.save_checkpoint(os.path.join(out, 'ours'), client_state=client)
    if Par.rank == 0:
        check_lazy(storages, lay)
    stock_save(engine, os.path.join(out, 'ckpt'), TAG, client)
    train(engine, dims, lay, STEPS, 1)
    assert engine.checkpoint_engine.snap.wait_durable(STEPS, 60), 'not durable'
    engine.destroy()


def save_offloaded(out, store, name):
    """As save_both, with masters and states that DeepSpeed keeps in host memory (ZeRO-Offload)."""
    import engine as fixture
    offload = {'zero_force_ds_cpu_optimizer': False,
               'zero_optimization': {'offload_optimizer': {'device': 'cpu'}}}
    fixture.ds_config = partial(with_more, fixture.ds_config, offload)
    save_both(out, store, name)


def with_more(make, more, dims, lay, extra=None):
    """A configuration with more, also of ZeRO."""
    config = make(dims, lay, extra)
    zero = {**config['zero_optimization'], **more['zero_optimization']}
    return {**config, **more, 'zero_optimization': zero}


def files_of(folder):
    """{path below: bytes, or where a link leads}, but for info.json, which names the run."""
    found = {}
    for where, _, names in os.walk(folder):
        for name in sorted(set(names) - {'info.json'}):
            path = os.path.join(where, name)
            if os.path.islink(path):
                found[os.path.relpath(path, folder)] = os.readlink(path)
                continue
            with open(path, 'rb') as file:
                found[os.path.relpath(path, folder)] = file.read()
    return found


def layouts_of(name):
    """Its own, and others."""
    own = VARIANTS[name]
    more = [] if own.moe else ['tp2', 'tp2_zero3' if not own.pipe else 'tp2_pp2']
    return ['tp1', f'dp{own.dp}_zero{own.stage}', *more]


@pytest.mark.parametrize(('name', 'worker'), [(name, save_both) for name in CASES]
                         + [(name, save_offloaded) for name in OFFLOADED])
def test_a_snapshot_is_what_a_checkpoint_would_be(ckptfs, tmp_path, name, worker):
    process, mount = ckptfs.start()
    out = str(tmp_path)
    run(worker, VARIANTS[name].world, (out, ckptfs.store, name), out)
    ckptfs.adopt(os.path.join(out, 'ckpt'), 'native')
    wait_until(lambda: 'native' in os.listdir(os.path.join(mount, 'run')), 'the step', process)
    ours, native = (os.path.join(step_of(mount, r, TAG), 'view') for r in (name, 'native'))
    compared = 0
    for layout in layouts_of(name):
        if not os.path.isdir(os.path.join(native, layout)):
            assert not os.path.isdir(os.path.join(ours, layout)), layout
            continue
        want, got = (files_of(os.path.join(view, layout)) for view in (native, ours))
        assert got.keys() == want.keys(), layout
        different = [path for path in want if got[path] != want[path]]
        assert not different, (layout, different[:5])
        compared += len(want)
    assert compared > 20
    check_spread(os.path.join(ckptfs.store, 'blobs', 'snapshots'), VARIANTS[name])


def check_spread(folder, lay):
    """All data-parallel ranks write what all of them hold."""
    (step,) = os.listdir(folder)
    sizes = [os.path.getsize(path) for path in glob.glob(os.path.join(folder, step, '*.safetensors'))]
    assert len(sizes) == lay.world
    if lay.pp == 1 and not lay.moe and lay.stage > 0 and not lay.frozen:
        assert max(sizes) < 1.3 * min(sizes), sizes


def without_daemon(out, store):
    """Saves of a job that nobody receives."""
    lay = Layout(stage=1, dp=2)
    logging.getLogger('ckptfs').addHandler(logging.FileHandler(os.path.join(out, 'said')))
    engine = engine_of(DIMS, lay, store, fallback=True)
    train(engine, DIMS, lay, 0, 1)
    engine.save_checkpoint(os.path.join(out, 'save'), client_state={'mine': 7})
    assert read(out, 'save', 'latest') == 'global_step1'
    train(engine, DIMS, lay, 1, 1)
    engine.checkpoint_engine._fallback = False
    engine.save_checkpoint(os.path.join(out, 'none'))
    assert not os.path.exists(os.path.join(out, 'none', 'global_step2'))
    engine.save_16bit_model(out, 'weights.bin')
    path, client = engine.load_checkpoint(os.path.join(out, 'save'))
    assert path and client['mine'] == 7 and engine.global_steps == 1
    linked(engine, out)
    engine.destroy()


def linked(engine, out):
    """A save the stock way replaces what led into a mount, and is `latest`."""
    ours, link = engine.checkpoint_engine, os.path.join(out, 'save', 'best')
    ours._fallback = True
    if Par.rank == 0:
        os.symlink('/nowhere', link)
    engine.save_checkpoint(os.path.join(out, 'save'), tag='best')
    assert not os.path.islink(link) and read(out, 'save', 'latest') == 'best'
    torch.distributed.barrier()  # all ranks have looked
    if ours._pointers:  # an earlier save that becomes durable only now
        ours._pointers._write(0, os.path.join(out, 'save'), 'before', True)
        assert read(out, 'save', 'latest') == 'best'
        # A later snapshot of the tag is not what the files are.
        ours._pointers._write(1, os.path.join(out, 'save'), 'best', True)
        assert read(out, 'save', 'latest') == 'best-snapshot'


def test_without_a_daemon_the_stock_engine_saves(ckptfs, tmp_path):
    out = str(tmp_path)
    run(without_daemon, 2, (out, ckptfs.store), out)
    said = read(out, 'said')
    assert said.count('snapshot dropped') == 2, said  # once per rank
    assert len(torch.load(os.path.join(out, 'weights.bin'))) > 5
    ckptfs.adopt(os.path.join(out, 'save'), 'run')


def test_settings_of_a_save_are_the_savers(monkeypatch):
    """Those that Snapshotter has under the same names; no others."""
    given, stock = [], SimpleNamespace(is_decoupled=lambda: False)
    engine = SimpleNamespace(checkpoint_engine=stock, global_rank=1)
    monkeypatch.setattr(plugin, 'EngineCollector', lambda of: SimpleNamespace(engine=of))
    monkeypatch.setattr(plugin, '_layout', lambda _: 'dp2')
    monkeypatch.setattr(plugin, 'Saver', lambda *_, **options: given.append(options))
    settings = {'slots': 3, 'update_limit': 5, 'full': 'wait', 'pace': 1 << 30}
    plugin.plan(engine, {'store': '/s', **settings})()
    assert given == [settings]
    with pytest.raises(ValueError, match="unknown settings .'speed'."):
        plugin.plan(engine, {'store': '/s', 'speed': 1})


def by_hand(out, store):
    """The same by a Snapshotter, in an engine that is not told of the store."""
    import ckptfs
    lay = Layout(stage=2, dp=2)
    engine = engine_of(DIMS, lay, '')
    assert type(engine.checkpoint_engine).__name__ == 'TorchCheckpointEngine'
    train(engine, DIMS, lay, 0, 1)
    with ckptfs.Snapshotter(engine, run='job', store=store,
                            documents={'mine': lambda: 7}) as snap:
        assert snap.save(1)
        assert type(engine.checkpoint_engine).__name__ == 'TorchCheckpointEngine'
        engine.save_checkpoint(os.path.join(out, 'ckpt'), client_state={'mine': 7})
        train(engine, DIMS, lay, 1, 1)
        assert snap.wait_durable(1, 60)


def test_a_snapshotter_takes_an_engine(ckptfs, tmp_path):
    process, mount = ckptfs.start()
    out = str(tmp_path)
    run(by_hand, 2, (out, ckptfs.store), out)
    ckptfs.adopt(os.path.join(out, 'ckpt'), 'native')
    wait_until(lambda: 'native' in os.listdir(os.path.join(mount, 'run')), 'the step', process)
    want, got = (files_of(os.path.join(step_of(mount, r, 'global_step1'), 'view', 'tp1'))
                 for r in ('native', 'job'))
    assert want == got and len(got) > 20


def life(out, store, mount, lay, steps):
    """Goes on from what the save directory has, and saves it again under one tag."""
    engine = engine_of(DIMS, lay, store, mount=mount)
    save = os.path.join(out, 'save')
    if os.path.exists(os.path.join(save, 'latest')):
        engine.load_checkpoint(save)
    assert engine.global_steps == steps - 2
    train(engine, DIMS, lay, engine.global_steps, 2)
    assert engine.save_checkpoint(save, tag='best')
    engine.destroy()
    if Par.rank == 0:
        assert read(save, 'latest') == 'best'
        held = torch.load(os.path.join(save, 'best', 'mp_rank_00_model_states.pt'),
                          weights_only=False)
        assert held['global_steps'] == steps


def test_a_job_goes_on_from_its_save_directory(ckptfs, tmp_path):
    _, mount = ckptfs.start()
    out = str(tmp_path)
    lives = [Layout(stage=1, dp=2), Layout(stage=2, dp=2), Layout(stage=1, dp=1)]
    for number, lay in enumerate(lives):
        lay = replace(lay, universal=True)
        run(life, lay.world, (out, ckptfs.store, mount, lay, 2 * number + 2), out)
    steps = os.listdir(os.path.join(mount, 'run', 'job', 'step'))
    assert sorted(steps) == ['best', 'best-1', 'best-2']


SCRIPT = """
import os, sys
os.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', LOCAL_SIZE='1',
                  MASTER_ADDR='127.0.0.1', MASTER_PORT=sys.argv[2], DS_ACCELERATOR='cpu')
import torch, deepspeed
deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
deepspeed.init_distributed('gloo', verbose=False)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
config = {'train_micro_batch_size_per_gpu': 2, 'zero_allow_untested_optimizer': True,
          'zero_optimization': {'stage': 1}, 'bf16': {'enabled': True}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for _ in range(3):
    engine.backward(engine(torch.ones(2, 64, dtype=torch.bfloat16)).sum())
    engine.step()
engine.save_checkpoint(sys.argv[1])
"""


def test_an_unmodified_script(ckptfs, tmp_path):
    """Told by the environment alone; it ends without a word to us."""
    _, mount = ckptfs.start()
    script, save = tmp_path / 'train.py', tmp_path / 'save'
    script.write_text(SCRIPT)
    sites = os.environ['PYTHONPATH'].split(':')[0]
    (tmp_path / 'ckptfs.pth').symlink_to(os.path.join(sources(), 'ckptfs.pth'))
    with held_port() as port:
        start = (f'import runpy, site, sys; sys.argv = {["train.py", str(save), str(port)]}; '
                 f'site.addsitedir("{tmp_path}"); runpy.run_path("{script}")')
        done = subprocess.run([sys.executable, '-c', start], check=True, timeout=300, env={
            **os.environ, 'PYTHONPATH': sites, 'CKPTFS_STORE': ckptfs.store, 'CKPTFS_RUN': 'mine',
            'CKPTFS_MOUNT': mount}, stderr=subprocess.PIPE, text=True)
    assert 'leaked' not in done.stderr and 'ckptfs' not in done.stderr
    assert read(save, 'latest') == 'global_step3'
    assert 'zero' in os.listdir(os.path.join(save, 'global_step3'))
    assert 'global_step3' in os.listdir(os.path.join(mount, 'run', 'mine', 'step'))


HOOKED = """
import os, site, sys
site.addsitedir(os.environ['SITE'])
assert 'torch' not in sys.modules and 'ckptfs' not in sys.modules
import json
import deepspeed
assert hasattr(deepspeed.DeepSpeedEngine._configure_checkpointing, '_ckptfs_original')
assert 'ckptfs' not in sys.modules
assert deepspeed.runtime.engine.__spec__.loader.get_source('deepspeed.runtime.engine')
"""


def sources():
    """Where the package's files lie."""
    import _ckptfs_hook
    return os.path.dirname(os.path.realpath(_ckptfs_hook.__file__))


def test_the_hook_of_every_interpreter(tmp_path):
    for name in ('_ckptfs_hook.py', 'ckptfs.pth'):
        os.symlink(os.path.join(sources(), name), tmp_path / name)
    environment = {**os.environ, 'SITE': str(tmp_path), 'PYTHONPATH': ''}
    subprocess.run([sys.executable, '-c', HOOKED], env=environment, check=True)
    os.unlink(tmp_path / '_ckptfs_hook.py')  # half uninstalled
    done = subprocess.run([sys.executable, '-c', 'import site; site.addsitedir("%s")' % tmp_path],
                          env=environment, check=True, capture_output=True, text=True)
    assert done.stderr == ''
