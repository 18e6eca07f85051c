"""One process of a test's cluster, without torch so that it starts fast.

Usage: cluster_process.py PACKAGE_PATH MODE. The rest comes from MS_* variables.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from dataclasses import replace

package = types.ModuleType("graphsplit")
package.__path__ = [sys.argv[1]]
sys.modules["graphsplit"] = package

from graphsplit.cluster.member.member import Member, NodeIdentity  # noqa: E402
from graphsplit.cluster.scheduler.server import serve  # noqa: E402
from graphsplit.failure import AbortSignal  # noqa: E402
from graphsplit.settings import ClusterSettings  # noqa: E402

settings = ClusterSettings.from_environ(os.environ)
assert settings is not None
mode = sys.argv[2]


def tell(line: str) -> None:
    print(line, flush=True)


def work() -> None:
    abort = AbortSignal()
    member = Member.join(
        settings,
        endpoints={},
        identity=NodeIdentity(versions={"torch": "2.13.0"}),
        abort=abort,
        log=tell,
    )
    member.position.progress = 7
    member.position.text_source = lambda: "step 7, module conv1"
    member.barrier("start")
    tell("started")
    if mode == "hang":
        signal.pause()
    elif mode == "fork":
        # The child outlives its parent, as a data loader's worker does for a while.
        child = os.fork()
        if child == 0:
            signal.pause()
        tell(f"child {child}")
        signal.pause()
    elif mode == "report":
        ended = threading.Event()
        abort.add_waker(ended.set)
        ended.wait()
        assert abort.cause is not None
        tell(f"aborted: {abort.cause.kind}: {abort.cause.message}")
        member.close()
        sys.exit(1)
    elif mode == "finish":
        member.finish()
        member.close()
    elif mode == "exit":
        # No finish, no close: as a script that forgets both.
        sys.exit(0)


if mode in ("serve", "serve_here"):
    # Any free port, so that tests can run side by side.
    if mode == "serve":
        settings = replace(settings, scheduler_port=0)
    sys.exit(serve(settings, on_listening=lambda host, port: tell(f"port {port}")))
work()
