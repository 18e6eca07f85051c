"""``loss.backward()`` on a value of the script's own loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphsplit.distribute.calls import Call, calls_behind
from graphsplit.distribute.values import SPECIAL, LoopValue
from graphsplit.errors import ConfigurationError
from graphsplit.job.script import ModelCall
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.partition.checks.given_roots import unordered_parameters
from graphsplit.runtime.segments.autograd import accumulate_all
from graphsplit.torch_ext.attributes import GRADIENT_HOOKS
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass


def _backward(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _refuse(*args, **kwargs)
    value, gradient = args[0], (args[1:2] or (kwargs.get("gradient"),))[0]
    retain = bool((args[2:3] or (kwargs.get("retain_graph"),))[0])
    job = value.loop.job
    job.script.collective(ModelCall("backward", _run, (value, gradient, retain)))


def _refuse(
    value: LoopValue,
    gradient: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    if create_graph:
        raise ConfigurationError(
            "backward(create_graph=True) through a distributed network: gradients of gradients "
            "stop at the network's edge\n"
            "  Fix: compute the penalty inside the network's forward."
        )
    if inputs is not None:
        raise ConfigurationError(
            "backward(inputs=...) through a distributed network cannot leave parameters out\n"
            "  Fix: set requires_grad_(False) on the others before the call of the network."
        )


def _run(value: LoopValue, gradient: Any, retain: bool) -> None:
    loop = value.loop
    calls = list(calls_behind(value.held))
    _refuse_spent(calls)
    if isinstance(gradient, LoopValue):
        gradient = gradient.at(value.home)
    elif isinstance(gradient, torch.Tensor) and loop.rank != value.home:
        gradient = gradient.to("meta")
    totals: dict[int, torch.Tensor] | None = None
    if len(calls) > 1:
        _refuse_unordered(calls)
        totals = {}
    for call in calls:
        call.state.totals = totals
    with loop.job.reporting(), DisableTorchFunctionSubclass():
        torch.autograd.backward([value.held], [gradient], retain_graph=retain)
        if totals:
            _add(calls, totals)
    loop.num_changes += 1


def _add(calls: Sequence[Call], totals: dict[int, torch.Tensor]) -> None:
    """Add once to ``.grad`` what all calls have given together."""
    known = {id(p): p for call in calls for p in call.network.planner.parameters}
    with torch.no_grad():
        accumulate_all([known[key] for key in totals], list(totals.values()), ())


def _refuse_spent(calls: Sequence[Call]) -> None:
    if any(call.is_spent for call in calls):
        raise ConfigurationError(
            "backward through a call of a distributed network for a second time: what it kept "
            "was freed by the first one, with retain_graph=True as well\n"
            "  Fix: add the losses and call backward once, as in (first + second).backward(); or "
            "call the network again."
        )


def _refuse_unordered(calls: Sequence[Call]) -> None:
    """Refuse sums over several calls whose order is unknown; alike on all workers."""
    uses: Counter[int] = Counter()
    for call in calls:
        placed = call.plan.plan.placed
        unordered = unordered_parameters(call.plan.plan)
        names = call.network.planner_tensors()
        for position in placed.graph.state_names:
            tensor = names[placed.graph.nodes[position].target]
            uses[id(tensor)] += 1
            if uses[id(tensor)] < 2:
                continue
            if position in unordered:
                raise ConfigurationError(
                    f"{placed.graph.nodes[position].target} is used several times in one "
                    f"operation, on another worker, by several calls under one backward(): the "
                    f"order of its gradients is not known\n"
                    f"  Fix: place what uses it with it, or call backward for each call."
                )
            if not is_elsewhere(tensor) and getattr(tensor, GRADIENT_HOOKS, None):
                raise ConfigurationError(
                    f"{placed.graph.nodes[position].target} has a hook (register_hook), and is "
                    f"used by several calls of the network under one backward()\n"
                    f"  Fix: use register_post_accumulate_grad_hook, or call backward for each."
                )


SPECIAL["backward"] = _backward
