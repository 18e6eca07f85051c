"""Tracebacks show the user's frames, and leave out what happens inside graphsplit."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphsplit.errors import OwnershipError, PlacementError, StepFailedError
from graphsplit.frames import is_own, line_now, line_of, users_traceback, without_own_frames
from graphsplit.job.script import ModelCall


def through_graphsplit(run: Callable[[], object]) -> object:
    """Call back through frames of graphsplit's own."""
    return ModelCall("train", run)()


def caught(run: Callable[[], object]) -> BaseException:
    try:
        through_graphsplit(run)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def callback() -> None:
    torch.empty(2).view(3)


def test_frames_of_graphsplit_are_left_out_and_the_users_stay():
    error = caught(callback)
    text = users_traceback(error)
    assert "in through_graphsplit" in text
    assert "in callback" in text
    assert not any(is_own(frame.filename) and frame.filename in text
                   for frame in traceback.extract_tb(error.__traceback__))  # fmt: skip
    assert text.splitlines()[-1].startswith("RuntimeError: shape '[3]' is invalid")
    assert "script.py" in users_traceback(error, is_full=True)
    assert without_own_frames(users_traceback(error, is_full=True)) == text.rstrip("\n")
    assert line_of(error.__traceback__).endswith("in callback")


def test_what_graphsplit_calls_is_left_out_until_the_next_line_of_the_users():
    text = users_traceback(caught(lambda: through_graphsplit(lambda: json.loads("{"))))
    assert "json" in text  # the user's own call of it
    text = users_traceback(caught(ModelCall("load", json.loads, ("{",))))
    assert "decoder.py" not in text
    assert "in caught" in text


def test_a_mistake_says_itself_what_it_came_from():
    def wrong() -> None:
        try:
            callback()
        except RuntimeError as error:
            raise PlacementError("'fc9' is on worker 7\n  Fix: choose another") from error

    text = users_traceback(caught(wrong))
    assert "direct cause" not in text
    assert text.endswith("graphsplit.errors.PlacementError: 'fc9' is on worker 7\n"
                         "  Fix: choose another\n")  # fmt: skip
    assert "direct cause" in users_traceback(caught(wrong), is_full=True)


def test_an_error_of_graphsplits_shows_lines_of_the_users_alone():
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            raise OwnershipError("not here\n  Fix: there")

    text = users_traceback(caught(lambda: Layer()(torch.empty(1))))
    assert "module.py" not in text
    assert "in forward" in text


def test_an_operation_that_failed_keeps_the_users_own_lines_below_it():
    def fails() -> None:
        try:
            callback()
        except RuntimeError as error:
            raise StepFailedError("RuntimeError: no") from error

    text = users_traceback(caught(fails))
    assert "direct cause" in text
    assert "torch/" not in text


def test_an_error_that_never_left_graphsplit_has_no_empty_headline():
    with pytest.raises(TypeError) as error:
        ModelCall("x", None)()  # type: ignore[arg-type]
    error.value.__traceback__ = error.value.__traceback__.tb_next
    assert "Traceback" not in users_traceback(error.value)


def test_the_running_line_is_the_users():
    assert line_now(sys._getframe()).endswith("in test_the_running_line_is_the_users")
    assert through_graphsplit(lambda: line_now(sys._getframe())).endswith("<lambda>")


def test_of_a_package_the_innermost_line_is_shown_and_those_of_the_script():
    names: dict[str, Any] = {}
    code = "def outer(ask):\n    return inner(ask)\ndef inner(ask):\n    return ask()"
    exec(compile(code, "/opt/site-packages/a.py", "exec"), names)
    innermost, *led = names["outer"](lambda: line_now(sys._getframe(1), most=3)).split(", from ")
    assert innermost == "/opt/site-packages/a.py:4, in inner"
    assert led[0].endswith("innermost_line_is_shown_and_those_of_the_script")
    assert "site-packages" not in "".join(led)


def test_what_a_trainer_was_asked_for_is_at_the_scripts_line():
    file = "/opt/site-packages/transformers/generation/utils.py"
    names: dict[str, Any] = {}
    exec(compile("def generate(cache):\n    cache.refuse()", file, "exec"), names)
    error = caught(lambda: names["generate"](None))
    assert f"{file}:2, in generate" in line_of(error.__traceback__)
    assert "in <lambda>" in line_of(error.__traceback__, of_script=True)
