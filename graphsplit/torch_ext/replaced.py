"""Replace an attribute for a while: how capture steps between a network and PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

MISSING: Any = object()  # a class has no attribute of its own of that name

# By the holder of an attribute, or a module's table, and its name: what stands there otherwise.
_OUTSIDE: dict[tuple[int, str], Any] = {}


@contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Let ``owner`` have another attribute inside."""
    # What stands in a class itself is not what it gives, as for a class method.
    own = vars(owner).get(name, MISSING) if isinstance(owner, type) else getattr(owner, name)
    key = (id(vars(owner)) if isinstance(owner, ModuleType) else id(owner), name)
    is_outermost = key not in _OUTSIDE
    _OUTSIDE.setdefault(key, own)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if is_outermost:
            del _OUTSIDE[key]
        if own is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def outside(holder: Any, name: str, now: Any) -> Any:
    """The attribute that stands somewhere when nothing is replaced.

    Args:
        holder: A class, or the table of a module.
        name: The attribute.
        now: What stands there now.
    """
    return _OUTSIDE.get((id(holder), name), now)
