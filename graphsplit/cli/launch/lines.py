"""Cuts a stream of bytes into lines and progress updates. Pure: bytes in, pieces out."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class LinePart:
    """One line, or one state of a line that is still being redrawn.

    Attributes:
        text: Its bytes, without the end of line.
        is_update: True if a carriage return drew it, so that the next piece may replace it.
    """

    text: bytes
    is_update: bool = False


class LineCutter:
    """Cuts one stream. Progress bars begin each redraw with a carriage return, or end it so."""

    def __init__(self) -> None:
        self._pending = b""
        self._is_redraw = False
        self._last_update = b""

    def feed(self, chunk: bytes) -> list[LinePart]:
        r"""Take the next bytes; ``b"\r 10%\r 20%\nok"`` gives an update, and the line `` 20%``."""
        pieces: list[LinePart] = []
        rest = self._pending + chunk
        while (end := _first_end(rest)) >= 0:
            text, is_newline, rest = rest[:end], rest[end : end + 1] == b"\n", rest[end + 1 :]
            if is_newline:
                # With "\r\n", the return has already turned the text into an update.
                text = text or self._last_update
                pieces.append(LinePart(text))
            elif text:
                pieces.append(LinePart(text, is_update=True))
            self._last_update = b"" if is_newline else text
            self._is_redraw = not is_newline
        if self._is_redraw and rest:
            pieces.append(LinePart(rest, is_update=True))
        elif len(rest) > MAX_LINE_BYTES:
            pieces.append(LinePart(rest))
            rest = b""
        self._pending = rest
        return pieces

    def finish(self) -> list[LinePart]:
        """The stream ended: return what was left without an end of line."""
        rest = self._pending or self._last_update
        self._pending = self._last_update = b""
        return [LinePart(rest)] if rest.strip() else []


def _first_end(text: bytes) -> int:
    ends = [at for at in (text.find(b"\n"), text.find(b"\r")) if at >= 0]
    return min(ends, default=-1)
