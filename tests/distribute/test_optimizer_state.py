"""What a script does with ``optimizer.state`` between steps has the bits of one process."""

from __future__ import annotations

import collections
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, assert_same_bits, raised
from loops import small
from recovery_helpers import threads_as_workers
from torch import nn

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")

Act = Callable[[Any, Any, int], Any]
ADAM = "adam"


def training(act: Act, kind: str = ADAM, *, is_amsgrad: bool = False) -> Any:
    """Three steps, with ``act(net, optimizer, step)`` after each."""

    def loop(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net: Any = small(ranks)
        make: Any = {
            ADAM: lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=is_amsgrad),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
        }[kind]
        optimizer = make(net.parameters())
        net = distribute(net)
        for step in range(4):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(torch.randn(6, 8)), torch.arange(6) % 4)
            loss.backward()
            optimizer.step()
            yield loss.item()
            yield act(net, optimizer, step)
            yield copy.deepcopy(optimizer.state_dict())
        yield dict(net.state_dict())

    return loop


def zeroed(net: Any, optimizer: Any, step: int) -> None:
    for entry in optimizer.state.values():
        entry["exp_avg"].zero_()
        entry["exp_avg_sq"].mul_(0.5)


def counted_anew(net: Any, optimizer: Any, step: int) -> Any:
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p]["step"] = torch.tensor(float(step))
    optimizer.state[group["params"][0]]["step"] += 1
    return [float(entry["step"]) for entry in optimizer.state.values()]


def counted_by_values(net: Any, optimizer: Any, step: int) -> Any:
    for p in net.parameters():
        optimizer.state[p]["step"].fill_(2)
        optimizer.state[p]["step"] = optimizer.state[p]["step"] * 2
    return [entry["step"].item() for entry in optimizer.state.values()]


def cleared(net: Any, optimizer: Any, step: int) -> int:
    if step == 1:
        optimizer.state.clear()
    return len(optimizer.state)


def forgotten(net: Any, optimizer: Any, step: int) -> int:
    if step == 1:
        optimizer.state = collections.defaultdict(dict)
    return len(optimizer.state)


def one_deleted(net: Any, optimizer: Any, step: int) -> list[Any]:
    del optimizer.state[net.first.weight]
    entry = optimizer.state.pop(net.second.weight)
    return [net.first.weight in optimizer.state, list(entry), len(optimizer.state)]


def moved_to_the_end(net: Any, optimizer: Any, step: int) -> None:
    entry = optimizer.state.pop(net.first.weight)
    optimizer.state[net.first.weight] = entry


def masked(net: Any, optimizer: Any, step: int) -> None:
    torch.manual_seed(step)
    with torch.no_grad():
        for p in net.parameters():
            mask = (torch.rand(p.shape) > 0.5).float()
            p.mul_(mask)
            entry = optimizer.state[p]
            entry["exp_avg"] = entry["exp_avg"] * mask
            entry["exp_avg_sq"].mul_(mask)


def made_of_others(net: Any, optimizer: Any, step: int) -> Any:
    """What lives on one worker is made of what lives on another one."""
    total = sum(entry["exp_avg"].norm() for entry in optimizer.state.values())
    for p, entry in optimizer.state.items():
        entry["exp_avg"] = torch.zeros_like(p) + total * 0.01
        entry["exp_avg_sq"].copy_(p.grad**2)
    return float(total)


def taken_and_put_back(net: Any, optimizer: Any, step: int) -> None:
    saved = {p: {k: v.clone() for k, v in e.items()} for p, e in optimizer.state.items()}
    for p in saved:
        optimizer.state[p]["exp_avg"].fill_(7.0)
    for p, entry in saved.items():
        optimizer.state[p] = entry


def updated(net: Any, optimizer: Any, step: int) -> Any:
    entry = optimizer.state[net.first.weight]
    entry.update(exp_avg=torch.ones(entry["exp_avg"].shape))
    entry |= {"exp_avg_sq": torch.ones_like(entry["exp_avg"])}
    return entry.setdefault("note", 3), entry.pop("note"), list(entry), "exp_avg" in entry


def looked_at(net: Any, optimizer: Any, step: int) -> Any:
    kept = copy.deepcopy(optimizer.state[net.second.weight])
    return [
        [list(p.shape), [(key, value.sum().item()) for key, value in entry.items()]]
        for p, entry in optimizer.state.items()
    ] + [kept, isinstance(optimizer.state[net.first.weight], dict)]


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize(
    "act",
    [
        *(zeroed, counted_anew, counted_by_values, cleared, forgotten, one_deleted),
        *(moved_to_the_end, masked, made_of_others, taken_and_put_back, updated, looked_at),
    ],
    ids=lambda act: act.__name__,
)
def test_what_all_workers_do_to_an_optimizers_state(act: Act, num_workers: int) -> None:
    assert_same_bits(training(act), num_workers)


def test_a_pickle_of_it_has_the_entries_of_all_workers() -> None:
    def pickled(net: Any, optimizer: Any, step: int) -> Any:
        found = pickle.loads(pickle.dumps(optimizer.state))
        return [dict(entry) for entry in found.values()]

    assert_same_bits(training(pickled), 2)


def test_momentum_that_is_none_or_reset() -> None:
    def reset(net: Any, optimizer: Any, step: int) -> Any:
        found = []
        for p in net.parameters():
            entry = optimizer.state[p]
            found.append(entry["momentum_buffer"] is None)
            if step == 1:
                entry["momentum_buffer"] = None
            elif step == 2:
                entry["momentum_buffer"].mul_(0.5)
        return found

    assert_same_bits(training(reset, "sgd"), 2)


def test_an_entry_that_is_held_over_steps_is_the_present_one() -> None:
    held: list[Any] = []

    def held_on(net: Any, optimizer: Any, step: int) -> Any:
        if step == 0:
            held[:] = []
        held.append(optimizer.state[net.first.weight])
        held.append(optimizer.state[net.second.bias]["exp_avg"])
        return [one["step"].item() for one in held[::2]], [one.sum().item() for one in held[1::2]]

    def loop(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        mine: list[Any] = []

        def act(net: Any, optimizer: Any, step: int) -> Any:
            mine.append(optimizer.state[net.first.weight])
            mine.append(optimizer.state[net.second.bias]["exp_avg"])
            numbers = [one["step"].item() for one in mine[::2]]
            return numbers, [one.sum().item() for one in mine[1::2]]

        return training(act)(distribute, ranks)

    assert_same_bits(loop, 2)


def test_entries_of_other_shapes_than_their_parameters() -> None:
    def halved(net: Any, optimizer: Any, step: int) -> Any:
        for entry in optimizer.state.values():
            for value in entry.values():
                if value.dim():
                    value.mul_(0.5)
        return [sorted(entry) for entry in optimizer.state.values()]

    assert_same_bits(training(halved, "adafactor"), 2)


def test_what_was_loaded_is_seen_at_once_and_may_be_changed() -> None:
    def loaded(net: Any, optimizer: Any, step: int) -> Any:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for entry in optimizer.state.values():
            entry["exp_avg"].mul_(0.25)
        return len(optimizer.state)

    assert_same_bits(training(loaded), 2)


def test_entries_that_are_there_before_the_first_step() -> None:
    def loop(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net: Any = distribute(small(ranks))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            net(torch.randn(6, 8)).sum().backward()
            if step == 0:
                for p in net.parameters():
                    optimizer.state[p]["momentum_buffer"] = torch.ones_like(p) + p.grad
            optimizer.step()
            yield copy.deepcopy(optimizer.state_dict())

    assert_same_bits(loop, 2)


def test_a_tensor_that_was_put_in_is_not_looked_at_after_it_has_moved_on() -> None:
    def kept(net: Any, optimizer: Any, step: int) -> None:
        if step == 0:
            optimizer.mine = torch.zeros(net.first.weight.shape)
            optimizer.state[net.first.weight]["exp_avg"] = optimizer.mine
        elif step == 1:
            optimizer.mine.sum()

    assert "looked at after a step" in raised(training(kept))

    def view(net: Any, optimizer: Any, step: int) -> None:
        both = torch.zeros(2, *net.first.weight.shape)
        optimizer.state[net.first.weight]["exp_avg"] = both[0]

    assert "value.clone()" in raised(training(view))


def test_what_cannot_be_kept_or_shown_is_refused() -> None:
    def put(net: Any, optimizer: Any, step: int) -> None:
        optimizer.state[net.first.weight]["history"] = [1, 2]

    assert "optimizer.state[p]['history'] was set to a list" in raised(training(put))

    def number(net: Any, optimizer: Any, step: int) -> None:
        optimizer.state[net.first.weight] = 5

    assert "optimizer.state[p] was set to a int" in raised(training(number))

    def under_a_pair(net: Any, optimizer: Any, step: int) -> int:
        optimizer.state[net.first.weight][0, 1] = 2
        return len(optimizer.state[net.first.weight])

    assert "is a int under a tuple; numbers, texts" in raised(training(under_a_pair))


@pytest.mark.parametrize("steps_at_once", [False, True])
def test_a_hook_is_tried_where_a_layer_is_no_longer_there(steps_at_once: bool) -> None:
    def drop(net: Any, optimizer: Any, step: int) -> Any:
        if step == 1:
            means = {net.norm.running_mean: 0.1}
            net.second = net.norm = nn.Identity()
            optimizer.register_step_post_hook(lambda *_: means.clear())
            if steps_at_once:  # the layer's gradients are still there
                optimizer.step()

    assert_same_bits(training(drop), 2)


def test_keys_of_an_entry_may_be_numbers() -> None:
    def counted(net: Any, optimizer: Any, step: int) -> Any:
        for entry in optimizer.state.values():
            entry[0] = entry.get(0, 0) + step
        return [[*entry] for entry in optimizer.state.values()]

    assert_same_bits(training(counted), 2)


def test_a_dictionary_that_was_put_in_is_not_held_when_a_step_would_change_it() -> None:
    def held(net: Any, optimizer: Any, step: int) -> None:
        if step == 0:
            optimizer.mine = {"n": 1}
            optimizer.state[net.first.weight] = optimizer.mine

    assert "a dictionary that the script still holds" in raised(training(held))
