"""Bounds on everything that arrives over the network, and the fixed times of the protocol."""

from __future__ import annotations

from graphsplit.settings import MAX_NODE_ID_CHARS, MAX_WORKERS

__all__ = ["MAX_NODE_ID_CHARS", "MAX_WORKERS"]

# Characters.
MAX_NAME_CHARS = 128
MAX_HOST_CHARS = 255
MAX_INCARNATION_CHARS = 64
MAX_VERSION_CHARS = 128
MAX_ENDPOINT_CHARS = 512
MAX_POSITION_CHARS = 2_000
MAX_PLACE_CHARS = 512
MAX_MESSAGE_CHARS = 16_000
MAX_TRACEBACK_CHARS = 64_000

# Entries.
MAX_ENDPOINTS = 16
MAX_VERSIONS = 16
MAX_WARNINGS = 16
MAX_WATCHED = 64
MAX_CALLS = 8

# Bytes. A text that workers agree on takes twice its size in a message.
MAX_WORKER_MESSAGE_BYTES = 4 << 20
MAX_SCHEDULER_MESSAGE_BYTES = 16 << 20
MAX_TEXT_BYTES = 1 << 20

# How often a job recovers on end though no process was lost, and no meeting took place between:
# then a link is broken for good, and another generation will not mend it.
MAX_UNEXPLAINED_RECOVERIES = 3

# Processes that have ever been let in and are remembered, the latest ones.
MAX_LIVES = 10_000

# Seconds.
FORMING_REPORT_INTERVAL_S = 10.0
HEARTBEAT_INTERVAL_S = 1.0
BEATS_PER_SILENCE = 4
# Of all workers together: hearing one takes the scheduler more than half a millisecond.
MAX_BEATS_PER_S = 500
# How long a lost worker waits for a better explanation: a traceback that is still under way.
GRACE_S = 0.3
# How long what a worker saw of another one waits for news of that one itself. Links between two
# processes break a moment before, or after, anybody else knows why.
SEEN_GRACE_S = 1.0
# The same for a message that was not expected: the sender's next heartbeat tells its calls.
ODD_GRACE_S = 1.3
# How long everyone may take to leave after an abort or a release.
LEAVE_TIMEOUT_S = 5.0
# How long a connection may stay without registering.
REGISTER_TIMEOUT_S = 10.0
# How long the scheduler waits for the texts of a disagreement.
TEXT_TIMEOUT_S = 10.0
# How often the scheduler looks at its clock. A longer silence means that it was frozen itself.
TICK_INTERVAL_S = 0.2
FROZEN_AFTER_S = 1.0


def heartbeat_interval_s(silence_s: float, num_workers: int = 1) -> float:
    """How often a worker says that it is there.

    Args:
        silence_s: How long it may be silent.
        num_workers: How many do so; in a large job each does so more rarely.
    """
    usual = max(HEARTBEAT_INTERVAL_S, num_workers / MAX_BEATS_PER_S)
    return min(usual, silence_s / BEATS_PER_SILENCE)
