"""Train and eval mode of modules: the user's, but for the time of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from graphsplit.capture.graph import Mode
from graphsplit.errors import ConfigurationError
from graphsplit.torch_ext.function_modes import modes_of_users


def check_around(mode: Mode) -> None:
    """Refuse modes of torch around a step, before anything is told or planned.

    Autocast would reach backward and the optimizer, on some operations only; a function mode would
    see the calls of a capture, and none of those that steps make afterwards.

    Raises:
        ConfigurationError: One is on; or gradients are off around a step of training.
    """
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ConfigurationError(
            "torch.autocast is on around a call of the Model; it would reach beyond network and "
            "loss\n"
            "  Fix: Model(..., autocast=torch.bfloat16), or use torch.autocast inside forward."
        )
    if mode is Mode.TRAIN and not torch.is_grad_enabled():
        raise ConfigurationError(
            "gradients are switched off around a step of training (torch.no_grad, "
            "torch.set_grad_enabled, torch.inference_mode), where in plain PyTorch backward fails\n"
            "  Fix: leave that out, or use it inside forward."
        )
    if found := modes_of_users():
        raise ConfigurationError(
            f"{type(found[0]).__name__}, a TorchFunctionMode, is on around a call of the Model, "
            f"where it would not see what network and loss call\n"
            f"  Fix: use it inside forward."
        )


def ensure_training(network: nn.Module) -> None:
    """Put a network into train mode, unless it is: modules in it may be in eval mode on purpose."""
    if not network.training:
        network.train()


def begin_training(network: nn.Module) -> None:
    """Do what ``net.train()`` of a plain loop does; a module that is in eval mode stays so.

    A class may have a ``train`` of its own, which leaves some of its modules in eval mode.
    """
    if network.training and not any(map(_has_own_train, network.modules())):
        return
    modes = [(module, module.training or not network.training) for module in network.modules()]
    network.train()
    modes = [(module, module.training and was_training) for module, was_training in modes]
    for module, is_training in modes:
        if module.training is not is_training:
            module.train(is_training)
    for module, is_training in modes:
        module.training = is_training


def _has_own_train(module: nn.Module) -> bool:
    return type(module).train is not nn.Module.train or "train" in vars(module)


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
