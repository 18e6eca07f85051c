"""The parts of ``torch.export``: private names about symbolic sizes, and what is left out of it.

It stands apart because it imports sympy and the compiler's front end, which takes its time.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._export import non_strict_utils
from torch._export import utils as passes
from torch.export import _trace as trace
from torch.export import exported_program
from torch.fx import GraphModule, _lazy_graph_module, _symbolic_trace
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from graphsplit.torch_ext.attributes import is_of_user
from graphsplit.torch_ext.replaced import note_real, replaced

__all__ = [
    "ConstantSource",
    "PythonReferenceAnalysis",
    "SymNode",
    "may_have_symbols",
    "only_what_is_read",
    "sympy_interp",
]

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# What the pass that inserts checks of sizes looks for, besides symbols.
_CHECKS = frozenset(
    (
        torch._check,
        torch._assert_scalar,
        torch.ops.aten._assert_scalar.default,
        torch.ops.aten.sym_constrain_range.default,
        torch.ops.aten.sym_constrain_range_for_size.default,
    )
)


@contextmanager
def only_what_is_read() -> Iterator[None]:
    """Let ``torch.export`` leave out what nobody reads: a seventh of a capture's time.

    It makes code of each graph four times, which does not run; it describes each value once more
    than by a fake tensor; and it looks for symbols in every value where no size has one.
    Nor does it switch kernels off, which decide how PyTorch takes operations apart: none is here,
    and code that asks ``torch.backends.mkldnn.enabled`` gets the answer of eager mode.
    Nor does it go through what attributes hold, which may hold itself: all writes are watched.
    Nor does it put others in the place of functions that are marked by ``torch.fx.wrap``: they do
    the same here, and what a step reads in that place would be another function at each capture.
    And what it has in place of functions of Python's own is for symbols alone.
    """
    with (
        _lazy_graph_module._use_lazy_graph_module(True),
        replaced(exported_program, "_create_graph_module_for_export", _without_code),
        replaced(proxy_tensor, "_extract_tensor_metadata", lambda value: None),
        replaced(_symbolic_trace, "_patch_wrapped_functions", lambda patcher: None),
        replaced(trace, "_ignore_backend_decomps", nullcontext),
        replaced(trace, "_detect_attribute_assignment", _attributes_put_back),
        replaced(trace, "_override_builtin_ops", _as_python_computes),
        _for_symbols_alone(trace, "_replace_unbacked_bindings"),
        _for_symbols_alone(passes, "insert_deferred_runtime_asserts"),
    ):
        yield


@contextmanager
def _attributes_put_back(root: nn.Module) -> Iterator[None]:
    """Let modules have the attributes again that they had, the same objects."""
    held = [vars(module) for module in root.modules()]
    before = [{k: v for k, v in own.items() if is_of_user(k)} for own in held]
    try:
        yield
    finally:
        for own, then in zip(held, before, strict=True):
            own.update(then)


@contextmanager
def _as_python_computes() -> Iterator[None]:
    """Let ``max``, ``min`` and ``math.pow`` do as Python does, but for symbols.

    Else the greater of two tensors would be a third one, with half the gradient where they are
    equal, and ``math.pow(2, 3)`` a whole number.
    """
    of_export: Any = non_strict_utils
    plain, power, functions = of_export._tensor_min_max, math.pow, (builtins.max, builtins.min)

    def chosen(*args: Any, real_callable: Any, tensor_callable: Any, **options: Any) -> Any:
        given = args
        if len(args) == 1 and not isinstance(args[0], torch.Tensor):
            args = (given := tuple(args[0]),)
        is_of_symbols = any(isinstance(one, _SYMBOLS) for one in given)
        if options or not is_of_symbols or any(isinstance(one, torch.Tensor) for one in given):
            return real_callable(*args, **options)
        return plain(*args, real_callable=real_callable, tensor_callable=tensor_callable)

    def raised(one: Any, by: Any, /) -> Any:
        return one**by if isinstance(one, _SYMBOLS) or isinstance(by, _SYMBOLS) else power(one, by)

    with (
        replaced(non_strict_utils, "_tensor_min_max", chosen),
        of_export._override_builtin_ops(),
        replaced(math, "pow", raised),
    ):
        note_real(raised, power)
        for stand_in, real in zip((builtins.max, builtins.min), functions, strict=True):
            note_real(stand_in, real)
        yield


def _without_code(root: Any, graph: Any) -> GraphModule:
    """A graph's module, whose code is made when it is asked for."""
    return _lazy_graph_module._LazyGraphModule(root, graph)


@contextmanager
def _for_symbols_alone(owner: Any, name: str) -> Iterator[None]:
    """Have a pass look only at graphs whose sizes have symbols, or that check any."""
    run: Callable[..., None] = getattr(owner, name)

    def run_on(module: GraphModule, *args: Any, **kwargs: Any) -> None:
        if _has_symbols(module) or any(node.target in _CHECKS for node in module.graph.nodes):
            run(module, *args, **kwargs)

    with replaced(owner, name, run_on):
        yield


def _has_symbols(module: GraphModule) -> bool:
    """Whether sizes had symbols when a graph was recorded; true where nothing tells."""
    values = (node.meta.get("val") for node in module.graph.nodes)
    return may_have_symbols(next((v for v in values if hasattr(v, "fake_mode")), None))


def may_have_symbols(value: Any) -> bool:
    """Whether sizes had symbols when a value was recorded; true where it does not tell."""
    sizes = getattr(getattr(value, "fake_mode", None), "shape_env", None)
    return sizes is None or bool(sizes.var_to_range)
