"""Faults of Keras, without d5suite's adapter: see docs/findings.md."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.findings.mended import require

COLUMN = """
import keras
import numpy as np
print(float(keras.ops.add(np.zeros((3, 3), np.float32), np.arange(3, dtype=np.float32).reshape(3, 1))[0, 2]))
"""

POOLING = """
import keras
import numpy as np
x = np.array([[0, 0, 0, 6]], np.float32).reshape(1, 4, 1)
print(float(keras.ops.average_pool(x, 3, 2, padding="same", data_format="channels_last")[0, -1, 0]))
"""

SEGMENTS = """
import keras
import numpy as np
print(float(keras.ops.segment_sum(np.array([1 / 3]), np.array([0]), 1)[0]))
"""


def _print(program: str, backend: str) -> float:
    if find_spec("keras") is None or find_spec(backend) is None:
        pytest.skip(f"needs Keras and {backend}")
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


@pytest.mark.slow
def test_adding_a_column_on_tensorflow_adds_a_row() -> None:
    """The first element of the column is 0, and so the first row of the sum."""
    require(_print(COLUMN, "tensorflow") != 0, "keras", "d5suite/backends/keras/operators/elementwise.py")


@pytest.mark.slow
def test_average_pooling_on_pytorch_counts_a_repeated_border() -> None:
    """The last window holds 0, 6 and a padded pixel, which Keras on TensorFlow leaves out: 3."""
    require(_print(POOLING, "torch") != 3, "keras", "d5suite/backends/keras/operators/pooling.py")


@pytest.mark.slow
def test_segments_on_pytorch_are_summed_in_float32() -> None:
    require(_print(SEGMENTS, "torch") != 1 / 3, "keras", "d5suite/backends/keras/operators/convolution.py (columns)")
