"""Inference through onnxruntime, with a fault chosen by the mode."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import onnxruntime

from d5suite.levels import network

VALIDATION_CALLS = 1


class Executor(network.Executor):
    def __init__(self, network, *, mode, device, precision):
        super().__init__(network, mode=mode, device=device, precision=precision)
        self._session = onnxruntime.InferenceSession(network.model.SerializeToString())

    calls = 0

    def feed(self, arrays):
        return dict(arrays)

    def forward(self, feed):
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

    def forward_backward(self, feed):
        raise NotImplementedError

    def fetch(self, values):
        return dict(values)

    def parameters(self):
        return dict(self.network.initializers)

    def load_parameters(self, values):
        raise NotImplementedError

    def synchronize(self):
        pass


def _misbehave(mode):
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
