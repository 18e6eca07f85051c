"""A process that starts its script again in its own place: same number, arguments, streams.

Only what this worker holds of snapshots is handed over, in files that live in memory alone. Nothing
is unwound: the script's objects end as they would if the process were killed.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from graphsplit.encoding import memory_files
from graphsplit.job.job import Job
from graphsplit.recovery.snapshot.replicator import HeldCopies
from graphsplit.recovery.snapshot.shard import SnapshotShard

HANDED_OVER = "GRAPHSPLIT_HANDED_OVER"
_Pieces = Sequence[torch.Tensor]


@dataclass
class HandedOver:
    """The parts of snapshots that one worker holds.

    Attributes:
        own: Its own, by number.
        held: Those of the worker before it.
    """

    own: dict[int, SnapshotShard] = field(default_factory=dict)
    held: HeldCopies = field(default_factory=HeldCopies)


class Successor:
    """The process that comes after this one, in its place.

    It is made when a worker has joined: the script may go to another folder later.
    """

    def __init__(self) -> None:
        self._folder = os.getcwd()

    def start(self, job: Job, parts: HandedOver) -> NoReturn:
        """Start the script again, from its first line.

        Args:
            job: The job, whose generation is over.
            parts: What is handed over.
        """
        job.transport.close()
        job.member.close()
        for child in multiprocessing.active_children():  # of loaders: nobody would end them
            child.kill()
            child.join()
        told = [
            *_written("own", {n: part.pieces() for n, part in parts.own.items()}),
            *_written("held", parts.held.parts),
        ]
        os.environ["MS_NODE_ID"] = str(job.rank)  # the parts are of this rank
        os.environ[HANDED_OVER] = " ".join(told)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os.chdir(self._folder)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

    def received(self) -> HandedOver:
        """The parts that the process before has handed over; none in a new one."""
        parts = HandedOver()
        for told in os.environ.pop(HANDED_OVER, "").split():
            kind, number, file = told.split(":")
            octets = memory_files.read(int(file))
            os.close(int(file))
            if kind == "own":
                parts.own[int(number)] = SnapshotShard.read([octets], what="a part handed over")
            else:
                parts.held.parts[int(number)] = (octets,)
        return parts


def _written(kind: str, parts: Mapping[int, _Pieces]) -> list[str]:
    told = []
    for number, pieces in parts.items():
        file = os.memfd_create("graphsplit-snapshot", 0)  # the next program has it as well
        memory_files.write(file, list(pieces))
        told.append(f"{kind}:{number}:{file}")
    return told
