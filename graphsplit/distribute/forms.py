"""Operations on tensors without memory: the form of a result is found out once.

Torch follows shapes in Python, some operations through hundreds of calls: a criterion and its
backward took milliseconds on every worker that does not have its values. What such an operation
makes hangs on the forms of its operands and on its other arguments alone, for there are no values.
So it is remembered, below autograd, whose graph is the same as ever.
"""

from __future__ import annotations

from typing import Any

import torch

from graphsplit.distribute.loop import META
from graphsplit.torch_ext.attributes import operator_schema
from graphsplit.torch_ext.private import OpOverload, TorchDispatchMode, num_dispatch_modes

_MOST = 4096  # forms of operations remembered; then all are found out anew
_PLAIN = frozenset(
    (
        *(type(None), bool, int, float, str),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)
_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
_forms: dict[Any, tuple[bool, list[_Form]]] = {}
_remembered: dict[OpOverload, bool] = {}


class _HasValuesError(Exception):
    """An argument is more than a form."""


class Following(TorchDispatchMode):
    """Inside, operations on tensors without memory give tensors of the right form, quickly.

    Attributes:
        draws: Whether an operation may have drawn from the generator.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = False

    def _follow(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        # Other modes, which the script may have set, are to see every operation.
        if num_dispatch_modes() or not _is_remembered(func):
            return func(*args, **kwargs)
        try:
            key = func, torch.get_default_dtype(), _looks(args), _looks(tuple(kwargs.items()))
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


def _is_remembered(func: OpOverload) -> bool:
    """Whether an operation is one of torch's own, that makes new tensors and changes none."""
    known = _remembered.get(func)
    if known is None:
        schema: Any = operator_schema(func)
        known = _remembered[func] = func.namespace == "aten" and all(
            one.alias_info is None for one in (*schema.arguments, *schema.returns)
        )
    return known


def _looks(values: Any) -> Any:
    """The forms of tensors, and all else as it is, with its type: 1 is not 1.0."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is torch.Tensor:
            is_form = value.device == META and value.layout is torch.strided
            if not is_form or value.is_complex():  # which may be conjugated without showing it
                raise _HasValuesError
            found.append((value.shape, value.stride(), value.dtype))
        elif kind is list or kind is tuple:
            found.append((kind, _looks(value)))
        elif kind in _PLAIN:
            found.append((kind, value))
        else:
            raise _HasValuesError
    return tuple(found)
