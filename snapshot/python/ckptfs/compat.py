# SPDX-License-Identifier: Apache-2.0
"""The attributes of torch that are not its public interface, each used here alone.

A release of torch that moves one of them is met here: what is missing is refused by name where it
is needed, never worked around elsewhere.  Works with torch 2.4 and later; nothing here writes.
"""
from typing import Any, Collection, Dict, Iterator, List, Sequence, Set, Tuple

import torch
from torch import nn

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # before 2.5, or without torch.distributed
    try:
        from torch.distributed._tensor import DTensor
    except ImportError:
        class DTensor:  # type: ignore[no-redef]
            """Nothing is one."""

# The code that wraps the step of every torch optimizer, and calls the hooks.
HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__


# ---- modules ---------------------------------------------------------------


def children(module: nn.Module) -> Dict[str, Any]:
    """A module's own modules, also those that are None or stand there twice."""
    return module._modules


def parameters(module: nn.Module) -> Dict[str, Any]:
    """A module's own parameters; some are None."""
    return module._parameters


def buffers(module: nn.Module) -> Dict[str, Any]:
    """A module's own buffers that a state dict has; some are None."""
    passing: Set[str] = module._non_persistent_buffers_set
    return {name: one for name, one in module._buffers.items() if name not in passing}


def wraps(module: nn.Module) -> bool:
    """True for a module that torch.compile, activation checkpointing or Lightning's Fabric put around
    another: a module of somebody's own may have a child of the same name."""
    packages = ('torch._dynamo.', 'torch.distributed.', 'lightning', 'pytorch_lightning')
    return any(one.__module__.startswith(packages) for one in type(module).__mro__)


def _is_of(package: Collection[str], function: Any) -> bool:
    """True if one of the packages has defined it."""
    function = getattr(function, 'func', function)  # of a partial
    return (getattr(function, '__module__', None) or '').partition('.')[0] in package


def adds_to_state_dict(module: nn.Module, known: Collection[str]) -> bool:
    """True if its class, itself, or a hook of another package than the known ones, may put more
    into its state dict than torch does by itself."""
    own = type(module)
    if own._save_to_state_dict is not nn.Module._save_to_state_dict or own.state_dict is not nn.Module.state_dict:
        return True
    of_itself = [vars(module)[name] for name in ('state_dict', '_save_to_state_dict') if name in vars(module)]
    return not all(_is_of(known, one) for one in (*of_itself, *module._state_dict_hooks.values()))


def call_state_dict_pre_hooks(module: nn.Module, prefix: str, known: Collection[str]) -> None:
    """Calls those of other packages than the known ones, as its state_dict() does first."""
    for hook in module._state_dict_pre_hooks.values():
        if not _is_of(known, hook):
            hook(module, prefix, True)


def adds_to_optimizer_state(optimizer: Any) -> bool:
    """True if its state_dict() may have more than torch's, or makes states ready first."""
    base = torch.optim.Optimizer
    return isinstance(optimizer, base) and (
        type(optimizer).state_dict is not base.state_dict or 'state_dict' in vars(optimizer)
        or bool(getattr(optimizer, '_optimizer_state_dict_pre_hooks', None))
        or bool(getattr(optimizer, '_optimizer_state_dict_post_hooks', None)))


def backward_hooks(parameter: torch.Tensor) -> Iterator[Any]:
    """The functions that the backward pass calls for a parameter."""
    for kind in ('_post_accumulate_grad_hooks', '_backward_hooks'):
        yield from (getattr(parameter, kind, None) or {}).values()


def fsdp_params(module: nn.Module) -> Iterator[Any]:
    """FSDP2's own record of each parameter that it shards in a module: `sharded_param`, and
    `places` (module, name) that have it."""
    get = getattr(module, '_get_fsdp_state', None)
    if get is None:
        return
    held = get()
    groups = getattr(held, '_fsdp_param_groups', None)  # 2.13 has several
    for group in [held._fsdp_param_group] if groups is None else groups:
        yield from group.fsdp_params if group is not None else ()


def fsdp_places(param: Any) -> List[Tuple[nn.Module, str]]:
    """The module and name of a record of FSDP2's, and of those that share the parameter."""
    info = param._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names)]


# ---- tensors ---------------------------------------------------------------


def local_of(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, as it is kept: nothing is moved.  Another tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_shape_and_offset(tensor: Any) -> Tuple[Sequence[int], Sequence[int]]:
    """Shape of this rank's part of a DTensor, and its first index in the whole, as torch has it."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    return compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements)


def storage_names() -> Dict[torch.dtype, str]:
    """The name of each type's storage class, as a file of torch.save has it."""
    return torch.storage._dtype_to_storage_type_map()


def has_more_state(tensor: torch.Tensor) -> bool:
    """True if torch.save would write attributes of the tensor, too."""
    return bool(torch._utils._get_obj_state(tensor))


def rebuild_tensor() -> Any:
    """The function by which a file of torch.save makes a tensor."""
    return torch._utils._rebuild_tensor_v2


# ---- torch.distributed -----------------------------------------------------


def default_store() -> Any:
    """The store of the job's default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


def fsspec_classes() -> Tuple[type, ...]:
    """DCP's writer and reader of fsspec's paths; () where torch has none."""
    try:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
    except ImportError:
        return ()
    return FsspecWriter, FsspecReader


def flatten_state_dict(nested: Any) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """A state dict as DCP flattens it: values by key, and the path of each key."""
    from torch.distributed.checkpoint import _nested_dict
    return _nested_dict.flatten_state_dict(nested)


def unflatten_state_dict(flat: Dict[str, Any], paths: Dict[str, Any]) -> Any:
    """The inverse of flatten_state_dict."""
    from torch.distributed.checkpoint import _nested_dict
    return _nested_dict.unflatten_state_dict(flat, paths)
