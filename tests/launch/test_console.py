from __future__ import annotations

import io

import pytest

from graphsplit.cli.launch.console import UPDATE_INTERVAL_S, Console, Sink
from graphsplit.cli.launch.lines import LinePart


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_console(
    *, is_terminal: bool, environ: dict[str, str] | None = None
) -> tuple[Console, io.BytesIO, FakeClock]:
    stream, clock = io.BytesIO(), FakeClock()
    sink = Sink(stream, is_terminal)
    return Console(sink, sink, clock=clock, environ=environ or {}), stream, clock


def update(text: bytes) -> LinePart:
    return LinePart(text, is_update=True)


def test_each_line_is_prefixed_by_its_process_without_colour_in_a_file() -> None:
    console, stream, _ = make_console(is_terminal=False)
    console.show("worker 3", "stdout", LinePart(b"loss 1.0"))
    console.show("scheduler", "stderr", LinePart(b"\xff not text"))
    assert stream.getvalue() == b"[worker 3] loss 1.0\n[scheduler] \xff not text\n"


def test_a_terminal_gets_colours_unless_no_color_is_set() -> None:
    console, stream, _ = make_console(is_terminal=True)
    console.show("worker 3", "stdout", LinePart(b"x"))
    assert b"\x1b[36m[worker 3] \x1b[0mx\n" in stream.getvalue()
    console, stream, _ = make_console(is_terminal=True, environ={"NO_COLOR": "1"})
    console.show("worker 3", "stdout", LinePart(b"x"))
    assert stream.getvalue() == b"[worker 3] x\n"


def test_in_a_file_a_progress_bar_becomes_a_line_now_and_then() -> None:
    console, stream, clock = make_console(is_terminal=False)
    console.show("worker 0", "stderr", update(b" 1%"))
    console.show("worker 0", "stderr", update(b" 2%"))
    clock.now_s += UPDATE_INTERVAL_S
    console.show("worker 0", "stderr", update(b" 3%"))
    console.show("worker 0", "stderr", LinePart(b"100%"))
    expected = b"[worker 0]  1%\n[worker 0]  3%\n[worker 0] 100%\n"
    assert stream.getvalue() == expected


def test_on_a_terminal_lines_scroll_above_the_progress_bar_of_one_process() -> None:
    console, stream, _ = make_console(is_terminal=True, environ={"NO_COLOR": "1"})
    console.show("worker 0", "stderr", update(b"50%"))
    console.show("worker 1", "stderr", update(b"49%"))
    console.show("worker 1", "stdout", LinePart(b"loss"))
    console.show("worker 0", "stderr", LinePart(b"100%"))
    console.close()
    assert stream.getvalue() == (
        b"[worker 0] 50%\r\x1b[K[worker 1] loss\n[worker 0] 50%\r\x1b[K[worker 0] 100%\n"
    )


def test_what_is_waited_for_turns_a_spinner_on_a_terminal_alone() -> None:
    console, stream, _ = make_console(is_terminal=True)
    for text in ("importing torch", "importing torch", ""):
        console.turn(text)
    console.show("worker 0", "stdout", LinePart(b"x"))
    shown = stream.getvalue()
    assert b"[graphsplit] | importing torch" in shown and b"[graphsplit] / importing" in shown
    assert shown.count(b"importing") == 2
    console, stream, _ = make_console(is_terminal=False)
    console.turn("importing torch")
    assert stream.getvalue() == b""


def test_capturing_and_planning_last_until_a_worker_says_something_else() -> None:
    begun = LinePart(b"[graphsplit] capturing the train step")
    planned = LinePart(b"[graphsplit] ok")
    console, stream, _ = make_console(is_terminal=True, environ={"NO_COLOR": "1"})
    console.show("worker 0", "stderr", begun)
    assert console.turns
    console.show("scheduler", "stdout", LinePart(b"all are here"))
    console.turn()
    assert b"[graphsplit] / capturing the train step" in stream.getvalue() and console.turns
    console.show("worker 0", "stderr", planned)
    assert stream.getvalue().endswith(b"\r\x1b[K[worker 0] [graphsplit] ok\n") and not console.turns
    console, stream, _ = make_console(is_terminal=False)
    console.show("worker 0", "stderr", begun)
    assert stream.getvalue() == b"[worker 0] [graphsplit] capturing the train step\n"
    assert not console.turns


def test_what_is_captured_again_is_a_line_of_its_own() -> None:
    again = LinePart(b"[graphsplit] capturing the train step again: the batch has other shapes")
    console, stream, _ = make_console(is_terminal=True, environ={"NO_COLOR": "1"})
    console.show("worker 0", "stderr", again)
    assert stream.getvalue() == b"[worker 0] " + again.text + b"\n" and not console.turns


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_echoes_the_last_line_is_left_out(is_terminal: bool) -> None:
    console, stream, _ = make_console(is_terminal=is_terminal, environ={"NO_COLOR": "1"})
    heard = b"[graphsplit] worker 1 ended because of an error that the script caught: no"
    found = b"the job failed: the workers have made different calls"  # nobody else tells it
    for text in (
        b"worker 0 ended because worker 1 (host a, pid 3) failed: ValueError: no",
        b"the same error as worker 1: ValueError: no",
        b"worker 2 was interrupted: ended by SIGINT; train.py:3",
    ):
        console.show("worker 0", "stderr", LinePart(b"[graphsplit] " + text))
    console.show("worker 1", "stderr", LinePart(heard))
    for text in (
        b"the job failed: worker 1 (host a, pid 3) failed: no; its log has the whole story",
        b"the job failed: worker 1 (host a, pid 3) was lost: its process was killed by SIGKILL",
        found,
    ):
        console.show("scheduler", "stderr", LinePart(b"[scheduler] " + text))
    assert stream.getvalue() == b"[worker 1] " + heard + b"\n[scheduler] " + found + b"\n"
