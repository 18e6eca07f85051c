"""Encoders that pack padded rows: nested tensors have no form without values.

``nn.TransformerEncoder`` leaves out what a key padding mask masks, in eval mode, if each row's
values lie at its left. Values decide that, and other kernels with other bits run. So an encoder
that may do so is kept whole; or each of its layers is, which then packs what it is given, and pads
what it returns. Where either is run on tensors without values, to see what it returns, the padded
tensor stands for the nested one: the encoder pads it again at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from graphsplit.torch_ext.private import FakeTensor
from graphsplit.torch_ext.replaced import replaced

Packing = Callable[[nn.TransformerEncoder, torch.Tensor, torch.Tensor], torch.Tensor | None]


@contextmanager
def nested_tensors_kept_whole(is_recording: Callable[[], bool], pack: Packing) -> Iterator[None]:
    """Stop a module that makes a nested tensor while it is recorded.

    Args:
        is_recording: Whether what runs now is recorded.
        pack: ``pack(encoder, rows, mask)``: what stands for the nested tensor; None: nothing does.
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
            asking: dict[str, Any] = sys._getframe(1).f_locals
            encoder, mask = asking.get("self"), asking.get("src_key_padding_mask")
            is_known = isinstance(encoder, nn.TransformerEncoder) and mask is not None
            packed = pack(encoder, src, mask) if is_known else None  # type: ignore[arg-type]
            if packed is None:
                raise RuntimeError("a NestedTensor is made of a padding mask")
            return packed
        return src if isinstance(src, FakeTensor) else from_mask(src, *args, **kwargs)

    def pad(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if isinstance(self, FakeTensor) else to_padded(self, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(owner, "_nested_tensor_from_mask_left_aligned", answer))
        stack.enter_context(replaced(owner, "_nested_tensor_from_mask", make))
        stack.enter_context(replaced(owner.Tensor, "to_padded_tensor", pad))
        yield


def packed_layer(layer: Callable[..., torch.Tensor], *, is_checked: bool) -> Callable[..., Any]:
    """Run a layer of an encoder as the encoder does: on a nested tensor, if it would.

    Args:
        layer: The layer.
        is_checked: Whether the encoder packs only rows whose values lie at their left.
    """
    owner: Any = torch

    def run(rows: torch.Tensor, mask: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kept = mask.logical_not()
        if is_checked and not owner._nested_tensor_from_mask_left_aligned(rows, kept):
            return layer(rows, *args, **(kwargs | {"src_key_padding_mask": mask}))
        nested = owner._nested_tensor_from_mask(rows, kept, mask_check=False)
        return layer(nested, *args, **kwargs).to_padded_tensor(0.0, rows.size())

    return run
