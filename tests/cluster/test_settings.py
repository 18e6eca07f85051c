from __future__ import annotations

import pytest

from graphsplit.errors import ConfigurationError
from graphsplit.settings import ClusterSettings, worker_ports

WORKER = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "5", "MS_SCHED_PORT": "8118"}


def read(**changes):
    return ClusterSettings.from_environ({**WORKER, **changes})


def problems(**changes):
    with pytest.raises(ConfigurationError) as caught:
        read(**changes)
    return str(caught.value)


@pytest.mark.parametrize("environ", [{}, {"MS_ROLE": ""}, {"MS_WORKER_NUM": "x"}])
def test_without_a_role_there_is_no_cluster(environ):
    assert ClusterSettings.from_environ(environ) is None


def test_the_defaults_are_those_of_the_contract():
    settings = read()
    assert settings == ClusterSettings(role="MS_WORKER", num_workers=5, scheduler_port=8118)
    assert (settings.scheduler_host, settings.worker_host) == ("127.0.0.1", "127.0.0.1")
    assert (settings.node_id, settings.wished_rank) == ("", None)
    assert (settings.topo_timeout_s, settings.node_timeout_s) == (1800, 30)
    assert settings.receive_timeout_s == 300
    assert (settings.retry_lower_s, settings.retry_upper_s) == (3, 5)
    assert settings.transport == "auto"
    assert not settings.is_scheduler


@pytest.mark.parametrize("text", ["41000", "41000-", "5-3", "80-90", "2000-70000", "a-b"])
def test_a_range_of_ports_that_is_none_is_named(text):
    assert "GS_WORKER_PORTS" in problems(GS_WORKER_PORTS=text)
    assert read(GS_WORKER_PORTS="41000-41100").worker_ports == (41000, 41100)
    assert worker_ports({"GS_WORKER_PORTS": text}) == read().worker_ports == (0, 0)


def test_everything_can_be_set():
    settings = read(
        MS_ROLE="MS_SCHED",
        MS_SCHED_HOST="[::1]",
        MS_NODE_ID="name",
        MS_WORKER_IP="10.0.0.7",
        MS_TOPO_TIMEOUT="60",
        MS_NODE_TIMEOUT="2.5",
        MS_RECEIVE_MSG_TIMEOUT="10",
        MS_RETRY_INTERVAL_LOWER="0.5",
        MS_RETRY_INTERVAL_UPPER="0.5",
        MS_ENABLE_RECOVERY="0",
        MS_RECOVERY_PATH="/tmp/x",
        GS_TRANSPORT="shm",
    )
    assert settings == ClusterSettings(
        role="MS_SCHED",
        num_workers=5,
        scheduler_host="::1",
        scheduler_port=8118,
        node_id="name",
        worker_host="10.0.0.7",
        topo_timeout_s=60,
        node_timeout_s=2.5,
        receive_timeout_s=10,
        retry_lower_s=0.5,
        retry_upper_s=0.5,
        recovery_path="/tmp/x",
        transport="shm",
    )
    assert settings.is_scheduler


def test_a_numeric_node_id_is_the_wished_rank_and_any_other_only_a_name():
    assert read(MS_NODE_ID="3").wished_rank == 3
    assert read(MS_NODE_ID="03").wished_rank == 3
    assert read(MS_NODE_ID="3a").wished_rank is None
    assert read(MS_NODE_ID="3a").node_id == "3a"


def test_a_scheduler_may_have_any_node_id():
    assert read(MS_ROLE="MS_SCHED", MS_NODE_ID="99").wished_rank is None


def test_a_lower_retry_interval_above_the_default_upper_one_moves_it():
    assert read(MS_RETRY_INTERVAL_LOWER="8").retry_upper_s == 8


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MS_ROLE", "MS_SERVER", "MS_SCHED or MS_WORKER"),
        ("MS_WORKER_NUM", "0", "a whole number from 1 to 1024"),
        ("MS_WORKER_NUM", "-3", "a whole number from 1 to 1024"),
        ("MS_WORKER_NUM", "five", "a whole number from 1 to 1024"),
        ("MS_WORKER_NUM", "2.0", "a whole number from 1 to 1024"),
        ("MS_SCHED_PORT", "0", "a whole number from 1 to 65535"),
        ("MS_SCHED_PORT", "65536", "a whole number from 1 to 65535"),
        ("MS_SCHED_HOST", "a b", "a host name or an IP address"),
        ("MS_WORKER_IP", "10.0.0.1/8", "a host name or an IP address"),
        ("MS_NODE_ID", "5", "a rank from 0 to 4"),
        ("MS_NODE_ID", "-1", "a rank from 0 to 4"),
        ("MS_NODE_ID", "x" * 129, "at most 128 printable characters"),
        ("MS_NODE_ID", "a\x1bb", "at most 128 printable characters"),
        ("MS_TOPO_TIMEOUT", "0", "a number of seconds above 0"),
        ("MS_TOPO_TIMEOUT", "inf", "a number of seconds above 0"),
        ("MS_NODE_TIMEOUT", "nan", "a number of seconds above 0"),
        ("MS_RECEIVE_MSG_TIMEOUT", "soon", "a number of seconds above 0"),
        ("MS_RETRY_INTERVAL_LOWER", "-1", "a number of seconds above 0"),
        ("MS_RETRY_INTERVAL_UPPER", "1", "at least MS_RETRY_INTERVAL_LOWER (3)"),
        ("GS_RECOVERY", "hope", "fail_fast or wait_rejoin or restart"),
        ("MS_ENABLE_RECOVERY", "perhaps", "1 or 0"),
        ("GS_TRANSPORT", "pigeon", "auto or shm or gloo or nccl or grpc"),
    ],
)
def test_a_malformed_variable_is_named_with_what_was_found_and_how_to_mend_it(
    name, value, expected
):
    text = problems(**{name: value})
    assert "1 environment variable is missing or malformed" in text
    assert f"{name}={value!r}"[:60] in text
    assert f"expected: {expected}" in text
    assert "Fix: " in text


def test_missing_variables_are_all_listed_at_once():
    with pytest.raises(ConfigurationError) as caught:
        ClusterSettings.from_environ({"MS_ROLE": "MS_WORKER", "MS_NODE_TIMEOUT": "x"})
    text = str(caught.value)
    assert text.startswith("3 environment variables are missing or malformed")
    assert "MS_WORKER_NUM is not set" in text
    assert "MS_SCHED_PORT is not set" in text
    assert "MS_NODE_TIMEOUT='x'" in text


def test_an_enormous_value_is_not_repeated_whole():
    assert len(problems(GS_TRANSPORT="x" * 10_000)) < 400


@pytest.mark.parametrize(
    ("enabled", "policy", "expected"),
    [
        ("", "", "fail_fast"),
        ("0", "", "fail_fast"),
        ("1", "", "wait_rejoin"),
        ("1", "restart", "restart"),
        ("1", "fail_fast", "fail_fast"),
        ("", "wait_rejoin", "wait_rejoin"),
    ],
)
def test_gs_recovery_wins_over_the_flag_that_users_know(enabled, policy, expected):
    settings = read(MS_ENABLE_RECOVERY=enabled, GS_RECOVERY=policy)
    assert settings.recovery == expected
