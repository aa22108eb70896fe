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

import daemon
import huggingface_pairs as pairs
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
    with safe_open(os.path.join(folder, 'model.safetensors'), 'pt') as ours, \
            safe_open(tmp_path / 'model.safetensors', 'pt') as theirs:
        assert sorted(ours.keys()) == sorted(theirs.keys())
        assert ours.metadata() == theirs.metadata()


@pytest.mark.parametrize('variant', ['llama', 'gpt2_zero1', 'mixtral_autotp2'])
def test_model_files_are_byte_for_byte(mounted, variant):
    folder = os.path.join(view_of(mounted, variant), 'huggingface')
    for name in SMALL:
        with open(os.path.join(folder, name), 'rb') as ours, \
                open(os.path.join(source(variant), name), 'rb') as theirs:
            assert ours.read() == theirs.read(), name
    assert sorted(os.listdir(folder)) == sorted(
        (*SMALL, 'config.json', 'model.safetensors'))


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


@pytest.mark.parametrize('variant,engine', [
    ('llama', 'zero1'), ('qwen2', 'zero2'), ('gpt2', 'zero1')])
def test_a_directory_starts_an_engine(mounted, variant, engine):
    directory = os.path.join(view_of(mounted, variant), 'deepspeed')
    assert not pairs.starts(pairs.start, variant, variant, engine, directory, True)


@pytest.mark.parametrize('name,variant', [
    ('llama', 'llama'), ('gpt2', 'gpt2_zero3'), ('qwen2', 'qwen2_zero1')])
def test_a_directory_starts_an_engine_at_zero3(mounted, name, variant):
    directory = os.path.join(view_of(mounted, variant), 'huggingface')
    assert not pairs.starts(pairs.start_partitioned, variant, name, directory)


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
    assert 'nothing is taken: onnx/, original/' in ckptfs.run(
        'info', str(folder)).stdout
    shown = os.path.join(view_of(ckptfs.mount(), 'model'), 'huggingface')
    for name, text in small.items():
        with open(os.path.join(shown, name)) as file:
            assert file.read() == text, name
    assert sorted(os.listdir(shown)) == sorted((
        *SMALL, 'config.json', 'model.safetensors', 'modules.json', '1_Pooling',
        'additional_chat_templates'))
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
    """What is taken is what safetensors reads; what it refuses is refused."""
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
