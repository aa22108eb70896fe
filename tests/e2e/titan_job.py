# SPDX-License-Identifier: Apache-2.0
"""A rank of a training that torchtitan's own CheckpointManager saves and loads: its wrapper of the model, its
container of optimizers (two of them, three groups), its schedule and its data loader.  The model is make_dcp.py's,
since torchtitan's want a GPU's compiler.

Usage: titan_job.py FOLDER MESH RANK MEETING [PATH]

MESH is as dcp_model.py has it, or pp=2: two stages of torch's own pipelining.

Without PATH it trains UPDATES, saves FOLDER/checkpoint/step-MIDDLE on the way and, as torchtitan does, the weights
alone at the end (as safetensors if TITAN_HF is set); what is in the middle goes to FOLDER/truth.safetensors.  With
PATH it goes on from there (--checkpoint.initial_load_path).  Losses go to FOLDER/losses.json or FOLDER/resumed.json.
"""
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'fixtures', 'dcp'))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

import dcp_model

UPDATES, MIDDLE, RATE = 6, 4, 1e-2


class Stage(dcp_model.Model):
    """Half of a model, whose parameters have the names that the whole one gives them."""

    def __init__(self, seed, index):
        super().__init__(seed)
        self.index = index
        self.model.layers[1 - index] = torch.nn.Identity()
        if index == 0:
            self.lm_head = self.model.norm = torch.nn.Identity()
            del self.model.gain, self.model.seen, self.model.running_mean
        else:
            self.model.embed_tokens = torch.nn.Identity()

    def forward(self, x):
        if self.index == 0:
            return self.model.layers[0](self.model.embed_tokens(x))
        return self.lm_head(self.model.norm(self.model.layers[1](x)) * self.model.gain.mean())


class Whole:
    """Trains a model that each rank has all layers of."""

    def __init__(self, seed, mesh):
        self.model, self.rank, self.count = dcp_model.spread(dcp_model.Model(seed), mesh)
        self.ranks = dist.get_world_size()

    def learn(self, tokens):
        """The gradients of a batch; its loss, the mean of all ranks'."""
        logits = self.model(tokens[:, :-1])
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        return whole.item() / self.ranks


class Halves:
    """Trains a model of which each of two ranks has half of the layers."""
    rank, count = 0, 1  # data-parallel

    def __init__(self, seed):
        self.index = dist.get_rank()
        self.model = Stage(seed, self.index)
        stage = PipelineStage(self.model, self.index, 2, torch.device('cpu'))
        self.schedule = ScheduleGPipe(
            stage, 2, lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()))

    def learn(self, tokens):
        """As Whole's."""
        losses = []
        if self.index == 0:
            self.schedule.step(tokens[:, :-1].contiguous())
        else:
            self.schedule.step(target=tokens[:, 1:].contiguous(), losses=losses)
        whole = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(whole)
        return whole.item()


class Rows(torch.utils.data.IterableDataset):
    """The rows of a rank: a batch of each update, which depends on its number alone, cut for
    data-parallel ranks."""

    def __init__(self, rank, count):
        self.rank, self.count, self.number = rank, count, 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(1000 + self.number)
            self.number += 1
            tokens = torch.randint(0, dcp_model.SIZES['vocab'], (12, dcp_model.SIZES['seq'] + 1), generator=generator)
            yield tokens.chunk(self.count)[self.rank]

    def state_dict(self):
        """Returns what StatefulDataLoader asks of a data set."""
        return {'number': self.number}

    def load_state_dict(self, state):
        self.number = state['number']


class TrainState:
    """As torchtitan's Trainer is saved as `train_state`."""

    def __init__(self):
        self.step = self.ntokens_seen = 0

    def state_dict(self):
        return {'step': self.step, 'ntokens_seen': self.ntokens_seen}

    def load_state_dict(self, state):
        self.step, self.ntokens_seen = state['step'], state['ntokens_seen']


class Adapter:
    """The little of a state_dict_adapter that saving as safetensors asks for."""
    fqn_to_index_mapping = None

    def to_hf(self, state):  # of buffers that count torch makes no safetensors
        return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


def containers(model):
    """(optimizers, schedules) of torchtitan."""
    adam = {'lr': RATE, 'betas': (0.9, 0.95), 'weight_decay': 0.1}
    groups = [
        ParamGroupConfig(pattern='norm', optimizer_name='AdamW', optimizer_kwargs={**adam, 'weight_decay': 0.}),
        ParamGroupConfig(pattern='lm_head', optimizer_name='Adam', optimizer_kwargs={'lr': RATE / 2}),
        ParamGroupConfig(pattern='.*', optimizer_name='AdamW', optimizer_kwargs=adam)]
    if not any('lm_head' in name for name, _ in model.named_parameters()):  # a stage that has none
        del groups[1]
    optimizers = OptimizersContainer.Config(implementation='for-loop', param_groups=groups).build(model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=2, decay_type='cosine').build(
        optimizers=optimizers, training_steps=UPDATES)
    return optimizers, schedules


def truth(model, optimizers):
    """Every tensor of the live job (collective)."""
    out = {f'weight/{name}': dcp_model.whole(tensor) for name, tensor in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, states in optimizer.state.items():
            out.update({f'{kind}/{names[parameter]}': dcp_model.whole(value) for kind, value in states.items()})
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, out)
    return {name: tensor for part in parts for name, tensor in part.items()}


def main():
    folder, mesh, rank, meeting, *path = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = dcp_model.ranks_of(mesh)
    os.environ.update(RANK=rank, WORLD_SIZE=str(ranks), LOCAL_RANK=rank)
    dist.init_process_group('gloo', init_method=f'file://{meeting}', rank=int(rank), world_size=ranks)
    seed = 99 if path else 7
    job = Halves(seed) if 'pp' in mesh else Whole(seed, mesh)
    optimizers, schedules = containers(job.model)
    state = TrainState()
    loader = ParallelAwareDataloader(Rows(job.rank, job.count), job.rank, job.count, batch_size=None)
    manager = CheckpointManager.Config(
        enable=True, folder='checkpoint' if not path else 'again', interval=MIDDLE, keep_latest_k=0,
        last_save_in_hf='TITAN_HF' in os.environ, export_dtype='bfloat16',
        initial_load_path=path[0] if path else None, initial_load_model_only=False,
        # which torchtitan loads at the same data-parallel degree alone
        exclude_from_loading=os.environ.get('TITAN_EXCLUDE', '').split()).build(
            dataloader=loader, model_parts=[job.model], optimizers=optimizers, lr_schedulers=schedules,
            states={'train_state': state}, sd_adapter=Adapter(), base_folder=folder)
    assert manager.load() == bool(path)
    if path and 'dataloader' in os.environ.get('TITAN_EXCLUDE', ''):
        loader.dataset.number = state.step
    losses, rows = [], iter(loader)
    while state.step < UPDATES:
        tokens = next(rows)
        losses.append(job.learn(tokens))
        optimizers.step()
        schedules.step()
        optimizers.zero_grad()
        state.step += 1
        state.ntokens_seen += tokens.numel()
        if not path:
            manager.save(state.step, last_step=state.step == UPDATES)
            if state.step == MIDDLE:
                held = truth(job.model, optimizers)
                if rank == '0':
                    save_file(held, f'{folder}/truth.safetensors')
    manager.close()
    if rank == '0':
        with open(f'{folder}/{"resumed" if path else "losses"}.json', 'w', encoding='utf-8') as f:
            json.dump(losses, f)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads take their time


if __name__ == '__main__':
    main()
