"""What ``graphsplit manifest k8s`` prints: valid, read as it is meant, and able to train."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from launched_jobs import LIMIT_S, SCRIPT, assert_nothing_is_left, environment, learned_alone

from graphsplit.cli.commands import main
from graphsplit.launchers.environment import Found, find_launcher
from graphsplit.launchers.ports import find_free_port
from graphsplit.security.options import token_problem


def manifest(*arguments: str) -> dict[str, Any]:
    """The documents by their kind."""
    result = CliRunner().invoke(main, ["manifest", "k8s", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return {one["kind"]: one for one in yaml.safe_load_all(result.output)}


def worker(documents: dict[str, Any]) -> dict[str, Any]:
    (container,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
    return dict(container)


def variables(documents: dict[str, Any], index: int) -> dict[str, str]:
    """What a pod's process finds in its environment."""
    found = {"JOB_COMPLETION_INDEX": str(index)}
    for one in worker(documents)["env"]:
        reference = one.get("valueFrom", {}).get("secretKeyRef")
        if reference is not None:
            assert reference["name"] == documents["Secret"]["metadata"]["name"]
            found[one["name"]] = documents["Secret"]["stringData"][reference["key"]]
        else:
            found[one["name"]] = one["value"]
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ["-n", "3", "train.py"],
        ["-n", "64", "--name", "night-run", "--image", "registry:5000/train:7", "--cpu", "1500m",
         "--memory", "16Gi", "--port", "9000", "src/train.py", "--lr", "0.1", "-n", "7"],
    ],
)  # fmt: skip
def test_every_document_is_valid(arguments: list[str]) -> None:
    documents = manifest(*arguments)
    assert list(documents) == ["Secret", "Service", "Job"]
    for document in documents.values():
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_each_pod_is_one_worker_that_finds_worker_0_by_the_service() -> None:
    documents = manifest("-n", "3", "train.py")
    spec = documents["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["template"]["spec"]["subdomain"] == documents["Service"]["metadata"]["name"]
    assert documents["Service"]["spec"]["clusterIP"] == "None"
    assert documents["Service"]["spec"]["publishNotReadyAddresses"] is True
    for index in range(3):
        found = variables(documents, index)
        assert find_launcher(found) == Found("kubernetes", index, 3)
        assert found["MS_SCHED_HOST"] == "train-0.train"


def test_the_secret_is_new_each_time_and_stands_nowhere_else() -> None:
    tokens = set()
    for _ in range(2):
        documents = manifest("-n", "2", "train.py")
        token = documents.pop("Secret")["stringData"]["job-token"]
        assert token_problem(token) is None and token not in str(documents)
        tokens.add(token)
    assert len(tokens) == 2


def test_the_scripts_own_options_are_its_own() -> None:
    documents = manifest("-n", "2", "--name", "x", "a/train.py", "-n", "5", "--name", "y")
    assert worker(documents)["command"] == ["python3", "a/train.py", "-n", "5", "--name", "y"]
    assert worker(documents)["image"] == "x:latest"


@pytest.mark.parametrize("name", ["", "7up", "Train", "a_b", "a" * 53, "-a", "a-"])
def test_a_name_that_kubernetes_does_not_take_is_refused(name: str) -> None:
    script = "train.py" if name else "7.py"
    options = ["--name", name] if name else []
    result = CliRunner().invoke(main, ["manifest", "k8s", "-n", "2", *options, script])
    assert result.exit_code == 2
    assert "is no name of a job" in result.output and "Fix: --name NAME" in result.output


def recovering(patch: pytest.MonkeyPatch, policy: str, *options: str) -> dict[str, Any]:
    patch.setenv("GS_RECOVERY", policy)
    return manifest("-n", "3", *options, "train.py")


@pytest.mark.parametrize(
    ("policy", "restarts", "failed", "ends_on_errors"),
    [
        ("restart", 2, 0, False),
        ("wait_rejoin", 3, 0, True),
        ("go_on", 0, 2, True),
        ("go_on", 1, 2, True),
    ],
)
def test_a_policy_says_what_is_done_about_lost_pods(
    monkeypatch: pytest.MonkeyPatch, policy: str, restarts: int, failed: int, ends_on_errors: bool
) -> None:
    documents = recovering(monkeypatch, policy, "--restarts", str(restarts))
    spec = documents["Job"]["spec"]
    kubernetes_validate.validate(
        documents["Job"], kubernetes_validate.latest_version(), strict=True
    )
    assert "backoffLimit" not in spec  # all other pods would be ended with the one that is lost
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (restarts, failed)
    assert ("podFailurePolicy" in spec) is ends_on_errors
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert variables(documents, 0)["GS_RECOVERY"] == policy


@pytest.mark.parametrize(
    ("policy", "options", "problem"),
    [
        ("restart", (), "Fix: say how often it does: --restarts 3"),
        ("wait_rejoin", (), "Fix: say how often it does: --restarts 3"),
        ("fail_fast", ("--restarts", "1"), "a job that fails fast starts nothing again"),
    ],
)
def test_a_policy_that_would_not_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, policy: str, options: tuple[str, ...], problem: str
) -> None:
    monkeypatch.setenv("GS_RECOVERY", policy)
    result = CliRunner().invoke(main, ["manifest", "k8s", "-n", "3", *options, "train.py"])
    assert result.exit_code == 2 and problem in " ".join(result.output.split())


class Controller:
    """A controller of Indexed Jobs in small: each pod is a process of this machine."""

    def __init__(self, documents: dict[str, Any], folder: Path, **own: str) -> None:
        self._documents, self._folder, self._own = documents, folder, own
        self.spec = documents["Job"]["spec"]
        self.pods: dict[int, subprocess.Popen[bytes]] = {}
        self.failures = [0] * self.spec["completions"]

    def start(self, index: int) -> None:
        command = worker(self._documents)["command"]
        given = {**variables(self._documents, index), "MS_SCHED_HOST": "127.0.0.1", **self._own}
        with self.log(index).open("ab") as log:
            self.pods[index] = subprocess.Popen(
                [sys.executable, *command[1:]],
                env=environment(self._folder, **given),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, index: int) -> Path:
        return self._folder / f"pod-{index}.log"

    def run(self, kill: int) -> None:
        """Run all to the end, and kill one pod once it trains."""
        for index in range(len(self.failures)):
            self.start(index)
        left = {kill}
        end_s = time.monotonic() + LIMIT_S
        while self.pods and time.monotonic() < end_s:
            if left and b"and trains" in self.log(kill).read_bytes():
                self.pods[left.pop()].kill()
            for index, pod in list(self.pods.items()):
                if pod.poll() is not None:
                    del self.pods[index]
                    self._ended(index, pod.returncode)
            time.sleep(0.05)

    def _ended(self, index: int, status: int) -> None:
        if status == 0:
            return
        self.failures[index] += 1
        rules = self.spec.get("podFailurePolicy", {"rules": []})["rules"]
        is_over = any(status in rule["onExitCodes"]["values"] for rule in rules)
        if not is_over and self.failures[index] <= self.spec["backoffLimitPerIndex"]:
            self.start(index)
        elif is_over or self.spec["maxFailedIndexes"] == 0:
            self.close()

    def close(self) -> None:
        for pod in self.pods.values():
            pod.kill()
            pod.wait()
        self.pods.clear()


@pytest.mark.real_processes
@pytest.mark.parametrize(("policy", "failures"), [("wait_rejoin", [0, 1]), ("restart", [1, 1])])
def test_a_pod_that_is_killed_is_started_again_and_the_bits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, failures: list[int]
) -> None:
    monkeypatch.setenv("GS_RECOVERY", policy)
    port = str(find_free_port("127.0.0.1"))
    documents = manifest("-n", "2", "--port", port, "--restarts", "1", str(SCRIPT))
    monkeypatch.delenv("GS_RECOVERY")
    learned = learned_alone(STEPS="40")
    controller = Controller(documents, tmp_path, STEPS="40")
    try:
        controller.run(kill=1)
    finally:
        controller.close()
    logs = [controller.log(index).read_text() for index in range(2)]
    assert controller.failures == failures, logs
    assert all(learned in log for log in logs), logs
    assert_nothing_is_left(tmp_path)


def run(command: list[str], **found: str) -> int:
    assert command[0] == "python3"
    return subprocess.run(
        [sys.executable, *command[1:]],
        env={**os.environ, **found},
        stderr=subprocess.DEVNULL,
        timeout=LIMIT_S,
    ).returncode


def test_the_probes_see_whether_the_scheduler_is_reached() -> None:
    documents = manifest("-n", "2", "train.py")
    container = worker(documents)
    probes = [container[name]["exec"]["command"] for name in ("startupProbe", "readinessProbe")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = {"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(server.getsockname()[1])}
        assert [run(probe, **where) for probe in probes] == [0, 0]
    assert [run(probe, **where) for probe in probes] == [1, 1]
    assert "livenessProbe" not in container


def test_a_worker_waits_until_the_name_of_worker_0_is_known() -> None:
    (first,) = manifest("-n", "2", "t.py")["Job"]["spec"]["template"]["spec"]["initContainers"]
    assert run(first["command"], MS_SCHED_HOST="localhost") == 0
    *command, program = first["command"]
    assert "range(1800)" in program
    once = [*command, program.replace("range(1800)", "range(1)")]
    assert run(once, MS_SCHED_HOST="nowhere.invalid") == 1


@pytest.mark.real_processes
def test_what_it_says_trains_to_the_bits_of_one_process(tmp_path: Path) -> None:
    """Each pod as a process of this machine; the name of worker 0's pod is this machine's."""
    documents = manifest("-n", "2", "--port", str(find_free_port("127.0.0.1")), str(SCRIPT))
    command = worker(documents)["command"]
    learned = learned_alone(STEPS="5")
    pods = []
    for index in range(2):
        found = {**variables(documents, index), "MS_SCHED_HOST": "127.0.0.1", "STEPS": "5"}
        pods.append(
            subprocess.Popen(
                [sys.executable, *command[1:]],
                env=environment(tmp_path, **found),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [pod.communicate(timeout=LIMIT_S)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    assert all(learned in output for output in outputs), outputs
    assert "started by a Kubernetes Indexed Job: 2 workers" in outputs[0]
    assert_nothing_is_left(tmp_path)
