"""Copies of values that scripts get: a write goes into the value, or it is an error.

So is a look at one that is out of date: in one process a kept state moves on with training.
"""

from __future__ import annotations

import collections
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loop_helpers import Distribute, assert_same_bits, is_same, placed, plain, results
from loops import Language, small
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.distribute import backward
from graphsplit.distribute.workers.loop import Loop
from graphsplit.errors import ConfigurationError, GraphsplitError, OwnershipError
from graphsplit.job import joined

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


class Trained:
    """A network and its optimizer, after a step."""

    def __init__(self, distribute: Callable[[Any], Any]) -> None:
        torch.manual_seed(3)
        net = small([0, 1, 0])
        self.optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        self.net = distribute(net)
        self.step()

    def step(self) -> None:
        """One more."""
        self.optimizer.zero_grad()
        self.net(torch.randn(6, 8)).square().mean().backward()
        self.optimizer.step()


def on_workers(script: Callable[[Trained], Any]) -> list[Any]:
    return ThreadCluster(lambda rank: script(Trained(gs.distribute)), 2, is_recoverable=False).run()


def raised(script: Callable[[Trained], Any], kind: type[Exception]) -> str:
    """The error of a script, on each worker."""

    def run(trained: Trained) -> str:
        with pytest.raises(kind) as caught:
            script(trained)
        return str(caught.value)

    first, second = on_workers(run)
    assert first == second
    return str(first)


def write_array(trained: Trained) -> None:
    trained.net.second.weight.detach().numpy()[:] = 0


def write_as_array(trained: Trained) -> None:
    np.asarray(trained.net.first.weight.detach())[:] = 0


def write_array_of_gradient(trained: Trained) -> None:
    trained.net.second.weight.grad.numpy()[0] = 0


def write_array_of_state(trained: Trained) -> None:
    trained.net.state_dict()["second.weight"].numpy()[0] = 0


@pytest.mark.parametrize(
    "script", [write_array, write_as_array, write_array_of_gradient, write_array_of_state]
)
def test_an_array_of_a_value_cannot_be_written_to(script: Callable[[Trained], Any]) -> None:
    assert "read-only" in raised(script, ValueError)


def write_memory(trained: Trained) -> None:
    trained.net.second.weight.untyped_storage().fill_(0)


def write_old_memory(trained: Trained) -> None:
    trained.net.second.weight.data.storage().fill_(0)


def ask_for_address(trained: Trained) -> None:
    trained.net.second.weight.data_ptr()


def hand_over(trained: Trained) -> None:
    torch.from_dlpack(trained.net.second.weight.detach())


@pytest.mark.parametrize("script", [write_memory, write_old_memory, ask_for_address, hand_over])
def test_the_memory_of_a_value_is_refused(script: Callable[[Trained], Any]) -> None:
    told = raised(script, ConfigurationError)
    assert "its memory is there" in told and "Fix: write to values under" in told


def write_entry_of_optimizer(trained: Trained) -> None:
    trained.optimizer.state_dict()["state"][0]["exp_avg"].zero_()


def write_after_a_step(trained: Trained) -> None:
    kept = trained.net.state_dict()["second.weight"]
    trained.step()
    kept.mul_(0.5)


def test_a_write_into_an_optimizers_dictionary_and_one_into_an_old_state_are_refused() -> None:
    told = raised(write_entry_of_optimizer, OwnershipError)
    assert "was written to: in one process" in told and "Fix: write into the parameter" in told
    assert "looked at after a step or another" in raised(write_after_a_step, OwnershipError)


def averages(trained: Trained) -> Any:
    """Averages that are kept by writes into state dictionaries, as many scripts keep them."""
    net, ema = trained.net, copy.deepcopy(trained.net)
    for _ in range(2):
        trained.step()
        for kept, value in zip(ema.state_dict().values(), net.state_dict().values(), strict=True):
            kept.copy_(0.9 * kept + 0.1 * value)
        ema(torch.randn(6, 8))
        given = net.state_dict()
        for name, kept in ema.state_dict().items():
            if kept.dtype.is_floating_point:
                kept *= 0.9
                kept += 0.1 * given[name].detach()
    state = {name: value.detach().cpu() for name, value in net.state_dict().items()}
    state["second.weight"][0].mul_(2)
    state["second.weight"][:, 1:3] = state["second.weight"].abs().mean()
    trained.step()
    out = ema(torch.ones(6, 8)).tolist()
    return [out, dict(ema.state_dict()), dict(net.state_dict())]


def tied(distribute: Callable[[Any], Any]) -> Any:
    """A value under two keys is written to twice; before the first call, and after it."""
    torch.manual_seed(3)
    net = Language()
    for module, rank in zip((net.embed, *net.layers, net.head), (0, 1, 1, 0), strict=True):
        module.place("MS_WORKER", rank)  # type: ignore[operator]
    net, words = distribute(net), torch.arange(12).reshape(2, 6)
    for _ in range(2):
        state = net.state_dict()
        for value in state.values():
            value.mul_(0.9)
        assert torch.equal(state["embed.weight"], state["head.weight"])
        with torch.no_grad():
            loss = net(words, words).loss.item()
    return [loss, dict(net.state_dict())]


def test_a_write_into_a_networks_dictionary_is_one_into_the_network() -> None:
    expected = averages(Trained(plain))
    for found in on_workers(lambda trained: copy.deepcopy(averages(trained))):
        assert is_same(found, expected)
    expected = tied(plain)
    run = ThreadCluster(lambda _: copy.deepcopy(tied(gs.distribute)), 2, is_recoverable=False).run
    for found in run():
        assert is_same(found, expected)


def exchanged(state: dict[str, Any]) -> dict[str, Any]:
    state["0.weight"], state["1.weight"] = state["1.weight"], state["0.weight"]
    return state


def transposed(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.t() if value.dim() == 2 else value for name, value in state.items()}


@pytest.mark.parametrize("change", [dict, exchanged, transposed])
def test_a_network_may_load_its_own_values_where_a_layer_has_two_names(
    change: Callable[[Any], Any],
) -> None:
    def loop(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        net = distribute(placed(net, [*net], ranks))
        optimizer = torch.optim.Adam(net.parameters())
        for step in range(4):
            optimizer.zero_grad()
            net(torch.randn(6, 8)).square().sum().backward()
            optimizer.step()
            if step == 1:
                net.extend([net[0], net[1]])
            net.load_state_dict(change(net.state_dict()))
        yield {name: value.clone() for name, value in net.state_dict().items()}
        yield optimizer.state_dict()

    if change is dict:
        assert_same_bits(loop, 2)
    else:  # in one process the one would change while the other is loaded, or itself
        with pytest.raises(GraphsplitError, match="would have changed with it"):
            ThreadCluster(lambda _: results(loop, gs.distribute, 2), 2, is_recoverable=False).run()


def load_kept(trained: Trained) -> None:
    best = trained.net.state_dict()
    trained.step()
    trained.net.load_state_dict(best)


def look_at_kept(trained: Trained) -> None:
    kept = {name: value.detach() for name, value in trained.net.state_dict().items()}
    trained.step()
    kept["second.weight"].norm()


def look_after_write(trained: Trained) -> None:
    kept = trained.net.state_dict()
    with torch.no_grad():
        trained.net.second.weight.mul_(2)
    kept["second.weight"].norm()


def look_at_buffer(trained: Trained) -> None:
    kept = trained.net.state_dict()
    trained.net(torch.randn(6, 8))
    kept["norm.running_mean"].norm()


def look_at_frozen(trained: Trained) -> None:
    trained.net.second.weight.requires_grad_(False)
    kept = trained.net.state_dict()
    trained.net.load_state_dict({name: value + 1 for name, value in kept.items()})
    kept["second.weight"].norm()


def load_part_of_kept(trained: Trained) -> None:
    kept = trained.net.state_dict()
    trained.step()
    trained.net.norm.load_state_dict({"weight": kept["norm.weight"]}, strict=False)


def mix_with_kept(trained: Trained) -> None:
    kept = trained.net.state_dict()
    trained.step()
    (trained.net.second.weight - kept["second.weight"]).norm()


def look_at_moment(trained: Trained) -> None:
    kept = trained.optimizer.state_dict()
    trained.step()
    kept["state"][0]["exp_avg"].norm()


@pytest.mark.parametrize(
    "script",
    [
        *(load_kept, mix_with_kept, look_at_kept, look_after_write, look_at_buffer),
        *(look_at_frozen, look_at_moment),
    ],
)
def test_a_kept_state_that_would_have_moved_on_is_refused(script: Callable[[Trained], Any]) -> None:
    told = raised(script, OwnershipError)
    assert "looked at after a step or another write" in told
    assert "Fix: take it again for the new value" in told


def test_a_part_of_a_kept_state_that_would_have_moved_on_is_refused() -> None:
    told = raised(load_part_of_kept, RuntimeError)  # of torch: it says which parameter
    assert 'parameter named "weight"' in told and "looked at after a step or another" in told


def starts_anew(trained: Trained) -> Any:
    """An optimizer whose state is forgotten, by each of two ways."""
    trained.optimizer.state.clear()
    trained.step()
    trained.optimizer.state = collections.defaultdict(dict)
    trained.step()
    return [dict(trained.net.state_dict()), trained.optimizer.state_dict()]


def test_an_optimizer_may_forget_its_state() -> None:
    expected = starts_anew(Trained(plain))
    for found in on_workers(lambda trained: copy.deepcopy(starts_anew(trained))):
        assert is_same(found, expected)


def count_hooks(trained: Trained) -> None:
    counts = [0]
    for parameter in trained.net.parameters():
        parameter.register_hook(lambda gradient: counts.append(1))
    trained.step()


def keep_norms(trained: Trained) -> None:
    norms = {}
    for name, parameter in trained.net.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: norms.update({name: p.grad.norm().item()})
        )
    trained.step()


def keep_of_module(trained: Trained) -> None:
    norms: list[float] = []
    trained.net.last.register_full_backward_hook(
        lambda module, given, made: norms.append(made[0].norm().item())
    )
    trained.step()


@pytest.mark.parametrize("script", [count_hooks, keep_norms, keep_of_module])
def test_a_hook_of_a_parameter_that_keeps_something_is_refused(
    script: Callable[[Trained], Any],
) -> None:
    with pytest.raises(OwnershipError, match=r"a hook on a parameter .* changes") as caught:
        on_workers(script)

    assert "Fix: look at p.grad after backward()" in str(caught.value)
    assert "test_copies.py" in str(caught.value)


def draw_in_hooks(trained: Trained) -> None:
    for parameter in trained.net.parameters():
        parameter.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
    trained.step()


def draw_after_backward(trained: Trained) -> Any:
    for _ in range(3):
        trained.optimizer.zero_grad()
        trained.net(torch.randn(6, 8)).square().mean().backward()
        for parameter in trained.net.parameters():
            parameter.grad.add_(torch.randn_like(parameter))
        trained.optimizer.step()
    return copy.deepcopy(dict(trained.net.state_dict())), torch.get_rng_state()


def test_noise_is_added_after_backward_and_not_by_hooks() -> None:
    with pytest.raises(OwnershipError, match=r"a hook on a parameter .*copies.*draws random num"):
        on_workers(draw_in_hooks)

    expected = draw_after_backward(Trained(plain))
    for found in on_workers(draw_after_backward):
        assert is_same(found, expected)


@pytest.mark.parametrize("kind", ["detach", "data", "state"])
def test_a_tensor_taken_before_the_first_call_does_not_go_stale_without_a_word(kind: str) -> None:
    def run(rank: int) -> str:
        torch.manual_seed(3)
        net = small([0, 1, 0])
        states = [net.state_dict()["last.weight"]]
        net = gs.distribute(net)
        weight = net.last.weight
        states += [weight.data if kind == "data" else weight.detach()]
        taken = states[kind != "state"]
        out = net(torch.randn(6, 8))
        assert taken.norm() == net.last.weight.norm().item()
        out.square().mean().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        with pytest.raises(OwnershipError, match=r"'last\.weight' .* looked at after") as caught:
            taken.norm()
        return str(caught.value)

    first, second = ThreadCluster(run, 2, is_recoverable=False).run()
    assert first == second


def kept_rightly(trained: Trained) -> Any:
    """States that are saved at once, copied, or looked at before anything was written."""
    file, state = io.BytesIO(), trained.net.state_dict()
    trained.net(torch.randn(6, 8)).sum().backward()
    names, shape = list(state), state["norm.running_mean"].shape
    torch.save({"net": trained.net.state_dict(), "of": trained.optimizer.state_dict()}, file)
    cloned = {name: value.clone() for name, value in trained.net.state_dict().items()}
    best = copy.deepcopy(trained.net.state_dict())
    weight = state["second.weight"] * 2
    trained.step()
    cloned["second.weight"].mul_(2)
    trained.net.load_state_dict(best)
    trained.net.load_state_dict(trained.net.state_dict())
    file.seek(0)
    saved = torch.load(file)
    array = trained.net.second.weight.detach().numpy().copy()
    array[:1] = 0
    return [names, shape, saved, cloned, weight, dict(trained.net.state_dict()), array.tolist()]


def test_states_that_are_copied_saved_or_looked_at_in_time_are_those_of_one_process() -> None:
    expected = kept_rightly(Trained(plain))
    for found in on_workers(lambda trained: copy.deepcopy(kept_rightly(trained))):
        assert is_same(found, expected)


def in_turn(distribute: Callable[[Any], Any]) -> list[Any]:
    """Networks that are trained one after the other, whose states are kept, as folds' are."""
    folds = []
    for _ in range(3):
        trained = Trained(distribute)
        kept = trained.net.state_dict()
        trained.net.load_state_dict({name: value * 0.5 for name, value in kept.items()})
        folds.append([dict(trained.net.state_dict()), trained.optimizer.state_dict()["state"]])
    moments = trained.optimizer.state_dict()["state"]
    trained.optimizer = torch.optim.SGD(trained.net.parameters(), lr=0.1)
    trained.step()  # changes the network, and not what the first optimizer has kept
    folds[-1] = [trained.net.state_dict(), moments]
    return copy.deepcopy(folds)


def test_a_kept_state_stays_while_other_networks_are_trained() -> None:
    expected = in_turn(plain)
    for found in ThreadCluster(lambda rank: in_turn(gs.distribute), 2, is_recoverable=False).run():
        assert is_same(found, expected)


def test_a_network_may_go_while_a_backward_looks_for_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> Any:
        Trained(gs.distribute)
        loop = Loop.of(joined.current())  # type: ignore[arg-type]
        loop.here, loop.singles = {"one": [torch.ones(1)], "two": [torch.ones(1)]}, {}
        monkeypatch.setattr(backward, "hook_tables", lambda tensor: loop.forget("two") or [])
        with backward.leaving_state(loop):
            return list(loop.here)

    assert ThreadCluster(run, 2, is_recoverable=False).run() == [["one"], ["one"]]
