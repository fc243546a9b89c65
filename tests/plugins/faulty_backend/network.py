"""Inference through onnxruntime, with a fault chosen by the mode."""

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import onnxruntime

from d5suite.levels import network as level1
from d5suite.network import Network

VALIDATION_CALLS = 1


class Executor(level1.Executor):
    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        super().__init__(network, mode=mode, device=device, precision=precision)
        self._session = onnxruntime.InferenceSession(network.model.SerializeToString())

    calls = 0

    def feed(self, arrays: Any) -> Any:
        return dict(arrays)

    def forward(self, feed: Any) -> Any:
        Executor.calls += 1
        if self.mode == "raises":
            raise RuntimeError("the kernel is missing")
        if Executor.calls > VALIDATION_CALLS:
            _misbehave(self.mode)
        labels = {self.network.label: np.zeros(len(feed[self.network.input]), np.int64)}
        output = self._session.run([self.network.output], {**labels, **feed})[0]
        if self.mode == "wrong":
            output = output * 1.01
        if self.mode == "nan":
            output[0, 0] = np.nan
        if self.mode == "shape":
            output = output[:, :-1]
        return {self.network.output: output}

    def forward_backward(self, feed: Any) -> Any:
        raise NotImplementedError

    def fetch(self, values: Any) -> dict[str, np.ndarray]:
        return dict(values)

    def parameters(self) -> dict[str, np.ndarray]:
        return dict(self.network.initializers)

    def load_parameters(self, values: Any) -> None:
        raise NotImplementedError

    def synchronize(self) -> None:
        pass


def _misbehave(mode: str) -> None:
    if mode == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "orphan":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(os.environ["ORPHAN_PID_FILE"], "w") as file:
            file.write(str(child.pid))
        threading.Event().wait()
    if mode == "hangs":
        threading.Event().wait()
    if mode == "memory":
        hoard = []
        while True:
            hoard.append(np.ones(8 << 20))
