"""Let a network's code do what it does in eager mode while it is captured.

Code may ask whether it is being compiled or exported, and then do something else: transformers
builds attention masks that it otherwise leaves out, which gives other bits. A captured graph is
never compiled for anything else, so the true answer for the network's code is no. PyTorch itself,
below ``torch.nn``, must know that it is exported: ``torch.cond`` would start the compiler.

Where one module stands in two places, torch puts another object there at each use, to know the
place; ``layer is self.first``, ``type(layer)`` and the number of ``children()`` would be others.

``self.layer = self.layer.to(self.dtype)`` in ``forward`` changes nothing in eager mode, where the
dtype is that one already; what stands for a parameter during capture could not be put in its place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._higher_order_ops.utils as higher_order_ops
import torch.compiler
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, _ModuleStackTracer
from torch.nn.modules import activation
from torch.utils._python_dispatch import _disable_current_modes

from graphsplit.torch_ext.function_modes import OURS, without_modes
from graphsplit.torch_ext.replaced import replaced

_DISABLED = torch._C._disabled_torch_function_impl
# Folders: a user's own module may have any name.
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LAYERS = f"{Path(torch.nn.__file__).parent}{os.sep}"
_PREDICATES = ("is_compiling", "is_exporting", "is_dynamo_compiling")


@contextmanager
def as_in_eager_mode() -> Iterator[None]:
    """Answer no to the network's ``torch.compiler.is_compiling()`` and the like."""
    truths = {name: getattr(torch.compiler, name) for name in _PREDICATES}
    with (
        _predicates({name: _for_torch_alone(truth) for name, truth in truths.items()}),
        compiled_branches(lambda: _truthful(truths)),
        _fused_layers(),
        _conversions_to_the_same(),
        _checked_distributions(),
    ):
        yield


@contextmanager
def modules_in_two_places() -> Iterator[None]:
    """Let a module be itself in all its places; its path is the one below what called it.

    A call that raises an error is over, for code that catches the error and calls others.
    """
    with (
        replaced(_ModuleStackTracer, "call_module", _call_module),
        replaced(_ModuleStackTracer, "getattr", PythonKeyTracer.getattr),
        replaced(_ModuleStackTracer, "path_of_module", _path_below_callers),
    ):
        yield


_called: Any = _ModuleStackTracer.call_module
_path_of_module: Any = _ModuleStackTracer.path_of_module


def _call_module(tracer: Any, *call: Any) -> Any:
    depth = len(tracer.module_stack)
    try:
        return _called(tracer, *call)
    finally:
        while len(tracer.module_stack) > depth:
            tracer.module_stack.popitem()


def _path_below_callers(tracer: Any, module: torch.nn.Module) -> str:
    paths = tracer.module_id_cache.get(id(module), ())
    for caller, _ in reversed(tracer.module_stack.values()) if len(paths) > 1 else ():
        for path in paths:
            if not caller or path.startswith(f"{caller}."):
                return str(path)
    return str(_path_of_module(tracer, module))


@contextmanager
def _predicates(answers: Mapping[str, Callable[[], bool]]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(replaced(torch.compiler, name, answer))
        yield


def _for_torch_alone(truth: Callable[[], bool]) -> Callable[[], bool]:
    def answer() -> bool:
        asker = sys._getframe(1)
        while asker.f_code.co_name in _PREDICATES and asker.f_back is not None:
            asker = asker.f_back  # torch._dynamo.is_compiling() asks for its caller
        return truth() if _is_below_nn(asker.f_code.co_filename) else False

    return answer


@contextmanager
def _truthful(truths: Mapping[str, Callable[[], bool]]) -> Iterator[None]:
    with _predicates(truths), without_modes(OURS):
        yield


@contextmanager
def compiled_branches(undo: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """``torch.cond`` and its like compile their branches, in eager mode too: undo what is replaced.

    Args:
        undo: Undoes it, for as long as they are compiled.
    """
    original = higher_order_ops.setup_compilation_env

    @contextmanager
    def setup_compilation_env() -> Iterator[Any]:
        with undo(), original() as backend:
            yield backend

    with replaced(higher_order_ops, "setup_compilation_env", setup_compilation_env):
        yield


@contextmanager
def _checked_distributions() -> Iterator[None]:
    """Let ``torch.distributions`` check its arguments in the graph: it branches only to raise."""

    def check(valid: torch.Tensor) -> bool:
        torch._check(valid.all().item(), lambda: "a distribution got values that it does not allow")
        return True

    with replaced(torch, "_is_all_true", check):
        yield


@contextmanager
def _fused_layers() -> Iterator[None]:
    """Let transformer layers take their fused path in eval mode, as they do when not traced."""
    with (
        replaced(torch.overrides, "has_torch_function", _has_own_torch_function),
        replaced(activation, "_is_make_fx_tracing", lambda: False),
    ):
        yield


def fuse_layers_of(is_value: Callable[[Any], bool]) -> None:
    """Let transformer layers take their fused path for tensors of a kind too, from now on.

    They leave it where a tensor answers functions of torch itself, and have other bits then.

    Args:
        is_value: Whether an argument of such a path is a tensor of that kind.
    """
    original = torch.overrides.has_torch_function
    if getattr(original, "__code__", None) is not None:
        return  # it is so already

    def has_torch_function(args: Iterable[Any]) -> bool:
        if sys._getframe(1).f_code.co_filename.startswith(_LAYERS):
            args = [one for one in args if not is_value(one)]
        return bool(original(args))

    torch.overrides.has_torch_function = has_torch_function


def _has_own_torch_function(args: Iterable[Any]) -> bool:
    """The answer that there is without the modes of a capture."""
    ordinary = (torch.Tensor, torch.nn.Parameter, FakeTensor)
    return any(
        type(argument) not in ordinary
        and getattr(argument, "__torch_function__", _DISABLED) is not _DISABLED
        for argument in args
    )


def _is_below_nn(file: str) -> bool:
    """Whether code is PyTorch's own; the layers of ``torch.nn`` are network code."""
    return file.startswith(_TORCH) and not file.startswith(_LAYERS)


@contextmanager
def _conversions_to_the_same() -> Iterator[None]:
    """Leave a module alone that is converted to the dtype and device that it has."""
    convert: Any = torch.nn.Module._apply

    def apply(module: Any, function: Callable[..., Any], recurse: bool = True) -> Any:
        tensors = (*module.parameters(recurse), *module.buffers(recurse))
        looks = {(tensor.dtype, tensor.device) for tensor in tensors}
        with _disable_current_modes():
            examples = [torch.empty(0, dtype=dtype, device=device) for dtype, device in looks]
            if all(function(example) is example for example in examples):
                return module
        return convert(module, function, recurse)

    with replaced(torch.nn.Module, "_apply", apply):
        yield
