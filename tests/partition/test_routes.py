"""``explain`` says how workers are connected, and what is known of the step's time."""

from __future__ import annotations

from pass_helpers import Op, placed_graph

from graphsplit.partition.edges import partition
from graphsplit.partition.explain.plan import explain_plan
from graphsplit.partition.explain.traffic import route_lines

PLAN = partition(placed_graph({"a": Op(0, ("x", "w")), "b": Op(1, ("a",))}, parameters={"w": 0}))


def test_pairs_with_one_transport_for_one_reason_share_a_line() -> None:
    routes = {
        (1, 2): ("grpc", "not on one machine: host a and b"),
        (0, 2): ("grpc", "not on one machine: host a and b"),
        (0, 1): ("shm", "both run as one user on one host"),
    }
    assert route_lines(routes) == [
        "transport  workers           why",
        "shm        0 and 1           both run as one user on one host",
        "grpc       0 and 2, 1 and 2  not on one machine: host a and b",
    ]


def test_many_pairs_are_counted() -> None:
    routes = {(0, other): ("shm", "one host") for other in range(1, 10)}
    assert route_lines(routes)[1].endswith("0 and 6, 3 more pairs  one host")


def test_a_plan_that_does_not_run_has_neither_section() -> None:
    text = explain_plan(PLAN)
    assert "How workers are connected" not in text
    assert "Step time" not in text


def test_a_running_plan_has_both() -> None:
    text = explain_plan(
        PLAN, routes={(0, 1): ("shm", "one host")}, step_times=["predicted 1 ms, measured 2 ms"]
    )
    assert "How workers are connected\n  transport  workers  why\n  shm" in text
    assert "Step time\n  predicted 1 ms, measured 2 ms" in text
