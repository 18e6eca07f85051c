"""Refuse what forward reads from outside, and what would be something else at the next step.

Clocks, files, the environment, iterators and generators of random numbers that were there before:
a graph would keep what it read when it was captured, for ever. Calls are seen by Python's hook for
profilers. It is off inside torch's functions, where nearly all of a capture's time goes.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import dis
import functools
import inspect
import io
import os
import random
import resource
import subprocess
import sys
import time
import uuid
from _lsprof import Profiler
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from graphsplit.errors import CaptureError
from graphsplit.frames import is_users, line_now
from graphsplit.torch_ext.function_modes import TorchCalls
from graphsplit.torch_ext.private import SWITCHES

_OPAQUE = "keep the module or function that does it whole, with gs.opaque"


class DrawsError(CaptureError):
    """Code draws random numbers outside of torch: it is recorded only if it is kept whole."""


@dataclass(frozen=True)
class _Read:
    """Something that forward may read.

    Attributes:
        what: What it does, for people.
        way_out: What to do instead.
        by_libraries: Whether it is refused in installed packages, too: what those ask a clock or
            the environment for is no value of the network.
        draws: Whether it would be right in code that is kept whole.
        outcome: What would come of it, for people.
    """

    what: str
    way_out: str
    by_libraries: bool = False
    draws: bool = False
    outcome: str = "the captured graph would keep what it got, at every step"


_CLOCK = _Read("reads a clock", "hand the time in as a tensor")
_ENVIRONMENT = _Read("reads the environment", "read it in __init__, into an attribute")
_FILE = _Read("opens a file", "read it in __init__, or in the data set")
_FILE_SYSTEM = _Read("asks for files", "ask in __init__, into an attribute")
_PROCESS = _Read("starts another process", "run it outside of forward")
_KEYS = _Read("asks for input", "ask outside of forward")
_SYSTEM = _Read(
    "draws from the system's random numbers",
    "draw with torch from the default generator",
    by_libraries=True,
)
_DRAW = _Read(
    "draws from a random.Random of its own",
    "draw with torch from the default generator",
    by_libraries=True,
    draws=True,
)
_GENERATOR = _Read(
    "seeds, asks or sets a torch.Generator",
    "do it outside of forward, or draw with torch from the default generator",
    by_libraries=True,
)
_MODULE = _Read(
    "draws from Python's module random",
    "draw with torch from the default generator, and choose by torch.where",
    by_libraries=True,
    draws=True,
)
_NEXT = _Read(
    "takes the next item of a generator that was there before",
    "hand the item in with the batch",
    by_libraries=True,
)
_SWITCH = _Read(
    "switches how torch computes (sdpa_kernel, the precision of matmul, the number of threads)",
    "switch it in the script, around the step",
    by_libraries=True,
    outcome="the operations of the captured graph would run without it",
)
_CLOCKS = (
    *("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"),
    *("process_time", "process_time_ns", "thread_time", "thread_time_ns"),
    *("clock_gettime", "clock_gettime_ns", "localtime", "gmtime", "ctime", "asctime", "strftime"),
)
_FUNCTIONS: dict[Any, _Read] = {
    **{getattr(time, name): _CLOCK for name in _CLOCKS if hasattr(time, name)},
    **{function: _CLOCK for function in (os.times, os.getloadavg, resource.getrusage)},
    **{function: _FILE for function in (io.open, os.open, os.listdir, os.scandir)},
    **{function: _FILE_SYSTEM for function in (os.stat, os.lstat, os.access)},
    builtins.input: _KEYS,
    os.system: _PROCESS,
    os.urandom: _SYSTEM,
    **({os.getrandom: _SYSTEM} if sys.platform == "linux" else {}),
}
_OF_DATES = frozenset(("now", "utcnow", "today"))
_OF_GENERATORS = frozenset(("random", "getrandbits", "seed", "setstate"))
_OF_TORCHS = frozenset(("seed", "initial_seed", "manual_seed", "get_state", "set_state"))
_ENVIRON: Any = type(os.environ)
_CODES: dict[CodeType, _Read] = {
    getattr(_ENVIRON, name).__code__: _ENVIRONMENT for name in ("__getitem__", "__iter__")
}
_CODES[uuid.uuid1.__code__] = _SYSTEM
_CODES[subprocess.Popen.__init__.__code__] = _PROCESS
# Names are compared first: to hash a piece of code takes longer than all else here.
_NAMES = _OF_DATES | _OF_GENERATORS | _OF_TORCHS | {f.__name__ for f in _FUNCTIONS}
_NAMES_OF_CODES = frozenset(code.co_name for code in _CODES)
_KERNEL_SWITCHES: tuple[Callable[[], Any], ...] = (*SWITCHES, torch.get_num_threads)
_MADE_HERE = (random.Random.__init__.__code__,)
_GAUSS = random.Random.gauss.__code__  # gives what it has drawn before, every other time
# Modules and packages of Python that do it for their callers.
_THROUGH = frozenset(
    (
        *("random", "secrets", "uuid", "os", "_collections_abc", "collections", "pathlib"),
        *("genericpath", "posixpath", "subprocess"),
    )
)

# Packages that torch itself runs on, between the user's code and its own.
_OF_TORCH = frozenset(("sympy", "mpmath", "networkx"))


class OutsideReads(TorchCalls):
    """Refuses, while a network's code runs, what the graph would not read again.

    ``with OutsideReads():`` runs what is recorded; no other mode may be entered after it.

    Raises:
        CaptureError: Names the user's line and the way out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outer: Any = None
        self._switches: Any = None
        self._refusal: CaptureError | None = None
        self._new: list[Any] = []  # generators that the code itself has made; held for their ids
        self._new_ids: set[int] = set()

    def __enter__(self) -> OutsideReads:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._switches = _kernel_switches()
        self._outer = sys.getprofile()
        if isinstance(self._outer, Profiler):
            self._outer.disable()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *exception: Any) -> None:
        sys.setprofile(None)
        if isinstance(self._outer, Profiler):
            self._outer.enable()
        elif self._outer is not None:
            sys.setprofile(self._outer)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._new.clear()
        if self._refusal is not None:
            raise self._refusal

    def called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function of torch, unseen: none of the code that runs inside is the user's."""
        if _kernel_switches() != self._switches:
            self._check(_SWITCH, _users_frame(sys._getframe(1)))
        seen_by, traced_by = sys.getprofile(), sys.gettrace()
        sys.setprofile(None)
        sys.settrace(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(traced_by)
            sys.setprofile(seen_by)

    def _see(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            read = self._read_by(called) if called.__name__ in _NAMES else None
            if read is not None:
                self._check(read, frame)
        elif event == "call":
            self._see_python(frame, frame.f_code)

    def _see_python(self, frame: FrameType, code: CodeType) -> None:
        if code.co_name in _NAMES_OF_CODES and code in _CODES:
            self._check(_CODES[code], frame.f_back)
        elif code in _MADE_HERE:
            self._see_new(frame)
        elif code is _GAUSS and (read := self._drawn_from(frame.f_locals["self"])):
            self._check(read, frame.f_back)
        elif code.co_flags & inspect.CO_GENERATOR:
            self._see_generator(frame)

    def _see_new(self, frame: FrameType) -> None:
        """A ``random.Random`` that is made and seeded here draws the same at every step."""
        if frame.f_locals.get("x") is None:
            self._check(_SYSTEM, frame.f_back)
        self._hold(frame.f_locals["self"])

    def _see_generator(self, frame: FrameType) -> None:
        """One that is first asked for an item here is new, or among ``KeptIterators``."""
        if frame.f_lasti <= _start_of(frame.f_code):
            self._hold(frame)
        elif id(frame) not in self._new_ids:
            with contextlib.suppress(CaptureError):  # raised here, it would end the generator
                self._check(_NEXT, frame.f_back)

    def _hold(self, made: Any) -> None:
        self._new.append(made)
        self._new_ids.add(id(made))

    def _drawn_from(self, owner: random.Random) -> _Read | None:
        if id(owner) in self._new_ids:
            return None
        return _MODULE if owner is random._inst else _DRAW

    def _read_by(self, called: Any) -> _Read | None:
        name = called.__name__
        if name in _OF_GENERATORS and isinstance(called.__self__, random.Random):
            return self._drawn_from(called.__self__)
        if name in _OF_TORCHS and isinstance(called.__self__, torch.Generator):
            return _GENERATOR
        if name in _OF_DATES:
            owner = called.__self__
            return _CLOCK if inspect.isclass(owner) and issubclass(owner, datetime.date) else None
        return _FUNCTIONS.get(called) if called.__module__ is not None else None

    def _check(self, read: _Read, frame: FrameType | None) -> None:
        while frame is not None and (
            _package_of(frame) in _THROUGH or frame.f_code.co_filename == torch.random.__file__
        ):
            frame = frame.f_back
        if frame is None or get_proxy_mode() is None:  # what is kept whole runs at every step
            return
        in_library = "site-packages" in frame.f_code.co_filename
        if _is_users(frame) and (read.by_libraries or not in_library):
            kind = DrawsError if read.draws else CaptureError
            refusal = kind(
                f"forward or the loss {read.what}; {read.outcome}\n"
                f"  {line_now(frame)}\n  Fix: {read.way_out}, or {_OPAQUE}."
            )
            self._refusal = self._refusal or refusal  # pathlib catches a ValueError
            raise refusal


def _kernel_switches() -> tuple[Any, ...]:
    """Torch's switches that steer which bits an operation gives, when it runs."""
    return tuple([get() for get in _KERNEL_SWITCHES])


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """The user's frame that a call of torch, perhaps by a layer of torch, comes from."""
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return frame


def _is_users(frame: FrameType) -> bool:
    if not is_users(frame.f_code.co_filename):
        return False
    return _package_of(frame) not in _OF_TORCH


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


@functools.cache
def _start_of(code: CodeType) -> int:
    """Where a generator stands when it is asked for its first item."""
    names = ((found.opname, found.offset) for found in dis.get_instructions(code))
    return next((offset for name, offset in names if name == "RESUME"), -1)
