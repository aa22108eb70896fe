# SPDX-License-Identifier: Apache-2.0
"""A job of a framework whose callback takes snapshots: trains, goes on from a snapshot of the
middle, and tells both.

Usage: callback_trainer.py FRAMEWORK FOLDER STORE RANK WORLD WAY

FRAMEWORK is transformers or lightning, WAY ddp or fsdp2.  Rank 0 writes what the snapshots
have to hold to FOLDER/truth-N.pt and the losses to FOLDER/losses.json.  One process has a gradient
scaler.
"""
import json
import os
import pathlib
import sys
import time

import ckptfs
import torch
from snapshot_trainer import truth_of
from torch.distributed.fsdp import FSDPModule, fully_shard

UPDATES, MIDDLE, EVERY = 6, 4, 2
VOCABULARY = 512


def samples():
    """Two micro-batches of two for each of two ranks and each update, and some."""
    tokens = torch.randint(VOCABULARY, (2 * 2 * 2 * UPDATES + 8, 8),
                           generator=torch.Generator().manual_seed(3))
    return [{'input_ids': row, 'labels': row} for row in tokens]


def barrier():
    """Waits for all ranks, if there are several."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def rank():
    """This one's."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def when_durable(make, end=60):
    """make(), as soon as the step is there; by rank 0, for all."""
    until = time.monotonic() + end
    while rank() == 0:
        try:
            make()
            break
        except RuntimeError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    barrier()


def whole_of(tensor):
    """Returns the tensor of all ranks together."""
    return tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor


def keep_truth(folder, step, model, optimizer):
    """Clones of what a step has to hold."""
    truth = {name: whole_of(value) for name, value in truth_of(model, optimizer).items()}
    truth.pop('lm_head.weight', None)  # the embedding's other name
    if rank() == 0:
        torch.save(truth, f'{folder}/truth-{step}.pt')


def same_end(whole, middle):
    """Both trainings end with the same bits."""
    ends = middle.state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(whole_of(value), whole_of(ends[name])), name


def scaler(scale):
    """It grows when MIDDLE is over, so that the next update overflows and is left out: who goes on
    with another one has other losses."""
    return torch.amp.GradScaler('cpu', scale, 2. ** 12, 2. ** -12, MIDDLE)


def shard_on_the_cpu(args):
    """accelerate shards on accelerators alone: this is one, to it."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    assert args.distributed_state.distributed_type == DistributedType.MULTI_CPU
    PartialState._shared_state['distributed_type'] = DistributedType.MULTI_GPU


def transformers(folder, store, way='one'):
    """(losses of the whole training, losses of one that goes on in the middle)."""
    import transformers as hf
    callback = ckptfs.transformers.SnapshotCallback(store, 'transformers', slots=4)

    class Truth(hf.TrainerCallback):
        """Keeps the truth of what the snapshot has just been taken of."""

        def on_save(self, args, state, control, model=None, optimizer=None, **_):
            assert isinstance(model, FSDPModule) == (way == 'fsdp2')
            keep_truth(folder, state.global_step, model, optimizer.optimizer)

    def trainer(name, callbacks):
        hf.set_seed(1)
        model = hf.LlamaForCausalLM(hf.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
            attention_dropout=0.25, attn_implementation='eager'))
        more = {'fsdp': True, 'fsdp_config': {
            'version': 2, 'transformer_layer_cls_to_wrap': ['LlamaDecoderLayer']}}
        args = hf.TrainingArguments(
            f'{folder}/{name}', max_steps=UPDATES, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, save_strategy='steps', save_steps=EVERY, use_cpu=True,
            logging_steps=1, report_to=[], disable_tqdm=True, learning_rate=1e-2,
            lr_scheduler_type='cosine', max_grad_norm=0, **(more if way == 'fsdp2' else {}))
        if way == 'fsdp2':
            shard_on_the_cpu(args)
        made = hf.Trainer(model, args, train_dataset=samples(), callbacks=callbacks)
        if way == 'one':
            made.accelerator.scaler = scaler(2. ** 56)
        return made

    def losses(one):
        return [row['loss'] for row in one.state.log_history if 'loss' in row]

    whole = trainer('whole', [callback, Truth()])
    whole.train()
    url = f'ckptfs://{store}/transformers/{MIDDLE}'
    when_durable(lambda: ckptfs.transformers.checkpoint(url, folder, way == 'fsdp2'))
    # Nobody receives for this one: training goes on.
    nobody = ckptfs.transformers.SnapshotCallback(store + '-none', every=1)
    middle = trainer('middle', [nobody])
    middle.train(resume_from_checkpoint=f'{folder}/checkpoint-{MIDDLE}')
    same_end(whole.model, middle.model)
    return losses(whole), losses(middle)[MIDDLE:]


def lightning(folder, store, way='one'):
    """(losses of a training that goes on from Lightning's own checkpoint, from ours).  A
    loader without a state begins again in both."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import ModelParallelStrategy
    from snapshot_trainer import Net

    class Module(pl.LightningModule):
        """A net, and its losses."""

        def __init__(self, width=3, where=None):
            super().__init__()
            self.save_hyperparameters()
            self.net, self.losses = Net(), []

        def on_save_checkpoint(self, checkpoint):
            if way != 'fsdp2':  # where Lightning gathers weights for it
                checkpoint['sum'] = checkpoint['state_dict']['net.model.norm.weight'].sum().detach()

        def configure_model(self):
            if way == 'fsdp2' and not isinstance(self.net, FSDPModule):
                mesh = self.device_mesh['data_parallel']
                for layer in self.net.model.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch, _):
            tokens = batch['input_ids']
            loss = torch.nn.functional.cross_entropy(
                self.net(tokens).flatten(0, 1), tokens.flatten())
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [{'scheduler': torch.optim.lr_scheduler.LinearLR(optimizer),
                                  'interval': 'step'}]

    class Data(pl.LightningDataModule):
        """Samples, and what became of them."""

        def train_dataloader(self):
            return torch.utils.data.DataLoader(samples(), batch_size=2)

        def state_dict(self):
            return {'seen': self.trainer.global_step}

    class Truth(pl.Callback):
        """Keeps the truth of what the snapshot has just been taken of."""
        saved, state_key = False, 'truth'

        def state_dict(self):
            return {'every': EVERY}

        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            checkpoint['noted'] = [trainer.global_step]

        def on_train_batch_end(self, trainer, pl_module, *_):
            if trainer.global_step % EVERY == 0:
                keep_truth(folder, trainer.global_step, pl_module, trainer.optimizers[0])
            if trainer.global_step == MIDDLE and not self.saved:
                self.saved = True
                trainer.save_checkpoint(f'{folder}/own.ckpt')

    world = int(os.environ.get('WORLD_SIZE', '1'))  # Lightning takes it away

    def fit(callbacks, path=None):
        pl.seed_everything(1)
        # Lightning itself loads no such thing under FSDP2.
        module = Module(where=pathlib.Path('here') if way != 'fsdp2' else None)
        strategy = {'one': 'auto', 'ddp': 'ddp', 'fsdp2': ModelParallelStrategy(
            world, 1, save_distributed_checkpoint=False)}[way]
        plugins = [MixedPrecision('16-mixed', 'cpu', scaler(2. ** 8))] if way == 'one' else []
        trainer = pl.Trainer(
            accelerator='cpu', devices=world, strategy=strategy, plugins=plugins,
            max_steps=UPDATES, accumulate_grad_batches=2, logger=False, callbacks=callbacks,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder)
        trainer.fit(module, datamodule=Data(), ckpt_path=path, weights_only=False)
        return module

    callback = ckptfs.lightning.SnapshotCallback(store, 'lightning', EVERY, slots=4)
    fit([callback, Truth()])
    url, path = f'ckptfs://{store}/lightning/{MIDDLE}', f'{folder}/middle.ckpt'
    when_durable(lambda: ckptfs.lightning.checkpoint(url, path))
    own, ours = (torch.load(one, weights_only=False) for one in (f'{folder}/own.ckpt', path))
    if way != 'fsdp2':
        del own['hyper_parameters']['where']  # loading it takes code
    assert set(own) == set(ours), (set(own), set(ours))
    for key in set(own) - {'state_dict', 'optimizer_states'}:
        assert str(own[key]) == str(ours[key]), (key, own[key], ours[key])
    # Nobody receives for this one: training goes on.
    nobody = ckptfs.lightning.SnapshotCallback(store + '-none')
    whole, middle = fit([], f'{folder}/own.ckpt'), fit([nobody], path)
    same_end(whole, middle)
    return whole.losses, middle.losses


def main():
    """One rank."""
    framework, folder, store, number, world, way = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world,
                      MASTER_ADDR='127.0.0.1', MASTER_PORT=os.environ['CALLBACK_PORT'],
                      GROUP_RANK='0', NODE_RANK='0')
    whole, middle = {'transformers': transformers, 'lightning': lightning}[framework](
        folder, store, way)
    if number == '0':
        with open(f'{folder}/losses.json', 'w', encoding='utf-8') as file:
            json.dump([whole, middle], file)
    barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads take their time


if __name__ == '__main__':
    main()
