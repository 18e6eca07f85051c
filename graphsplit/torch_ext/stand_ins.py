"""Stand-ins: tensors that keep their shape while their value is not here.

A stand-in is the same Python object as before, since optimizers and modules hold on to it: only its
class is another one, by assignment to ``__class__``. Asking for its shape, registering a hook or
handing it to an optimizer passes. Whatever asks for more comes to :meth:`StandIn.need_value` first:
a deferred tensor is filled there, and one that lives on another worker refuses.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from graphsplit.torch_ext.attributes import BUFFERS, PARAMETERS, storage_of
from graphsplit.torch_ext.private import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    TensorBase,
    disable_current_modes,
    leaves_of,
    storage_use_count,
)

_OF_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag", "_cdata", "_grad"})
_PLAIN = (torch.Tensor, nn.Parameter)
_SETTABLE = ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_HARMLESS_METHODS = (
    "size stride dim ndimension numel nelement element_size storage_offset is_contiguous "
    "is_floating_point is_complex is_signed __hash__ __len__ requires_grad_ "
    "register_hook register_post_accumulate_grad_hook retain_grad get_device"
)


def _harmless() -> frozenset[Any]:
    allowed = {getattr(torch.Tensor, name) for name in _HARMLESS_METHODS.split()}
    for name in dir(torch.Tensor):
        attribute: Any = getattr(torch.Tensor, name, None)
        if type(attribute).__name__ == "getset_descriptor" and name not in _OF_VALUES:
            allowed.add(attribute.__get__)
    for name in _SETTABLE:
        attribute = getattr(TensorBase, name)
        allowed |= {attribute.__set__, attribute.__delete__}
    allowed |= {
        torch._has_compatible_shallow_copy_type,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        torch.is_same_size,
    }
    return frozenset(allowed)


def _methods(names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.Tensor, name) for name in names.split())


_ATTRIBUTES: Any = TensorBase  # of the class these are descriptors, not tensors
GET_GRADIENT, SET_GRADIENT = _ATTRIBUTES.grad.__get__, _ATTRIBUTES.grad.__set__
GET_DATA, SET_DATA = _ATTRIBUTES.data.__get__, _ATTRIBUTES.data.__set__

# Functions that write to a tensor, and do nothing else: no draws, no look at the value for the
# caller. The first argument, or ``tensor``, is written to.
WRITES = _methods(
    "__setitem__ abs_ add_ addcdiv_ addcmul_ clamp_ clamp_max_ clamp_min_ clip_ copy_ div_ divide_ "
    "exp_ fill_ index_add_ index_copy_ index_fill_ lerp_ log_ logical_not_ masked_fill_ mul_ "
    "multiply_ nan_to_num_ neg_ pow_ reciprocal_ round_ scatter_ scatter_add_ sign_ sqrt_ square_ "
    "sub_ subtract_ tril_ triu_ zero_"
) | {nn.init.constant_}
# Likewise, with what they draw: dtype, shape and strides alone decide how much that is.
DRAWS = _methods(
    "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_"
) | {nn.init.kaiming_normal_, nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_}
# Functions that make another tensor, and look at the form of a stand-in alone.
OF_FORM = _methods("new_empty new_full new_ones new_tensor new_zeros") | {
    getattr(torch, f"{name}_like") for name in ("empty", "full", "ones", "rand", "randn", "zeros")
}
# Functions of values alone: no draws, no results of other dtypes than tensors without values give.
_COMPUTING = (
    "abs add ceil clamp clamp_max clamp_min clone div eq exp floor ge gt le lerp log lt "
    "masked_fill matmul maximum mean minimum mm mul ne neg norm outer pow reciprocal round "
    "rsqrt sigmoid sign sqrt square sub tanh tril triu where"
)
CASTING = _methods("bfloat16 double float half to")  # they give a tensor of such a dtype itself
COMPUTING = (
    frozenset(getattr(torch, name) for name in _COMPUTING.split())
    | _methods(_COMPUTING)
    | CASTING
    | _methods(
        "__add__ __eq__ __ge__ __gt__ __le__ __lt__ __matmul__ __mul__ __ne__ __neg__ __pow__ "
        "__radd__ __rmul__ __rsub__ __rtruediv__ __sub__ __truediv__"
    )
)
_COPYING = {torch.clone, torch.Tensor.clone}
# Functions that write to each tensor of a list, as the function does that stands beside them.
OF_EACH = {
    getattr(torch, f"_foreach_{name}_"): getattr(torch.Tensor, f"{name}_")
    for name in ("add", "copy", "div", "lerp", "mul", "sub")
}
# Functions that take the form of their second argument.
_FORMED = _methods("expand_as reshape_as type_as view_as")
# Functions that give a view of a tensor; an index gives one if it is made of numbers and slices.
VIEWS = _methods(
    "__getitem__ detach expand movedim narrow permute select squeeze t transpose unsqueeze view "
    "view_as"
)
HISTORY = "_graphsplit_history"  # of a stand-in: autograd knows how it was made
# Views of which autograd knows nothing: what is written to one gives the tensor no history.
APART = (GET_DATA, torch.Tensor.detach)
_OF_NUMBERS = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
}
_BASIC = (int, slice, type(None), type(...))


class StandIn(torch.Tensor):
    """A tensor whose value is not here.

    Attributes:
        harmless: The functions of torch that may be called with it: they need no value.
    """

    harmless: ClassVar[frozenset[Any]] = _harmless()

    def need_value(self, asked: str) -> None:
        """Become an ordinary tensor, or raise.

        Args:
            asked: The function or attribute that needs the value.
        """
        raise NotImplementedError

    def true_strides(self) -> tuple[int, ...]:
        """The strides that the tensor has where its value is."""
        return self.stride()

    def latest(self) -> StandIn:
        """The one that stands for the same tensor now."""
        return self

    @classmethod
    def is_one_still(cls, tensor: torch.Tensor) -> bool:
        """Whether a tensor that was of this class for a while has still no value."""
        return True

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in cls.harmless:
            asked = getattr(func, "__name__", str(func))
            if asked in ("__get__", "__set__", "__delete__"):
                asked = getattr(getattr(func, "__self__", None), "__name__", asked)
            for stand_in in leaves_of(StandIn, (args, kwargs)):
                stand_in.need_value(asked)
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # These two ask for the class before they ask for a value.
    def __deepcopy__(self, memo: Any) -> Any:
        self.need_value("copy.deepcopy")
        return type(self).__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.need_value("pickling")
        return type(self).__reduce_ex__(self, protocol)


class WatchedTensor(torch.Tensor):
    """A tensor that has its value, and answers some questions otherwise than PyTorch does."""


_own_classes: Any = WeakIdKeyDictionary()  # tensors and their classes, where a script made these


def become(tensor: torch.Tensor, kind: type[torch.Tensor]) -> None:
    """Make a tensor one of another class, until it is taken back."""
    if not isinstance(tensor, (StandIn, WatchedTensor)) and type(tensor) not in _PLAIN:
        _own_classes[tensor] = type(tensor)
    own = _own_classes.get(tensor)
    is_both = own is not None and issubclass(kind, StandIn)
    tensor.__class__ = _of_both(kind, own) if is_both else kind


@functools.lru_cache
def _of_both(kind: type[StandIn], own: type[torch.Tensor]) -> type[torch.Tensor]:
    """The class of stand-ins for tensors of a script's class: ``isinstance`` says so."""
    make: Any = type(kind)
    made: type[torch.Tensor] = make(kind.__name__, (kind, own), {})
    return made


def take_back(tensor: torch.Tensor) -> None:
    """Make a stand-in an ordinary tensor again; its value is up to the caller."""
    plain: Any = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
    tensor.__class__ = _own_classes.get(tensor, plain)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Everything inside runs as outside of any mode, autocast or gradient recording."""
    with (
        DisableTorchFunction(),
        disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def is_view(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call gives a view of its first argument."""
    if func != torch.Tensor.__getitem__:
        return func in VIEWS or func == GET_DATA
    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(type(index) in _BASIC for index in indices)


_EXAMPLE = torch.empty(1)
_ALONE = storage_use_count(storage_of(_EXAMPLE))  # holders of memory that one tensor has
_registered: dict[int, weakref.ref[torch.Tensor]] = {}  # state of modules, by its memory


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor holds the memory of one."""
    return storage_use_count(storage_of(tensor)) == _ALONE


def home_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that holds on to the memory of another one, and is that or what it is a view of.

    ``p`` of ``p.data``, ``p[0]`` or ``p.detach()``. None if somebody holds the memory, and it is
    not known who.
    """
    if isinstance(tensor, nn.Parameter):
        return tensor
    memory, base = storage_of(tensor), tensor._base
    if base is None and is_alone(tensor):
        return tensor
    found = _registered_at(memory)
    if found is None:
        _register_all()
        found = _registered_at(memory)
    if found is None and base is not None and storage_use_count(memory) == _ALONE + 1:
        return base
    return found


def counts_with(tensor: torch.Tensor, home: torch.Tensor) -> bool:
    """Whether what is written to a tensor counts as written to the one that holds its memory."""
    return tensor is home or tensor._base is home


def _registered_at(memory: int) -> torch.Tensor | None:
    reference = _registered.get(memory)
    found = None if reference is None else reference()
    if found is None or isinstance(found, StandIn) or storage_of(found) != memory:
        return None
    return found


def _register_all() -> None:
    """Note the memory of the parameters and buffers of all modules that there are."""
    _registered.clear()
    for module in gc.get_objects():
        if issubclass(type(module), nn.Module) and PARAMETERS in vars(module):
            for held in (*vars(module)[PARAMETERS].values(), *vars(module)[BUFFERS].values()):
                if type(held) in (torch.Tensor, nn.Parameter) and held.layout is torch.strided:
                    _registered[storage_of(held)] = weakref.ref(held)


def looks_at_form(func: Any, args: Sequence[Any], kwargs: Any) -> int | None:
    """The number of the argument of which a call needs no more than the form, if it is one."""
    index = 0 if func in OF_FORM else 1 if func in _FORMED else None
    if index is None:
        return None
    num_given = len(leaves_of(StandIn, (args, kwargs)))
    is_one = index < len(args) and isinstance(args[index], StandIn) and num_given == 1
    return index if is_one else None


def in_form(tensor: torch.Tensor, *, device: Any = None) -> torch.Tensor:
    """An empty tensor in the form of what a stand-in stands for."""
    with DisableTorchFunctionSubclass():
        return torch.empty_strided(
            tensor.shape,
            tensor.true_strides() if isinstance(tensor, StandIn) else tensor.stride(),
            dtype=tensor.dtype,
            device=device or tensor.device,
        )


def in_backward() -> bool:
    """Whether autograd runs, and a hook with it: one worker alone would use what is made there."""
    return torch._C._current_graph_task_id() != -1


def computes(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether a call computes with nothing but ordinary tensors, stand-ins and numbers."""
    if func not in COMPUTING or "out" in (kwargs or {}) or in_backward():
        return False
    given = leaves_of(torch.Tensor, (args, kwargs))
    return all(type(v) in (torch.Tensor, nn.Parameter) or isinstance(v, StandIn) for v in given)


def has_history(func: Any, given: Sequence[Any]) -> bool:
    """Whether autograd knows what a call makes of tensors.

    A copy is taken for one without: averages begin with copies.
    """
    return func not in (*_COPYING, *APART) and any(map(is_known, given))


def is_known(value: Any) -> bool:
    """Whether autograd would know what is made of a value here and now.

    Stand-ins that are no parameters have a mark in place of ``requires_grad``, for which torch
    would refuse them as numbers in words of its own.
    """
    return (
        torch.is_grad_enabled()
        and isinstance(value, torch.Tensor)
        and (value.requires_grad or hasattr(value, HISTORY))
    )


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A single zero, expanded to the shape of a tensor."""
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def without_value(tensor: torch.Tensor) -> torch.Tensor:
    """Likewise, of what nobody takes for a value: torch reads a tensor given as a number unasked.

    NaN, or the least whole number; zero for dtypes that torch computes nothing with.
    """
    made = without_memory(tensor.new_empty(()))
    if tensor.dtype in _OF_NUMBERS:
        made.fill_(float("nan") if made.is_floating_point() else torch.iinfo(made.dtype).min)
    return made.expand(tensor.shape)


@contextmanager
def unwatched(tensors: Iterable[Any]) -> Iterator[None]:
    """Inside, those among some values that are watched have the class of eager mode."""
    watched = {id(t): (t, type(t)) for t in tensors if isinstance(t, WatchedTensor)}
    for tensor, _ in watched.values():
        take_back(tensor)
    try:
        yield
    finally:
        for tensor, kept in watched.values():
            tensor.__class__ = kept


@contextmanager
def as_ordinary(tensors: Iterable[torch.Tensor], kind: type[StandIn] = StandIn) -> Iterator[None]:
    """Inside, stand-ins of a kind are ordinary tensors with the strides of what they stand for.

    For code that looks at shapes only, such as a capture. Their memory is set aside and takes no
    room until it is written to; what was written is lost afterwards.
    """
    tensors = list(tensors)
    with unwatched(tensors):
        swapped = list({id(t): (t, type(t)) for t in tensors if isinstance(t, kind)}.values())
        strides = [tensor.true_strides() for tensor, _ in swapped]
        with plain_torch():
            for tensor, _ in swapped:
                take_back(tensor)
            memories = [tensor.data for tensor, _ in swapped]
            for (tensor, _), stride in zip(swapped, strides, strict=True):
                tensor.data = torch.empty_strided(
                    tensor.shape, stride, dtype=tensor.dtype, device=tensor.device
                )
        try:
            yield
        finally:
            with plain_torch():
                for (tensor, was), memory in zip(swapped, memories, strict=True):
                    tensor.data = memory
                    if was.is_one_still(tensor):
                        tensor.__class__ = was
