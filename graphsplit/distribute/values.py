"""Values of a script's own loop: each is on one worker, and has a stand-in on all others.

Every worker runs the script line by line. An operation on such a value runs on the worker that has
it; the others run it on shapes, with the same autograd graph. Who asks for numbers (``.item()``,
``bool``, printing, NumPy) asks on every worker, and the one that has the value tells all others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, ClassVar

import torch

from graphsplit.distribute.following.casts import casting_dtype, refuse_cached_cast
from graphsplit.distribute.following.indices import as_positions
from graphsplit.distribute.following.one_step import shape_after
from graphsplit.distribute.following.operands import (
    from_last,
    refuse_written_leaf,
    taken_apart,
    told_factors,
    written,
)
from graphsplit.distribute.following.run import is_known, key_of, run_or_follow
from graphsplit.distribute.workers.asking import AskedValue, ask, follow, refuse_inside, told_place
from graphsplit.distribute.workers.loop import META, Loop, shape_of, way
from graphsplit.distribute.workers.twins import Twin, is_shared_unseen
from graphsplit.errors import ConfigurationError
from graphsplit.torch_ext.attributes import WRITES, writes_of
from graphsplit.torch_ext.private import (
    DisableTorchFunctionSubclass,
    is_checkpointing,
    make_wrapper,
    pytree,
    take_form,
)

Function = Callable[..., Any]
Number = Any  # whole numbers and tuples of such and of texts
# Attributes that the tensor inside answers, and those that are operations.
_OF_INNER = frozenset({"requires_grad", "grad_fn", "is_leaf", "output_nr", WRITES})
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
# Operations whose result has a shape that depends on values.
_SHAPED_BY_VALUES = frozenset(
    (
        *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
        *("repeat_interleave", "_unique2", "histc", "histogram", "histogramdd"),
    )
)
# Operations that torch cannot follow on shapes.
_UNFOLLOWED = frozenset(("corrcoef", "cov", "ctc_loss", "gaussian_nll_loss", "ormqr"))
_MASKS = (torch.bool, torch.uint8)
_BY_BRACKETS = frozenset({"__getitem__", "__setitem__"})
_INDEXING = _BY_BRACKETS | {"index_put", "index_put_"}


class LoopValue(torch.Tensor):
    """A value of the script that lives on one worker.

    Attributes:
        held: The value on its worker, a tensor of its shape without memory elsewhere; both with
            the script's autograd graph.
        home: The worker that has it.
        loop: The workers.
        number: Its own number, as errors show it; the same on all workers.
        mark: What tells it from other values, likewise.
        parts: Of a single number with a history, the single numbers that it was made of.
        goes_on: Whether the network that made it has gone on from it: its whole gradient is there.
    """

    graphsplit_is_global: ClassVar[bool] = True

    held: torch.Tensor
    home: int
    loop: Loop
    number: Number
    mark: int
    parts: Sequence[LoopValue]
    goes_on: bool

    @staticmethod
    def of(
        inner: torch.Tensor, home: int, loop: Loop, number: Number, mark: int | None = None
    ) -> LoopValue:
        """The stand-in that the script holds of a value."""
        if inner.layout is not torch.strided:
            raise ConfigurationError(
                f"a value of the script is a tensor of layout {inner.layout}; only dense ones can "
                f"stay on one worker\n  Fix: make embeddings with sparse=False."
            )
        made: LoopValue = make_wrapper(LoopValue, inner)
        made.held, made.home, made.loop, made.number = inner, home, loop, number
        made._known, made._copies, made._is_fixed, made.parts = None, {}, False, ()
        made._before, made.goes_on = None, False
        made.mark = zlib.crc32(repr(number).encode()) if mark is None else mark
        return made

    @property
    def whole(self) -> torch.Tensor:
        """The tensor that has the value's whole gradient: ``held``, before any call took it."""
        before = self._before
        return self.held if before is None or self.held.grad_fn is not before[1] else before[0]

    def pass_through(self, passed: torch.Tensor) -> None:
        """Let later uses come through a call that has used the value, which gives it on.

        The gradients that they give are then the first terms of the sum in the call's backward.
        """
        self._before = self.whole, passed.grad_fn
        self.held = passed

    def take_back(self) -> None:
        """The call's backward has run: use the value as before."""
        self.held, self._before = self.whole, None

    def version(self) -> tuple[Any, int]:
        """A pair that changes whenever the value may have been written to, on all workers alike."""
        # The writes of an inference tensor are not counted.
        writes = object() if self.held.is_inference() else writes_of(self.held)
        return writes, self.loop.num_changes

    def _state(self) -> Any:
        writes, num_changes = self.version()
        return writes, self._is_fixed or num_changes

    _is_fixed: bool
    _known: tuple[Any, torch.Tensor] | None
    _copies: dict[int, tuple[Any, torch.Tensor]]
    _before: tuple[torch.Tensor, Any] | None

    def everywhere(self, what: str = "copy") -> torch.Tensor:
        """The value as an ordinary tensor, on all workers, without history; told once.

        Args:
            what: The function of the script that asks.
        """
        self.loop.learn_told()
        if self.loop.twins:
            self.loop.twins.check_read(self.held)
        version = self._state()
        if self._known is None or self._known[0] != version:
            self._known = (
                version,
                ask(self.loop, AskedValue(self.held, self.home, self.number, self.mark, what)),
            )
        return self._known[1]

    @property
    def known_number(self) -> torch.Tensor | None:
        """The value where it is one number that all workers know, whatever they do next."""
        self.loop.learn_told()
        if not self._is_fixed or self._known is None or self._known[0] != self._state():
            return None
        return self._known[1]

    @property
    def is_untold_number(self) -> bool:
        """Whether it is one number that not all workers know."""
        return not self.held.dim() and self.known_number is None

    def learn(self, number: torch.Tensor, *, is_fixed: bool, version: tuple[Any, int]) -> None:
        """Take note of the value, on all workers alike.

        Args:
            number: The value.
            is_fixed: Whether only operations of the script write to its memory.
            version: What ``version`` gave when the value was this one.
        """
        self._is_fixed = is_fixed
        self._known = (version[0], is_fixed or version[1]), number

    def shared(self) -> torch.Tensor:
        """The value as an ordinary tensor, on all workers, with its history."""
        if torch.is_grad_enabled() and self.held.requires_grad:
            return way(self.loop, self.home, None, self.held)
        return self.everywhere()

    def at(self, home: int) -> torch.Tensor:
        """The tensor inside, for an operation on another worker."""
        if self.loop.twins:
            self.loop.twins.check_read(self.held)
        if home == self.home:
            return self.held
        known = self.known_number
        if torch.is_grad_enabled() and self.held.requires_grad:
            return way(self.loop, self.home, home, self.held)
        if known is not None:  # by all workers: one of them may do it alone
            return known.clone() if self.loop.rank == home else shape_of(known)
        version = self._state()
        copy = self._copies.get(home)
        if copy is None or copy[0] != version:
            copy = version, self.loop.move(self.held, self.home, home)
            self._copies[home] = copy
        return copy[1]

    def as_data_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The data of a tensor that is set to the value; one that all workers have gets a copy.

        Raises:
            ConfigurationError: A parameter or another tensor has the memory of the value.
        """
        if isinstance(tensor, LoopValue) or hasattr(type(tensor), "as_loop_value"):
            return self
        if self.is_gradient or is_shared_unseen(self.held, LoopValue):
            raise ConfigurationError(
                "data of a plain tensor, or of a network before its first call, was set to a "
                "parameter or another value that lives on one worker and is held elsewhere too: in "
                "one process both would have one memory from now on\n"
                "  Fix: p.data.copy_(value), or nn.Parameter(value.clone()) for a new parameter; "
                "before weight_norm of a layer that has run, give it a weight of its own: "
                "a.weight = nn.Parameter(a.weight.detach().clone())."
            )
        kind = type(tensor)

        def mark() -> Any:  # where the tensor comes to live on one worker, others cannot tell
            return writes_of(tensor) if type(tensor) is kind else None

        self.loop.twins.add(tensor, Twin("data", self.held, mark=mark))
        return self.everywhere().clone()

    @property
    def is_gradient(self) -> bool:
        """Whether it is the whole gradient of a parameter."""
        return isinstance(self.number, tuple) and self.number[0] == "gradient"

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        special = SPECIAL.get(name)
        if special is not None:
            return special(func, args, kwargs)
        if name in ("__get__", "__set__", "__delete__"):
            return _attribute(func, name, args)
        if getattr(func, "__module__", "") == torch.nn.init.__name__:
            with torch.no_grad():  # as inside these functions
                return _operation(func, name, args, kwargs)
        return _operation(func, name, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # also in a copy of what holds it
        return SPECIAL["__deepcopy__"](torch.Tensor.__deepcopy__, (self, memo), {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise ConfigurationError(
            f"{func} came upon a value that lives on one worker, in code that hides operations "
            f"from tensors, as torch.tensor(value) and torch.FloatTensor(value) do\n"
            f"  Fix: value.detach().clone(), or with another dtype value.detach().to(dtype); for "
            f"other code value.detach().cpu().numpy(), or do it inside forward."
        )


SPECIAL: dict[str, Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]] = {}


def _attribute(func: Any, kind: str, args: tuple[Any, ...]) -> Any:
    name, value = func.__self__.__name__, args[0]
    if not isinstance(value, LoopValue):  # a plain tensor is given one, as in p.data = value
        raise ConfigurationError(
            f"{name} of a tensor was set to a value that lives on one worker\n"
            f"  Fix: use copy_ under torch.no_grad()."
        )
    if kind == "__get__" and name in _VIEWS:
        return _operation(func, name, args, {})
    if kind == "__get__" and name in ("device", "is_cuda") and torch.accelerator.is_available():
        where = told_place(value)
        return where if name == "device" else where.type == name.removeprefix("is_")
    if kind == "__get__" and name == "grad":
        found = value.whole.grad
        return (
            None
            if found is None
            else LoopValue.of(found, value.home, value.loop, ("grad of", value.number))
        )
    if kind == "__set__" and name == "data":
        return _set_data(value, as_value(args[1]))
    with DisableTorchFunctionSubclass():
        if kind == "__get__":
            return func(value.whole if name in _OF_INNER else value)
        if name in ("requires_grad", "grad"):
            value.take_back()
            return func(value.held, *_inside(args[1:], value.home))
    raise ConfigurationError(
        f"{name} of a value that lives on one worker was set\n  Fix: make a new value instead."
    )


def _set_data(value: LoopValue, given: torch.Tensor) -> None:
    """Give a value other data of its form, as ``net.to(device)`` does to gradients."""
    if given.shape != value.shape or given.dtype != value.dtype:
        raise ConfigurationError(
            f"data of a value of {tuple(value.shape)} and {value.dtype} was set to "
            f"{tuple(given.shape)} and {given.dtype}\n  Fix: make a new value instead."
        )
    inner = given.at(value.home) if isinstance(given, LoopValue) else given
    with DisableTorchFunctionSubclass():
        if value.loop.rank == value.home:
            value.held.data = inner.detach()
    value.loop.num_changes += 1


def _inside(values: Any, home: int) -> Any:
    return pytree.tree_map(lambda v: v.at(home) if isinstance(v, LoopValue) else v, values)


def operate(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation where its operands are."""
    return _operation(func, getattr(func, "__name__", ""), tuple(args), kwargs)


def _operation(func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_checkpointing():  # backward would run it once more where the value is, and nowhere else
        keep = torch.Tensor.detach
        with torch.autograd.graph.saved_tensors_hooks(keep, keep):
            return _operation(func, name, args, kwargs)
    refuse_written_leaf(written(name, args, kwargs))
    args, kwargs = _with_told_indices(name, args), told_factors(kwargs)
    given, together, is_flat = taken_apart(args, kwargs)
    found = from_last(as_value, given)
    args, kwargs = together(found)
    values = [leaf for leaf in found if isinstance(leaf, LoopValue)]
    if not values:  # an ordinary tensor, indexed by a value
        return func(*args, **kwargs)
    loop, targets = values[0].loop, written(name, args, kwargs)
    if name in _UNFOLLOWED:
        return _followed_by_values(func, name, _home(name, targets, values), found, together)
    if _needs_values(name, args, targets):
        shared = from_last(lambda v: v.shared() if isinstance(v, LoopValue) else v, found)
        args, kwargs = together(shared)
        loop.taken.note(name, (), [value.mark for value in values])
        return pytree.tree_map(partial(_kept, values[0]), func(*args, **kwargs))
    home = _home(name, targets, values)
    if loop.twins:
        for target in targets:
            loop.twins.check_write(target.held)
    taken = [leaf for leaf in found if not isinstance(leaf, LoopValue)]
    if loop.rank != home and name in _INDEXING:  # how many a mask takes is not seen in shapes
        args = (args[0], as_positions(args[1], by_brackets=name in _BY_BRACKETS), *args[2:])
        found, together, is_flat = taken_apart(args, kwargs)
        given = found
    key = None
    if is_flat and casting_dtype() is None:
        looks = [leaf.held if isinstance(leaf, LoopValue) else leaf for leaf in found]
        key = key_of((func, loop.rank == home, len(args), *kwargs), looks)
    as_it_is = loop.rank == home or is_known(key)
    inside = from_last(lambda leaf: _operand(leaf, home, loop, name, as_it_is=as_it_is), found)
    find = None if kwargs else follow(func, name, args)
    if find is None:
        marks = [value.mark for value in values]
        loop.taken.note(name, taken, marks, is_write=bool(targets))
        number, mark = loop.taken.count, loop.taken.checksum
    else:  # one worker may do it alone, as to print
        mark = zlib.crc32(repr((name, [value.mark for value in values], taken)).encode())
        number = mark
    result, draws = run_or_follow(func, name, inside, together, key, is_here=loop.rank == home)
    if loop.is_calling and any(map(torch.is_tensor, pytree.tree_leaves(result))):
        refuse_inside(loop, name)
    _take_up(targets, loop, home, draws=draws)
    known = {
        id(value.held): leaf
        for value, leaf in zip(found, given, strict=True)
        if isinstance(value, LoopValue) and value.home == home
    }
    wrap = partial(_wrapped, known, values, (number, mark), home, count())
    if find is not None:
        made: LoopValue = wrap(result)
        made.learn(find(), is_fixed=True, version=made.version())
        return made
    return wrap(result) if isinstance(result, torch.Tensor) else pytree.tree_map(wrap, result)


def _followed_by_values(
    func: Function, name: str, home: int, found: list[Any], together: Callable[..., Any]
) -> Any:
    """Run an operation on its worker; the others run it on copies, to see what comes of it."""
    values = [leaf for leaf in found if isinstance(leaf, LoopValue)]
    loop = values[0].loop
    copies = from_last(lambda v: v.everywhere() if isinstance(v, LoopValue) else v, found)
    is_here = loop.rank == home
    inside = from_last(lambda leaf: _operand(leaf, home, loop, name, as_it_is=is_here), found)
    taken = [leaf for leaf in found if not isinstance(leaf, LoopValue)]
    loop.taken.note(name, taken, [value.mark for value in values])
    args, kwargs = together(inside if is_here else copies)
    with DisableTorchFunctionSubclass():
        made = func(*args, **kwargs)
        made = made if is_here else shape_after(made, inside)
    return LoopValue.of(made, home, loop, loop.taken.next())


def _wrapped(
    known: Mapping[int, Any],
    values: Sequence[LoopValue],
    number: tuple[int, int],
    home: int,
    places: Iterator[int],
    leaf: Any,
) -> Any:
    """A value for a tensor that an operation has returned; an operand is the same as before."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    value = known.get(id(leaf))
    if value is None:
        place = next(places)
        its = ("part", place, "of value", number[0]) if place else number[0]
        value = LoopValue.of(leaf, home, values[0].loop, its, number[1] + place)
        if leaf.requires_grad and not leaf.dim():
            value.parts = [one for one in values if not one.held.dim()]
    return value


def as_value(leaf: Any) -> Any:
    """A value for a parameter that lives on one worker; everything else as it is."""
    convert = getattr(type(leaf), "as_loop_value", None)
    return leaf if convert is None else convert(leaf)


def _kept(value: LoopValue, result: Any) -> Any:
    """A result with a history stays a value of the loop, so that its backward is one too."""
    if not isinstance(result, torch.Tensor) or not result.requires_grad:
        return result
    inner = way(value.loop, None, value.home, result)
    return LoopValue.of(inner, value.home, value.loop, value.loop.taken.next())


def _needs_values(name: str, args: tuple[Any, ...], targets: Sequence[Any]) -> bool:
    """Whether all workers need the operands: shapes hang on them, or a plain tensor is written."""
    if name in _SHAPED_BY_VALUES or (name == "where" and len(args) == 1):
        return True
    return any(
        isinstance(leaf, torch.Tensor) and not isinstance(leaf, LoopValue) for leaf in targets
    )


def _with_told_indices(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if name not in _INDEXING or len(args) < 2:
        return args
    return (args[0], pytree.tree_map(_told_index, args[1]), *args[2:])


def _told_index(index: Any) -> Any:
    """An index; one that is a number or a mask, which says how many are taken, on all workers."""
    value = as_value(index)
    if isinstance(value, LoopValue) and (value.dim() == 0 or value.dtype in _MASKS):
        return value.everywhere()
    return index


def _home(name: str, targets: Sequence[Any], values: Sequence[LoopValue]) -> int:
    """The worker that has most of the operands; that of the one that is written to."""
    homes = {v.home for v in targets if isinstance(v, LoopValue)}
    if len(homes) > 1:
        text = f"{name} writes to values that live on several workers"
        raise ConfigurationError(f"{text}\n  Fix: write to each by itself, in a loop.")
    if homes or len(values) == 1:
        return homes.pop() if homes else values[0].home
    sizes: dict[int, int] = {}
    for value in values:
        sizes[value.home] = sizes.get(value.home, 0) + value.held.nbytes
    return min(sizes, key=lambda home: (-sizes[home], home))


def _operand(leaf: Any, home: int, loop: Loop, name: str, *, as_it_is: bool) -> Any:
    if isinstance(leaf, LoopValue):
        return leaf.at(home)
    if isinstance(leaf, torch.Tensor):
        if torch.is_grad_enabled() and leaf.requires_grad:
            if leaf.is_leaf:
                refuse_cached_cast("a tensor with a gradient")
            return way(loop, None, home, leaf)
        return leaf if as_it_is else leaf.to(META)
    if as_it_is:
        return leaf
    is_device = isinstance(leaf, torch.device) or (name == "to" and isinstance(leaf, str))
    return META if is_device else leaf


def _take_up(targets: Sequence[Any], loop: Loop, home: int, *, draws: bool) -> None:
    """An operation has run: what it wrote to has other forms by ``t_()`` and ``resize_()``."""
    if draws:
        _take_generator(loop, home)
    for target in targets:
        if isinstance(target, LoopValue) and take_form(target, target.held):
            target._known, target._copies = None, {}


def _take_generator(loop: Loop, home: int) -> None:
    """An operation has drawn on its worker: all go on from there."""
    state = loop.share(torch.default_generator.get_state(), home)
    if loop.rank != home:
        torch.default_generator.set_state(state)
