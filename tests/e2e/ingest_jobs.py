# SPDX-License-Identifier: Apache-2.0
"""Jobs that save by their framework's own call into a directory, for test_ingest.py.

Usage: ingest_jobs.py KIND FOLDER RANK WORLD PORT

KIND is a function here.  Each trains a tiny model for a step and saves into FOLDER.
"""
import os
import sys


def model(width=32):
    """A few tensors, the same on each rank."""
    import torch
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, 3 * width), torch.nn.GELU(), torch.nn.Linear(3 * width, width))


def loss_of(net):
    """Of one batch."""
    import torch
    return net(torch.ones(2, 32)).square().mean()


def engine(folder, stage):
    """DeepSpeed saves two steps."""
    import deepspeed
    import deepspeed.comm
    deepspeed.init_distributed('gloo')
    config = {'train_micro_batch_size_per_gpu': 1, 'zero_optimization': {'stage': stage},
              'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-3, 'torch_adam': True}}}
    net = model()
    made = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
    for _ in range(2):
        made.backward(loss_of(made))
        made.step()
        made.save_checkpoint(folder)


def zero2(folder):
    """ZeRO-2."""
    engine(folder, 2)


def zero3(folder):
    """ZeRO-3."""
    engine(folder, 3)


def dcp(folder):
    """FSDP2 with its optimizer, by torch.distributed.checkpoint."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group('gloo')
    net = model()
    fully_shard(net, mesh=init_device_mesh('cpu', (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    loss_of(net).backward()
    optimizer.step()
    weights, states = get_state_dict(net, optimizer)
    checkpoint.save({'model': weights, 'optimizer': states}, checkpoint_id=f'{folder}/step_1')


def llama():
    """A tiny model of transformers."""
    import transformers
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def pretrained(folder):
    """transformers' save_pretrained."""
    llama().save_pretrained(f'{folder}/final')


def trainer(folder):
    """transformers' Trainer saves two steps."""
    import transformers
    args = transformers.TrainingArguments(folder, max_steps=2, save_steps=1, per_device_train_batch_size=1, report_to=[],
                                          disable_tqdm=True, use_cpu=True)
    rows = [{'input_ids': [1, 2, 3], 'labels': [1, 2, 3]}] * 4
    transformers.Trainer(llama(), args, train_dataset=rows).train()


def megatron(folder):
    """Megatron-Core's dist_checkpointing, of tensors that ranks have a part of each."""
    import torch
    import torch.distributed as dist
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'fixtures', 'megatron'))
    import megatron_ranks  # noqa: F401 (answers what Megatron asks of a GPU)
    from megatron.core import dist_checkpointing
    dist.init_process_group('gloo')
    rank, world = dist.get_rank(), dist.get_world_size()
    part = torch.arange(64, dtype=torch.float32).reshape(8, 8) + 100 * rank
    state = {'weight': dist_checkpointing.ShardedTensor.from_rank_offsets('decoder.weight', part, (0, rank, world)),
             'iteration': 7}
    os.makedirs(f'{folder}/iter_0000007', exist_ok=True)
    dist_checkpointing.save(state, f'{folder}/iter_0000007')
    if rank == 0:
        with open(f'{folder}/latest_checkpointed_iteration.txt', 'w', encoding='ascii') as f:
            f.write('7')


def main():
    """One rank."""
    kind, folder, rank, world, port = sys.argv[1:]
    os.environ.update(DS_ACCELERATOR='cpu', HF_HUB_OFFLINE='1', ACCELERATE_TORCH_DEVICE='cpu')
    if world != '1':
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_ADDR='127.0.0.1',
                          MASTER_PORT=port)
    import torch
    torch.set_num_threads(1)
    globals()[kind](folder)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == '__main__':
    main()
