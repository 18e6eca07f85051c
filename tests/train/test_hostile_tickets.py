"""Tickets from somebody who means harm: nothing is made, called, imported or allocated."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from graphsplit.batches import records
from graphsplit.batches.signature import Signature
from graphsplit.batches.signature_text import check_signature_text
from graphsplit.errors import ConfigurationError, FrameError
from graphsplit.feeding.tickets import Described, News, Ticket, Tickets, ticket_of
from graphsplit.job.process_generators import STATE_BYTES

MADE: list[object] = []


def ticket(text: str) -> bytes:
    return ticket_of(0, News(Described(Signature.read(text).digest, text)))


def receive(data: bytes) -> Ticket:
    octets = torch.tensor(list(data), dtype=torch.uint8)
    channel = SimpleNamespace(receive=lambda step, microbatch: octets)
    control = SimpleNamespace(ticket_receiver=lambda source: channel)
    job = SimpleNamespace(rank=1, control=control, is_stopping=False)
    return Tickets(cast(Any, job)).receive(3)


def batch_of(node: object) -> str:
    return json.dumps({"u": [{"u": [node]}, {"d": []}]})


def tensor(dtype: object = "float32", shape: object = (2,), strides: object = (1,)) -> str:
    return batch_of({"t": [dtype, shape, strides]})


@pytest.mark.parametrize(
    "text",
    [
        batch_of({"r": ["m", "C", [["x", {"t": ["float32", [2], [1]]}]]]}),
        Signature.of(((torch.zeros(2, 3).t(), [1, {"a": (None, True)}]), {"b": 0.5})).text,
    ],
)
def test_a_ticket_as_it_should_be_is_read(text: str) -> None:
    shape = receive(ticket(text)).shape
    assert shape is not None and shape.whole.text == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 30_000, "its text is no JSON"),
        ("{", "its text is no JSON"),
        ("[]", "expected positional and named arguments"),
        (json.dumps({"u": [{"u": []}, {"d": []}], "r": []}), "expected positional and named"),
        (batch_of([1]), "expected one kind of value"),
        (batch_of({"x": 1}), "expected a tensor, a plain value or a container"),
        (batch_of({"v": [1]}), "expected a tensor, a plain value or a container"),
        (batch_of({"d": [[None, {"v": 1}]]}), "expected a key and a value"),
        (batch_of({"r": ["os", "system", [[1, {"v": 1}]]]}), "expected a key and a value"),
        (tensor("load"), "expected a dtype, got load"),
        (tensor("hub"), "expected a dtype, got hub"),
        (tensor("float32", [1 << 40], [1]), "expected at most the"),
        (tensor("float32", [2, 2], [1 << 45, 1]), "expected at most the"),
        (tensor("float32", [-1], [1]), "expected sizes and strides"),
        (tensor("float32", [1.5], [1]), "expected sizes and strides"),
        (tensor("float32", [True], [1]), "expected sizes and strides"),
        (tensor("float32", [1 << 63], [1]), "expected sizes and strides"),
        (tensor("float32", [2], []), "expected as many strides as sizes"),
        (tensor("float32", [1] * 65, [1] * 65), "expected as many strides as sizes"),
    ],
)
def test_a_ticket_that_lies_is_refused_naming_its_sender(text: str, problem: str) -> None:
    with pytest.raises(FrameError) as caught:
        receive(ticket(text))
    assert "worker 3 describes a batch wrongly" in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    "state",
    [
        b"\0",
        bytes(STATE_BYTES - 1),
        bytes(STATE_BYTES + 1),
        bytes(4 * 624) + b"\x71\x02\0\0" + bytes(9),  # at position 625 of 624 words
        bytes(4 * 625) + b"\2" + bytes(8),
    ],
)
def test_what_is_no_state_of_a_generator_is_refused(which: int, state: bytes) -> None:
    signature = Signature.of(((torch.zeros(2),), {}))
    process = (b"", state) if which else (state, b"")
    news = News(Described(signature.digest, signature.text), process=process)
    with pytest.raises(FrameError, match="worker 3 sent no state of Python's or NumPy's generator"):
        receive(ticket_of(0, news))


def test_a_deep_ticket_is_refused() -> None:
    node: object = {"v": 1}
    for _ in range(200):
        node = {"l": [node]}
    with pytest.raises(FrameError, match="at most 64 levels"):
        receive(ticket(batch_of(node)))


_nodes = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["t", "ones", "v", "l", "u", "d", "o", "r"]), inner)
    ),
    max_leaves=20,
)


@given(_nodes)
def test_any_other_text_is_refused_or_well_formed(node: object) -> None:
    try:
        check_signature_text(batch_of(node), what="a ticket")
    except FrameError:
        return
    Signature.read(batch_of(node))


# Classes, and who may have them made.


@pytest.fixture
def victim_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that the process has imported for reasons of its own."""
    module = types.ModuleType("victim_of_tickets")
    asked: list[str] = []

    @dataclasses.dataclass
    class Launcher:
        command: object

        def __post_init__(self) -> None:
            MADE.append(self.command)

    class Shelf:
        pass

    class Net(nn.Module):
        pass

    for one in (Launcher, Shelf, Net):
        one.__module__, one.__qualname__ = module.__name__, one.__name__
        setattr(module, one.__name__, one)

    def lazy(name: str) -> object:
        asked.append(name)
        raise AttributeError(name)

    module.__getattr__ = lazy  # type: ignore[method-assign]
    module.asked = asked  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(records, "_trusted", {})
    monkeypatch.setattr(records, "_known", {})
    MADE.clear()
    return module


LAUNCHER = batch_of({"r": ["victim_of_tickets", "Launcher", [["command", {"v": "rm"}]]]})


def test_a_class_of_some_imported_module_is_not_made(victim_module: Any) -> None:
    receive(ticket(LAUNCHER))  # well formed; what it names is not looked for yet
    with pytest.raises(ConfigurationError, match=r"victim_of_tickets\.Launcher with the fields"):
        Signature.read(LAUNCHER).example()
    assert MADE == []


def test_a_name_that_came_is_never_looked_up_in_a_module(victim_module: Any) -> None:
    records.trust_network(victim_module.Net(), None)
    for module, name in (
        ("victim_of_tickets", "Heavy.Machine"),
        ("victim_of_tickets", "Shelf"),
        ("victim_of_tickets", "__dict__"),
        ("subprocess", "Popen"),
        ("not_imported_yet", "Anything"),
    ):
        text = batch_of({"r": [module, name, [["command", {"v": 1}]]]})
        with pytest.raises(ConfigurationError, match="knows no such dataclass or named tuple"):
            Signature.read(text).example()
    assert victim_module.asked == [] and "not_imported_yet" not in sys.modules


def test_a_class_of_the_networks_own_module_is_made(victim_module: Any) -> None:
    records.trust_network(victim_module.Net(), None)
    (made,), _ = Signature.read(LAUNCHER).example()
    assert type(made) is victim_module.Launcher and MADE == ["rm"]


def test_a_class_of_the_data_sets_own_module_is_made(victim_module: Any) -> None:
    records.trust_loader(SimpleNamespace(dataset=victim_module.Shelf()))
    (made,), _ = Signature.read(LAUNCHER).example()
    assert type(made) is victim_module.Launcher


def test_a_class_with_other_fields_is_not_made(victim_module: Any) -> None:
    records.trust_network(victim_module.Net(), None)
    text = batch_of({"r": ["victim_of_tickets", "Launcher", [["other", {"v": 1}]]]})
    with pytest.raises(ConfigurationError, match="with the fields other"):
        Signature.read(text).example()
