"""What cannot be captured is refused with the user's line, the reason and the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_helpers import captured
from torch import nn

from graphsplit.errors import CaptureError

X = torch.zeros(2, 4)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 7


class Runs(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def refusal(function: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        captured(Runs(function), X)
    return str(caught.value)


def line_of(function: Any, offset: int = 1) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


def test_custom_functions_work_again_after_a_refusal() -> None:
    refusal(lambda net, x: Double.apply(net.fc(x)).sum().numpy())
    x = torch.ones(1, requires_grad=True)
    Double.apply(x).backward()
    assert torch.equal(x.grad, torch.full((1,), 7.0))


def test_a_branch_on_data_is_refused_with_line_reason_and_way_out() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        if net.fc(x).sum() > 0:
            return x.sum()
        return net.fc(x).sum()

    message = refusal(run)
    assert "the code that runs depends on the values of a tensor" in message
    assert line_of(run) in message
    assert "Fix: replace the Python branch by torch.where" in message


class Masked(nn.Module):
    def __init__(self, is_causal: bool | None) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.encoder.layers[0].linear1.place("MS_WORKER", 1)  # type: ignore[operator]
        self.is_causal = is_causal

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.encoder(x, mask=mask, is_causal=self.is_causal)
        return made.sum()


def test_a_mask_that_is_compared_with_a_causal_one_is_refused_with_the_way_out() -> None:
    x, mask = torch.zeros(2, 3, 4), nn.Transformer.generate_square_subsequent_mask(3)

    with pytest.raises(CaptureError, match=r"compares the values of a mask") as caught:
        captured(Masked(None), x, mask)

    assert "Fix: say with the mask whether it is a causal one" in str(caught.value)
    assert captured(Masked(True), x, mask) is not None


def test_packed_sequences_are_refused_once_with_the_way_out() -> None:
    gru = nn.GRU(4, 4, batch_first=True)

    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = gru

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.gru(packed)[1].sum()

    with pytest.raises(CaptureError) as caught:
        captured(Packs(), torch.zeros(2, 3, 4), torch.tensor([3, 2]))
    text = str(caught.value)
    assert "packed sequences have sizes that depend on the values of a tensor" in text
    assert text.count("Fix: ") == 1 and "gs.opaque(module, outputs=f)" in text
    assert "kept whole, which did not help" not in text and "FakeTensor" not in text


def test_leaving_torch_is_refused() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(net.fc(x).detach().numpy()).sum()

    message = refusal(run)
    assert "a tensor leaves PyTorch" in message
    assert line_of(run) in message


def test_an_error_of_the_users_own_code_is_shown_with_its_line() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such layer")

    message = refusal(run)
    assert message.startswith("KeyError: 'no such layer'\n  in the network, given float32[2, 4]")
    assert "Fix: mend the line named above" in message
    assert line_of(run) in message


def test_what_plain_pytorch_refuses_too_is_not_blamed_on_the_capture() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        net.count = net.count + 1
        return net.fc(x[:, :3])

    def misspelt(net: Runs, x: torch.Tensor) -> torch.Tensor:
        return net.fcc(x)  # type: ignore[operator]

    network = Runs(run)
    count = network.count
    with pytest.raises(CaptureError) as caught:
        captured(network, X)
    message = str(caught.value)
    assert message.startswith(
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x4)\n"
        "  in module 'fc', given float32[2, 3]"
    )
    assert "Plain PyTorch raises it too." in message
    assert line_of(run, 2) in message
    assert "Fix: look at the shapes and dtypes of the batch" in message
    assert network.count is count
    assert refusal(misspelt).startswith("AttributeError: 'Runs' object has no attribute 'fcc'")


def test_a_target_of_a_wrong_dtype_is_told_in_the_words_of_eager_mode() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(net.fc(x), torch.zeros(2))

    with pytest.raises(RuntimeError) as eager:
        Runs(run)(X)
    assert refusal(run).startswith(f"RuntimeError: {eager.value}\n  in the network")


def test_the_users_line_is_found_in_a_folder_called_like_the_package(tmp_path: Any) -> None:
    file = tmp_path / "graphsplit" / "torch" / "train.py"
    code = compile("def run(net, x):\n    return x.sum() if x.sum() > 0 else x\n", file, "exec")
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert f"{file}:2" in refusal(scope["run"])


def test_a_failed_capture_leaves_the_generator_alone() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        raise KeyError

    network = Runs(run)
    before = torch.get_rng_state()
    with pytest.raises(CaptureError):
        captured(network, X)
    assert torch.equal(torch.get_rng_state(), before)


class _MultipliesOtherwise(nn.Parameter):
    def __mul__(self, other: Any) -> torch.Tensor:
        return torch.Tensor.__mul__(self, other) + 1


def test_a_class_of_tensors_with_an_operator_of_its_own_is_refused() -> None:
    net = Runs(lambda net, x: (net.own * net.fc(x)).sum())
    net.own = _MultipliesOtherwise(torch.ones(4))
    with pytest.raises(CaptureError, match=r"net\.own is a tensor of class .*which has a __mul__"):
        captured(net, X)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_buffer_is_refused_and_its_parts_are_captured(layout: torch.layout) -> None:
    whole = torch.eye(2).to_sparse(layout=layout)
    net = Runs(lambda net, x: torch.sparse.mm(net.adjacency, net.fc(x)).sum())
    net.register_buffer("adjacency", whole)
    with pytest.raises(CaptureError, match=rf"\(adjacency\) is of layout {layout}\n.*indices"):
        captured(net, X)

    net = Runs(lambda net, x: torch.sparse.mm(_built(net.indices, net.values), net.fc(x)).sum())
    net.register_buffer("indices", torch.eye(2).to_sparse().indices())
    net.register_buffer("values", torch.ones(2))
    assert any(node.target == "indices" for node in captured(net, X).nodes)


def _built(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, (2, 2))


def swapped(net: Runs, x: torch.Tensor) -> torch.Tensor:
    net.fc, net.other = net.other, net.fc
    return net.other(net.fc(x)).sum()


def exchanged(net: Runs, x: torch.Tensor) -> torch.Tensor:
    fc, other = net.fc, net.other
    fc.weight, other.weight = other.weight, fc.weight
    return net.other(net.fc(x)).sum()


def tied(net: Runs, x: torch.Tensor) -> torch.Tensor:
    net.other.weight = net.fc.weight
    return net.other(net.fc(x)).sum()


def turned(net: Runs, x: torch.Tensor) -> torch.Tensor:
    held = net.parts
    held[0], held[1] = held[1], held[0]
    return held[1](held[0](x)).sum()


def wrapped(net: Runs, x: torch.Tensor) -> torch.Tensor:
    net.act = nn.Sequential(net.act, nn.Tanh())
    return net.act(net.fc(x)).sum()


def turned_without_parameters(net: Runs, x: torch.Tensor) -> torch.Tensor:
    net.act, net.last = net.last, net.act
    return net.act(net.fc(x)).sum()


def taken_out(net: Runs, x: torch.Tensor) -> torch.Tensor:
    del net.parts[1]
    return net.parts[0](x).sum()


@pytest.mark.parametrize(
    ("function", "name", "offset"),
    [
        (swapped, "fc", 1),
        (exchanged, "fc.weight", 2),
        (tied, "other.weight", 1),
        (turned, "parts.0", 2),
        (wrapped, "act", 1),
        (turned_without_parameters, "act", 1),
        (taken_out, "parts.1", None),
    ],
)
def test_other_parameters_in_a_place_are_refused_with_the_line_that_puts_them_there(
    function: Any, name: str, offset: int | None
) -> None:
    net = Runs(function)
    net.other, net.act, net.last = nn.Linear(4, 4), nn.Tanh(), nn.ReLU()
    net.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    with pytest.raises(
        CaptureError, match=rf"puts another module or parameter into {name};(.|\n)*Fix"
    ) as caught:
        captured(net, X)
    if offset is not None:
        assert line_of(function, offset) in str(caught.value)


def test_new_modules_without_parameters_may_take_a_place() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        net.act = nn.Tanh()
        return net.act(net.fc(x)).sum()

    captured(Runs(run), X)


def test_a_module_may_get_one_name_more() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        net.active = net.fc
        net.all = nn.Sequential(net.fc, nn.Tanh())
        return net.all(net.active(x)).sum()

    captured(Runs(run), X)


class KeepsMean(Runs):
    """Keeps a number that its values make."""

    mean = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        self.mean = x.mean().item()
        return x.sum()


def test_a_number_of_values_that_is_kept_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match="keeps a number") as caught:
        captured(KeepsMean(None), X)
    assert line_of(KeepsMean.forward, 2) in str(caught.value)
