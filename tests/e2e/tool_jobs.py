# SPDX-License-Identifier: Apache-2.0
"""Trainings that transformers' Trainer, accelerate and Lightning drive, alone, with DeepSpeed
and with FSDP: a whole one, which saves in the middle, and one that goes on from a path.

Usage: tool_jobs.py TOOL WAY FOLDER RANK WORLD [PATH]

TOOL is trainer, accelerate or lightning; WAY is plain, zero1, zero2, zero3, fsdp1, fsdp2, fsdp1full or fsdp2full
(which save whole tensors, transformers' and Lightning's default).  The losses of every update go to FOLDER/losses.json, or FOLDER/resumed.json with a PATH to go on from; what
the optimizer has in the middle goes to FOLDER/truth.pt, by rank 0.  With TOOL_NATIVE set it goes on
from what the tool itself wrote; with TOOL_LOAD set to a file, what was loaded goes there, and it ends.
TOOL_BATCH is Trainer's batch of a rank, TOOL_DROPOUT the probability, of which each rank has draws of its own.
"""
import json
import os
import sys

UPDATES, MIDDLE = 6, 4
VOCABULARY, ROWS = 250, 2


def samples():
    """As many rows for each update, whatever the number of ranks."""
    import torch
    tokens = torch.randint(VOCABULARY, (ROWS * UPDATES, 8),
                           generator=torch.Generator().manual_seed(3))
    return [{'input_ids': row, 'labels': row} for row in tokens]


def engine_config(way, resumed):
    """DeepSpeed's: `load_universal` is the line that a view asks for."""
    zero = {'stage': int(way[-1])}
    if way == 'zero3':
        zero.update(stage3_gather_16bit_weights_on_model_save=True, sub_group_size=10**9,
                    stage3_param_persistence_threshold=0)
    config = {'zero_optimization': zero, 'zero_allow_untested_optimizer': True,
              'train_micro_batch_size_per_gpu': 'auto', 'gradient_accumulation_steps': 1,
              'gradient_clipping': 0., 'steps_per_print': 10**6}  # or accelerate clips at 1
    if resumed and 'TOOL_NATIVE' not in os.environ:
        config['checkpoint'] = {'load_universal': True}
    return config


def model(dropout=0.):
    """A small Llama, the same every time."""
    import transformers as hf
    hf.set_seed(1)
    return hf.LlamaForCausalLM(hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=104, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64,
        attention_dropout=dropout, attn_implementation='eager'))


def quiet_engines():
    """The shared-memory collective would be compiled at start; gloo is enough."""
    import deepspeed
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False


def shard_on_the_cpu():
    """accelerate shards on accelerators alone (AcceleratorState.__init__ asks for MULTI_GPU and its
    kin): this is one, to it."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    assert PartialState(cpu=True).distributed_type == DistributedType.MULTI_CPU
    PartialState._shared_state['distributed_type'] = DistributedType.MULTI_GPU


def engines_on_the_cpu():
    """accelerate knows a backend of accelerators' alone beside DeepSpeed, and else takes each rank for the only one."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    assert PartialState(cpu=True).distributed_type == DistributedType.MULTI_CPU
    PartialState._shared_state['distributed_type'] = DistributedType.DEEPSPEED


def keep_gathered(file, net, optimizer):
    """{name: tensors}, gathered by torch; without an optimizer the weights alone."""
    import torch
    from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict,
                                                         get_optimizer_state_dict)
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(net, options=options)
    states = get_optimizer_state_dict(net, optimizer, options=options) if optimizer else {'state': {}}
    if torch.distributed.get_rank() == 0:
        torch.save({name: {'weight': weight, **states['state'].get(name, {})}
                    for name, weight in weights.items()}, file)


def keep_truth(file, net, optimizer):
    """{name: tensors} of a torch optimizer that has every parameter by itself."""
    import torch
    states = {}
    for name, parameter in net.named_parameters():
        state = optimizer.state.get(parameter, {})
        states[name] = {'weight': parameter.detach().clone(),
                        **{k: v.clone() for k, v in state.items()}}
    torch.save(states, file)


def keep_engines(file, way, net, optimizer):
    """{name: tensors} of an engine without ZeRO, whose optimizer is torch's, or at ZeRO 3, gathered by DeepSpeed."""
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    while hasattr(optimizer, 'optimizer'):
        optimizer = optimizer.optimizer
    if way == 'zero0' and torch.distributed.get_rank() == 0:
        keep_truth(file, net, optimizer)
    if way != 'zero3':
        return
    step, = {float(state['step']) for state in optimizer.state.values()}
    states = {name: {'weight': safe_get_full_fp32_param(p).clone(), 'step': torch.tensor(step),
                     **{kind: safe_get_full_optimizer_state(p, kind).clone() for kind in ('exp_avg', 'exp_avg_sq')}}
              for name, p in net.named_parameters()}
    if torch.distributed.get_rank() == 0:
        torch.save(states, file)


def end_when_loaded(tool, way, net, optimizer):
    """Keeps what was loaded, if nothing else is asked for.  accelerate 1.15, which Trainer loads
    with, too, loads no states into FSDP1's optimizers: it asks DCP for those that a fresh one has,
    which are none (load_fsdp_optimizer)."""
    if 'TOOL_LOAD' in os.environ:
        if way == 'plain':
            keep_truth(os.environ['TOOL_LOAD'], net, optimizer)
            sys.exit()
        none = way == 'fsdp1' and tool != 'lightning'
        keep_gathered(os.environ['TOOL_LOAD'], net, None if none else optimizer)
        sys.exit()


def trainer(folder, way, world, path):
    """transformers' Trainer; saves output/checkpoint-MIDDLE.  On a CPU all ranks of an engine have
    the same rows."""
    import transformers as hf
    more = {'use_cpu': True}
    if way.startswith('zero'):
        quiet_engines()
        more = {'deepspeed': engine_config(way, path)}
    if way.startswith('fsdp'):
        more.update(fsdp=True, fsdp_config={
            'version': int(way[4]), 'transformer_layer_cls_to_wrap': ['LlamaDecoderLayer'],
            'sync_module_states': False,
            'state_dict_type': 'FULL_STATE_DICT' if way.endswith('full') else 'SHARDED_STATE_DICT'})
    args = hf.TrainingArguments(
        f'{folder}/{"output" if path is None else "again"}', max_steps=UPDATES,
        per_device_train_batch_size=int(os.environ.get('TOOL_BATCH', 1)), save_strategy='steps',
        save_steps=MIDDLE if path is None else 10**6, logging_steps=1, report_to=[],
        disable_tqdm=True, learning_rate=1e-2, lr_scheduler_type='cosine', max_grad_norm=0,
        weight_decay=0.1, **more)

    class Truth(hf.TrainerCallback):
        """Keeps the truth of what has just been saved."""

        def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
            end_when_loaded('trainer', way, model, getattr(optimizer, 'optimizer', optimizer))

        def on_save(self, args, state, control, model=None, optimizer=None, **_):
            if state.global_step != MIDDLE:
                return
            optimizer = getattr(optimizer, 'optimizer', optimizer)
            if way == 'plain':
                keep_truth(f'{folder}/truth.pt', model, optimizer)
            if way.startswith('fsdp'):
                keep_gathered(f'{folder}/truth.pt', model, optimizer)
            keep_engines(f'{folder}/truth.pt', way, model, optimizer)

    if way.startswith('fsdp'):
        assert args.device.type == 'cpu'  # makes the state
        shard_on_the_cpu()
    made = hf.Trainer(model(float(os.environ.get('TOOL_DROPOUT', 0.25))), args, train_dataset=samples(), callbacks=[Truth()])
    made.train(resume_from_checkpoint=path)
    rows = [row['loss'] for row in made.state.log_history if 'loss' in row]
    return rows[MIDDLE:] if path else rows


def accelerate(folder, way, world, path):
    """accelerate; saves project/checkpoints/checkpoint_0."""
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
    from accelerate.utils import ProjectConfiguration, set_seed
    more = {'cpu': True}
    if way.startswith('fsdp'):
        shard_on_the_cpu()
        more['fsdp_plugin'] = FullyShardedDataParallelPlugin(
            fsdp_version=int(way[4]), sync_module_states=False,
            state_dict_type='FULL_STATE_DICT' if way.endswith('full') else 'SHARDED_STATE_DICT',
            auto_wrap_policy='transformer_based_wrap', cpu_ram_efficient_loading=False,
            transformer_cls_names_to_wrap=['LlamaDecoderLayer'])
    if way.startswith('zero'):
        quiet_engines()
        config = engine_config(way, path)
        config['train_micro_batch_size_per_gpu'] = ROWS // world
        more = {'deepspeed_plugin': DeepSpeedPlugin(hf_ds_config=config)}
        if world > 1:
            engines_on_the_cpu()
    project = ProjectConfiguration(f'{folder}/project', automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=project, **more)
    set_seed(5)
    net = model()
    if way == 'fsdp1':  # the optimizer must have its flat parameters
        net = accelerator.prepare(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = torch.utils.data.DataLoader(samples(), batch_size=max(1, ROWS // world))
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    losses, first = [], 0
    if path:
        accelerator.load_state(path)
        end_when_loaded('accelerate', way, net, optimizer.optimizer)
        loader, first = accelerator.skip_first_batches(loader, MIDDLE), MIDDLE
    net.train()
    for update, batch in enumerate(loader, first):
        loss = net(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        if update + 1 == MIDDLE and path is None:
            if way == 'plain':
                keep_truth(f'{folder}/truth.pt', accelerator.unwrap_model(net), optimizer.optimizer)
            if way.startswith('fsdp'):
                keep_gathered(f'{folder}/truth.pt', net, optimizer.optimizer)
            accelerator.save_state()
    return losses


def on_the_cpu():
    """Lightning's DeepSpeedStrategy but for its checks that there is a GPU."""
    import torch
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

    class OnTheCpu(DeepSpeedStrategy):
        """DeepSpeedStrategy on the CPU; its own code saves and loads."""

        def setup_environment(self):
            DDPStrategy.setup_environment(self)

        def setup_distributed(self):
            self.set_world_ranks()
            self._init_deepspeed_distributed()

        @property
        def root_device(self):
            return torch.device('cpu', 0)
    return OnTheCpu


def sharding_strategy(way):
    """Lightning's FSDPStrategy of FSDP1, and ModelParallelStrategy of FSDP2.  The first asks for a
    GPU by its type alone, and FSDP1 unless a device is named.  FSDP1 takes what it is to move to
    the CPU for a copy, and overwrites or frees it (optimizer states of torch 2.13 had the next
    one's elements): here nothing is moved."""
    import torch
    from lightning.pytorch import strategies
    from torch.distributed import fsdp
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class OnTheCpu(strategies.FSDPStrategy):
        """FSDPStrategy on the CPU; its own code saves and loads."""

    def whole(module, world_size, rank0_only=True):
        del world_size
        return fsdp.FullyShardedDataParallel.state_dict_type(
            module, fsdp.StateDictType.FULL_STATE_DICT, fsdp.FullStateDictConfig(rank0_only=rank0_only),
            fsdp.FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only))
    full = way.endswith('full')
    if way.startswith('fsdp1'):
        made = fsdp.fully_sharded_data_parallel
        with_device = made._init_device_handle
        made._init_device_handle = lambda *given: with_device(*given[:3], torch.device('cpu'))
        strategies.fsdp._get_full_state_dict_context = whole
        return OnTheCpu(state_dict_type='full' if full else 'sharded', process_group_backend='gloo',
                        auto_wrap_policy={LlamaDecoderLayer})
    return strategies.ModelParallelStrategy(
        data_parallel_size=int(os.environ['WORLD_SIZE']), tensor_parallel_size=1,
        save_distributed_checkpoint=not full, process_group_backend='gloo')


def lightning(folder, way, world, path):
    """Lightning; saves logs/checkpoints/epoch=0-step=MIDDLE.ckpt."""
    import lightning.pytorch as pl
    import torch
    from torch.distributed.fsdp import fully_shard

    class Module(pl.LightningModule):
        """The net, and its losses."""

        def __init__(self):
            super().__init__()
            self.net, self.losses = model(), []

        def configure_model(self):
            if way.startswith('fsdp2'):
                mesh = self.device_mesh['data_parallel']
                for layer in self.net.model.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch, _):
            loss = self.net(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Middle(pl.Callback):
        """Saves once."""

        def on_train_start(self, trainer, pl_module):
            end_when_loaded('lightning', way, trainer.strategy.model, trainer.optimizers[0])

        def on_train_batch_end(self, trainer, pl_module, *_):
            if trainer.global_step != MIDDLE or path:
                return
            if way == 'plain':
                keep_truth(f'{folder}/truth.pt', pl_module, trainer.optimizers[0])
            if way.startswith('fsdp'):
                keep_gathered(f'{folder}/truth.pt', trainer.strategy.model, trainer.optimizers[0])
            keep_engines(f'{folder}/truth.pt', way, pl_module, trainer.optimizers[0])
            trainer.save_checkpoint(f'{folder}/logs/checkpoints/epoch=0-step={MIDDLE}.ckpt')

    strategy = 'auto'
    if way.startswith('fsdp'):
        strategy = sharding_strategy(way)
    if way.startswith('zero'):
        quiet_engines()
        config = engine_config(way, path)
        config['train_micro_batch_size_per_gpu'] = ROWS // world
        del config['gradient_accumulation_steps'], config['gradient_clipping']  # Lightning's own
        strategy = on_the_cpu()(config=config, process_group_backend='gloo')
    pl.seed_everything(1)
    module = Module()
    fit = pl.Trainer(
        accelerator='cpu', devices=world, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Middle()], default_root_dir=folder)
    rows = samples() if path is None else samples()[ROWS * MIDDLE:] + samples()[:ROWS * MIDDLE]
    sampler = None if world == 1 else torch.utils.data.DistributedSampler(
        rows, world, int(os.environ['RANK']), shuffle=False)
    fit.fit(module, torch.utils.data.DataLoader(rows, batch_size=max(1, ROWS // world), sampler=sampler),
            ckpt_path=path, weights_only=False)
    return module.losses


def main():
    tool, way, folder, rank, world, *path = sys.argv[1:]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world,
                      MASTER_ADDR='127.0.0.1', MASTER_PORT=os.environ.get('TOOL_PORT', '29613'),
                      HF_HUB_OFFLINE='1', ACCELERATE_TORCH_DEVICE='cpu')
    if world == '1' and way == 'plain':
        for name in 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE':
            del os.environ[name]
    import torch
    torch.set_num_threads(1)
    losses = globals()[tool](folder, way, int(world), path[0] if path else None)
    if rank == '0':
        with open(f'{folder}/{"resumed" if path else "losses"}.json', 'w', encoding='utf-8') as f:
            json.dump(losses, f)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # All is written.  torch ends now and then by "terminate called without an active exception", in a
    # thread of its own that FSDP1 has left.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == '__main__':
    main()
