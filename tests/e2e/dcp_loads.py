# SPDX-License-Identifier: Apache-2.0
"""Loads of a DCP directory by an unmodified torch.distributed.checkpoint.

A Load says what to load into: a mesh ("fsdp2", "hsdp2x2", "fsdp2_tp2", "ddp2", "tp2"), and how the
optimizer's groups are made.  run() forks the ranks; each starts from values that no checkpoint
has, loads strictly, and rank 0 returns what is there then, gathered by torch, with the losses of
the next steps.
"""
import glob
import os
import re
import tempfile
import traceback
from dataclasses import dataclass, field, replace

import launch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict,
                                                     get_state_dict, set_model_state_dict,
                                                     set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


LARGE = 1 << 20  # bytes from which a view cuts a tensor
# Keys of a state dict, as Load has them.
SHAPES = {'nested': {'flat': False, 'top': ('model', 'optim')},
          'flat': {'flat': True, 'top': ('model', 'optim')},
          'titan': {'flat': True, 'top': ('', 'optimizer')}}


@dataclass
class Load:
    """One load; `model` and `optimizer` make what is loaded into."""
    mesh: str
    model: callable
    optimizer: callable
    step: callable = None     # (model, optimizer, number, rank, ranks) -> loss of this rank
    cuts: dict = field(default_factory=dict)   # of tensor parallelism: {pattern of names: dim}
    plan: callable = None     # (model, mesh): tensor parallelism that can train
    native: dict = None       # full state: losses of a model that torch itself filled with it
    flat: bool = False
    first_step: int = 0
    steps: int = 0
    top: tuple = ('model', 'optim')
    checkpoint_id: callable = str
    model_only: bool = False  # `tensors` is then its state_dict
    partial: bool = False     # keys that the directory lacks stay as they were (DefaultLoadPlanner's allow_partial_load)
    own_rates: bool = False   # the groups' rates stay as they were
    more: dict = field(default_factory=dict)   # further values to load: {key: value}
    save: str = None          # torch saves the loaded state below here, in every SHAPE
    again: tuple = ()         # (path, name of a SHAPE): loaded after it, by the same ranks

    @property
    def degrees(self):
        """{'fsdp': 2, 'tp': 2}; of 'hsdp2x2' the copies are 'copies'."""
        found = {k: int(n) for k, n in re.findall(r'(fsdp|tp|ddp)(\d+)', self.mesh)}
        copies = re.search(r'hsdp(\d+)x(\d+)', self.mesh)
        return {'copies': int(copies[1]), 'fsdp': int(copies[2])} if copies else found

    @property
    def world(self):
        """Ranks."""
        size = 1
        for degree in self.degrees.values():
            size *= degree
        return size


def full(tensor):
    """All of it, bit for bit; collective."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone().contiguous()


def cut_for_tp(model, mesh, cuts):
    """Make DTensors of the parameters that tensor parallelism cuts; tied ones stay one."""
    made = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            path = f'{prefix}.{name}' if prefix else name
            for pattern, dim in cuts.items():
                if re.fullmatch(pattern, path):
                    if parameter not in made:
                        value = distribute_tensor(parameter.detach(), mesh, [Shard(dim)])
                        made[parameter] = torch.nn.Parameter(
                            value, requires_grad=parameter.requires_grad)
                    module.register_parameter(name, made[parameter])


def whole_in_forward(model, mesh, cuts):
    """Tensor parallelism of any model, that can train: what `cuts` names is cut, and each module has its own
    whole while it computes."""
    cut_for_tp(model, mesh, cuts)

    def gather(module, _):
        module.__dict__.update({name: value.full_tensor() for name, value in module.named_parameters(recurse=False)
                                if isinstance(value, DTensor)})

    def forget(module, *_):
        for name, _ in module.named_parameters(recurse=False):
            module.__dict__.pop(name, None)
    for module in model.modules():
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(forget)


def spread(model, load):
    """The model on the load's mesh; (model, rank of the data, ranks of the data)."""
    degrees = load.degrees
    if 'ddp' in degrees:
        ranks = degrees['ddp']
        model = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
        return model, dist.get_rank(), ranks
    mesh = init_device_mesh('cpu', tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    if 'tp' in degrees:
        if load.plan:
            load.plan(model, mesh['tp'])
        else:
            cut_for_tp(model, mesh['tp'], load.cuts)
    if 'fsdp' in degrees:
        over = mesh if 'copies' in degrees else mesh['fsdp']
        for layer in getattr(getattr(model, 'model', model), 'layers', ()):
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
    tp = degrees.get('tp', 1)
    return model, dist.get_rank() // tp, load.world // tp


def gathered(model, optimizer):
    """{kind/name: tensor} of the live model and optimizer, and its groups."""
    core = getattr(model, 'module', model)
    if optimizer is None:
        return {n: full(t) for n, t in core.state_dict().items()}, []
    tensors = {f'buffer/{n}': full(b) for n, b in core.state_dict().items()
               if n not in dict(core.named_parameters(remove_duplicate=False))}
    names = {}
    for name, parameter in core.named_parameters():
        names[parameter] = name
        tensors[f'model/{name}'] = full(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f'{key}/{name}'] = full(torch.as_tensor(value))
    groups = [{**{k: v for k, v in group.items() if k != 'params'},
               'params': [names[p] for p in group['params']]}
              for group in optimizer.param_groups]
    return tensors, groups


def wanted(model, optimizer, load):
    """Returns what the target asks the checkpoint for."""
    options = StateDictOptions(flatten_optimizer_state_dict=load.flat)
    if load.model_only:
        state = get_model_state_dict(model)
        return {load.top[0]: state} if load.top[0] else state
    state, optim = get_state_dict(model, optimizer, options=options)
    model_key, optim_key = load.top
    asked = {model_key: state} if model_key else dict(state)
    return {**asked, optim_key: optim, **load.more}


def update(loss, model, optimizer, clip=0.):
    """One update by torch; this rank's loss."""
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train_on(model, optimizer, load, rank, ranks):
    """Losses of the next steps, averaged over the ranks."""
    losses = []
    for number in range(load.first_step, load.first_step + load.steps):
        loss = torch.tensor(load.step(model, optimizer, number, rank, ranks))
        dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
    return losses


def spoil(model, optimizer, own_rates=False):
    """Values that no checkpoint has, and states, so that a load has to replace them.  Buffers that are not
    part of a state dict are the model's own, and so may be the groups' rates."""
    saved = model.state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
        for name, buffer in model.named_buffers():
            if name in saved:
                buffer.fill_(1)
    for group in optimizer.param_groups if optimizer and not own_rates else ():
        group['lr'] = 0.5


def boxes_of(asked):
    """[(key, offset, size)] that this rank asks for, of tensors that have elements here."""
    flat, _ = flatten_state_dict(asked)
    return [(key, tuple(chunk.offsets), tuple(chunk.sizes)) for key, value in flat.items()
            if isinstance(value, torch.Tensor) for chunk in _create_chunk_list(value)
            if chunk.sizes.numel()]


def bytes_read():
    """By this process, so far."""
    with open('/proc/self/io') as f:
        return int(f.readline().split()[1])


def spread_values(load, values):
    """The load's model with these values, cut by torch."""
    model = load.model()
    names = {name for name, _ in model.named_parameters()}
    model.load_state_dict({k: v for k, v in values.items() if k in model.state_dict()},
                          strict=False)
    assert names <= values.keys()
    return spread(model, load)


def fill_natively(load):
    """The model on the same mesh as if it had never been saved: whole tensors that torch cuts when
    it makes it; what train_on takes."""
    model, rank, ranks = spread_values(load, load.native['model'])
    optimizer = load.optimizer(model)
    held, states = load.native['optim']['state'], {}
    for kind in {kind for of_name in held.values() for kind in of_name} - {'step'}:
        like = {n: held.get(n, {}).get(kind, torch.zeros(p.shape))
                for n, p in load.model().named_parameters()}
        cut = dict(spread_values(load, like)[0].named_parameters())
        states[kind] = {n: t.detach() for n, t in cut.items()}
    for name, parameter in model.named_parameters():
        if name in held:
            optimizer.state[parameter] = {k: states[k][name] if k in states else v.clone()
                                          for k, v in held[name].items()}
    return model, optimizer, load, rank, ranks


def take(model, optimizer, load, asked):
    """Puts what was loaded into the model and the optimizer, strictly."""
    model_key, optim_key = load.top
    state = asked[model_key] if model_key else {
        k: v for k, v in asked.items() if k != optim_key and k not in load.more}
    if load.model_only:
        set_model_state_dict(model, state)
        return
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=asked[optim_key],
                   options=StateDictOptions(flatten_optimizer_state_dict=load.flat))


def loaded_again(model, optimizer, load, path):
    """Returns what is there after another load."""
    spoil(model, optimizer)
    for state in optimizer.state.values():
        for value in state.values():
            value.fill_(7)
    asked = wanted(model, optimizer, load)
    dcp.load(asked, checkpoint_id=path)
    take(model, optimizer, load, asked)
    tensors, groups = gathered(model, optimizer)
    return {'tensors': tensors, 'groups': groups}


def worker(path, load, out):
    """One rank."""
    dist.init_process_group('gloo')
    torch.manual_seed(99)
    model = load.model()
    model, rank, ranks = spread(model, load)
    optimizer = None if load.model_only else load.optimizer(model)
    spoil(model, optimizer, load.own_rates)
    asked = wanted(model, optimizer, load)
    boxes, before = boxes_of(asked), bytes_read()
    dcp.load(asked, checkpoint_id=load.checkpoint_id(path),
             planner=dcp.DefaultLoadPlanner(allow_partial_load=load.partial))
    read = bytes_read() - before
    large = {k: v for k, v in flatten_state_dict(asked)[0].items() if isinstance(v, torch.Tensor)
             and v.numel() * v.element_size() >= LARGE}
    before = bytes_read()
    if large:
        dcp.load(dict(large), checkpoint_id=load.checkpoint_id(path))
    read_large = bytes_read() - before - os.path.getsize(os.path.join(path, '.metadata'))
    take(model, optimizer, load, asked)
    tensors, groups = gathered(model, optimizer)
    for shape, keys in SHAPES.items() if load.save else ():
        dcp.save(wanted(model, optimizer, replace(load, **keys)),
                 checkpoint_id=os.path.join(load.save, shape, 'step-3'))
    again = [loaded_again(model, optimizer, replace(load, **SHAPES[shape]), one)
             for one, shape in load.again]
    losses = train_on(model, optimizer, load, rank, ranks)
    native = train_on(*fill_natively(load)) if load.native else None
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (boxes, read, read_large))
    if dist.get_rank() == 0:
        torch.save({'tensors': tensors, 'groups': groups, 'losses': losses, 'native': native,
                    'boxes': [b for b, _, _ in by_rank], 'read': [r for _, r, _ in by_rank],
                    'read_large': [r for _, _, r in by_rank], 'large': list(large),
                    'again': again, 'more': {k: asked[k] for k in load.more}}, out)
    dist.barrier()
    dist.destroy_process_group()


def placements_of(degrees, ndim):
    """How a mesh without a module cuts a tensor: data along the first dim, tensor parallelism along the second."""
    dims = {'fsdp': 0, 'tp': 1}
    return [Shard(dims[name]) if dims.get(name, ndim) < ndim else Replicate() for name in degrees]


def bare_worker(path, load, out):
    """One rank, of a model that only its own framework can make: every tensor that the directory names, as a
    DTensor of the mesh."""
    dist.init_process_group('gloo')
    degrees = load.degrees
    mesh = init_device_mesh('cpu', tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    named = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    asked = {key: distribute_tensor(torch.ones(of.size, dtype=of.properties.dtype), mesh,
                                    placements_of(degrees, len(of.size)))
             for key, of in named.items() if isinstance(of, TensorStorageMetadata)}
    dcp.load(asked, checkpoint_id=path)
    tensors = {key: full(value) for key, value in asked.items()}
    if dist.get_rank() == 0:
        torch.save({'tensors': tensors}, out)
    dist.barrier()
    dist.destroy_process_group()


def telling(job, errors, *args):
    """The job, whose error is written down: pytest has the ranks' stderr."""
    try:
        job(*args)
    except BaseException:
        with open(f'{errors}.{os.environ["RANK"]}', 'w', encoding='utf-8') as f:
            traceback.print_exc(file=f)
        raise


def run(path, load, job=worker, result=True):
    """Returns what rank 0 found after the load; an AssertionError has the ranks' errors."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = os.path.join(folder, 'out.pt'), os.path.join(folder, 'errors')
        if not launch.launch(telling, load.world, (job, errors, path, load, out),
                             os.path.join(folder, 'log')):
            said = [open(one, encoding='utf-8').read()[-3000:] for one in glob.glob(f'{errors}.*')]
            raise AssertionError('\n'.join(said))
        return torch.load(out, weights_only=False) if result else None
