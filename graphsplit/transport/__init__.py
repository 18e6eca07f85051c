"""Moves tensors between workers: one interface, several ways, each loaded only when needed."""

from __future__ import annotations

from graphsplit.transport.base import ChannelSpec, Receiver, Sender, Transport
from graphsplit.transport.endpoints import Mode, choose
from graphsplit.transport.hub import Hub
from graphsplit.transport.wait import Wait, WaitPolicy

__all__ = [
    "ChannelSpec",
    "Hub",
    "Mode",
    "Receiver",
    "Sender",
    "Transport",
    "Wait",
    "WaitPolicy",
    "choose",
]
