"""How much may be under way on each worker before its backward must catch up.

More keeps nobody busy, but holds memory. On a straight pipeline the limits are the published ones;
for other graphs levels take the place of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from graphsplit.partition.segments import Segment
from graphsplit.schedule.tasks import Tasks


class WarmUp(Enum):
    """A rule for what may be under way.

    Attributes:
        NONE: No limit. What the others say is said of each lane of microbatches, and added.
        BY_LEVEL: As many microbatches as there are levels from the worker's first segment down to
            the last one (PipeDream-Flush, arXiv:2006.09503).
        BY_CHUNK: Counts forwards whose backward is still to run: for worker ``r`` of ``P``, with
            ``V`` segments, ``2 (P - r - 1) + (V - 1) P + 1`` (Megatron-LM, arXiv:2104.04473).
    """

    NONE = "none"
    BY_LEVEL = "by level"
    BY_CHUNK = "by chunk"

    def limits(self, tasks: Tasks, *, more: int = 0) -> list[int]:
        """How much may be under way, by worker.

        Args:
            tasks: The computations of a microbatch.
            more: How much more than the rule says.
        """
        plan = tasks.plan
        limits = [0] * plan.num_workers
        lanes: dict[int, list[Segment]] = {}
        for segment in plan.segments:
            lanes.setdefault(plan.lane_of(segment.nodes[0]), []).append(segment)
        for segments in lanes.values():
            for worker, limit in self._of_lane(tasks, segments).items():
                limits[worker] += limit
        return [max(1, limit + more) for limit in limits]

    def _of_lane(self, tasks: Tasks, segments: Sequence[Segment]) -> dict[int, int]:
        backward = [s for s in segments if tasks.backward(s.index) in tasks.waits]
        limits = {segment.worker: 1 for segment in segments}
        if self is WarmUp.BY_CHUNK:
            levels: dict[int, list[int]] = {}
            for segment in backward:
                levels.setdefault(segment.worker, []).append(segment.level)
            ranked = sorted(levels, key=lambda worker: (levels[worker][0], worker))
            for rank, worker in enumerate(ranked):
                behind, chunks = len(ranked) - rank - 1, len(levels[worker])
                limits[worker] = 2 * behind + (chunks - 1) * len(ranked) + 1
        else:
            last = max((segment.level for segment in backward), default=0)
            for segment in segments:
                limits[segment.worker] = max(limits[segment.worker], last - segment.level + 1)
        return limits
