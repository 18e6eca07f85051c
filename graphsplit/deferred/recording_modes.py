"""The two modes that watch a construction: operations, and readings that are not operations.

What happens to an operation on CPU tensors under `OperationMode`:

    takes random numbers into a hollow tensor   executed on scratch memory, recorded
    makes a tensor from no tensor               recorded (nothing is recorded for ``empty``)
    gives a view of a hollow tensor             executed: views touch no memory
    computes from, or writes to, hollow ones    recorded; shapes and errors come from meta tensors
    anything else that meets a hollow tensor    the hollow ones are filled, then it is executed
    meets real tensors only                     executed

The last line but one is the fallback, per tensor: it holds for values that Python needs
(``item``, a branch), shapes that depend on values, custom operators, other devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphsplit.deferred.calls import SHAPE_ONLY, RecordedCall, TensorSpec, user_line
from graphsplit.deferred.recording import InitRecording, warn_if_large
from graphsplit.torch_ext.attributes import operator_schema
from graphsplit.torch_ext.private import (
    DisableTorchFunction,
    TorchDispatchMode,
    leaves_of,
    pytree,
)
from graphsplit.torch_ext.stand_ins import plain_torch

_EMPTY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})
_LIKE = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})
_DRAW_LIKE = frozenset({"rand_like", "randn_like", "randint_like"})
_DRAW_NEW = frozenset({"rand", "randn", "randint", "randperm"})
_DRAW_INTO = frozenset(
    {"uniform_", "normal_", "random_", "bernoulli_", "exponential_"}
    | {"cauchy_", "log_normal_", "geometric_"}
)
_FILLS = frozenset({"zero_", "fill_", "copy_"}) | _DRAW_INTO
_SHAPE_ONLY = (_EMPTY | _LIKE | _DRAW_LIKE) - {"empty", "empty_strided"}
# What an operator raises on meta tensors: no name that torch has moved is among it.
_NO_SHAPE = (RuntimeError, AssertionError, TypeError, ValueError, IndexError)
_MAKES_ALIAS = frozenset({"_unsafe_view", "_reshape_alias", "lift", "set_"})
_CHANGES_STORAGE = frozenset({"resize_", "resize_as_"})
# These write to the running statistics, and their schemas do not say so.
_HIDES_WRITES = frozenset(
    {"native_batch_norm", "batch_norm_update_stats", "cudnn_batch_norm", "miopen_batch_norm"}
)
_KNOWN_TYPES = (torch.Tensor, torch.nn.Parameter)


def _is_plain_cpu(tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Tells whether the operation stays among ordinary dense CPU tensors."""
    device = kwargs.get("device")
    return (
        (device is None or torch.device(device).type == "cpu")
        and kwargs.get("layout") in (None, torch.strided)
        and kwargs.get("names") is None
        and not kwargs.get("pin_memory")
        and all(_is_ordinary(tensor) for tensor in tensors)
    )


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _KNOWN_TYPES
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _returns_views(func: Any) -> bool:
    aliases = [ret.alias_info for ret in operator_schema(func).returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _is_recordable(func: Any) -> bool:
    """Tells whether nothing but tensors come out, and none of them may be resized on the way."""
    kinds = [str(ret.type) for ret in operator_schema(func).returns]
    return all(kind in ("Tensor", "List[Tensor]") for kind in kinds) and not any(
        argument.is_out for argument in operator_schema(func).arguments
    )


@dataclass(frozen=True)
class _Operation:
    """An operation that was called, its tensors, and those of them that are hollow."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    hollow: list[torch.Tensor]

    @property
    def name(self) -> str:
        """The operator's name without its overload."""
        return str(self.func.overloadpacket.__name__)

    def run(self) -> Any:
        """Executes it."""
        return self.func(*self.args, **self.kwargs)

    def written(self) -> list[torch.Tensor]:
        """Returns the arguments that the operation's schema says it writes to."""
        written: list[torch.Tensor] = []
        for index, argument in enumerate(operator_schema(self.func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                is_given = index < len(self.args)
                value = self.args[index] if is_given else self.kwargs.get(argument.name)
                written += leaves_of(torch.Tensor, value)
        return written

    def on_meta(self) -> Any:
        """Executes it on tensors without memory."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, _shape_of, (self.args, self.kwargs))
        if any(argument.name == "device" for argument in operator_schema(self.func).arguments):
            kwargs["device"] = torch.device("meta")
        return self.func(*args, **kwargs)


class OperationMode(TorchDispatchMode):
    """Records operations instead of executing them, as the module's table says."""

    def __init__(self, recording: InitRecording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The guard that torch would add imports all of torch._dynamo at the first operation.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handles one operation, below autograd."""
        with DisableTorchFunction():
            tensors = leaves_of(torch.Tensor, (args, kwargs or {}))
            hollow = [t for t in tensors if self._recording.number_of(t) is not None]
            return self._handle(_Operation(func, args, kwargs or {}, tensors, hollow))

    def _handle(self, one: _Operation) -> Any:
        func, name = one.func, one.name
        makes = func.namespace == "aten" and (not one.tensors or name in _SHAPE_ONLY)
        if not one.hollow and not makes:
            return one.run()
        if func.namespace != "aten" or not _is_plain_cpu(one.tensors, one.kwargs):
            return self._execute(one)
        if name in _CHANGES_STORAGE | _HIDES_WRITES or not _is_recordable(func):
            return self._execute(one)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(one)
        if name in _MAKES_ALIAS or torch.Tag.inplace_view in func.tags or _returns_views(func):
            return one.run()
        return self._record(one)

    def _execute(self, one: _Operation) -> Any:
        _fill(self._recording, one.hollow, f"{one.func} needs a value")
        return one.run()

    def _draw(self, one: _Operation) -> Any:
        """Executes a random call, so that the generator moves on, drops the result, records."""
        into = one.name in _DRAW_INTO and len(one.tensors) == 1
        if not into and one.name not in _DRAW_NEW | _DRAW_LIKE:
            return self._execute(one)
        chain = self._recording.chain_of(one.kwargs.get("generator") or torch.default_generator)
        created: list[TensorSpec] = []
        if into:
            result: torch.Tensor = one.args[0]
            scratch = self._spec(result).scratch()
            chain.before_draw(result.numel())
            one.func(scratch, *one.args[1:], **one.kwargs)
            del scratch
        else:
            chain.before_draw(_num_elements(one.args[0]))
            drawn = one.run()
            result = self._new_like(drawn, created)
            del drawn
        call = self._call(one, created, is_draw=True)
        chain.after_draw(call, result.nbytes)
        self._recording.calls.append(call)
        return result

    def _record(self, one: _Operation) -> Any:
        written = one.written()
        real = [t for t in one.tensors if self._recording.number_of(t) is None]
        if any(t is w for t in real for w in written) or not all(_clones_exactly(t) for t in real):
            return self._execute(one)
        try:
            shaped = one.on_meta()
        except _NO_SHAPE:
            # Either torch knows no shape without the values, or the call is wrong: executing it
            # gives the result, or the error of plain construction.
            return self._execute(one)
        created: list[TensorSpec] = []
        if written:
            num_returns = len(operator_schema(one.func).returns)
            several = written[0] if num_returns == 1 else tuple(written)
            result = None if num_returns == 0 else several
        else:
            make = partial(self._new_like, created=created)
            result = pytree.tree_map_only(torch.Tensor, make, shaped)
        if one.name in _EMPTY and not torch.are_deterministic_algorithms_enabled():
            self._recording.unset.add(created[0].storage)
        else:
            self._recording.calls.append(self._call(one, created))
        return result

    def _new_like(self, tensor: torch.Tensor, created: list[TensorSpec]) -> torch.Tensor:
        number = self._recording.new_storage(tensor.untyped_storage().nbytes())
        created.append(TensorSpec.of(tensor, number))
        return created[-1].on(self._recording.hollow[number])

    def _spec(self, tensor: torch.Tensor) -> TensorSpec:
        number = self._recording.number_of(tensor)
        assert number is not None
        return TensorSpec.of(tensor, number)

    def _call(
        self, one: _Operation, created: list[TensorSpec], *, is_draw: bool = False
    ) -> RecordedCall:
        def describe(tensor: torch.Tensor) -> Any:
            if one.name in _SHAPE_ONLY:
                return TensorSpec.of(tensor, SHAPE_ONLY)
            if self._recording.number_of(tensor) is not None:
                return self._spec(tensor)
            # A real operand may be changed by anyone later: the recording needs its own copy.
            warn_if_large(tensor.nbytes, f"{one.func} takes in a tensor that is not deferred")
            return tensor.clone()

        written = {self._spec(t) for t in one.written()}
        described = pytree.tree_map_only(torch.Tensor, describe, (one.args, one.kwargs))
        specs = leaves_of(TensorSpec, described)
        reads = {spec.storage for spec in specs if spec.storage >= 0}
        overwrites = {spec.storage for spec in created}
        if one.name in _FILLS and self._covers(one.args[0]):
            target = self._spec(one.args[0]).storage
            sources = pytree.tree_leaves((described[0][1:], described[1]))
            if all(not isinstance(s, TensorSpec) or s.storage != target for s in sources):
                reads.discard(target)
                overwrites.add(target)
        return RecordedCall(
            func=one.func,
            args=described[0],
            kwargs=described[1],
            reads=frozenset(reads),
            writes=frozenset(overwrites | {spec.storage for spec in written}),
            overwrites=frozenset(overwrites),
            created=tuple(created),
            default_dtype=torch.get_default_dtype(),
            where=user_line(),
            is_draw=is_draw,
        )

    def _covers(self, tensor: torch.Tensor) -> bool:
        """Tells whether a hollow tensor is the whole of its storage."""
        size_bytes = self._recording.sizes[self._spec(tensor).storage]
        return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == size_bytes


def _num_elements(size: Any) -> int:
    """Returns how many elements the first argument of a random factory asks for."""
    if isinstance(size, torch.Tensor):
        return size.numel()
    return int(torch.Size(size).numel()) if isinstance(size, list | tuple) else 1 << 20


def _clones_exactly(tensor: torch.Tensor) -> bool:
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    size, stride = tensor.size(), tensor.stride()
    return torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")


def _fill(recording: InitRecording, tensors: list[torch.Tensor], because: str) -> None:
    """Fills the hollow ones among some tensors."""
    numbers = (recording.number_of(tensor) for tensor in tensors)
    recording.fill((n for n in numbers if n is not None), because=because)


def _readers() -> frozenset[Any]:
    names = (
        "numpy tolist data_ptr const_data_ptr untyped_storage storage _typed_storage __array__ "
        "__dlpack__ share_memory_ __reduce_ex__ __deepcopy__"
    )
    return frozenset(getattr(torch.Tensor, n) for n in names.split() if hasattr(torch.Tensor, n))


class ReadingMode(TorchFunctionMode):
    """Fills what is about to be read without an operation, such as by ``numpy()``."""

    _READERS = _readers()

    def __init__(self, recording: InitRecording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handles one call of torch's Python interface."""
        is_clone = func is torch.Tensor.__deepcopy__ and isinstance(args[0], torch.nn.Parameter)
        if func in self._READERS and not is_clone:
            with plain_torch():
                because = f"Tensor.{getattr(func, '__name__', func)} needs a value"
                _fill(self._recording, leaves_of(torch.Tensor, (args, kwargs)), because)
        return func(*args, **(kwargs or {}))
