"""Torch's private names that other packages of graphsplit use: imported here, and nowhere else.

A new torch may move any of them. :mod:`graphsplit.torch_ext.contract` says what each is needed
for; a test looks each up, and tries what is relied on. Names that only this package uses (patches
of torch) stand where they are used, and in the contract too.

ATen's operators (``torch.ops.aten``) are no part of this: they are the words of
``torch.export``'s graphs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch._C import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    ScriptFunction,
    ScriptMethod,
    ScriptModule,
    TensorBase,
)
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.autograd import Variable
from torch.autograd.function import _SingleLevelFunction
from torch.fx.proxy import _STACK_TRACE_ANCHORS as STACK_TRACE_ANCHORS
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices as foreach_devices
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype as grouped_tensors
from torch.utils._foreach_utils import _has_foreach_support as has_foreach_support
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _pop_mode_temporarily as pop_mode
from torch.utils.data import DataLoader

__all__ = [
    "CHECKPOINT",
    "CHECKPOINT_HOOK",
    "CHOICE_OF_FORM",
    "COMPILED_CALLS",
    "EXPORT_PASSES",
    "LOGGERS_OF_CAPTURE",
    "STACK_TRACE_ANCHORS",
    "SWITCHES",
    "TRANSFORMS",
    "VJP",
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OperatorBase",
    "ScriptFunction",
    "ScriptMethod",
    "ScriptModule",
    "SingleLevelFunction",
    "TensorBase",
    "TorchDispatchMode",
    "active_fake_mode",
    "are_subclasses_asked",
    "are_transforms_active",
    "dict_version",
    "disable_current_modes",
    "eager_transforms",
    "enter_autocast",
    "exit_autocast",
    "export_trace",
    "foreach_copy_",
    "foreach_devices",
    "foreach_norm",
    "gloo_group",
    "grouped_tensors",
    "has_foreach_support",
    "has_kernel",
    "has_storage",
    "is_any_autocast_on",
    "is_traceable_wrapper_subclass",
    "kernels_of_python",
    "make_wrapper",
    "mode_options",
    "nccl_group",
    "num_dispatch_modes",
    "num_function_modes",
    "pop_mode",
    "pytree",
    "run_backward",
    "set_grad_enabled",
    "storage_at",
    "storage_use_count",
    "take_form",
    "throw_on_mutable_data_ptr",
]

_Kind = TypeVar("_Kind")

_C: Any = torch._C

SingleLevelFunction: Any = _SingleLevelFunction
num_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
is_any_autocast_on: Callable[[], bool] = _C._is_any_autocast_enabled
num_function_modes: Callable[[], int] = _C._len_torch_function_stack
run_backward: Callable[..., Any] = Variable._execution_engine.run_backward
are_subclasses_asked: Callable[[], bool] = _C._is_torch_function_enabled
are_transforms_active: Callable[[], bool] = _C._are_functorch_transforms_active
# The number of a dictionary's latest write, of all writes to dictionaries; None: Python has none.
dict_version: Callable[[dict[Any, Any]], int] | None = (
    importlib.import_module("torch._C._dynamo.guards").dict_version
    if sys.version_info < (3, 12)
    else None
)
foreach_copy_: Callable[..., None] = torch._foreach_copy_
foreach_norm: Callable[..., Any] = torch._foreach_norm
has_kernel: Callable[[str, str], bool] = _C._dispatch_has_kernel_for_dispatch_key
has_storage: Callable[[torch.Tensor], bool] = _C._has_storage
kernels_of_python: set[str] = torch.library._impls
set_grad_enabled: Callable[[bool], None] = _C._set_grad_enabled
storage_at: Callable[..., Any] = _C._construct_storage_from_data_pointer
storage_use_count: Callable[[int], int] = _C._storage_Use_Count
throw_on_mutable_data_ptr: Callable[[torch.Tensor], None] = _C._set_throw_on_mutable_data_ptr

_has_chosen = False


def _choose_attention() -> None:
    """Have torch choose among its kernels of attention, as it does at the first one on a GPU."""
    with DisableTorchFunction(), disable_current_modes():
        one = torch.empty((1, 1, 1, 8), dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(one, one, one)


def _get_sdp_priority_order() -> list[int]:
    """Torch's order of the kernels of attention.

    On some GPUs torch itself sets another one at the first attention of a process. That would look
    as if the script had done so; so it happens before the first look.
    """
    global _has_chosen
    if not _has_chosen and torch.cuda.is_initialized():
        _choose_attention()
        _has_chosen = True
    order: list[int] = _C._get_sdp_priority_order()
    return order


# Which of several kernels runs, and where; each has a getter of its own.
SWITCHES: tuple[Callable[[], Any], ...] = (
    _get_sdp_priority_order if torch.backends.cuda.is_built() else _C._get_sdp_priority_order,
    *(
        getattr(_C, f"_get_{name}")
        for name in (
            *("math_sdp_enabled", "flash_sdp_enabled", "mem_efficient_sdp_enabled"),
            *("cudnn_sdp_enabled", "float32_matmul_precision"),
            *("mkldnn_enabled", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic"),
            *("deterministic_algorithms", "cublas_allow_tf32", "cudnn_allow_tf32"),
        )
    ),
)
# The function that modules of optimizers ask whether to step many parameters in one kernel.
CHOICE_OF_FORM = "_default_to_fused_or_foreach"
# What runs a function transform: torch's module, the name in it, the transform's public name.
TRANSFORMS = (
    ("torch._functorch.apis", "vmap_impl", "torch.vmap"),
    ("torch._functorch.eager_transforms", "grad_impl", "torch.func.grad"),
    ("torch._functorch.eager_transforms", "grad_and_value_impl", "torch.func.grad_and_value"),
    ("torch._functorch.eager_transforms", "_jvp_with_argnums", "torch.func.jvp"),
)
VJP = "_vjp_with_argnums"  # of eager_transforms(): runs torch.func.vjp and jacrev
# What runs a checkpoint that is not reentrant, and the hooks on saved tensors that it sets.
CHECKPOINT: tuple[ModuleType, str] = (checkpoint, "_checkpoint_without_reentrant_generator")
CHECKPOINT_HOOK: Any = checkpoint._checkpoint_hook
_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
# The folder whose code calls what torch.compile made of a module; importing it takes seconds.
COMPILED_CALLS = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "")
# Modules of torch that pack the blocks of a graph into subgraphs: each has a function of its name.
EXPORT_PASSES = tuple(
    f"torch._export.passes.{name}"
    for name in ("replace_set_grad_with_hop_pass", "replace_autocast_with_hop_pass")
)
LOGGERS_OF_CAPTURE = (
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
    "torch._subclasses.fake_tensor",
)


def leaves_of(kind: type[_Kind], tree: Any) -> list[_Kind]:
    """The values of a class in nested arguments or results."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, kind)]


def active_fake_mode() -> Any:
    """The ``FakeTensorMode`` that stands between operations and their kernels; None: none."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE)


def eager_transforms() -> ModuleType:
    """The module that ``torch.func`` stands on; not imported before somebody asks."""
    return importlib.import_module("torch._functorch.eager_transforms")


def export_trace() -> Any:
    """The module behind ``torch.export``; not imported before somebody asks."""
    return importlib.import_module("torch.export._trace")


def make_wrapper(kind: type[torch.Tensor], inner: torch.Tensor) -> Any:
    """A tensor of a class of our own, without memory, that looks like another one on the CPU."""
    make: Any = torch.Tensor._make_wrapper_subclass
    with torch.no_grad():
        return make(kind, inner.shape, strides=inner.stride(), dtype=inner.dtype, device="cpu")


def take_form(wrapper: torch.Tensor, inner: torch.Tensor) -> bool:
    """Let a wrapper look like the tensor inside again, if it does not; tells whether it did not."""
    with DisableTorchFunctionSubclass():
        if wrapper.shape == inner.shape and wrapper.stride() == inner.stride():
            return False
        wrapper.data = make_wrapper(type(wrapper), inner)
    return True


def mode_options(mode: str) -> dict[str, Any]:
    """The options that ``torch.compile(mode=...)`` stands for."""
    options: dict[str, Any] = torch._inductor.list_mode_options(mode)
    return options


def gloo_group(store: Any, rank: int, device: Any, timeout: timedelta) -> Any:
    """A process group of two workers; waits for the other to make its half."""
    make: Any = torch.distributed.ProcessGroupGloo  # its stub lacks what its options are
    options = make._Options()
    options._devices = [device]
    options._threads = 1
    options._timeout = timeout
    return make(store, rank, 2, options)


def nccl_group(store: Any, rank: int, timeout: timedelta) -> Any:
    """The same over NCCL; once ``timeout`` is over, its watchdog would end the process."""
    make: Any = torch.distributed.ProcessGroupNCCL  # its stub lacks what every backend has
    options = make.Options()
    options._timeout = timeout
    return make(store, rank, 2, options)


def accelerate_states() -> list[dict[str, Any]]:
    """The dictionaries in which accelerate keeps what it knows of the processes, if it does."""
    module: Any = sys.modules.get("accelerate.state")
    states = () if module is None else (module.PartialState, module.AcceleratorState)
    return [state._shared_state for state in states if state._shared_state]


def change_shown(metric: Any, change: Callable[[Any], Any]) -> None:
    """Change the value that a metric of torchmetrics gave last, which Lightning's bar shows."""
    metric._forward_cache = change(metric._forward_cache)


def is_checkpointing() -> bool:
    """Whether ``torch.utils.checkpoint`` keeps what operations save, or runs them once more."""
    hooks = _top_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__


def has_processes(loader: DataLoader[Any]) -> bool:
    """Whether a loader's processes, which persist, have begun: here, or in a process before."""
    return loader._iterator is not None


def note_processes(loader: DataLoader[Any]) -> None:
    """A loader's processes, which persist, have begun, in a process that is gone."""
    begun: Any = _Begun()
    loader._iterator = begun


def end_processes(loader: DataLoader[Any]) -> None:
    """End a loader's processes, which persist: the next iteration starts others."""
    iterator: Any = loader._iterator
    loader._iterator = None
    iterator._shutdown_workers()


class _Begun:
    """In the place of the iterator of a loader whose processes had begun in a process that is gone.

    They start when the loader is gone through, whoever does: without the draw for their seed that
    was in an earlier epoch.
    """

    def _reset(self, loader: DataLoader[Any]) -> None:
        held = vars(loader)
        own, held["generator"] = held["generator"], torch.Generator()
        try:
            loader._iterator = loader._get_iterator()
        finally:
            held["generator"] = own

    def _shutdown_workers(self) -> None:
        pass
