"""How a call ended on a worker, as bytes and back: what it returned, or what it raised.

Bytes of the codec that states on disk have, so no object is made but tensors, numbers, texts and
containers of them. An error comes back as one of its own class where the caller has loaded that
class, and it can be made from its arguments; else as text.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from graphsplit.encoding.packed import Packed
from graphsplit.errors import ConfigurationError, FrameError, StateError
from graphsplit.frames import users_traceback

_RETURNED, _RAISED = "returned", "raised"


@dataclass(frozen=True)
class Raised:
    """An error that ended a worker's function.

    Attributes:
        text: Its last line: ``ValueError: no``.
        traceback: The user's part of its traceback.
        error: The error itself, made anew; None where it cannot be.
    """

    text: str
    traceback: str
    error: Exception | None = None


@dataclass(frozen=True)
class Returned:
    """The value that a worker's function returned."""

    value: Any


def returned(value: Any, *, function: str) -> list[torch.Tensor]:
    """A value as bytes.

    Raises:
        ConfigurationError: Something in it has no form in bytes; names it.
    """
    try:
        return Packed.of({_RETURNED: value}, what=f"the result of {function}").pieces()
    except StateError as error:
        what = str(error).partition("\n")[0].replace(f"/{_RETURNED}", "", 1)
        raise ConfigurationError(
            f"what {function} returned cannot be given to the caller: "
            f"{what.replace('cannot be saved', 'has no safe form')}\n"
            f"  Fix: return net.state_dict() for a module, torch.from_numpy(a) for an array, "
            f"dataclasses.asdict(d) for a dataclass; or save it to a file in {function}."
        ) from None


def raised(error: BaseException) -> list[torch.Tensor]:
    """An error as bytes."""
    text = f"{type(error).__name__}: {error}"
    told = {"text": text, "traceback": users_traceback(error), **_recipe(error)}
    return Packed.of({_RAISED: told}, what="an error").pieces()


def read(octets: torch.Tensor) -> Returned | Raised | None:
    """Read what ``returned`` or ``raised`` gave; None where there is nothing whole."""
    try:
        found = Packed.read([octets], what="the result").value() if octets.numel() else None
    except FrameError:
        return None
    match found:
        case {"returned": value}:
            return Returned(value)
        case {"raised": {"text": str(text), "traceback": str(trace)} as told}:
            return Raised(text, trace, _made_again(told, text))
    return None


def _recipe(error: BaseException) -> dict[str, Any]:
    """Class and arguments; nothing where those have no form in bytes."""
    kind = type(error)
    parts = error.__reduce__()
    arguments = parts[1] if isinstance(parts, tuple) and parts[0] is kind else ()
    recipe = {"class": [kind.__module__, kind.__qualname__], "arguments": tuple(arguments)}
    try:
        Packed.of(recipe, what="an error")
    except StateError:
        return {}
    return recipe


def _made_again(told: dict[str, Any], text: str) -> Exception | None:
    match told:
        case {"class": [str(module), str(name)], "arguments": tuple(arguments)}:
            kind = _loaded(module, name)
        case _:
            return None
    if kind is None:
        return None
    try:
        error = kind(*arguments)
        return error if f"{type(error).__name__}: {error}" == text else None
    except Exception:  # the class is the user's own, and wants other arguments
        return None


def _loaded(module: str, name: str) -> type[Exception] | None:
    """A class of errors that this process knows by that name. Nothing is imported."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None
