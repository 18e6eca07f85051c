"""LeNet as one of TensorFlow's distributed graphs: what ``bench_lenet_step.py`` may be set beside.

The graph is TensorFlow's own way to say where each operation lives: ``tf.device`` names a task of a
cluster, and TensorFlow puts a send and a receive at every cut. Each task is a process with one
thread for operations, and one within them. Images and labels lie in the memory of the tasks that
read them, so that a step feeds nothing but the number of its batch. Initial values, batches and
optimizer are those of the PyTorch side; another framework's kernels round differently, so losses
are compared to a relative 1e-3, and bits are not.

This file is also the script of each task: ``python tensorflow_lenet.py FOLDER TASK PORT ...``.
"""

from __future__ import annotations

import importlib.util
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

LOSS_TOLERANCE = 1e-3
_LEARNING_RATE, _MOMENTUM = 0.01, 0.9
_TICK_S = 0.5


def is_installed() -> bool:
    """Whether this environment has TensorFlow."""
    return importlib.util.find_spec("tensorflow") is not None


def version() -> str:
    """That of the installed TensorFlow, which has several packages."""
    names = metadata.packages_distributions()["tensorflow"]
    return f"{names[0]} {metadata.version(names[0])}"


class Cluster:
    """The processes of one cluster, as the worker that leads the benchmark sees them."""

    def __init__(
        self,
        ports: Sequence[int],
        placement: Mapping[str, int],
        parameters: Mapping[str, np.ndarray],
        batches: Sequence[tuple[np.ndarray, np.ndarray]],
        variables: Mapping[str, str],
    ) -> None:
        """Start a task for each port, and build the graph.

        Args:
            ports: Where the tasks listen on this host; free ones.
            placement: The task of each layer.
            parameters: Initial values by PyTorch's names, in PyTorch's layouts.
            batches: Images ``[rows, 1, 32, 32]`` of float32, and labels ``[rows]`` of int64.
            variables: Of the tasks' environment, besides those of this process.

        Raises:
            RuntimeError: A task has ended; with the last lines that it wrote.
        """
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name)
        np.savez(
            path / "inputs.npz",
            images=np.stack([images for images, _ in batches]),
            labels=np.stack([labels for _, labels in batches]),
            **{f"layer {name}": np.array(task) for name, task in placement.items()},
            **{f"value {name}": value for name, value in parameters.items()},
        )
        told = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", **variables}
        self._tasks = [
            self._start(task, ports, {**os.environ, **told}) for task in range(len(ports))
        ]
        try:
            self._answer()
        except RuntimeError:
            self.close()
            raise

    def train(self) -> float:
        """All batches once. Returns the last one's loss."""
        leader = self._tasks[0].stdin
        assert leader is not None
        leader.write("train\n")
        leader.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the processes."""
        for task in self._tasks:
            task.kill()
        for task in self._tasks:
            task.communicate()
        self._folder.cleanup()

    def _start(
        self, task: int, ports: Sequence[int], environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, self._folder.name, str(task), *map(str, ports)]
        with Path(self._folder.name, f"stderr {task}").open("w") as stderr:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                text=True,
            )

    def _answer(self) -> str:
        """The leader's next line. It would wait for ever for a task that has ended."""
        leader = self._tasks[0].stdout
        assert leader is not None
        while not select.select([leader], [], [], _TICK_S)[0]:
            self._check_all_run()
        if line := leader.readline():
            return line
        self._tasks[0].wait()
        self._check_all_run()
        raise AssertionError("unreachable: the leader has ended")

    def _check_all_run(self) -> None:
        for number, task in enumerate(self._tasks):
            if task.poll() is not None:
                said = Path(self._folder.name, f"stderr {number}").read_text()
                raise RuntimeError(f"task {number} of TensorFlow's has ended:\n{said[-4000:]}")


def _devices(inputs: Mapping[str, Any]) -> dict[str, str]:
    """The task of each layer's operations."""
    tasks = {name.removeprefix("layer "): int(inputs[name]) for name in inputs if "layer " in name}
    return {name: f"/job:worker/task:{task}/cpu:0" for name, task in tasks.items()}


def _build(tf: Any, inputs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The graph: the batch's number, its loss, and the operation that trains on it."""
    v1, device = tf.compat.v1, _devices(inputs)

    def parameter(name: str, value: np.ndarray, *, is_trained: bool = True) -> Any:
        initial = np.ascontiguousarray(value)
        return v1.get_variable(
            name.replace(".", "_"), initializer=initial, trainable=is_trained, use_resource=True
        )

    def convolution(x: Any, name: str) -> Any:
        kernel = parameter(name + ".weight", inputs[f"value {name}.weight"].transpose(2, 3, 1, 0))
        bias = parameter(name + ".bias", inputs[f"value {name}.bias"])
        x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "VALID"), bias))
        return tf.nn.max_pool2d(x, 2, 2, "VALID")

    def linear(x: Any, name: str, weight: np.ndarray) -> Any:
        kernel = parameter(name + ".weight", weight.T)
        return tf.matmul(x, kernel) + parameter(name + ".bias", inputs[f"value {name}.bias"])

    number = v1.placeholder(tf.int32, ())
    with tf.device(device["conv1"]):
        # Its convolutions on a CPU want the channels last.
        pixels = inputs["images"].transpose(0, 1, 3, 4, 2)
        images = parameter("images", pixels, is_trained=False)
        x = convolution(tf.gather(images, number), "conv1")
    with tf.device(device["conv2"]):
        x = convolution(x, "conv2")
        x = tf.reshape(x, (-1, 400))
    with tf.device(device["fc1"]):
        weight = inputs["value fc1.weight"].reshape(120, 16, 5, 5).transpose(0, 2, 3, 1)
        x = tf.nn.relu(linear(x, "fc1", weight.reshape(120, 400)))
    with tf.device(device["fc2"]):
        x = tf.nn.relu(linear(x, "fc2", inputs["value fc2.weight"]))
    with tf.device(device["fc3"]):
        labels = parameter("labels", inputs["labels"], is_trained=False)
        logits = linear(x, "fc3", inputs["value fc3.weight"])
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(labels, number), logits)
        loss = tf.reduce_mean(losses)
    optimizer = v1.train.MomentumOptimizer(_LEARNING_RATE, _MOMENTUM)
    gradients = optimizer.compute_gradients(loss, colocate_gradients_with_ops=True)
    return number, loss, optimizer.apply_gradients(gradients)


def _lead(tf: Any, target: str, inputs: Mapping[str, Any]) -> None:
    """The first task: a line comes in, all batches are trained on, the last loss goes out."""
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        number, loss, train = _build(tf, inputs)
        with v1.Session(target) as session:
            session.run(v1.global_variables_initializer())
            step = session.make_callable([loss, train], feed_list=[number])
            print("ready", flush=True)
            for _ in sys.stdin:
                for batch in range(len(inputs["images"])):
                    last, _ = step(batch)
                print(float(last), flush=True)


def main() -> None:
    """One task."""
    folder, task, *ports = sys.argv[1:]
    import tensorflow as tf

    v1 = tf.compat.v1
    v1.disable_eager_execution()
    config = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    cluster = tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in ports]})
    server = v1.train.Server(cluster, job_name="worker", task_index=int(task), config=config)
    if task == "0":
        _lead(tf, server.target, np.load(Path(folder, "inputs.npz")))
    else:
        server.join()


if __name__ == "__main__":
    main()
