"""Train and eval mode of modules: the user's, but for the time of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from graphsplit.capture.graph import Mode


def ensure_training(network: nn.Module) -> None:
    """Put a network into train mode, unless it is: modules in it may be in eval mode on purpose."""
    if not network.training:
        network.train()


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Let a network be in eval mode inside; afterwards each module has the mode that it had."""
    with _modes_kept(network):
        network.eval()
        yield


@contextmanager
def as_in(mode: Mode, network: nn.Module) -> Iterator[None]:
    """Let modules have the modes inside that a step of a mode would find."""
    with _modes_kept(network):
        if mode is Mode.TRAIN:
            ensure_training(network)
        else:
            network.eval()
        yield


@contextmanager
def _modes_kept(network: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in network.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
