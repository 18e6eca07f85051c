"""Tickets: what workers without the batch learn of its microbatches, and what is not believed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from graphsplit.batches.microbatches import BatchDescription, Divider
from graphsplit.batches.signature import Signature
from graphsplit.capture.graph import Mode
from graphsplit.capture.reach.at_calls import NOTHING_LEFT
from graphsplit.capture.reach.plain import SharedValues
from graphsplit.cluster.member.calls import CallHistory
from graphsplit.errors import FrameError, LoaderMismatchError
from graphsplit.feeding.feed import Feed
from graphsplit.feeding.own_rows import OwnRows
from graphsplit.feeding.tickets import (
    Described,
    News,
    Ticket,
    Tickets,
    position_of,
    ticket_of,
    torch_state,
)
from graphsplit.job.process_generators import NOTHING_DRAWN, ProcessStates
from graphsplit.job.readers import LoaderReaders, Reading
from graphsplit.optimizers.tensor_owners import ComparedWrites
from graphsplit.planning.compared.announced import NOTHING_READ, PythonStep
from graphsplit.planning.compared.hooks import ParameterHooks
from graphsplit.planning.compared.writes import Writes
from graphsplit.settings import FAIL_FAST


class Wire:
    """The control channels of two workers: what one sends, the other receives."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def ticket_sender(self, peer: int) -> Wire:
        return self

    def ticket_receiver(self, source: int) -> Wire:
        return self

    def send(self, value: torch.Tensor, *, step: int, microbatch: int, quiet: bool) -> None:
        self.messages.append(value.numpy().tobytes())

    def receive(self, *, step: int, microbatch: int) -> torch.Tensor:
        return torch.tensor(list(self.messages.pop(0)), dtype=torch.uint8)


def job(wire: Wire, rank: int) -> Any:
    position = SimpleNamespace(calls=CallHistory())
    member = SimpleNamespace(state=SimpleNamespace(stops_soon=False), position=position)
    return cast(
        Any,
        SimpleNamespace(
            rank=rank,
            num_workers=2,
            control=wire,
            member=member,
            is_stopping=False,
            readers=LoaderReaders(),
            recovery_policy=FAIL_FAST,
        ),
    )


def shape(rows: int, number: int = 4) -> BatchDescription:
    batch = (torch.zeros(rows, 3), torch.zeros(rows))
    return Divider(number).divide(batch, has_loss_fn=True).shape()


def test_followers_learn_signatures_once_and_weights_every_time() -> None:
    wire = Wire()
    leader, follower = Tickets(job(wire, 0)), Tickets(job(wire, 1))
    sizes = []
    for rows in (10, 8, 10, 10):
        leader.send(Ticket(shape(rows)))
        sizes.append(len(wire.messages[0]))
        assert follower.receive(0).shape == shape(rows)
    assert sizes[2] == sizes[3] < sizes[0]


def test_a_batch_like_the_one_before_is_announced_without_a_word_about_its_looks() -> None:
    wire = Wire()
    leader, follower = Tickets(job(wire, 0)), Tickets(job(wire, 1))
    leader.send(Ticket(shape(10)))
    first = follower.receive(0)
    leader.send(Ticket(shape(10), checksum=7, previous_checksum=8))
    assert len(wire.messages[0].rstrip(b"\0")) < 40
    assert follower.receive(0) == Ticket(first.shape, checksum=7, previous_checksum=8, step=1)


def test_values_like_those_before_are_one_object_and_no_other_bits_are() -> None:
    wire = Wire()
    leader, follower = Tickets(job(wire, 0)), Tickets(job(wire, 1))
    nan = float("nan")
    steps = [
        PythonStep(3, (), settings=(0.0, nan)),
        PythonStep(3, (), settings=(0.0, nan)),
        PythonStep(3, (), settings=(-0.0, nan)),
        PythonStep(4, (), settings=(-0.0, nan)),
        PythonStep(4, (-0.0,), settings=(nan,)),
        PythonStep(4, (-0.0,), settings=(nan,), written=("weight",)),
        PythonStep(4, (-0.0,), settings=(nan,)),
    ]
    found = []
    for python in steps:
        leader.send(Ticket(shape(10), python=python))
        found.append(follower.receive(0).python)
        assert repr(found[-1]) == repr(python)
    assert found[1] is found[0]
    assert len(set(map(id, found))) == len(found) - 2
    assert found[-1] is found[-3]


def test_what_is_news_is_told_although_the_batch_looks_like_the_one_before() -> None:
    wire = Wire()
    leading = job(wire, 0)
    leader, follower = Tickets(leading), Tickets(job(wire, 1))
    state = torch.default_generator.get_state().numpy().tobytes()
    for generator in (b"", state, b""):
        leader.send(Ticket(shape(10), generator=generator))
        assert follower.receive(0).generator == generator
    leading.member.state.stops_soon = True
    leader.send(Ticket(shape(10)))
    assert follower.receive(0).shape == shape(10)


def test_pythons_and_numpys_generators_are_told_where_they_were_drawn_from() -> None:
    wire = Wire()
    leader, follower = Tickets(job(wire, 0)), Tickets(job(wire, 1))
    state = ProcessStates.now()
    for told in (NOTHING_DRAWN, ProcessStates(python=state.python), state, NOTHING_DRAWN):
        leader.send(Ticket(shape(10), process=told))
        assert follower.receive(0).process == told


def test_the_end_of_an_epoch_tells_whether_the_loader_remembers_it() -> None:
    wire = Wire()
    leader, follower = Tickets(job(wire, 0)), Tickets(job(wire, 1))
    for has_changed in (True, False):
        leader.send(Ticket(None, loader_changed=has_changed))
        assert follower.receive(0).loader_changed is has_changed


def test_the_batch_before_must_be_known_where_one_like_it_is_announced() -> None:
    wire = Wire()
    leader, follower = Tickets(job(wire, 0)), Tickets(job(wire, 1))
    for _ in range(2):
        leader.send(Ticket(shape(10)))
    wire.messages.pop(0)
    with pytest.raises(FrameError, match="like the one before, but there was none"):
        follower.receive(0)


def test_an_announcement_of_another_step_is_not_believed() -> None:
    wire = Wire()
    leader, follower = Tickets(job(wire, 0)), Tickets(job(wire, 1))
    for _ in range(3):
        leader.send(Ticket(shape(10)))
    follower.receive(0)
    wire.messages.pop(0)
    with pytest.raises(FrameError, match="worker 0 announces batch 2; expected 1"):
        follower.receive(0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(12),
        ticket_of(0, News())[:60],
        struct.pack("<qqqIIII", -1, 0, 16, 0, 0, 0, 2**32 - 1),
        struct.pack("<qqqIIII", -1, 0, -1, 0, 0, 0, 0),
        struct.pack("<qqqIIII", 1, 0, 16, 0, 0, 0, 0),
        struct.pack("<qqqIIII", -1, 0, 18, 0, 0, 0, 0) + b"[]",
        struct.pack("<qqqIIII", -1, 0, 17, 0, 0, 0, 0) + b"\xff",
        ticket_of(0, None)[:20],
    ],
)
def test_a_ticket_that_is_cut_off_is_malformed(data: bytes) -> None:
    wire = Wire()
    wire.messages.append(data)
    with pytest.raises(FrameError, match="a malformed step ticket from worker 0"):
        Tickets(job(wire, 1)).receive(0)


def test_all_stop_at_the_step_whose_ticket_says_so() -> None:
    wire = Wire()
    leading, following = job(wire, 0), job(wire, 1)
    leader, follower = Tickets(leading), Tickets(following)
    leader.send(Ticket(shape(10)))
    leading.member.state.stops_soon = True
    follower.receive(0)
    assert not (leading.is_stopping or following.is_stopping)
    leader.send(Ticket(None))  # the end of an epoch is no step
    follower.receive(0)
    assert not (leading.is_stopping or following.is_stopping)
    leader.send(Ticket(shape(10)))
    follower.receive(0)
    assert leading.is_stopping and following.is_stopping


def test_a_batch_that_is_not_split_announces_no_microbatches() -> None:
    wire = Wire()
    Tickets(job(wire, 0)).send(Ticket(shape(10, number=1)))
    follower = Tickets(job(wire, 1))
    found = follower.receive(0).shape
    assert (found.parts, found.weights) == ((), ())


def ticket(counts: Sequence[int], weights: Sequence[float]) -> bytes:
    signature = Signature.of(((torch.zeros(2),), {}))
    whole = Described(signature.digest, signature.text)
    parts = tuple(Described(signature.digest, count=count) for count in counts)
    return ticket_of(0, News(whole, parts, tuple(weights)))


@pytest.mark.parametrize(
    ("counts", "weights"),
    [
        ([2], [0.5]),
        ([], [1.0]),
        ([2, 1], [1.0]),
        ([1], [float("inf")]),
        ([2], [1.0, float("-inf")]),
    ],
)
def test_microbatches_without_a_finite_weight_each_are_not_believed(counts, weights) -> None:
    wire = Wire()
    wire.messages.append(ticket(counts, weights))
    with pytest.raises(FrameError, match=r"worker 3.*(finite weight for each|is 0, not 1|is nan)"):
        Tickets(job(wire, 1)).receive(3)


def test_the_signature_of_a_microbatch_must_be_the_announced_one() -> None:
    wire = Wire()
    wire.messages.append(ticket_of(0, News(parts=(Described("0" * 16, "[]"),), weights=(1.0,))))
    with pytest.raises(FrameError, match="worker 0 sent a signature that is not the announced one"):
        Tickets(job(wire, 1)).receive(0)


def test_a_reader_that_divides_its_batch_in_another_way_is_named() -> None:
    wire, batch = Wire(), (torch.zeros(4, 3), torch.zeros(4))
    theirs = Divider(2, None, lambda inputs, target: 1).divide(batch, has_loss_fn=True)
    counts = iter([3, 1])
    mine = Divider(2, None, lambda inputs, target: next(counts))
    drawn = position_of(torch_state())
    Tickets(job(wire, 0)).send(Ticket(theirs.shape(), drawn=drawn))
    everybody = frozenset({0, 1})
    planned = SimpleNamespace(consumers=(0, 1), needed_by=everybody, written_inputs=(), asks=False)
    planner = SimpleNamespace(
        begin_step=lambda mode: None,
        requires_grad=lambda: (),
        has_replicas=False,
        sums=None,
        trainable=(),
        plan_for=lambda *a, **k: planned,
        left=NOTHING_LEFT,
        writes=Writes(dict, ComparedWrites(), ParameterHooks(dict, dict, int)),
        recordings=(),
        values_shared_with=lambda loader: SharedValues((), ()),
        keep_at_least=lambda number: None,
        num_kept=0,
        taking_turns=(),
        python_step=lambda *a: NOTHING_READ,
        catch_up=lambda text: False,
        ahead=lambda mode, signature: None,
        check_python_step=lambda *a, **k: None,
        recording_for=lambda *a, **k: SimpleNamespace(
            recording=SimpleNamespace(
                graph=SimpleNamespace(is_other_after=False, has_replicas=False, num_answered=None),
                plans=0,
            )
        ),
    )
    feed = Feed(
        job(wire, 1),
        cast(Any, planner),
        Tickets(job(wire, 1)),
        mode=Mode.TRAIN,
        leader=0,
        loader=[batch],
        reading=Reading((), everybody, is_tracked=False, version=0),
        rows=OwnRows([batch], mine, 1, has_loss_fn=True),
    )
    with pytest.raises(LoaderMismatchError) as caught:
        next(iter(feed))
    text = str(caught.value)
    assert "the loaders of workers 0 and 1 disagree at train step 1 of the epoch" in text
    assert "worker 1: its batch gives microbatches 2 of {" in text
    assert "with weights [0.75, 0.25]" in text and "with weights [0.5, 0.5]" in text
    assert "split and loss_weight must give the same on every worker" in text
