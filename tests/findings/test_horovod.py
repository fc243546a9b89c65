"""Faults of Horovod, without d5suite's adapter: see docs/findings.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from d5suite.backends import discover
from tests.findings.mended import require

OPTIMIZER = """
import json
import keras, numpy as np
import horovod.keras as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
called = []
type(optimizer)._allreduce = lambda self, gradients, variables: called.append(True) or gradients
variable = keras.Variable(np.zeros(3, "float32"))
for update in (lambda g: optimizer.apply([g], [variable]), lambda g: optimizer.apply_gradients([(g, variable)])):
    update(keras.ops.ones(3))
moved = float(np.array(variable)[0])
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
other = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
type(other)._allreduce = type(optimizer)._allreduce
model.compile(other, loss="mse", run_eagerly=True)
model.fit(np.ones((2, 1), "float32"), np.ones((2, 1), "float32"), verbose=0)
print(json.dumps([len(called), moved, float(np.array(model.layers[0].kernel)[0, 0])]))
"""


@pytest.mark.slow
def test_horovods_optimizer_for_keras_3_reduces_nothing() -> None:
    """Its call of the all-reduce is never reached, whatever updates the variable."""
    lacking = discover()[0]["keras"].lacks_scheme("horovod", mode="tensorflow", device="cpu", precision="fp32")
    if find_spec("keras") is None or lacking:
        pytest.skip(lacking or "needs Keras")
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", OPTIMIZER], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    called, moved, trained = json.loads(done.stdout.splitlines()[-1])
    assert moved < 0 < trained
    require(called == 0, "horovod", "d5suite/backends/keras/horovod.py")
