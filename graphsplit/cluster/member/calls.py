"""The calls that a worker has made, of those that all workers make in the same order.

As the checkers of MPI programs do (MUST; torch's ``DETAIL`` mode), the scheduler compares them: a
call that only some workers make is found when it stops the job, not when a deadline passes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary

from graphsplit.cluster.wire import limits
from graphsplit.cluster.wire.messages import CallMade, CallsMade
from graphsplit.errors import ConfigurationError
from graphsplit.frames import is_trainers, is_users, line_at, own_and_torchs
from graphsplit.text import cut_end, encodable

_Where = tuple[CodeType, int] | None
_Call = tuple[str, int, _Where]
_Calls = tuple[_Call, int]  # the last of some, and how many they are
T = TypeVar("T")
_LOOPS = ("train", "fit")  # of trainers: what these call is told by its own name

_IN_METRIC = (
    "cannot be called in a metric: metrics run on one worker alone, where the outputs are, and the "
    "others wait for it\n  Fix: call it in the script, after eval(), or in a callback."
)
_IN_STEP = (
    "cannot be called in forward or a loss: they are recorded once, and workers run parts of the "
    "recording, without this call\n"
    "  Fix: call it in the script, between two steps, or in a callback."
)
_IN_CODE = (
    "cannot be called in code that a step runs, kept whole or in a hook: only the workers where it "
    "is come to it, and the others wait for its values\n"
    "  Fix: call it in the script, between two steps, or in a callback."
)
_IN_LOADER = (
    "is called by a loader or its data set: only workers that read the data come to it, and the "
    "others wait for the batch\n"
    "  Fix: call it in the script or in a callback, and give the data what it returns."
)


class CallHistory:
    """Notes calls and milestones. One thread writes; others read ``made``.

    A *milestone* is a batch of a loader, a meeting of all workers, or the end of a piece of the
    script's own code inside a call (callbacks, a metric): each worker
    passes the same ones between the same calls. So nobody waits in the place of another one's code.

    Attributes:
        is_kept: Whether anything is told. Workers that come back to a job make fewer calls.
        reporting: What is raised inside ends the job, whichever thread it is raised in.
        computing: Tells whether a step runs code that others do not come to; None between steps.
        reads_alone: Whether a loader is asked for a batch, and not by all workers at this point.
    """

    def __init__(self) -> None:
        self.is_kept = True
        self.reporting: Callable[[], AbstractContextManager[None]] = nullcontext
        self.computing: Callable[[], bool] | None = None
        self._thread = 0  # that is in the open calls
        self._skipped = (*own_and_torchs(), contextlib.__file__)
        self.reads_alone = False
        self._refusal = ""
        self._process = os.getpid()
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._num_owners = 0
        # Number of calls, milestones, latest calls, open calls: replaced as a whole.
        self._state: tuple[int, int, tuple[_Calls, ...], tuple[_Call, ...]] = (0, 0, (), ())

    def around(self, calls: T, owner: Any = None) -> T:
        """The same methods, each of which is noted under its name as a call of all workers.

        Args:
            calls: Has the methods.
            owner: Whose they are, a Model's engine: those of the second one that is called, and of
                later ones, are told apart by its number.
        """
        return cast(T, _Noted(self, calls, owner))

    def name_of(self, owner: Any, name: str) -> str:
        """The name of a call of a Model, which comes now."""
        if owner is None:
            return name
        if owner not in self._numbers:
            self._num_owners += 1
            self._numbers[owner] = self._num_owners
        number = self._numbers[owner]
        return name if number == 1 else f"Model {number}.{name}"

    @property
    def is_reading(self) -> bool:
        """Whether a loader is asked for a batch now that others do not read at this point.

        Processes of a loader, and others that were forked, do nothing with other workers.
        """
        return self.reads_alone or os.getpid() != self._process

    @contextmanager
    def reading(self, *, is_alone: bool) -> Iterator[None]:
        """A Model's loader is asked for a batch, inside; alone, if not all workers do it here."""
        before, self.reads_alone = self.reads_alone, is_alone
        try:
            yield
        finally:
            self.reads_alone = before

    def inside_metric(self) -> AbstractContextManager[None]:
        """A metric runs inside, on this worker alone."""
        return self._refusing(_IN_METRIC)

    def inside_step(self) -> AbstractContextManager[None]:
        """Forward and loss run inside, as they are recorded."""
        return self._refusing(_IN_STEP)

    @contextmanager
    def _refusing(self, why: str) -> Iterator[None]:
        before, self._refusal = self._refusal, why
        try:
            yield
        finally:
            self._refusal = before

    def check(self, name: str) -> None:
        """Refuse a call that others would have to make with this worker, where they do not.

        Raises:
            ConfigurationError: It reads a batch, or runs code that is recorded or run here alone.
        """
        why = _IN_LOADER if self.is_reading else self._refusal
        is_others = bool(self._state[3]) and get_ident() != self._thread
        if not why and self.computing is not None and not is_others and self.computing():
            why = _IN_CODE
        if why:
            self._refuse(f"{name}() {why}")

    def _refuse(self, why: str) -> NoReturn:
        with self.reporting():
            raise ConfigurationError(why)
        raise AssertionError

    def begin(self, name: str) -> None:
        """A call begins, made by the nearest frame that is not graphsplit's or torch's.

        Raises:
            ConfigurationError: Others do not make it here, or another thread is in one.
        """
        self.check(name)
        num, milestones, latest, within = self._state
        thread = get_ident()
        if within and thread != self._thread:
            other = _told(*within[-1])
            at = other.source and f" at {other.source}"
            self._refuse(
                f"{name}() is called while another thread is in {other.name}(){at}: "
                f"all workers make their calls in the same order, which two threads do not keep\n"
                f"  Fix: call it in the thread that trains, as in a callback."
            )
        self._thread = thread
        where, trainers = _caller(sys._getframe(1), self._skipped)
        if trainers and trainers not in _LOOPS and name.isidentifier():
            name = trainers  # so the script knows it
        call = (name, milestones, where)
        self._state = (num + 1, milestones, _joined(latest, call), (*within, call))

    def end(self) -> None:
        """The call that began last is over."""
        num, milestones, latest, within = self._state
        self._state = (num, milestones, latest, within[:-1])

    def pass_milestone(self) -> None:
        """A batch is done with, or a meeting comes."""
        num, milestones, latest, within = self._state
        self._state = (num, milestones + 1, latest, within)

    def made(self) -> CallsMade:
        """The calls so far."""
        if not self.is_kept:
            return CallsMade()
        num, milestones, latest, within = self._state
        told = tuple(_told(*call, times) for call, times in latest)
        return CallsMade(num, milestones, told, _told(*within[-1]) if within else None)


class _Noted:
    """Has the methods of some calls; each notes when it begins and ends."""

    def __init__(self, history: CallHistory, calls: Any, owner: Any) -> None:
        self._history = history
        self._calls = calls
        self._owner = owner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        history, method = self._history, getattr(self._calls, name)
        shown = history.name_of(self._owner, name)

        def noted(*arguments: Any) -> Any:
            history.begin(shown)
            try:
                return method(*arguments)
            finally:
                history.end()

        setattr(self, name, noted)  # the next one is found at once
        return noted


def _caller(frame: FrameType | None, skipped: tuple[str, ...]) -> tuple[_Where, str]:
    """The script's line, and the function of a trainer that it calls, if it does not call us."""
    where, trainers = None, ""
    while frame is not None:
        code = frame.f_code
        is_within = is_trainers(code.co_filename)
        if is_within:
            trainers = code.co_name
        if not code.co_filename.startswith(skipped):
            is_script = not is_within and (where is None or is_users(code.co_filename))
            where = (code, frame.f_lineno) if is_script or where is None else where
            if is_script:
                break
        frame = frame.f_back
    return where, trainers


def _joined(latest: tuple[_Calls, ...], call: _Call) -> tuple[_Calls, ...]:
    """With one call more; those of its name since the same milestones are one, at the first's line.

    So a loop of such calls on one worker forgets nothing of what the others have made.
    """
    times = 1
    for index in range(len(latest) - 1, -1, -1):
        first, before = latest[index]
        if first[1] != call[1]:
            break
        if first[0] == call[0]:
            call, times = first, before + 1
            latest = latest[:index] + latest[index + 1 :]
            break
    return (*latest[1 - limits.MAX_CALLS :], (call, times))


def _told(name: str, milestones: int, where: _Where, times: int = 1) -> CallMade:
    line = "" if where is None else line_at(*where)
    shown = "".join(char if char.isprintable() else "?" for char in encodable(line))
    return CallMade(name, cut_end(shown, limits.MAX_PLACE_CHARS), milestones, times)
