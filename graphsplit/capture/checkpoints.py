"""``torch.utils.checkpoint`` while a network is captured: what it runs is recorded, not kept whole.

A checkpoint changes what is kept in memory, not what is computed: its operations are recorded one
by one, can be placed like others, and nothing is computed twice. With ``use_reentrant=True`` there
are differences that bits show, and they are recorded too:

* If no argument asks for a gradient, nothing inside gets one, not even parameters.
* The gradients of an argument's uses inside are added to each other before they meet those of its
  uses outside: every argument gets an alias of its own.
* Those of a parameter go straight to ``.grad``. If other code uses it too, the order of the sum is
  another than that of any graph; such a parameter is refused.

With ``preserve_rng_state=False`` backward would draw other random numbers than forward did, after
all that forward draws; that is refused where something is drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.fx.traceback
from torch.fx import GraphModule, Node

from graphsplit.capture.operations.effects import is_random
from graphsplit.errors import CaptureError
from graphsplit.frames import users_line_of_node
from graphsplit.torch_ext.private import CHECKPOINT
from graphsplit.torch_ext.replaced import replaced

# Under this key the region that an operation stands in travels in ``node.meta["custom"]``:
# its number, whether it is reentrant, and whether its random numbers are drawn again.
CHECKPOINT_KEY = "graphsplit_checkpoint"
_numbers = itertools.count()
_watch: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("_watch")


def run_reentrant_checkpoint(
    function: Callable[..., Any], preserve_rng_state: bool, *args: Any
) -> Any:
    """Run what a reentrant checkpoint runs, recorded with its gradients in the right order."""
    asks = [isinstance(a, torch.Tensor) and a.requires_grad for a in args]
    if not any(asks):
        with torch.no_grad():
            return function(*args)
    inside = list(args)
    for index in reversed(range(len(args))):  # autograd adds the first argument's gradient first
        if asks[index]:
            inside[index] = torch.ops.aten.alias.default(args[index])
    noted = (next(_numbers), True, not preserve_rng_state)
    with torch.fx.traceback.annotate({CHECKPOINT_KEY: noted}), _watch.get(nullcontext)():
        return function(*inside)


@contextmanager
def checkpoints_watched(watch: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Let what each checkpoint runs be run in a block that ``watch`` gives."""
    before = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(before)


@contextmanager
def checkpoints_noted() -> Iterator[None]:
    """Note which operations other checkpoints run."""
    original = getattr(*CHECKPOINT)

    def generator(function: Any, preserve: bool, *args: Any, **kwargs: Any) -> Any:
        noted = (next(_numbers), False, not preserve)
        with torch.fx.traceback.annotate({CHECKPOINT_KEY: noted}), _watch.get(nullcontext)():
            yield from original(function, preserve, *args, **kwargs)

    with replaced(*CHECKPOINT, generator):
        yield


def check_checkpoints(graph_module: GraphModule, parameters: Mapping[str, str]) -> None:
    """Refuse checkpoints whose gradients no graph gives.

    Args:
        graph_module: The graph, calls that are kept whole in their places.
        parameters: For each placeholder that stands for a parameter, the parameter's name.

    Raises:
        CaptureError: Names the user's line.
    """
    users: dict[str, dict[Any, Node]] = {}
    for node in graph_module.graph.nodes:
        region = (node.meta.get("custom") or {}).get(CHECKPOINT_KEY)
        if region is not None and region[2] and is_random(node):
            raise _refusal(
                node,
                "draws random numbers in a checkpoint with preserve_rng_state=False, whose "
                "backward would draw others",
                "leave preserve_rng_state=False out",
            )
        for operand in node.all_input_nodes:
            if operand.name in parameters:
                key = region[0] if region is not None and region[1] else None
                users.setdefault(parameters[operand.name], {})[key] = node
    for name, by_region in users.items():
        reentrant = next((node for key, node in by_region.items() if key is not None), None)
        if reentrant is not None and len(by_region) > 1:
            raise _refusal(
                reentrant,
                f"uses {name.partition('.')[2]!r} in a checkpoint with use_reentrant=True, and "
                f"other code uses it too; their gradients would be added in another order",
                "pass use_reentrant=False to torch.utils.checkpoint",
            )


def _refusal(node: Node, what: str, way_out: str) -> CaptureError:
    return CaptureError(f"{node.target} {what}\n  {users_line_of_node(node)}\n  Fix: {way_out}.")
