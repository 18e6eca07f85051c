"""Operations on tensors without memory: the form of a result is found out once.

Torch follows shapes in Python, some operations through hundreds of calls: a criterion and its
backward took milliseconds on every worker that does not have its values. What such an operation
makes hangs on the forms of its operands and on its other arguments alone, for there are no values.
So it is remembered, below autograd, whose graph is the same as ever.
"""

from __future__ import annotations

from typing import Any

import torch

from graphsplit.distribute.workers.loop import META
from graphsplit.torch_ext.attributes import draws_by_default, operator_schema
from graphsplit.torch_ext.private import OpOverload, TorchDispatchMode, num_dispatch_modes

_STRIDED, _TENSOR = torch.strided, torch.Tensor

_MOST = 4096  # forms of operations remembered; then all are found out anew
_PLAIN = frozenset(
    (
        *(type(None), bool, int, float, str),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)
Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
_forms: dict[Any, tuple[bool, list[Form]]] = {}
_known: dict[OpOverload, tuple[bool, bool]] = {}  # whether remembered, and may draw


def form_of(tensor: torch.Tensor) -> Form:
    """The form of a tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype


def is_form(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory, and no more to it than its form."""
    # A complex one may be conjugated without showing it.
    return tensor.is_meta and tensor.layout is _STRIDED and not tensor.is_complex()


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
        is_remembered, may_draw = _known.get(func) or _found_out(func)
        self.draws |= may_draw and draws_by_default(func, args, kwargs)
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
                forms = list(map(form_of, several))
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
            if not is_form(value):
                raise _HasValuesError
            found.append(form_of(value))
        elif kind is list or kind is tuple:
            found.append((kind, _looks(value)))
        elif kind in _PLAIN:
            found.append((kind, value))
        else:
            raise _HasValuesError
    return tuple(found)
