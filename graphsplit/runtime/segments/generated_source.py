"""Lets the source of generated code go when the code does.

torch.fx keeps the text of every function that it generates as long as the process lives, so that
tracebacks can show it. A job makes code again for every plan that replaces another one, and after
every recovery.
"""

from __future__ import annotations

import linecache
import weakref

from torch.fx import GraphModule

from graphsplit.torch_ext.attributes import forget_source


def forget_with(module: GraphModule) -> None:
    """Forget the source of a module's code once the module is gone."""
    filename = module.forward.__code__.co_filename
    weakref.finalize(module, _forget, filename).atexit = False


def _forget(filename: str) -> None:
    forget_source(filename)
    linecache.cache.pop(filename, None)
