"""Every error that graphsplit raises on purpose.

Each message says what happened, where, what was expected against what was found, and how to
mend it. User mistakes are ``ValueError`` subclasses, but for those that a capture finds; things
that go wrong while a job runs are ``RuntimeError`` subclasses.
"""

from __future__ import annotations

from graphsplit.root_cause import NOWHERE, FailureCause, Location


class GraphsplitError(Exception):
    """Base of all errors raised by graphsplit.

    Attributes:
        is_settled: Whether all workers have it: who catches it may go on.
    """

    is_settled = False


class InvariantError(GraphsplitError, RuntimeError):
    """graphsplit is at fault: what a promise rests on does not hold. Please report it."""


class ConfigurationError(GraphsplitError, ValueError):
    """An ``MS_*`` or ``GS_*`` variable, or an argument, is missing or malformed."""


class PlacementError(GraphsplitError, ValueError):
    """A ``.place(role, rank)`` cannot be honoured. Lists every fault found, not only the first.

    Attributes:
        may_do_in_turn: Whether it perhaps can, if microbatches run one after the other.
    """

    may_do_in_turn = False


class CaptureError(GraphsplitError):
    """The model cannot be captured as one graph. Names the user's line and the ways out.

    It is no ``ValueError``: a script that catches those before the network's own ``RuntimeError``
    would go another way than in plain PyTorch.
    """


class RaisedInEagerError(CaptureError):
    """Code of the user's raised an error, as in plain PyTorch.

    Where all workers have it, the script gets that error in its place.

    Attributes:
        error: That error.
        is_first: Whether all that runs before it in plain PyTorch, if anything, has run here.
    """

    def __init__(self, text: str, error: Exception) -> None:
        super().__init__(text)
        self.error, self.is_first = error, True


class PlanMismatchError(GraphsplitError, ValueError):
    """Workers of one job made different plans. Shows the first difference."""


class StaleGraphError(GraphsplitError, RuntimeError):
    """A captured graph is not what would be captured now, though nothing watched has changed."""


class LoaderMismatchError(GraphsplitError, ValueError):
    """Workers that read the same loader saw different batches. Names the step."""


class CollectiveMismatchError(GraphsplitError, ValueError):
    """Workers made calls that do not fit together. Names workers, calls and lines."""


class OwnershipError(GraphsplitError, RuntimeError):
    """The value of a parameter or buffer was read on a worker that does not own it."""


class DeferredInitError(GraphsplitError, RuntimeError):
    """A recorded construction did not replay as it was recorded. Names the user's line."""


class StepFailedError(GraphsplitError, RuntimeError):
    """An operation raised while a step ran. Names worker, step, operation and the user's line.

    Attributes:
        location: Step, operation, module and line, in parts.
    """

    def __init__(self, message: str, *, location: Location = NOWHERE) -> None:
        super().__init__(message)
        self.location = location


class ScheduleError(GraphsplitError, ValueError):
    """Programs that do not fit together: an unmatched message, or a cycle of waits."""


class StateError(GraphsplitError, ValueError, RuntimeError):
    """A state dictionary does not fit. Lists every key that is missing, unknown or misshapen.

    A ``RuntimeError`` too, as what PyTorch raises then: what catches one in one process catches the
    other on several workers.
    """


class CheckpointError(GraphsplitError, RuntimeError):
    """A save could not be written, or not be read. Names the file, the worker and the reason."""


STOPPED_STATUS = 143
"""The exit status of a process that was asked to end by SIGTERM: 128 + 15."""


class StoppedInOrder(SystemExit):
    """This process was asked to end (SIGTERM), and does, at the end of a step, with all others.

    Leaves the script like ``sys.exit(143)``: no error, so ``except Exception`` does not catch it.
    """

    def __init__(self, status: int = STOPPED_STATUS) -> None:
        super().__init__(status)


class EnoughSteps(StoppedInOrder):
    """``graphsplit check`` has seen as many training steps as it asked for.

    Leaves the script like ``sys.exit(0)``, on all workers after the same step.
    """

    def __init__(self) -> None:
        super().__init__(0)


class ClusterError(GraphsplitError, RuntimeError):
    """The cluster could not be formed, or broke."""


class RegistrationRefusedError(ClusterError):
    """The scheduler refused this node. Carries the scheduler's reason."""


class PeerFinishedError(ClusterError):
    """A worker's script has ended, but another worker still waits for it."""


class JobFailedError(ClusterError):
    """The job was ended by a failure somewhere; the message names worker, step and root cause.

    Attributes:
        cause: All that is known of it: worker, host, step, operation, line, traceback, and whether
            another attempt may succeed (``cause.is_retryable``).
    """

    def __init__(self, message: str, *, cause: FailureCause | None = None) -> None:
        super().__init__(message)
        self.cause = cause or FailureCause("exception", message)


class MembershipChangedError(ClusterError):
    """A worker was lost, and the job recovers: every wait of this generation ends with this.

    No ``JobFailedError``: the job goes on. Whoever catches it gives up what it was doing, calls
    ``Job.recover()``, and begins again from a state that all workers have.

    Attributes:
        generation: The generation that is over.
        cause: Why, as far as it is known.
    """

    def __init__(self, message: str, *, generation: int, cause: FailureCause | None = None) -> None:
        super().__init__(message)
        self.generation = generation
        self.cause = cause


class JournalError(ClusterError):
    """The scheduler's journal cannot be read or written, or is damaged. Names file and place."""


class TransportError(GraphsplitError, RuntimeError):
    """A value could not be moved between two workers."""


class FrameError(TransportError, ValueError):
    """A frame is malformed, oversized, from the past, or not the one the plan expects."""


class ReceiveTimeoutError(TransportError, TimeoutError):
    """A value did not arrive before its deadline, and its sender made no progress either."""
