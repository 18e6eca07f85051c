"""Which optimizers treat every parameter by itself, so that each worker may step those it owns."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch

from graphsplit.errors import ConfigurationError
from graphsplit.optimizers.own_step import say_per_parameter, step_hooks
from graphsplit.text import called, described

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)

# Read in the sources of PyTorch 2.13, and tried one by one in the tests. LBFGS is none.
PER_PARAMETER: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.Muon,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    torch.optim.SparseAdam,
)

_TORCH = os.path.dirname(torch.__file__) + os.sep


@called("gs.per_parameter")
def per_parameter(optimizer: _Optimizer) -> _Optimizer:
    """Say that an optimizer treats every parameter by itself.

    What a step does to a parameter, and to what is kept for it, then depends on that parameter and
    its gradient alone. Each worker steps the parameters that live there. graphsplit knows it of
    the optimizers of ``torch.optim``; others, and those with step hooks, it tries out on small
    parameters, and refuses where it finds otherwise or cannot try. This overrules the trial: if it
    is not so, results are not those of one process.

    Args:
        optimizer: The optimizer, its step hooks included.

    Returns:
        The same optimizer.

    Raises:
        ConfigurationError: It is no optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"per_parameter was given {described(optimizer)}; expected a torch.optim.Optimizer"
        )
    say_per_parameter(optimizer)
    return optimizer


def is_listed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of those above, just as PyTorch has it, with no hook around its step."""
    if type(optimizer) not in PER_PARAMETER or step_hooks(optimizer):
        return False
    return replaced_step(optimizer) is None and _is_torchs(type(optimizer).step)


def replaced_step(optimizer: torch.optim.Optimizer) -> Any:
    """The function that the script has put in the place of its step; None where it has not."""
    own = vars(optimizer).get("step")
    return None if own is None or _is_torchs(own) else own


def _is_torchs(step: Any) -> bool:
    """Whether all that runs is PyTorch's code; learning rate schedulers wrap a step, too."""
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCH):
            return False
        step = getattr(step, "__wrapped__", None)
    return True
