"""Faults of TensorFlow, without d5suite's adapter: see docs/findings.md."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.findings.mended import require

OPERATORS = "d5suite/backends/tensorflow/operators/{}"
TENSORFLOW = "tensorflow-cpu"


@pytest.fixture(scope="module")
def tf() -> Any:
    return pytest.importorskip("tensorflow")


DEPTHWISE = """
import tensorflow as tf

@tf.function
def run(x, kernel, bias):
    y = tf.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], [[0, 0], [1, 0], [1, 0], [0, 0]])
    return BIASED

run(tf.ones([1, 4, 4, 2]), tf.ones([2, 2, 2, 1]), tf.ones(SHAPE))
"""


GROUPED = """
import tensorflow as tf

@tf.function
def run(x, kernel, bias):
    return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "VALID"), bias))

try:
    run(tf.ones([1, 2, 2, 4]), tf.ones([1, 1, 2, 4]), tf.ones([4]))
except tf.errors.UnimplementedError:
    raise SystemExit(3)
"""


def _run(program: str, **environment: str) -> int:
    pytest.importorskip("tensorflow")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment).returncode


@pytest.mark.slow
@pytest.mark.parametrize(
    ("biased", "shape"), [("tf.nn.bias_add(y, bias)", "[2]"), ("y + bias", "[1, 1, 1, 2]")], ids=["bias", "sum"]
)
def test_a_depthwise_convolution_with_bias_and_explicit_padding_aborts(biased: str, shape: str) -> None:
    program = DEPTHWISE.replace("BIASED", biased).replace("SHAPE", shape)
    aborted = _run(program, TF_ENABLE_ONEDNN_OPTS="1") < 0  # by default only where there is AVX-512
    require(aborted, TENSORFLOW, OPERATORS.format("convolution.py (pads_natively)"))


@pytest.mark.slow
def test_a_fused_grouped_convolution_is_refused_without_onednn() -> None:
    refused = _run(GROUPED, TF_ENABLE_ONEDNN_OPTS="0") == 3
    require(refused, TENSORFLOW, OPERATORS.format("convolution.py (_fuses_groups)"))


def test_a_bfloat16_bias_gradient_is_summed_in_bfloat16(tf: Any) -> None:
    bias = tf.Variable(tf.zeros([1], tf.bfloat16))
    with tf.GradientTape() as tape:
        y = tf.nn.bias_add(tf.zeros([1000, 1], tf.bfloat16), bias)
    gradient = tape.gradient(y, bias, output_gradients=tf.ones_like(y))
    exact = 1000.0  # representable
    require(float(gradient[0]) != exact, TENSORFLOW, OPERATORS.format("context.py (add_bias)"))


def test_the_gradient_of_blocklstmv2_has_the_gates_of_another_kernel(tf: Any) -> None:
    generator = np.random.default_rng(0)
    steps, batch, inputs, hidden = 2, 1, 2, 2
    x = tf.constant(generator.standard_normal((steps, batch, inputs)), tf.float32)
    w = tf.constant(generator.standard_normal((inputs + hidden, 4 * hidden)), tf.float32)
    zeros, vector = tf.zeros([batch, hidden]), tf.zeros([hidden])

    def loss(w: Any) -> Any:
        lstm = tf.raw_ops.BlockLSTMV2(
            seq_len_max=tf.constant(steps, tf.int64), x=x, cs_prev=zeros, h_prev=zeros, w=w, wci=vector, wcf=vector,
            wco=vector, b=tf.zeros([4 * hidden]), cell_clip=0.0, use_peephole=False,
        )  # fmt: skip
        return tf.reduce_sum(lstm.h)

    with tf.GradientTape() as tape:
        tape.watch(w)
        value = loss(w)
    gradient = tape.gradient(value, w).numpy()
    direction = generator.standard_normal(w.shape).astype(np.float32)
    step = 1e-2
    slope = float(loss(w + step * direction) - loss(w - step * direction)) / (2 * step)
    wrong = abs(slope - float((gradient * direction).sum())) > 0.05 * abs(slope)
    require(wrong, TENSORFLOW, OPERATORS.format("recurrent.py (native)"))


def test_float64_gelu_has_float32_constants(tf: Any) -> None:
    y = float(tf.nn.gelu(tf.constant([0.7], tf.float64))[0])
    exact = 0.7 * (1 + math.erf(0.7 / math.sqrt(2))) / 2
    require(abs(y - exact) > 1e-12, TENSORFLOW, OPERATORS.format("elementwise.py (gelu)"))


def test_casting_a_python_number_to_float64_rounds_it_to_float32(tf: Any) -> None:
    require(float(tf.cast(0.1, tf.float64)) != 0.1, TENSORFLOW, "d5suite/backends/tensorflow/training.py (constants)")


def test_one_hot_has_no_gradient_by_its_values(tf: Any) -> None:
    values = tf.Variable([0.0, 1.0])
    with tf.GradientTape() as tape:
        y = tf.one_hot([0, 1], 3, values[1], values[0])
    require(tape.gradient(y, values) is None, TENSORFLOW, OPERATORS.format("indexing.py (one_hot)"))


PRODUCT = """
import numpy as np
import tensorflow as tf

x, y = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((2, 1, 97, 64), (64, 32)))
raise SystemExit(0 if np.allclose(tf.matmul(x, y), x @ y, rtol=1e-3, atol=1e-3) else 3)
"""


@pytest.mark.slow
def test_a_product_with_a_batch_axis_of_one_and_a_matrix_is_wrong() -> None:
    """Where oneDNN uses AVX-512; the process may end."""
    ended = _run(PRODUCT, TF_ENABLE_ONEDNN_OPTS="1")
    assert ended in (0, 3) or ended < 0
    processor = Path("/proc/cpuinfo")
    if ended == 0 and not (processor.exists() and "avx512f" in processor.read_text()):
        pytest.skip("not on this processor")
    require(ended != 0, TENSORFLOW, OPERATORS.format("matrix.py (mat_mul)"))


def test_the_mean_of_batch_normalization_is_less_exact_for_more_values(tf: Any) -> None:
    """Values of 1 ± 0.01: the rounding of an exact mean moves the answer by 6e-6 at most."""
    errors = []
    for size in (2, 32):
        x = (1 + 0.01 * np.random.default_rng(0).standard_normal((4, size, size, 8))).astype(np.float32)
        ones, zeros = np.ones(8, np.float32), np.zeros(8, np.float32)
        y = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=ones, offset=zeros, mean=[], variance=[], epsilon=1e-5, is_training=True
        ).y.numpy()
        exact = x.astype(np.float64)
        wanted = (exact - exact.mean((0, 1, 2))) / np.sqrt(exact.var((0, 1, 2)) + 1e-5)
        errors.append(np.linalg.norm(y - wanted) / np.linalg.norm(wanted))
    assert errors[0] < 8e-6 and errors[1] > 1.2e-5, errors
