"""Encoders that pack padded rows: nested tensors have no form without values.

``nn.TransformerEncoder`` leaves out what a key padding mask masks, in eval mode, if each row's
values lie at its left. Values decide that, and other kernels with other bits run. So an encoder
that may do so is kept whole. Where it is run on tensors without values, to see what it returns,
the padded tensor stands for the nested one: the encoder pads it again at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from graphsplit.torch_ext.private import FakeTensor
from graphsplit.torch_ext.replaced import replaced


@contextmanager
def nested_tensors_kept_whole(is_recording: Callable[[], bool]) -> Iterator[None]:
    """Stop a module that makes a nested tensor while it is recorded.

    Args:
        is_recording: Whether what runs now is recorded.
    """
    owner: Any = torch
    is_left_aligned = owner._nested_tensor_from_mask_left_aligned
    from_mask = owner._nested_tensor_from_mask
    to_padded = owner.Tensor.to_padded_tensor

    def answer(src: torch.Tensor, mask: torch.Tensor) -> bool:
        # What else speaks against it is asked first; only then is it made.
        return True if isinstance(src, FakeTensor) else is_left_aligned(src, mask)

    def make(src: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if is_recording():
            raise RuntimeError("a NestedTensor is made of a padding mask")
        return src if isinstance(src, FakeTensor) else from_mask(src, *args, **kwargs)

    def pad(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if isinstance(self, FakeTensor) else to_padded(self, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(owner, "_nested_tensor_from_mask_left_aligned", answer))
        stack.enter_context(replaced(owner, "_nested_tensor_from_mask", make))
        stack.enter_context(replaced(owner.Tensor, "to_padded_tensor", pad))
        yield
