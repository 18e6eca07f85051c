"""Private attributes of torch's objects: the names of those that graphsplit reads or sets.

Other packages reach them by what stands here, so that a release which moves one is answered in one
place. :mod:`graphsplit.torch_ext.contract` says why each is needed, and a test looks each up. What
reads a name inside torch's own modules stands in :mod:`graphsplit.torch_ext.private`.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.fx import graph_module
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

# A module: its tables, in which parameters, buffers and children are, and its hooks.
PARAMETERS, BUFFERS, MODULES = TABLES = ("_parameters", "_buffers", "_modules")
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
GLOBAL_BACKWARD_HOOKS: tuple[dict[Any, Any], ...] = (
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    *GLOBAL_BACKWARD_HOOKS,
)
CALL = "_call_impl"  # what calling a module runs
NOT_SAVED = "_non_persistent_buffers_set"  # the names of buffers that no state dictionary holds
NOT_THE_USERS = frozenset((*TABLES, NOT_SAVED, "training", CALL))
FLAT_WEIGHTS = "_flat_weight"  # how the attributes begin in which a recurrent layer keeps weights

# Saving and loading a module's state: methods that users override, and hooks.
SAVE, LOAD = "_save_to_state_dict", "_load_from_state_dict"
SAVING_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
LOADING_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
STATE_VERSIONS = "_metadata"  # of a state dictionary: versions of modules, for their own code
EXTRA_STATE = "_extra_state"  # the key under which what `get_extra_state` returns is kept

# A tensor: hooks that run with its gradient, and after it was added.
GRADIENT_HOOKS, ACCUMULATED_HOOKS = TENSOR_HOOKS = (
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
WRITES = "_version"  # how often a tensor's memory was written to

# An optimizer.
BEFORE_STEP, AFTER_STEP = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
BEFORE_STATE = "_optimizer_state_dict_pre_hooks"
OPTIMIZER_STATE_HOOKS = (
    BEFORE_STATE,
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
GLOBAL_STEP_HOOKS: tuple[dict[Any, Any], ...] = (
    torch_optimizer._global_optimizer_pre_hooks,
    torch_optimizer._global_optimizer_post_hooks,
)
STEPPED = "_opt_called"  # where a learning rate scheduler notes that a step was taken
# torch.nn.utils.clip_grad: who asks, and by which name, for gradients put in groups.
NORM, GROUPING = "_get_total_norm", "_group_tensors_by_device_and_dtype"
GROWTH = "_growth_tracker"  # in a scaler's state: steps since its scale last changed


def is_module_call(frame: FrameType) -> bool:
    """Whether a frame is the call of a module: its ``self`` is the module."""
    return frame.f_code is nn.Module._call_impl.__code__


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table itself."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The table itself."""
    return module._buffers


def modules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table itself."""
    return module._modules


def writes_of(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was written to."""
    return tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The base of a view; the tensor itself if it is none."""
    return tensor if tensor._base is None else tensor._base


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; tied ones under each name."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return found | dict(module.named_buffers(remove_duplicate=False))


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors have in common if they share memory."""
    return int(tensor.untyped_storage()._cdata)


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same number, of the memory itself."""
    return int(storage._cdata)


def swap_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Let each have the other's memory, in place."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


def operator_schema(operator: Any) -> torch.FunctionSchema:
    """An operator's signature."""
    schema: torch.FunctionSchema = operator._schema
    return schema


def schema_of(function: Any) -> torch.FunctionSchema | None:
    """The same; None for a Python function."""
    schema = getattr(function, "_schema", None)
    return schema if isinstance(schema, torch.FunctionSchema) else None


def overload_name(operator: Any) -> str:
    """Which of its packet's overloads an operator is."""
    return str(operator._overloadname)


def code_of_scripted(module: Any) -> str:
    """The source of all methods of a scripted module."""
    return "".join(module._get_method(method).code for method in module._method_names())


def in_cplusplus(module: torch.jit.ScriptModule) -> Any:
    """The C++ object behind a scripted module."""
    return module._c


def lines_of(module: torch.fx.GraphModule) -> dict[int, int | None]:
    """For each line of a module's code, from that of ``forward``, the index of its node."""
    return getattr(module, "_lineno_map", None) or {}


def forget_source(filename: str) -> None:
    """Drop the source of generated code from torch's cache; where there is none, none is kept."""
    loader = getattr(graph_module, "_loader", None)
    getattr(loader, "eval_cache", {}).pop(filename, None)


def scaler_findings(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """A scaler's findings in gradients since its last update, by the optimizer's identity."""
    findings: dict[int, dict[str, Any]] = scaler._per_optimizer_states
    return findings


def note_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let a learning rate scheduler believe that there was a step."""
    setattr(optimizer, STEPPED, True)


def parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse tensor as they are, which need not be coalesced."""
    return tensor._indices(), tensor._values()
