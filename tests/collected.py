"""What Python looks through for cycles while tests run."""

from __future__ import annotations

import gc
import sys

_MOST_CAPTURED = 150  # each graph has a class of its own; the more there are, the slower is capture
_captured = 0  # that were held when all was looked through


def leave_out_what_is_there() -> None:
    """Leave all that is there by now out of later collections: they took a tenth of the time.

    From time to time all is looked through once: what was left out may be garbage by now.
    """
    global _captured
    is_all = _num_graphs() > _captured + _MOST_CAPTURED
    if is_all:
        gc.unfreeze()
    gc.collect()
    if is_all:
        _captured = _num_graphs()
    classes = sys.modules.get("graphsplit.guards.classes")
    gc.freeze() if classes is None else classes.freeze_all()


def _num_graphs() -> int:
    fx = sys.modules.get("torch.fx")
    return 0 if fx is None else len(fx.GraphModule.__subclasses__())
