"""The scheduler as a process of its own, without a script and without torch.

``python -m graphsplit.cluster.scheduler`` serves the job that the ``MS_*`` variables describe.
"""

from __future__ import annotations

import os
import sys

from graphsplit.cluster.scheduler.server import serve
from graphsplit.errors import ConfigurationError, GraphsplitError
from graphsplit.failure import FailureCause
from graphsplit.frames import users_traceback
from graphsplit.reports import note_init, write_report
from graphsplit.settings import ClusterSettings


def main() -> int:
    """Serve the job; the exit status."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        settings = ClusterSettings.from_environ(os.environ)
        if settings is None or not settings.is_scheduler:
            raise ConfigurationError("this is the scheduler\n  Fix: set MS_ROLE=MS_SCHED.")
        note_init(os.environ)
        return serve(settings)
    except GraphsplitError as error:
        sys.stderr.write(users_traceback(error))
        write_report(os.environ, FailureCause("exception", f"{type(error).__name__}: {error}"))
        return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # nothing is left to be done, and taking gRPC apart takes a while
