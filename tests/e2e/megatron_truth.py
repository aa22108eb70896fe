# SPDX-License-Identifier: Apache-2.0
"""What Megatron's ranks must have in memory after they loaded a view, by the keys of torch_dist: of Megatron's own saves, of live engines
of DeepSpeed and FSDP2, and of directories of Hugging Face.

Nothing here passed through our code: it is what Megatron's own reader found, or what was gathered from an engine's memory, put into
Megatron's order by torch's own words (`mcore_of`).
"""
import glob
import os

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import daemon
from test_megatron_buckets import LAYERS, live_of

MEGATRON = os.path.join(daemon.FIXTURES, 'megatron')
ENGINES = os.path.join(daemon.FIXTURES, 'huggingface')
BLOCK = 'decoder.layers.'
STATES = 'optimizer.state.'
# The sizes of transformers' fixtures, in make_megatron's words; their vocabulary of 250 is padded by the run.
TINY = {'layers': 2, 'hidden': 48, 'heads': 6, 'groups': 2, 'channels': 8, 'ffn': 104, 'vocab': 256, 'eps': 1e-6}
MODELS = {'llama': TINY, 'qwen2': {**TINY, 'bias': True, 'tied': True}, 'mixtral': {**TINY, 'experts': 4, 'eps': 1e-5, 'base': 1000000}}
# make_megatron's DeepSeek: its sizes, and those of its latents
LATENT = {'q_lora_rank': 12, 'kv_lora_rank': 8, 'qk_head_dim': 6, 'qk_pos_emb_head_dim': 4, 'v_head_dim': 5, 'rope_type': 'rope'}
DEEPSEEK = {'experts': 4, 'ffn': 24, 'shared': 48, 'eps': 1e-6}
# make_megatron's own, as they were saved
OWN = {'llama': {}, 'tied': {'tied': True, 'channels': 8, 'dtype': 'float32'}, 'qwen2': {'bias': True, 'groups': 2},
       'qwen3': {'norm': True, 'channels': 8}, 'mixtral': {'experts': 4}, 'qwen3_moe': {'experts': 4, 'norm': True},
       'qwen2_moe': {'experts': 4, 'bias': True, 'shared': 24}, 'deepseek': {**DEEPSEEK, 'latent': LATENT}, 'newest': {}, 'buckets': {}, 'plain_adam': {}}
GROUP = {'lr': 1e-2, 'eps': 1e-8, 'step': 2}
# Models whose logits are compared, too
LOGITS = ('llama', 'tied', 'qwen2_moe', 'deepseek', 'qwen2_zero2', 'mixtral_zero2', 'qwen2', 'mixtral')


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


def deepseek_of(files, layers, dense):
    """The same of DeepSeek; the first `dense` layers do not have experts, so that each layer is by itself."""
    latents = {'self_attention.linear_proj': 'self_attn.o_proj', 'self_attention.linear_q_down_proj': 'self_attn.q_a_proj',
               'self_attention.q_layernorm': 'self_attn.q_a_layernorm', 'self_attention.linear_q_up_proj': 'self_attn.q_b_proj',
               'self_attention.linear_kv_down_proj': 'self_attn.kv_a_proj_with_mqa', 'self_attention.kv_layernorm': 'self_attn.kv_a_layernorm',
               'self_attention.linear_kv_up_proj': 'self_attn.kv_b_proj', 'input_layernorm': 'input_layernorm',
               'pre_mlp_layernorm': 'post_attention_layernorm'}
    out = {'embedding.word_embeddings.weight': files['model.embed_tokens.weight'],
           'decoder.final_layernorm.weight': files['model.norm.weight'], 'output_layer.weight': files['lm_head.weight']}
    for layer in range(layers):
        of = {k.removeprefix(f'model.layers.{layer}.'): v for k, v in files.items() if k.startswith(f'model.layers.{layer}.')}
        one = {f'{ours}.weight': of[f'{theirs}.weight'] for ours, theirs in latents.items()}
        for ours, theirs in [('mlp', 'mlp')] if layer < dense else [('mlp.shared_experts', 'mlp.shared_experts')]:
            one |= {f'{ours}.linear_fc1.weight': torch.cat([of[f'{theirs}.gate_proj.weight'], of[f'{theirs}.up_proj.weight']]),
                    f'{ours}.linear_fc2.weight': of[f'{theirs}.down_proj.weight']}
        if layer >= dense:
            one |= {'mlp.router.weight': of['mlp.gate.weight'], 'mlp.router.expert_bias': of['mlp.gate.e_score_correction_bias'],
                    'mlp.experts.experts.linear_fc1.weight': of['mlp.experts.gate_up_proj'],
                    'mlp.experts.experts.linear_fc2.weight': of['mlp.experts.down_proj']}
        out |= {f'{BLOCK}{layer}.{key}': tensor for key, tensor in one.items()}
    return out


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


def samples_of(name):
    """Returns the samples that an engine of DeepSpeed had counted; nothing of a directory of weights."""
    files = sorted(glob.glob(f'{ENGINES}/{name}/ckpt/global_step2/*_model_states.pt'))
    return torch.load(files[0], weights_only=False)['global_samples'] if files else None


def step_in(view):
    """The step that the tracker names."""
    with open(f'{view}/latest_checkpointed_iteration.txt', encoding='utf-8') as f:
        said = f.read()
    return f'{view}/release' if said == 'release' else f'{view}/iter_{int(said):07d}'
