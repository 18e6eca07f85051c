"""``gs.launch`` calls a function on real workers, and brings back what came of it."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import graphsplit as gs

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(120)]


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "launch-from-python.md"


def test_the_program_of_the_page_trains_as_the_plain_loop_does(tmp_path: Path) -> None:
    script = tmp_path / "launch.py"
    script.write_text(PAGE.read_text().split("```python\n")[1].partition("```")[0])
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        results = runpy.run_path(str(script), run_name="__main__")["results"]
    loss, state = plain_loop()
    assert len(results) == 2
    for found, other in results:
        assert torch.equal(torch.as_tensor(found), loss)
        assert list(other) == list(state) and all(torch.equal(other[k], state[k]) for k in state)
    lines = out.getvalue().splitlines()
    assert "[worker 1] worker 1 has trained" in lines and lines[-1] == f"loss {loss:.4f}"


def plain_loop() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for _ in range(20):
        x, y = torch.randn(16, 8), torch.randint(2, (16,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    return loss.detach(), net.state_dict()


def test_the_root_cause_is_raised_with_the_workers_traceback() -> None:
    def fails() -> None:
        import graphsplit as gs

        if gs.get_rank() == 1:
            raise LookupError("no such thing", 3)
        gs.barrier()

    with pytest.raises(LookupError) as caught:
        gs.launch(fails, workers=3)
    assert caught.value.args == ("no such thing", 3)
    failed = caught.value.__cause__
    assert isinstance(failed, gs.errors.JobFailedError)
    assert failed.cause.rank == 1 and "in fails" in failed.cause.traceback
    assert 'raise LookupError("no such thing", 3)' in str(failed)


SLEEPS = """import sys, threading, time
import graphsplit as gs

@gs.launcher(workers=2)
def sleeps():
    print("asleep", flush=True)
    time.sleep(100)

if __name__ == "__main__":
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    sleeps()
"""


def test_all_end_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEPS)
    caller = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert caller.stdout is not None
    asleep, pids = 0, set()
    with caller.stdout as lines:
        while asleep < 2:
            line = lines.readline()
            assert line, "the caller ended too early"
            asleep += line.endswith("] asleep\n")
            pids |= set(map(int, re.findall(r"pid (\d+)\)$", line)))
        caller.kill()
        lines.read()  # to its end: whoever still ran would hold it open
    caller.wait()
    assert len(pids) == 2 and not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
