# SPDX-License-Identifier: Apache-2.0
"""Weights that are stored with a scale per block: DeepSeek's fp8 and gpt_oss' MXFP4.

What transformers' own code decodes is the truth.  A directory of plain weights that it makes of them is the control:
every view of the quantised directory in a dtype has the tensors of the same view of that one.
"""
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import daemon
from dcp_reads import read_dcp

BASE = {'vocab_size': 96, 'hidden_size': 256, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 2,
        'max_position_embeddings': 64, 'pad_token_id': 0, 'bos_token_id': 1, 'eos_token_id': 2,
        'tie_word_embeddings': False}
MODELS = {
    'qwen3_moe': {**BASE, 'intermediate_size': 256, 'head_dim': 128, 'num_experts': 4, 'num_experts_per_tok': 2,
                  'moe_intermediate_size': 256, 'mlp_only_layers': [0], 'decoder_sparse_step': 1},
    # kv_a_proj has 192 rows: a block and a half.
    'deepseek_v3': {**BASE, 'intermediate_size': 256, 'moe_intermediate_size': 256, 'n_routed_experts': 4, 'n_shared_experts': 1,
                    'num_experts_per_tok': 2, 'first_k_dense_replace': 1, 'n_group': 1, 'topk_group': 1, 'q_lora_rank': 128,
                    'kv_lora_rank': 128, 'qk_rope_head_dim': 64, 'qk_nope_head_dim': 64, 'v_head_dim': 64, 'head_dim': 64,
                    'num_key_value_heads': 4},
    'gpt_oss': {**BASE, 'intermediate_size': 64, 'head_dim': 64, 'num_local_experts': 4, 'num_experts_per_tok': 2},
}
LAYOUTS = ['bf16', 'tp2_bf16', 'pp2_bf16', 'tp2_ep2_bf16', 'fp32', 'hf_bf16', 'hf5_bf16', 'mcore_bf16']
WORDS = torch.arange(1, 65).reshape(4, 16)


def random_like(model, seed):
    """Random bf16 weights of the model, by their files' names."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(0, 0.1)
    return model.to(torch.bfloat16)


def plain_files(kind, folder):
    """(tensors that save_pretrained writes, config) of a random model."""
    from transformers import CONFIG_MAPPING
    model = random_like(AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**MODELS[kind])), 1)
    model.save_pretrained(folder)
    with open(folder + '/config.json', encoding='utf-8') as f:
        return load_file(folder + '/model.safetensors'), json.load(f)


def any_bits(shape, low, high):
    return torch.randint(low, high, shape, dtype=torch.uint8)


def fp8_of(shape, block):
    """Any e4m3 but NaN, and scales that cost the product bits."""
    bits = any_bits(shape, 0, 256)
    bits[(bits & 127) == 127] = 0
    grid = [-(-size // edge) for size, edge in zip(shape, block)]
    return bits.view(torch.float8_e4m3fn), torch.rand(grid) * 2e-3 + 1e-4


def decoded(values, scales):
    """By one scale an element."""
    grid = scales.repeat_interleave(128, 0)[:values.shape[0]].repeat_interleave(128, 1)[:, :values.shape[1]]
    return values.float() * grid


def as_transformers(values, scales, dtype):
    """Its own operation, which takes whole blocks alone (of 192 rows it makes two blocks of 96)."""
    if any(size % 128 for size in values.shape):
        return decoded(values, scales).to(dtype)
    return Fp8Dequantize(None)._dequantize_one(values, scales, dtype)


def quantised(kind, folder):
    """Writes a directory with packed weights, and one in which transformers' code has decoded them."""
    tensors, config = plain_files(kind, folder + '/made')
    packed, plain = {}, {}
    torch.manual_seed(2)
    for name, tensor in tensors.items():
        plain[name] = tensor
        if kind == 'gpt_oss' and name.endswith(('gate_up_proj', 'down_proj')):
            experts, columns, rows = tensor.shape
            blocks, scales = any_bits((experts, rows, columns // 32, 16), 0, 256), any_bits((experts, rows, columns // 32), 0, 255)
            packed[name + '_blocks'], packed[name + '_scales'] = blocks, scales
            plain[name] = convert_moe_packed_tensors(blocks, scales)
            assert plain[name].shape == tensor.shape
        elif kind != 'gpt_oss' and 'proj' in name and tensor.dim() == 2:
            packed[name], packed[name + '_scale_inv'] = fp8_of(tensor.shape, (128, 128))
            plain[name] = as_transformers(packed[name], packed[name + '_scale_inv'], torch.bfloat16)
        else:
            packed[name] = tensor
    said = {'quant_method': 'mxfp4', 'modules_to_not_convert': ['model.layers.*.self_attn', 'lm_head']}
    if kind != 'gpt_oss':
        said = {'quant_method': 'fp8', 'activation_scheme': 'dynamic', 'fmt': 'e4m3', 'weight_block_size': [128, 128]}
    for name, held, more in (('packed', packed, {'quantization_config': said}), ('plain', plain, {})):
        os.makedirs(f'{folder}/{name}/model')
        save_file({k: v.contiguous() for k, v in held.items()}, f'{folder}/{name}/model/model.safetensors', {'format': 'pt'})
        with open(f'{folder}/{name}/model/config.json', 'w', encoding='utf-8') as f:
            json.dump({**config, **more, 'dtype': 'bfloat16'}, f, indent=2)
    return packed, plain


class Shown:
    """A quantised directory and its plain twin, in one mount."""

    def __init__(self, kind, folder):
        self.kind, self.folder = kind, folder
        self.packed, self.plain = quantised(kind, folder)
        self.program = daemon.Ckptfs(folder)
        for name in ('packed', 'plain'):
            self.program.adopt(f'{folder}/{name}/model', name)
        self.mount = self.program.mount()

    def view(self, run, layout):
        return os.path.join(daemon.step_of(self.mount, run), 'view', layout)

    def explain(self, layout, run='packed'):
        said = self.program.run('explain', layout, '--step', run, '--store', self.program.store, check=False)
        return said.stdout + said.stderr


@pytest.fixture(scope='module', params=list(MODELS))
def shown(request, tmp_path_factory):
    made = Shown(request.param, str(tmp_path_factory.mktemp(request.param)))
    yield made
    made.program.close()


def same(a, b):
    """The same bits; a NaN of one is one of the other."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point() or a.element_size() == 1:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def assert_same(got, want, what):
    assert set(got) == set(want), (what, sorted(set(got) ^ set(want))[:4])
    for name, tensor in want.items():
        assert same(got[name], tensor), (what, name)


def files_in(folder):
    return sorted(os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names)


def test_a_dtype_decodes_what_transformers_decodes(shown):
    got = load_file(shown.view('packed', 'bf16') + '/huggingface/model.safetensors')
    assert_same(got, shown.plain, 'huggingface')
    with open(shown.view('packed', 'bf16') + '/huggingface/config.json', encoding='utf-8') as f:
        config = json.load(f)
    assert 'quantization_config' not in config and config['model_type'] == shown.kind


def test_without_a_dtype_the_files_are_those_that_lie_there(shown):
    for name in ('model.safetensors', 'config.json'):
        with open(f'{shown.folder}/packed/model/{name}', 'rb') as a, \
                open(shown.view('packed', 'tp1') + f'/huggingface/{name}', 'rb') as b:
            assert a.read() == b.read(), name
    assert_same(load_file(shown.view('packed', 'tp1') + '/rank0/model.safetensors'), shown.packed, 'rank0')


@pytest.mark.parametrize('layout', LAYOUTS)
def test_every_view_in_a_dtype_is_that_of_the_plain_directory(shown, layout):
    """Of fp32 the truth has less: bf16 rounds the products.  MXFP4's products need no rounding."""
    ours, theirs = shown.view('packed', layout), shown.view('plain', layout)
    assert os.path.isdir(theirs) == os.path.isdir(ours), shown.explain(layout)
    if not os.path.isdir(theirs):
        assert layout == 'mcore_bf16' and shown.kind == 'gpt_oss'
        return
    names = files_in(theirs)
    assert names == files_in(ours)
    compared = 0
    for name in names:
        if not name.endswith('.safetensors') or 'optimizer' in name:
            continue
        got, want = load_file(f'{ours}/{name}'), load_file(f'{theirs}/{name}')
        if layout == 'fp32' and shown.kind != 'gpt_oss':
            got = {k: v.to(torch.bfloat16).float() if v.dtype == torch.float32 else v for k, v in got.items()}
        assert_same(got, want, name)
        compared += 1
    assert compared


def test_fp32_is_the_product_itself(shown):
    got = load_file(shown.view('packed', 'fp32') + '/rank0/model.safetensors')
    for name, tensor in shown.packed.items():
        if name + '_scale_inv' in shown.packed:
            want = as_transformers(tensor, shown.packed[name + '_scale_inv'], torch.float32)
        elif name.endswith('_blocks'):
            name = name.removesuffix('_blocks')
            want = convert_moe_packed_tensors(tensor, shown.packed[name + '_scales'], dtype=torch.float32)
        else:
            continue
        assert same(got[name], want), name


@pytest.mark.parametrize('layout', ['bf16', 'tp2_bf16'])
def test_dcp_and_deepspeed_have_them_decoded(shown, layout):
    ours, theirs = shown.view('packed', layout), shown.view('plain', layout)
    assert_same(read_dcp(ours + '/dcp'), read_dcp(theirs + '/dcp'), 'dcp')
    names = [n for n in files_in(theirs + '/deepspeed') if n.endswith('fp32.pt')]
    assert len(names) > 10
    for name in names:
        a, b = (torch.load(f'{view}/deepspeed/{name}', weights_only=False)['param'] for view in (ours, theirs))
        assert same(a.to(torch.bfloat16), b.to(torch.bfloat16)), name


def test_megatron_takes_decoded_weights(shown):
    ours, theirs = shown.view('packed', 'tp2_bf16') + '/megatron', shown.view('plain', 'tp2_bf16') + '/megatron'
    assert os.path.isdir(ours) == os.path.isdir(theirs) == (shown.kind != 'gpt_oss')
    if os.path.isdir(ours):
        assert_same(read_dcp(ours + '/release'), read_dcp(theirs + '/release'), 'megatron')


def test_ranks_hold_values_and_their_scales(shown):
    """A rank decodes what it holds without another's: its part of the whole."""
    cut = 0
    if shown.kind == 'gpt_oss':
        for name in (n for n in shown.packed if n.endswith(('_blocks', '_scales'))):
            parts = [load_file(shown.view('packed', 'dp2_ep2') + f'/rank{r}/model.safetensors')[name] for r in range(2)]
            assert torch.equal(torch.cat(parts), shown.packed[name]), name
        return
    ranks = [load_file(shown.view('packed', 'tp2') + f'/rank{r}/model.safetensors') for r in range(2)]
    for name in (n for n in shown.packed if n + '_scale_inv' in shown.packed):
        whole = decoded(shown.packed[name], shown.packed[name + '_scale_inv'])
        parts = [decoded(rank[name], rank[name + '_scale_inv']) for rank in ranks]
        if parts[0].shape == whole.shape:
            continue
        dim = 0 if parts[0].shape[0] != whole.shape[0] else 1
        assert torch.equal(torch.cat(parts, dim), whole), name
        cut += 1
    assert cut > 10


def test_a_cut_through_a_block_is_refused_by_name(shown):
    if shown.kind == 'gpt_oss':
        pytest.skip('its experts are whole on their ranks')
    assert not os.path.exists(shown.view('packed', 'tp4') + '/rank0')
    said = shown.explain('tp4')
    assert '_proj.weight' in said and ('would cut through a unit of 128' in said or 'does not divide by 4' in said), said


def test_a_model_of_decoded_weights_computes_the_same(shown):
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
              for folder in (shown.view('packed', 'bf16') + '/huggingface', shown.folder + '/plain/model')]
    for _, said in models:
        assert not said['missing_keys'] and not said['unexpected_keys'] and not said['mismatched_keys']
    logits = [model.eval()(WORDS).logits for model, _ in models]
    assert torch.equal(*logits) or bool(logits[0].isnan().any())


def test_transformers_itself_decodes_the_directory_so(shown):
    """from_pretrained with dequantize, which has its own way through the files."""
    if shown.kind == 'deepseek_v3':
        pytest.skip('transformers takes parts of blocks for blocks of another size')
    from transformers import FineGrainedFP8Config, Mxfp4Config
    how = Mxfp4Config(dequantize=True) if shown.kind == 'gpt_oss' else FineGrainedFP8Config(dequantize=True)
    try:
        theirs = AutoModelForCausalLM.from_pretrained(shown.folder + '/packed/model', quantization_config=how,
                                                      dtype=torch.bfloat16)
    except (RuntimeError, ImportError, ValueError) as error:
        pytest.skip(f'transformers does not decode here: {error}')
    ours = AutoModelForCausalLM.from_pretrained(shown.view('packed', 'bf16') + '/huggingface', dtype=torch.bfloat16)
    assert_same(ours.state_dict(), theirs.state_dict(), 'state_dict')


def damaged(shown, tmp_path, change, config=None):
    """The packed directory with other tensors; its own store."""
    folder = tmp_path / 'damaged'
    shutil.copytree(shown.folder + '/packed/model', folder)
    tensors = dict(shown.packed)
    change(tensors)
    save_file(tensors, folder / 'model.safetensors', {'format': 'pt'})
    if config:
        with open(folder / 'config.json', encoding='utf-8') as f:
            said = json.load(f)
        config(said['quantization_config'])
        with open(folder / 'config.json', 'w', encoding='utf-8') as f:
            json.dump(said, f)
    return folder


REFUSED = {
    'qwen3_moe': [
        (lambda t: t.pop('model.layers.0.self_attn.q_proj.weight_scale_inv'), None, 'has no scales'),
        (lambda t: t.update({'model.layers.0.self_attn.q_proj.weight_scale_inv': torch.rand(1, 2)}), None, 'its scales are'),
        (lambda t: t.update({'x.weight_scale_inv': torch.rand(1, 2)}), None, 'no values belong to these scales'),
        (lambda t: t.update({'x.weight': torch.zeros(4, 4, dtype=torch.uint8)}), None, 'nothing says how it is packed'),
        (lambda t: None, lambda q: q.update(weight_block_size=[64, 128]), 'in a block make'),
        (lambda t: None, lambda q: q.update(activation_scheme='static'), 'nothing says how they are decoded'),
        (lambda t: None, lambda q: q.update(quant_method='gptq'), 'nothing says how they are decoded'),
    ],
    'gpt_oss': [
        (lambda t: t.pop('model.layers.0.mlp.experts.down_proj_scales'), None, 'its blocks have no scales'),
        (lambda t: t.update({'model.layers.0.mlp.experts.down_proj_scales': torch.zeros(4, 2, 2, dtype=torch.uint8)}), None,
         'not those of mxfp4'),
        (lambda t: t.update({'model.layers.0.mlp.experts.down_proj': torch.zeros(4, 2)}), None, 'without blocks, too'),
    ]}


def test_what_is_not_proved_is_refused_by_name_and_shown_as_stored(shown, tmp_path):
    if shown.kind not in REFUSED:
        pytest.skip('its method is another model\'s')
    for i, (change, config, why) in enumerate(REFUSED[shown.kind]):
        folder = damaged(shown, tmp_path / str(i), change, config)
        program = daemon.Ckptfs(str(tmp_path / str(i)))
        program.adopt(folder, 'damaged')
        said = program.run('explain', 'bf16', '--step', 'damaged', '--store', program.store, check=False)
        assert why in said.stdout + said.stderr, (i, said.stdout + said.stderr)
        view = os.path.join(daemon.step_of(program.mount(), 'damaged'), 'view')
        for form in 'huggingface', 'dcp', 'rank0', 'deepspeed':
            assert not os.path.exists(f'{view}/bf16/{form}'), form
        assert not os.path.exists(view + '/dp2_zero1/deepspeed')  # which would have values without their scales
        with open(folder / 'model.safetensors', 'rb') as a, open(view + '/tp1/huggingface/model.safetensors', 'rb') as b:
            assert a.read() == b.read()
        program.close()


SPELLINGS = {'compressed-tensors': ('weight', 'weight_scale'), 'deepseek': ('weight', 'scale'), 'comfy': ('weight', 'scale_weight'),
             'gptq': ('qweight', 'scales'), 'bitsandbytes': ('weight', 'weight.absmax'), 'quanto': ('_data', '_scale'),
             'packed': ('weight_packed', 'weight_scale')}
OTHERS = {'torchao': ('_weight_qdata', '_weight_scale'), 'trtllm': ('weight', 'weights_scaling_factor'), 'scales': ('weight', 'weight_scales')}


@pytest.mark.parametrize('method', [*SPELLINGS, 'plain'])
def test_values_with_scales_that_no_config_tells_are_not_cast(ckptfs, tmp_path, method):
    """fp8 without scales is plain, and shown as it is stored."""
    values, scales = SPELLINGS.get(method, ('weight', None))
    wide = torch.tensor([[1., 2], [3, 4]])
    whole = {'gptq': torch.int32, 'bitsandbytes': torch.uint8, 'packed': torch.int32}.get(method, torch.float8_e4m3fn)
    state = {f'layer.{values}': wide.to(whole), 'norm.weight': torch.ones(2, dtype=torch.bfloat16)}
    if scales:
        state[f'layer.{scales}'] = torch.ones(1)
    save_file(state, tmp_path / 'model.safetensors')
    ckptfs.adopt(str(tmp_path / 'model.safetensors'), 'run')
    view = os.path.join(daemon.step_of(ckptfs.mount(), 'run'), 'view')
    assert torch.equal(load_file(f'{view}/tp1/rank0/model.safetensors')[f'layer.{values}'].float(), wide)
    for form in 'rank0', 'dcp', 'deepspeed':
        assert os.path.exists(f'{view}/bf16/{form}') == (scales is None and form != 'deepspeed'), form
    assert not os.path.exists(f'{view}/dp2_zero1/deepspeed')
    if scales:
        said = ckptfs.run('explain', 'bf16', '--step', 'run', '--store', ckptfs.store, check=False)
        assert f'layer.{values}' in said.stdout + said.stderr and 'packed' in said.stdout + said.stderr


@pytest.mark.parametrize('method', OTHERS)
def test_fp8_is_no_engine_s_weight_whatever_its_scales_are_called(ckptfs, tmp_path, method):
    values, scales = OTHERS[method]
    save_file({f'layer.{values}': torch.ones(4, 4).to(torch.float8_e4m3fn), f'layer.{scales}': torch.ones(4, 1)}, tmp_path / 'model.safetensors')
    ckptfs.adopt(str(tmp_path / 'model.safetensors'), 'run')
    view = os.path.join(daemon.step_of(ckptfs.mount(), 'run'), 'view')
    assert not os.path.exists(f'{view}/dp2_zero1/deepspeed') and not os.path.exists(f'{view}/bf16/deepspeed')


def test_a_compacted_step_is_decoded_as_well(shown, tmp_path):
    """Compacting moves values and scales into the store's own files."""
    shutil.copytree(shown.folder + '/packed/model', tmp_path / 'packed')
    program = daemon.Ckptfs(str(tmp_path))
    program.adopt(tmp_path / 'packed', 'packed')
    program.run('compact', 'packed/latest', '--store', program.store)
    shutil.rmtree(tmp_path / 'packed')
    got = torch.load(os.path.join(daemon.step_of(program.mount(), 'packed'), 'view/bf16/rank0/model.pt'))
    program.close()
    assert_same(got, shown.plain, 'compacted')


def test_the_configs_are_equal_but_for_the_encoding(shown):
    ours = AutoConfig.from_pretrained(shown.view('packed', 'bf16') + '/huggingface').to_dict()
    theirs = AutoConfig.from_pretrained(shown.folder + '/plain/model').to_dict()
    for key in ('_name_or_path',):
        ours.pop(key, None), theirs.pop(key, None)
    assert ours == theirs
