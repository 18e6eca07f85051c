"""Replace an attribute for a while: how capture steps between a network and PyTorch.

The public names of torch that are replaced stand here, by owner and attribute; what stands in their
place is written where it is used, in ``capture``. All of it relies on this: a call as users write
it looks the name up there. ``tests/torch_contract/test_patches.py`` makes each of these calls.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.fx.traceback
import torch.utils.data
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

Patch = tuple[Any, str]

# What a graph does not record: refused in forward.
BACKWARD: tuple[Patch, ...] = ((torch.Tensor, "backward"), (torch.autograd, "backward"))
REGISTER_ACCUMULATED_HOOK: Patch = (torch.Tensor, "register_post_accumulate_grad_hook")
REGISTER_MULTI_GRAD_HOOK: Patch = (torch.autograd.graph, "register_multi_grad_hook")
SAVED_TENSORS_HOOKS: Patch = (torch.autograd.graph.saved_tensors_hooks, "__enter__")
SEEDS: tuple[Patch, ...] = tuple(
    (owner, name)
    for owner in (torch, torch.random)
    for name in ("manual_seed", "seed", "set_rng_state")
)
# What is recorded in another way than torch.export would.
GRAD: Patch = (torch.autograd, "grad")
REGISTER_HOOK: Patch = (torch.Tensor, "register_hook")
MARK_TRAINED: Patch = (torch.Tensor, "requires_grad_")
APPLY_FUNCTION: Patch = (torch.autograd.Function, "apply")
BATCH_NORM: Patch = (nn.modules.batchnorm._BatchNorm, "forward")
DRAW_SOBOL: Patch = (torch.quasirandom.SobolEngine, "draw")
ASKING_FOR_VALUES: tuple[Patch, ...] = tuple(
    (owner, name) for owner in (torch, torch.Tensor) for name in ("cov", "corrcoef")
)
ENTER_INFERENCE: Patch = (torch.inference_mode, "__enter__")
LEAVE_INFERENCE: Patch = (torch.inference_mode, "__exit__")
# How dictionaries find a tensor, while another one stands for it.
HASH: Patch = (torch.Tensor, "__hash__")
EQUAL: Patch = (torch.Tensor, "__eq__")
# What code that is kept whole is told, or is watched by, when it is looked at once.
FORMAT: Patch = (torch.Tensor, "__format__")
TEXT: Patch = (torch.Tensor, "__repr__")
ANNOTATE: Patch = (torch.fx.traceback, "annotate")

# What old scripts make tensors by; torch asks no class of a tensor about it.
VARIABLE: Any = torch.autograd.Variable

# What a script's own loop reads its batches by: watched from the first such loop on.
READ_LOADER: Patch = (torch.utils.data.DataLoader, "__iter__")

# Functions between steps, which scripts hold under names of their own: their code is replaced.
# They look at the values of the modules that they are given.
UPDATE_AVERAGE: Any = AveragedModel.update_parameters
LOOKING: tuple[Any, ...] = (
    prune.identity,
    prune.random_unstructured,
    prune.l1_unstructured,
    prune.random_structured,
    prune.ln_structured,
    prune.global_unstructured,
    prune.custom_from_mask,
    prune.remove,
    parametrize.register_parametrization,
    parametrize.remove_parametrizations,
    parametrize.transfer_parametrizations_and_params,
    parametrizations.orthogonal,
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    torch.nn.utils.weight_norm,
    torch.nn.utils.remove_weight_norm,
    torch.nn.utils.spectral_norm,
    torch.nn.utils.remove_spectral_norm,
    UPDATE_AVERAGE,
)
# It opens a file before it looks at values; what is not here must be refused before.
SAVING: tuple[Any, ...] = (torch.save,)
# They fill one tensor, by its form alone; torch lets no stand-in answer for itself there.
FILLING: tuple[Any, ...] = (nn.init.trunc_normal_, nn.init.eye_, nn.init.dirac_)

# What all ask for a module's buffers by, ``buffers()`` too.
NAMING: tuple[Any, ...] = (nn.Module.named_buffers,)

# ``call(original, args, kwargs)``: instead of the function.
Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_calls: list[Callable[[tuple[Any, ...], dict[str, Any]], Any]] = []  # the code below calls these

# Makes an object of what another one's ``__reduce_ex__`` has told, as ``copy.copy`` does; its parts
# are copied, too, where there is a memo: ``(object, memo, make, args, state, listiter, dictiter)``.
reconstruct: Any = copy._reconstruct  # type: ignore[attr-defined]

MISSING: Any = object()  # a class has no attribute of its own of that name

# By the holder of an attribute, or a module's table, and its name: what stands there otherwise.
_OUTSIDE: dict[tuple[int, str], Any] = {}

_functions = (FunctionType, partial)
_STANDS_FOR = "_graphsplit_stands_for"  # of a function: what stands there otherwise


def note_real(replacement: Any, real: Any) -> None:
    """Note for which function, or class, another one stands."""
    setattr(replacement, _STANDS_FOR, real)


def real_function(value: Any) -> Any:
    """The function for which one stands; anything else as it is."""
    while isinstance(value, (type, *_functions)) and _STANDS_FOR in vars(value):
        value = vars(value)[_STANDS_FOR]
    return value


@contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Let ``owner`` have another attribute inside."""
    # What stands in a class itself is not what it gives, as for a class method.
    own = vars(owner).get(name, MISSING) if isinstance(owner, type) else getattr(owner, name)
    key = (id(vars(owner)) if isinstance(owner, ModuleType) else id(owner), name)
    is_outermost = key not in _OUTSIDE
    _OUTSIDE.setdefault(key, own)
    if isinstance(replacement, _functions):
        note_real(replacement, own)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if is_outermost:
            del _OUTSIDE[key]
        if own is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def outside(holder: Any, name: str, now: Any) -> Any:
    """The attribute that stands somewhere when nothing is replaced.

    Args:
        holder: A class, or the table of a module.
        name: The attribute.
        now: What stands there now.
    """
    return _OUTSIDE.get((id(holder), name), now)


def call_instead(function: Any, call: Call) -> None:
    """Have a function of torch call another one, with itself as it was, from now on."""
    original = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    original.__kwdefaults__ = function.__kwdefaults__
    original.__qualname__ = function.__qualname__
    function.__signature__ = inspect.signature(function)
    space: dict[str, Any] = {}
    outer = ", ".join(function.__code__.co_freevars)  # the new code has the same, for the closure
    text = (
        f"def make({outer}):\n"
        f"    def {function.__name__}(*args, **kwargs):\n"
        f"        ({outer})\n"
        f"        from graphsplit.torch_ext.replaced import _calls\n"
        f"        return _calls[{len(_calls)}](args, kwargs)\n"
        f"    return {function.__name__}\n"
    )
    exec(compile(text, __file__, "exec"), space)
    _calls.append(lambda args, kwargs: call(original, args, kwargs))
    function.__code__ = space["make"](*function.__code__.co_freevars).__code__
    function.__defaults__ = function.__kwdefaults__ = None


def make_instead(kind: Any, call: Call) -> None:
    """Have a class, whose own class makes no others, call a function to make an object."""
    type(kind).__call__ = lambda cls, *args, **kwargs: call(
        partial(type.__call__, cls), args, kwargs
    )


def copy_modules_by(copied: Callable[[nn.Module, dict[int, Any]], Any]) -> None:
    """Have ``copy.deepcopy`` of a module call a function with the module and its memo."""
    nn.Module.__deepcopy__ = copied  # type: ignore[attr-defined]


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> Any:
    """The copy that ``copy.deepcopy`` makes of a module by itself."""
    return reconstruct(module, memo, *module.__reduce_ex__(4))
