# SPDX-License-Identifier: Apache-2.0
"""A training loop with a Snapshotter, one rank of it, led by its input.

Usage: snapshot_trainer.py FOLDER STORE RANK WORLD [SLOTS]

Lines of the input: "step" trains one step and saves it (prints "saved N BOOL"), "durable N"
waits for it (prints "durable N BOOL"), "status" prints it as JSON; the end of the
input ends it.  Rank 0 writes what each save has to hold to FOLDER/truth-N.pt.
"""
import json
import os
import sys

import ckptfs
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HIDDEN, HEADS, MLP, VOCAB, LAYERS = 128, 4, 256, 512, 2


class Attention(nn.Module):
    """The four projections of a llama's attention, which nothing attends with."""

    def __init__(self):
        super().__init__()
        for name in ('q_proj', 'k_proj', 'v_proj', 'o_proj'):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=False))

    def forward(self, x):
        return self.o_proj(torch.tanh(self.q_proj(x)) * self.k_proj(x) + self.v_proj(x))


class Mlp(nn.Module):
    """gate, up and down."""

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, MLP, bias=False)
        self.up_proj = nn.Linear(HIDDEN, MLP, bias=False)
        self.down_proj = nn.Linear(MLP, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Named as transformers names a llama's."""

    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm = nn.LayerNorm(HIDDEN, bias=False)
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN, bias=False)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Inner(nn.Module):
    """Embedding, layers, norm."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN, bias=False)
        self.rotary_emb = nn.Module()
        # As large as what is copied late.
        self.rotary_emb.register_buffer('inv_freq', torch.ones(1 << 15))

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Net(nn.Module):
    """A model with llama's names."""

    def __init__(self):
        super().__init__()
        self.model = Inner()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.model(tokens))


def truth_of(net, optimizer):
    """Clones of all that a save has to hold: {"<name>"} and {"<kind>/<name>"}."""
    truth = {k: v.clone() for k, v in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for kind, value in optimizer.state[parameter].items():
            truth[f'{kind}/{name}'] = value.clone()
    return truth


def main():
    """Train as the input says."""
    folder, store, rank, world = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5])
    slots = int(sys.argv[5]) if len(sys.argv) > 5 else 2
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = module = Net()
    if world > 1:
        torch.distributed.init_process_group(
            'gloo', init_method=f'file://{folder}/rendezvous', rank=rank, world_size=world)
        module = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    snap = ckptfs.Snapshotter(
        module, optimizer, run='job', store=store, slots=slots,
        documents={'args': {'num_attention_heads': HEADS}, 'rng': torch.get_rng_state})
    step = 0
    print('ready', flush=True)
    for line in sys.stdin:
        word, *more = line.split()
        if word == 'step':
            tokens = torch.randint(VOCAB, (4, 16), generator=torch.Generator().manual_seed(
                step * world + rank))
            loss = nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            truth = truth_of(net, optimizer)
            taken = snap.save(step)
            net.model.rotary_emb.inv_freq += 1  # no optimizer's business
            if rank == 0:
                torch.save(truth, f'{folder}/truth-{step}.tmp')
                os.rename(f'{folder}/truth-{step}.tmp', f'{folder}/truth-{step}.pt')
            print('saved', step, taken, flush=True)
            step += 1
        elif word == 'durable':
            print('durable', more[0], snap.wait_durable(int(more[0]), 60), flush=True)
        elif word == 'status':
            print(json.dumps(snap.status()), flush=True)
    snap.close()
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == '__main__':
    main()
