"""Inference through onnxruntime, with a fault chosen by the mode.

``FAULTY_FAULT=MODE:BATCH`` in the environment chooses it for batches of this size instead; ``slow``
takes twice as long, ``slow=FACTOR`` so many times as long.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import onnx
import onnxruntime

from d5suite.levels import network as level1
from d5suite.network import Network

VALIDATION_CALLS = 10
"""At most nine calls of the memory pass, and the check of the output."""


class Executor(level1.Executor):
    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        self._weights = {name: network.initializers[name] for name in (*network.parameters, *network.statistics)}
        self._build()
        if mode == "builds":
            time.sleep(1)

    def _build(self) -> None:
        model = onnx.ModelProto()
        model.CopyFrom(self.network.model)
        for tensor in model.graph.initializer:
            if tensor.name in self._weights:
                tensor.CopyFrom(onnx.numpy_helper.from_array(self._weights[tensor.name], tensor.name))
        self._session = onnxruntime.InferenceSession(model.SerializeToString())

    calls = made = 0
    hoard: np.ndarray | None = None

    def feed(self, arrays: Any) -> Any:
        self.check_feed(arrays)
        return dict(arrays)

    def forward(self, feed: Any) -> Any:
        Executor.calls += 1
        fault, _, batch = os.environ.get("FAULTY_FAULT", "").partition(":")
        mode = fault if len(feed[self.network.input]) == int(batch or 0) else self.mode
        mode = os.environ.get("FAULTY_MORE") or mode
        if mode == "raises":
            raise RuntimeError("the kernel is missing")
        self.made += 1
        if mode == "third" and self.made == 3:
            self.hoard = np.ones(64 << 20)
        if Executor.calls > VALIDATION_CALLS:
            _misbehave(mode)
        if mode == "later" and self.made == 40:
            self.hoard = np.ones(64 << 20)
        labels = {self.network.label: np.zeros(len(feed[self.network.input]), np.int64)}
        start = time.perf_counter()
        output = self._session.run([self.network.output], {**labels, **feed})[0]
        slow, _, factor = mode.partition("=")
        if slow == "slow":
            end = start + float(factor or 2) * (time.perf_counter() - start)
            while time.perf_counter() < end:
                pass
        if mode == "wrong":
            output = output * 1.01
        if mode == "nan":
            output[0, 0] = np.nan
        if mode == "shape":
            output = output[:, :-1]
        if mode == "dtype":
            output = output.astype(np.float64)
        if mode == "few":
            return {}
        return {self.network.output: output}

    def forward_backward(self, feed: Any) -> Any:
        raise NotImplementedError

    def fetch(self, values: Any) -> dict[str, np.ndarray]:
        return dict(values)

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: value.copy() for name, value in self._weights.items()}

    def load_parameters(self, values: Any) -> None:
        self.check_parameters(values)
        if self.mode == "loading":
            np.ones(64 << 20)
        self._weights.update({name: np.asarray(value, np.float32) for name, value in values.items()})
        self._build()

    def synchronize(self) -> None:
        pass


def _misbehave(mode: str) -> None:
    if mode == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "orphan":
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        children = [subprocess.Popen(sleep, start_new_session=apart) for apart in (False, True)]
        with open(os.environ["ORPHAN_PID_FILE"], "w") as file:
            file.write(" ".join(str(child.pid) for child in children))
        threading.Event().wait()
    if mode == "hangs":
        threading.Event().wait()
    if mode == "memory":
        hoard = []
        while True:
            hoard.append(np.ones(8 << 20))
