"""``torch.autograd.Function`` of a script, on values of its own loop.

Torch asks no ``__torch_function__`` about ``apply``: forward would run on stand-ins, and what it
returns would have lost its history. So ``apply`` is an operation of the script as any other one.
Nor is it asked about ``Variable(tensor)`` of old scripts, which is ``tensor.detach()``.
"""

from __future__ import annotations

import functools
from typing import Any

from graphsplit.distribute.values import LoopValue, as_value, operate
from graphsplit.errors import ConfigurationError
from graphsplit.torch_ext.private import are_subclasses_asked, pytree
from graphsplit.torch_ext.replaced import APPLY_FUNCTION, VARIABLE, call_instead, make_instead


@functools.cache
def watch_functions() -> None:
    """Run functions where their operands are, from now on."""
    call_instead(vars(APPLY_FUNCTION[0])["apply"].__func__, _apply)
    make_instead(VARIABLE, _variable)


def _apply(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kind, *given = args
    if not are_subclasses_asked():  # inside a call of a network, or an operation
        return original(*args, **kwargs)
    if any(map(is_value, (*given, *kwargs.values()))):
        if kind.__module__ == "torch.utils.checkpoint":
            raise ConfigurationError(_CHECKPOINT)

        def run(*given: Any, **named: Any) -> Any:  # one of its own: it may keep something
            return original(kind, *given, **named)

        run.__name__ = kind.__name__
        return operate(run, given, kwargs)
    found: Any = original(*args, **kwargs)
    if any(map(is_value, pytree.tree_leaves(found))):
        raise ConfigurationError(_CHECKPOINT if "checkpoint" in kind.__module__ else _HIDDEN)
    return found


def _variable(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Variable(data, requires_grad=False)``: a tensor of the same memory, without history."""
    given = {**dict(zip(("data", "requires_grad"), args, strict=False)), **kwargs}
    data = given.pop("data", None)
    if not are_subclasses_asked() or not is_value(data):
        return original(*args, **kwargs)
    return as_value(data).detach().requires_grad_(bool(given.get("requires_grad", False)))


def is_value(leaf: Any) -> bool:
    """Whether it is a value of the loop, or answers as one."""
    return isinstance(leaf, LoopValue) or hasattr(type(leaf), "as_loop_value")


_CHECKPOINT = (
    "torch.utils.checkpoint with use_reentrant=True around values that live on one worker: its "
    "backward would run once more there, and nowhere else\n"
    "  Fix: use_reentrant=False; around the network's layers, inside its forward."
)
_HIDDEN = (
    "forward of a torch.autograd.Function returned a value that lives on one worker and is none "
    "of its arguments: its gradient would be lost\n"
    "  Fix: pass it to apply, or do it outside."
)
