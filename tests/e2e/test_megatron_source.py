# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of megatron-core's dist_checkpointing: what Megatron itself reads of them is what views show.

make_megatron.py trains and saves tiny models with the real library and keeps what its own reader finds, and the logits
of the model that it loads at one rank.  Names of transformers are made of that by torch's own words (`files_of`), which
the logits prove, since transformers computes them with these weights.
"""
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import daemon
from dcp_reads import read_dcp
from megatron_forms import as_the_newest_cores_save, rewrite

LAYERS, HEADS = 4, 8
# name: (groups, channels, experts of one layer)
MODELS = {'llama': (4, 4, 0), 'tied': (4, 8, 0), 'qwen2': (2, 4, 0), 'qwen3': (4, 8, 0), 'mixtral': (4, 4, 4),
          'qwen3_moe': (4, 4, 4), 'qwen2_moe': (4, 4, 4), 'deepseek': (0, 0, 4), 'deepseek_yarn': (0, 0, 4)}
KINDS = {'master': 'param', 'exp_avg': 'exp_avg', 'exp_avg_sq': 'exp_avg_sq'}
BLOCK = 'decoder.layers.'


@pytest.fixture(scope='module')
def saved():
    """The folder of all models."""
    return os.path.join(daemon.FIXTURES, 'megatron')


@pytest.fixture(scope='module')
def shown(saved, tmp_path_factory):
    """All of them in one mount."""
    program = daemon.Ckptfs(str(tmp_path_factory.mktemp('mount')))
    for name in os.listdir(saved):
        program.adopt(f'{saved}/{name}', name)
    yield program.mount(), program
    program.close()


def view(mount, run, layout):
    return os.path.join(daemon.step_of(mount, run), 'view', layout)


def plain_of(saved, name):
    """The tensors that Megatron's own reader finds: weights, and states by our names of their kinds."""
    plain = torch.load(f'{saved}/{name}/plain.pt')
    weights = {k: v for k, v in plain.items() if not k.startswith('optimizer.')}
    states = {ours: {k.removeprefix(f'optimizer.state.{kind}.'): v for k, v in plain.items()
                     if k.startswith(f'optimizer.state.{kind}.')} for ours, kind in KINDS.items()}
    return weights, states


def by_layer(stored):
    """One tensor for each layer, under the module's names."""
    out = {}
    for key, tensor in stored.items():
        if not key.startswith(BLOCK) or key[len(BLOCK)].isdigit():  # layers that differ are saved one by one
            out[key] = tensor
            continue
        for layer in range(LAYERS):
            out[f'{BLOCK}{layer}.{key.removeprefix(BLOCK)}'] = tensor[layer]
    return out


def apart(qkv, groups, channels):
    """Queries, keys and values of Megatron's order: each group's queries, its key, its value."""
    grouped = qkv.reshape(groups, HEADS // groups + 2, channels, *qkv.shape[1:])
    return [grouped[:, rows].reshape(-1, *qkv.shape[1:]) for rows in (slice(-2), slice(-2, -1), slice(-1, None))]


def attention_of(of, groups, channels):
    """A layer's attention, and its norm, as transformers names them."""
    out = {'input_layernorm.weight': of['self_attention.linear_qkv.layer_norm_weight'],
           'self_attn.o_proj.weight': of['self_attention.linear_proj.weight']}
    for kind in ('weight', 'bias'):
        if f'self_attention.linear_qkv.{kind}' in of:
            for part, tensor in zip('qkv', apart(of[f'self_attention.linear_qkv.{kind}'], groups, channels)):
                out[f'self_attn.{part}_proj.{kind}'] = tensor
    for part in 'qk':
        if f'self_attention.{part}_layernorm.weight' in of:
            out[f'self_attn.{part}_norm.weight'] = of[f'self_attention.{part}_layernorm.weight']
    return out


LATENTS = {'input_layernorm': 'input_layernorm', 'self_attention.linear_proj': 'self_attn.o_proj', 'self_attention.linear_q_proj': 'self_attn.q_proj',
           'self_attention.linear_q_down_proj': 'self_attn.q_a_proj', 'self_attention.q_layernorm': 'self_attn.q_a_layernorm',
           'self_attention.linear_q_up_proj': 'self_attn.q_b_proj', 'self_attention.linear_kv_down_proj': 'self_attn.kv_a_proj_with_mqa',
           'self_attention.kv_layernorm': 'self_attn.kv_a_layernorm', 'self_attention.linear_kv_up_proj': 'self_attn.kv_b_proj'}


def latent_attention_of(of):
    """The same of DeepSeek."""
    return {f'{theirs}.weight': of[f'{ours}.weight'] for ours, theirs in LATENTS.items() if f'{ours}.weight' in of}


def gated(of, at, parts=('gate_proj', 'up_proj', 'down_proj')):
    """The three parts of one network whose gate and input Megatron has in one tensor."""
    gate, up = of[f'{at}.linear_fc1.weight'].chunk(2)
    return dict(zip((f'{part}.weight' for part in parts), (gate, up, of[f'{at}.linear_fc2.weight'])))


def mlp_of(of, mixtral):
    """A layer's network or experts, and the norm before them."""
    norm = of.get('mlp.linear_fc1.layer_norm_weight', of.get('pre_mlp_layernorm.weight'))
    out = {'post_attention_layernorm.weight': norm}
    if 'mlp.router.weight' not in of:
        return out | {f'mlp.{key}': tensor for key, tensor in gated(of, 'mlp').items()}
    moe, parts = ('block_sparse_moe', ('w1', 'w3', 'w2')) if mixtral else ('mlp', ('gate_proj', 'up_proj', 'down_proj'))
    out[f'{moe}.gate.weight'] = of['mlp.router.weight']
    if 'mlp.router.expert_bias' in of:
        out[f'{moe}.gate.e_score_correction_bias'] = of['mlp.router.expert_bias']
    for expert in range(4):
        one = {key: of[f'mlp.experts.experts.{key}'][expert] for key in ('linear_fc1.weight', 'linear_fc2.weight')}
        own = gated({f'own.{key}': tensor for key, tensor in one.items()}, 'own', parts)
        out |= {f'{moe}.experts.{expert}.{key}': tensor for key, tensor in own.items()}
    gate = of.get('mlp.shared_experts.gate_weight')
    if gate is not None:
        out['mlp.shared_expert_gate.weight'] = gate
    if 'mlp.shared_experts.linear_fc1.weight' in of:
        where = 'mlp.shared_experts' if gate is None else 'mlp.shared_expert'
        out |= {f'{where}.{key}': tensor for key, tensor in gated(of, 'mlp.shared_experts').items()}
    return out


def files_of(stored, name):
    """The tensors that transformers' files have."""
    groups, channels, _ = MODELS[name]
    out = {'model.embed_tokens.weight': stored['embedding.word_embeddings.weight'],
           'model.norm.weight': stored['decoder.final_layernorm.weight']}
    if 'output_layer.weight' in stored:
        out['lm_head.weight'] = stored['output_layer.weight']
    stored = by_layer(stored)
    for layer in range(LAYERS):
        begins = f'{BLOCK}{layer}.'
        of = {k.removeprefix(begins): v for k, v in stored.items() if k.startswith(begins)}
        parts = {**(attention_of(of, groups, channels) if groups else latent_attention_of(of)), **mlp_of(of, name == 'mixtral')}
        out |= {f'model.layers.{layer}.{key}': tensor for key, tensor in parts.items()}
    return out


def assert_same(got, want, what):
    """The same names, shapes, dtypes and elements."""
    assert set(got) == set(want), (what, sorted(set(got) ^ set(want))[:4])
    for name, tensor in want.items():
        same = got[name].shape == tensor.shape and got[name].dtype == tensor.dtype
        assert same and torch.equal(got[name], tensor), (what, name)


@pytest.mark.parametrize('name', [*MODELS, 'buckets', 'plain_adam'])
def test_a_rank_has_what_megatrons_own_reader_finds(shown, saved, name):
    weights, _ = plain_of(saved, name)
    assert_same(torch.load(view(shown[0], name, 'tp1') + '/rank0/model.pt'), by_layer(weights), name)


@pytest.mark.parametrize('name', MODELS)
def test_masters_and_moments_are_those_of_the_run(shown, saved, name):
    _, states = plain_of(saved, name)
    got = torch.load(view(shown[0], name, 'tp1') + '/rank0/optimizer.pt')
    want = {f'{kind}/{k}': v for kind, stored in states.items() for k, v in by_layer(stored).items()}
    steps = {k: v for k, v in got.items() if k.startswith('step/')}
    assert_same({k: v for k, v in got.items() if k not in steps}, want, name)
    assert len(steps) == len(by_layer(states['exp_avg'])) and {int(v) for v in steps.values()} == {2}


def cut(name, tensor, rank, ranks):
    """The part of a tensor that Megatron's rank has."""
    if 'linear_fc1.weight' in name:
        return torch.cat([part.chunk(ranks)[rank] for part in tensor.chunk(2)])
    if 'linear_qkv.' in name and 'layer_norm' not in name or 'word_embeddings' in name or 'output_layer' in name:
        return tensor.chunk(ranks)[rank]
    if name.endswith(('linear_proj.weight', 'linear_fc2.weight')):
        return tensor.chunk(ranks, 1)[rank]
    return tensor


def test_ranks_of_other_degrees_have_what_megatrons_own_have(shown, saved):
    weights, states = plain_of(saved, 'llama')
    for kind, stored in {'': weights, **states}.items():
        for rank in range(8):
            tp, pp = rank % 4, rank // 4
            file = 'optimizer' if kind else 'model'
            got = torch.load(f"{view(shown[0], 'llama', 'tp4_pp2')}/rank{rank}/{file}.pt")
            got = {k.removeprefix(f'{kind}/'): v for k, v in got.items() if not kind or k.startswith(f'{kind}/')}
            want = {k: cut(k, v, tp, 4) for k, v in by_layer(stored).items()
                    if (2 * pp <= int(k.split('.')[2]) < 2 * pp + 2 if k.startswith(BLOCK) else k.startswith('embedding') == (pp == 0))}
            vocabulary = [k for k in want if 'embeddings' in k or 'output_layer' in k]
            for name in vocabulary:  # padded to a multiple of 64 x 4
                whole = torch.zeros(256, 32, dtype=want[name].dtype)
                whole[:128] = stored[name]
                want[name] = whole.chunk(4)[tp]
            assert_same(got, want, (kind, rank))


def test_experts_are_divided_as_megatrons_ranks_divide_them(shown, saved):
    weights, _ = plain_of(saved, 'mixtral')
    for rank in range(2):
        got = torch.load(f"{view(shown[0], 'mixtral', 'dp2_ep2')}/rank{rank}/model.pt")
        for key in ('mlp.experts.experts.linear_fc1.weight', 'mlp.experts.experts.linear_fc2.weight'):
            for layer in range(LAYERS):
                assert torch.equal(got[f'{BLOCK}{layer}.{key}'], weights[BLOCK + key][layer, 2 * rank:2 * rank + 2])


@pytest.mark.parametrize('name', MODELS)
def test_transformers_computes_the_logits_of_the_source(shown, saved, name):
    folder = view(shown[0], name, 'tp1') + '/huggingface'
    weights, _ = plain_of(saved, name)
    assert_same(load_file(folder + '/model.safetensors'), files_of(weights, name), name)
    with open(folder + '/config.json', encoding='utf-8') as f:
        config = json.load(f)
    assert config['eos_token_id'] is None and config['vocab_size'] == 128
    model, said = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not said['missing_keys'] and not said['unexpected_keys'] and not said['mismatched_keys'], said
    truth = torch.load(f'{saved}/{name}/logits.pt')
    with torch.no_grad():
        logits = model(truth['tokens']).logits
    assert torch.allclose(logits, truth['logits'], atol=2e-5, rtol=1e-4), (logits - truth['logits']).abs().max()
    assert truth['logits'].std() > 0.01  # not all alike


@pytest.mark.parametrize('name', ['llama', 'qwen3', 'mixtral', 'deepseek'])
def test_moments_follow_every_map(shown, saved, name):
    weights, states = plain_of(saved, name)
    state = read_dcp(view(shown[0], name, 'hf') + '/dcp')
    assert_same({k.removeprefix('model.'): v for k, v in state.items() if k.startswith('model.')}, files_of(weights, name), name)
    for kind in ('exp_avg', 'exp_avg_sq'):
        ending = '.' + kind
        got = {k.removeprefix('optim.state.').removesuffix(ending): v for k, v in state.items() if k.endswith(ending)}
        assert_same(got, files_of(states[kind], name), (name, kind))


def test_a_universal_directory_and_a_state_dict_have_the_same_under_megatrons_names(shown, saved):
    weights, states = plain_of(saved, 'qwen2')
    zero = view(shown[0], 'qwen2', 'tp1') + '/deepspeed/iter_0000007/zero'
    assert set(os.listdir(zero)) - {'optimizer_state.pt'} == set(by_layer(weights))
    state = read_dcp(view(shown[0], 'qwen2', 'tp1') + '/dcp')
    assert_same({k.removeprefix('model.'): v for k, v in state.items() if k.startswith('model.')}, by_layer(weights), 'dcp')
    for kind, file in (('master', 'fp32'), ('exp_avg', 'exp_avg'), ('exp_avg_sq', 'exp_avg_sq')):
        for name, tensor in by_layer(states[kind]).items():
            assert torch.equal(torch.load(f'{zero}/{name}/{file}.pt')['param'], tensor), (kind, name)
            if kind != 'master':
                assert torch.equal(state[f'optim.state.{name}.{kind}'], tensor), (kind, name)


def test_from_megatrons_names_to_those_of_modules(shown, saved):
    """By way of the files' names: a table for each library is enough."""
    weights, _ = plain_of(saved, 'mixtral')
    got = torch.load(view(shown[0], 'mixtral', 'hf5') + '/rank0/model.pt')
    for layer in range(LAYERS):
        want = weights[f'{BLOCK}mlp.experts.experts.linear_fc1.weight'][layer]
        assert torch.equal(got[f'model.layers.{layer}.mlp.experts.gate_up_proj'], want)


@pytest.mark.parametrize('name', MODELS)
def test_files_are_shown_as_megatron_names_them(shown, saved, name, ckptfs):
    """And back: a Hugging Face step in Megatron's names is the Megatron step."""
    ckptfs.adopt(view(shown[0], name, 'tp1') + '/huggingface', 'files')
    got = torch.load(view(ckptfs.mount(), 'files', 'mcore') + '/rank0/model.pt')
    weights, _ = plain_of(saved, name)
    want = by_layer(weights)
    if MODELS[name][2]:  # Transformer Engine's name, where experts follow
        engine = {'mlp.linear_fc1.layer_norm_weight': 'pre_mlp_layernorm.weight',
                  **{f'self_attention.{part}_layernorm.weight': f'self_attention.linear_{part}_up_proj.layer_norm_weight'
                     for part in ('q', 'kv') if not MODELS[name][0]}}
        want = {next((k.replace(a, b) for a, b in engine.items() if k.endswith(a)), k): v for k, v in want.items()}
    if name == 'tied':
        assert torch.equal(got.pop('output_layer.weight'), want['embedding.word_embeddings.weight'])
    assert_same(got, want, name)


def info(program, name):
    return json.loads(program.run('info', name, '--store', program.store, '--json').stdout)


# ---- directories that something happened to -------------------------------------------------


def copy(saved, name, folder):
    """A copy of a save directory; its step."""
    shutil.copytree(f'{saved}/{name}', folder)
    return f'{folder}/iter_0000007'


def test_the_newest_cores_form_is_the_same_step(saved, ckptfs, tmp_path):
    as_the_newest_cores_save(copy(saved, 'llama', f'{tmp_path}/new'))
    ckptfs.adopt(f'{tmp_path}/new', 'new')
    mount = ckptfs.mount()
    weights, states = plain_of(saved, 'llama')
    assert_same(load_file(view(mount, 'new', 'tp1') + '/huggingface/model.safetensors'), files_of(weights, 'llama'), 'new')
    got = torch.load(view(mount, 'new', 'tp1') + '/rank0/optimizer.pt')
    for name, tensor in by_layer(states['exp_avg']).items():
        assert torch.equal(got[f'exp_avg/{name}'], tensor)


def test_a_run_is_its_whole_iterations(saved, ckptfs, tmp_path):
    step = copy(saved, 'llama', f'{tmp_path}/run')
    shutil.copytree(step, f'{tmp_path}/run/iter_0000009')
    os.unlink(f'{tmp_path}/run/iter_0000009/metadata.json')
    done = ckptfs.adopt(f'{tmp_path}/run', 'run')
    assert 'iter_0000009' in done.stderr and 'the save did not finish' in done.stderr, done.stderr
    assert os.listdir(os.path.join(ckptfs.mount(), 'run', 'run', 'step')) == ['iter_0000007']


def drop_file(step):
    name = sorted(n for n in os.listdir(step) if n.endswith('.distcp'))[1]
    os.unlink(f'{step}/{name}')
    return 'missing'


def drop_backend(step):
    os.unlink(f'{step}/metadata.json')
    return 'metadata.json'


def drop_common(step):
    os.unlink(f'{step}/common.pt')
    return 'common.pt'


def drop_metadata(step):
    os.unlink(f'{step}/.metadata')
    return '.metadata'


def drop_chunk(step):

    def change(metadata):
        key = 'decoder.layers.mlp.linear_fc2.weight'
        index = next(i for i in metadata.storage_data if i.fqn == key)
        del metadata.storage_data[index]

    rewrite(step, change)
    return 'stored nowhere'


def other_layers(step):

    def change(metadata):
        for key in [k for k in metadata.state_dict_metadata if k.endswith('mlp.linear_fc2.weight')]:
            entry = metadata.state_dict_metadata[key]
            entry.chunks = [chunk for chunk in entry.chunks if chunk.offsets[0] < 3]
            entry.size = torch.Size([3, *entry.size[1:]])
            for index in [i for i in metadata.storage_data if i.fqn == key and i.offset[0] == 3]:
                del metadata.storage_data[index]

    rewrite(step, change)
    return 'layers'


def cut_off(step):
    name = max((n for n in os.listdir(step) if n.endswith('.distcp')), key=lambda n: os.path.getsize(f'{step}/{n}'))
    os.truncate(f'{step}/{name}', os.path.getsize(f'{step}/{name}') // 2)
    return ''


@pytest.mark.parametrize('change', [drop_file, drop_backend, drop_common, drop_metadata, drop_chunk, other_layers, cut_off])
def test_a_directory_that_is_not_whole_is_refused_and_says_why(saved, ckptfs, tmp_path, change):
    step = copy(saved, 'llama', f'{tmp_path}/run')
    why = change(step)
    done = ckptfs.adopt(step, 'run', check=False)
    assert done.returncode != 0 and why in done.stdout + done.stderr, done.stdout + done.stderr


def test_files_of_another_iteration_are_refused_or_the_other_steps(saved, ckptfs, tmp_path):
    """A chunk's place in a file of another save does not hold such a chunk."""
    step = copy(saved, 'llama', f'{tmp_path}/run')
    for name in os.listdir(f'{saved}/qwen3/iter_0000007'):
        if name.startswith('__1'):
            shutil.copy(f'{saved}/qwen3/iter_0000007/{name}', step)
    assert ckptfs.adopt(step, 'run', check=False).returncode != 0


def change_args(step, **changes):
    """Other arguments; None takes one away."""
    common = torch.load(f'{step}/common.pt', weights_only=False)
    for name, value in changes.items():
        delattr(common['args'], name) if value is None else setattr(common['args'], name, value)
    torch.save(common, f'{step}/common.pt')


def test_what_the_arguments_do_not_say_is_asked_for(shown, saved, ckptfs, tmp_path):
    change_args(copy(saved, 'llama', f'{tmp_path}/run'), norm_epsilon=None)
    ckptfs.adopt(f'{tmp_path}/run', 'run')
    notes = info(ckptfs, 'run')['notes']
    assert any('norm_epsilon' in note and '--hf-config' in note for note in notes), notes
    mount = ckptfs.mount()
    assert not os.path.exists(view(mount, 'run', 'tp1') + '/huggingface')
    # A config of the user's: the true vocabulary cuts the padding off.
    given = f'{tmp_path}/given'
    os.mkdir(given)
    with open(view(shown[0], 'llama', 'tp1') + '/huggingface/config.json', encoding='utf-8') as f:
        config = json.load(f)
    with open(given + '/config.json', 'w', encoding='utf-8') as f:
        json.dump({**config, 'vocab_size': 90}, f)
    ckptfs.adopt(f'{saved}/llama', 'whole')  # its own config is made, and comes behind
    mount = ckptfs.mount('--hf-config', given)
    want = {k: v[:90] if v.shape[0] == 128 else v for k, v in files_of(plain_of(saved, 'llama')[0], 'llama').items()}
    for run in ('run', 'whole'):
        assert_same(load_file(view(mount, run, 'tp1') + '/huggingface/model.safetensors'), want, run)
        with open(view(mount, run, 'tp1') + '/huggingface/config.json', encoding='utf-8') as f:
            assert json.load(f)['vocab_size'] == 90


@pytest.mark.parametrize('change', [{'num_attention_heads': 4}, {'kv_channels': 8}, {'apply_layernorm_1p': True},
                                    {'rotary_interleaved': True}, {'num_query_groups': 2}])
def test_arguments_that_contradict_the_tensors_name_no_file(saved, ckptfs, tmp_path, change):
    change_args(copy(saved, 'llama', f'{tmp_path}/run'), **change)
    ckptfs.adopt(f'{tmp_path}/run', 'run')
    mount = ckptfs.mount()
    assert not os.path.exists(view(mount, 'run', 'tp1') + '/huggingface')
    assert not os.path.exists(view(mount, 'run', 'hf') + '/rank0')
    assert os.path.exists(view(mount, 'run', 'tp1') + '/rank0/model.pt')


@pytest.mark.parametrize('change, words', [
    ({'norm_epsilon': 1e-5}, 'norms of latents'), ({'moe_layer_freq': [1, 0, 1, 1]}, 'dense layers between others'), ({'moe_layer_freq': 2}, 'neither 1'),
    ({'rope_type': None}, 'neither rope nor yarn'), ({'qk_head_dim': 5}, 'by the arguments'), ({'v_head_dim': 6}, 'by the arguments'),
    ({'kv_lora_rank': 9}, 'by the arguments'), ({'moe_router_group_topk': 2}, 'best two experts'), ({'mscale_all_dim': 1.0}, 'mscale_all_dim'),
    ({'rope_type': 'yarn', 'rotary_scaling_factor': 4.0, 'mscale': 0.7}, 'mscale is not 1'), ({'moe_router_score_function': 'softmax'}, 'sigmoid'),
    ({'moe_shared_expert_intermediate_size': 50}, 'not a multiple'), ({'apply_layernorm_1p': True}, 'apply_layernorm_1p')])
def test_a_deepseek_that_transformers_would_compute_otherwise_has_no_config(saved, ckptfs, tmp_path, change, words):
    change_args(copy(saved, 'deepseek', f'{tmp_path}/run'), **change)
    ckptfs.adopt(f'{tmp_path}/run', 'run')
    notes = info(ckptfs, 'run')['notes']
    assert any('no config.json' in note and words in note for note in notes), notes
    assert not os.path.exists(view(ckptfs.mount(), 'run', 'tp1') + '/huggingface')


@pytest.mark.parametrize('change', [{'moe_router_load_balancing_type': 'sinkhorn'}, {'moe_router_load_balancing_type': ['aux_loss', 'sinkhorn']},
                                    {'moe_expert_capacity_factor': 1.0}, {'moe_router_load_balancing_type': 'aux_loss'}])
def test_experts_that_transformers_would_weigh_otherwise_have_no_config(saved, ckptfs, tmp_path, change):
    change_args(copy(saved, 'mixtral', f'{tmp_path}/run'), **change)
    ckptfs.adopt(f'{tmp_path}/run', 'run')
    (name, value), = change.items()
    assert os.path.exists(view(ckptfs.mount(), 'run', 'tp1') + '/huggingface') == (value == 'aux_loss')
    assert any(name in note for note in info(ckptfs, 'run')['notes']) == (value != 'aux_loss')
