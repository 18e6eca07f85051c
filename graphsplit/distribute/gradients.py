"""Gradients of parameters, as the script sees them: each on its worker, stand-ins elsewhere.

``p.grad`` gives the same answer on every worker: None, or a value that lives with the parameter.
Optimizers and the network's own backward see the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from graphsplit.cluster.wire.messages import ASKING
from graphsplit.distribute.parameters import InLoop, enter_loop
from graphsplit.distribute.values import LoopValue
from graphsplit.distribute.workers.asking import exchange
from graphsplit.distribute.workers.loop import Loop, empty_as
from graphsplit.errors import ConfigurationError
from graphsplit.job.script import ModelCall
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass
from graphsplit.torch_ext.stand_ins import StandIn


class Gradients:
    """The gradients of one network's parameters.

    Args:
        parameters: The parameters, in order.
        buffers: The buffers, which have none.
        owners: The owner of each.
        loop: The workers.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[torch.Tensor],
        owners: Mapping[int, int],
        loop: Loop,
    ) -> None:
        self._parameters = list(parameters)
        self._owners = owners
        self._loop = loop
        self._known: dict[int, LoopValue | None] = {}
        self._known_at = -1  # how many changes there were
        self._number = loop.num_settled  # the same on all workers
        for index, tensor in enumerate((*parameters, *buffers)):
            number = "parameter", index, "of network", self._number
            enter_loop(tensor, InLoop(loop, owners[id(tensor)], self.of, tensor, number))

    def of(self, parameter: torch.Tensor) -> LoopValue | None:
        """The gradient of a parameter; the first time after a change workers tell each other."""
        if self._known_at != self._loop.num_changes:
            call = ModelCall(f"{ASKING}{self._question}", self._learn)
            self._known = self._loop.job.script.collective(call)
            self._known_at = self._loop.num_changes
        return self._known.get(id(parameter))

    @property
    def _question(self) -> str:
        return f"grad of parameters of network {self._number}"

    def _learn(self) -> dict[int, LoopValue | None]:
        with self._loop.job.reporting(), DisableTorchFunctionSubclass():
            return self._exchanged()

    def _exchanged(self) -> dict[int, LoopValue | None]:
        rank = self._loop.rank
        own = [p for p in self._parameters if self._owners[id(p)] == rank]
        told = exchange(self._loop, self._question, "".join(map(_kind_of, own)))
        kinds = [iter(text) for text in told]
        found: dict[int, LoopValue | None] = {}
        for index, parameter in enumerate(self._parameters):
            owner = self._owners[id(parameter)]
            kind = next(kinds[owner])
            if kind == "s":
                raise ConfigurationError(
                    "the gradient of a parameter is sparse; the script's own loop can look at "
                    "dense ones only\n  Fix: make the embedding with sparse=False."
                )
            held = _shape_of(parameter) if isinstance(parameter, StandIn) else parameter.grad
            if kind == "1" and held is not None:
                number = "gradient", index, "of network", self._number
                found[id(parameter)] = LoopValue.of(held, owner, self._loop, number)
            else:
                found[id(parameter)] = None
        return found


def _kind_of(parameter: torch.Tensor) -> str:
    gradient = parameter.grad
    if gradient is None:
        return "0"
    return "1" if gradient.layout is torch.strided else "s"


def _shape_of(parameter: StandIn) -> torch.Tensor:
    """A stand-in for a gradient that is on another worker: laid out as the parameter is there."""
    return empty_as(parameter, parameter.true_strides())
