"""A job as Kubernetes is told of it: a Secret, a headless Service and an Indexed Job. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from graphsplit.settings import FAIL_FAST, GO_ON, RESTART

_TOKEN_KEY = "job-token"
_PORT_NAME = "scheduler"
_WORKER = "worker"
_FORM_S, _LOOK_EVERY_S = 1800, 10  # MS_TOPO_TIMEOUT: until then workers may be missing
# The name of a pod is known a moment after the pod has started.
_WAIT_FOR_NAME = """\
import os, socket, time
for second in range({limit_s}):
    try:
        socket.getaddrinfo(os.environ["MS_SCHED_HOST"], None)
        break
    except OSError:
        time.sleep(1)
else:
    raise SystemExit(os.environ["MS_SCHED_HOST"] + " is not known: is the Service there?")
"""
_REACHES_SCHEDULER = """\
import os, socket
address = os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])
socket.create_connection(address, 5).close()
"""
_HEAD = """\
# {count} workers of {script}; the scheduler is a child of worker 0, in {name}-0.
# It holds the job's secret: keep it to yourself, and make a new one for each job.
#
#   graphsplit manifest k8s ... | kubectl apply -f -
#   kubectl logs -f -l job-name={name} --prefix --max-log-requests {count}
#   kubectl delete job/{name} service/{name} secret/{name}
"""


@dataclass(frozen=True)
class KubernetesJob:
    """A job as Kubernetes is told of it.

    Attributes:
        name: Of all that is made.
        num_workers: How many pods, one worker in each.
        image: Holds Python, graphsplit and the script.
        command: Of each pod.
        port: The scheduler's.
        cpu: The cores of a pod: how many it is given, and may take.
        memory: The memory of a pod, as Kubernetes writes it.
        token: The job's secret.
        recovery: What happens when a pod is lost: a policy of ``GS_RECOVERY``.
        restarts: How often each pod is started again.
    """

    name: str
    num_workers: int
    image: str
    command: tuple[str, ...]
    port: int
    cpu: str
    memory: str
    token: str
    recovery: str = FAIL_FAST
    restarts: int = 0

    @property
    def host(self) -> str:
        """The name of worker 0's pod, in the job's namespace."""
        return f"{self.name}-0.{self.name}"


def kubernetes_manifest(job: KubernetesJob) -> list[dict[str, Any]]:
    """The Secret, the headless Service by which pods have names, and the Indexed Job."""
    about = {"name": job.name, "labels": {"app.kubernetes.io/name": job.name}}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": about,
        "type": "Opaque",
        "stringData": {_TOKEN_KEY: job.token},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": about,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # workers look for each other to become ready
            "selector": {"job-name": job.name},
            "ports": [{"name": _PORT_NAME, "port": job.port}],
        },
    }
    indexed = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": about,
        "spec": {
            "completionMode": "Indexed",
            "completions": job.num_workers,
            "parallelism": job.num_workers,
            **_losses(job),
            "template": {"metadata": {"labels": about["labels"]}, "spec": _pod(job)},
        },
    }
    return [secret, service, indexed]


def _losses(job: KubernetesJob) -> dict[str, Any]:
    """The fields of the Job that say what is done about pods that fail."""
    if job.recovery == FAIL_FAST:
        return {"backoffLimit": 0}  # one that is lost ends the job, and names itself
    # Where others go on without it, a pod that is not started again must not end theirs.
    failed = job.num_workers - 1 if job.recovery == GO_ON else 0
    found: dict[str, Any] = {"backoffLimitPerIndex": job.restarts, "maxFailedIndexes": failed}
    if job.recovery != RESTART:
        # A worker that was lost was killed; one that ends with an error has ended the job.
        on_error = {"containerName": _WORKER, "operator": "In", "values": [1]}
        found["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": on_error}]}
    return found


def _pod(job: KubernetesJob) -> dict[str, Any]:
    share = {"cpu": job.cpu, "memory": job.memory}
    common = {"image": job.image, "securityContext": {"allowPrivilegeEscalation": False}}
    wait = ["python3", "-c", _WAIT_FOR_NAME.format(limit_s=_FORM_S)]
    probe = {
        "exec": {"command": ["python3", "-c", _REACHES_SCHEDULER]},
        "periodSeconds": _LOOK_EVERY_S,
        "timeoutSeconds": _LOOK_EVERY_S,
    }
    worker: dict[str, Any] = {
        "name": _WORKER,
        **common,
        "command": list(job.command),
        "env": _environment(job),
        "ports": [{"name": _PORT_NAME, "containerPort": job.port}],
        "resources": {"requests": share, "limits": share},
        # No liveness probe: the scheduler tells a frozen worker from a busy one, and a script may
        # go on when its job has ended.
        "startupProbe": {**probe, "failureThreshold": _FORM_S // _LOOK_EVERY_S},
        "readinessProbe": {**probe, "failureThreshold": 3},
    }
    first = {
        "name": "wait-for-name",
        **common,
        "command": wait,
        "env": _environment(job)[:1],
        "resources": {"requests": share, "limits": share},
    }
    return {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "initContainers": [first],
        "containers": [worker],
    }


def _environment(job: KubernetesJob) -> list[dict[str, Any]]:
    values = {
        "MS_SCHED_HOST": job.host,
        "MS_SCHED_PORT": str(job.port),
        "MS_WORKER_NUM": str(job.num_workers),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if job.recovery != FAIL_FAST:
        values["GS_RECOVERY"] = job.recovery
    token = {"secretKeyRef": {"name": job.name, "key": _TOKEN_KEY}}
    named = [{"name": name, "value": value} for name, value in values.items()]
    return [*named, {"name": "GS_JOB_TOKEN", "valueFrom": token}]


class _Dumper(yaml.SafeDumper):
    """Writes programs as people do: as they stand, line by line. Nothing is an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def kubernetes_text(job: KubernetesJob) -> str:
    """The manifest as text, for ``kubectl apply -f -``."""
    head = _HEAD.format(count=job.num_workers, script=job.command[1], name=job.name)
    documents = kubernetes_manifest(job)
    return head + yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, explicit_start=True, allow_unicode=True
    )
