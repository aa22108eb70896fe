# SPDX-License-Identifier: Apache-2.0
"""Snapshots of states that lie in parts on several ranks, through a mount in other
layouts, bit for bit."""
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import threading

import ckptfs as library
import fsspec
import pytest
import torch
from ckptfs import dcp
from ckptfs.dcp_reader import Planner, Reader
from ckptfs.dtensor import boxes_of
from ckptfs.saved_values import SavedValues
from ckptfs.state import Model, State
from ckptfs.step_files import Directory, tensors_of
from daemon import step_of, wait_until
from gathered import assert_equal, gathered
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from test_snapshot import Trainer, durable_steps

NORM, UP, DOWN = ('model.norm.weight', 'model.layers.0.mlp.up_proj.weight',
                  'model.layers.0.mlp.down_proj.weight')


class Parts:
    """The part that one of three ranks has of a model; a collector."""

    lazy = False

    def __init__(self, truth, rank):
        self.truth, self.rank = truth, rank

    def start(self, rank, world):
        """Nothing to say to the others."""
        assert (rank, world) == (self.rank, 3)

    def states(self):
        """Boxes of a weight, flat ranges of another, flat ranges of columns of states."""
        rank, truth = self.rank, self.truth
        begin, end = ((0, 5), (5, 12), (12, 12))[rank]
        yield State(UP, 'weight', '', truth[UP][begin:end], shape=(12, 8), offsets=(begin, 0))
        row = truth[DOWN].flatten()
        begin, end = ((0, 1), (1, 40), (40, 96))[rank]
        yield State(DOWN, 'weight', '', row[begin:end], shape=(8, 12), flat=(begin, end))
        column, begin, end = ((0, 0, 60), (5, 0, 60), (0, 60, 60))[rank]
        state = truth[f'exp_avg/{UP}']
        local = state[:, :5] if column == 0 else state[:, 5:]
        width = local.shape[1]
        row = local.flatten()
        end = min(end, len(row))
        yield State(UP, 'exp_avg', '', row[begin:end], shape=(12, 8), flat=(begin, end),
                    pieces=[((0, column), (12, column + width), (0, 0))],
                    local_shape=(12, width))
        if rank > 0:  # a stage that rank 0 is not of
            yield State(NORM, 'weight', '', truth[NORM], ranks=(1, 2))
            yield State(NORM, 'exp_avg', '', truth[f'exp_avg/{NORM}'], ranks=(1, 2))
        yield State(UP, 'step', '', truth[f'step/{UP}'])

    def collect(self):
        """Returns what is asked of a collector."""
        names = [UP, DOWN, NORM][:2 if self.rank == 0 else 3]
        model = Model([(name, 'trainable') for name in names], per_rank=True,
                      layout='dp3_zero3')
        return model, list(self.states()), [('', names, library.state.hyper_parameters({'lr': 1.0}))]


def make_truth():
    """Whole states."""
    return {UP: torch.randn(12, 8), DOWN: torch.randn(8, 12).bfloat16(), NORM: torch.randn(8),
            f'exp_avg/{UP}': torch.randn(12, 8), f'exp_avg/{NORM}': torch.randn(8),
            f'step/{UP}': torch.tensor(3.0)}


@pytest.fixture(name='savers')
def savers_fixture(ckptfs):
    """savers(collectors): one for each rank, which end with the test."""
    made = []

    def start(collectors):
        wait_until(lambda: 'snapshots' in ckptfs.run('status', '--store', ckptfs.store, '--json',
                                                     check=False).stdout,
                   'the receiver')
        for rank, collector in enumerate(collectors):
            made.append(library.Saver(collector, 'job', ckptfs.store, rank=rank,
                                      world=len(collectors), job='x'))
        return made

    yield start
    for saver in made:
        saver.close()


def test_parts_of_all_kinds_are_whole_in_every_layout(ckptfs, savers):
    daemon, mount = ckptfs.start()
    truth = make_truth()
    ranks = savers([Parts(truth, rank) for rank in range(3)])
    assert all(saver.save(4) for saver in ranks)
    assert all(saver.wait_durable(4, 60) for saver in ranks)
    wait_until(lambda: durable_steps(ckptfs) == ['4'], 'the step on disk', daemon)
    view = os.path.join(step_of(mount, 'job', '4'), 'view')
    assert 'dp3_zero3' in os.listdir(view)
    for layout, world in (('tp1', 1), ('tp2', 2), ('dp2_tp2_zero1', 4), ('dp3_zero3', 3)):
        assert_equal(gathered(os.path.join(view, layout), world), truth)
    # Each tensor whole in one file, without the ranks' own.
    done = json.loads(ckptfs.run('compact', '--store', ckptfs.store, '--json', 'job/4').stdout)
    assert done['packed_files'] == 1 and done['in_place_files'] == 0
    collected = json.loads(ckptfs.run('gc', '--store', ckptfs.store, '--json').stdout)
    assert collected['directories'] == 1 and os.listdir(f'{ckptfs.store}/blobs/snapshots') == []
    for layout, world in (('tp1', 1), ('tp2', 2), ('dp2_tp2_zero1', 4), ('dp3_zero3', 3)):
        assert_equal(gathered(os.path.join(view, layout), world), truth)
    assert all(saver.save(5) for saver in ranks)
    assert all(saver.wait_durable(5, 60) for saver in ranks)
    ckptfs.run('verify', '--store', ckptfs.store, 'job/4')


def test_parts_that_leave_a_gap_are_no_step(ckptfs, savers):
    daemon, mount = ckptfs.start()
    truth = make_truth()
    collectors = [Parts(truth, rank) for rank in range(3)]
    ranks = savers(collectors)
    whole = collectors[1].states
    collectors[1].states = lambda: [
        s for s in whole() if (s.parameter, s.kind) != (UP, 'exp_avg')]
    assert all(saver.save(4) for saver in ranks)
    assert not any(saver.wait_durable(4, 60) for saver in ranks)
    collectors[1].states = whole
    assert all(saver.save(5) for saver in ranks)
    assert all(saver.wait_durable(5, 60) for saver in ranks)
    wait_until(lambda: durable_steps(ckptfs) == ['5'], 'the step on disk', daemon)
    assert ranks[0].status()['dropped'] == 1
    assert f"'{UP}' (exp_avg)" in ranks[0].status()['last_drop']
    assert os.listdir(os.path.join(mount, 'run', 'job', 'step')).count('4') == 0


def torch_indexes(size, dim, mesh, at, placements):
    """Returns what torch.chunk leaves of a dimension, index by index."""
    held = torch.arange(size)
    for ranks, rank, placement in zip(mesh, at, placements):
        if isinstance(placement, Replicate) or placement.dim != dim:
            continue
        inner = getattr(placement, 'split_factor', 1)
        parts = [torch.chunk(c, ranks) for c in torch.chunk(held, inner)]
        none = held[:0]
        held = torch.cat([c[rank] if rank < len(c) else none for c in parts])
    return held


def test_boxes_are_what_torch_cuts():
    seed = random.Random(1)
    for _ in range(300):
        shape = [seed.randrange(0, 12) for _ in range(seed.randrange(0, 4))]
        mesh = [seed.randrange(1, 5) for _ in range(seed.randrange(1, 4))]
        kinds = [Replicate()] + [Shard(d) for d in range(len(shape))] + [
            _StridedShard(d, split_factor=seed.randrange(1, 4)) for d in range(len(shape))]
        placements = [seed.choice(kinds) for _ in mesh]
        whole = torch.arange(math.prod(shape)).view(shape)
        for at in itertools.product(*map(range, mesh)):
            truth = whole
            for dim, size in enumerate(shape):
                held = torch_indexes(size, dim, mesh, at, placements)
                truth = truth.index_select(dim, held)
            local = torch.full(truth.shape, -1)
            for begin, end, place in boxes_of(shape, mesh, at, placements):
                box = tuple(slice(b, e) for b, e in zip(begin, end))
                local[tuple(slice(p, p + e - b) for b, e, p in zip(begin, end, place))] = whole[box]
            assert torch.equal(local, truth), (shape, mesh, at, placements)


# ---- real jobs ---------------------------------------------------------------

LAYOUTS = (('tp1', 1), ('tp2', 2), ('dp3_zero3', 3))
OWN = {'fsdp': 'dp4_zero3', 'offload': 'dp4_zero3', 'hsdp': 'dp4_zero3', 'grid': 'tp2_dp2_zero3', 'tensor': 'tp2'}


@pytest.fixture(name='job')
def job_fixture(tmp_path, ckptfs):
    """job(world): its ranks, which end with the test."""
    jobs = []

    def start(world):
        jobs.append(Trainer(tmp_path, ckptfs.store, world, script='sharded_trainer.py'))
        return jobs[-1]

    yield start
    for one in jobs:
        one.close()


def check_kind(mount, trainer, kind, by=''):
    """Trains a model that is sharded so; its steps are what the live job had."""
    trainer.tell(f'make {kind} {by}', 'made')
    for step in range(2):
        answers = trainer.tell('step', 'saved')
        assert all(taken == 'True' for _, taken, _ in answers), trainer.said()
    # The backward pass ran while the first step's copies waited; who names only where to
    # has them copied by torch before that.
    assert by == 'url' or any(late == '1' for _, _, late in answers), answers
    assert trainer.durable(1), trainer.said()
    for step in ('0', '1'):
        truth = torch.load(os.path.join(trainer.folder, f'truth-{kind}-{step}.pt'))
        view = os.path.join(step_of(mount, kind, step), 'view')
        for layout, world in LAYOUTS:
            assert_equal(gathered(os.path.join(view, layout), world), truth)
        own = f'dp{len(trainer.ranks)}' if by else OWN[kind]
        world = len(trainer.ranks)
        assert own in os.listdir(view)
        assert_equal(gathered(os.path.join(view, own), world), truth)


def test_four_ranks_of_every_kind(ckptfs, job):
    _, mount = ckptfs.start()
    trainer = job(4)
    for kind in ('fsdp', 'offload', 'hsdp', 'grid'):
        check_kind(mount, trainer, kind)
    trainer.end()


def test_dcp_saves_by_its_own_plug_in(ckptfs, job):
    _, mount = ckptfs.start()
    trainer = job(2)
    check_kind(mount, trainer, 'fsdp', 'dcp')
    view = os.path.join(step_of(mount, 'fsdp', '1'), 'view', 'tp1')
    assert trainer.tell(f'load {view}', 'loaded') == [['True'], ['True']], trainer.said()
    older = os.path.join(step_of(mount, 'fsdp', '0'), 'view', 'tp1')
    assert trainer.tell(f'load {older}', 'loaded') == [['False'], ['False']]
    trainer.end()


def test_dcp_saves_and_loads_by_a_url(ckptfs, job):
    """The upload's thread talks while the training's does; the load needs no mount, and
    brings hyper-parameters and documents."""
    _, mount = ckptfs.start()
    trainer = job(2)
    check_kind(mount, trainer, 'fsdp', 'url')
    ckptfs.umount(mount)
    for step, newest in ((1, 'True'), (0, 'False')):
        url = f'ckptfs://{ckptfs.store}/fsdp/{step}'
        assert trainer.tell(f'load {url}', 'loaded') == [[newest]] * 2, trainer.said()
    trainer.end()


def test_dcp_state_dicts_of_one_process(ckptfs, monkeypatch, caplog):
    """Flattened optimizers, ties, documents; what cannot be named is dropped by name."""
    monkeypatch.setattr(dcp, '_SAVERS', {})
    _, mount = ckptfs.start()
    wait_until(lambda: 'snapshots' in ckptfs.run('status', '--store', ckptfs.store, '--json').stdout,
               'the receiver')
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    net[2].weight = net[0].weight
    optimizer = torch.optim.AdamW([{'params': net[0].parameters(), 'lr': 0.5},
                                   {'params': [*net[1].parameters(), net[2].bias]}])
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    model, states = get_state_dict(
        net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    truth = {k: v.clone() for k, v in model.items() if k != '2.weight'}
    for key, value in states.items():
        if key.startswith('state.') and key.split('.', 1)[1].rpartition('.')[0] != '2.weight':
            name, _, kind = key.removeprefix('state.').rpartition('.')
            truth[f'{kind}/{name}'] = value.clone()
    given = {'model': model, 'optim': states, 'loader': {'at': 7, 'seen': torch.arange(3)}}
    torch.distributed.checkpoint.save(given, storage_writer=dcp.Writer(),
                                      checkpoint_id=f'ckptfs://{ckptfs.store}/dcp/3')
    step = step_of(mount, 'dcp', '3')
    assert_equal(gathered(os.path.join(step, 'view', 'tp1'), 1), truth)
    plain = os.path.join(ckptfs.folder, 'export')
    ckptfs.run('export', '--store', ckptfs.store, 'dcp/3', 'tp1', plain)
    loaded = {'model': {k: torch.zeros_like(v) for k, v in model.items()}}
    torch.distributed.checkpoint.load(loaded, storage_reader=Reader(plain), planner=Planner())
    assert_equal(loaded['model'], dict(model))
    given['optim'] = optimizer.state_dict()
    with pytest.raises(CheckpointException, match='numbers its parameters'):
        torch.distributed.checkpoint.save(given, storage_writer=dcp.Writer(),
                                          checkpoint_id=f'ckptfs://{ckptfs.store}/dcp/4')
    assert 'numbers its parameters' in caplog.text
    assert durable_steps(ckptfs) == ['3']
    for saver in dcp._SAVERS.values():
        saver.close()


def test_state_dicts_of_several_models(ckptfs, monkeypatch):
    """A model beside the one that is trained is a document; one that is trained, too, is another
    run's.  A name in a configuration is not a model."""
    monkeypatch.setattr(dcp, '_SAVERS', {})
    ckptfs.start()
    nets = [torch.nn.Linear(4, 4) for _ in range(2)]
    each = []
    for net in nets:
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        each.append(dict(zip(('model', 'optim'), get_state_dict(net, optimizer))))
    url = f'ckptfs://{ckptfs.store}/job'

    def save(state, step):
        torch.distributed.checkpoint.save(state, checkpoint_id=f'{url}/{step}')
        return str(step) in durable_steps(ckptfs)

    config = {'model': {'hidden': 4}, 'data': 'x'}
    assert save({'config': config, **each[0], 'teacher': {'model': each[1]['model']}}, 1)
    loaded = {'model': {k: torch.zeros_like(v) for k, v in each[0]['model'].items()}}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=f'{url}/1')
    assert_equal(loaded['model'], dict(each[0]['model']))
    with pytest.raises(CheckpointException, match='disc.optim belongs to disc.model, not to gen.model'):
        save({'gen': each[0], 'disc': each[1]}, 2)
    assert durable_steps(ckptfs) == ['1']
    for saver in dcp._SAVERS.values():
        saver.close()


def test_memory_of_runs_that_are_over_goes(ckptfs, monkeypatch):
    monkeypatch.setattr(dcp, '_SAVERS', {})
    ckptfs.start()
    for run in range(dcp.KEPT_RUNS + 3):
        torch.distributed.checkpoint.save(
            {'w': torch.full((3,), float(run))}, checkpoint_id=f'ckptfs://{ckptfs.store}/job{run}/1')
    assert [run for _, run in dcp._SAVERS] == [f'job{run}' for run in range(3, dcp.KEPT_RUNS + 3)]
    wait_until(lambda: json.loads(ckptfs.run('status', '--store', ckptfs.store, '--json').stdout)[0]
               ['status']['snapshots']['ranks'] == dcp.KEPT_RUNS, 'the arenas to go')
    for saver in dcp._SAVERS.values():
        saver.close()


def save_by_a_process(store, folder):
    """One rank that has each of its saves done by torch's process; what it asked for is taken."""
    os.environ.update(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0', MASTER_ADDR='127.0.0.1', MASTER_PORT='0')
    torch.distributed.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=0,
                                         world_size=1)
    writer = dcp.Writer(store, 'job', 2)
    for how in ({'checkpoint_id': f'ckptfs://{store}/job/1'}, {'storage_writer': writer}):
        torch.distributed.checkpoint.async_save(
            {'model': {'w': torch.arange(9.)}}, **how,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS).result(120)
    assert writer.taken and writer._saver.wait_durable(2)
    os._exit(0)


def test_saves_by_a_process_of_torch(ckptfs, tmp_path):
    ckptfs.start()
    rank = multiprocessing.get_context('spawn').Process(target=save_by_a_process,
                                                        args=(ckptfs.store, tmp_path))
    rank.start()
    rank.join(240)
    assert rank.exitcode == 0
    assert sorted(durable_steps(ckptfs)) == ['1', '2']
    for step in '12':
        loaded = {'model': {'w': torch.zeros(9)}}
        torch.distributed.checkpoint.load(
            loaded, checkpoint_id=f'ckptfs://{ckptfs.store}/job/{step}')
        assert torch.equal(loaded['model']['w'], torch.arange(9.))


def test_a_url_means_what_was_saved_last(ckptfs, monkeypatch):
    """A step that is saved again is another attempt; what is not a step or not a number is refused."""
    monkeypatch.setattr(dcp, '_SAVERS', {})
    ckptfs.start()
    wait_until(lambda: 'snapshots' in ckptfs.run('status', '--store', ckptfs.store, '--json').stdout,
               'the receiver')
    url = f'ckptfs://{ckptfs.store}/job/7'
    for value in (1.0, 2.0):
        torch.distributed.checkpoint.save({'w': torch.full((3,), value)}, checkpoint_id=url)
    assert sorted(durable_steps(ckptfs)) == ['7', '7-1']
    for step, value in (('7', 2.0), ('7-1', 2.0), ('latest', 2.0)):
        loaded = {'w': torch.zeros(3)}
        torch.distributed.checkpoint.load(
            loaded, checkpoint_id=f'ckptfs://{ckptfs.store}/job/{step}')
        assert loaded['w'].tolist() == [value] * 3
    for bad in ('job/8', 'job/x/../7'):
        with pytest.raises((CheckpointException, AssertionError)):
            torch.distributed.checkpoint.load(
                {'w': torch.zeros(3)}, checkpoint_id=f'ckptfs://{ckptfs.store}/{bad}')
    for bad in ('ckptfs://job/7', f'ckptfs://{ckptfs.store}/job/seven'):
        with pytest.raises(CheckpointException, match=f'{bad} is not|invalid literal'):
            torch.distributed.checkpoint.save({'w': torch.ones(3)}, checkpoint_id=bad)
    with pytest.raises(NotImplementedError, match='ckptfs mount'):
        fsspec.open(url).open()
    for saver in dcp._SAVERS.values():
        saver.close()


def test_saves_that_overlap_do_not_mix(ckptfs, monkeypatch):
    """async_save is called again while it still saves: each step has its own tensors."""
    monkeypatch.setattr(dcp, '_SAVERS', {})
    ckptfs.start()
    wait_until(lambda: 'snapshots' in ckptfs.run('status', '--store', ckptfs.store, '--json').stdout,
               'the receiver')
    url, saver_of, second = f'ckptfs://{ckptfs.store}/job', dcp._saver, []

    def save(step):
        torch.distributed.checkpoint.save({'w': torch.full((3,), float(step))},
                                          checkpoint_id=f'{url}/{step}')

    def overtaken(*args):
        saver = saver_of(*args)
        if not second:  # the first knows what it saves, and has not begun
            second.append(threading.Thread(target=save, args=(1,)))
            second[0].start()
            second[0].join(1)
        return saver

    monkeypatch.setattr(dcp, '_saver', overtaken)
    save(0)
    second[0].join()
    for step in (0, 1):
        loaded = {'w': torch.zeros(3)}
        torch.distributed.checkpoint.load(loaded, checkpoint_id=f'{url}/{step}')
        assert loaded['w'].tolist() == [step] * 3
    for saver in dcp._SAVERS.values():
        saver.close()


def test_a_save_of_some_ranks_is_dropped(tmp_path):
    torch.distributed.init_process_group('fake', rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(CheckpointException, match='1 of 2 ranks save it'):
            torch.distributed.checkpoint.save({'w': torch.ones(3)}, no_dist=True,
                                              checkpoint_id=f'ckptfs://{tmp_path}/job/1')
    finally:
        torch.distributed.destroy_process_group()


def test_a_save_that_saved_nothing_raises(tmp_path):
    """Where no daemon receives: scripts remove older checkpoints after a save that they waited for."""
    url, state = f'ckptfs://{tmp_path}/none/job/1', {'model': {'w': torch.ones(3)}}
    with pytest.raises(dcp.NotSaved, match='step 1 of the run'):
        torch.distributed.checkpoint.save(state, checkpoint_id=url)
    with pytest.raises(CheckpointException, match='step 2 of the run'):
        torch.distributed.checkpoint.save(state, storage_writer=dcp.Writer(f'{tmp_path}/none', 'job', 2))
    future = torch.distributed.checkpoint.async_save(state, checkpoint_id=url)  # raises nothing
    with pytest.raises(dcp.NotSaved, match='step 1 of the run'):
        getattr(future, 'upload_completion', future).result()


class Code:
    """Runs some when it is loaded by those who let it."""

    def __reduce__(self):
        return os.system, ('touch "$CKPTFS_RAN"',)


def test_loads_run_no_code_and_believe_no_header(tmp_path, monkeypatch):
    monkeypatch.setenv('CKPTFS_RAN', str(tmp_path / 'ran'))
    documents = [{'key': key, 'scope': '', 'pickle': pickle.dumps(value, 2).hex(), 'tensors': []}
                 for key, value in (('bad', Code()), ('good', {'x': 1}))]
    assert SavedValues({'documents': documents}, None).values == {'good.x': 1}
    assert not os.path.exists(tmp_path / 'ran')
    (tmp_path / 'rank0').mkdir()
    files, name = Directory(str(tmp_path)), 'rank0/model.safetensors'

    def written(shape, offsets):
        text = json.dumps({'w': {'dtype': 'F32', 'shape': shape, 'data_offsets': offsets}}).encode()
        (tmp_path / name).write_bytes(len(text).to_bytes(8, 'little') + text + bytes(64))
        return tensors_of(files, name)

    for shape, offsets in (([2], [0, 4]), ([-2, -1], [0, 8]), ([], [-4, 0])):
        with pytest.raises(ValueError, match='w has'):
            written(shape, offsets)
    stored = written([1000], [0, 4000])['w']
    with pytest.raises(EOFError, match='shorter'):
        stored.load(files, (slice(0, 1000),), torch.empty(1000))


def test_two_ranks_and_a_write_to_what_is_being_copied(ckptfs, job):
    _, mount = ckptfs.start()
    trainer = job(2)
    check_kind(mount, trainer, 'tensor')
    for answer in trainer.tell('refuse', 'refused'):
        said = json.loads(' '.join(answer))
        for what, line in zip(('DistributedDataParallel', 'fully_shard (FSDP2)',
                               '1.weight is not sharded', 'weight is placed as P',
                               'different names', 'DistributedDataParallel has ranks'), said,
                             strict=True):
            assert what in line, said
    trainer.tell('make fsdp', 'made')
    trainer.tell('step', 'saved')
    trainer.tell('spoil', 'spoilt')
    trainer.tell('step', 'saved')
    assert trainer.durable(1), trainer.said()
    assert not trainer.durable(0)
    assert 'model.embed_tokens.weight' in trainer.said()
    trainer.end()
