"""Keep each layer of an encoder whole, where the encoder itself lies on several workers.

In eval mode with a key padding mask, an encoder packs its rows into one nested tensor for all its
layers. A nested tensor does not travel. So every layer is given the padded rows and the mask, packs
them, and pads what it made with zeros; packed again by the next layer, they are the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from graphsplit.capture.opaque.marks import refuse_placements_inside
from graphsplit.capture.opaque.record import OpaqueCode, OpaqueRecorder
from graphsplit.marks.annotations import module_annotation
from graphsplit.torch_ext.attributes import CALL
from graphsplit.torch_ext.nested_tensors import nested_tensors_kept_whole, packed_layer

# What stands for nested tensors, by identity: itself, the mask, and whether alignment is asked.
_Packed = dict[int, tuple[torch.Tensor, torch.Tensor, bool]]


@contextmanager
def padded_layers_whole(recorder: OpaqueRecorder, root: nn.Module) -> Iterator[None]:
    """Record the layers of encoders that are placed apart as one node each.

    Args:
        recorder: What records them.
        root: The module that holds all others.
    """
    packed: _Packed = {}

    def pack(
        encoder: nn.TransformerEncoder, rows: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor | None:
        if all(module_annotation(inner) is None for inner in encoder.layers.modules()):
            return None
        stand_in = rows.view_as(rows)
        packed[id(stand_in)] = stand_in, mask, getattr(encoder, "mask_check", True)
        return stand_in

    with ExitStack() as stack:
        stack.enter_context(nested_tensors_kept_whole(lambda: recorder.is_recording, pack))
        for path, module in root.named_modules():
            if isinstance(module, nn.TransformerEncoder):
                for number, layer in enumerate(module.layers):
                    inner = f"{path}.layers.{number}"
                    stack.enter_context(_kept_whole(recorder, packed, inner, layer))
        yield


@contextmanager
def _kept_whole(
    recorder: OpaqueRecorder, packed: _Packed, path: str, layer: nn.Module
) -> Iterator[None]:
    is_own = CALL in layer.__dict__  # it is called otherwise already
    original: Callable[..., Any] = getattr(layer, CALL)
    name = path.partition(".")[2]

    def call(*args: Any, **kwargs: Any) -> Any:
        known = packed.get(id(args[0])) if args and recorder.is_recording else None
        if known is None:
            return original(*args, **kwargs)
        rows, mask, is_checked = known
        refuse_placements_inside(path, layer, "it packs padded rows")
        label = f"{type(layer).__name__} ({name})"
        whole = OpaqueCode(packed_layer(original, is_checked=is_checked), label, (layer,))
        made: torch.Tensor = recorder.record(whole, (rows, mask, *args[1:]), kwargs)
        packed[id(made)] = made, mask, is_checked
        return made

    layer.__dict__[CALL] = call
    try:
        yield
    finally:
        if is_own:
            layer.__dict__[CALL] = original
        else:
            del layer.__dict__[CALL]
