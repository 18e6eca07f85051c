"""Run under the launcher on two workers: a schedule that is chosen by what steps cost.

Trains long enough for plans to be measured and lowered again, compares with a plain loop, and
profiles a few more steps, with batches that divide evenly and with others. Prints ``same bits``,
then what ``explain`` says of transport and time.
"""

from __future__ import annotations

import torch
from torch import nn

import graphsplit as gs
from graphsplit.errors import ConfigurationError

MICROBATCHES, NUM_STEPS = 4, 24


class Net(nn.Module):
    """Three layers: there, and back again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def made() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=generator), torch.randint(0, 2, (16,), generator=generator))
        for _ in range(NUM_STEPS)
    ]


def plain_loop() -> dict[str, torch.Tensor]:
    net, optimizer = made()
    loss_fn = nn.CrossEntropyLoss()
    for batch in batches():
        optimizer.zero_grad()
        for (inputs, target), weight in gs.split_microbatches(batch, MICROBATCHES):
            (loss_fn(net(inputs), target) * weight).backward()
        optimizer.step()
    return net.state_dict()


def main() -> None:
    gs.init()
    net, optimizer = made()
    for layer, rank in ((net.first, 0), (net.second, 1), (net.third, 0)):
        layer.place("MS_WORKER", rank)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, microbatches=MICROBATCHES,
                     schedule="auto")  # fmt: skip
    model.train(1, batches())
    reference, mine = plain_loop(), model.state_dict()
    assert all(torch.equal(mine[name], reference[name]) for name in reference)
    print("same bits", flush=True)
    with model.profile() as profiling:
        model.train(1, batches())
    result = profiling.result
    assert result.predicted.step_s > 0
    assert result.measured.step_s > 0
    assert len(result.measured.workers) == 2
    text = model.explain()
    assert "shm        0 and 1  both run as one user on one host" in text, text
    assert "costs measured over 10 steps" in text, text
    assert "cross per microbatch" in text, text
    assert "note:" not in str(result)
    with model.profile() as of_parts:  # 18 rows in four: two of five, and two of four
        # The schedule waits for costs, too: after six steps it has them, and asks no more.
        model.train(1, [(torch.randn(18, 8), torch.zeros(18, dtype=torch.long))] * 6)
    told = str(of_parts.result)
    assert "note: only 2 of a step's microbatches are shown" in told, told
    try:
        with model.profile():
            model.train(1, batches()[:3])
    except ConfigurationError as error:
        assert "expected 2 or more of one plan" in str(error), error
    else:
        raise AssertionError("what was measured before is told of these three steps")
    print("explained", flush=True)


if __name__ == "__main__":
    main()
