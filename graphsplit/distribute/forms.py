"""Operations on tensors without memory: the form of a result is found out once.

Torch follows shapes in Python, some operations through hundreds of calls: a criterion and its
backward took milliseconds on every worker that does not have its values. What such an operation
makes hangs on the forms of its operands and on its other arguments alone, for there are no values.
So it is remembered, below autograd, whose graph is the same as ever.

Autocast belongs to a device, and tensors without memory have one of their own, on which it does
nothing. So under autocast an operation is followed on fake tensors, which are on the CPU as far as
torch can tell; two steps of the script's autograd graph lead there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from graphsplit.distribute.workers.loop import META, shape_of
from graphsplit.errors import ConfigurationError
from graphsplit.torch_ext.attributes import base_of, operator_schema
from graphsplit.torch_ext.private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    num_dispatch_modes,
    pytree,
)

CPU = torch.device("cpu")
_STRIDED, _TENSOR = torch.strided, torch.Tensor

_OPERATORS = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv"),
    *("mod", "pow", "and", "or", "xor"),
)
_IN_PLACE_OPERATORS = frozenset(f"__i{name}__" for name in _OPERATORS) | {"__setitem__"}

_MOST = 4096  # forms of operations remembered; then all are found out anew
_PLAIN = frozenset(
    (
        *(type(None), bool, int, float, str),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)
_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
_forms: dict[Any, tuple[bool, list[_Form]]] = {}
_known: dict[OpOverload, tuple[bool, bool]] = {}  # whether remembered, whether drawing


class _HasValuesError(Exception):
    """An argument is more than a form."""


class Following(TorchDispatchMode):
    """Inside, operations on tensors without memory give tensors of the right form, quickly.

    Args:
        has_values: Whether all tensors have memory: operations run.

    Attributes:
        draws: Whether an operation may have drawn from the generator.
    """

    def __init__(self, *, has_values: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws, self._has_values = False, has_values

    def _follow(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_remembered, draws = _known.get(func) or _found_out(func)
        self.draws |= draws
        # Other modes, which the script may have set, are to see every operation.
        if self._has_values or num_dispatch_modes() or not is_remembered:
            return func(*args, **kwargs)
        try:
            named = _looks(kwargs.items()) if kwargs else ()
            key = func, torch.get_default_dtype(), _looks(args), named
        except _HasValuesError:
            return func(*args, **kwargs)
        known = _forms.get(key)
        if known is None:
            made = func(*args, **kwargs)
            is_single = not isinstance(made, tuple)
            several = (made,) if is_single else made
            if all(isinstance(one, torch.Tensor) and one.device == META for one in several):
                if len(_forms) >= _MOST:
                    _forms.clear()
                forms = [(one.shape, one.stride(), one.dtype) for one in several]
                _forms[key] = is_single, forms
            return made
        found = [
            torch.empty_strided(shape, strides, dtype=dtype, device=META)
            for shape, strides, dtype in known[1]
        ]
        return found[0] if known[0] else tuple(found)


# Set afterwards it is not wrapped for torch.compile, which never sees it and takes half its time.
Following.__torch_dispatch__ = Following._follow  # type: ignore[assignment,method-assign]


def _found_out(func: OpOverload) -> tuple[bool, bool]:
    """Whether an operation is one of torch's own, that makes new tensors and changes none.

    And whether it may draw from the generator.
    """
    schema: Any = operator_schema(func)
    parts = (*schema.arguments, *schema.returns)
    is_remembered = func.namespace == "aten" and all(one.alias_info is None for one in parts)
    found = _known[func] = is_remembered, torch.Tag.nondeterministic_seeded in func.tags
    return found


def _looks(values: Any) -> Any:
    """The forms of tensors, and all else as it is, with its type: 1 is not 1.0."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is _TENSOR:
            dtype = value.dtype
            is_form = value.is_meta and value.layout is _STRIDED
            if not is_form or dtype.is_complex:  # which may be conjugated without showing it
                raise _HasValuesError
            found.append((value.shape, value.stride(), dtype))
        elif kind is list or kind is tuple:
            found.append((kind, _looks(value)))
        elif kind in _PLAIN:
            found.append((kind, value))
        else:
            raise _HasValuesError
    return tuple(found)


class _ToFake(Function):
    """From a shape to a fake tensor on the CPU; the gradient is a shape again."""

    @staticmethod
    def forward(ctx: Any, mode: FakeTensorMode, shape: torch.Tensor) -> torch.Tensor:
        """The fake tensor."""
        ctx.mode = mode
        return FakeTensor(mode, shape.detach(), CPU)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Its shape."""
        return None, shape_of(gradient)


class _ToShape(Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, mode: FakeTensorMode, fake: torch.Tensor) -> torch.Tensor:
        """Its shape."""
        ctx.mode = mode
        return shape_of(fake)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """A fake gradient."""
        return None, FakeTensor(ctx.mode, gradient.detach(), CPU)


_to_fake: Callable[[FakeTensorMode, torch.Tensor], torch.Tensor] = _ToFake.apply
_to_shape: Callable[[FakeTensorMode, torch.Tensor], torch.Tensor] = _ToShape.apply


def casting_dtype() -> torch.dtype | None:
    """The lower dtype of ``torch.autocast`` around the script's line; None: there is none.

    Raises:
        ConfigurationError: It is on for another device than the CPU.
    """
    if torch.is_autocast_enabled("cuda"):
        raise ConfigurationError(
            "torch.autocast('cuda') is on around a call of a distributed network, whose values "
            "are on the CPU\n  Fix: torch.autocast('cpu', torch.bfloat16)."
        )
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def follow_casts(
    func: Callable[..., Any], leaves: Sequence[Any], together: Callable[[Sequence[Any]], Any]
) -> Any:
    """Shapes that an operation under autocast makes of shapes; None where nothing can be cast.

    Args:
        func: The operation.
        leaves: Its operands, tensors as shapes.
        together: Puts arguments together from operands.
    """
    mode = FakeTensorMode()

    def fake(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _to_fake(mode, leaf) if leaf.requires_grad else FakeTensor(mode, leaf, CPU)
        return CPU if isinstance(leaf, torch.device) and leaf == META else leaf

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return _to_shape(mode, leaf) if leaf.requires_grad else shape_of(leaf)

    args, kwargs = together([fake(leaf) for leaf in leaves])
    result = func(*args, **kwargs)
    made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if any(base_of(one) is not one for one in made):
        return None  # a view is cast by nobody, and shares memory with its base
    return pytree.tree_map(shape, result)


class _Followed(Function):
    """An operation that another worker runs, as a step of the script's autograd graph."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        """The shape of its result."""
        ctx.operands = [shape_of(one) for one in operands]
        return shape_of(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Shapes of gradients."""
        return None, *ctx.operands


def shape_after(result: torch.Tensor, operands: Sequence[Any]) -> torch.Tensor:
    """The shape of an operation's result, which has a history where its operands have one."""
    history = [one for one in operands if isinstance(one, torch.Tensor) and one.requires_grad]
    return _followed(result, *history)


_followed: Callable[..., torch.Tensor] = _Followed.apply


def refuse_cached_cast(what: str) -> None:
    """Refuse a leaf with a gradient under autocast, which keeps the casts of leaves in a block.

    Raises:
        ConfigurationError: Autocast is on.
    """
    if torch.is_autocast_enabled("cpu"):
        raise ConfigurationError(
            f"{what} is used by the script under torch.autocast, which casts it once for the whole "
            f"block: its gradients would be added up in another order\n"
            f"  Fix: use it inside the network's forward, or outside of the block."
        )


def written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The operands that an operation writes to."""
    target = kwargs.get("out")
    is_method = name.endswith("_") and not name.endswith("__")
    if target is None and (is_method or name in _IN_PLACE_OPERATORS):
        target = args[0] if args else next(iter(kwargs.values()))
    return [] if target is None else pytree.tree_leaves(target)
