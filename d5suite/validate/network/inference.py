"""The output in inference mode, as timed, against an independent evaluator.

Imports the contract, ONNX and NumPy; no framework.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from d5suite.levels.contract import require_answer
from d5suite.levels.network import Arrays, Executor
from d5suite.network import Network
from d5suite.validate.check import Check
from d5suite.validate.network.oracle import EVALUATOR, Oracle, inferences
from d5suite.validate.norms import relative_l2

FEW = 4
"""Images that ONNX's reference evaluator, which is slow, checks of a float64 batch."""


def expected_outputs(
    executor: Executor, network: Network, batches: Sequence[np.ndarray], *, threads: int
) -> tuple[list[dict[str, np.ndarray]], str]:
    """Return an independent evaluator's outputs for batches, and its name.

    It is ONNX's reference evaluator for float64, as onnxruntime has no float64 convolution, and for
    onnxruntime itself; then for the first samples only, if the batch is the outputs' first axis.

    Parameters
    ----------
    executor : Executor
        To be proved.
    network : Network
        Its network, with the weights that were loaded.
    batches : sequence of numpy.ndarray
        See `Network.arrays`.
    threads : int
        For onnxruntime.

    Returns
    -------
    outputs : list of dict of str to numpy.ndarray
        Of each batch, or of its first samples.
    evaluator : str

    Raises
    ------
    NetworkError
        If the evaluator cannot run the network.
    """
    if executor.precision == "fp64" or executor.backend == EVALUATOR:
        separate = all(network.shapes.get(name, ())[:1] == (None,) for name in network.outputs)
        some, oracle = FEW if separate else None, Oracle(network, training=False)
        return [oracle.outputs(images[:some]) for images in batches], "onnx.reference"
    return inferences(network, batches, threads=threads)


def check_output(
    name: str, executor: Executor, answer: Arrays, expected: Arrays, images: int, tolerance: float
) -> Check:
    """Compare the fetched outputs for a batch of so many images with the evaluator's."""
    open_batch = executor.network.batch_size is None
    shapes = {
        key: (images, *value.shape[1:]) if open_batch and executor.network.shapes[key][:1] == (None,) else value.shape
        for key, value in expected.items()
    }
    require_answer(executor, "executor.forward", answer, shapes)
    errors = {
        key: relative_l2(answer[key][: len(value)] if value.ndim else answer[key], value)
        for key, value in expected.items()
    }
    if len(errors) > 1:
        return Check.worst(name, errors, tolerance)
    ((output, error),) = errors.items()
    return Check(name, error, tolerance, output)


def check_inference(
    executor: Executor, images: np.ndarray, *, tolerance: float, threads: int, network: Network | None = None
) -> list[Check]:
    """Compare the output in inference mode with an independent evaluator's.

    Parameters
    ----------
    executor : Executor
        With the network's initial weights.
    images : numpy.ndarray
        float32 (N, C, H, W).
    tolerance : float
        Relative L2.
    threads : int
        Thread budget of the evaluator.
    network : Network, optional
        The executor's network with the weights that were loaded instead of its own.
    """
    network = network or executor.network
    answer = executor.fetch(executor.forward(executor.feed(network.arrays(images))))
    (expected,), evaluator = expected_outputs(executor, network, [images], threads=threads)
    name = f"output ({executor.mode} {executor.precision}) vs {evaluator}"
    return [check_output(name, executor, answer, expected, len(images), tolerance)]
