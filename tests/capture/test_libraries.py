"""What libraries keep for themselves is no state of the code that calls them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from graphsplit.capture.reach.reach import holders

_KEEPING = """
kinds = {}

def turned(x):
    if type(x) not in kinds:
        kinds[type(x)] = "torch"
    return x.flip(1)
"""


@pytest.mark.parametrize(("name", "is_state"), [("einops._backends", False), ("mine", True)])
def test_what_einops_keeps_for_each_class_is_no_state(name: str, is_state: bool) -> None:
    module = ModuleType(name)
    exec(_KEEPING, vars(module))
    module.turned(torch.zeros(2, 2))
    found, _ = holders([module.turned])
    assert bool(found) == is_state
