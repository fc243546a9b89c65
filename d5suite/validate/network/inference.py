"""Outputs in inference mode, as timed, against an independent evaluator.

Imports the contract, ONNX and NumPy; no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto

from d5suite.errors import NetworkError, ValidationError
from d5suite.levels.contract import require_answer
from d5suite.levels.network import Arrays, Executor
from d5suite.network import Network
from d5suite.validate.check import Check
from d5suite.validate.network.oracle import EVALUATOR, NetworkOracle, inferences, original, outputs_as_written
from d5suite.validate.norms import UNIT_ROUNDOFF, relative_l2

FEW = 4
"""Images of a float64 batch that are checked: ONNX's reference evaluator is slow."""

EXACT = "onnx.reference"
"""ONNX's reference evaluator in float64; it decides where an answer differs from onnxruntime's."""


class ExpectedOutputs:
    """An independent evaluator's outputs for batches, and the comparison of answers with them.

    The evaluator is onnxruntime; for float64, where onnxruntime has no convolution, and for
    onnxruntime itself it is ONNX's reference evaluator. The latter evaluates `FEW` samples only,
    from the first to the last, if the batch is the outputs' first axis.

    Parameters
    ----------
    executor : Executor
        The executor to be proved.
    network : Network
        The executor's network, with the weights that were loaded.
    batch : callable
        Takes a batch's number and returns the batch; see `Network.arrays`.
    count : int
        Number of batches.
    threads : int
        Threads of onnxruntime.

    Raises
    ------
    NetworkError
        If the evaluator cannot run the network.

    Attributes
    ----------
    evaluator : str
    outputs : list of dict of str to numpy.ndarray
        Outputs for each batch, or for some of its samples.
    """

    def __init__(
        self, executor: Executor, network: Network, batch: Callable[[int], np.ndarray], count: int, *, threads: int
    ) -> None:
        self._executor, self._network, self._batch = executor, network, batch
        self._separate = all(network.shapes.get(name, ())[:1] == (None,) for name in network.outputs)
        self._exact: dict[tuple[int, ...], dict[str, np.ndarray]] = {}
        batches = [batch(number) for number in range(count)]
        self._sizes = [len(images) for images in batches]
        self._taken: list[np.ndarray | None] = [None] * count
        if executor.precision == "fp64" or executor.backend == EVALUATOR:
            if self._separate:
                self._taken = [spread(size, FEW) for size in self._sizes]
            self.outputs = [self._in_float64(number, rows) for number, rows in enumerate(self._taken)]
            self.evaluator = EXACT
        else:
            self.outputs, self.evaluator = inferences(network, batches, threads=threads)

    def check(self, what: str, answer: Arrays, number: int, tolerance: float) -> Check:
        """Compare fetched outputs for a batch with the evaluator's.

        If onnxruntime's differ, float64 decides, because onnxruntime may be the less exact one: its
        Sigmoid, for example, is good to 3e-8 of 1, not of the answer. The samples that differ most
        are compared.

        Parameters
        ----------
        what : str
            What is compared, in the check's name.
        answer : mapping of str to numpy.ndarray
            The result of ``executor.fetch``.
        number : int
            The batch's number.
        tolerance : float
            Relative L2.
        """
        expected, executor = self.outputs[number], self._executor
        _require_finite(executor.network, expected)
        open_batch = executor.network.batch_size is None
        shapes = {
            key: (self._sizes[number], *value.shape[1:])
            if open_batch and executor.network.shapes[key][:1] == (None,)
            else value.shape
            for key, value in expected.items()
        }
        require_answer(executor, "executor.forward", answer, shapes)
        found = _compare(f"{what} vs {self.evaluator}", answer, expected, self._taken[number], tolerance)
        if found.passed or self.evaluator == EXACT:
            return found
        worst = _worst(answer, expected) if self._separate else None
        try:
            exact = self._in_float64(number, worst)
        except Exception:  # it lacks an operator, or fails with whatever NumPy raises
            return found
        settled = _compare(f"{what} vs {EXACT}", answer, exact, worst, tolerance)
        if not settled.passed:
            return found
        theirs = _compare("", expected, exact, worst, tolerance).error
        return replace(settled, detail=f"{settled.detail}; {EVALUATOR} itself is off by {theirs:.3g}")

    def _in_float64(self, number: int, rows: np.ndarray | None) -> dict[str, np.ndarray]:
        """Return the reference evaluator's outputs for these samples of a batch, or for all."""
        key = (number, *(() if rows is None else rows.tolist()))
        if key not in self._exact:
            images = self._batch(number) if rows is None else self._batch(number)[rows]
            if self._network.as_written:
                self._exact[key] = outputs_as_written(self._network, images)
            else:
                self._exact[key] = NetworkOracle(self._network, training=False).outputs(images)
        return self._exact[key]


def spread(count: int, few: int) -> np.ndarray:
    """Return numbers of up to `few` of `count` rows, evenly spread, the first and last included."""
    return np.linspace(0, count - 1, min(few, count)).round().astype(np.intp)


def _worst(answer: Arrays, expected: Arrays) -> np.ndarray:
    """Return the numbers of up to `FEW` samples: those in which an output differs most."""
    apart = []
    for name, value in expected.items():
        wide, other = (each.astype(np.float64).reshape(len(value), value[0].size) for each in (value, answer[name]))
        apart.append(np.linalg.norm(other - wide, axis=1) / (np.linalg.norm(wide) or 1.0))
    return np.sort(np.argsort(-np.max(apart, axis=0), kind="stable")[:FEW])


def _compare(name: str, answer: Arrays, expected: Arrays, rows: np.ndarray | None, tolerance: float) -> Check:
    """Compare an answer, or these samples of it, with the expected outputs."""
    errors = {key: relative_l2(answer[key][... if rows is None else rows], value) for key, value in expected.items()}
    if len(errors) > 1:
        return Check.worst(name, errors, tolerance)
    ((output, error),) = errors.items()
    return Check(name, error, tolerance, output)


def outputs_tolerance(
    network: Network, batch: np.ndarray, expected: Arrays, precision: str, declared: float, *, threads: int
) -> float:
    """Return the accepted error of outputs: what a backend declares, or less in 16 bits.

    A tolerance that suits deep networks would let a shallow one compute with 3-bit weights, or with
    bfloat16 instead of float16. So an error may be at most `ROUNDED` times what rounding the
    weights to this precision changes in the outputs, computed in float32 by onnxruntime.

    Parameters
    ----------
    network : Network
        With the weights that were loaded.
    batch : numpy.ndarray
        See `Network.arrays`.
    expected : mapping of str to numpy.ndarray
        The outputs for the batch.
    precision : str
    declared : float
        The backend's tolerance.
    threads : int
        Threads for onnxruntime.
    """
    if precision not in ROUNDED:
        return declared
    dtype = np.dtype(ml_dtypes.bfloat16 if precision == "bf16" else np.float16)
    known = network.initializers
    weights = {name: known[name].astype(dtype).astype(np.float32) for name in network.parameters}
    weights |= {name: known[name] for name in network.statistics}
    (rounded,), _ = inferences(network.with_weights(weights), [batch], threads=threads)
    change = max(relative_l2(rounded[name], value) for name, value in expected.items())
    return min(declared, ROUNDED[precision] * max(change, UNIT_ROUNDOFF[precision]))


ROUNDED = {"bf16": 6.0, "fp16": 4.0}
"""Accepted error of the outputs, in multiples of the change that rounded weights cause. On seven of
the zoo's networks, adapters needed up to 2.5 in either precision; 3-bit weights are off by 12 times
or more, and bfloat16 instead of float16 by 5 to 17 times."""

READING = 1e-5
"""Largest accepted relative L2 error between the graph d5suite reads and the file's. Both run on
onnxruntime without optimization, so only constant folding changes roundings."""


def check_reading(
    path: Path, network: Network, batch: np.ndarray, *, threads: int, given: Mapping[str, Any] | None = None
) -> str:
    """Compare a file's answer on onnxruntime with the answer of the graph that backends get.

    Parameters
    ----------
    path : Path
        An ``.onnx`` file.
    network : Network
        The network read from the file, with its weights.
    batch : numpy.ndarray
        See `Network.arrays`.
    threads : int
        Thread budget.
    given : mapping of str to number, optional
        Values of the file's inputs that the network has as constants.

    Returns
    -------
    str
        Why the answers were not compared; empty if they agree.

    Raises
    ------
    ValidationError
        If the answers differ.
    NetworkError
        If the file's answer is not finite.
    """
    reason = _incomparable(path)
    if reason:
        return reason
    theirs = original(path, network, batch, threads=threads, given=given)
    if theirs is None:
        return "onnxruntime cannot run the file itself"
    (ours,), _ = inferences(network, [batch], threads=threads)
    _require_finite(network, theirs)
    floating = {name: value for name, value in theirs.items() if value.dtype.kind == "f"}
    for name, value in (floating or theirs).items():  # integers beside scores, such as ranks, depend on rounding
        error = relative_l2(ours[name], value) if ours[name].shape == value.shape else np.inf
        if not error <= READING:
            raise ValidationError(
                f"d5suite reads the network wrongly: output {name!r} is off by {error:.3g} from onnxruntime's on the "
                "file itself",
                where=str(path),
                hint="No framework is to blame. Report it with the file.",
            )
    return ""


def _incomparable(path: Path) -> str:
    """Return why a file's own answer differs from float32 inference of its graph; else empty."""
    model = onnx.load(path, load_external_data=False)
    narrow = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
    kinds = {tensor.data_type for tensor in model.graph.initializer}
    kinds.update(value.type.tensor_type.elem_type for value in model.graph.input)
    for attribute in (each for node in model.graph.node for each in node.attribute):
        kinds.add(attribute.t.data_type if attribute.HasField("t") else attribute.i if attribute.name == "to" else 0)
    if narrow & kinds:
        return "the file computes in 16 bits"
    for node in model.graph.node:
        if node.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in node.attribute):
            return (
                "the file is in training mode, where BatchNormalization uses the batch's statistics; inference here "
                "uses the running statistics in the file"
            )
        if node.op_type.startswith("Random") or (node.op_type == "Dropout" and len(node.input) > 2):
            return "the file is in training mode, or draws numbers"
    return ""


def _require_finite(network: Network, answer: Mapping[str, np.ndarray]) -> None:
    for name, value in answer.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise NetworkError(
                f"the network's own output {name!r} is not finite for the inputs drawn, on the reference evaluator",
                where=network.name,
                hint="Inputs are normal noise: does it take the root or the logarithm of one, or mask whole rows? Give "
                "the range of an input, --input x=0..1, or a sample, --inputs FILE.npz.",
            )


def check_inference(
    executor: Executor,
    images: np.ndarray,
    *,
    tolerance: float,
    threads: int,
    network: Network | None = None,
    what: str = "output",
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
        The executor's network, with the weights that were loaded in place of the original ones.
    what : str
        What is compared, in the check's name.
    """
    network = network or executor.network
    answer = executor.fetch(executor.forward(executor.feed(network.arrays(images))))
    expected = ExpectedOutputs(executor, network, lambda _: images, 1, threads=threads)
    tolerance = outputs_tolerance(network, images, expected.outputs[0], executor.precision, tolerance, threads=threads)
    return [expected.check(f"{what} ({executor.mode} {executor.precision})", answer, 0, tolerance)]
