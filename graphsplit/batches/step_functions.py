"""The computation of one step: forward, loss, and what is returned beside it.

The network and the loss come first, then the arguments of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from graphsplit.capture.structure import take_apart
from graphsplit.errors import ConfigurationError


def casting_to(dtype: torch.dtype | None, run: Callable[..., Any]) -> Callable[..., Any]:
    """Run one of these functions under ``torch.autocast``; as it is if there is no dtype."""
    if dtype is None:
        return run

    def run_casting(
        network: nn.Module, loss_fn: Callable[..., Any] | None, *args: Any, **kwargs: Any
    ) -> Any:
        first = next(network.parameters(), None)
        device = "cpu" if first is None else first.device.type
        with torch.autocast(device, dtype):
            return run(network, loss_fn, *args, **kwargs)

    return run_casting


def loss_of(found: Any, *, whose: str = "the network") -> torch.Tensor:
    """The loss that was returned: a scalar, ``loss`` of several, or the first of a tuple.

    Args:
        found: What was returned.
        whose: By what, for errors: the network, or ``loss_fn``.

    Raises:
        ConfigurationError: There is none.
    """
    loss = found
    if not isinstance(found, torch.Tensor):
        loss = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
        if loss is None and isinstance(found, (tuple, list)) and found:
            loss = found[0]
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    what = "the scalar loss, an object with .loss, or a tuple that begins with it"
    if whose == "loss_fn":
        raise ConfigurationError(
            f"loss_fn returned {_shape_of(found)}; expected {what}\n"
            f"  Fix: reduce it, for example with reduction='mean'."
        )
    raise ConfigurationError(
        f"the network returned {_shape_of(found)}; without a loss_fn it must return {what}\n"
        f"  Fix: give the Model a loss_fn, or pass the labels so that the network computes its "
        f"loss."
    )


def losses_beside(found: Any) -> dict[str, torch.Tensor]:
    """The scalars that were returned beside a loss, by name; by position where they have none."""
    named: dict[Any, Any] = {}
    if isinstance(found, Mapping):
        named = dict(found)
    elif not isinstance(found, torch.Tensor) and hasattr(found, "loss"):
        named = found._asdict() if hasattr(found, "_asdict") else vars(found)
    elif isinstance(found, (tuple, list)):
        for position, part in enumerate(found[1:], 1):
            named |= part if isinstance(part, Mapping) else {position: part}
    return {
        str(name): part.detach().clone()
        for name, part in named.items()
        if name != "loss" and isinstance(part, torch.Tensor) and part.dim() == 0
    }


def _shape_of(outputs: Any) -> str:
    if isinstance(outputs, torch.Tensor):
        return f"a tensor of shape {list(outputs.shape)}"
    return f"a {type(outputs).__name__}"


Trained = tuple[torch.Tensor, dict[str, Any]]
"""A loss, and beside it ``losses``, by name, and perhaps the network's ``outputs``."""


def run_train(
    network: nn.Module, loss_fn: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Trained:
    """Forward and loss."""
    loss, _, beside = run_eval_with_loss(network, loss_fn, *args, **kwargs)
    return loss, {"losses": beside}


def run_train_with_outputs(
    network: nn.Module, loss_fn: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Trained:
    """Forward and loss, and the outputs, in memory of their own."""
    loss, outputs, beside = run_eval_with_loss(network, loss_fn, *args, **kwargs)
    found, structure = take_apart(outputs)
    own = [o.detach().clone() if isinstance(o, torch.Tensor) else o for o in found]
    return loss, {"losses": beside, "outputs": structure.rebuild(own)}


def run_eval(
    network: nn.Module, loss_fn: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    """Outputs alone, as metrics need them."""
    inputs = args if loss_fn is None else args[:-1]
    return network(*inputs, **kwargs)


def run_eval_with_loss(
    network: nn.Module, loss_fn: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    """Loss, outputs, and the losses beside the loss."""
    if loss_fn is None:
        outputs = network(*args, **kwargs)
        return loss_of(outputs), outputs, losses_beside(outputs)
    *inputs, target = args
    outputs = network(*inputs, **kwargs)
    found = loss_fn(outputs, target)
    return loss_of(found, whose="loss_fn"), outputs, losses_beside(found)


def run_predict(
    network: nn.Module, loss_fn: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    """The network alone."""
    return network(*args, **kwargs)
