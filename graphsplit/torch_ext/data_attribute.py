"""``tensor.data`` while a network is captured.

``torch.export`` does not see it, and makes a constant of what was a parameter. To a graph it is
``tensor.detach()``: the same memory, apart from autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphsplit.errors import CaptureError
from graphsplit.frames import users_line_now
from graphsplit.torch_ext.torch_calls import TorchCalls

_ATTRIBUTE: Any = torch.Tensor.data


class DataIsDetached(TorchCalls):
    """Reads ``.data`` as ``.detach()``, and refuses to set it."""

    def called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of torch, or read ``.data``."""
        if function == _ATTRIBUTE.__get__:
            return args[0].detach()
        if function == _ATTRIBUTE.__set__:
            raise CaptureError(
                f"forward gives a tensor other memory by setting its .data\n"
                f"  {users_line_now()}\n"
                f"  Fix: copy into it, as in tensor.data.copy_(new)."
            )
        return function(*args, **kwargs)
