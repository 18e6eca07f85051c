"""What an error of capture says where no line of the user's is involved."""

from __future__ import annotations

from torch import nn

from graphsplit.capture.failures import explain


def test_an_error_deep_inside_torch_names_torchs_line() -> None:
    network = nn.Linear(2, 2)
    try:
        network(1)
    except TypeError as found:
        error: BaseException = found.with_traceback(found.__traceback__.tb_next)  # type: ignore[union-attr]
    text = str(explain(network, error))
    assert "(no line of your own code is involved)" in text
    assert "linear.py:" in text
