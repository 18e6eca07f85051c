"""The memory that segments keep for backward, as estimated before anything was measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pass_helpers import captured, placed
from torch import nn

from graphsplit.partition.edges import partition
from graphsplit.partition.recomputation import with_recomputation
from graphsplit.schedule.saved_memory import saved_bytes


class Block(nn.Module):
    """Attention, dropout, norms, views: much that is saved once, in part, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(self.norm(x)).view(-1, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        h = self.drop(F.gelu(self.outer(h))) * self.scale + x
        with torch.no_grad():
            factor = h.mean().exp()
        return (h * factor).sum((1, 2))


def saved_by_eager(network: nn.Module, run: Callable[[], torch.Tensor]) -> int:
    """The bytes of memory that autograd saves, without parameters and buffers."""
    memories = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        memories[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = run()
    for state in (*network.parameters(), *network.buffers()):
        memories.pop(state.untyped_storage().data_ptr(), None)
    assert kept.requires_grad
    return sum(memories.values())


@pytest.mark.parametrize("recompute", [False, True])
def test_the_estimate_is_what_autograd_saves(recompute: bool) -> None:
    network, loss_fn = Block(), nn.MSELoss()
    x, target = torch.randn(4, 8, 16), torch.randn(4)
    graph = captured(network, x, target, loss_fn=loss_fn)
    plan = partition(placed(network, graph, num_workers=1, loss_fn=loss_fn))
    (found,) = saved_bytes(with_recomputation(plan, recompute)).values()
    if recompute:  # what goes into the group: the inputs
        assert found == x.nbytes + target.nbytes
    else:
        assert found == saved_by_eager(network, lambda: loss_fn(network(x), target))
