# SPDX-License-Identifier: Apache-2.0
"""Views that Megatron loads: real models of megatron-core, cut in other ways than the source, have in memory what the source's live engine had.

Sources are Megatron's own saves, engines of DeepSpeed and FSDP2 around models of transformers, and directories of Hugging Face
(megatron_truth.py).  megatron_loads.py has the ranks, which compare every tensor, the logits and a next step.
"""
import json
import os
import pickletools
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

import daemon
from megatron_forms import as_the_newest_cores_save
from megatron_truth import (BLOCK, DEEPSEEK, ENGINES, GROUP, LATENT, LOGITS, MEGATRON, MODELS, OWN, STATES, TINY, deepseek_of, engine_truth,
                            fsdp_truth, keep_logits, mcore_of, own_truth, samples_of, stacked, step_in)

HERE = os.path.dirname(os.path.abspath(__file__))
WIDE = {'layers': 2, 'hidden': 1024, 'heads': 16, 'groups': 8, 'channels': 64, 'ffn': 2816, 'vocab': 2048, 'eps': 1e-6}
VIRTUAL = 'pp2_dp2'  # this one with two chunks a stage
# (source, [tp, pp, ep], layout).  `newest` is llama in the form that cores from 0.19 on save.  megatron_pairs.py has three of each source.
CELLS = [('llama', [4, 1, 1], 'tp4'), ('llama', [1, 2, 1], VIRTUAL), ('tied', [4, 1, 1], 'tp4'), ('qwen3', [2, 2, 1], 'tp2_pp2'),
         ('mixtral', [1, 1, 4], 'dp4_ep4'), ('qwen2_moe', [1, 1, 2], 'dp4_ep2'), ('deepseek', [1, 1, 4], 'dp4_ep4'), ('newest', [2, 1, 1], 'tp2'), ('buckets', [4, 1, 1], 'tp4')]
ENGINE_CELLS = [('llama_zero3', [1, 2, 1], 'pp2'), ('qwen2_zero2', [2, 1, 1], 'tp2_dp2'), ('mixtral_zero2', [1, 1, 2], 'dp4_ep2'),
                ('llama', [1, 2, 1], 'pp2')]
if os.environ.get('CKPTFS_LONG'):
    CELLS += [('mixtral', [1, 2, 1], 'pp2_dp2'), ('qwen3_moe', [2, 1, 2], 'tp2_dp2_ep2'), ('plain_adam', [1, 2, 1], 'pp2'),
              ('llama', [1, 4, 1], 'pp4'), ('qwen3_moe', [1, 1, 1], 'dp4'), ('llama', [1, 1, 1], 'tp2_pp2'), ('qwen2', [1, 2, 1], 'pp2'),
              ('qwen2_moe', [1, 2, 2], 'pp2_dp2_ep2'), ('deepseek', [1, 2, 2], 'pp2_dp2_ep2')]
    ENGINE_CELLS += [('llama_autotp2', [2, 2, 1], 'tp2_pp2'), ('mixtral_zero1', [1, 2, 1], 'pp2'), ('mixtral', [1, 1, 4], 'dp4_ep4'),
                     ('llama_zero1', [2, 1, 1], 'tp2'), ('qwen2_autotp2', [1, 2, 1], 'pp2'), ('qwen2', [2, 1, 1], 'tp2')]
# A job in fp32 loads what FSDP2 saved as it is; one in bf16 weights that are rounded, and masters that are not.
FSDP_CELLS = [('float32', [1, 2, 1], 'pp2'), ('bfloat16', [2, 1, 1], 'tp2_bf16')]


def save_wide(folder):
    """A model whose tensors are large enough to be cut for ranks, as save_pretrained writes it; its truth."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=16,
                                         num_key_value_heads=8, tie_word_embeddings=False, dtype=torch.bfloat16)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return mcore_of(model.state_dict(), WIDE)


def save_deepseek(folder):
    """DeepSeek V3 as save_pretrained writes it, with dense layers first and yarn's rope; its truth, and what it computes."""
    torch.manual_seed(5)
    rope = {'rope_type': 'yarn', 'rope_theta': 10000.0, 'factor': 4.0, 'original_max_position_embeddings': 4096, 'beta_fast': 32, 'beta_slow': 1,
            'mscale': 0.7, 'mscale_all_dim': 1.0}
    config = DeepseekV3Config(
        vocab_size=128, hidden_size=32, intermediate_size=24, moe_intermediate_size=24, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, n_shared_experts=2, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
        kv_lora_rank=8, q_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=5, routed_scaling_factor=2.5, rms_norm_eps=1e-6,
        rope_parameters=rope, tie_word_embeddings=False, dtype=torch.bfloat16, max_position_embeddings=64)
    model = DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()
    for name, buffer in model.named_buffers():
        if name.endswith('e_score_correction_bias'):
            buffer.data = torch.randn(4) / 10
    model.save_pretrained(folder)
    truth = deepseek_of(model.state_dict(), 4, 1)
    tokens = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.save({'tokens': tokens, 'logits': model.float()(tokens).logits}, f'{folder}.logits')
    return {k: v.clone() for k, v in truth.items()}


@pytest.fixture(scope='module')
def loads(tmp_path_factory):
    """All directories of one mount, loaded: {cell: what is wrong}; the mount, and the program."""
    folder = str(tmp_path_factory.mktemp('loads'))
    program = daemon.Ckptfs(folder)
    shutil.copytree(f'{MEGATRON}/llama', f'{folder}/newest')
    as_the_newest_cores_save(f'{folder}/newest/iter_0000007')
    for name in OWN:
        program.adopt(f'{folder}/newest' if name == 'newest' else f'{MEGATRON}/{name}', f'own_{name}')
    program.adopt(f'{MEGATRON}/buckets_new', 'own_buckets_new')
    for name in {cell[0] for cell in ENGINE_CELLS}:
        program.adopt(f'{ENGINES}/{name}/ckpt', name)
    os.mkdir(f'{folder}/fsdp')
    subprocess.run([sys.executable, '-W', 'ignore', f'{HERE}/fsdp_llama.py', f'{ENGINES}/llama/ckpt', f'{folder}/fsdp'], check=True, timeout=300)
    program.adopt(f'{folder}/fsdp/ckpt', 'fsdp')
    wide = save_wide(f'{folder}/wide')
    program.adopt(f'{folder}/wide', 'wide')
    deepseek = save_deepseek(f'{folder}/deepseek')
    program.adopt(f'{folder}/deepseek', 'deepseek')
    mount = program.mount()
    tasks = []

    def add(run, model, degrees, layout, strict, truth, logits=None, samples=None, chunks=1, most=None):
        at = f'{folder}/{run}_{layout}.pt'
        torch.save(truth, at)
        shown = daemon.step_of(mount, run) + f'/view/{layout}/megatron'
        said = [int((re.search(rf'(?<![a-z]){degree}(\d+)', layout) or [0, 1])[1]) for degree in ('tp', 'pp')]
        tasks.append({'name': f'{run} {layout}', 'model': model, 'degrees': degrees, 'step': step_in(shown), 'strict': strict,
                      'truth': at, 'optimizer': any(k.startswith(STATES) for k in truth), 'logits': logits, 'group': GROUP, 'run': said,
                      'samples': samples, 'chunks': chunks, 'most': most})

    for name, degrees, layout in CELLS:
        truth = own_truth(name)
        model = {**OWN[name], 'sharding': 'fully_reshardable'}
        add(f'own_{name}', model, degrees, layout, 'raise_all', truth, f'{MEGATRON}/{name}/logits.pt' if name in LOGITS else None,
            chunks=2 if (name, layout) == ('llama', VIRTUAL) else 1)
    for name, degrees, layout in ENGINE_CELLS:
        c = MODELS[name.partition('_')[0]]
        truth, weights = engine_truth(name, c)
        if name in LOGITS:
            keep_logits(name, weights, f'{folder}/{name}.logits')
        add(name, c, degrees, layout, 'raise_unexpected', truth, f'{folder}/{name}.logits' if name in LOGITS else None, samples_of(name))
    for dtype, degrees, layout in FSDP_CELLS:
        add('fsdp', {**TINY, 'dtype': dtype}, degrees, layout, 'raise_unexpected', fsdp_truth(f'{folder}/fsdp/truth.pt', dtype))
    for degrees, layout in (([4, 1, 1], 'tp4'), ([1, 2, 1], 'pp2')):
        add('wide', WIDE, degrees, layout, 'raise_unexpected', wide, most=1.1)
    latents = {**LATENT, 'rope_type': 'yarn', 'rotary_scaling_factor': 4.0, 'mscale': 0.7, 'mscale_all_dim': 1.0}
    add('deepseek', {**DEEPSEEK, 'latent': latents}, [1, 1, 2], 'dp4_ep2', 'raise_unexpected', deepseek, f'{folder}/deepseek.logits')
    changed = own_truth('llama')
    changed[f'{STATES}exp_avg.{BLOCK}mlp.linear_fc1.weight'][3, 95, 31] += 1e-3
    add('own_llama', OWN['llama'], [1, 2, 1], 'pp2', 'raise_all', changed)
    with open(f'{folder}/tasks.json', 'w', encoding='utf-8') as f:
        json.dump(tasks, f)
    subprocess.run([sys.executable, '-W', 'ignore', f'{HERE}/megatron_loads.py', f'{folder}/tasks.json', f'{folder}/out.json'], check=True,
                   timeout=500)
    with open(f'{folder}/out.json', encoding='utf-8') as f:
        yield json.load(f), mount, program
    program.close()


@pytest.mark.parametrize('name, degrees, layout', CELLS)
def test_megatron_resumes_from_its_own_save_at_other_degrees(loads, name, degrees, layout):
    assert loads[0][f'own_{name} {layout}'] == []


@pytest.mark.parametrize('name, degrees, layout', ENGINE_CELLS)
def test_megatron_begins_with_models_of_transformers(loads, name, degrees, layout):
    assert loads[0][f'{name} {layout}'] == []


@pytest.mark.parametrize('dtype, degrees, layout', FSDP_CELLS)
def test_megatron_goes_on_from_fsdp(loads, dtype, degrees, layout):
    assert loads[0][f'fsdp {layout}'] == [], dtype


def test_ranks_see_one_element_that_differs(loads):
    wrong = loads[0]['own_llama pp2']
    assert wrong and all('exp_avg.decoder.layers.mlp.linear_fc1.weight' in one or 'another next step' in one for one in wrong), wrong


def test_weights_that_nothing_trained_are_a_release(loads):
    """Megatron refuses an iteration 0."""
    shown = {run: os.listdir(daemon.step_of(loads[1], run) + '/view/tp1/megatron') for run in ('llama', 'own_llama')}
    assert 'release' in shown['llama'] and 'iter_0000007' in shown['own_llama']


def test_why_there_is_no_optimizer_is_told(loads):
    """Of buckets that nothing proves, and of no other source of Megatron's."""
    program = loads[2]
    left = {run: [one['what'] for one in json.loads(program.run('explain', 'tp1', '--step', run, '--store', program.store, '--json').stdout)['left_out']
                  if one['format'] == 'megatron'] for run in ('own_buckets', 'own_buckets_new', 'own_llama', 'llama_zero3', 'llama')}
    assert ['dp_reshardable' in one and 'a job that loads this begins a new one' in one for one in left['own_buckets_new']] == [True], left
    assert not left['own_buckets'] and not left['own_llama'] and not left['llama'], left
    assert ['the weight decay' in one for one in left['llama_zero3']] == [True], left  # AdamW(model.parameters()) decays norms


def test_common_pt_of_other_sources_has_no_classes(loads):
    """A Megatron job loads it with code."""
    for run in ('llama_zero3', 'fsdp', 'llama'):
        with zipfile.ZipFile(step_in(daemon.step_of(loads[1], run) + '/view/tp1/megatron') + '/common.pt') as archive:
            file = archive.open('common/data.pkl')
            file._expected_crc = None  # 0, as torch writes it where it does not compute them
            pickled = file.read()
        named = {arg for op, arg, _ in pickletools.genops(pickled) if op.name in ('GLOBAL', 'STACK_GLOBAL')}
        assert named == {'argparse Namespace'}, (run, named)


def test_megatron_computes_what_deepseek_of_transformers_does(loads):
    assert loads[0]['deepseek dp4_ep2'] == []


def test_ranks_read_little_more_than_they_get(loads):
    assert loads[0]['wide tp4'] == loads[0]['wide pp2'] == []
