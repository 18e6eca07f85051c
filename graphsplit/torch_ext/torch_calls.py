"""Calls of torch's Python functions, while the user's code runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


class TorchCalls(TorchFunctionMode):
    """Sees each call of a function of torch: subclasses make it, in ``called``."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch instead of the function."""
        return self.called(function, args, kwargs or {})

    def called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of torch, and return its result."""
        raise NotImplementedError
