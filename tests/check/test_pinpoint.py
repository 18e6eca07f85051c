"""From which operation on two runs of a step differ."""

from __future__ import annotations

from dataclasses import replace

from check_records import GRADIENT_B, operation, value

from graphsplit.check.compare import Unequal
from graphsplit.check.pinpoint import Pinpoint, pinpoint
from graphsplit.check.record import NoteKind

LOSS = Unequal(value(NoteKind.LOSS), value(NoteKind.LOSS, digest="other"), 0)
LINEAR = operation("aten.addmm.default", "h", order=(0, 0, 3), target="aten.linear.default")
SCALED = operation("aten.mul.Tensor", "scaled", source="net.py:5, in forward")
PRODUCT = operation("aten.mul.Tensor", "h", order=(0, 0, 4), target="aten.mul.Tensor")
OUTPUT = operation("aten.addmm.default", "o", order=(0, 0, 5), target="aten.linear.default")


def test_the_first_result_that_the_plain_loop_never_had_is_found() -> None:
    plain = [LINEAR, SCALED, replace(OUTPUT, digests=("p",))]
    found = pinpoint(plain, [[LINEAR], [OUTPUT]], LOSS)
    assert (found.found, found.worker, found.plain) == (OUTPUT, 1, SCALED)


def test_a_product_with_one_is_found_though_its_operand_has_the_same_bits() -> None:
    found = pinpoint([LINEAR, SCALED], [[LINEAR], [PRODUCT, OUTPUT]], LOSS)
    assert found.found == PRODUCT


def test_the_order_of_the_graph_counts_and_not_that_of_the_workers() -> None:
    late = operation("aten.add.Tensor", "late", order=(0, 0, 9), target="aten.add.Tensor")
    found = pinpoint([LINEAR], [[late], [LINEAR, OUTPUT]], LOSS)
    assert (found.found, found.worker) == (OUTPUT, 1)


def test_an_operation_in_place_is_the_same_as_one_that_is_not() -> None:
    plain = [operation("aten.relu_.default", "r")]
    cut = operation("aten.relu.default", "r", order=(0, 0, 1), target="aten.relu.default")
    assert pinpoint(plain, [[cut]], LOSS) == Pinpoint(is_forward_same=True)


def test_an_operation_that_only_workers_run_counts_by_its_bits() -> None:
    cut = operation("aten.clone.default", "h", order=(0, 0, 1), target="aten.clone.default")
    assert pinpoint([LINEAR], [[cut]], LOSS) == Pinpoint(is_forward_same=True)


def test_where_forward_is_the_same_the_operation_of_the_gradient_is_found() -> None:
    reading = replace(OUTPUT, reads=("b.weight", "b.bias"))
    gradient = Unequal(GRADIENT_B, replace(GRADIENT_B, digest="other"), 1)
    found = pinpoint([LINEAR, OUTPUT], [[LINEAR], [reading]], gradient)
    assert found == Pinpoint(reading, 1, by_gradient=True)


def test_no_operation_is_claimed_where_all_of_them_are_the_same() -> None:
    assert pinpoint([LINEAR], [[LINEAR]], LOSS) == Pinpoint(is_forward_same=True)
