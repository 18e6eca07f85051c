"""Callbacks of ``Model.train``."""

from typing import NoReturn

from graphsplit.text import no_attribute
from graphsplit.train.callbacks.base import Callback as Callback
from graphsplit.train.callbacks.base import RunContext as RunContext
from graphsplit.train.callbacks.base import TrainedModel as TrainedModel
from graphsplit.train.callbacks.usual import Checkpoint as Checkpoint
from graphsplit.train.callbacks.usual import LearningRateScheduler as LearningRateScheduler
from graphsplit.train.callbacks.usual import LossMonitor as LossMonitor
from graphsplit.train.callbacks.usual import ProgressBar as ProgressBar
from graphsplit.train.callbacks.usual import TimeMonitor as TimeMonitor
from graphsplit.train.callbacks.watching import EarlyStopping as EarlyStopping
from graphsplit.train.callbacks.watching import KeepBest as KeepBest
from graphsplit.train.callbacks.watching import TerminateOnNaN as TerminateOnNaN

__all__ = [
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "KeepBest",
    "LearningRateScheduler",
    "LossMonitor",
    "ProgressBar",
    "RunContext",
    "TerminateOnNaN",
    "TimeMonitor",
    "TrainedModel",
]


def __getattr__(name: str) -> NoReturn:
    raise no_attribute("module 'graphsplit.callbacks'", name, __all__, {})
