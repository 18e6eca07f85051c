"""Python values inside ``torch.utils.checkpoint``, whose code eager runs again in backward.

A captured step runs that code once. So a value that it changes would be changed once instead of
twice, and one that is changed after it would be read as it was, instead of as it is by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphsplit.errors import CaptureError
from graphsplit.frames import users_line_now
from graphsplit.guards.recorder import ReadRecorder
from graphsplit.guards.values import any_leaf, differences, freeze
from graphsplit.guards.visitor import Noted
from graphsplit.torch_ext.private import FakeTensor


class RunAgain:
    """Refuses what a checkpoint would do otherwise when it runs again.

    Args:
        recorder: Notes the places that code reads and writes.
    """

    def __init__(self, recorder: ReadRecorder) -> None:
        self._recorder = recorder
        self._used: list[tuple[Noted, Any, str]] = []  # a place, its value then, the user's line

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Run what a checkpoint runs.

        Raises:
            CaptureError: It has changed a Python value, and there will be a backward.
        """
        if not torch.is_grad_enabled():
            yield
            return
        noted = self._recorder.noted
        with self._recorder.unseen():
            before = {key: freeze(one.place.read()) for key, one in noted.items()}
        asked = self._recorder.asked_anew()
        yield
        line = users_line_now()
        with self._recorder.unseen():
            for key, one in noted.items():
                if _differs(before.get(key, one.first), one):
                    raise _refusal(one, "is changed inside", line)
                if key in asked:
                    self._used.append((one, freeze(one.place.read()), line))

    def check(self) -> None:
        """Check, at the end of the step, that backward would read what forward read.

        Raises:
            CaptureError: What a checkpoint has read was changed after it.
        """
        for one, value, line in self._used:
            if _differs(value, one):
                raise _refusal(one, "is read inside, and changed after,", line)


def _differs(before: Any, one: Noted) -> bool:
    """Whether a place holds something else; tensors that code made and keeps do not count."""
    now = freeze(one.place.read())
    is_kept_tensor = any_leaf(now, lambda leaf: isinstance(leaf, (FakeTensor, torch.fx.Proxy)))
    return not is_kept_tensor and any(True for _ in differences(before, one.place.read()))


def _refusal(one: Noted, how: str, line: str) -> CaptureError:
    return CaptureError(
        f"{one.place.label} {how} a torch.utils.checkpoint, whose code runs again in backward: "
        f"the captured graph would run it once\n  {line}\n"
        f"  Fix: change the value in forward before the checkpoint, outside of what it runs; or "
        f"leave the checkpoint out and pass recompute to gs.Model."
    )
