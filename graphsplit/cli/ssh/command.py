"""The command by which SSH starts the agent of a host, and what it means if it cannot. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from graphsplit.version import __version__

AGENT = "graphsplit.cli.ssh.agent"
CONNECT_S = 8
# Nobody is there to be asked for a password; the user's own configuration says the rest.
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}")
_SSH_FAILED, _NOT_EXECUTABLE, _NOT_FOUND = 255, 126, 127


def agent_command(ssh: Sequence[str], host: str, python: str) -> list[str]:
    """The command line on this machine. No secret is in it."""
    return [*ssh, *_OPTIONS, "--", host, f"exec {shlex.quote(python)} -m {AGENT}"]


def why_not(host: str, status: int, said: Sequence[str], python: str) -> str:
    """The reason why the agent of a host did not start, and the fix.

    Args:
        host: Its name.
        status: The status with which ``ssh`` has ended.
        said: The lines of its standard error.
        python: The interpreter that was asked for.
    """
    text = "\n".join(said)
    last = next((line.strip() for line in reversed(said) if line.strip()), f"status {status}")
    if status == _SSH_FAILED:
        what, fix = _refused(host, text)
    elif status in (_NOT_FOUND, _NOT_EXECUTABLE):
        what = f"it has no {python} that can be run"
        fix = "name the interpreter that has graphsplit on every host: --python PATH"
    elif found := re.search(r"No module named '?(graphsplit[\w.]*)", text):
        if found[1] == "graphsplit":
            what = f"its {python} has no graphsplit"
        else:
            what = f"its {python} has an older graphsplit, without {found[1]}"
        fix = f"install graphsplit {__version__} there, or name another interpreter: --python PATH"
    else:
        what, fix = "its agent did not start", f"look at what `ssh {host} {python} -V` says"
    return f"host {host}: {what} ({last})\n  Fix: {fix}"


def _refused(host: str, text: str) -> tuple[str, str]:
    """The meaning of an ``ssh`` that has failed by itself, and the fix."""
    if "IDENTIFICATION HAS CHANGED" in text:
        return (
            "its host key is another one than it was",
            f"ask who runs it whether that is meant; then `ssh-keygen -R {host}`, and `ssh {host}`",
        )
    if "Host key verification failed" in text:
        return (
            "its host key is not known here",
            f"run `ssh {host}` once, and compare the fingerprint that it shows",
        )
    if "Permission denied" in text:
        return (
            "it does not let this user in without a password",
            f"run `ssh-copy-id {host}`, or name user and key in ~/.ssh/config",
        )
    if "Could not resolve hostname" in text:
        return (
            "its name is not known here",
            "mend the name, or give it a HostName in ~/.ssh/config",
        )
    return (
        "SSH cannot reach it",
        f"look whether the host runs, and its sshd, and what `ssh -v {host}` says",
    )
