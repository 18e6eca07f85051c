"""State dictionaries of own loops: copies that behave as the tensors, or say that they are copies.

In one process ``state_dict()`` holds the tensors themselves: a later step shows in it, and a write
into it is one into the parameter. Over workers it holds copies. A write into one goes on into the
parameter or buffer that it is of; all workers make it, and its owner keeps it. A look at one that
is out of date is an error.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphsplit.distribute.following.operands import written
from graphsplit.errors import OwnershipError
from graphsplit.torch_ext.attributes import base_of, storage_of
from graphsplit.torch_ext.private import (
    DisableTorchFunctionSubclass,
    pytree,
    storage_use_count,
)
from graphsplit.torch_ext.stand_ins import StandIn

_CPU = torch.device("cpu")
Mark = Callable[[], Any]


@dataclass(eq=False)
class CopiedValue:
    """A value that was copied; all tensors in the memory of the copy share this.

    Attributes:
        key: The key in the dictionary.
        mark: Gives what changes whenever the value is written to.
        source: The parameter or buffer; None where writes into the copy are refused.
        whole: All of the copy.
        at: The mark when the copy was made, or went along with a write.
    """

    key: str
    mark: Mark
    source: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    at: Any = None

    def __post_init__(self) -> None:
        self.at = self.mark()

    def check_current(self) -> None:
        """Refuse what the value was, after it was written to.

        Raises:
            OwnershipError: It was.
        """
        if self.mark() != self.at:
            raise OwnershipError(
                f"a copy of {self.key!r} (of a state dictionary, or taken by detach() or .data "
                f"before the first call of the network) was looked at after a step or another "
                f"write: in one process it would have changed with it\n"
                f"  Fix: take it again for the new value; to keep the old one, take clone() of it, "
                f"or copy.deepcopy(net.state_dict()), there and in one process."
            )

    def refuse_write(self) -> None:
        """Refuse to write where no parameter or buffer would take it.

        Raises:
            OwnershipError: None would.
        """
        raise OwnershipError(
            f"a copy of {self.key!r} (of an optimizer's state dictionary, or taken by detach() or "
            f".data before the first call of the network) was written to: in one process this "
            f"would write into the network or the optimizer\n"
            f"  Fix: write into the parameter under torch.no_grad(); or change "
            f"copy.deepcopy(optimizer.state_dict()), and load it with load_state_dict."
        )

    def write_on(self) -> None:
        """Let the parameter or buffer have what the copy was given."""
        assert self.source is not None and self.whole is not None
        with torch.no_grad():
            self.source.copy_(self.whole)
        self.at = self.mark()


class StateCopy(torch.Tensor):
    """A copy of a value, in a state dictionary.

    Attributes:
        taken: The value that it is a copy of.
    """

    taken: CopiedValue

    @staticmethod
    def of(tensor: torch.Tensor, taken: CopiedValue) -> StateCopy:
        """The copy, in the same memory."""
        with DisableTorchFunctionSubclass():
            made = tensor.detach().as_subclass(StateCopy)
        made.taken = taken
        return made

    def plain(self) -> torch.Tensor:
        """The copy as an ordinary tensor.

        Raises:
            OwnershipError: The value was written to since.
        """
        self.taken.check_current()
        with DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    as_loop_value = plain  # where it meets values of the loop

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in StandIn.harmless:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        targets = [one for one in _targets(name, args, kwargs) if isinstance(one, StateCopy)]
        for target in targets:
            if target.taken.source is None or name == "__set__":
                target.taken.refuse_write()
        copies = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, StateCopy)]
        returned = [args[1].taken] if name == "copy_" and _is_own_value(*args[:2]) else []
        args, kwargs = pytree.tree_map_only(StateCopy, StateCopy.plain, (args, kwargs))
        result = func(*args, **kwargs)
        for target in targets:
            target.taken.write_on()
        for taken in returned:
            taken.at = taken.mark()
        if isinstance(result, np.ndarray):  # a write into it would be lost
            result.flags.writeable = False
        if type(result) is not torch.Tensor or not copies:
            return result
        memory = storage_of(result)
        with DisableTorchFunctionSubclass():
            source = next((one for one in copies if storage_of(one) == memory), None)
        return result if source is None else StateCopy.of(result, source.taken)  # a view of it

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.plain().clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


def others_of(tensors: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, str]]:
    """Tensors of the script in the memory of a network's: ``detach()`` and ``.data`` gave them.

    Args:
        tensors: Parameters and buffers by name, as in one process: they have their memory.

    Returns:
        Each with the name of the one whose memory it is in.
    """
    with DisableTorchFunctionSubclass():
        dense = {n: one for n, one in tensors.items() if one.layout is torch.strided}
        own = {id(tensor): tensor for tensor in dense.values()}
        memories = {storage_of(tensor): name for name, tensor in dense.items()}
        held = Counter(map(storage_of, own.values()))
        # One more use is that of the object through which the number is asked for.
        shared = {memory for memory in memories if storage_use_count(memory) > held[memory] + 1}
        if not shared:
            return []
        known = own.keys() | _bases_alone(own.values())
        return [
            (one, memories[storage_of(one)])
            for one in gc.get_objects()
            if type(one) is torch.Tensor
            and id(one) not in known
            and (one.layout, one.device) == (torch.strided, _CPU)
            and storage_of(one) in shared
        ]


def _bases_alone(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The ids of the tensors that these are views of, and that nobody else holds."""
    least = min(_uses([torch.zeros(1)[:]]).values())
    return {key for key, uses in _uses(tensors).items() if uses <= least}


def _uses(views: Iterable[torch.Tensor]) -> dict[int, int]:
    """How often the base of each view is held, by its id."""
    found = {id(base): base for view in views if (base := base_of(view)) is not view}
    return {key: sys.getrefcount(base) for key, base in found.items()}


def make_copies(others: Iterable[tuple[torch.Tensor, str]], mark_of: Callable[[Any], Mark]) -> None:
    """Let tensors that shared a network's memory until now be copies, as the same objects."""
    for tensor, name in others:
        tensor.__class__ = StateCopy
        made: Any = tensor
        made.taken = CopiedValue(name, mark_of(name))


def check_current(state: Mapping[str, Any]) -> None:
    """Refuse a state that has become out of date, before torch takes it for one that does not fit.

    Raises:
        OwnershipError: As ``StateCopy.plain``.
    """
    for value in state.values():
        if isinstance(value, StateCopy):
            value.plain()


def as_copies(
    state: Any, mark_of: Callable[[Any], Mark], sources: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Put copies in the place of the tensors of a dictionary, and of dictionaries in it.

    Args:
        state: The dictionary.
        mark_of: The mark of each value, by its key.
        sources: Parameters and buffers by key, into which writes go on. Those under several keys
            have one copy.
    """
    known: dict[int, StateCopy] = {}
    for key, value in list(state.items()):
        if isinstance(value, torch.Tensor):
            source = sources.get(key) if sources else None
            made = known.get(id(source))
            if made is None or source is None:
                made = StateCopy.of(value, CopiedValue(str(key), mark_of(key), source, value))
                known[id(source)] = made
            state[key] = made
        elif isinstance(value, Mapping):
            as_copies(value, mark_of)


def _is_own_value(tensor: Any, value: Any = None) -> bool:
    """Whether a tensor would be given all of a copy of itself, which stays right."""
    if not isinstance(value, StateCopy) or value.taken.source is not tensor:
        return False
    one, whole = value, value.taken.whole
    assert whole is not None  # all that have a source know it
    return (one.shape, one.stride()) == (whole.shape, whole.stride())


def _targets(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [args[0]] if name == "__set__" else written(name, args, kwargs)
