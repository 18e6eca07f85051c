"""Inputs that forward or the loss writes to: every worker that holds the batch gets the new values.

In one process there is one batch, and what was written stays in it: for the metrics, for the next
epoch over the same tensors, for the script. Here only the worker that runs the operation sees it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from graphsplit.job.control import ControlChannels
from graphsplit.planning.ready_plan import ReadyPlan
from graphsplit.tensor_meta import plain_meta


def share_written(
    control: ControlChannels, planned: ReadyPlan, inputs: Sequence[Any], holders: Collection[int]
) -> None:
    """Give what was written to all workers that hold the batch. All of these call it.

    Args:
        control: The channels of the job.
        planned: What has run.
        inputs: This worker's flattened inputs of one microbatch.
        holders: The workers that hold the batch.
    """
    for index, ranks in planned.written_inputs:
        tensor, source = inputs[index], ranks[0]
        waiting = sorted(set(holders).difference(ranks))
        if control.rank == source:
            control.send(tensor, to=waiting)
        elif control.rank in waiting:
            with torch.no_grad():
                tensor.copy_(control.receive_tensor(plain_meta(tensor), source=source))
