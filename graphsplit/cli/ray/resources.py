"""The resources of each worker on a Ray cluster, from a small YAML file. Pure.

::

    all: {CPU: 1, memory: 2 GiB}
    0: {CPU: 2}
    3-4: {GPU: 1, big_disk: 1}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import click
import yaml

Resources = Mapping[str, float]
DEFAULT: Resources = {"CPU": 1.0}
_ALL = "all"
_RANKS = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(KiB|MiB|GiB|TiB|)")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_EXPECTED = "expected ranks, as in `0: {CPU: 2}` or `1-3: {GPU: 1}`, or `all:`"


def read_resources(text: str, num_workers: int, source: str) -> list[Resources]:
    """The resources of each worker, by rank.

    Args:
        text: The file.
        num_workers: How many workers there are.
        source: Its name, for errors.

    Raises:
        click.BadParameter: It is not what it should be.
    """
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise _bad(source, f"is no YAML: {error}") from None
    if not isinstance(found, dict):
        raise _bad(source, f"holds no mapping; {_EXPECTED}")
    for_all = {**DEFAULT, **_resources(found.pop(_ALL, {}), f"{_ALL}:", source)}
    own: list[Resources] = [for_all] * num_workers
    for key, value in found.items():
        ranks = _RANKS.fullmatch(str(key))
        if ranks is None:
            raise _bad(source, f"has {key!r}; {_EXPECTED}")
        first, last = int(ranks[1]), int(ranks[2] or ranks[1])
        if not first <= last < num_workers:
            raise _bad(source, f"has {key!r}, but the job has workers 0 to {num_workers - 1}")
        given = _resources(value, f"{key}:", source)
        own[first : last + 1] = [{**one, **given} for one in own[first : last + 1]]
    own = [{name: amount for name, amount in one.items() if amount} for one in own]
    if {} in own:
        raise _bad(source, f"gives worker {own.index({})} nothing; expected some CPU, for example")
    return own


def _resources(value: Any, where: str, source: str) -> dict[str, float]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise _bad(source, f"{where} {value!r} is no mapping of resources, as in {{CPU: 2}}")
    return {name: _amount(name, amount, source) for name, amount in value.items()}


def _amount(name: str, amount: Any, source: str) -> float:
    if name == "memory" and isinstance(amount, str) and (parts := _BYTES.fullmatch(amount)):
        return float(parts[1]) * _UNITS[parts[2]]
    if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 <= amount < 1e15:
        raise _bad(source, f"{name}: {amount!r} is no amount; expected a number, or 2 GiB")
    return float(amount)


def _bad(source: str, problem: str) -> click.BadParameter:
    return click.BadParameter(f"{source} {problem}", param_hint="--resources")
