# SPDX-License-Identifier: Apache-2.0
"""Ranks of other frameworks that go on from a view of a Megatron step; each returns what it has in memory afterwards."""
import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM


def empty_model(files, dtype):
    """The model of a config.json, of values that no checkpoint has."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(files), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    return model


def groups_of(model):
    """Megatron's groups: no decay for biases and vectors."""
    plain = [p for p in model.parameters() if p.ndim == 1]
    return [{'params': [p for p in model.parameters() if p.ndim > 1], 'weight_decay': 0.5}, {'params': plain, 'weight_decay': 0.5}]


def keep(found, rates, out):
    if dist.get_rank() == 0:
        torch.save({'found': {k: v.detach().clone() for k, v in found.items()}, 'rates': rates}, out)
    dist.barrier()


def fsdp_worker(files, folder, out):
    """FSDP2 and AdamW, by torch's own dcp.load."""
    dist.init_process_group('gloo')
    model = empty_model(files, torch.float32)
    mesh = init_device_mesh('cpu', (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # its states are there to be loaded into
    weights, states = get_state_dict(model, optimizer)
    state = {'model': weights, 'optim': states}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state['model'], optim_state_dict=state['optim'])
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    found = {f'master/{k}': v for k, v in weights.items()}
    for name, values in states['state'].items():
        found |= {f'{kind}/{name}': value for kind, value in values.items()}
    keep(found, [(g['lr'], g['weight_decay']) for g in optimizer.param_groups], out)


def engine_worker(files, folder, out, stage):
    """An unmodified DeepSpeed engine, by load_universal."""
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    deepspeed.init_distributed('gloo', verbose=False)
    model = empty_model(files, torch.bfloat16)
    config = {'train_micro_batch_size_per_gpu': 1, 'zero_optimization': {'stage': stage}, 'zero_allow_untested_optimizer': True,
              'gradient_clipping': 0., 'bf16': {'enabled': True}, 'checkpoint': {'load_universal': True}}
    if stage == 3:
        config['zero_optimization'] |= {'sub_group_size': 10**9, 'stage3_param_persistence_threshold': 0}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups_of(model), lr=0.5), config=config)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[f'master/{name}'] = safe_get_full_fp32_param(parameter)
        for kind in ('exp_avg', 'exp_avg_sq'):
            value = safe_get_full_optimizer_state(parameter, kind)
            found[f'{kind}/{name}'] = value.view(found[f'master/{name}'].shape)
    groups = getattr(engine.optimizer, 'optimizer', engine.optimizer).param_groups
    keep(found, [(g['lr'], g['weight_decay']) for g in groups], out)
