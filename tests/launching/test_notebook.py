"""``gs.launch`` in a notebook's kernel: functions of cells, output beside them, interrupts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(180)]
# Development installs both: make venv.
jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

NETWORK = """
import torch, graphsplit as gs
class Refused(Exception): pass
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    def forward(self, x):
        return self.b(torch.dropout(self.a(x), 0.5, self.training))
def train(steps):
    net = Net()
    if gs.get_world_size() > 1:
        net.a.place(1)
        net.b.place(0)
    model = gs.Model(net, torch.nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    losses = [model.train_step(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(steps)]
    print("trained on", gs.get_rank())
    if steps == 3:
        raise Refused("three", steps)
    return losses
"""
TRAIN = """
torch.manual_seed(1)
found = gs.launch(train, workers=2, args=(2,))
torch.manual_seed(1)
print(found == [train(2)] * 2)
"""
RAISES = """
try:
    gs.launch(train, workers=2, args=(3,))
except Refused as error:
    print(error.args, "raise Refused" in str(error.__cause__))
"""
OWN_LOOP = """
import os, signal
def own_loop(steps, dies_at=-1, mark=""):
    torch.manual_seed(1)
    net = Net()
    net.a.place(1)
    net.b.place(0)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    net, losses = gs.distribute(net), []
    for step in gs.loop(range(steps), keep=[optimizer, losses]):
        loss = (net(torch.randn(6, 4)) - torch.randn(6, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == dies_at and gs.get_rank() == 1 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    return losses, dict(net.state_dict())
def same(found, plain):
    return found[0] == plain[0] and all(torch.equal(found[1][k], v) for k, v in plain[1].items())
os.environ.update(GS_RECOVERY="wait_rejoin", GS_SNAPSHOT_EVERY="3")
found = gs.launch(own_loop, workers=2, args=(9, 7, os.path.abspath("mark")), restarts=1)
del os.environ["GS_RECOVERY"]
plain = own_loop(9)
print([same(one, plain) for one in found], os.path.exists("mark"))
"""
SLEEP = """
@gs.launcher(workers=2)
def sleep():
    import os, time
    print("asleep, pid", os.getpid(), flush=True)
    time.sleep(100)
sleep()
"""


class Notebook:
    """A kernel, and what its cells print."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager = manager
        self._client = client

    def run(self, code: str, *, interrupt_after: int = 0) -> tuple[str, str]:
        """Run a cell; its output, and the name of the error that ended it.

        Args:
            code: The cell.
            interrupt_after: Interrupt once this many lines have «asleep» in them; 0: never.
        """
        sent, text, is_idle = self._client.execute(code), "", False
        while not is_idle:
            message = self._client.get_iopub_msg(timeout=100)
            content = message["content"]
            is_own = message["parent_header"].get("msg_id") == sent
            if message["msg_type"] == "stream":
                assert is_own, "output beside another cell"
                text += content["text"]
                if interrupt_after and text.count("asleep, pid") == interrupt_after:
                    self.manager.interrupt_kernel()
                    interrupt_after = 0
            is_idle = is_own and content.get("execution_state") == "idle"
        while (reply := self._client.get_shell_msg(timeout=100))["parent_header"]["msg_id"] != sent:
            pass  # it answered how it is when it was started
        return text, reply["content"].get("ename", "")


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=100)
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def children_of(pid: int) -> list[str]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid for one in lists for pid in one.read_text().split()]


def test_functions_of_cells_run_on_workers_and_an_interrupt_ends_all(notebook: Notebook) -> None:
    assert notebook.run(NETWORK) == ("", "")
    text, error = notebook.run(TRAIN)
    assert error == "" and text.splitlines()[-1] == "True", text
    assert {"[worker 0] trained on 0", "[worker 1] trained on 1"} <= set(text.splitlines())

    text, error = notebook.run(RAISES)
    assert error == "" and text.splitlines()[-1] == "('three', 3) True", text

    text, error = notebook.run(OWN_LOOP)
    assert error == "" and text.splitlines()[-1] == "[True, True] True", text

    text, error = notebook.run(SLEEP, interrupt_after=2)
    assert error == "KeyboardInterrupt", text
    workers = [int(pid) for pid in re.findall(r"asleep, pid (\d+)", text)]
    assert len(workers) == 2 and not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    kernel = notebook.manager.provisioner.process.pid
    assert os.path.exists(f"/proc/{kernel}") and children_of(kernel) == []
    assert notebook.run("print('still here')") == ("still here\n", "")
