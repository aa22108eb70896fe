# SPDX-License-Identifier: Apache-2.0
"""Sources of the matrix that plain torch modules wrote: what they are loaded into, and compared with.

A Job makes the module and its optimizer anew, and has the truth, {kind: {name: tensor}}: what the
live job held, gathered by torch.  It is loaded by an engine of DeepSpeed's, by
torch.distributed.checkpoint on every mesh, by from_pretrained, and read as the files of ranks.
"""
import os
import pickle
import tempfile
from dataclasses import dataclass

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import dcp_loads
import launch
from cells import MESHES, probe, said_of

NOISE = 0.01
# In fp32 at ZeRO 1 and 2 the sums are those of one process: another rate would show.
QUIET = 1e-5
STEPS = 2
STATES = ('exp_avg', 'exp_avg_sq', 'momentum_buffer')
DP = 2  # of the engines


@dataclass
class Job:
    """The job whose checkpoint it is."""
    model: callable      # () -> a fresh module
    optimizer: callable  # (model)
    loss: callable       # (model, number, rank, ranks) -> a tensor
    plan: callable       # (model, mesh): its tensor parallelism
    truth: dict
    after: int = 2       # steps that were taken before the save
    clip: float = 0.     # of the norm of gradients, as the checkpoint tells an engine below ZeRO 3
    exact: bool = True   # `optimizer` adds up as the job's did, which may have been a fused one

    @property
    def half(self):
        """True if it trained in bf16."""
        return any(t.dtype == torch.bfloat16 for t in self.truth['weight'].values())

    def states(self):
        """Kinds of states that have a parameter's shape."""
        return [kind for kind in STATES if kind in self.truth]

    def step(self, model, optimizer, number, rank, ranks, clip=0.):
        """One update; this rank's loss."""
        return dcp_loads.update(self.loss(model, number, rank, ranks), model, optimizer, clip)

    def whole(self):
        """The truth as a state dict, if the optimizer's states were saved."""
        kinds = self.states()
        if not kinds:
            return None
        kinds += ['step'] if 'step' in self.truth else []
        state = {name: {k: self.truth[k][name] for k in kinds} for name in self.truth[kinds[0]]}
        return {'model': dict(self.truth['weight']), 'optim': {'state': state}}

    def filled(self):
        """(model, optimizer) of one process that torch filled with the truth."""
        model = self.model()
        model.load_state_dict(self.truth['weight'], strict=False)
        optimizer = self.optimizer(model)
        for name, parameter in model.named_parameters():
            held = {k: v[name].clone() for k, v in self.truth.items()
                    if k != 'weight' and name in v}
            if held:
                optimizer.state[parameter] = held
        return model, optimizer


def bits_differ(got, want):
    """Names of tensors that are not equal in dtype, shape and every bit."""
    raw = lambda t: t.contiguous().view(-1).view(torch.uint8)
    return sorted(k for k in got.keys() | want.keys()
                  if k not in got or k not in want or got[k].dtype != want[k].dtype
                  or got[k].shape != want[k].shape or not torch.equal(raw(got[k]), raw(want[k])))


# ---- engines ----------------------------------------------------------------------------


def engine_worker(job, directory, stage, out):
    """One rank: an engine loads the view, of weights alone the module, and takes the next steps."""
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    deepspeed.init_distributed('gloo', verbose=False)
    torch.manual_seed(99)
    model = job.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    zero = {'stage': stage, **({'sub_group_size': 10**9, 'stage3_param_persistence_threshold': 0} if stage == 3 else {})}
    config = {'train_micro_batch_size_per_gpu': 1, 'gradient_accumulation_steps': 1,
              'steps_per_print': 10**6, 'zero_allow_untested_optimizer': True, 'gradient_clipping': 0.,
              'zero_optimization': zero, 'checkpoint': {'load_universal': bool(job.states())}}
    if job.half:
        config['bf16'] = {'enabled': True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=job.optimizer(model), config=config)
    path, _ = engine.load_checkpoint(directory, load_module_only=not job.states())
    assert path is not None
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[f'weight/{name}'] = safe_get_full_fp32_param(parameter).clone()
        for kind in job.states():
            value = safe_get_full_optimizer_state(parameter, kind)
            found[f'{kind}/{name}'] = value.clone().view(found[f'weight/{name}'].shape)
    rank, losses = torch.distributed.get_rank(), []
    for number in range(job.after, job.after + STEPS):
        loss = job.loss(engine, number, rank, DP)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / DP)
    if rank == 0:
        torch.save((found, losses), out)


def load_engine(step, job, stage):
    """The record of an engine at DP 2."""
    layout = f'dp{DP}_zero{stage}'
    why = said_of(step, layout, 'deepspeed')
    if why:
        return {'layout': layout, 'ok': True, 'state': 'refused', 'why': why}
    if 'exp_avg' not in job.truth and stage == 3:
        return {'layout': layout, 'ok': True, 'state': 'n/a', 'why':
                "DeepSpeed's universal loader at ZeRO 3 asks for Adam's moments by name"}
    with tempfile.TemporaryDirectory() as folder:
        out, log = os.path.join(folder, 'found.pt'), os.path.join(folder, 'log')
        if not launch.launch(engine_worker, DP, (
                job, os.path.join(step, 'view', layout, 'deepspeed'), stage, out), log):
            return {'layout': layout, 'ok': False, 'errors': launch.errors_of(log, DP)}
        found, losses = torch.load(out)
    names = {n for n, _ in job.model().named_parameters()}
    want = {f'{kind}/{name}': job.truth[kind][name].float()
            for kind in ('weight', *job.states()) for name in job.truth[kind] if name in names}
    model, optimizer = job.filled()
    clip = job.clip if stage < 3 else 0.
    expected = [job.step(model, optimizer, n, 0, 1, clip)
                for n in range(job.after, job.after + STEPS)]
    diff = max(abs(a - b) for a, b in zip(losses, expected))
    most = NOISE if job.half or stage == 3 else QUIET
    return {'layout': layout, 'different': bits_differ(found, want)[:5], 'loss_diff': diff,
            'module_only': not job.states(), 'ok': not bits_differ(found, want) and diff < most}


# ---- torch.distributed.checkpoint ---------------------------------------------------------


def keys_of(view):
    """How a DCP directory spells the keys: what of a Load says so."""
    with open(os.path.join(view, '.metadata'), 'rb') as f:
        keys = list(pickle.load(f).state_dict_metadata)
    states = sorted(k for k in keys if '.param_groups.' in f'.{k}')
    optim = states[0].split('.param_groups.')[0] if states else 'optim'
    flat = bool(states) and not states[0].split('param_groups.')[1].split('.')[0].isdigit()
    wrapped = [key for key in ('model', 'state_dict')  # the second is of Lightning's ModelParallelStrategy
               if any(k.startswith((f'{key}.model.', f'{key}.net.')) for k in keys)]
    return {'top': (*wrapped, '')[:1] + (optim,), 'flat': flat, 'model_only': not states}


def load_mesh(step, job, mesh):
    """The record of a load by torch on a mesh."""
    layout = MESHES[mesh]
    why = said_of(step, layout, 'dcp')
    if why:
        return {'layout': layout, 'ok': True, 'state': 'refused', 'why': why}
    view = os.path.join(step, 'view', layout, 'dcp')
    spelled = keys_of(view)
    trains = not spelled['model_only'] and job.whole() is not None
    load = dcp_loads.Load(mesh, job.model, job.optimizer, job.step, plan=job.plan,
                          native=job.whole() if trains else None, first_step=job.after,
                          steps=STEPS if trains else 0, **spelled)
    try:
        found = dcp_loads.run(view, load)
    except AssertionError as e:
        return {'layout': layout, 'ok': False, 'errors': [str(e)[-400:]]}
    wrong = bits_differ(*compared(found, job, spelled['model_only']))
    pairs = zip(found['losses'], found['native'] or ())
    diff = max((abs(a - b) for a, b in pairs), default=0.)
    return {'layout': layout, 'ok': not wrong and diff <= (0 if job.exact else QUIET),
            'different': wrong[:5], 'loss_diff': diff, 'exact_losses': trains and diff == 0,
            'module_only': spelled['model_only']}


def compared(found, job, model_only):
    """(what was found, what the live job had), under the same keys."""
    tensors = found['tensors']
    if model_only:
        return tensors, job.truth['weight']
    got = {'weight/' + k.split('/', 1)[1] if k.split('/')[0] in ('model', 'buffer') else k: v
           for k, v in tensors.items()}
    return got, {f'{kind}/{name}': value for kind, held in job.truth.items()
                 for name, value in held.items()}


# ---- from_pretrained ------------------------------------------------------------------------


def logits_of(model):
    """Returns what it says to a fixed batch."""
    with torch.no_grad():
        return model.eval()(torch.arange(32).view(2, 16)).logits


def pretrained(step, job, attribute=''):
    """The record of from_pretrained: every entry of the state_dict, and the logits of a model that torch filled.
    `attribute`: where the job's module has the model, with a dot."""
    weights = {name.removeprefix(attribute): tensor for name, tensor in job.truth['weight'].items()}
    folder = os.path.join(step, 'view', 'tp1', 'huggingface')
    if not os.path.isdir(folder):
        return probe(step, 'tp1', 'huggingface')
    model, said = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    wrong = sorted(map(str, (v for v in said.values() if v)))
    wrong += bits_differ(model.state_dict(), weights)
    if not wrong:
        twin = type(model)(model.config)
        twin.load_state_dict(weights)
        wrong += bits_differ({'logits': logits_of(model)}, {'logits': logits_of(twin)})
    return {'layout': 'tp1', 'ok': not wrong, 'different': wrong[:5]}


# ---- rank<N> --------------------------------------------------------------------------------

LAYOUTS = ('tp1', 'dp3_zero1', 'tp2')


def compare_ranks(step, job, layout, cut):
    """The record of the files of all ranks of one of LAYOUTS; `cut`: what a tensor-parallel
    rank holds of a tensor."""
    folder = os.path.join(step, 'view', layout)
    tp = 2 if layout == 'tp2' else 1
    part = lambda name, tensor, rank: cut(name, tensor, tp, rank) if tp > 1 and tensor.ndim else tensor
    states = {f'{kind}/{name}': t for kind, held in job.truth.items() if kind != 'weight'
              for name, t in held.items()}
    wrong = []
    ranks = 3 if layout == 'dp3_zero1' else tp
    if not os.path.isdir(os.path.join(folder, 'rank0')):
        return {'layout': layout, 'ok': True, 'state': 'refused', 'why': said_of(step, layout, 'rank')}
    parts = []
    for rank in range(ranks):
        # Copies: a file that is mapped keeps the mount.
        held = lambda name: {k: t.clone() for k, t in load_file(
            os.path.join(folder, f'rank{rank}', f'{name}.safetensors')).items()}
        want = {k: part(k, t, rank) for k, t in job.truth['weight'].items()}
        wrong += bits_differ(held('model'), want)
        if states:  # masters are there as well where they are not the weights
            parts.append({k: t for k, t in held('optimizer').items() if k in states})
            if layout != 'dp3_zero1':
                wrong += bits_differ(parts[-1], {k: part(k, t, rank) for k, t in states.items()})
    for key, tensor in states.items() if layout == 'dp3_zero1' else ():
        if tensor.ndim == 0:
            wrong += [key for held in parts if not torch.equal(held[key], tensor)]
            continue
        flat = torch.cat([held[key] for held in parts])
        if not torch.equal(flat[:tensor.numel()], tensor.flatten()) or flat[tensor.numel():].any():
            wrong.append(key)
    return {'layout': layout, 'ok': not wrong, 'different': wrong[:5]}
