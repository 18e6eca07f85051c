"""The SSH client of a connection to one host, as a process of this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import IO, Protocol

from graphsplit.cli.launch.children import make_setup
from graphsplit.cli.ssh.command import agent_command, why_not


class HostError(Exception):
    """A host cannot take part; the text has the fix."""


class AgentClient(Protocol):
    """The way to an agent: three pipes, and an end.

    Attributes:
        stdin: What is written there the agent reads.
        stdout: What the agent answers.
        stderr: What the client itself has to say.
        what: The connection, in words.
    """

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None
    what: str

    def kill(self) -> None:
        """End the connection at once."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; its status.

        Raises:
            subprocess.TimeoutExpired: It has not.
        """
        ...

    def why_not(self, status: int, said: Sequence[str]) -> str:
        """The reason why the agent has not started, and the fix."""
        ...


class SshClient(subprocess.Popen[bytes]):
    """A client that starts the agent of a host.

    Args:
        ssh: Its command, with options.
        host: The host's name, as it is given to the client.
        python: The interpreter there.

    Raises:
        HostError: It cannot be started.
    """

    what = "SSH connection"

    def __init__(self, ssh: Sequence[str], host: str, python: str) -> None:
        self._host, self._python = host, python
        try:
            super().__init__(
                agent_command(ssh, host, python),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=make_setup(),
            )
        except OSError as error:
            raise HostError(
                f"no SSH client can be started: {ssh[0]} ({error.strerror})\n"
                f"  Fix: install it (Debian: openssh-client), or name it: --ssh COMMAND"
            ) from None

    def why_not(self, status: int, said: Sequence[str]) -> str:
        """See ``AgentClient``."""
        return why_not(self._host, status, said, self._python)
