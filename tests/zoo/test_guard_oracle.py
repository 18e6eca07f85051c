"""What TorchDynamo guards is watched by graphsplit too."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn
from zoo_batches import batches_by
from zoo_models import MODELS

from graphsplit.batches.signature import Signature
from graphsplit.capture.graph import Mode
from graphsplit.guards.check import Guards
from graphsplit.guards.values import Frozen, holder_of
from graphsplit.planning.passes import capture_graph
from graphsplit.planning.task import Task

_KINDS = frozenset(
    (
        "BOOL_MATCH",
        "CLOSURE_MATCH",
        "CONSTANT_MATCH",
        "DICT_CONTAINS",
        "DICT_KEYS_MATCH",
        "DICT_NOT_CONTAINS",
        "EQUALS_MATCH",
        "HASATTR",
        "ID_MATCH",
        "NONE_MATCH",
        "NOT_PRESENT_IN_GENERIC_DICT",
        "SEQUENCE_LENGTH",
    )
)
_SOURCE = re.compile(
    r"^(?P<base>.*?)"
    r"(?:\.(?P<name>[A-Za-z_]\w*)|\[(?P<key>'[^']*'|\d+|list\(dict\.keys\((?P=base)\)\)\[\d+\])\])$"
)
# What Dynamo guards and graphsplit does not watch, each with the reason.
_NOT_WATCHED = {
    r"^L\['network'\]$": "the network itself: a Model keeps its network",
    r"\.__class__\.call_super_init$": "of torch's own classes, which nobody changes",
    r"\.__dict__$": "the dictionary of attributes itself; its entries are watched one by one",
    r"\.act\.args$": "of a functools.partial, to which nothing can be assigned",
}
# Where Dynamo ends in an error of its own, the part that it can trace. Its trace of segformer's
# head gets other hidden states than transformers' hooks collect, and fails at their shapes.
_PARTS = {"segformer": "segformer"}


def _watched(guards: Guards) -> tuple[set[Any], set[int]]:
    """Holders and keys of places, and the containers that count whole."""
    places: set[Any] = set()
    containers: set[int] = set()

    def add(value: Any) -> None:
        if isinstance(value, Frozen):
            held = value.container
            containers.add(id(holder_of(held)))
            for item in value.items:
                add(item)

    for watched in guards.watched:
        places.add((id(watched.place.holder), watched.place.key))
        add(watched.value)
    return places, containers


def _sources(network: nn.Module, batch: Any, part: str) -> Iterator[str]:
    """What Dynamo guards below the network, while a part of it runs."""

    def run(network: nn.Module, batch: Any) -> Any:
        return network.get_submodule(part)(**batch)[0]

    dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo itself looks at attributes that warn
        guards = dynamo.explain(run)(network, dict(batch)).out_guards
    for guard in guards or ():
        if guard.create_fn_name() in _KINDS and guard.name.startswith("L['network']"):
            yield guard.name


def _is_watched(source: str, network: nn.Module, places: set[Any], containers: set[int]) -> bool:
    found = _SOURCE.match(source)
    assert found is not None, source
    scope = {"L": {"network": network}, "type": type, "dict": dict}
    owner, value = eval(found["base"], scope), eval(source, scope)
    if id(value) in containers or id(owner) in containers:
        return True
    if found["name"] is None:
        return (id(owner), eval(found["key"], scope)) in places
    held = getattr(owner, "__dict__", owner)
    holders = (held, owner, *type(owner).__mro__)
    return any((id(holder), found["name"]) in places for holder in holders)


def check(name: str) -> int:
    """Compare; gives how many of Dynamo's guards there were below the network."""
    model = MODELS[name]
    network, batch = model.make(), batches_by(model.batch)[0]
    task = Task(network, None, None, unplaced="affinity", with_loss=False)
    network.train()
    with torch.no_grad():
        network(**batch)  # transformers hangs hooks on modules when they run first
    graph = capture_graph(task, Mode.TRAIN, Signature.of(((), dict(batch))))
    places, containers = _watched(graph.state.guards)
    sources = list(_sources(network, batch, _PARTS.get(name, "")))
    unseen = [
        source
        for source in sources
        if not any(re.search(pattern, source) for pattern in _NOT_WATCHED)
        and not _is_watched(source, network, places, containers)
    ]
    assert not unseen, "\n".join(unseen)
    return len(sources)


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "vit"])
@pytest.mark.timeout(300)
def test_what_dynamo_guards_is_watched(name: str) -> None:
    assert check(name) > 100


@pytest.mark.zoo
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.timeout(600)
def test_what_dynamo_guards_is_watched_in_the_whole_zoo(name: str) -> None:
    check(name)  # where code breaks Dynamo's graphs, it guards less below the network
