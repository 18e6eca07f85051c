"""``optimizer.state_dict()`` of a script's own loop: the whole state, on every worker."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphsplit.checkpoint.contents import parameters_of
from graphsplit.checkpoint.gather import gather_entries
from graphsplit.distribute.copies import as_copies
from graphsplit.distribute.entries import Entries
from graphsplit.distribute.parameters import in_loop
from graphsplit.distribute.values import LoopValue
from graphsplit.distribute.workers.asking import exchange
from graphsplit.distribute.workers.loop import Loop
from graphsplit.errors import CollectiveMismatchError, ConfigurationError
from graphsplit.job.job import Job
from graphsplit.job.script import ModelCall
from graphsplit.optimizers.optimizer import order_of
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.torch_ext.attributes import BEFORE_STATE
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass, pytree

Owners = Callable[[], Mapping[int, int]]
# Kept alive by the hooks of the optimizer, which they know.
_states: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[OptimizerState]]
_states = weakref.WeakKeyDictionary()


def check_alike(loop: Loop, told: str, name: str) -> None:
    """Refuse that workers gather the states of different networks or optimizers. Collective.

    Args:
        loop: The workers.
        told: What tells it from others, on all workers alike.
        name: How errors call it.

    Raises:
        CollectiveMismatchError: They do: what they make together would be a mixture.
        LoaderMismatchError: One of them has changed its part alone.
    """
    if exchange(loop, f"state_dict() of {name}", told)[0] != told:
        raise CollectiveMismatchError(
            f"worker 0 gathers another state than worker {loop.rank}, which has that of {name}\n"
            f"  Fix: every worker calls state_dict() of several networks and optimizers in the "
            f"same order."
        )


class OptimizerState:
    """The state of an optimizer whose entries live with their parameters.

    Args:
        optimizer: The optimizer.
        owners: The owner of each parameter, by its id.
        job: The workers.

    Attributes:
        kept: All entries, while ``state_dict`` answers on each worker by itself.
        owned: Steps what lives here.
        settled_at: How often networks had settled when ``owned`` was made.
        loaded: The entries that were taken over at last.
        shown: What the script sees.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, owners: Owners, job: Job) -> None:
        self._owners, self._job = owners, job
        self._own: Any = None
        self.kept: Any = None
        self.owned: Any = None
        self.loaded: Any = None
        self.shown: Entries | None = None
        self.settled_at = -1
        self._told = f"{type(optimizer).__name__} of {_first_place(optimizer, Loop.of(job))}"
        optimizer.register_state_dict_pre_hook(self._put_whole)
        optimizer.register_state_dict_post_hook(self._put_back)
        optimizer.register_load_state_dict_post_hook(self._drop_others)

    def gather(self, optimizer: torch.optim.Optimizer) -> Any:
        """Collective: the entries of all workers."""
        loop = Loop.of(self._job)

        def run() -> Any:
            loop.taken.note_step(optimizer, settings_of(optimizer), "state_dict")
            self.take_given(optimizer)
            with self._job.reporting(), DisableTorchFunctionSubclass():
                check_alike(loop, self._told, type(optimizer).__name__)
                # It may still hold parameters of layers that were taken out of the network.
                held = {str(id(p)): p for p in parameters_of(optimizer)}
                known = self._job.owners.known(held)
                owners = {**{int(n): rank for n, rank in known.items()}, **self._owners()}
                return gather_entries(optimizer, owners, self._job.control)

        return self._job.script.collective(ModelCall("optimizer.state_dict", run))

    def _drop_others(self, optimizer: torch.optim.Optimizer) -> None:
        self.loaded = None
        self.take_given(optimizer)
        hide_others(optimizer, Loop.of(self._job))

    def shown_of(self, optimizer: torch.optim.Optimizer, loop: Loop) -> Entries:
        """The entries of all workers, for the script."""
        if self.shown is None or self.shown.here is not optimizer.state:
            self.shown = Entries(optimizer.state, loop, optimizer, self._owners)
        return self.shown

    def take_given(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over entries that were loaded, or that the script has set."""
        if not isinstance(optimizer.state, Entries) and optimizer.state is not self.loaded:
            drop_others(optimizer, Loop.of(self._job))
            self.loaded = optimizer.state

    def _put_whole(self, optimizer: torch.optim.Optimizer) -> None:
        whole = self.gather(optimizer) if self.kept is None else self.kept
        self._own, optimizer.state = optimizer.state, whole

    def _put_back(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        optimizer.state = self._own
        steps, ids = Loop.of(self._job).steps, frozenset([id(optimizer)])
        for entries in state["state"].values():
            as_copies(entries, lambda name: lambda: steps.latest(ids))


def settings_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """How it steps each of its groups, as the script has set it."""
    values = [value for group in optimizer.param_groups for value in group.values()]
    if tuple not in map(type, values):
        return values
    return [one for v in values for one in (v if isinstance(v, tuple) else (v,))]


def _first_place(optimizer: torch.optim.Optimizer, loop: Loop) -> tuple[int, int] | None:
    """In which of the loop's networks an optimizer's first parameter is, and where there."""
    places = {
        id(parameter): (index, position)
        for index, network in enumerate([reference() for reference in loop.networks])
        for position, parameter in enumerate(() if network is None else network.parameters())
    }
    found = (places[id(p)] for p in parameters_of(optimizer) if id(p) in places)
    return next(found, None)


def give_whole_state(optimizer: torch.optim.Optimizer, owners: Owners, job: Job) -> OptimizerState:
    """Let ``optimizer.state_dict()`` give all entries from now on, on every worker.

    Raises:
        ConfigurationError: Torch's own ``__init__`` has not made it.
    """
    if not hasattr(optimizer, BEFORE_STATE):
        raise ConfigurationError(
            f"{type(optimizer).__name__} is a torch.optim.Optimizer whose __init__ was not called, "
            f"so its state cannot be given as that of all workers\n"
            f"  Fix: call super().__init__(param_groups, defaults) in its __init__; or, if it is "
            f"put around an optimizer, use that one in its place."
        )
    state = OptimizerState(optimizer, owners, job)
    _states[optimizer] = weakref.ref(state)
    return state


def state_of(optimizer: torch.optim.Optimizer) -> OptimizerState | None:
    """The state of an optimizer over all workers; None where it has stepped no network."""
    known = _states.get(optimizer)
    return None if known is None else known()


def hide_others(optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """Let an optimizer's state say from now on that it is a part."""
    state = state_of(optimizer)
    assert state is not None
    optimizer.state = state.shown_of(optimizer, loop)


def show_here(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the state of this worker, for a step.

    Raises:
        ConfigurationError: The script holds a dictionary that it has put in as an entry.
    """
    if isinstance(optimizer.state, Entries):
        optimizer.state.refuse_held()
        optimizer.state = optimizer.state.here


def drop_others(optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """Forget what is kept of parameters that live on other workers; all have had the same.

    That goes into the checksum of what workers took from outside: else each would go on with its
    part of another state.
    """
    leaves = pytree.tree_leaves([dict(entry) for entry in optimizer.state.values()])
    values = [leaf for leaf in leaves if not isinstance(leaf, LoopValue)]
    for parameter, entry in optimizer.state.items():
        known = in_loop(parameter)
        for key, value in entry.items():
            if known is not None and isinstance(value, LoopValue):
                with torch.no_grad():
                    entry[key] = value.at(known.owner)
    loop.taken.note(f"{type(optimizer).__name__}.state", values, is_write=True)
    forget_others(optimizer)


def forget_others(optimizer: torch.optim.Optimizer) -> None:
    """Forget what is kept of parameters that live on other workers."""
    order_of(optimizer).note_loaded(list(optimizer.state))
    for parameter in [p for p in optimizer.state if is_elsewhere(p)]:
        del optimizer.state[parameter]
