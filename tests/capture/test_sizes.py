"""Graphs that hold for many sizes: when they do, and the numbers they compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphsplit.batches import step_functions
from graphsplit.capture.export import CaptureRequest, capture
from graphsplit.capture.graph import CapturedGraph, Mode, NodeKind
from graphsplit.errors import CaptureError, ConfigurationError
from graphsplit.tensor_meta import DynamicSize, TensorMeta

LARGEST = {0: 32, 1: 64}


def captured(network: nn.Module, *inputs: torch.Tensor) -> CapturedGraph:
    request = CaptureRequest(
        network, None, step_functions.run_predict, Mode.PREDICT, None, inputs, {}, LARGEST
    )
    return capture(request)


class _Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        return (x + 1).reshape(columns, rows) * (0.1 * columns * 0.3)


def test_a_graph_holds_for_other_sizes() -> None:
    sizes = captured(_Scaled(), torch.ones(4, 8)).sizes
    assert sizes is not None
    symbols = sizes.bind([torch.ones(7, 50)])
    assert symbols is not None and sorted(symbols.values()) == [7, 50]


def test_numbers_are_those_of_python() -> None:
    graph = captured(_Scaled(), torch.ones(4, 8))
    assert graph.sizes is not None
    symbols = graph.sizes.bind([torch.ones(3, 7)])
    assert symbols is not None
    assert 0.1 * 7 * 0.3 in graph.sizes.compute(symbols).values()
    assert 0.1 * 7 * 0.3 != 0.03 * 7  # how sympy writes it


def test_numbers_are_everywhere_and_read_nothing() -> None:
    numbers = [n for n in captured(_Scaled(), torch.ones(4, 8)).nodes if n.kind is NodeKind.NUMBER]
    assert numbers
    assert all(node.is_everywhere and not node.reads for node in numbers)


@pytest.mark.parametrize("shape", [(1, 8), (33, 8), (4, 65), (0, 8)])
def test_sizes_out_of_range_are_not_admitted(shape: tuple[int, int]) -> None:
    sizes = captured(_Scaled(), torch.ones(4, 8)).sizes
    assert sizes is not None
    assert sizes.bind([torch.ones(shape)]) is None


class _Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] % 2 == 0 else x


def test_a_branch_on_a_size_is_a_condition() -> None:
    sizes = captured(_Branching(), torch.ones(4, 8)).sizes
    assert sizes is not None
    assert sizes.bind([torch.ones(4, 10)]) is not None
    assert sizes.bind([torch.ones(4, 9)]) is None


class _Adding(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def test_sizes_that_must_agree_are_compared() -> None:
    sizes = captured(_Adding(), torch.ones(4, 8), torch.ones(4, 8)).sizes
    assert sizes is not None
    assert sizes.bind([torch.ones(5, 9), torch.ones(5, 9)]) is not None
    assert sizes.bind([torch.ones(5, 9), torch.ones(5, 8)]) is None


def test_other_strides_are_not_admitted() -> None:
    sizes = captured(_Scaled(), torch.ones(4, 8)).sizes
    assert sizes is not None
    assert sizes.bind([torch.ones(8, 4).t()]) is None


def test_values_are_described_by_their_largest_size() -> None:
    graph = captured(_Scaled(), torch.ones(4, 8))
    node = next(n for n in graph.nodes if n.target == "aten.reshape.default")
    assert node.meta is not None
    assert node.meta.shape == (64, 32)
    assert node.meta.static_shape == (None, None)
    assert node.meta.size_bytes == 64 * 32 * 4
    assert all(isinstance(size, DynamicSize) for size in node.meta.shape)


def test_a_batch_above_the_largest_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"shape \[4, 65\].*dimension 1 is at most 64"):
        captured(_Scaled(), torch.ones(4, 65))


def test_without_dynamic_dimensions_there_is_nothing_to_bind() -> None:
    request = CaptureRequest(
        _Scaled(), None, step_functions.run_predict, Mode.PREDICT, None, (torch.ones(4, 8),), {}
    )
    assert capture(request).sizes is None


def test_a_static_size_is_a_plain_number() -> None:
    assert TensorMeta.of(torch.ones(2, 3)).static_shape == (2, 3)


class _Selecting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0] * 2


class _Reading(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.max().item()


@pytest.mark.parametrize("network", [_Selecting(), _Reading()])
@pytest.mark.parametrize("largest", [{}, LARGEST])
def test_sizes_that_values_decide_are_refused_by_line(
    network: nn.Module, largest: dict[int, int]
) -> None:
    request = CaptureRequest(
        network,
        None,
        step_functions.run_predict,
        Mode.PREDICT,
        None,
        (torch.ones(4, 8),),
        {},
        largest,
    )
    refusal = r"on the values of a tensor[^\n]*\n  .*test_sizes.py:\d+"
    with pytest.raises(CaptureError, match=refusal):
        capture(request)
