# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints, in and out, by unmodified transformers and DeepSpeed.

A view/<layout>/huggingface/ must load with from_pretrained, every entry of the
state_dict equal to the truth in every bit and the logits equal; a Hugging Face
directory must be cut for every tensor-parallel degree that its heads allow and
must start an engine.
"""
import contextlib
import gc
import json
import os
import random
import shutil
import struct

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import daemon
import huggingface_pairs as pairs
import make_huggingface
import models
from huggingface_pairs import cut, differ, load, same, source, truth_of

SMALL = ('generation_config.json', 'tokenizer.json', 'tokenizer_config.json')


@pytest.fixture(scope='module')
def mounted(tmp_path_factory):
    """All variants in one mount."""
    program = daemon.Ckptfs(str(tmp_path_factory.mktemp('hf')))
    for variant in pairs.SOURCES:
        program.adopt(source(variant), variant)
    yield program.mount()
    gc.collect()  # models map the view's files, and modules refer to themselves
    program.close()


def view_of(mount, variant, layout='tp1'):
    """The directory of a layout."""
    return os.path.join(daemon.step_of(mount, variant), 'view', layout)


def weights_in(folder):
    """Its files of safetensors, sorted."""
    return sorted(name for name in os.listdir(folder) if name.endswith('.safetensors'))


@pytest.mark.parametrize('variant', pairs.SOURCES)
def test_from_pretrained_loads_the_view(mounted, variant):
    want, logits = truth_of(variant)
    model = load(os.path.join(view_of(mounted, variant), 'huggingface'))
    assert differ(model.state_dict(), want) == []
    assert same(models.logits(model), logits)


@pytest.mark.parametrize('variant', ['qwen2_zero2', 'gpt2_zero3', 'llama'])
def test_names_are_those_of_save_pretrained(mounted, variant, tmp_path):
    folder = os.path.join(view_of(mounted, variant), 'huggingface')
    model = load(folder)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / 'model.safetensors', 'pt') as theirs:
        want, metadata = sorted(theirs.keys()), theirs.metadata()
    got = []
    for name in weights_in(folder):
        with safe_open(os.path.join(folder, name), 'pt') as ours:
            got += ours.keys()
            assert ours.metadata() == metadata
    assert sorted(got) == want


@pytest.mark.parametrize('variant', ['llama', 'gpt2_zero1', 'mixtral_autotp2'])
def test_model_files_are_byte_for_byte(mounted, variant):
    folder = os.path.join(view_of(mounted, variant), 'huggingface')
    for name in SMALL:
        with open(os.path.join(folder, name), 'rb') as ours, \
                open(os.path.join(source(variant), name), 'rb') as theirs:
            assert ours.read() == theirs.read(), name
    weights = ['model.safetensors']
    if variant == 'llama':
        weights = [*weights_in(source(variant)), 'model.safetensors.index.json']
    assert sorted(os.listdir(folder)) == sorted((*SMALL, 'config.json', *weights))


@pytest.mark.parametrize('name,layout,own', [
    ('shards', 'tp1', True), ('shards', 'tp2_bf16', True), ('renamed', 'tp1', True),
    ('copied', 'tp1', True), ('mlx', 'tp1', False), ('unsaid', 'tp1', False),
    ('extra', 'tp1', False), ('empty', 'tp1', False), ('shards', 'fp16', False),
    ('shards', 'fp32', False)])
def test_files_that_need_no_change_are_the_sources_own(ckptfs, tmp_path, name, layout, own):
    """They are served as they are; where one would not load, or is not all shown, none is."""
    folder = tmp_path / name
    shutil.copytree(source('llama'), folder)
    if name != 'shards' and name != 'copied':
        weights = {k: t for n in weights_in(folder) for k, t in load_file(folder / n).items()}
        for file in (*weights_in(folder), 'model.safetensors.index.json'):
            os.unlink(folder / file)
        if name == 'extra':  # a second name of a tensor that the view shows once
            weights['lm_head._orig_mod.weight'] = weights.pop('lm_head.weight')
        if name == 'empty':
            weights['nothing'] = torch.empty(0, 4)
        said = {'mlx': {'format': 'mlx'}, 'unsaid': None}.get(name, {'format': 'pt', 'by': 'a tool'})
        save_file(weights, folder / f'model{".fp16" if name == "renamed" else ""}.safetensors', said)
    theirs = {n: (folder / n).read_bytes() for n in weights_in(folder)}
    ckptfs.adopt(folder, name, extra=('--copy',) if name == 'copied' else ())
    mount = ckptfs.mount('--mode', 'direct')
    shown = os.path.join(view_of(mount, name, layout), 'huggingface')
    ours = {}
    for n in weights_in(shown):
        with open(os.path.join(shown, n), 'rb') as file:
            ours[n] = file.read()
    assert (list(ours.values()) == list(theirs.values())) == own
    status = json.loads(ckptfs.run('status', '--store', ckptfs.store, '--json').stdout)[0]['status']
    assert status['opens']['direct'] == (len(ours) if own and status['passthrough'] else 0)
    if layout == 'tp1' and name not in ('empty', 'extra'):
        model = load(shown)
        assert differ(model.state_dict(), truth_of('llama')[0]) == []


def test_a_dtype_in_the_layout_is_that_of_the_model(mounted):
    want, _ = truth_of('llama_zero2')
    model = load(os.path.join(view_of(mounted, 'llama_zero2', 'tp1_fp32'),
                              'huggingface'))
    got = model.state_dict()
    assert {t.dtype for t in got.values()} == {torch.float32}
    assert differ({k: t.to(torch.bfloat16) for k, t in got.items()}, want) == []
    assert any(not same(t, want[k].float()) for k, t in got.items()), 'masters'


@pytest.mark.parametrize('variant,degrees', [
    ('llama', (1, 2)), ('qwen2', (1, 2)), ('mixtral', (1, 2)), ('gpt2', (1, 2, 3, 6))])
def test_a_directory_is_cut_where_its_heads_allow(mounted, variant, degrees):
    whole = {}
    for name in os.listdir(source(variant)):
        if name.endswith('.safetensors'):
            whole.update(load_file(os.path.join(source(variant), name)))
    for tp in degrees:
        for rank in range(tp):
            layout = f'tp{tp}_etp{tp}' if variant == 'mixtral' else f'tp{tp}'
            got = load_file(os.path.join(view_of(mounted, variant, layout),
                                         f'rank{rank}', 'model.safetensors'))
            want = {k: cut(k, t, tp, rank, variant == 'gpt2') if tp > 1 else t
                    for k, t in whole.items()}
            assert differ(got, want) == [], (tp, rank)
    for tp in {2, 3, 4, 5, 6} - set(degrees):
        assert not os.path.exists(os.path.join(
            view_of(mounted, variant, f'tp{tp}'), 'rank0', 'model.safetensors'))


ROWS, WIDTH = 1_400_000, 1024  # of bf16: 2.87 GB a matrix, which is two shards
MARKED = (0, 1, 699_999, 1_399_998, ROWS - 1)


def save_sparse(folder):
    """A Llama of 5.7 GB, a hole but for some rows of its two largest matrices; {name: tensor} of
    all that is not one of these."""
    config = LlamaConfig(vocab_size=ROWS, hidden_size=WIDTH, intermediate_size=64,
                         num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8,
                         dtype=torch.bfloat16)
    config.architectures = ['LlamaForCausalLM']
    config.save_pretrained(folder)
    with torch.device('meta'):
        shapes = {k: t.shape for k, t in LlamaForCausalLM(config).state_dict().items()}
    header, at = {'__metadata__': {'format': 'mlx'}}, 0  # not shown as it is
    for name, shape in shapes.items():
        header[name] = {'dtype': 'BF16', 'shape': list(shape),
                        'data_offsets': [at, at + 2 * shape.numel()]}
        at += 2 * shape.numel()
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    small = {k: torch.randn(s).bfloat16() for k, s in shapes.items() if s.numel() < ROWS}
    with open(os.path.join(folder, 'model.safetensors'), 'wb') as f:
        f.write(struct.pack('<Q', len(text)) + text)
        f.truncate(8 + len(text) + at)
        put = lambda begin, tensor: os.pwrite(
            f.fileno(), tensor.view(torch.uint8).numpy().tobytes(), 8 + len(text) + begin)
        for name, entry in header.items():
            if name in small:
                put(entry['data_offsets'][0], small[name].flatten())
            elif name in shapes:
                for row in MARKED:
                    put(entry['data_offsets'][0] + row * 2 * WIDTH, row_of(name, row))
    return small


def row_of(name, row):
    """A marked row of a large matrix."""
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(row + len(name))).bfloat16()


def test_a_view_of_several_files_loads(ckptfs, tmp_path):
    """By its index; tensors are mapped, and what nobody looks at is not read."""
    (tmp_path / 'large').mkdir()
    small = save_sparse(tmp_path / 'large')
    ckptfs.adopt(tmp_path / 'large', 'large')
    mount = ckptfs.mount('--mode', 'stream')
    folder = f'{mount}/view/tp1/huggingface'
    shards = [f'model-0000{i}-of-00002.safetensors' for i in (1, 2)]
    assert sorted(n for n in os.listdir(folder) if n.startswith('model')) == [
        *shards, 'model.safetensors.index.json']
    with open(f'{folder}/model.safetensors.index.json') as f:
        index = json.load(f)
    assert set(index['weight_map'].values()) == set(shards)
    assert index['metadata']['total_size'] == 2 * (
        2 * ROWS * WIDTH + sum(t.numel() for t in small.values()))
    model = load(folder)
    got = model.state_dict()
    assert differ({k: got[k] for k in small}, small) == []
    for name in got.keys() - small.keys():
        assert got[name].shape == (ROWS, WIDTH) and got[name].dtype == torch.bfloat16
        for row in MARKED:
            assert same(got[name][row], row_of(name, row)), (name, row)
        assert not got[name][2:100].any()
    del model, got
    gc.collect()  # the files are mapped


def states_of(variant, tp, dp):
    """{<kind>/<name>: tensor} of a tensor-parallel rank, read out of its files by torch alone."""
    stem = f'{source(variant)}/global_step{make_huggingface.STEPS}/'
    three = variant.endswith('zero3')
    read = lambda name: torch.load(stem + name, weights_only=False)
    model = read(f'{"zero_pp_rank_0_" if three else ""}mp_rank_{tp:02d}_model_states.pt')
    ranks = [read(f'bf16_zero_pp_rank_{d}_mp_rank_{tp:02d}_optim_states.pt')['optimizer_state_dict']
             for d in range(dp)]
    held = {}
    for g, group in enumerate(model['param_shapes']):
        for kind in ('master', 'exp_avg', 'exp_avg_sq'):
            parts = [zero['fp32_flat_groups' if three else 'single_partition_of_fp32_groups'][g]
                     if kind == 'master' else
                     zero['optimizer_state_dict' if three else 'base_optimizer_state']['state'][g][kind]
                     for zero in ranks]
            at = 0
            for name, shape in group.items():  # stage 3 cuts each parameter, others all at once
                size = -(-shape.numel() // dp) if three else shape.numel()
                flat = torch.cat([p[at:at + size] for p in parts] if three else parts)
                begin = 0 if three else at
                held[f'{kind}/{name}'] = flat[begin:begin + shape.numel()]
                at += size
    return held


@pytest.mark.parametrize('variant', [v for v, (_, engine) in pairs.SOURCES.items() if engine])
def test_ranks_of_an_engines_own_layout_hold_what_they_had(mounted, variant):
    """Directories and DCP have one rank, which holds all: shown beside them."""
    with open(os.path.join(daemon.step_of(mounted, variant), 'info.json')) as f:
        layout = json.load(f)['layout']
    tp, dp = (2, 1) if 'autotp' in variant else (1, make_huggingface.WORLD)
    assert layout.startswith(f'tp{tp}_' if tp > 1 else f'dp{dp}_')
    folder = view_of(mounted, variant, layout)
    assert sorted(n for n in os.listdir(folder) if n.startswith('rank')) == ['rank0', 'rank1']
    for t in range(tp):
        ranks = [os.path.join(folder, f'rank{d * tp + t}') for d in range(dp)]
        want = pairs.held_by(variant, tp, t)
        for rank in ranks:
            got = load_file(os.path.join(rank, 'model.safetensors'))
            # One that is tied has one name.
            assert [k for k in differ(got, want) if k in got or k != 'lm_head.weight'] == []
        parts = [load_file(os.path.join(rank, 'optimizer.safetensors')) for rank in ranks]
        states = states_of(variant, t, dp)
        assert {k for part in parts for k in part if not k.startswith('step/')} == states.keys()
        for key, tensor in states.items():
            flat = torch.cat([part[key].flatten() for part in parts if key in part])
            assert same(flat[:tensor.numel()], tensor) and not flat[tensor.numel():].any(), key


@pytest.mark.parametrize('variant,engine', [
    ('llama', 'zero1'), ('qwen2', 'zero2'), ('gpt2', 'zero1')])
def test_a_directory_starts_an_engine(mounted, variant, engine):
    directory = os.path.join(view_of(mounted, variant), 'deepspeed')
    record = pairs.starts(pairs.start, variant, variant, engine, directory, True)
    assert record['ok'] and record['loss_diff'] == 0, record


@pytest.mark.parametrize('name,variant', [
    ('llama', 'llama'), ('gpt2', 'gpt2_zero3'), ('qwen2', 'qwen2_zero1')])
def test_a_directory_starts_an_engine_at_zero3(mounted, name, variant):
    directory = os.path.join(view_of(mounted, variant), 'huggingface')
    record = pairs.starts(pairs.start_partitioned, variant, name, directory)
    assert record['different'] == [], record  # one that was trained goes on without its optimizer


def test_without_a_config_the_view_is_absent_and_says_why(ckptfs, tmp_path):
    bare = str(tmp_path / 'bare')
    shutil.copytree(source('llama_zero1'), bare)
    kept = tmp_path / 'model'
    kept.mkdir()
    for name in ('config.json', *SMALL):
        shutil.move(os.path.join(bare, name), kept)
    ckptfs.adopt(bare, 'bare')
    mount = ckptfs.mount()
    assert 'huggingface' not in os.listdir(view_of(mount, 'bare'))
    with open(os.path.join(view_of(mount, 'bare'), 'info.json')) as f:
        assert '--hf-config' in f.read()
    said = ckptfs.run('explain', 'tp1', '--step', 'bare/global_step2',
                      '--store', ckptfs.store, check=False)
    assert '--hf-config' in said.stdout + said.stderr
    ckptfs.umount(mount)
    mount = ckptfs.mount('--hf-config', kept)
    folder = os.path.join(view_of(mount, 'bare'), 'huggingface')
    assert differ(load(folder).state_dict(), truth_of('llama_zero1')[0]) == []
    with open(os.path.join(folder, 'tokenizer.json'), 'rb') as f:
        assert f.read() == (kept / 'tokenizer.json').read_bytes()
    refused = ckptfs.run('mount', '--store', ckptfs.store, '--hf-config', bare,
                         ckptfs.mountpoint(), check=False)
    assert refused.returncode != 0 and 'config.json' in refused.stderr


def test_a_trainers_checkpoint_is_one_step(ckptfs, tmp_path):
    folder = tmp_path / 'out' / 'checkpoint-2'
    shutil.copytree(source('qwen2_zero2'), folder)
    state = {k: t for k, t in truth_of('qwen2_zero2')[0].items() if k != 'lm_head.weight'}
    save_file(state, folder / 'model.safetensors', metadata={'format': 'pt'})
    (folder / 'trainer_state.json').write_text('{"global_step": 2}')
    for path, name in ((folder, 'itself'), (tmp_path / 'out', 'output')):
        done = ckptfs.adopt(str(path), name)
        assert done.stdout.split() == [f'{name}/checkpoint-2']


def test_a_final_model_is_no_part_of_the_one_step_beside_it(ckptfs, tmp_path):
    """A Trainer's output: its model is of another moment than the step."""
    folder = tmp_path / 'out'
    shutil.copytree(source('qwen2_zero2'), folder)
    final = {k: t + 1 for k, t in truth_of('qwen2_zero2')[0].items() if k != 'lm_head.weight'}
    save_file(final, folder / 'model.safetensors', metadata={'format': 'pt'})
    done = ckptfs.adopt(str(folder))
    assert sorted(done.stdout.split()) == ['out/global_step2', 'out/out']
    mount = ckptfs.mount()
    for step, want in ('global_step2', truth_of('qwen2_zero2')[0]), ('out', final):
        view = os.path.join(daemon.step_of(mount, 'out', step), 'view', 'tp1', 'huggingface')
        got = load_file(os.path.join(view, 'model.safetensors'))
        assert differ(got, {k: t for k, t in want.items() if k in final}) == []


def test_folders_that_loaders_look_into_are_carried(ckptfs, tmp_path):
    """The templates of a tokenizer, the modules of sentence-transformers."""
    folder, small = tmp_path / 'model', {
        'modules.json': '[{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}]',
        '1_Pooling/config.json': '{"word_embedding_dimension": 8}',
        'additional_chat_templates/tool_use.jinja': '{{ tools }}'}
    shutil.copytree(source('llama'), folder)
    for name, text in {**small, 'original/params.json': '{}', 'onnx/model.onnx': 'x'}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    ckptfs.adopt(str(folder))
    assert 'that are not taken: onnx/, original/' in ckptfs.run(
        'info', str(folder)).stdout
    shown = os.path.join(view_of(ckptfs.mount(), 'model'), 'huggingface')
    for name, text in small.items():
        with open(os.path.join(shown, name)) as file:
            assert file.read() == text, name
    assert sorted(os.listdir(shown)) == sorted((
        *SMALL, 'config.json', *weights_in(source('llama')), 'model.safetensors.index.json',
        'modules.json', '1_Pooling', 'additional_chat_templates'))
    assert os.listdir(os.path.join(shown, '1_Pooling')) == ['config.json']
    assert differ(load(shown).state_dict(), truth_of('llama')[0]) == []


def test_copied_steps_keep_their_model_files(ckptfs, tmp_path):
    for variant in ('gpt2_zero1', 'llama'):
        gone = str(tmp_path / variant)
        shutil.copytree(source(variant), gone)
        ckptfs.adopt(gone, variant, extra=('--copy',))
        shutil.rmtree(gone)
    single = str(tmp_path / 'one.safetensors')
    save_file({'a.weight': torch.arange(12.).view(3, 4)}, single)
    ckptfs.adopt(single, 'single', extra=('--copy',))
    os.unlink(single)
    mount = ckptfs.mount()
    for variant in ('gpt2_zero1', 'llama'):
        folder = os.path.join(view_of(mount, variant), 'huggingface')
        assert differ(load(folder).state_dict(), truth_of(variant)[0]) == []
        with open(os.path.join(folder, 'tokenizer.json'), 'rb') as ours, \
                open(os.path.join(source(variant), 'tokenizer.json'), 'rb') as theirs:
            assert ours.read() == theirs.read()
    got = load_file(os.path.join(view_of(mount, 'single'), 'rank0', 'model.safetensors'))
    assert differ(got, {'a.weight': torch.arange(12.).view(3, 4)}) == []


def write_bin(folder, state, shards):
    """pytorch_model.bin as transformers 4 wrote it."""
    os.makedirs(folder)
    if shards == 1:
        torch.save(state, os.path.join(folder, 'pytorch_model.bin'))
        return
    names, where = list(state), {}
    for i in range(shards):
        file = f'pytorch_model-{i + 1:05d}-of-{shards:05d}.bin'
        torch.save({k: state[k] for k in names[i::shards]}, os.path.join(folder, file))
        where.update({k: file for k in names[i::shards]})
    with open(os.path.join(folder, 'pytorch_model.bin.index.json'), 'w') as f:
        json.dump({'metadata': {'total_size': 1}, 'weight_map': where}, f)


@pytest.mark.parametrize('shards', [1, 2])
def test_torch_files_are_read_as_torch_reads_them(ckptfs, tmp_path, shards):
    model = models.make('gpt2')
    state = model.state_dict()  # the head is the embedding's own storage
    state['strided'] = torch.arange(12.).view(3, 4).t()
    folder = str(tmp_path / 'bin')
    write_bin(folder, state, shards)
    model.config.save_pretrained(folder)
    ckptfs.adopt(folder)
    mount = ckptfs.mount()
    got = torch.load(os.path.join(view_of(mount, 'bin'), 'rank0', 'model.pt'))
    assert differ(got, state) == []
    tied = got['lm_head.weight'].data_ptr() == got['transformer.wte.weight'].data_ptr()
    assert tied or shards == 2  # in two files they are two tensors


def mutants(header, count):
    """The header with some of its bytes changed, and by rule."""
    rng = random.Random(5)
    for _ in range(count):
        out = bytearray(header)
        for _ in range(rng.choice((1, 1, 1, 2))):
            out[rng.randrange(len(out))] = rng.choice(b'0123456789bwFIU":, ')
        yield bytes(out)
    text = header.decode()
    for old, new in (('[0,', '[1,'), ('"F32"', '"I32"'), ('"F32"', '"F8_E4M3"'),
                     ('"F32"', '"BOOL"'), ('[3,4]', '[4,3]'), ('[3,4]', '[12]'),
                     ('[3,4]', '[3,4,1]'), ('[3,4]', '[3,-4]'), ('[3,4]', '[3,4.0]')):
        yield text.replace(old, new, 1).encode()


def test_mutated_headers_agree_with_safetensors(ckptfs, tmp_path):
    """The source takes what safetensors reads, and refuses what that refuses."""
    made = tmp_path / 'made.safetensors'
    save_file({'w': torch.arange(12.).view(3, 4), 'b': torch.arange(3.)}, made)
    whole = made.read_bytes()
    size = struct.unpack('<Q', whole[:8])[0]
    taken = {}
    for i, header in enumerate(mutants(whole[8:8 + size], 40)):
        path = tmp_path / f'm{i}.safetensors'
        path.write_bytes(struct.pack('<Q', len(header)) + header + whole[8 + size:])
        ours = ckptfs.adopt(str(path), f'm{i}', check=False)
        assert ours.returncode in (0, 4), ours.stderr
        with contextlib.suppress(SafetensorError, ValueError, TypeError):
            theirs = load_file(path)
            if ours.returncode == 0:
                taken[i] = theirs
            continue
        assert ours.returncode != 0, header
    mount = ckptfs.mount()
    for i, theirs in taken.items():
        got = torch.load(os.path.join(view_of(mount, f'm{i}'), 'rank0', 'model.pt'))
        assert differ(got, theirs) == [], i
    assert len(taken) > 4
