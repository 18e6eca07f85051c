"""Random numbers that PyTorch draws once more in backward, where no plan can give them.

In training, the backward of ``torch.cond`` and of loops runs the branch or the body again, and
does not put the generator back as ``torch.utils.checkpoint`` does. So what is random inside draws
from where all of forward, and the backward before it, have left the generator. Only a worker that
runs everything, one whole batch at a time, has its generator there.
"""

from __future__ import annotations

from graphsplit.capture.graph import NodeKind
from graphsplit.errors import PlacementError
from graphsplit.placement.resolve import PlacedGraph
from graphsplit.placement.whole import branches_and_loops


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
