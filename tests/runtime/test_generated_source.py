"""Source of generated code is kept as long as the code, and not longer."""

from __future__ import annotations

import gc
import linecache
import traceback

import pytest
import torch
from torch import fx
from torch.fx import graph_module

from graphsplit.runtime.segments.code import forget_with


def made() -> tuple[fx.GraphModule, str]:
    graph = fx.Graph()
    value = graph.placeholder("value")
    graph.output(graph.call_function(torch.mm, (value, value)))
    module = fx.GraphModule(torch.nn.Module(), graph)
    forget_with(module)
    return module, module.forward.__code__.co_filename


def test_tracebacks_show_generated_lines_while_the_code_is_there():
    module, _ = made()
    with pytest.raises(RuntimeError) as raised:
        module.forward(torch.ones(2, 3))
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert "torch.mm" in (frames[-1].line or "")


def test_the_source_goes_with_the_code():
    module, filename = made()
    linecache.getlines(filename, module.forward.__globals__)
    kept = graph_module._loader.eval_cache
    assert filename in kept
    assert filename in linecache.cache
    del module
    gc.collect()
    assert filename not in kept
    assert filename not in linecache.cache
