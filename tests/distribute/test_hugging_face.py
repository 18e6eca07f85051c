"""A network of transformers under its users' trainers, on workers that are threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, raised
from loops import small
from recovery_helpers import ThreadCluster, threads_as_workers
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import graphsplit as gs
from graphsplit.batches.signature import Signature
from graphsplit.errors import ConfigurationError
from graphsplit.integrations.workers import distributed, on_main
from graphsplit.job import joined

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


def test_what_trainers_import_leaves_the_function_its_name() -> None:
    assert callable(gs.distribute)


@pytest.mark.parametrize("by_the_script", [False, True])
def test_generating_is_refused_by_name(by_the_script: bool) -> None:
    def generating(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        job = joined.current()
        assert job is not None
        net = GPT2LMHeadModel(
            GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
        )
        if by_the_script:  # to say which sizes change
            gs.distribute(net, dynamic_dims={1: 8})
        net = distributed(net, job)
        assert distributed(net, job) is net
        yield net.generate(torch.zeros(1, 2, dtype=torch.long))

    assert "generate() was called on a network that is distributed" in raised(generating)


def test_a_cache_that_is_handed_back_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigurationError, match=r"a batch holds a DynamicCache") as refused:
        Signature.of(((torch.ones(1, 2),), {"past_key_values": DynamicCache()}))
    assert "Fix: pass all tokens to each call, with use_cache=False" in str(refused.value)


def test_what_a_library_looks_at_while_it_saves_leaves_workers_alike() -> None:
    """As peft does: it asks a part of the network for its keys, on the worker that saves."""

    def saving(rank: int) -> list[float]:
        job = joined.current()
        assert job is not None
        torch.manual_seed(0)
        net, losses = distributed(small([0, 1, 0]), job), []
        for _ in range(2):
            loss = net(torch.randn(6, 8)).square().sum()
            loss.backward()
            losses.append(loss.item())
            on_main(job, lambda: [*net.last.state_dict()], [net], [])
        return losses

    first, second = ThreadCluster(saving, 2, is_recoverable=False).run()
    assert first == second
