"""Train and eval mode of modules: the user's, but for the time of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from torch import nn

from graphsplit.capture.graph import Mode
from graphsplit.errors import ConfigurationError


def refuse_around(is_cast: bool) -> NoReturn:
    """Refuse modes of torch around a step, before anything is told or planned.

    Autocast would reach backward and the optimizer, on some operations only.

    Args:
        is_cast: Whether autocast is on; else gradients are off around a step of training.

    Raises:
        ConfigurationError: Always.
    """
    if is_cast:
        raise ConfigurationError(
            "torch.autocast is on around a call of the Model; it would reach beyond network and "
            "loss\n"
            "  Fix: Model(..., autocast=torch.bfloat16), or use torch.autocast inside forward."
        )
    raise ConfigurationError(
        "gradients are switched off around a step of training (torch.no_grad, "
        "torch.set_grad_enabled, torch.inference_mode), where in plain PyTorch backward fails\n"
        "  Fix: leave that out, or use it inside forward."
    )


def ensure_training(network: nn.Module) -> None:
    """Put a network into train mode, unless it is: modules in it may be in eval mode on purpose."""
    if not network.training:
        network.train()


@contextmanager
def as_in(mode: Mode, network: nn.Module) -> Iterator[None]:
    """Let modules have the modes inside that a step of a mode would find; then those they had.

    By their own ``train``, which may do more: LoRA's takes out of the weight what ``eval`` added.
    """
    modes = [(module, module.training) for module in network.modules()]
    try:
        if mode is Mode.TRAIN:
            ensure_training(network)
        else:
            network.eval()
        yield
    finally:
        for module, is_training in modes:
            if module.training is not is_training:
                module.train(is_training)
                module.training = is_training


evaluating = partial(as_in, Mode.EVAL)
