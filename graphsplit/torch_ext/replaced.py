"""Replace an attribute for a while: how capture steps between a network and PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_INHERITED: Any = object()


@contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Let ``owner`` have another attribute inside."""
    # What stands in a class itself is not what it gives, as for a class method.
    own = vars(owner).get(name, _INHERITED) if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
