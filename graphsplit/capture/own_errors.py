"""Whether an error of a capture is one that the network raises anyway.

A batch of a wrong shape, or a misspelt name, fails in plain PyTorch too. Then neither
``torch.export`` nor graphsplit is to blame, and the message must not say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphsplit.capture.state.attributes import Attributes
from graphsplit.torch_ext.private import FakeTensorMode, pytree


def raises_by_itself(
    root: nn.Module, run: Callable[..., Any], arguments: Any, error: Exception
) -> bool:
    """Run a network plainly, on tensors without values, and look whether the same error comes.

    Args:
        root: The module that holds all others.
        run: ``run(*args, **kwargs)``: what was captured.
        arguments: Its arguments: ``(args, kwargs)``.
        error: The error.
    """
    try:
        with _everything_kept(root), FakeTensorMode(allow_non_fake_inputs=True) as fake_mode:
            given = pytree.tree_map_only(torch.Tensor, fake_mode.from_tensor, arguments)
            run(*given[0], **given[1])
    except Exception as other:
        return type(other) is type(error) and _first_line(other) == _first_line(error)
    return False


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def _everything_kept(root: nn.Module) -> Iterator[None]:
    """Put back what forward assigns, and the generator."""
    attributes = Attributes(root, ())
    held = [(module._buffers, dict(module._buffers)) for module in root.modules()]
    generator = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(generator)
        for buffers, before in held:
            buffers.clear()
            buffers.update(before)
        attributes.put_back()
