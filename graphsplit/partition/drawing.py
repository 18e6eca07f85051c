"""Who draws from Python's and NumPy's generators, where microbatches do not have their own.

PyTorch's generator starts anew for each microbatch. Python's and NumPy's run on through them, as in
the plain loop that accumulates gradients: so one segment draws, microbatch after microbatch, and
tells the others its state.
"""

from __future__ import annotations

from collections.abc import Collection

from graphsplit.capture.graph import CapturedGraph
from graphsplit.capture.operations.opaque_call import OpaqueCall
from graphsplit.capture.reach.holders import NUMPYS, PYTHONS
from graphsplit.partition.segments import Segmentation

OF_THE_PROCESS: Collection[int] = (id(PYTHONS), id(NUMPYS))


def drawing_node(graph: CapturedGraph, segmentation: Segmentation) -> int | None:
    """The last operation of the one segment that draws; None if there is none.

    Args:
        graph: The graph.
        segmentation: Its segments.
    """
    able = [p for p, node in enumerate(graph.nodes) if node.draws_from_process]
    seen = [p for p in able if _was_seen(graph, p)]
    found = seen or able
    is_one = len({segmentation.segment_of[p] for p in found}) == 1
    return found[-1] if is_one else None


def _was_seen(graph: CapturedGraph, position: int) -> bool:
    call = graph.fx_nodes[graph.nodes[position].name].target
    return isinstance(call, OpaqueCall) and call.reached.drew_from_process()
