# SPDX-License-Identifier: Apache-2.0
"""from_pretrained of a view against the same files in a plain directory, and Trainer's resume from a view
against its resume from its own directory, alone and with DeepSpeed; DeepSpeed's also against a plain copy
of the view, since its loader of a universal checkpoint is another than that of its own.

The checkpoints are Trainer's own, of a Llama of 137 M parameters in fp32: 0.55 GB of weights and twice that of
Adam's states.  A load ends when every page of every parameter was read, a resume when
Trainer says that training begins.  Each is in a process of its own, as a restart is.
"""
import functools
import os
import shutil
import statistics
import struct
import sys
import time

import launch
import torch
from context import ratio_row, warm

SIZES = dict(vocab_size=16000, hidden_size=896, intermediate_size=3072, num_hidden_layers=10,
             num_attention_heads=14, num_key_value_heads=14, max_position_embeddings=64)
# way -> what is added to TrainingArguments
WAYS = {'plain': {'use_cpu': True}, 'zero1': {'deepspeed': {
    'zero_optimization': {'stage': 1}, 'zero_allow_untested_optimizer': True,
    'train_micro_batch_size_per_gpu': 'auto', 'gradient_accumulation_steps': 1,
    'steps_per_print': 10**6}}}
STEP = 1


class Begins(Exception):
    """Training would begin."""


def trainer(folder, way, resumed):
    """transformers' Trainer of the model, one step of which is saved."""
    import transformers as hf
    more = dict(WAYS[way])
    if 'deepspeed' in more:
        import deepspeed
        deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
        more['deepspeed'] = {**more['deepspeed'],
                             **({'checkpoint': {'load_universal': True}} if resumed == 'view' else {})}
    row = torch.arange(8)
    args = hf.TrainingArguments(folder, max_steps=STEP + (resumed is not None), save_steps=STEP,
                                per_device_train_batch_size=1, report_to=[], disable_tqdm=True,
                                logging_strategy='no', **more)

    class Clock(hf.TrainerCallback):
        """Ends a resumed one before its first step."""

        def on_train_begin(self, *_, **__):
            if resumed is not None:
                raise Begins

    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    return hf.Trainer(model, args, train_dataset=[{'input_ids': row, 'labels': row}] * 4,
                      callbacks=[Clock()])


def save(folder, way):
    """One rank of the job that makes the checkpoint."""
    torch.set_num_threads(os.cpu_count())
    trainer(folder, way, None).train()


def resume(folder, way, path, which, out):
    """One rank: seconds until training begins."""
    made = trainer(folder, way, which)
    start = time.perf_counter()
    try:
        made.train(resume_from_checkpoint=path)
    except Begins:
        took = time.perf_counter() - start
        with open(out, 'wb') as f:
            f.write(struct.pack('d', took))


def load(path, out):
    """Seconds of from_pretrained, every page read."""
    import transformers as hf
    start = time.perf_counter()
    model = hf.AutoModelForCausalLM.from_pretrained(path)
    for parameter in model.parameters():
        parameter.detach().flatten()[::1024].sum()
    took = time.perf_counter() - start
    with open(out, 'wb') as f:
        f.write(struct.pack('d', took))


def in_rank(context, job, *args):
    """Seconds that a job in a process of its own says."""
    out, log = context.path('tools.seconds'), context.path('tools.log')
    if not launch.launch(job, 1, (*args, out), log):
        raise RuntimeError(str(launch.errors_of(log, 1)))
    with open(out, 'rb') as f:
        return struct.unpack('d', f.read(8))[0]


def checkpoint(context, way):
    """The directory of a Trainer's step, made once and warm."""
    folder = context.path(f'trainer_{way}')
    step = os.path.join(folder, f'checkpoint-{STEP}')
    if not os.path.exists(os.path.join(step, 'trainer_state.json')):
        shutil.rmtree(folder, ignore_errors=True)
        print(f'   making {step}', file=sys.stderr, flush=True)
        log = context.path('tools.log')
        if not launch.launch(save, 1, (folder, way), log):
            raise RuntimeError(str(launch.errors_of(log, 1)))
    warm(step)
    return step


def turns(repeat, *sides):
    """(medians of all sides, the first's of the first turn), run in turns that begin with each;
    before them the second once, which warms the libraries that all sides use."""
    sides[1]()
    times = [[] for _ in sides]
    for turn in range(repeat):
        for number in range(len(sides)):
            side = (number + turn) % len(sides)
            times[side].append(sides[side]())
    return *map(statistics.median, times), times[0][0]


def pretrained(context, step):
    """Rows of from_pretrained."""
    plain = context.path('plain_huggingface')
    with context.mounted(step) as (mount, _):
        view = os.path.join(mount, 'view', 'tp1', 'huggingface')
        shutil.copytree(view, plain)
    warm(plain)
    theirs = lambda: in_rank(context, load, plain)
    with context.mounted(step) as (mount, _):
        view = os.path.join(mount, 'view', 'tp1', 'huggingface')
        ours, other, first = turns(5 * context.repeat, lambda: in_rank(context, load, view), theirs)
    shutil.rmtree(plain)
    return [ratio_row('tools', 'from_pretrained of 0.55 GB, against the same files', ours, other, 1.1),
            ratio_row('tools', 'from_pretrained, first open after the mount', first, other)]


def resumes(context, step, way, layout):
    """Rows of Trainer's resume."""
    again, plain = context.path('again'), context.path('plain_trainer')
    with context.mounted(step) as (mount, _):
        view = os.path.join(mount, 'view', layout, 'trainer')
        sides = [(view, 'view'), (step, 'own')]
        if way != 'plain':
            shutil.copytree(view, plain)
            warm(plain)
            source = os.path.join(os.path.dirname(os.path.realpath(os.path.join(mount, 'view'))), 'source',
                                  os.path.basename(step))
            sides += [(plain, 'view'), (source, 'own')]
        ours, *others, first = turns(context.repeat, *(
            functools.partial(in_rank, context, resume, again, way, *side) for side in sides))
    for folder in again, plain:
        shutil.rmtree(folder, ignore_errors=True)
    what = f"Trainer's resume, {way}"
    rows = [ratio_row('tools', f'{what}, against its own directory', ours, others[0], 1.3),
            ratio_row('tools', f'{what}: first after the mount', first, others[0])]
    if way == 'plain':
        return rows
    _, copied, source = others
    return rows + [ratio_row('tools', f'{what}, against the same files in a plain directory', ours, copied, 1.3),
                   ratio_row('tools', f'{what}, from source/, against its own directory', source, others[0], 1.3)]


def run(context):
    """Rows."""
    plain = checkpoint(context, 'plain')
    rows = pretrained(context, plain) + resumes(context, plain, 'plain', 'tp1')
    return rows + resumes(context, checkpoint(context, 'zero1'), 'zero1', 'zero1')
