"""Random numbers that PyTorch draws once more in backward, where no plan can give them.

In training, the backward of ``torch.cond`` and of loops runs the branch or the body again, and
does not put the generator back as ``torch.utils.checkpoint`` does. So what is random inside draws
from where all of forward, and the backward before it, have left the generator. Only a worker that
runs everything, one whole batch at a time, has its generator there.
"""

from __future__ import annotations

from graphsplit.capture.graph import CapturedGraph, Node, NodeKind
from graphsplit.errors import PlacementError
from graphsplit.placement.resolve import PlacedGraph
from graphsplit.placement.whole import branches_and_loops
from graphsplit.tensor_meta import CPU


def refuse_redrawn(placed: PlacedGraph, *, is_microbatched: bool) -> None:
    """Refuse what draws random numbers in backward, unless one worker runs all at once.

    Args:
        placed: The graph, every node with its worker.
        is_microbatched: Whether the plan is for microbatches.

    Raises:
        PlacementError: Names the user's line.
    """
    graph = placed.graph
    if not graph.has_gradients:
        return
    nodes = graph.nodes
    used = {w for w, n in zip(placed.workers, nodes, strict=True) if n.kind is NodeKind.OPERATION}
    if len(used) == 1 and not is_microbatched:
        return
    for position in branches_and_loops(graph):
        node = nodes[position]
        if node.is_random and node.requires_grad:
            where = "with several microbatches" if len(used) == 1 else "over several workers"
            raise PlacementError(
                f"{node.name} ({node.target}) draws random numbers in a branch or loop, and "
                f"PyTorch draws others when it runs that again in backward; {where} they would "
                f"not be those of one process\n  {node.source}\n"
                f"  Fix: draw outside, and pass what was drawn as an operand: "
                f"mask = F.dropout(torch.ones_like(x), p) and x * mask inside."
            )


def refuse_draws_on_devices(placed: PlacedGraph) -> None:
    """Refuse what draws from a device's own generator in a job of several workers.

    The generators that go from worker to worker are the CPU's, Python's and NumPy's.

    Raises:
        PlacementError: Names the user's line.
    """
    if placed.num_workers == 1:
        return
    for node in placed.graph.nodes:
        if node.is_random and (device := _device_of(node, placed.graph)) != CPU:
            raise PlacementError(
                f"{node.name} ({node.target}) draws random numbers on {device}, and {device} has a "
                f"generator of its own on each worker: what is drawn would not be what one process "
                f"draws\n  {node.source}\n"
                f"  Fix: draw on the CPU and move what was drawn, as in "
                f"mask = F.dropout(torch.ones(x.shape), p) and x * mask.to(x.device)."
            )


def _device_of(node: Node, graph: CapturedGraph) -> str:
    """The device, other than a CPU, of what an operation makes or reads; else a CPU."""
    made = [n.meta for n in graph.nodes if n.with_producer and graph.nodes[n.reads[0]] is node]
    metas = [node.meta, *made, *(graph.nodes[r].meta for r in node.reads)]
    return next((m.device for m in metas if m is not None and m.device != CPU), CPU)
