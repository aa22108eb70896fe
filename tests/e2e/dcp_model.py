# SPDX-License-Identifier: Apache-2.0
"""A llama-like model with tensors of a MiB and of odd sizes, trained by real DeepSpeed.

save(out, job) forks the ranks, trains three steps, gathers the truth from the live engine's memory
and saves with DeepSpeed's own code: out/ckpt, out/truth.pt.
"""
import os
import zlib
from dataclasses import dataclass

import deepspeed
import launch
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                               parallelize_module)

from gather import _local_state
from tiny_model import Layout

VOCAB, DIM, HEADS, KV, FFN, SEQ, BATCH = 1427, 256, 4, 2, 1500, 6, 12


class Attention(nn.Module):
    """Grouped queries."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(DIM, DIM, bias=False)
        self.k_proj = nn.Linear(DIM, DIM * KV // HEADS, bias=False)
        self.v_proj = nn.Linear(DIM, DIM * KV // HEADS, bias=False)
        self.o_proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, DIM // HEADS).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1))


class Mlp(nn.Module):
    """SwiGLU; each of its matrices has more than a MiB."""

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(DIM, FFN, bias=False)
        self.up_proj = nn.Linear(DIM, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(DIM, eps=1e-5)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(DIM, eps=1e-5)
        self.mlp = Mlp()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """As transformers names it."""

    def __init__(self, layers):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.register_buffer('calls', torch.zeros((), dtype=torch.int64))
        self.register_buffer('none', torch.zeros(0, 3))
        # Seven rows: of four shards one has a single row, of eight one has none.
        self.few = nn.Parameter(torch.zeros(7, 60000))

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        if self.training:
            self.calls += 1
        return self.norm(x) + self.few.mean()


class Net(nn.Module):
    """The model; equal on every rank."""

    def __init__(self, tied=False, frozen=False, layers=1):
        super().__init__()
        self.model = Decoder(layers)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        for name, parameter in self.named_parameters():
            gen = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data.copy_(torch.randn(parameter.shape, generator=gen) * 0.05
                                 + ('norm' in name))
            if frozen and 'mlp.up_proj' in name:
                parameter.requires_grad_(False)

    def forward(self, ids):
        return self.lm_head(self.model(ids))


def tensor_parallel(model, mesh):
    """As torchtitan cuts a llama."""
    plan = {'model.embed_tokens': RowwiseParallel(input_layouts=Replicate()),
            'lm_head': ColwiseParallel(output_layouts=Replicate())}
    plan.update({f'model.layers.*.self_attn.{n}_proj': ColwiseParallel() for n in 'qkv'})
    plan.update({f'model.layers.*.mlp.{n}_proj': ColwiseParallel() for n in ('gate', 'up')})
    plan['model.layers.*.self_attn.o_proj'] = RowwiseParallel()
    plan['model.layers.*.mlp.down_proj'] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


@dataclass
class Job:
    """The job that trains the model."""
    stage: int = 2
    dp: int = 2
    bf16: bool = False
    tied: bool = False
    frozen: bool = False
    groups: int = 1
    layers: int = 1

    def model(self):
        """A fresh one."""
        return Net(self.tied, self.frozen, self.layers)

    def optimizer(self, model):
        """AdamW, in one group or in two."""
        params = [p for p in model.parameters() if p.requires_grad]
        big = [p for p in params if p.dim() > 1 or self.groups == 1]
        small = [p for p in params if not any(p is b for b in big)]
        groups = [{'params': big, 'weight_decay': .1}]
        groups += [{'params': small, 'weight_decay': 0., 'lr': 2e-3}] if small else []
        return torch.optim.AdamW(groups, lr=1e-3, betas=(.9, .95))


def batch_of(number, rank, ranks):
    """This rank's tokens of a step."""
    gen = torch.Generator().manual_seed(number)
    return torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=gen).chunk(ranks)[rank]


def loss_of(model, number, rank, ranks):
    """Cross entropy of the rank's tokens."""
    ids = batch_of(number, rank, ranks)
    logits = model(ids[:, :-1])
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def torch_step(model, optimizer, number, rank, ranks):
    """One step of plain torch; this rank's loss."""
    loss = loss_of(model, number, rank, ranks)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def deepspeed_worker(out, job):
    """One rank: train, gather, save."""
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    deepspeed.init_distributed('gloo', verbose=False)
    model = job.model()
    config = {'train_micro_batch_size_per_gpu': BATCH // job.dp, 'steps_per_print': 10**6,
              'zero_allow_untested_optimizer': True, 'gradient_clipping': 0.,
              'zero_optimization': {'stage': job.stage}}
    if job.bf16:
        config['bf16'] = {'enabled': True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=job.optimizer(model), config=config)
    rank = torch.distributed.get_rank()
    for number in range(3):
        engine.backward(loss_of(engine, number, rank, job.dp))
        engine.step()
    lay = Layout(stage=job.stage, dp=job.dp, groups=job.groups)
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    local = _local_state(engine, lay, trained, {}, False)
    truth = {f'buffer/{n}': b.clone() for n, b in engine.module.named_buffers()}
    for name, parameter in engine.module.named_parameters():
        truth[f'weight/{name}'] = parameter.detach().clone()
        for key, value in zip(('model', 'exp_avg', 'exp_avg_sq'), local.get(parameter, ())):
            truth[f'{key}/{name}'] = value
    engine.save_checkpoint(os.path.join(out, 'ckpt'), client_state={
        'iteration': 3, 'seen': {'tokens': 216, 'shards': [1, 2], 'note': 'größer'}})
    if rank == 0:
        torch.save(truth, os.path.join(out, 'truth.pt'))


def save(out, job):
    """A checkpoint with its truth; the save directory."""
    os.makedirs(out, exist_ok=True)
    log = os.path.join(out, 'log')
    assert launch.launch(deepspeed_worker, job.dp, (out, job), log), \
        launch.errors_of(log, job.dp)
    return os.path.join(out, 'ckpt')
