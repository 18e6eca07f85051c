"""The task of a Model, and the tensors that its network and loss hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from graphsplit.batches.microbatches import Divider
from graphsplit.capture.graph import LOSS_PATH, Mode
from graphsplit.capture.reach.ways import Ways
from graphsplit.deferred.construction import is_deferred, materialize
from graphsplit.errors import ConfigurationError
from graphsplit.marks.annotations import Annotation, annotations_of
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.optimizers.update import UpdateRules
from graphsplit.placement.resolve import UnplacedRule
from graphsplit.program.lower import (
    Policy,
)
from graphsplit.runtime.segments.compiled import Compiler
from graphsplit.runtime.segments.part_sums import PartSums
from graphsplit.torch_ext.attributes import named_tensors

ReadBy = Literal["rows", "batches"]


@dataclass
class Task(UpdateRules):
    """All that a Model runs, apart from the batch. A Model may swap its loss and optimizer.

    Attributes:
        network: The user's network.
        loss_fn: The loss, or None.
        optimizer: The optimizer, several that are stepped one after the other, or None.
        unplaced: The rule for operations that nobody placed.
        with_loss: Whether the eval graph computes the loss.
        dynamic_dims: Dimensions of the batch that may change without a new plan, with the largest
            size of each.
        divider: How batches become microbatches in training.
        autocast: The lower dtype, if network and loss run under autocast.
        schedule: In which order workers compute microbatches: a name, or a policy.
        compiler: Compiles segments, or None.
        recompute: Whether backward runs forward again instead of keeping what it saves: of
            everything, or of the modules with these paths.
        keep_outputs: Whether training steps hand out what the network returned.
        reading: Whether replicas read their own rows of a batch where that is safe, or all of it.
        ways: The ways to Python state from network and loss, where workers may come back.
    """

    network: nn.Module
    loss_fn: Callable[..., Any] | None
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
    unplaced: UnplacedRule
    with_loss: bool
    dynamic_dims: Mapping[int, int] = field(default_factory=dict)
    divider: Divider = field(default_factory=Divider)
    autocast: torch.dtype | None = None
    schedule: str | Policy = "1f1b"
    compiler: Compiler | None = None
    recompute: bool | tuple[str, ...] = False
    keep_outputs: bool = False
    reading: ReadBy = "rows"
    ways: Ways | None = None

    @property
    def num_kept(self) -> int:
        """How many parts of a gradient are kept apart until a step of several batches ends."""
        most = self.divider.num_microbatches
        is_kept = self.accumulate_by == "microbatch" and self.accumulate > 1 and most > 1
        return most if is_kept else 0

    @property
    def part_sums(self) -> PartSums | None:
        """The sums of the gradients of microbatches; None: one after the other, in ``.grad``."""
        if self.gradient_order == "left" and not self.num_kept:
            return None
        by_microbatch, dtype = self.num_kept > 0, self.gradient_dtype
        return PartSums(self.gradient_order, by_microbatch=by_microbatch, dtype=dtype)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All optimizers, in the order in which they are stepped."""
        if isinstance(self.optimizer, torch.optim.Optimizer):
            return (self.optimizer,)
        return tuple(self.optimizer or ())


def stateful_modules(task: Task) -> list[nn.Module]:
    """The modules that may hold parameters: the network, and a loss that is a module."""
    return [m for m in (task.network, task.loss_fn) if isinstance(m, nn.Module)]


def state_names(task: Task, module: nn.Module, names: Iterable[str]) -> list[str]:
    """The names of a task's state that are in a stateful module, as the module has them."""
    prefix = "" if module is task.network else f"{LOSS_PATH}."
    return [
        name.removeprefix(prefix)
        for name in names
        if name.startswith(prefix) and name.startswith(LOSS_PATH) == bool(prefix)
    ]


def trainable_of(task: Task) -> tuple[nn.Parameter, ...]:
    """The parameters of the network, and of a loss that is a module."""
    return tuple(parameter for m in stateful_modules(task) for parameter in m.parameters())


def materialize_all(task: Task) -> None:
    """Give everything its memory: what one process does with a network built deferred."""
    for module in stateful_modules(task):
        if is_deferred(module):
            materialize(module)


def named_state(network: nn.Module, loss_fn: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, those of the loss included; tied ones under each name."""
    found = named_tensors(network)
    if isinstance(loss_fn, nn.Module):
        found |= {f"{LOSS_PATH}.{name}": t for name, t in named_tensors(loss_fn).items()}
    return found


def module_annotations(network: nn.Module, loss_fn: Any) -> dict[str, Annotation]:
    """The placement written on each module, by module path."""
    found = annotations_of(network)
    if isinstance(loss_fn, nn.Module):
        for path, annotation in annotations_of(loss_fn).items():
            found[f"{LOSS_PATH}.{path}" if path else LOSS_PATH] = annotation
    return found


def check_trained(
    task: Task, before: Sequence[torch.optim.Optimizer] = ()
) -> tuple[torch.optim.Optimizer, ...]:
    """Refuse parameters that the captured graph will not know: nobody would train them.

    Args:
        task: What is trained.
        before: Optimizers that were there before: they may still have what the network had.

    Returns:
        All optimizers.
    """
    known = {id(tensor) for tensor in named_state(task.network, task.loss_fn).values()}
    for optimizer in [one for one in task.optimizers if not any(one is b for b in before)]:
        groups = optimizer.param_groups
        unknown = [p for group in groups for p in group["params"] if id(p) not in known]
        if unknown:
            raise ConfigurationError(
                f"{type(optimizer).__name__} has {len(unknown)} parameter(s) that are neither in "
                f"net nor in loss_fn, the first of shape {list(unknown[0].shape)}\n"
                f"  Fix: make the optimizer from net.parameters(), after the last change to net; "
                f"pass the module that has them as loss_fn, not a function around it."
            )
    return task.optimizers


def check_held(task: Task, mode: Mode, constants: Iterable[torch.Tensor]) -> None:
    """Refuse to train a parameter that forward uses, and that is in no module any more.

    Args:
        task: Has the optimizers.
        mode: Of the step: only one of training trains.
        constants: What the captured graph holds besides parameters and buffers.
    """
    if mode is not Mode.TRAIN:
        return
    known = {id(tensor) for tensor in named_state(task.network, task.loss_fn).values()}
    held = {constant.data_ptr() for constant in constants if constant.numel()}
    for parameter in (p for o in task.optimizers for g in o.param_groups for p in g["params"]):
        if id(parameter) in known or is_elsewhere(parameter) or not parameter.requires_grad:
            continue
        if parameter.data_ptr() in held:
            raise ConfigurationError(
                f"forward uses a parameter of shape {list(parameter.shape)} that the optimizer "
                f"trains, and that is in no module of net or loss_fn any more\n"
                f"  Fix: keep the module that has it as an attribute of a module in net."
            )


def describe_optimizers(task: Task) -> str:
    """The optimizer's class and settings: workers whose scripts differ only there must notice."""
    names = {id(t): n for n, t in named_state(task.network, task.loss_fn).items()}
    lines = [task.describe_rules()]
    for optimizer in task.optimizers:
        lines.append(f"optimizer {type(optimizer).__name__}")
        for group in optimizer.param_groups:
            settings = {k: v for k, v in group.items() if k != "params"}
            members = [names.get(id(p), "a parameter of no module") for p in group["params"]]
            lines.append(f"  group {settings!r}: {', '.join(members)}")
    return "\n".join(lines)
