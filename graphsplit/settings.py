"""The cluster as the environment describes it: the ``MS_*`` and ``GS_*`` variables.

``ClusterSettings.from_environ`` is pure: it reads a mapping and returns a frozen value, or raises
one ``ConfigurationError`` that lists every problem, so that a user mends them in one go.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network

from graphsplit.errors import ConfigurationError
from graphsplit.security.options import (
    TOKEN_FIX,
    TRUSTED_NETWORK,
    SecurityOptions,
    token_problem,
)

SCHEDULER_ROLE = "MS_SCHED"
WORKER_ROLE = "MS_WORKER"
TRANSPORTS = ("auto", "shm", "gloo", "nccl", "grpc")
PLAIN, JSON = LOG_FORMATS = ("plain", "json")
FAIL_FAST, WAIT_REJOIN, RESTART, GO_ON = RECOVERY_POLICIES = (
    "fail_fast",
    "wait_rejoin",
    "restart",
    "go_on",
)
MAX_WORKERS = 1024
MAX_NODE_ID_CHARS = 128
NODE_TIMEOUT_S = 30.0
_NOTICING_S = 3.0  # measured: 2 s on a machine with four times as much to do as cores

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")
_HOST = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,255}")
_LABEL = re.compile(r"(?![0-9]+$)[\w.%/@-]{1,128}", re.A)
_MAX_LABELS_CHARS = 500
_TRANSPORT_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_FILES = ("GS_TLS_CA", "GS_TLS_CERT", "GS_TLS_KEY")
_RANK = re.compile(r"[+-]?[0-9]{1,9}")


@dataclass(frozen=True)
class Watching:
    """How people and programs can watch a process.

    Attributes:
        log: ``"plain"`` lines, or one ``"json"`` object per line.
        metrics_host: Where metrics are served.
        metrics_port: The scheduler's port for metrics; worker r takes the r + 1st after it. None
            serves none.
    """

    log: str = PLAIN
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None


def silence_within(node_timeout_s: float) -> float:
    """How long silence lasts until it is a loss, so that all know of that within a timeout.

    What is left of ``MS_NODE_TIMEOUT`` is for noticing, on a busy machine, and for telling all.
    """
    return node_timeout_s - min(_NOTICING_S, node_timeout_s / 3)


@dataclass(frozen=True)
class ClusterSettings:
    """How this process takes part in a cluster.

    Attributes:
        role: ``"MS_SCHED"`` or ``"MS_WORKER"``.
        num_workers: How many workers the job has.
        scheduler_host: Where the scheduler listens; it binds this address and no other.
        scheduler_port: Its port. 0 (any free port) is for tests only.
        node_id: The name of this process; empty when none was given.
        wished_rank: The rank that a numeric ``MS_NODE_ID`` asks for.
        worker_host: The address that this worker's data plane binds and advertises; or ``auto``, or
            a network interface.
        worker_ports: The first and the last of the ports that it may take; 0: any.
        topo_timeout_s: How long the scheduler waits for all workers, and a worker for it.
        node_timeout_s: How soon a worker that fell silent is known to be lost, everywhere.
        receive_timeout_s: How long a wait may last without a message and without progress.
        retry_lower_s: Shortest pause between two attempts to reach the scheduler.
        retry_upper_s: Longest pause between two attempts to reach the scheduler.
        recovery: What the job does about a lost worker: ``"fail_fast"``, ``"wait_rejoin"`` or
            ``"restart"``.
        snapshot_every: Training steps from one snapshot to the next.
        snapshot_disk_every: Training steps from one snapshot on disk to the next.
        recovery_path: The folder of the scheduler's journal; empty: it keeps none.
        transport: ``"auto"``, ``"shm"``, ``"grpc"``, ``"gloo"`` or ``"nccl"``.
        recapture_every: After how many steps graphs are captured again and compared; 0: never.
        labels: Names by which the script may place on this worker, beside its host's.
        trace: The folder for a trace of the first training steps; empty for none.
        watching: How this process can be watched.
        security: Certificates, the job's token, and what the user allowed to go without.
    """

    role: str
    num_workers: int
    scheduler_port: int
    scheduler_host: str = "127.0.0.1"
    node_id: str = ""
    wished_rank: int | None = None
    worker_host: str = "127.0.0.1"
    worker_ports: tuple[int, int] = (0, 0)
    topo_timeout_s: float = 1800.0
    node_timeout_s: float = NODE_TIMEOUT_S
    receive_timeout_s: float = 300.0
    retry_lower_s: float = 3.0
    retry_upper_s: float = 5.0
    recovery: str = FAIL_FAST
    recovery_path: str = ""
    snapshot_every: int = 10
    snapshot_disk_every: int = 100
    transport: str = "auto"
    recapture_every: int = 0
    labels: tuple[str, ...] = ()
    trace: str = ""
    watching: Watching = field(default_factory=Watching)
    security: SecurityOptions = field(default_factory=SecurityOptions)

    @property
    def silence_s(self) -> float:
        """How long nothing may be heard from somebody: see :func:`silence_within`."""
        return silence_within(self.node_timeout_s)

    @property
    def is_scheduler(self) -> bool:
        """Whether this process is the scheduler."""
        return self.role == SCHEDULER_ROLE

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> ClusterSettings | None:
        """Read the settings; None when ``MS_ROLE`` is unset or empty (one-process training).

        Raises:
            ConfigurationError: Variables are missing or malformed. Names every one of them.
        """
        if not environ.get("MS_ROLE", "").strip():
            return None
        reader = _Reader(environ)
        settings = _read_settings(reader)
        reader.raise_if_any()
        return settings


def _read_settings(reader: _Reader) -> ClusterSettings:
    role = reader.choice("MS_ROLE", (SCHEDULER_ROLE, WORKER_ROLE), default="")
    num_workers = reader.integer("MS_WORKER_NUM", lowest=1, highest=MAX_WORKERS)
    node_id, wished_rank = _read_node_id(reader, role=role, num_workers=num_workers)
    lower_s = reader.seconds("MS_RETRY_INTERVAL_LOWER", default=3.0)
    upper_s = reader.seconds("MS_RETRY_INTERVAL_UPPER", default=max(5.0, lower_s))
    if upper_s < lower_s:
        reader.problem(
            "MS_RETRY_INTERVAL_UPPER",
            f"at least MS_RETRY_INTERVAL_LOWER ({lower_s:g})",
            "swap the two, or leave both unset (3 and 5)",
        )
    return ClusterSettings(
        role=role,
        num_workers=num_workers,
        scheduler_host=reader.host("MS_SCHED_HOST"),
        scheduler_port=reader.integer("MS_SCHED_PORT", lowest=1, highest=65535),
        node_id=node_id,
        wished_rank=wished_rank,
        worker_host=reader.host("MS_WORKER_IP"),
        worker_ports=_read_ports(reader),
        topo_timeout_s=reader.seconds("MS_TOPO_TIMEOUT", default=1800.0),
        node_timeout_s=reader.seconds("MS_NODE_TIMEOUT", default=NODE_TIMEOUT_S),
        receive_timeout_s=reader.seconds("MS_RECEIVE_MSG_TIMEOUT", default=300.0),
        retry_lower_s=lower_s,
        retry_upper_s=upper_s,
        recovery=_read_recovery(reader),
        recovery_path=reader.text("MS_RECOVERY_PATH"),
        snapshot_every=reader.steps("GS_SNAPSHOT_EVERY", default=10),
        snapshot_disk_every=reader.steps("GS_SNAPSHOT_DISK_EVERY", default=100),
        transport=reader.choice("GS_TRANSPORT", TRANSPORTS, default="auto"),
        recapture_every=reader.steps("GS_RECAPTURE_EVERY", default=0, least=0),
        labels=_read_labels(reader),
        trace=reader.text("GS_TRACE"),
        watching=_read_watching(reader),
        security=_read_options(reader),
    )


def is_label(text: str) -> bool:
    """Whether a worker may be called so: no IPv6 address and no number can be told from a rank."""
    return _LABEL.fullmatch(text) is not None


def _read_labels(reader: _Reader) -> tuple[str, ...]:
    text = reader.text("GS_WORKER_LABELS")
    labels = tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
    if len(text) > _MAX_LABELS_CHARS or not all(map(is_label, labels)):
        expected = "names with commas between them, of letters, digits and . _ - @ % /"
        reader.problem("GS_WORKER_LABELS", expected, "for example GS_WORKER_LABELS=gpu,big-memory")
        return ()
    return labels


def _read_watching(reader: _Reader) -> Watching:
    port = reader.text("GS_METRICS_PORT")
    reader.flag("GS_FULL_TRACEBACK")  # read where there is a traceback, told here if malformed
    return Watching(
        log=reader.choice("GS_LOG", LOG_FORMATS, default=PLAIN),
        metrics_host=reader.host("GS_METRICS_HOST"),
        metrics_port=reader.integer("GS_METRICS_PORT", lowest=1, highest=65535) if port else None,
    )


def read_security(environ: Mapping[str, str]) -> SecurityOptions:
    """The protection that the variables ask for, for who takes no part in a job.

    Raises:
        ConfigurationError: Some are malformed. Names every one of them.
    """
    reader = _Reader(environ)
    options = _read_options(reader)
    reader.raise_if_any()
    return options


def _read_options(reader: _Reader) -> SecurityOptions:
    files = {name: reader.text(name) for name in _FILES}
    for name, value in files.items():
        if not value and any(files.values()):
            fix = "set all three, or none; `graphsplit certs` makes them"
            reader.problem(name, f"a file, as {' and '.join(_FILES)} belong together", fix)
    token, token_file = reader.text("GS_JOB_TOKEN"), reader.text("GS_JOB_TOKEN_FILE")
    expected = token_problem(token) if token else None
    if expected is not None:
        reader.problem("GS_JOB_TOKEN", expected, TOKEN_FIX, is_secret=True)
    if token and token_file:
        expected = "unset, as GS_JOB_TOKEN is set"
        reader.problem("GS_JOB_TOKEN_FILE", expected, "unset one of the two")
    return SecurityOptions(
        tls_ca=files["GS_TLS_CA"],
        tls_cert=files["GS_TLS_CERT"],
        tls_key=files["GS_TLS_KEY"],
        job_token=token,
        job_token_file=token_file,
        trusts_network=_trusts_network(reader),
        unencrypted=_unencrypted(reader),
        networks=_networks(reader),
    )


def _trusts_network(reader: _Reader) -> bool:
    value = reader.text("GS_INSECURE")
    if value not in ("", TRUSTED_NETWORK):
        fix = "better: unset it, and protect the job by certificates or by GS_JOB_TOKEN"
        reader.problem("GS_INSECURE", f"{TRUSTED_NETWORK}, or unset", fix)
    return value == TRUSTED_NETWORK


def _networks(reader: _Reader) -> tuple[str, ...]:
    try:
        return tuple(str(ip_network(one)) for one in _listed(reader, "GS_WORKER_NETWORKS"))
    except ValueError:
        expected = "IP addresses or networks, with commas between them"
        fix = "for example GS_WORKER_NETWORKS=10.1.0.0/16,192.168.7.3"
        reader.problem("GS_WORKER_NETWORKS", expected, fix)
        return ()


def _listed(reader: _Reader, name: str) -> list[str]:
    parts = (part.strip() for part in reader.text(name).split(","))
    return [part for part in parts if part]


def _unencrypted(reader: _Reader) -> tuple[str, ...]:
    names = tuple(_listed(reader, "GS_ALLOW_UNENCRYPTED"))
    if not all(_TRANSPORT_NAME.fullmatch(name) for name in names):
        expected = "names of transports, with commas between them"
        reader.problem("GS_ALLOW_UNENCRYPTED", expected, "for example GS_ALLOW_UNENCRYPTED=gloo")
        return ()
    return names


def recovery_policy(environ: Mapping[str, str]) -> str:
    """The policy for a lost worker; the default where the variables are malformed."""
    return _read_recovery(_Reader(environ))


def worker_ports(environ: Mapping[str, str]) -> tuple[int, int]:
    """The ports that workers may take; any where the variable is malformed."""
    return _read_ports(_Reader(environ))


def _read_ports(reader: _Reader) -> tuple[int, int]:
    text = reader.text("GS_WORKER_PORTS")
    if not text:
        return 0, 0
    found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1024 <= first <= last <= 65535:
        expected = "the first and the last port of a range from 1024 to 65535"
        reader.problem("GS_WORKER_PORTS", expected, "for example GS_WORKER_PORTS=41000-41100")
        return 0, 0
    return first, last


def _read_recovery(reader: _Reader) -> str:
    """``GS_RECOVERY`` wins; ``MS_ENABLE_RECOVERY`` alone means that lost workers come back."""
    is_enabled = reader.flag("MS_ENABLE_RECOVERY")
    default = WAIT_REJOIN if is_enabled else FAIL_FAST
    return reader.choice("GS_RECOVERY", RECOVERY_POLICIES, default=default)


def _read_node_id(reader: _Reader, *, role: str, num_workers: int) -> tuple[str, int | None]:
    node_id = reader.text("MS_NODE_ID")
    if len(node_id) > MAX_NODE_ID_CHARS or not node_id.isprintable():
        expected = f"at most {MAX_NODE_ID_CHARS} printable characters"
        reader.problem("MS_NODE_ID", expected, "choose a shorter, plain name")
        return "", None
    if role == SCHEDULER_ROLE or not _RANK.fullmatch(node_id):
        return node_id, None
    rank = int(node_id)
    # num_workers is 0 when it is missing or malformed; that is a problem of its own.
    if num_workers and not 0 <= rank < num_workers:
        reader.problem(
            "MS_NODE_ID",
            f"a rank from 0 to {num_workers - 1}, or a name that is not a number",
            f"start with MS_WORKER_NUM={rank + 1}, or choose a rank below {num_workers}"
            if rank > 0
            else "ranks begin at 0",
        )
    return node_id, rank


class _Reader:
    """Reads variables one by one and collects what is wrong with them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._problems: list[str] = []

    def text(self, name: str) -> str:
        return self._environ.get(name, "").strip()

    def problem(self, name: str, expected: str, fix: str, *, is_secret: bool = False) -> None:
        raw = self._environ.get(name)
        shown = "(not shown)" if is_secret else _shown(raw or "")
        found = f"{name} is not set" if raw is None else f"{name}={shown}"
        self._problems.append(f"{found}\n    expected: {expected}\n    Fix: {fix}")

    def raise_if_any(self) -> None:
        if not self._problems:
            return
        count = len(self._problems)
        noun = "variable is" if count == 1 else "variables are"
        lines = [f"{count} environment {noun} missing or malformed"]
        lines.extend("  " + problem for problem in self._problems)
        raise ConfigurationError("\n".join(lines))

    def choice(self, name: str, choices: tuple[str, ...], *, default: str) -> str:
        value = self.text(name) or default
        if value not in choices:
            self.problem(name, " or ".join(choices), f"set {name}={choices[-1]}, for example")
            return default
        return value

    def integer(self, name: str, *, lowest: int, highest: int) -> int:
        """A required whole number; 0 stands in for one that is missing or malformed."""
        value = self.text(name)
        if re.fullmatch(r"[0-9]{1,9}", value) and lowest <= int(value) <= highest:
            return int(value)
        fix = f"set {name} to the same number in every process of the job"
        self.problem(name, f"a whole number from {lowest} to {highest}", fix)
        return 0

    def steps(self, name: str, *, default: int, least: int = 1) -> int:
        """A number of training steps."""
        value = self.text(name)
        if not value:
            return default
        if re.fullmatch(r"[0-9]{1,9}", value) and int(value) >= least:
            return int(value)
        fix = f"unset it for the default, {default}"
        self.problem(name, f"a number of training steps, {least} or more", fix)
        return default

    def seconds(self, name: str, *, default: float) -> float:
        value = self.text(name)
        if not value:
            return default
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if math.isfinite(seconds) and seconds > 0:
            return seconds
        fix = f"unset it for the default, {default:g} s"
        self.problem(name, "a number of seconds above 0", fix)
        return default

    def host(self, name: str) -> str:
        value = self.text(name)
        if not value:
            return "127.0.0.1"
        if _HOST.fullmatch(value):
            return value.removeprefix("[").removesuffix("]")
        self.problem(name, "a host name or an IP address, without a port", f"set {name}=127.0.0.1")
        return "127.0.0.1"

    def flag(self, name: str) -> bool:
        value = self.text(name).lower()
        if value not in _TRUE + _FALSE:
            self.problem(name, "1 or 0", "unset it")
        return value in _TRUE


def _shown(value: str) -> str:
    """The value as found, quoted, and cut if somebody put a novel into a variable."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
