"""What ``Model`` was given, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphsplit.errors import ConfigurationError
from graphsplit.runtime.update import rules_problems
from graphsplit.schedule.policies import NAMES, POLICIES
from graphsplit.train.metrics import Metric


def _problems_of_microbatches(microbatches: Any, split: Any, loss_weight: Any) -> list[str]:
    if not _is_count(microbatches, 1):
        return [f"microbatches={microbatches!r}; expected an int of 1 or more"]
    given = {"split": split, "loss_weight": loss_weight}
    problems = [
        f"{name} is a {type(value).__name__}; expected a function"
        for name, value in given.items()
        if value is not None and not callable(value)
    ]
    if microbatches == 1:
        problems += [
            f"{name} is given, but microbatches=1: a batch is not split"
            for name, value in given.items()
            if value is not None
        ]
    return problems


def _problems_of_schedule(schedule: Any, microbatches: Any) -> list[str]:
    if schedule not in NAMES:
        return [f"schedule={schedule!r}; expected one of {', '.join(NAMES)}"]
    if microbatches != 1 and schedule not in POLICIES:
        return [
            f"schedule={schedule!r} is not there yet for several microbatches; expected one of "
            f"{', '.join(POLICIES)}"
        ]
    return []


def check_arguments(
    net: Any,
    optimizer: Any,
    metrics: Mapping[str, Any],
    *,
    microbatches: int,
    split: Any,
    loss_weight: Any,
    schedule: str,
    capture: str,
    unplaced: str,
    dynamic_dims: Mapping[Any, Any],
    clip: Any,
    scaler: Any,
    autocast: Any,
    accumulate: Any,
) -> None:
    """Refuse arguments that are not as ``Model`` says; all of them are listed together.

    Raises:
        ConfigurationError: Some are not.
    """
    problems = [
        f"dynamic_dims has {dimension!r}: {largest!r}; expected a dimension of 0 or more, and the "
        f"largest size it may have, 2 or more"
        for dimension, largest in dynamic_dims.items()
        if not (_is_count(dimension, 0) and _is_count(largest, 2))
    ]
    if not isinstance(net, nn.Module):
        problems.append(f"net is a {type(net).__name__}; expected a torch.nn.Module")
    problems += rules_problems(optimizer, clip, scaler)
    if not _is_count(accumulate, 1):
        problems.append(f"accumulate={accumulate!r}; expected an int of 1 or more")
    if autocast is not None and not (
        isinstance(autocast, torch.dtype) and autocast.is_floating_point
    ):
        problems.append(f"autocast={autocast!r}; expected a dtype, as in torch.bfloat16")
    problems += [
        f"metric {name!r} is a {type(metric).__name__}; expected a graphsplit.metrics.Metric"
        for name, metric in metrics.items()
        if not isinstance(metric, Metric)
    ]
    problems += _problems_of_microbatches(microbatches, split, loss_weight)
    problems += _problems_of_schedule(schedule, microbatches)
    if capture != "auto":
        problems.append(f"capture={capture!r}; expected 'auto'")
    if unplaced not in ("affinity", "worker0"):
        problems.append(f"unplaced={unplaced!r}; expected 'affinity' or 'worker0'")
    if problems:
        raise ConfigurationError("Model(...): " + "\n  ".join(problems))


def _is_count(number: Any, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least
