from __future__ import annotations

from graphsplit.cli.launch.lines import MAX_LINE_BYTES, LineCutter, LinePart


def update(text: bytes) -> LinePart:
    return LinePart(text, is_update=True)


def test_lines_are_cut_at_newlines_wherever_the_chunks_end() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"one\ntw") == [LinePart(b"one")]
    assert cutter.feed(b"o\n\n") == [LinePart(b"two"), LinePart(b"")]


def test_a_windows_line_end_is_one_line() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"one\r") == [update(b"one")]
    assert cutter.feed(b"\n") == [LinePart(b"one")]
    assert LineCutter().feed(b"one\r\n")[-1] == LinePart(b"one")


def test_a_progress_bar_gives_updates_and_its_last_state_as_a_line() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"\r 10%") == [update(b" 10%")]
    assert cutter.feed(b"\r 20%")[-1] == update(b" 20%")
    assert cutter.feed(b"\r100%\n")[-1] == LinePart(b"100%")
    assert cutter.feed(b"done\n") == [LinePart(b"done")]


def test_an_unfinished_line_is_shown_when_the_stream_ends() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"no end") == []
    assert cutter.finish() == [LinePart(b"no end")]
    assert cutter.finish() == []


def test_a_line_without_end_takes_bounded_memory() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"x" * (MAX_LINE_BYTES + 1)) == [LinePart(b"x" * (MAX_LINE_BYTES + 1))]
    assert cutter.finish() == []
