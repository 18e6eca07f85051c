"""Who may read a loader: workers that have read all that was read of its parts."""

from __future__ import annotations

import gc
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from graphsplit.job.readers import LoaderReaders, parts_of


class Data(Dataset[Any]):
    __slots__ = ("inner",)

    def __init__(self, inner: object = None) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


def ranks(readers: LoaderReaders, loader: Any) -> set[int]:
    return set(readers.reading(loader, 3).ranks)


def test_everybody_may_read_what_nobody_has_read() -> None:
    assert ranks(LoaderReaders(), DataLoader(Data())) == {0, 1, 2}


def test_two_loaders_over_one_data_set_are_read_by_the_same() -> None:
    readers, data = LoaderReaders(), Data()
    readers.note(readers.reading(DataLoader(data), 3), {1, 2})
    assert ranks(readers, DataLoader(Subset(data, [0]))) == {1, 2}
    readers.note(readers.reading(DataLoader(Data(Data(data))), 3), {2})
    assert ranks(readers, DataLoader(data)) == {2}
    assert ranks(readers, DataLoader(Data())) == {0, 1, 2}
    readers.forget()
    assert ranks(readers, DataLoader(data)) == {0, 1, 2}


def test_what_all_are_told_anyway_is_read_by_all() -> None:
    readers = LoaderReaders()
    loader = DataLoader(TensorDataset(torch.ones(4)), shuffle=True, generator=torch.Generator())
    for one in (loader, [1, 2]):
        readers.note(readers.reading(one, 3), {1})
        assert ranks(readers, one) == {0, 1, 2}


def test_parts_are_found_in_closures_and_iterators() -> None:
    data = Data()

    def batches() -> Iterator[object]:
        yield data

    def use(one: object = data) -> object:
        return one

    running = batches()
    next(running)
    for holder in (
        itertools.islice(zip([data], strict=True), 2),
        map(use, [1]),
        running,
        batches,
        use,
        {"a": [(data,)]},
    ):
        assert any(part is data for part in parts_of(holder)), holder


def test_what_is_gone_is_forgotten_and_nothing_else() -> None:
    readers, shared = LoaderReaders(), [1]
    loader = DataLoader(Data([shared, {"a": 2}, deque()]))
    readers.note(readers.reading(loader, 3), {1})
    del loader
    gc.collect()
    ranks(readers, [1])
    assert [held for held, *_ in readers._known.values()] == [shared]
    assert ranks(readers, DataLoader(Data(shared))) == {1}
    del shared
    ranks(readers, [1])
    assert not readers._known


def test_what_two_loaders_have_in_common_by_chance_says_nothing() -> None:
    readers, size, data = LoaderReaders(), (1, 32, 32), TensorDataset(torch.ones(4))
    readers.note(readers.reading(DataLoader(Data([size, data])), 3), {1})
    assert ranks(readers, DataLoader(Data([size, data]))) == {0, 1, 2}


def test_batches_that_were_written_to_are_of_those_that_read_them() -> None:
    readers, batches = LoaderReaders(), [[torch.ones(1)]]
    readers.note(readers.reading(batches, 3), {1}, has_written=True)
    assert ranks(readers, batches) == {1}


def test_the_leader_of_an_epoch_under_way_reads_its_parts_for_all() -> None:
    readers, data = LoaderReaders(), Data()
    with readers.being_read(readers.reading(DataLoader(data), 3), 2):
        assert ranks(readers, DataLoader(Subset(data, [0]))) == {2}
        assert ranks(readers, DataLoader(Data())) == {0, 1, 2}
    assert ranks(readers, DataLoader(data)) == {0, 1, 2}


def test_a_function_of_no_module_is_looked_into():
    """Loaders whose workers persist hold such functions."""

    def of_no_module() -> None:
        pass

    of_no_module.__module__ = None  # type: ignore[assignment]
    assert LoaderReaders().reading([of_no_module], 2).ranks == {0, 1}
