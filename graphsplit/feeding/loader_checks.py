"""Loaders that give each worker a share of the data, and loaders that differ from worker to worker.

Data parallelism gives each process 1/N of the samples. Here all workers train on each batch
together, so such a loader would leave N - 1 of N samples out, without a word where one worker alone
reads it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from graphsplit.batches.signature import fingerprint
from graphsplit.checkpoint.generators import named_parts
from graphsplit.checkpoint.other_loaders import length_of
from graphsplit.checkpoint.position import generators_of
from graphsplit.errors import ConfigurationError, LoaderMismatchError
from graphsplit.job.group import WorkerGroup
from graphsplit.job.readers import parts_of
from graphsplit.text import first_difference
from graphsplit.torch_ext.replaced import READ_LOADER

# A number of shares, and which one is meant: torch and transformers, Hugging Face's data sets,
# accelerate, torchdata.
_SHARES = (
    ("num_replicas", "rank"),
    ("world_size", "rank"),
    ("num_processes", "process_index"),
    ("num_of_instances", "instance_id"),
)


def refuse_shares(loader: Any, name: str) -> None:
    """Refuse a loader of which a part gives one share of the data.

    Args:
        loader: The loader.
        name: The call that it was passed to, as in ``"train"``.

    Raises:
        ConfigurationError: A sampler, batch sampler or data set does.
    """
    for part in parts_of(loader):
        for count_name, index_name in _SHARES:
            count, index = (_number(part, one) for one in (count_name, index_name))
            if count > 1 and (index >= 0 or count_name == "num_replicas"):
                kind = type(part).__qualname__
                raise ConfigurationError(
                    f"{name} was given a loader with a {kind} of {count_name}={count}: it gives "
                    f"1/{count} of the data, one share for each process of data parallelism; here "
                    f"all workers train on every batch together\n"
                    f"  Fix: pass the whole data on every worker, as in DataLoader(dataset, "
                    f"shuffle=True, generator=torch.Generator().manual_seed(0)), or give the "
                    f"{kind} {count_name}=1."
                )


def watch_loaders(is_watched: Callable[[], bool]) -> None:
    """Refuse shares in whatever loop reads a ``DataLoader``, from now on.

    Args:
        is_watched: Whether such a loop may be under way.
    """
    owner, name = READ_LOADER
    read = getattr(owner, name)
    if hasattr(read, _WATCHED):
        return

    @functools.wraps(read)
    def iterate(loader: Any) -> Any:
        if is_watched():
            refuse_shares(loader, "a loop under gs.distribute")
        return read(loader)

    setattr(iterate, _WATCHED, True)
    setattr(owner, name, iterate)


_WATCHED = "graphsplit_watched"


def _number(part: Any, name: str) -> int:
    found = getattr(part, "__dict__", {}).get(name)
    return found if type(found) is int else -1


def compare_loaders(
    loader: Any, asked: str, group: WorkerGroup, *, with_states: bool, marks: str = ""
) -> str:
    """See that all workers were given the same loader. Collective; reads no batch.

    Args:
        loader: This worker's loader.
        asked: What the script asked for beside it: how many epochs. One line.
        group: All workers.
        with_states: Whether its generators must stand alike: they are put elsewhere, where a
            loaded state goes on.
        marks: Digits, as many on each worker, that it tells by the way.

    Returns:
        The largest of all workers' marks, place by place.

    Raises:
        LoaderMismatchError: Two loaders, or what was asked for, differ; raised on all workers.
    """
    if group.num_workers == 1:
        return marks
    facts = (f"{name}: {value}" for name, value in _facts(loader, with_states))
    told = [text.partition("\n") for text in group.gather("\n".join((marks, asked, *facts)))]
    largest = "".join(map(max, zip(*(head for head, *_ in told), strict=True)))
    verdict = _first_difference([text for *_, text in told])
    largest, _, verdict = group.share(f"{largest}\n{verdict}").partition("\n")
    if verdict:
        raise LoaderMismatchError(verdict)
    return largest


def _first_difference(told: list[str]) -> str:
    """The first difference between worker 0 and another; empty if nothing does."""
    for rank, text in enumerate(told):
        found = first_difference(told[0], text)
        if found is not None:
            line, mine, theirs = found
            what, fix = "loaders", "the same data, order and seed; workers do not get shares."
            if line == 1:
                what, fix = "arguments", "the same number of epochs and steps."
            return (
                f"the {what} of workers 0 and {rank} differ at the start of train\n"
                f"  worker 0: {mine}\n  worker {rank}: {theirs}\n"
                f"  Fix: give all workers {fix}"
            )
    return ""


def _facts(loader: Any, with_states: bool) -> Iterator[tuple[str, Any]]:
    """The facts of a loader that are known without reading it: the same on all workers."""
    yield "length", length_of(loader)
    yield "batch size", getattr(loader, "batch_size", None)
    yield "drop_last", getattr(loader, "drop_last", None)
    for path, part in named_parts(loader):
        yield path, f"{type(part).__module__}.{type(part).__qualname__}"
        yield f"length of its {path}", length_of(part)
        indices = getattr(part, "indices", None)
        if isinstance(indices, (list, tuple, range, np.ndarray, torch.Tensor)):
            yield f"indices of its {path}", _digest(np.asarray(indices).tobytes())
        if isinstance(part, TensorDataset):
            yield f"first, middle and last row of its {path}", _rows(part)
    if with_states:
        states: Mapping[str, torch.Generator] = generators_of(loader)
        for path, generator in states.items():
            yield f"state of its {path}", _digest(generator.get_state().numpy().tobytes())


def _rows(dataset: TensorDataset) -> str:
    length = len(dataset)
    places = sorted({0, length // 2, length - 1}) if length else []
    return f"{fingerprint((tuple(dataset[place] for place in places), {})):08x}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
