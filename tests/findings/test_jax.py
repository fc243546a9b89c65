"""Faults of JAX, without d5suite's adapter: see docs/findings.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.findings.mended import require


@pytest.fixture(scope="module")
def jax() -> Any:
    return pytest.importorskip("jax")


def test_float64_attention_computes_its_softmax_in_float32(jax: Any) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 3, 1, 2))
    with jax.enable_x64(True):
        y = np.asarray(jax.nn.dot_product_attention(q, k, v, scale=1.0))
    scores = np.exp(np.einsum("bqhd,bkhd->bhqk", q, k))
    exact = np.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdims=True), v)
    require(np.abs(y - exact).max() > 1e-12, "jax", "d5suite/backends/jax/operators/sequence.py")


def test_dilated_max_pooling_has_no_gradient(jax: Any) -> None:
    def pooled(x: Any) -> Any:
        return jax.lax.reduce_window(x, -np.inf, jax.lax.max, (2,), (1,), "VALID", window_dilation=(2,)).sum()

    try:
        found = jax.grad(pooled)(np.array([1.0, 2.0, 3.0, 4.0], np.float32))
        broken = not np.array_equal(found, [0, 0, 1, 1])
    except NotImplementedError:
        broken = True
    require(broken, "jax", "d5suite/backends/jax/operators/pooling.py")


def test_a_bfloat16_gradient_of_a_broadcast_is_summed_in_bfloat16(jax: Any) -> None:
    numbers = np.random.default_rng(0).standard_normal((1000, 4))
    gradient = jax.numpy.asarray(numbers, jax.numpy.bfloat16)

    def backward(bias: Any) -> Any:
        return jax.vjp(lambda bias: gradient + bias, bias)[1](gradient)[0]

    found = np.asarray(jax.jit(backward)(jax.numpy.zeros(4, jax.numpy.bfloat16)), np.float64)
    exact = np.asarray(gradient, np.float64).sum(0)
    require(np.abs(found / exact - 1).max() > 2**-8, "jax", "d5suite/backends/keras/__init__.py (expected_failures)")


def test_the_gradient_of_a_maximum_is_lost_under_jit(jax: Any) -> None:
    """The maximum and the elements that it is compared with are computed apart, and differ."""
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 10), (8, 20, 3)))

    def pooled(w: Any) -> Any:
        y = x @ w
        return jax.numpy.max(y - y.mean(-1, keepdims=True), 1).sum()

    exact, found = (np.asarray(gradient(w)) for gradient in (jax.grad(pooled), jax.jit(jax.grad(pooled))))
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    require(not error < 1e-3, "jax", "d5suite/backends/jax/operators/context.py")


PRODUCT = """
import jax, numpy as np

x = np.random.default_rng(0).random((64, 64), np.float32)
found = np.asarray(jax.jit(lambda x: (x @ jax.numpy.ones((64, 64))).sum(0))(x))
raise SystemExit(0 if np.allclose(found, x.sum(), rtol=1e-3) else 3)
"""


def test_a_product_with_one_number_everywhere_and_its_sum_are_wrong(jax: Any) -> None:
    """XLA reads the broadcast number, which it has once, as a whole matrix."""
    ended = subprocess.run([sys.executable, "-c", PRODUCT], env={**os.environ, "JAX_PLATFORMS": "cpu"}).returncode
    assert ended in (0, 3) or ended < 0  # the memory that it reads may be none of the process
    processor = Path("/proc/cpuinfo")
    if ended == 0 and not (processor.exists() and "avx512_fp16" in processor.read_text()):
        pytest.skip("not on this processor")
    require(ended != 0, "jax", "docs/findings.md (none)")
