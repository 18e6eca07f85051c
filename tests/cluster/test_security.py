"""Who may register: certificates, ranks and tokens, against a live scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster_helpers import DEADLINE_S, LiveCluster
from security_helpers import SCHEDULER_NAME, expired, protection, worker_name

from graphsplit.cluster.member.member import Member
from graphsplit.cluster.scheduler import admission
from graphsplit.cluster.wire.codec import encode_worker, open_scheduler
from graphsplit.cluster.wire.messages import Accepted, Formed, Heartbeat, Refused
from graphsplit.cluster.wire.rpc import METHOD, PURPOSE, SERVICE
from graphsplit.errors import ClusterError, ConfigurationError, RegistrationRefusedError
from graphsplit.security.grpc_ports import open_channel
from graphsplit.security.handshake import Dialer
from graphsplit.security.issue import fill_folder
from graphsplit.security.options import SecurityOptions
from graphsplit.security.protection import UNPROTECTED, Protection

TOKEN = "a token that only this job knows"
WITH_TOKEN = SecurityOptions(job_token=TOKEN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a scheduler and two workers, of the tests' authority."""
    from security_helpers import authority

    path = tmp_path_factory.mktemp("certs")
    authority().write(path)
    fill_folder(path, num_workers=2, hosts=[], days=1)
    return path


def files(folder: Path, name: str, *, token: str = "") -> SecurityOptions:
    paths = [str(folder / file) for file in ("ca.pem", f"{name}.pem", f"{name}.key")]
    return SecurityOptions(*paths, job_token=token)


def finish(cluster: LiveCluster, members: list[Member]) -> None:
    for future in [cluster.submit(member.finish) for member in members]:
        future.result(DEADLINE_S)
    for member in members:
        member.close()
    assert cluster.wait_status() == 0


def join_both(cluster: LiveCluster, securities: list[SecurityOptions]) -> list[Member]:
    futures = [
        cluster.submit(cluster.join, str(rank), security=security)
        for rank, security in enumerate(securities)
    ]
    return [future.result(DEADLINE_S).member for future in futures]


class Stranger:
    """A client that shows and says what it likes."""

    def __init__(self, port: int, shown: Protection = UNPROTECTED) -> None:
        self._channel = open_channel(
            f"127.0.0.1:{port}",
            shown,
            expected=SCHEDULER_NAME.dns,
            # Two strangers never share a connection: a port allows one stream on each.
            options=[("grpc.use_local_subchannel_pool", 1)],
        )

    def say(self, *messages: bytes, dialer: Dialer | None = None) -> Any:
        """The scheduler's first answer, or the code with which the stream ended."""
        session = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        metadata = None if dialer is None else dialer.metadata()
        hold = threading.Event()

        def requests() -> Any:
            yield from messages
            hold.wait(DEADLINE_S)

        call = session(requests(), metadata=metadata, timeout=DEADLINE_S)
        try:
            return open_scheduler(next(call))[1]
        except StopIteration:
            return None
        except grpc.RpcError as error:
            return error.code()
        finally:
            hold.set()
            call.cancel()

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def stranger(request: pytest.FixtureRequest) -> Callable[..., Stranger]:
    def make(*arguments: Any) -> Stranger:
        made = Stranger(*arguments)
        request.addfinalizer(made.close)
        return made

    return make


@pytest.fixture
def register(registration: Callable[..., Any]) -> Callable[..., bytes]:
    def encoded(name: str, **changes: object) -> bytes:
        return encode_worker(registration(name, **{"num_workers": 2, **changes}))

    return encoded


def test_a_job_forms_and_finishes_under_tls_and_a_token(start_cluster, folder):
    cluster = start_cluster(2, security=files(folder, "scheduler", token=TOKEN))
    securities = [files(folder, f"worker-{rank}", token=TOKEN) for rank in range(2)]
    finish(cluster, join_both(cluster, securities))
    assert TOKEN not in "".join(cluster.log)


def test_who_shows_no_right_certificate_never_comes_to_speak(
    start_cluster, folder, stranger, register
):
    cluster = start_cluster(2, security=files(folder, "scheduler"))
    for shown in (
        UNPROTECTED,
        protection(worker_name(0), signed_by="other"),
        expired(worker_name(0)),
        protection(SCHEDULER_NAME),  # good for a server alone
    ):
        answer = stranger(cluster.port, shown).say(register("0"))
        assert answer is grpc.StatusCode.UNAVAILABLE
    assert not any("registered" in line for line in cluster.log)
    finish(cluster, join_both(cluster, [files(folder, f"worker-{rank}") for rank in range(2)]))


def test_a_right_certificate_with_the_wrong_rank_is_refused_naming_both(
    start_cluster, folder, stranger, register
):
    cluster = start_cluster(2, security=files(folder, "scheduler"))
    answer = stranger(cluster.port, protection(worker_name(1))).say(register("0"))
    assert isinstance(answer, Refused)
    assert "its certificate is for worker 1, and it says that it is worker 0" in answer.reason
    assert "refused a connection from 127.0.0.1: its certificate is for" in cluster.log[-1]
    finish(cluster, join_both(cluster, [files(folder, f"worker-{rank}") for rank in range(2)]))


def test_a_worker_without_a_number_gets_the_rank_of_its_certificate(start_cluster, folder):
    cluster = start_cluster(2, security=files(folder, "scheduler"))
    futures = [
        cluster.submit(cluster.join, name, security=files(folder, f"worker-{rank}"))
        for name, rank in (("b", 1), ("a", 0))
    ]
    second, first = (future.result(DEADLINE_S).member for future in futures)
    assert (first.rank, second.rank) == (0, 1)
    finish(cluster, [first, second])


def test_a_worker_does_not_talk_to_a_scheduler_without_the_right_certificate(
    start_cluster, folder, tmp_path
):
    shown = protection(worker_name(0)).tls
    assert shown is not None
    (tmp_path / "c.pem").write_bytes(shown.chain)
    (tmp_path / "c.key").write_bytes(shown.key)
    (tmp_path / "c.key").chmod(0o600)
    # No options make a scheduler use a worker's certificate, so its check is left out.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "graphsplit.security.certificates._check_name", lambda *a, **k: worker_name(0)
        )
        impostor = SecurityOptions(
            str(folder / "ca.pem"), str(tmp_path / "c.pem"), str(tmp_path / "c.key")
        )
        cluster = start_cluster(2, security=impostor, topo_timeout_s=2.0)
    with pytest.raises(ClusterError) as caught:
        cluster.join("0", security=files(folder, "worker-0"))
    assert "Hostname Verification Check failed" in str(caught.value)
    assert "The certificate over there is for another role or rank" in str(caught.value)
    assert cluster.wait_status() == 1  # nobody came


@pytest.mark.parametrize(
    ("scheduler", "worker", "message"),
    [
        (WITH_TOKEN, SecurityOptions(), "it has no job token, and the scheduler has one\n  Fix: "),
        (SecurityOptions(), WITH_TOKEN, "it has a job token, and the scheduler has none\n  Fix: "),
        (WITH_TOKEN, SecurityOptions(job_token="the token of another"), "it does not know this wo"),
    ],
)
def test_other_tokens_are_refused_in_words_and_the_job_forms(
    start_cluster, scheduler, worker, message
):
    cluster = start_cluster(2, security=scheduler)
    with pytest.raises(ClusterError) as caught:
        cluster.join("0", security=worker)
    assert message in str(caught.value) and TOKEN not in str(caught.value)
    finish(cluster, join_both(cluster, [scheduler, scheduler]))
    assert TOKEN not in "".join(cluster.log)


def test_what_a_stranger_says_before_the_token_is_proved_is_not_read(
    start_cluster, stranger, register
):
    cluster = start_cluster(2, security=WITH_TOKEN)
    guess = Dialer(b"a guess at the token", PURPOSE)
    for first in (register("0"), b"", bytes(32), b"\xff" * 5000):
        answer = stranger(cluster.port).say(first, register("0"), dialer=guess)
        assert isinstance(answer, Refused)
        assert answer.reason.startswith("it does not know the job's token")
    assert not any("registered" in line for line in cluster.log)
    finish(cluster, join_both(cluster, [WITH_TOKEN, WITH_TOKEN]))


@pytest.mark.parametrize("endpoint", ["192.0.2.7:443", "metadata.internal:80"])
def test_a_member_cannot_have_the_others_dial_an_address_of_its_choice(start_cluster, endpoint):
    """It knows the token, and comes from this machine."""
    cluster = start_cluster(1, security=WITH_TOKEN)
    with pytest.raises(RegistrationRefusedError) as caught:
        cluster.join("0", endpoint=endpoint)
    host = endpoint.split(":")[0]
    assert "worker '0' (host" in str(caught.value) and host in str(caught.value)
    assert any("refused a connection" in line and host in line for line in cluster.log)
    finish(cluster, [cluster.join("0").member])


def test_a_worker_may_listen_in_a_network_that_the_scheduler_was_told(start_cluster):
    networks = SecurityOptions(job_token=TOKEN, networks=("198.51.100.0/24",))
    cluster = start_cluster(1, security=networks)
    finish(cluster, [cluster.join("0", endpoint="198.51.100.7:443").member])


def test_only_a_registration_opens_a_session(start_cluster, stranger):
    cluster = start_cluster(1)
    answer = stranger(cluster.port).say(encode_worker(Heartbeat(5)))
    assert answer == Refused("sent Heartbeat before it was registered")
    finish(cluster, [cluster.join("0").member])


def test_who_opens_a_stream_and_says_nothing_is_sent_away(start_cluster, stranger, monkeypatch):
    cluster = start_cluster(1, security=WITH_TOKEN)
    dialer = Dialer(TOKEN.encode(), PURPOSE)
    with monkeypatch.context() as at_first:
        at_first.setattr(admission, "REGISTER_TIMEOUT_S", 0.3)
        answer = stranger(cluster.port).say(dialer=dialer)
    assert answer == Refused("it did not register within 0.3 s")
    finish(cluster, [cluster.join("0").member])


def test_guessing_is_slowed_down_and_does_not_fill_the_log(start_cluster, stranger, register):
    cluster = start_cluster(1, security=WITH_TOKEN)
    guess = Dialer(b"a guess at the token", PURPOSE)
    visitor = stranger(cluster.port)
    answers = []  # as many guesses as it takes where each takes long
    while answers.count(grpc.StatusCode.RESOURCE_EXHAUSTED) < 10:
        answers.append(visitor.say(register("0"), dialer=guess))
        assert len(answers) < 600
    assert not any(isinstance(answer, (Accepted, Formed)) for answer in answers)
    assert sum("refused" in line for line in cluster.log) <= 0.6 * len(answers)
    # Whoever comes with the right token is told to come back later, and does.
    finish(cluster, [cluster.join("0").member])


def test_a_scheduler_does_not_listen_beyond_loopback_without_protection(start_cluster):
    from graphsplit.cluster.scheduler.server import serve
    from graphsplit.settings import ClusterSettings

    with pytest.raises(ConfigurationError, match=r"the scheduler would listen on 0\.0\.0\.0"):
        serve(ClusterSettings("MS_SCHED", 1, 0, scheduler_host="0.0.0.0"))


def test_a_refusal_by_the_scheduler_is_no_lost_scheduler(start_cluster):
    cluster = start_cluster(1, security=WITH_TOKEN)
    with pytest.raises(RegistrationRefusedError, match="GS_JOB_TOKEN_FILE"):
        cluster.join("0", security=SecurityOptions())
    finish(cluster, [cluster.join("0").member])
