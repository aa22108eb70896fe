# SPDX-License-Identifier: Apache-2.0
"""DCP views: real checkpoints, loaded by torch.distributed.checkpoint at other meshes."""
import gc
import io
import os
import pathlib
import pickle
import shutil
import tempfile
from dataclasses import replace

import launch
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

import dcp_loads
import dcp_model
import dcp_pairs
import huggingface_pairs
import models
from daemon import TALLY, Ckptfs, checkpoint, step_of, truth_of
from dcp_loads import Load

def assert_is_truth(found, truth):
    """Every tensor of the live engine, and no other."""
    assert not dcp_pairs.wrong_of(found, truth)


# A sample of dcp_pairs.py: every mesh; frozen parameters and buffers, ties, states in bf16,
# SGD, ZeRO-3, two groups, tensor-parallel and pipelined sources, models of transformers.
SAMPLE = [('zero1', 'fsdp2'), ('zero2_frozen', 'fsdp3'), ('zero3_2groups', 'hsdp2x2'),
          ('tp2', 'fsdp2_tp2'), ('zero2_tied', 'fsdp3'), ('pp2_untied', 'ddp1'), ('zero2_low', 'fsdp2'),
          ('zero2_momentum', 'fsdp3'), ('qwen2', 'fsdp2'), ('llama_autotp2', 'fsdp3')]


def test_a_sample_of_the_pairs_holds():
    records = dcp_pairs.run_all(SAMPLE)
    assert [r for r in records if not r['ok']] == []


JOB = dcp_model.Job(stage=2, dp=2, groups=2)
HEADS = ('--family-set', f'head_dim={dcp_model.DIM // dcp_model.HEADS}')  # no config.json tells
# mesh -> the layout that is cut for it
MESHES = {'fsdp1': 'tp1', 'fsdp2': 'dp2', 'fsdp3': 'dp3', 'fsdp4': 'dp4', 'hsdp2x2': 'dp2',
          'fsdp2_tp2': 'tp2_dp2', 'tp2': 'tp2'}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """(mount, truth) of a model with tensors of a MiB, trained by DeepSpeed."""
    folder = str(tmp_path_factory.mktemp('trained'))
    program = Ckptfs(folder)
    program.adopt(dcp_model.save(os.path.join(folder, 'made'), JOB), 'job', extra=HEADS)
    yield program.mount('--run', 'job'), torch.load(os.path.join(folder, 'made', 'truth.pt'))
    program.close()


@pytest.fixture(scope='module')
def resaved(trained, tmp_path_factory):
    """The same state as FSDP2 on two ranks saves it: a mount with a run of each key shape."""
    mount, truth = trained
    folder = str(tmp_path_factory.mktemp('resaved'))
    found = dcp_loads.run(os.path.join(mount, 'view', 'dp2_fp32', 'dcp'),
                          job_load(JOB, 'fsdp2', save=folder))
    assert_is_truth(found, truth)
    program = Ckptfs(folder)
    for shape in dcp_loads.SHAPES:
        program.adopt(os.path.join(folder, shape), shape, extra=HEADS)
    yield program.mount()
    program.close()


def state_of(truth, job):
    """The truth as a state dict that torch fills a model with."""
    model = {k.partition('/')[2]: v for k, v in truth.items() if k.startswith('buffer/')}
    model.update({k.partition('/')[2]: v.float() for k, v in truth.items()
                  if k.startswith('weight/')})
    model.update({k.partition('/')[2]: v for k, v in truth.items() if k.startswith('model/')})
    made = job.model()
    optimizer = job.optimizer(made)
    names = {p: n for n, p in made.named_parameters()}
    states = {name: {'step': torch.tensor(3.), 'exp_avg': truth[f'exp_avg/{name}'],
                     'exp_avg_sq': truth[f'exp_avg_sq/{name}']}
              for name in names.values() if f'exp_avg/{name}' in truth}
    groups = [{**group, 'params': [names[p] for p in group['params']]}
              for group in optimizer.param_groups]
    return {'model': model, 'optim': {'state': states, 'param_groups': groups}}


def job_load(job, mesh, **more):
    """A load into the job's model."""
    return Load(mesh, job.model, job.optimizer, dcp_model.torch_step, first_step=3,
                plan=dcp_model.tensor_parallel, **more)


def metadata_of(view):
    """Returns what plain pickle reads."""
    with open(os.path.join(view, '.metadata'), 'rb') as f:
        return pickle.load(f)


def assert_cut_for(found, metadata, mesh):
    """Every rank asks for boxes that the directory has, in the rank's own file."""
    boxes_of_key = {}
    for index, info in metadata.storage_data.items():
        if index.offset is not None:
            boxes_of_key.setdefault(index.fqn, {})[tuple(index.offset)] = info.relative_path
    for rank, boxes in enumerate(found['boxes']):
        for key, offset, size in boxes:
            if key not in found['large']:
                continue
            files, described = boxes_of_key[key], metadata.state_dict_metadata[key].chunks
            assert [tuple(c.sizes) for c in described if tuple(c.offsets) == offset] == [size], key
            if len(files) == len(found['boxes']):  # no two ranks ask for one box
                assert files[offset] == f'__{rank}_0.distcp', (key, offset)


def assert_no_more_is_read(found):
    """Torch reads little more of tensors that are cut than the ranks get."""
    delivered = sum(torch.Size(size).numel() * 4 for boxes in found['boxes']
                    for key, _, size in boxes if key in found['large'])
    assert delivered > 10 * dcp_loads.LARGE
    assert delivered < sum(found['read_large']) <= 1.1 * delivered


# mesh -> the key shapes of FSDP2's own checkpoints that are loaded there, too
RESAVED = {'fsdp3': ('nested',), 'fsdp4': ('titan',), 'fsdp2_tp2': ('flat', 'nested')}


@pytest.mark.parametrize('mesh', MESHES)
def test_a_mesh_finds_the_boxes_that_it_asks_for(trained, resaved, mesh):
    mount, truth = trained
    view = os.path.join(mount, 'view', f'{MESHES[mesh]}_fp32', 'dcp')
    again = [(os.path.join(resaved, 'run', shape, 'step', 'step-3', 'view', MESHES[mesh], 'dcp'),
              shape) for shape in RESAVED.get(mesh, ())]
    load = job_load(JOB, mesh, steps=2, native=state_of(truth, JOB), again=again)
    found = dcp_loads.run(view, load)
    assert_is_truth(found, truth)
    for other in found['again']:  # the keys that they were saved under, without a token
        assert_is_truth(other, truth)
        assert other['groups'] == found['groups']
    assert len(found['again']) == len(again)
    assert {float(v) for k, v in found['tensors'].items() if k.startswith('step/')} == {3.}
    assert [g['lr'] for g in found['groups']] == [1e-3, 2e-3]
    assert found['losses'] == found['native']
    assert_cut_for(found, metadata_of(view), mesh)
    assert_no_more_is_read(found)


def test_any_mesh_loads_any_layout(trained):
    mount, truth = trained
    for mesh, layout in (('fsdp3', 'tp2_dp4'), ('fsdp2_tp2', 'dp8'), ('ddp1', 'tp2_dp3')):
        view = os.path.join(mount, 'view', layout, 'dcp')
        assert_is_truth(dcp_loads.run(view, job_load(JOB, mesh)), truth)


def test_other_key_shapes_by_token(trained):
    """Flattened optimizer, torchtitan's and accelerate's keys; groups of another number."""
    mount, truth = trained
    for token, load in (('flat', {'flat': True}),
                        ('titan', {'flat': True, 'top': ('', 'optimizer')}),
                        ('accelerate', {'top': ('model', 'optimizer')})):
        view = os.path.join(mount, 'view', f'dp2_{token}', 'dcp')
        found = dcp_loads.run(view, job_load(JOB, 'fsdp2', **load))
        assert_is_truth(found, truth)
        assert [g['lr'] for g in found['groups']] == [1e-3, 2e-3]


def test_documents_are_objects_under_their_keys(trained):
    mount, truth = trained
    more = {'iteration': 0, 'seen': {'tokens': 0, 'shards': [], 'note': ''}, 'global_steps': 0}
    view = os.path.join(mount, 'view', 'tp1', 'dcp')
    found = dcp_loads.run(view, job_load(JOB, 'fsdp1', more=more))
    assert_is_truth(found, truth)
    assert found['more'] == {'iteration': 3, 'global_steps': 3,
                             'seen': {'tokens': 216, 'shards': [1, 2], 'note': 'größer'}}


def test_becomes_a_torch_file(trained, tmp_path):
    mount, truth = trained
    for layout in ('tp1', 'tp2_dp4'):
        out = str(tmp_path / 'all.pt')
        dcp_to_torch_save(os.path.join(mount, 'view', layout, 'dcp'), out)
        whole = torch.load(out, weights_only=False)
        want = state_of(truth, JOB)
        assert whole['model'].keys() == want['model'].keys()
        for name, value in want['model'].items():
            assert torch.equal(whole['model'][name], value), name
        assert whole['optim']['state'].keys() == want['optim']['state'].keys()
        for name, state in want['optim']['state'].items():
            for kind, value in state.items():
                assert torch.equal(whole['optim']['state'][name][kind], value), (name, kind)
        assert [g['params'] for g in whole['optim']['param_groups']] == [
            g['params'] for g in want['optim']['param_groups']]
        assert whole['seen'] == {'tokens': 216, 'shards': [1, 2], 'note': 'größer'}


def test_what_is_not_there_is_named(trained):
    mount, _ = trained
    view = os.path.join(mount, 'view', 'tp1', 'dcp')
    with pytest.raises(AssertionError, match='Missing key in checkpoint state_dict: no_such'):
        dcp_loads.run(view, job_load(JOB, 'fsdp1', more={'no_such': 0}))
    assert not os.path.exists(os.path.join(mount, 'view', 'dp2_flat_nested'))


def save_transformers(folder, _):
    """One rank: models of transformers over FSDP2, saved as get_model_state_dict has them."""
    dist.init_process_group('gloo')
    for name in TRANSFORMERS:
        model = models.rounded(models.make(name))
        out = os.path.join(folder, name, 'step-1')
        if dist.get_rank() == 0:
            os.makedirs(out)
            models.write_small_files(model, os.path.dirname(out))
            torch.save(model.state_dict(), os.path.join(folder, f'{name}.pt'))
        dist.barrier()
        for layer in model.get_submodule('model').layers:
            fully_shard(layer)
        fully_shard(model)
        dcp.save({'model': get_model_state_dict(model)}, checkpoint_id=out)
    dist.destroy_process_group()


TRANSFORMERS = ('llama', 'qwen2')  # the second is tied


def test_from_pretrained_reads_what_fsdp_saved(tmp_path):
    log = str(tmp_path / 'log')
    assert launch.launch(save_transformers, 2, (str(tmp_path), 0), log), launch.errors_of(log, 2)
    program = Ckptfs(str(tmp_path))
    try:
        for name in TRANSFORMERS:
            program.adopt(str(tmp_path / name), name)
        mount = program.mount()
        for name in TRANSFORMERS:
            view = os.path.join(step_of(mount, name, 'step-1'), 'view', 'tp1', 'huggingface')
            loaded = huggingface_pairs.load(view)
            assert not huggingface_pairs.differ(loaded.state_dict(),
                                                torch.load(tmp_path / f'{name}.pt'))
            del loaded
        gc.collect()  # nothing of the mount is mapped
    finally:
        program.close()


def read_by_nobody(view, load, out):
    """One process without privileges: DCP's own choice of a reader, for a str and for a path."""
    model = load.model().state_dict()

    def read(**how):
        asked = {'model': {name: torch.empty_like(t) for name, t in model.items()}}
        dcp.load(asked, no_dist=True, **how)
        return asked['model']

    # Python imports much of this when it is first used, and may lie below a closed directory.
    read(storage_reader=FsspecReader(view))
    read(storage_reader=FileSystemReader(pathlib.Path(view)))
    with open(os.devnull, 'wb') as f:
        torch.save(model, f)
    os.chdir('/')
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    chosen = _storage_setup(None, view, reader=True)
    found = read(checkpoint_id=view)
    again = read(storage_reader=FileSystemReader(pathlib.Path(view)))
    assert all(torch.equal(a, b) for a, b in zip(found.values(), again.values()))
    with open(out, 'wb') as f:
        torch.save({'tensors': found, 'reader': type(chosen).__name__}, f)


def test_readers_without_privileges():
    """Where no directory above can be written DCP takes fsspec's reader."""
    assert os.geteuid() == 0, 'becomes another user'
    with tempfile.TemporaryDirectory(dir='/var') as folder:  # /tmp can be written by all
        os.chmod(folder, 0o755)
        program = Ckptfs(folder)
        try:
            made = shutil.copytree(checkpoint('zero1'), os.path.join(folder, 'made'))
            program.adopt(made, 'zero1')
            mount = program.mount('--run', 'zero1')
            view = os.path.join(mount, 'view', 'dp2_fp32', 'dcp')
            out = os.path.join(folder, 'out')
            os.mkdir(out)
            os.chmod(out, 0o777)
            log = os.path.join(out, 'log')
            load = dcp_pairs.tiny_load('zero1', 'fsdp1')
            file = os.path.join(out, 'found.pt')
            assert launch.launch(read_by_nobody, 1, (view, load, file), log), open(f'{log}.0').read()
            found = torch.load(file, weights_only=False)
            assert found['reader'] == 'FsspecReader'
            truth = load_file(truth_of('zero1'))
            for key, value in truth.items():
                if key.startswith('model/'):
                    assert torch.equal(found['tensors'][key[6:]], value)
        finally:
            program.close()


def test_groups_of_pipeline_stages_are_not_united(tmp_path):
    """The second stage's only group has another weight decay than the first's."""
    made = shutil.copytree(checkpoint('pp2_untied'), tmp_path / 'made')
    for file in made.glob('*/*mp_rank_01_optim_states.pt'):
        content = torch.load(file, weights_only=False)
        for group in content['optimizer_state_dict']['base_optimizer_state']['param_groups']:
            group['weight_decay'] = 0.5
        torch.save(content, file)
    program = Ckptfs(str(tmp_path))
    try:
        program.adopt(made, 'stages', extra=TALLY)
        mount = program.mount('--run', 'stages')
        whole = str(tmp_path / 'all.pt')
        dcp_to_torch_save(os.path.join(mount, 'view', 'dp2_flat', 'dcp'), whole)
        decays = {key.split('.')[1]: value for key, value in torch.load(
            whole, weights_only=False)['optim'].items() if key.endswith('.weight_decay')}
        layers = sorted(decays, key=int)
        assert decays[layers[0]] == 0.1 and decays[layers[-1]] == 0.5, decays
        view = os.path.join(mount, 'view', 'dp2_zero1')
        assert not os.path.exists(os.path.join(view, 'deepspeed'))
        said = program.run('explain', os.path.join(view, 'deepspeed'), check=False)
        assert 'group 0 of the optimizer' in said.stdout + said.stderr, said
    finally:
        program.close()


def odd_tensors():
    """Names and shapes that a state dict may have."""
    gen = torch.Generator().manual_seed(5)

    def rand(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=gen).to(dtype)
    return {'plain': rand(3, 5), 'with.many.dots.0.1': rand(7), 'größe.ß.🎉': rand(2, 2),
            '0.1.2': rand(4), 'scalar': rand(), 'empty': rand(0, 6), 'none.left': rand(3, 0),
            'half': rand(9, dtype=torch.float16), 'brain': rand(5, 3, dtype=torch.bfloat16),
            'double': rand(2, dtype=torch.float64), 'long': torch.arange(-3, 4),
            'flags': torch.tensor([True, False, True]), 'bytes': torch.arange(7, dtype=torch.uint8),
            'deep': rand(2, 1, 3, 1, 2), 'large.odd': rand(7, 50001),
            'large.flat': rand(300007), 'a b\tc': rand(2), 'quote"\'\\': rand(1)}


@pytest.fixture(scope='module')
def odd(tmp_path_factory):
    """A mount of a file with odd_tensors()."""
    folder = str(tmp_path_factory.mktemp('odd'))
    program = Ckptfs(folder)
    os.mkdir(os.path.join(folder, 'odd'))
    torch.save(odd_tensors(), os.path.join(folder, 'odd', 'weights.pt'))
    program.adopt(os.path.join(folder, 'odd', 'weights.pt'), 'odd')
    yield program.mount('--run', 'odd')
    program.close()


@pytest.mark.parametrize('layout', ['tp1', 'dp4', 'tp2_dp3', 'dp9_titan'])
def test_odd_names_shapes_and_types(odd, layout):
    view = os.path.join(odd, 'view', layout, 'dcp')
    values = odd_tensors()
    asked = {name: torch.full_like(value, 1) for name, value in values.items()}
    top = asked if layout.endswith('titan') else {'model': asked}
    dcp.load(top, storage_reader=FileSystemReader(view), no_dist=True)
    for name, value in values.items():
        assert torch.equal(asked[name], value), name
    metadata = metadata_of(view)
    ends = {}
    for index, info in metadata.storage_data.items():
        name = index.fqn if layout.endswith('titan') else index.fqn.removeprefix('model.')
        chunk = next(c for c in metadata.state_dict_metadata[index.fqn].chunks
                     if c.offsets == index.offset)
        with open(os.path.join(view, info.relative_path), 'rb') as f:
            f.seek(info.offset)
            one = torch.load(io.BytesIO(f.read(info.length)), weights_only=True)
        box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes))
        assert torch.equal(one, values[name][box]) and one.dtype == values[name].dtype
        ends.setdefault(info.relative_path, []).append((info.offset, info.offset + info.length))
    for file, extents in ends.items():  # one behind the other, without gaps
        extents.sort()
        assert [b for b, _ in extents] == [0] + [e for _, e in extents[:-1]]
        assert extents[-1][1] == os.path.getsize(os.path.join(view, file))
    assert {f for f in os.listdir(view) if f != '.metadata'} == set(ends)
