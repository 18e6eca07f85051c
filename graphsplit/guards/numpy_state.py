"""States of NumPy's generators, as values that can be compared."""

from __future__ import annotations

from typing import Any


def comparable(state: Any) -> Any:
    """A state, with the words of its arrays; their text is cut short as print options say."""
    if isinstance(state, dict):
        return {name: comparable(part) for name, part in state.items()}
    if isinstance(state, (tuple, list)):
        return tuple(map(comparable, state))
    return state.tobytes() if hasattr(state, "tobytes") else state
