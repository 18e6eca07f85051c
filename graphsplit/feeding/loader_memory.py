"""A loader's memory from epoch to epoch, as far as workers can tell it each other.

Generators of random numbers in the loader, its samplers and its data set; whole numbers that a
sampler keeps, such as the epoch; and numbers and texts in attributes of the data set, or of a
loader without one, that reading has changed: by them it may decide what to change of the network.
Only workers that read a loader draw from them: the others are told, at the end of the epoch.
"""

from __future__ import annotations

from typing import Any

from graphsplit.checkpoint.generators import is_same, put_remembered, remembered_by
from graphsplit.checkpoint.position import generators_of
from graphsplit.encoding.values import Fixed
from graphsplit.errors import FrameError
from graphsplit.job.control import ControlChannels

_PLAIN = (bool, int, float, str, type(None))


def loader_memory(loader: Any) -> dict[str, Any]:
    """A loader's memory now."""
    remembered = remembered_by(loader, Fixed())
    del remembered[""]  # the process's own generators
    given = {path: generator.get_state() for path, generator in generators_of(loader).items()}
    return {"generators": given, "remembered": remembered, "of_data": _plain_of_data(loader)}


def since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The part of ``now`` to tell others: of the data set only what was otherwise ``before``.

    Other attributes may differ from worker to worker by right.
    """
    known = before["of_data"]
    changed = {
        name: value
        for name, value in now["of_data"].items()
        if name not in known or not is_same(known[name], value)
    }
    return {**now, "of_data": changed}


def _plain_of_data(loader: Any) -> dict[str, Any]:
    held = getattr(_data_of(loader), "__dict__", {})
    return {name: value for name, value in held.items() if type(value) in _PLAIN}


def _data_of(loader: Any) -> Any:
    """The data set; a loader of the user's that has none is one itself."""
    return getattr(loader, "dataset", loader)


def share_loader_memory(
    control: ControlChannels, loader: Any, memory: Any, *, source: int, takes: bool
) -> None:
    """Let workers' loaders remember what one worker's does. Collective.

    Args:
        control: The channels of the job.
        loader: This worker's loader.
        memory: What ``since`` gave on ``source``; ignored elsewhere.
        source: The worker that has read the loader.
        takes: Whether this worker's loader is to take it; one that was read has it already.

    Raises:
        FrameError: What came is nothing that the loader could remember.
    """
    told = control.share_value(memory, source=source, what="what a loader remembers")
    if not takes:
        return
    try:
        generators = generators_of(loader)
        for path, state in told["generators"].items():
            generators[path].set_state(state)
        put_remembered(loader, told["remembered"])
        for name, value in told["of_data"].items():
            vars(_data_of(loader))[name] = value
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise FrameError(
            f"worker {source} sent what the loader here cannot remember: {error}"
        ) from error
