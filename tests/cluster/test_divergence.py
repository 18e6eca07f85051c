"""Workers that made different calls are told apart, and slow ones are not taken for such."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.cluster.member.calls import CallHistory
from graphsplit.cluster.scheduler.job.divergence import (
    call_of_some,
    describe_divergence,
    diverging_call,
)
from graphsplit.cluster.wire.messages import END_OF_SCRIPT, CallsMade
from graphsplit.errors import ConfigurationError, JobFailedError, PlanMismatchError
from graphsplit.frames import OWN
from graphsplit.job import joined
from graphsplit.job.script import Script

assert threads_as_workers
PLACES = [
    *("on_train_begin", "on_epoch_begin", "on_gradients", "on_step_end", "on_stop"),
    *("on_epoch_end", "on_train_end", "reset", "update", "compute"),
]


def history(*moves: str) -> CallsMade:
    """What a worker tells after some moves: ``"train"`` begins, ``"/"`` ends, ``"."`` passes."""
    calls = CallHistory()
    for move in moves:
        if move == ".":
            calls.pass_milestone()
        elif move == "/":
            calls.end()
        else:
            calls.begin(move)
    return calls.made()


def differ(one: CallsMade, other: CallsMade) -> str:
    call = diverging_call(one, other)
    assert (call is None) == (diverging_call(other, one) is None)
    return "" if call is None else call.name


def test_a_call_that_the_others_are_past_is_found():
    inside = history("train", ".", "state_dict")
    assert differ(inside, history("train", ".", ".")) == "state_dict"
    assert differ(inside, history("train", ".", "state_dict", "/", ".")) == ""


def test_a_worker_that_may_still_come_is_waited_for():
    inside = history("train", ".", "state_dict")
    assert differ(inside, history("train")) == ""
    assert differ(inside, history("train", ".")) == ""
    assert differ(history("train", "."), history("train", ".", ".")) == ""
    assert differ(inside, history()) == ""


def test_calls_in_another_order_are_found():
    saves, evaluates = history("train", "/", "save"), history("train", "/", "eval")
    assert differ(saves, evaluates) in ("save", "eval")


def test_the_end_of_a_script_is_the_last_call():
    ended = history("train", "/", END_OF_SCRIPT)
    assert differ(ended, history("train", "/", "state_dict")) != ""
    assert differ(history("train", ".", "/", END_OF_SCRIPT), history("train", ".")) == ""
    assert differ(history("train", END_OF_SCRIPT), history("train", ".", ".")) != ""


def test_calls_of_models_in_another_order_are_found():
    class Calls:
        def predict(self) -> None:
            told.append(histories[-1].made())

    histories: list[CallHistory] = []
    told: list[CallsMade] = []
    for order in ((0, 1, 0), (0, 1, 1)):
        histories.append(CallHistory())
        models = [histories[-1].around(Calls(), Engine()) for _ in range(2)]
        for model in order:
            models[model].predict()
    assert differ(told[2], told[5]) in ("predict", "Model 2.predict")
    assert differ(told[1], told[4]) == "", "they were alike until then"
    assert told[0].within.name == "predict", "the first one's name is its method's"


class Engine:
    """What a Model is known by."""


@pytest.mark.usefixtures("threads_as_workers")
def test_an_evaluation_where_the_others_train_is_told_as_such():
    class EvaluatesAlone(gs.callbacks.Callback):
        def on_epoch_begin(self, context: gs.callbacks.RunContext) -> None:
            if context.rank == 0 and context.epoch == 2:
                context.model.eval(data)

    data = [(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))]

    def script(rank: int) -> None:
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        net[0].place("MS_WORKER", 0)
        net[1].place("MS_WORKER", 1)
        optimizer, metrics = torch.optim.SGD(net.parameters(), lr=0.1), {"Loss": gs.metrics.Loss()}
        model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, metrics)
        model.train(2, data, [EvaluatesAlone()])

    with pytest.raises(
        (PlanMismatchError, JobFailedError),
        match=r"worker 0 in a call that does not train|eval\(\) at",
    ):
        ThreadCluster(script, 2, is_recoverable=False).run()


def test_an_extra_call_that_is_over_took_nobody_else():
    assert differ(history("state_dict", "/", "train", "."), history("train", ".")) == ""


def test_what_is_forgotten_proves_nothing():
    many = [move for _ in range(40) for move in ("train_step", "/", ".")]
    assert differ(history("predict"), history(*many, "train_step")) == ""


def test_many_calls_are_told_in_a_bounded_message():
    made = history(*(move for _ in range(30) for move in ("eval", "/", ".")))
    assert made.num == 30 and len(made.latest) == 8 and made.within is None


def test_many_calls_in_one_place_are_one_with_a_number():
    both = ["state_dict", "/", "save", "/"] * 20_000
    made = history("train", "/", *both, "state_dict")
    assert [(one.name, one.times) for one in made.latest] == [
        ("train", 1),
        ("save", 20_000),
        ("state_dict", 20_001),
    ]
    assert differ(made, history("train", "/", *both, "train")) == "state_dict"
    assert differ(made, history("train", "/", *both, END_OF_SCRIPT)) == "state_dict"
    assert differ(made, history("train", "/", *both, "state_dict")) == ""
    assert differ(made, history("train", "/", *both)) == ""


def test_the_workers_calls_and_the_way_out_are_told():
    calls_of = {0: history("state_dict"), 1: history("train", "."), 2: history("train", ".")}
    call = diverging_call(calls_of[0], calls_of[1])
    assert call is not None and call.source.startswith("tests/cluster/test_divergence.py:")
    text = describe_divergence(call, calls_of)
    assert "worker 0 is in state_dict() at " in text and "workers 1, 2 are in train() at " in text
    assert "call state_dict() on every worker" in text
    for found in calls_of.values():  # whichever was found first
        assert found.within is not None
        assert "call state_dict() on" in describe_divergence(found.within, calls_of)
    ended = {0: history(END_OF_SCRIPT), 1: history("save")}
    text = describe_divergence(history(END_OF_SCRIPT).latest[0], ended)
    assert f"worker 0 is at {END_OF_SCRIPT}" in text and "call save() on every worker" in text


def test_a_call_of_one_worker_that_met_the_next_one_of_others_is_told_with_its_line():
    def history(is_alone: bool) -> CallsMade:
        calls = CallHistory()
        if is_alone:
            calls.begin("predict")  # alone
            calls.end()
        calls.begin("predict")  # of all
        if not is_alone:
            calls.end()
            calls.begin(END_OF_SCRIPT)
        return calls.made()

    calls_of = {0: history(True), 1: history(False)}
    call = diverging_call(calls_of[0], calls_of[1])
    assert call is not None
    text = describe_divergence(call, calls_of)
    lines = re.findall(r"on worker (\d) at tests/cluster/test_divergence.py:(\d+)", text)
    assert [rank for rank, _ in lines] == ["0", "1"]
    source = Path(__file__).read_text().splitlines()
    assert [source[int(line) - 1].split("# ")[1] for _, line in lines] == ["alone", "of all"]
    assert "the first predict there" in text and "call predict() on every worker" in text
    assert "the first" not in describe_divergence(call, {0: calls_of[1], 1: calls_of[1]})


def test_in_a_loop_of_the_scripts_own_the_call_of_a_network_is_where_all_should_be():
    calls_of = {0: history("state_dict"), 1: history("a call of Net")}
    for calls in calls_of.values():
        assert calls.within is not None
        text = describe_divergence(calls.within, calls_of)
        assert "call state_dict() on every worker" in text


@pytest.mark.parametrize("step", ["train", "train_step", "forward_backward"])
def test_a_call_beside_a_step_is_the_one_that_is_wrong(step: str) -> None:
    calls_of = {0: history("state_dict"), 1: history(step)}
    for calls in calls_of.values():
        assert calls.within is not None
        text = describe_divergence(calls.within, calls_of)
        assert "call state_dict() on every worker" in text
    calls_of = {0: history(step), 1: history(END_OF_SCRIPT)}
    assert calls_of[0].within is not None
    assert f"call {step}() on every worker" in describe_divergence(calls_of[0].within, calls_of)


def test_a_value_that_one_worker_asks_for_is_to_be_asked_for_on_all():
    calls_of = {0: history("a value's item"), 1: history("a call of Net")}
    for calls in calls_of.values():
        assert calls.within is not None
        text = describe_divergence(calls.within, calls_of)
        assert "ask for the value on every worker" in text and "print it on one" in text


def test_a_value_that_one_worker_saves_is_to_be_made_plain_on_all():
    calls_of = {0: history("a value's torch.save() of output 1"), 1: history(END_OF_SCRIPT)}
    assert calls_of[0].within is not None
    text = describe_divergence(calls_of[0].within, calls_of)
    assert "value = torch.from_numpy(value.numpy().copy())" in text and "torch.save() below" in text


def test_the_call_inside_another_is_the_one_that_is_wrong():
    calls_of = {0: history("train"), 1: history("train", "barrier"), 2: history("train")}
    for calls in calls_of.values():
        assert calls.within is not None
        assert call_of_some(calls.within, calls_of).name == "barrier"
    calls_of = {0: history("eval"), 1: history("predict")}
    assert call_of_some(calls_of[0].latest[0], calls_of).name == "eval"
    assert call_of_some(calls_of[1].latest[0], calls_of).name == "predict"


def test_a_call_from_a_second_thread_is_refused_while_another_is_in_one():
    calls, reported = CallHistory(), []

    @contextmanager
    def reporting():
        try:
            yield
        except ConfigurationError as error:
            reported.append(str(error))
            raise

    def from_another_thread():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(calls.begin, "state_dict").exception()

    calls.reporting = reporting
    calls.begin("train")
    calls.begin("eval")  # of a callback, by the same thread
    error = from_another_thread()
    assert "state_dict() is called while another thread is in eval() at " in str(error)
    assert "test_divergence.py" in str(error) and reported == [str(error)]
    calls.end()
    calls.end()
    assert from_another_thread() is None


def test_a_worker_that_may_come_back_tells_nothing():
    calls = CallHistory()
    calls.begin("train")
    calls.is_kept = False
    assert calls.made() == CallsMade()


class Seen(gs.callbacks.Callback, gs.metrics.Metric, torch.utils.data.Dataset[torch.Tensor]):
    """Notes how many milestones this worker has passed wherever code of the script's runs."""

    def __init__(self) -> None:
        self.at: list[tuple[str, int]] = []

    def note(self, place: str) -> None:
        job = joined.current()
        assert job is not None
        calls = job.member.position.calls
        calls.is_kept = True
        self.at.append((place, calls.made().milestones))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), float(index)), index % 2

    def __len__(self) -> int:
        return 4

    def reset(self) -> None:
        self.note("reset")

    def update(self, **_: object) -> None:
        self.note("update")

    def compute(self) -> float:
        self.note("compute")
        return 0.0

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        self.note("on_step_end")
        if context.epoch == 2:
            context.stop()


def _noting(place: str) -> object:
    return lambda self, context: self.note(place)


for name in PLACES:
    if name.startswith("on_") and name != "on_step_end":
        setattr(Seen, name, _noting(name))


def milestones_of_a_script() -> list[tuple[str, int]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net[0].place(0)
    net[1].place(1)
    seen = Seen()
    metrics = {"Seen": seen}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, metrics=metrics)
    loader = torch.utils.data.DataLoader(seen, batch_size=2)
    for _ in range(2):  # the second time nothing is planned, so that nobody meets for that
        model.train(2, loader, callbacks=[seen])
        model.eval(loader)
    seen.note("end")
    return seen.at


@pytest.mark.usefixtures("threads_as_workers")
def test_no_worker_waits_in_the_place_where_another_ones_script_may_make_a_call_alone():
    """Whoever made one there is found out, as all others are past that place when they wait."""
    cluster = ThreadCluster(lambda _: milestones_of_a_script(), 2, is_recoverable=False)
    one, other = cluster.run()
    alone = {"update", "compute"}  # one worker has the metrics
    assert [at for at in one if at[0] not in alone] == [at for at in other if at[0] not in alone]
    at = max(one, other, key=len)
    assert {place for place, _ in at} == {*PLACES, "end"}
    for (place, before), (next_place, after) in pairwise(at):
        # Between gradients and the step's end nobody waits.
        assert before < after or place == "on_gradients", (place, next_place, before)


class Calls:
    def __init__(self, history: CallHistory) -> None:
        self.history = history

    def save(self, path: str) -> str:
        within = self.history.made().within
        assert within is not None and within.source.startswith("tests/cluster/test_divergence.py:")
        return f"{within.name} {path}"


def test_a_models_calls_are_noted_while_they_last():
    history = CallHistory()
    calls = Script(history).around(None, Calls(history))
    assert [calls.save("a"), calls.save("b")] == ["save a", "save b"]
    assert history.made().num == 2 and history.made().within is None
    looks = Calls(history)
    assert Script(history).around(None, looks, changes_nothing=True) is looks


def in_a_file(name: str, file: str, run: Any) -> Any:
    """A function of a file that runs another one."""
    found: dict[str, Any] = {"run": run}
    exec(compile(f"def {name}():\n    run()", file, "exec"), found)
    return found[name]


ACCELERATE = "/env/lib/python3/site-packages/accelerate/accelerator.py"
INTEGRATIONS = f"{OWN}integrations/accelerate.py"


@pytest.mark.parametrize("file", [ACCELERATE, INTEGRATIONS])
@pytest.mark.parametrize(
    ("call", "outer", "told"),
    [
        ("state_dict", "save_state", "save_state"),
        ("state_dict", "train", "state_dict"),  # what a loop does inside, the script does not know
        ("a call of Sequential", "save_state", "a call of Sequential"),
    ],
)
def test_a_call_of_a_trainer_is_told_as_the_script_has_made_it(
    file: str, call: str, outer: str, told: str
):
    history = CallHistory()
    inner = in_a_file("get_state_dict", ACCELERATE, partial(history.begin, call))
    in_a_file(outer, file, inner)()
    within = history.made().within
    assert within is not None and within.name == told
    assert within.source.endswith("test_a_call_of_a_trainer_is_told_as_the_script_has_made_it")
