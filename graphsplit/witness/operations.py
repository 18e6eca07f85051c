"""Notes every operation of a training step, on a worker or in the plain loop.

Operations are seen where autograd hands them to their kernels: there both sides run the same ones,
whatever they are called above. On a worker the line of generated code that is running tells which
node of the captured graph an operation belongs to; in the plain loop the stack tells the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from graphsplit.capture.graph import LOSS_PATH, Node
from graphsplit.check.record import Operation
from graphsplit.frames import line_now, short_path
from graphsplit.planning.task import Task
from graphsplit.program.instruction import Opcode
from graphsplit.runtime.runner import ProgramRunner
from graphsplit.torch_ext.private import TorchDispatchMode, leaves_of
from graphsplit.witness.values import digest_of

# What they return is whatever the memory held before.
_UNSET = frozenset(
    getattr(packet, overload)
    for packet in (
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.empty_permuted,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    )
    for overload in packet.overloads()
)
Note = Callable[[Operation], None]
_Describe = Callable[[str, tuple[str, ...], FrameType], Operation]


class _Watch(TorchDispatchMode):
    """Notes what runs inside it."""

    def __init__(self, describe: _Describe, note: Note) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._describe = describe
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _UNSET:
            return result
        made = leaves_of(torch.Tensor, result)
        digests = tuple(digest_of(one) for one in made if not one.is_meta)
        if digests:
            self._note(self._describe(str(func), digests, sys._getframe(1)))
        return result


class WorkersOperations:
    """Watches the programs that one worker runs in a step.

    Args:
        note: Takes each operation.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self._num_phases = 0

    @contextmanager
    def watching(self, runner: ProgramRunner) -> Iterator[None]:
        """Watch the run of one program."""
        phase, self._num_phases = self._num_phases, self._num_phases + 1

        def describe(name: str, digests: tuple[str, ...], frame: FrameType) -> Operation:
            instruction = runner.next_instruction()
            node = None
            if instruction is not None and instruction.opcode is Opcode.FORWARD:
                node = _node_of(runner, frame)
            if node is None or instruction is None:
                return Operation(name, digests)
            position = positions[node.name]
            return Operation(
                name,
                digests,
                order=(phase, instruction.microbatch, position),
                target=node.target,
                module=node.module_path,
                source=short_path(node.source),
                reads=_state_names(nodes, node),
            )

        nodes = runner.nodes
        positions = {node.name: position for position, node in enumerate(nodes)}
        with _Watch(describe, self._note):
            yield


def _node_of(runner: ProgramRunner, frame: FrameType | None) -> Node | None:
    while frame is not None:
        node = runner.node_at(frame.f_code.co_filename, frame.f_lineno)
        if node is not None:
            return node
        frame = frame.f_back
    return None


def _state_names(nodes: tuple[Node, ...], node: Node) -> tuple[str, ...]:
    return tuple(nodes[read].target for read in node.reads if nodes[read].is_state)


@contextmanager
def watching_plain_loop(task: Task, note: Note) -> Iterator[None]:
    """Watch a step of the plain loop."""
    paths = {id(module): path for path, module in task.network.named_modules()}
    if isinstance(task.loss_fn, nn.Module):
        paths.update(
            (id(module), f"{LOSS_PATH}.{path}" if path else LOSS_PATH)
            for path, module in task.loss_fn.named_modules()
        )
    count = 0

    def describe(name: str, digests: tuple[str, ...], frame: FrameType) -> Operation:
        nonlocal count
        count += 1
        module = _module_of(paths, frame)
        return Operation(name, digests, order=(count,), module=module, source=line_now(frame))

    with _Watch(describe, note):
        yield


def _module_of(paths: Mapping[int, str], frame: FrameType | None) -> str | None:
    """The path of the innermost module whose method is running."""
    while frame is not None:
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if isinstance(owner, nn.Module) and id(owner) in paths:
            return paths[id(owner)]
        frame = frame.f_back
    return None
