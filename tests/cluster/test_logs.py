"""What graphsplit says goes through Python's logging, plain or as objects."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest
from tqdm import tqdm

from graphsplit import logs


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Where lines go; the logger is a fresh one, whatever earlier tests did to the real one."""
    monkeypatch.setattr(logs, "LOGGER", logging.Logger("graphsplit"))
    monkeypatch.setattr(logs.CONTEXT, "source", dict)
    return io.StringIO()


def test_plain_lines_have_a_prefix_each(stream):
    logs.configure({}, prefix="scheduler", stream=lambda: stream)
    logs.say("the job failed: x\n  Fix: y", event="failed", level="error")
    assert stream.getvalue() == "[scheduler] the job failed: x\n[scheduler]   Fix: y\n"


def test_an_object_is_one_line_with_all_that_the_line_belongs_to(stream):
    logs.configure({"GS_LOG": "json"}, prefix="x", stream=lambda: stream)
    logs.CONTEXT.source = lambda: {"job": "ab", "generation": 2, "rank": 1, "step": 7}
    logs.say("the job failed:\n  why", event="failed", level="error", kind="lost")
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "error",
        "job": "ab",
        "generation": 2,
        "rank": 1,
        "step": 7,
        "event": "failed",
        "message": "the job failed:\n  why",
        "kind": "lost",
    }


def test_a_context_that_cannot_be_told_costs_no_line(stream):
    logs.configure({"GS_LOG": "json"}, prefix="x", stream=lambda: stream)
    logs.CONTEXT.source = lambda: 1 // 0
    logs.say("still here")
    found = json.loads(stream.getvalue())
    assert (found["job"], found["rank"], found["message"]) == (None, None, "still here")


def test_a_script_that_logs_in_its_own_way_is_left_alone(stream):
    own = logging.StreamHandler(stream)
    own.setFormatter(logging.Formatter("%(name)s %(levelname)s %(event)s %(message)s"))
    logs.LOGGER.addHandler(own)
    logs.LOGGER.setLevel(logging.INFO)
    logs.configure({"GS_LOG": "json"}, prefix="x", stream=lambda: stream)
    logs.say("formed", event="formed")
    assert stream.getvalue() == "graphsplit INFO formed formed\n"
    assert logs.LOGGER.handlers == [own]


def test_a_progress_bar_makes_room_for_a_line(stream):
    logs.configure({}, prefix="x", stream=lambda: stream)
    with tqdm(total=3, file=stream) as bar:
        logs.say("capturing")
        bar.update(1)
    told = re.split(r"[\r\n]", stream.getvalue())
    assert "[x] capturing" in told, told
    assert any("0/3" in part for part in told[told.index("[x] capturing") :]), told


def test_a_reader_that_has_gone_ends_nothing(stream):
    logs.configure({}, prefix="x", stream=lambda: stream)
    stream.close()
    logs.say("to nobody")


def test_a_function_may_take_the_lines_instead():
    lines: list[str] = []
    logs.teller(lines.append)("one", event="x", level="warning")
    assert lines == ["one"]
    assert logs.teller(None) is logs.say
