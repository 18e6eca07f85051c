"""A network under a script's own training loop: ``gs.distribute``."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _Package(types.ModuleType):
    """This package; called, it is the function of its name.

    Whoever imports one of its modules puts the package in the place of ``graphsplit.distribute``.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from graphsplit.distribute.network import distribute

        return distribute(*args, **kwargs)

    def __reduce__(self) -> Any:  # a function that names it may go to ``gs.launch``
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
