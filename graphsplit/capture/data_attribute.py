"""``tensor.data`` while a network is captured.

``torch.export`` does not see it, and makes a constant of what was a parameter. To a graph it is
``tensor.detach()``: the same memory, apart from autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphsplit.capture.users_line import users_line_now
from graphsplit.errors import CaptureError

_ATTRIBUTE: Any = torch.Tensor.data


class DataIsDetached(TorchFunctionMode):
    """Reads ``.data`` as ``.detach()``, and refuses to set it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, or read ``.data``."""
        if func == _ATTRIBUTE.__get__:
            return args[0].detach()
        if func == _ATTRIBUTE.__set__:
            raise CaptureError(
                f"forward gives a tensor other memory by setting its .data\n"
                f"  {users_line_now()}\n"
                f"  Fix: copy into it, as in tensor.data.copy_(new)."
            )
        return func(*args, **(kwargs or {}))
