# SPDX-License-Identifier: Apache-2.0
"""Views that Megatron loads: real models of megatron-core, cut in other ways than the source, have in memory what the source's live engine had.

Sources are Megatron's own saves, engines of DeepSpeed and FSDP2 around models of transformers, and directories of Hugging Face.  Truth
is what Megatron's own reader found in its save, or what was gathered from the engine's memory, put into Megatron's order by
torch's own words (`mcore_of`).  megatron_loads.py has the ranks, which compare every tensor, the logits and a next step.
"""
import glob
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
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import daemon
from megatron_forms import as_the_newest_cores_save
from test_megatron_buckets import LAYERS, live_of

HERE = os.path.dirname(os.path.abspath(__file__))
MEGATRON = os.path.join(daemon.FIXTURES, 'megatron')
ENGINES = os.path.join(daemon.FIXTURES, 'huggingface')
BLOCK = 'decoder.layers.'
STATES = 'optimizer.state.'
# What transformers' fixtures are, in make_megatron's words; their vocabulary of 250 is padded by the run.
TINY = {'layers': 2, 'hidden': 48, 'heads': 6, 'groups': 2, 'channels': 8, 'ffn': 104, 'vocab': 256, 'eps': 1e-6}
MODELS = {'llama': TINY, 'qwen2': {**TINY, 'bias': True, 'tied': True}, 'mixtral': {**TINY, 'experts': 4, 'eps': 1e-5, 'base': 1000000}}
WIDE = {'layers': 2, 'hidden': 1024, 'heads': 16, 'groups': 8, 'channels': 64, 'ffn': 2816, 'vocab': 2048, 'eps': 1e-6}
# make_megatron's own, as they were saved
OWN = {'llama': {}, 'tied': {'tied': True, 'channels': 8, 'dtype': 'float32'}, 'qwen2': {'bias': True, 'groups': 2},
       'qwen3': {'norm': True, 'channels': 8}, 'mixtral': {'experts': 4}, 'qwen3_moe': {'experts': 4, 'norm': True},
       'qwen2_moe': {'experts': 4, 'bias': True, 'shared': 24}, 'newest': {}, 'buckets': {}, 'plain_adam': {}}
VIRTUAL = 'pp2_dp2'  # this one with two chunks a stage
# (source, [tp, pp, ep], layout).  `newest` is llama in the form that cores from 0.19 on save.
CELLS = [('llama', [4, 1, 1], 'tp4'), ('llama', [1, 2, 1], VIRTUAL), ('tied', [4, 1, 1], 'tp4'), ('qwen3', [2, 2, 1], 'tp2_pp2'),
         ('mixtral', [1, 1, 4], 'dp4_ep4'), ('mixtral', [1, 2, 1], 'pp2_dp2'), ('qwen2_moe', [1, 1, 2], 'dp4_ep2'),
         ('qwen3_moe', [2, 1, 2], 'tp2_dp2_ep2'), ('newest', [2, 1, 1], 'tp2'), ('buckets', [4, 1, 1], 'tp4'), ('plain_adam', [1, 2, 1], 'pp2')]
# Models whose logits are compared, too
LOGITS = ('llama', 'tied', 'qwen2_moe', 'qwen2_zero2', 'mixtral_zero2', 'qwen2', 'mixtral')
GROUP = {'lr': 1e-2, 'eps': 1e-8, 'step': 2}
ENGINE_CELLS = [('llama_zero3', [1, 2, 1], 'pp2'), ('llama_autotp2', [2, 2, 1], 'tp2_pp2'), ('qwen2_zero2', [2, 1, 1], 'tp2_dp2'),
                ('mixtral_zero2', [1, 1, 2], 'dp4_ep2'), ('mixtral_zero1', [1, 2, 1], 'pp2'), ('llama', [1, 2, 1], 'pp2'), ('mixtral', [1, 1, 4], 'dp4_ep4')]
if os.environ.get('CKPTFS_LONG'):
    CELLS += [('llama', [1, 4, 1], 'pp4'), ('qwen3_moe', [1, 1, 1], 'dp4'), ('llama', [1, 1, 1], 'tp2_pp2'), ('qwen2', [1, 2, 1], 'pp2'),
              ('qwen2_moe', [1, 2, 2], 'pp2_dp2_ep2')]
    ENGINE_CELLS += [('llama_zero1', [2, 1, 1], 'tp2'), ('qwen2_autotp2', [1, 2, 1], 'pp2'), ('qwen2', [2, 1, 1], 'tp2')]
# A job in fp32 loads what FSDP2 saved as it is; one in bf16 weights that are rounded, and masters that are not.
FSDP_CELLS = [('float32', [1, 2, 1], 'pp2'), ('bfloat16', [2, 1, 1], 'tp2_bf16')]


def stacked(live):
    """Tensors by layer, with the layers as the first dimension."""
    rest = dict.fromkeys(key.removeprefix(BLOCK).partition('.')[2] for key in live if key.startswith(BLOCK))
    return {k: v for k, v in live.items() if not k.startswith(BLOCK)} | {
        BLOCK + key: torch.stack([live[f'{BLOCK}{layer}.{key}'] for layer in range(LAYERS)]) for key in rest}


def own_truth(name):
    """Returns what Megatron's reader found, by the keys of torch_dist in their newest form; of buckets, what engines had in memory."""
    plain = torch.load(f'{MEGATRON}/{"llama" if name == "newest" else name}/plain.pt')
    plain = {k: v for k, v in plain.items() if not k.startswith('optimizer.distributed')}
    if name == 'buckets':
        live = live_of(MEGATRON, name)
        for ours, kind in (('master', 'param'), ('exp_avg', 'exp_avg'), ('exp_avg_sq', 'exp_avg_sq')):
            plain |= {f'{STATES}{kind}.{k}': v for k, v in stacked(live[ours]).items()}
    return {k.replace('.fp32_param.', '.param.'): v for k, v in plain.items()}


def joined(q, k, v, groups):
    """Megatron's order: each group's queries, its key, its value."""
    apart = [part.reshape(groups, -1, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(apart, 1).reshape(-1, *q.shape[1:])


def mcore_of(files, c):
    """Tensors by the modules' names of transformers as torch_dist has them."""
    out = {'embedding.word_embeddings.weight': files['model.embed_tokens.weight'],
           'decoder.final_layernorm.weight': files['model.norm.weight']}
    if not c.get('tied'):
        out['output_layer.weight'] = files['lm_head.weight']
    layers = []
    for layer in range(c['layers']):
        of = {k.removeprefix(f'model.layers.{layer}.'): v for k, v in files.items() if k.startswith(f'model.layers.{layer}.')}
        one = {'self_attention.linear_qkv.layer_norm_weight': of['input_layernorm.weight'],
               'self_attention.linear_proj.weight': of['self_attn.o_proj.weight'],
               'mlp.linear_fc1.layer_norm_weight': of['post_attention_layernorm.weight']}
        for kind in ('weight', 'bias') if c.get('bias') else ('weight', ):
            one[f'self_attention.linear_qkv.{kind}'] = joined(*(of[f'self_attn.{part}_proj.{kind}'] for part in 'qkv'), c['groups'])
        if c.get('experts'):
            one |= {'mlp.router.weight': of['mlp.gate.weight'],
                    'mlp.experts.experts.linear_fc1.weight': of['mlp.experts.gate_up_proj'],
                    'mlp.experts.experts.linear_fc2.weight': of['mlp.experts.down_proj']}
        else:
            one |= {'mlp.linear_fc1.weight': torch.cat([of['mlp.gate_proj.weight'], of['mlp.up_proj.weight']]),
                    'mlp.linear_fc2.weight': of['mlp.down_proj.weight']}
        layers.append(one)
    return out | {BLOCK + key: torch.stack([one[key] for one in layers]) for key in layers[0]}


def engine_truth(name, c):
    """Returns the tensors in the memory of a live engine of DeepSpeed, or of the model that was saved."""
    truth = load_file(f'{ENGINES}/{name}/truth.safetensors')

    def of(kind):
        return {k.removeprefix(kind + '/'): v for k, v in truth.items() if k.startswith(kind + '/')}

    out = mcore_of(of('weight'), c)
    for ours, kind in (('model', 'param'), ('exp_avg', 'exp_avg'), ('exp_avg_sq', 'exp_avg_sq')):
        if files := of(ours):
            out |= {f'{STATES}{kind}.{k}': v for k, v in mcore_of(files, c).items()}
    return out, of('weight')


def fsdp_truth(path, dtype):
    """Returns what torch gathered from a job of FSDP2, in fp32."""
    live = torch.load(path)
    out = {k: v.to(getattr(torch, dtype)) for k, v in mcore_of(live['weight'], TINY).items()}
    for ours, kind in (('weight', 'param'), ('exp_avg', 'exp_avg'), ('exp_avg_sq', 'exp_avg_sq')):
        out |= {f'{STATES}{kind}.{k}': v for k, v in mcore_of(live[ours], TINY).items()}
    return out


def keep_logits(name, weights, path):
    """Keeps what transformers computes with the truth."""
    config = AutoConfig.from_pretrained(f'{ENGINES}/{name}/ckpt')
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation='eager').eval()
    model.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False)
    tokens = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.save({'tokens': tokens, 'logits': model(tokens).logits}, path)


def save_wide(folder):
    """A model whose tensors are large enough to be cut for ranks, as save_pretrained writes it; its truth."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=16,
                                         num_key_value_heads=8, tie_word_embeddings=False, dtype=torch.bfloat16)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return mcore_of(model.state_dict(), WIDE)


def samples_of(name):
    """Returns the samples that an engine of DeepSpeed had counted; nothing of a directory of weights."""
    files = sorted(glob.glob(f'{ENGINES}/{name}/ckpt/global_step2/*_model_states.pt'))
    return torch.load(files[0], weights_only=False)['global_samples'] if files else None


def step_in(view):
    """The step that the tracker names."""
    with open(f'{view}/latest_checkpointed_iteration.txt', encoding='utf-8') as f:
        said = f.read()
    return f'{view}/release' if said == 'release' else f'{view}/iter_{int(said):07d}'


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
    add('wide', WIDE, [4, 1, 1], 'tp4', 'raise_unexpected', wide, most=1.1)
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


def test_ranks_read_little_more_than_they_get(loads):
    assert loads[0]['wide tp4'] == []
