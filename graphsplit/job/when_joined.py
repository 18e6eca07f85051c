"""Calls on a job that this process joins, by whoever knows more of what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphsplit.job.job import Job

on_joined: list[Callable[[Job], None]] = []
"""Called with every job that this process joins."""
