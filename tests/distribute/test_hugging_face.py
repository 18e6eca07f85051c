"""A network of transformers under its users' trainers, on workers that are threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, raised
from recovery_helpers import threads_as_workers
from transformers import GPT2Config, GPT2LMHeadModel

import graphsplit as gs
from graphsplit.integrations.workers import distributed
from graphsplit.job import joined

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


def test_what_trainers_import_leaves_the_function_its_name() -> None:
    assert callable(gs.distribute)


def test_generating_is_refused_by_name() -> None:
    def generating(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        job = joined.current()
        assert job is not None
        net = GPT2LMHeadModel(
            GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
        )
        net = distributed(net, job)
        assert distributed(net, job) is net
        yield net.generate(torch.zeros(1, 2, dtype=torch.long))

    assert "generate() was called on a network that is distributed" in raised(generating)
