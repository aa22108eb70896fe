# SPDX-License-Identifier: Apache-2.0
"""Optimizers that megatron-core saves by buckets of ranks (dp_reshardable, the default of its trainer).

Such a directory does not say which parameter lies where.  make_megatron.py keeps what each rank's optimizer has in memory
when it saves (`live`), by parameter and range, so the truth is the engine's own and no reader's.
"""
import io
import json
import os
import shutil

import pytest
import torch

import daemon
import launch
import megatron_buckets_job as jobs
from dcp_reads import read_dcp
from megatron_forms import rewrite
from test_megatron_source import assert_same, cut, files_of

LAYERS = 4
BLOCK = 'decoder.layers.'
# name: (tp, experts' tp, experts of one rank)
JOBS = {'buckets': (2, 2, 0), 'buckets_tp2pp2': (2, 2, 0), 'buckets_many': (1, 1, 0), 'buckets_vpp': (1, 1, 0),
        'buckets_ep2': (1, 1, 2), 'buckets_etp2': (2, 2, 2)}
STATES = ('master', 'exp_avg', 'exp_avg_sq')


@pytest.fixture(scope='module')
def saved():
    """The folder of all models."""
    return os.path.join(daemon.FIXTURES, 'megatron')


@pytest.fixture(scope='module')
def shown(saved, tmp_path_factory):
    """All of them in one mount."""
    program = daemon.Ckptfs(str(tmp_path_factory.mktemp('mount')))
    for name in [*JOBS, 'buckets_new']:
        program.adopt(f'{saved}/{name}', name)
    yield program.mount(), program
    program.close()


def view(mount, run, layout):
    return os.path.join(daemon.step_of(mount, run), 'view', layout)


def key_of(name):
    """The key under which Megatron saves a parameter of its module, and the rank's number of the expert."""
    name = name.replace('input_layernorm.', 'self_attention.linear_qkv.layer_norm_')
    name = name.replace('pre_mlp_layernorm.', 'mlp.linear_fc1.layer_norm_')
    parts = name.split('.')
    if 'local_experts' not in parts:
        return name, None
    at = parts.index('local_experts')
    return '.'.join([*parts[:at], 'experts', *parts[at + 2:]]), int(parts[at + 1])


def shapes_of(saved, name):
    """The shape of each tensor, layer by layer."""
    out = {}
    for key, tensor in torch.load(f'{saved}/{name}/plain.pt').items():
        if key.startswith(BLOCK):
            out |= {f'{BLOCK}{layer}.{key.removeprefix(BLOCK)}': tensor.shape[1:] for layer in range(LAYERS)}
        elif 'optimizer.' not in key:
            out[key] = tensor.shape
    return out


def live_of(saved, name):
    """Returns the states in the engine's memory, put together: {kind: {key: tensor}}."""
    tp, etp, per_rank = JOBS[name]
    shapes = shapes_of(saved, name)
    out = {kind: {key: torch.full(shape, torch.nan) for key, shape in shapes.items()} for kind in STATES}
    for rank in range(4):
        live = torch.load(f'{saved}/{name}/live/{rank}.pt')
        for parameter, first, states in live['states']:
            key, expert = key_of(parameter)
            if 'output_layer' in key and key not in shapes:
                key = 'embedding.word_embeddings.weight'  # tied
            places = torch.arange(shapes[key].numel()).view(shapes[key])
            if expert is None:
                places = cut(key, places, live['ranks']['tp'], tp)
            else:
                places = cut(key, places[live['ranks']['ep'] * per_rank + expert], live['ranks']['etp'], etp)
            assert set(states) == set(STATES)
            for kind, value in states.items():
                out[kind][key].view(-1)[places.reshape(-1)[first:first + value.numel()]] = value
    assert not any(tensor.isnan().any() for kind in STATES for tensor in out[kind].values())
    return out


def files_of_live(live):
    """The same under the names of transformers' files."""
    out = {}
    for kind in STATES:
        stacked = {k: v for k, v in live[kind].items() if not k.startswith(BLOCK)}
        for key in {k.split('.', 3)[3] for k in live[kind] if k.startswith(BLOCK)}:
            stacked[BLOCK + key] = torch.stack([live[kind][f'{BLOCK}{layer}.{key}'] for layer in range(LAYERS)])
        out |= {f'{kind}/{k}': v for k, v in files_of(stacked, 'llama').items()}
    return out


@pytest.mark.parametrize('name', JOBS)
def test_masters_and_moments_are_those_in_the_engines_memory(shown, saved, name):
    got = torch.load(view(shown[0], name, 'tp1') + '/rank0/optimizer.pt')
    steps = {k: v for k, v in got.items() if k.startswith('step/')}
    live = live_of(saved, name)
    assert_same({k: v for k, v in got.items() if k not in steps},
                {f'{kind}/{key}': tensor for kind in STATES for key, tensor in live[kind].items()}, name)
    assert len(steps) == len(live['master']) and {int(v) for v in steps.values()} == {2}


def left_out(program, name):
    info = json.loads(program.run('info', name, '--store', program.store, '--json').stdout)
    return [one for one in info['left_out'] if one.get('part') == 'optimizer']


def test_what_nothing_tells_apart_is_left_out_with_the_reason_and_the_remedy(shown):
    """Before the first step all norms are one: each of them may be any."""
    [left] = left_out(shown[1], 'buckets_new')
    assert 'dp_reshardable' in left['why'] and 'layer_norm_weight' in left['why'] and 'same values' in left['why'], left
    assert '--dist-ckpt-optim-fully-reshardable' in left['needs']
    assert os.path.exists(view(shown[0], 'buckets_new', 'tp1') + '/rank0/model.pt')
    assert not left_out(shown[1], 'buckets')


# ---- what Megatron itself refuses ------------------------------------------------------------


def run(worker, world, folder, *words):
    """Returns the states in the memory of ranks that have gone on."""
    assert launch.launch(worker, world, words, f'{folder}/log'), launch.errors_of(f'{folder}/log', world)


def test_megatron_itself_loads_no_other_degrees(saved):
    """The reason for all of this; the fixture has asked it."""
    with open(f'{saved}/buckets_tp2pp2/refused.txt', encoding='utf-8') as f:
        said = f.read()
    assert 'Global shape mismatch' in said and 'optimizer.distributed' in said, said[-500:]


def test_fsdp2_goes_on_with_the_optimizer_of_tp2_pp2(shown, saved, tmp_path):
    folder = view(shown[0], 'buckets_tp2pp2', 'dp2_fp32_hf')
    run(jobs.fsdp_worker, 2, tmp_path, view(shown[0], 'buckets_tp2pp2', 'tp1') + '/huggingface', folder + '/dcp', f'{tmp_path}/out')
    out = torch.load(f'{tmp_path}/out')
    found = {k: v for k, v in out['found'].items() if not k.startswith('step/')}
    assert_same(found, files_of_live(live_of(saved, 'buckets_tp2pp2')), 'fsdp2')
    assert {float(v) for k, v in out['found'].items() if k.startswith('step/')} == {2}
    assert out['rates'] == [(0.01, 0.1), (0.01, 0.0)]


@pytest.mark.parametrize('stage', [1, 3])
def test_deepspeed_goes_on_with_the_optimizer_of_tp2_pp2(shown, saved, tmp_path, stage):
    folder = view(shown[0], 'buckets_tp2pp2', f'dp2_zero{stage}_hf')
    run(jobs.engine_worker, 2, tmp_path, view(shown[0], 'buckets_tp2pp2', 'tp1') + '/huggingface', folder + '/deepspeed',
        f'{tmp_path}/out', stage)
    out = torch.load(f'{tmp_path}/out')
    assert_same(out['found'], files_of_live(live_of(saved, 'buckets_tp2pp2')), 'deepspeed')
    assert {rate for rate, _ in out['rates']} == {0.01}


def test_ranks_of_other_degrees_have_their_parts(shown, saved):
    """From two tensor-parallel ranks of two stages to four of one, and from two ranks of experts to four."""
    live = live_of(saved, 'buckets_tp2pp2')
    for rank in range(4):
        got = torch.load(view(shown[0], 'buckets_tp2pp2', 'tp4') + f'/rank{rank}/optimizer.pt')
        for kind in STATES:
            for key, tensor in live[kind].items():
                if 'embeddings' not in key and 'output_layer' not in key:  # padded for four
                    assert torch.equal(got[f'{kind}/{key}'], cut(key, tensor, rank, 4)), (kind, key)
    live = live_of(saved, 'buckets_ep2')
    for rank in range(4):
        got = torch.load(view(shown[0], 'buckets_ep2', 'dp4_ep4') + f'/rank{rank}/optimizer.pt')
        for kind in STATES:
            for key in (k for k in live[kind] if 'experts' in k):
                assert torch.equal(got[f'{kind}/{key}'], live[kind][key][rank:rank + 1]), (kind, key)


def test_dcp_and_files_have_the_weights_and_states(shown, saved):
    live = live_of(saved, 'buckets_vpp')
    state = read_dcp(view(shown[0], 'buckets_vpp', 'dp4') + '/dcp')
    for kind in ('exp_avg', 'exp_avg_sq'):
        got = {k.removeprefix('optim.state.').removesuffix('.' + kind): v for k, v in state.items() if k.endswith('.' + kind)}
        assert_same(got, live[kind], kind)
    weights = {k: v.to(torch.float16) for k, v in live['master'].items()}
    assert_same({k.removeprefix('model.'): v for k, v in state.items() if k.startswith('model.')}, weights, 'weights')


# ---- saves that something happened to --------------------------------------------------------


def copy(saved, name, folder):
    """A copy of a save directory; its step."""
    shutil.copytree(f'{saved}/{name}', folder)
    return f'{folder}/iter_0000007'


def chunks_of(metadata, kind, group=0):
    """Places of a bucket's chunks in the order of its elements."""
    ending = f'dp_group_idx_{group}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.{kind}'
    return sorted((i for i in metadata.storage_data if i.fqn.endswith(ending)), key=lambda i: i.offset[0])


def swapped_layers(step):
    """The masters of one matrix of two layers: they are not in the order any more."""

    def change(metadata):
        data, chunks = metadata.storage_data, chunks_of(metadata, 'param')
        sizes = {c.offsets[0]: c.sizes[0] for c in metadata.state_dict_metadata[chunks[0].fqn].chunks}
        one, other = [i for i in chunks if sizes[i.offset[0]] == 1024][:2]
        data[one], data[other] = data[other], data[one]

    rewrite(step, change)


def swapped_ranks(step):
    """All masters of two tensor-parallel ranks."""

    def change(metadata):
        for one, other in zip(chunks_of(metadata, 'param'), chunks_of(metadata, 'param', 1)):
            data = metadata.storage_data
            data[one], data[other] = data[other], data[one]

    rewrite(step, change)


def other_bytes(step):
    """One bit of one master."""

    def change(metadata):
        place = metadata.storage_data[chunks_of(metadata, 'param')[1]]
        with open(f'{step}/{place.relative_path}', 'r+b') as f:
            f.seek(place.offset)
            archive = f.read(place.length)
            values = torch.load(io.BytesIO(archive))
            at = archive.index(values.numpy().tobytes())
            f.seek(place.offset + at + 3)
            f.write(bytes([archive[at + 3] ^ 1]))

    rewrite(step, change)


def shorter(step):
    """A bucket without its last parameter."""

    def change(metadata):
        for kind in ('param', 'exp_avg', 'exp_avg_sq'):
            *_, last = chunks_of(metadata, kind)
            entry = metadata.state_dict_metadata[last.fqn]
            entry.size = torch.Size([last.offset[0]])
            entry.chunks = [c for c in entry.chunks if c.offsets != last.offset]
            del metadata.storage_data[last]

    rewrite(step, change)


def other_degrees(step):
    """Arguments of another job."""
    common = torch.load(f'{step}/common.pt', weights_only=False)
    common['args'].tensor_model_parallel_size, common['args'].pipeline_model_parallel_size = 1, 2
    torch.save(common, f'{step}/common.pt')


@pytest.mark.parametrize('change', [swapped_layers, swapped_ranks, other_bytes, shorter, other_degrees])
def test_what_is_not_proved_is_left_out_and_the_weights_are_there(saved, ckptfs, tmp_path, change):
    step = copy(saved, 'buckets', f'{tmp_path}/run')
    change(step)
    ckptfs.adopt(f'{tmp_path}/run', 'run')
    [left] = left_out(ckptfs, 'run')
    assert 'nothing proves which parameter lies where' in left['why'], left
    folder = view(ckptfs.mount(), 'run', 'tp1')
    assert not any(k.startswith('master/') for k in torch.load(folder + '/rank0/optimizer.pt'))
    weights = torch.load(f'{saved}/buckets/plain.pt')
    assert torch.equal(torch.load(folder + '/rank0/model.pt')['output_layer.weight'], weights['output_layer.weight'])
