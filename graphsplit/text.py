"""Texts for people: tables, lists of ranks, first differences, cuts to a length. Pure."""

from __future__ import annotations

import difflib
import functools
import inspect
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from itertools import zip_longest
from pathlib import PurePath
from typing import Any, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from graphsplit.errors import ConfigurationError

F = TypeVar("F", bound=Callable[..., Any])

_KINDS_OF_PATHS = ("PurePosix", "PureWindows", "Posix", "Windows")
# Names of arguments in other libraries, and here.
_USUAL_ARGUMENTS = {
    "model": "net", "module": "net", "network": "net", "loss": "loss_fn", "criterion": "loss_fn",
    "optim": "optimizer", "optimizers": "optimizer", "amp": "autocast", "grad_clip": "clip",
    "num_epochs": "epochs", "dataloader": "loader", "train_loader": "loader", "data": "loader",
    "validation_data": "validation", "val_loader": "validation", "valid": "validation",
    "steps_per_epoch": "steps", "nprocs": "workers", "num_workers": "workers",
    "timeout": "timeout_s", "monitor": "metric", "filepath": "path", "dirpath": "path",
}  # fmt: skip
PATHS = tuple(getattr(pathlib, f"{kind}Path") for kind in _KINDS_OF_PATHS)
_TIMES = (date, time, datetime, timedelta, timezone, ZoneInfo)
# Values that never change, and whose text tells all; what is derived from these may hold more.
TOLD_BY_TEXT = frozenset((Decimal, Fraction, UUID, *_TIMES, *PATHS))
_CUT = "\n... ({} characters left out) ...\n"


def is_told_by_text(value: Any) -> bool:
    """Whether this is a value that never changes and is all in its text: most time zones are."""
    if type(value) not in TOLD_BY_TEXT:
        return False
    zone = value if type(value) is ZoneInfo else getattr(value, "tzinfo", None)
    is_known = zone is None or type(zone) is timezone or (type(zone) is ZoneInfo and zone.key)
    return bool(is_known)


def described(value: Any) -> str:
    """A value that is of a wrong kind, for an error: its type, or the class that it is."""
    if isinstance(value, type):
        return f"the class {value.__name__}; did you mean {value.__name__}(...)?"
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """``a train step``, ``an eval step``."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def need(call: str, name: str, value: Any, is_right: object, expected: str) -> None:
    """Refuse an argument of a public function that is of a wrong kind.

    Args:
        call: The function, as users write it: ``"gs.loop"``.
        name: The argument's name.
        value: The argument.
        is_right: Whether it is one.
        expected: In words: ``"True or False"``.

    Raises:
        ConfigurationError: It is none.
    """
    if not is_right:
        is_short = isinstance(value, (bool, int, float, str, type(None)))
        is_empty = isinstance(value, (list, tuple, dict)) and not value
        shown = repr(value)[:80] if is_short or is_empty else described(value)
        raise ConfigurationError(f"{call}: {name}={shown}\n  Fix: pass {expected}.")


def called(name: str) -> Callable[[F], F]:
    """Decorate a public function: arguments that it does not take are told with those it takes.

    Args:
        name: The function, as users write it: ``"model.train"``. Of a class, how it is made.
    """

    def decorate(function: Any) -> Any:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if _fits(function, args, kwargs):
                    raise  # it comes from inside
                told = _told_of_arguments(name, function, str(error))
            raise TypeError(told)

        return call

    return decorate


def _fits(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function takes so many arguments, of these names."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _told_of_arguments(name: str, function: Callable[..., Any], problem: str) -> str:
    """Python's own sentence under the name that users write, the name meant, and what fits."""
    taken = [
        one.replace(annotation=inspect.Parameter.empty)
        for one in inspect.signature(function).parameters.values()
        if one.name != "self"
    ]
    names = [one.name for one in taken]
    problem = problem.partition("() ")[2] or problem
    if problem.startswith("takes "):  # Python counts ``self``
        most = sum(one.kind is not one.KEYWORD_ONLY for one in taken)
        problem = f"takes {f'at most {most}' if most else 'no'} arguments without a name"
    unknown = re.search("unexpected keyword argument '(.*?)'", problem)
    twice = re.search("multiple values for argument '(.*)'", problem)
    hint = ""
    if unknown:
        usual = {k: v for k, v in _USUAL_ARGUMENTS.items() if v in names}
        hint = meant(unknown[1], names, usual)
    elif twice:
        hint = f"; it is number {names.index(twice[1]) + 1} of those without a name"
    shown = str(inspect.Signature(taken))
    return f"{name}() {problem}{hint}\n  Fix: {name}{shown}"


def join_numbers(numbers: Iterable[int], *, most: int = 32) -> str:
    """``1, 4, 5``; beyond ``most`` of them, the count of those left out."""
    listed = list(numbers)
    shown = ", ".join(str(number) for number in listed[:most])
    return shown if len(listed) <= most else f"{shown} and {len(listed) - most} more"


def forming_line(num_workers: int, missing: Sequence[int]) -> str:
    """``3 of 5 workers registered, missing ranks 1, 4``."""
    registered = f"{num_workers - len(missing)} of {num_workers} workers registered"
    return f"{registered}, missing ranks {join_numbers(missing)}" if missing else registered


def no_attribute(
    owner: str, name: str, public: Iterable[str], usual: Mapping[str, str]
) -> AttributeError:
    """The error of an object that has no such attribute; tells which one may have been meant.

    Args:
        owner: What has no such attribute: ``"'Model' object"``.
        name: The attribute.
        public: Those that it has.
        usual: Names that other libraries have for them.
    """
    hint = meant(name, public, usual)
    # Without an object Python adds no guess of its own.
    return AttributeError(f"{owner} has no attribute {name!r}{hint}", name=name, obj=None)


def meant(
    name: str, public: Iterable[str], usual: Mapping[str, str], *, cutoff: float = 0.7
) -> str:
    """``; did you mean 'train'?``; empty if no name is near. Arguments as for ``no_attribute``."""
    names = sorted(one for one in public if not one.startswith("_"))
    near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    found = usual.get(name) or next(iter(near), "")
    return f"; did you mean {found!r}?" if found else ""


def align(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """A table's lines, two spaces between its columns; columns in ``right`` end flush.

    Rows may be shorter than others.
    """
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]


def short_source(source: str) -> str:
    """``file:line`` with the last folder only: the same text on every machine."""
    return "/".join(PurePath(source).parts[-2:])


def cut_middle(text: str, most: int) -> str:
    """At most ``most`` characters, keeping both ends: a traceback's start and its error."""
    if len(text) <= most:
        return text
    note = _CUT.format(len(text) - most)
    keep = max(0, most - len(note))
    head = keep // 3
    return (text[:head] + note + text[len(text) - (keep - head) :])[:most]


def cut_end(text: str, most: int) -> str:
    """At most ``most`` characters of the start of a line, with an ellipsis if it was cut."""
    return text if len(text) <= most else text[: most - 3] + "..."


def split_lines(text: bytes, most: int) -> Iterator[tuple[bytes, bool]]:
    """Parts of at most ``most`` bytes that end with a line where they can; whether each is last."""
    start = 0
    while len(text) - start > most:
        end = text.rfind(b"\n", start, start + most) + 1
        if end <= start:  # one line that is longer
            end = start + most
        yield text[start:end], False
        start = end
    yield text[start:], True


def first_difference(first: str, second: str) -> tuple[int, str, str] | None:
    """Line number (from 1) and both lines where two texts differ; None if they are equal.

    A line that one text does not have any more is shown as ``<end of text>``.
    """
    lines, others = first.split("\n"), second.split("\n")
    pairs = zip_longest(lines, others, fillvalue="<end of text>")
    return next(((n, *pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1]), None)


def encodable(text: str) -> str:
    """The text without lone surrogates, which have no place in UTF-8 messages."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


_identities: set[int] = set()  # that code was told while it was recorded


def note_identity(number: int) -> int:
    """Note what ``id`` gives to code that is recorded: another number on each worker."""
    _identities.add(number)
    return number


def without_identities(text: str) -> str:
    """A text with no number in it that ``id`` gave to code that was recorded."""
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return re.sub(r"\d{9,}", lambda n: "an identity" if int(n[0]) in _identities else n[0], text)
