"""Parameters and buffers live on one worker; elsewhere a stand-in keeps their shape and no memory.

A stand-in is the same Python object (optimizers and modules hold on to it): its storage becomes a
single zero, expanded to the old shape, so that capture sees what it saw before; and its class is
swapped for one that refuses to hand out the value.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from graphsplit.errors import OwnershipError
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass, pytree

# What may be asked of a tensor whose value is elsewhere.
_HARMLESS = frozenset(
    {
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "__len__",
        "is_floating_point",
        "is_complex",
        "__hash__",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "get_device",
        "is_contiguous",
        "storage_offset",
    }
)
_HARMLESS_ATTRIBUTES = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "grad",
        "requires_grad",
        "is_leaf",
        "layout",
        "ndim",
        "is_sparse",
        "is_cuda",
        "is_meta",
        "is_quantized",
        "is_cpu",
        "is_mps",
        "is_xpu",
        "grad_fn",
        "names",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "itemsize",
        "nbytes",
        "grad_dtype",
        "output_nr",
        "_version",
        "is_nested",
        "is_mkldnn",
        "retains_grad",
        "_base",
    }
)
_WHOSE = "_graphsplit_whose"  # attribute of a stand-in: its name, its owner, its old strides


class _Elsewhere(torch.Tensor):
    """A tensor whose value lives on another worker: refuses to hand it out."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if (name, attribute) == ("__get__", "grad"):
            _refuse_partial_view(args[0], sys._getframe(1).f_globals.get("__name__", ""))
        harmless = name in _HARMLESS or (
            name in ("__get__", "__set__", "__delete__") and attribute in _HARMLESS_ATTRIBUTES
        )
        if not harmless:
            raise OwnershipError(_message(args, kwargs, attribute or name))
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        name, owner, _ = getattr(self, _WHOSE)
        return f"<{name}: lives on worker {owner}>"

    def __deepcopy__(self, memo: Any) -> Any:
        raise OwnershipError(_message((self,), None, "copy.deepcopy"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OwnershipError(_message((self,), None, "pickling"))


class _ElsewhereParameter(_Elsewhere, nn.Parameter):
    """A parameter whose value lives on another worker."""


def _refuse_partial_view(tensor: torch.Tensor, asker: str) -> None:
    """No gradient is here, and who looks at all of them would take that for 'has none'.

    The norm of the gradients found here would be taken for that of all. Code that treats every
    parameter by itself may be told that there is none: optimizers, and ``zero_grad``.
    """
    if asker.startswith(("torch.optim.", "torch.nn.modules.")):
        return
    name, owner, _ = getattr(tensor, _WHOSE)
    raise OwnershipError(
        f"the gradient of {name!r} is on worker {owner}, not here\n"
        f"  Fix: to clip, use Model(..., clip=gs.clip.GlobalNorm(max_norm)); to look at gradients, "
        f"go through context.owned_parameters() in a callback's on_gradients."
    )


def _message(args: Any, kwargs: Any, asked: str) -> str:
    flat: list[Any] = []
    pytree.tree_map(flat.append, (args, kwargs))
    name, owner, _ = next(getattr(a, _WHOSE) for a in flat if isinstance(a, _Elsewhere))
    fix = (
        f"read it on worker {owner}, or call model.state_dict() on every worker, which gathers all "
        f"values."
    )
    if asked == "copy_":
        fix = (
            "to load a state, call model.load_state_dict(state) on every worker, not "
            "net.load_state_dict: each takes what it owns."
        )
    return (
        f"the value of {name!r} lives on worker {owner}, not here (asked for by {asked})\n"
        f"  Fix: {fix}"
    )


class TensorOwners:
    """Which worker each parameter and buffer of a job lives on.

    A tensor has one owner, however many Models use it, and whichever of them was planned first.
    """

    def __init__(self) -> None:
        self._owners: Any = WeakTensorKeyDictionary()

    def fix(self, tensors: Mapping[str, torch.Tensor], owners: Mapping[str, int]) -> None:
        """Note the owner of every tensor, by its name in one Model."""
        for name, tensor in tensors.items():
            self._owners[tensor] = owners[name]

    def known(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The owners that are fixed, by the names that another Model has for its tensors."""
        return {name: self._owners[t] for name, t in tensors.items() if t in self._owners}


def give_up(
    tensor: torch.Tensor, *, name: str, owner: int, strides: tuple[int, ...] | None = None
) -> None:
    """Free a tensor's memory and turn it into a stand-in.

    Args:
        tensor: A parameter or buffer.
        name: Its qualified name.
        owner: The worker it lives on.
        strides: Its true strides, where the tensor itself has lost them already.
    """
    if isinstance(tensor, _Elsewhere):
        return
    strides = tensor.stride() if strides is None else strides
    tensor.data = _single_zero(tensor)
    tensor.grad = None
    setattr(tensor, _WHOSE, (name, owner, strides))
    tensor.__class__ = _ElsewhereParameter if isinstance(tensor, nn.Parameter) else _Elsewhere


def _single_zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a stand-in for a value that lives on another worker."""
    return isinstance(tensor, _Elsewhere)


def take_back(tensor: torch.Tensor) -> None:
    """Make a stand-in an ordinary tensor again; its value is up to the caller."""
    is_parameter = isinstance(tensor, _ElsewhereParameter)
    plain: Any = nn.Parameter if is_parameter else torch.Tensor
    tensor.__class__ = plain


@dataclass(frozen=True)
class Residence:
    """Where the tensors of a network and its loss live, as one worker sees it.

    Attributes:
        tensors: Parameters and buffers by name; tied ones under each name.
        owners: The owner of each.
        rank: This worker.
        num_workers: Size of the cluster.
    """

    tensors: Mapping[str, torch.Tensor]
    owners: Mapping[str, int]
    rank: int
    num_workers: int

    def unique(self) -> list[torch.Tensor]:
        """Every tensor once."""
        return list({id(tensor): tensor for tensor in self.tensors.values()}.values())

    def names(self) -> dict[int, str]:
        """The first name of each tensor, by its id."""
        names: dict[int, str] = {}
        for name, tensor in self.tensors.items():
            names.setdefault(id(tensor), name)
        return names

    def owner_by_id(self) -> dict[int, int]:
        """The owner of each tensor, by its id."""
        return {id(tensor): self.owners[name] for name, tensor in self.tensors.items()}


@contextmanager
def plain_classes(network: nn.Module) -> Iterator[None]:
    """Let capture look at stand-ins as at ordinary tensors, with the strides they once had.

    The memory is set aside but never touched, so it takes no room.
    """
    swapped = [t for t in _all_state(network) if isinstance(t, _Elsewhere)]
    for tensor in swapped:
        _, _, strides = getattr(tensor, _WHOSE)
        take_back(tensor)
        tensor.data = torch.empty_strided(
            tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
        )
    try:
        yield
    finally:
        for tensor in swapped:
            tensor.data = _single_zero(tensor)
            tensor.__class__ = (
                _ElsewhereParameter if isinstance(tensor, nn.Parameter) else _Elsewhere
            )


def _all_state(network: nn.Module) -> Iterator[torch.Tensor]:
    yield from network.parameters()
    yield from network.buffers()


def return_free_memory() -> None:
    """Ask the C library to give freed memory back to the system."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
