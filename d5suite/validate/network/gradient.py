"""Loss and gradients: in float64 against an independent evaluator, as timed against float64.

======================  ============================================================================
gradient (float64)      loss and running statistics with ONNX's reference evaluator, the gradient
                        with central differences along random directions that weigh every parameter
                        tensor alike
gradient (as timed)     every tensor, in the mode and precision to be timed, with the float64
                        gradient just proved
gradient (no float64)   as in float64, with the tolerances of the executor's precision
======================  ============================================================================

Imports the contract, ONNX and NumPy; no framework.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from d5suite.files import read_json, write_json
from d5suite.levels.contract import require_answer
from d5suite.levels.description import Tolerance
from d5suite.levels.network import Arrays, Executor, Native
from d5suite.network import Network
from d5suite.validate.check import Check
from d5suite.validate.network.oracle import NetworkOracle
from d5suite.validate.network.reference import NetworkReference, direction, key, reference, settled
from d5suite.validate.network.sensitivity import (
    CANCELLED,
    FINE,
    SENSITIVITY_DRAWS,
    SENSITIVITY_NOISE,
    Sensitivity,
    check_each_gradient,
    differentiate,
    gradient_errors,
    neighbours,
)
from d5suite.validate.norms import FLOAT64, UNIT_ROUNDOFF, inner, norm, relative_l2

DIFFERENCES = 1e-4
"""Accepted relative error of a float64 gradient against central differences. On ResNet-50 the
differences themselves are good to about 1e-6; a tensor whose gradient is off by 1 part in 100 shows
as about 1e-3."""

ROUGH = 1e-2
"""Largest tolerance of a loss or a derivative, however sensitive the network or uncertain the
difference."""

DOUBTS = 3.0
"""Accepted distance from a central difference, relative to that difference's distance from the
differences at neighbouring steps."""

STATISTICS = 1e-3
"""Accepted relative error of how far a running statistic moved in float32. The unbiased variance of
64 values, as in ResNet's last stage (16 images of 64 px), is off by 1.6%."""

WHOLE_POINTS = 3
"""Weights at which the whole gradient may be off before it fails. Fewer than `POINTS`, because its
tolerance is wide: one proof of ResNet-50 (8 images of 48 px) was seen to need a second point."""

SATURATION = 0.9
"""Largest accepted error of a gradient, however sensitive the network: at 1, a gradient of zero
would pass."""


def check_gradient_float64(
    executor: Executor,
    images: np.ndarray,
    labels: np.ndarray,
    *,
    network: Network | None = None,
    recorded: Path | None = None,
    keep: dict[str, np.ndarray] | None = None,
    statistics: dict[str, np.ndarray] | None = None,
) -> list[Check]:
    """Compare a float64 executor's loss, running statistics and gradients with ONNX's evaluator.

    Parameters
    ----------
    executor : Executor
        In float64 with the network's initial weights, which are restored afterwards.
    images, labels : numpy.ndarray
        A small batch: float32 (n, C, H, W) and int64 (n,).
    network : Network, optional
        The executor's network, with the weights that were loaded in place of the original ones.
    recorded : Path, optional
        A file that keeps the evaluator's answers for the next backend.
    keep : dict, optional
        Receives the executor's loss and gradients.
    statistics : dict, optional
        Receives the executor's running statistics after the pass.
    """
    network = network or executor.network
    answer, after = _answer(executor, images, labels)
    if keep is not None:
        keep.update(answer)
    if statistics is not None:
        statistics.update({name: after[name] for name in network.statistics})
    digest = key(network, images, labels) if recorded is not None else ""
    known = NetworkReference.load(recorded, digest) if recorded is not None else None
    found = known or reference(network, images, labels, answer)
    checks, expected = _compare(executor, network, images, labels, answer, after, found, FLOAT64, DIFFERENCES)
    if recorded is not None and expected is not known and all(check.passed for check in checks):
        expected.save(recorded, digest)
    return checks


def check_gradient_without_float64(
    executor: Executor, images: np.ndarray, labels: np.ndarray, tolerance: Tolerance
) -> list[Check]:
    """Compare as `check_gradient_float64` does, for a backend without float64.

    Loss and statistics are held to the tolerance for outputs. The derivative along a direction may
    be off by the tolerance for gradients times the evaluator's own change under noise of this
    precision's roundoff on the weights.

    Parameters
    ----------
    executor : Executor
        With the network's initial weights, which are restored afterwards.
    images, labels : numpy.ndarray
        A small batch: float32 (n, C, H, W) and int64 (n,).
    tolerance : Tolerance
        The backend's tolerance for the executor's precision.
    """
    network = executor.network
    answer, after = _answer(executor, images, labels)
    expected = reference(network, images, labels, answer)
    sensitivity = _sensitivity(network, expected, images, labels, executor.precision)
    slope = max(DIFFERENCES, min(tolerance.gradients * sensitivity, SATURATION))
    return _compare(executor, network, images, labels, answer, after, expected, tolerance.outputs, slope)[0]


def _answer(executor: Executor, images: np.ndarray, labels: np.ndarray) -> tuple[dict[str, np.ndarray], Arrays]:
    """Return loss and gradients, and the running statistics after the pass, which are restored."""
    network = executor.network
    label, loss = network.require_loss()
    after: dict[str, np.ndarray] = {}
    answer = differentiate(executor, {**network.arrays(images), label: labels}, after=after)
    shapes = {loss: (), **{name: network.initializers[name].shape for name in network.parameters}}
    require_answer(executor, "executor.forward_backward", answer, shapes)
    return answer, after


def _compare(
    executor: Executor,
    network: Network,
    images: np.ndarray,
    labels: np.ndarray,
    answer: Arrays,
    after: Arrays,
    expected: NetworkReference,
    close: float,
    slope: float,
) -> tuple[list[Check], NetworkReference]:
    """Check loss and statistics with tolerance ``close``, derivatives with ``slope``.

    Also return the reference that was used: `settled`, if the first differences did not agree.
    """
    loss = network.require_loss()[1]
    label = f"{executor.mode} {executor.precision}"
    checks = [Check(f"loss ({label}) vs onnx.reference", relative_l2(answer[loss], expected.loss), close, loss)]
    if expected.statistics:
        errors = {name: relative_l2(after[name], value) for name, value in expected.statistics.items()}
        checks.append(Check.worst(f"running statistics ({label}) vs onnx.reference", errors, close))
    scale = math.sqrt(len(network.parameters))
    claims = [  # drawn once: a direction is as large as the network
        _slope(answer, direction(network, expected.scales, index)) for index in range(len(expected.derivatives))
    ]

    def slopes() -> list[tuple[float, float]]:
        """Return each direction's error and limit."""
        return [
            (abs(claimed - derivative) / scale, max(slope, min(DOUBTS * doubt / scale, ROUGH)))
            for claimed, derivative, doubt in zip(claims, expected.derivatives, expected.doubts, strict=True)
        ]

    if not all(error <= limit for error, limit in slopes()) and not expected.settled:
        expected = settled(expected, network, images, labels)
    for index, (error, limit) in enumerate(slopes()):
        step = expected.steps[index]
        detail = f"step {step:.1g}" if expected.settled else ""
        if not error <= limit:
            along = direction(network, expected.scales, index)
            detail = _first_wrong(network, images, labels, answer, along, limit, step)
        checks.append(Check(f"gradient ({label}) vs central differences, direction {index + 1}", error, limit, detail))
    return checks, expected


def _slope(gradients: Arrays, along: Arrays) -> float:
    """Return the derivative along a direction by these gradients."""
    return sum(inner(gradients[name], d) for name, d in along.items())


def _slope_error(network: Network, gradients: Arrays, along: Arrays, derivative: float) -> float:
    """Return the error of gradients along a direction, over the root of the number of tensors."""
    return abs(_slope(gradients, along) - derivative) / math.sqrt(len(network.parameters))


def _sensitivity(
    network: Network, expected: NetworkReference, images: np.ndarray, labels: np.ndarray, precision: str
) -> float:
    """Return how far roundoff on the weights moves the derivatives, in units of `_slope_error`."""
    noise = SENSITIVITY_NOISE * UNIT_ROUNDOFF[precision]
    generator = np.random.default_rng(0xD5)
    found = noise
    for _ in range(SENSITIVITY_DRAWS):
        oracle = NetworkOracle(network, training=True)
        for name in network.parameters:
            oracle.weights[name] = oracle.weights[name] * (
                1 + noise * generator.uniform(-1, 1, oracle.weights[name].shape)
            )
        for index, derivative in enumerate(expected.derivatives):
            moved = oracle.derivative(images, labels, direction(network, expected.scales, index), expected.steps[index])
            found = max(found, abs(moved - derivative) / math.sqrt(len(network.parameters)))
    return found


def _first_wrong(
    network: Network,
    images: np.ndarray,
    labels: np.ndarray,
    gradients: Arrays,
    along: Arrays,
    tolerance: float,
    step: float,
) -> str:
    """Name the first tensor that makes the gradient fail, by bisection over prefixes."""
    oracle = NetworkOracle(network, training=True)

    def passes(names: Sequence[str]) -> bool:
        part = {name: along[name] for name in names}
        derivative = oracle.derivative(images, labels, part, step)
        return _slope_error(network, gradients, part, derivative) <= tolerance

    low, high = 0, len(network.parameters)
    while high - low > 1:
        middle = (low + high) // 2
        if passes(network.parameters[:middle]):
            low = middle
        else:
            high = middle
    return f"first tensor that disagrees: {network.parameters[high - 1]}"


def check_gradient(
    executor: Executor,
    proved: Executor,
    images: np.ndarray,
    labels: np.ndarray,
    tolerance: Tolerance,
    *,
    reference: Arrays | None = None,
    statistics: Arrays | None = None,
    repeats: int | None = None,
    recorded: Path | None = None,
) -> list[Check]:
    """Compare loss and gradients, as timed, with those of a float64 executor already proved.

    The tolerance depends on the network's sensitivity: how far roundoff noise on the weights moves
    loss and gradients.

    Parameters
    ----------
    executor : Executor
        The executor to be timed; it keeps its weights.
    proved : Executor
        The same network in float64, with the same weights, which it keeps.
    images, labels : numpy.ndarray
        The batch to be timed: float32 (N, C, H, W) and int64 (N,).
    tolerance : Tolerance
        The backend's tolerance for the executor's precision.
    reference : mapping, optional
        The answer of ``proved``, if already known.
    statistics : mapping, optional
        Running statistics of ``proved`` after the pass; in float32 and wider the executor's are
        compared with them.
    repeats : int, optional
        How many images the batch repeats; the float64 executor takes only these.
    recorded : Path, optional
        A JSON file that keeps the network's sensitivity for the next backend.
    """
    network, precision = executor.network, executor.precision
    label_name, loss = network.require_loss()
    fed = {**network.arrays(images), label_name: labels}
    after: dict[str, np.ndarray] = {}
    start: dict[str, np.ndarray] = {}
    answer = differentiate(executor, fed, before=start, after=after)
    images, labels = images[:repeats], labels[:repeats]
    few = {**network.arrays(images), label_name: labels}
    expected = reference or differentiate(proved, few)
    shapes = {name: value.shape for name, value in expected.items()}
    require_answer(executor, "executor.forward_backward", answer, shapes)
    digest = f"{key(network, images, labels)} {precision}"
    known = read_json(recorded) if recorded is not None and recorded.exists() else {}
    if "own" in known.get(digest, {}):
        sensitivity = Sensitivity(**known[digest])
    else:
        sensitivity = Sensitivity.measure(proved, few, expected, precision)
        if recorded is not None:
            write_json(recorded, known | {digest: asdict(sensitivity)})
    limit = min(tolerance.gradients * sensitivity.gradient, SATURATION)
    close = max(tolerance.outputs, min(tolerance.gradients * sensitivity.loss, ROUGH))
    against = f"({executor.mode} {precision}) vs {proved.mode} fp64"
    checks = []
    if statistics and precision in ("fp32", "fp64"):
        drifted = _statistics_errors(start, after, statistics, UNIT_ROUNDOFF[precision])
        checks = [Check.worst(f"running statistics {against}", drifted, STATISTICS)]
    whole = _whole(f"gradient {against}", network, (answer, expected), precision, limit)
    if precision == "fp32" and limit < whole.error <= SATURATION:
        whole = _without_flips(whole, executor, proved, (fed, few), answer)
    checks += [Check(f"loss {against}", relative_l2(answer[loss], expected[loss]), close, loss), whole]
    if precision == "fp32" and limit > FINE and whole.passed:
        name = f"each gradient against its own sensitivity {against}"
        own = check_each_gradient(
            name, executor, proved, (fed, few), (answer, expected), sensitivity, tolerance.roundings
        )
        checks.append(own)
    return checks


def _whole(name: str, network: Network, answers: tuple[Arrays, Arrays], precision: str, limit: float) -> Check:
    """Compare all gradients with the expected ones; the error is the largest of all tensors."""
    found, expected = answers
    wanted = {each: expected[each] for each in network.parameters}
    return Check.worst(name, gradient_errors(found, wanted, UNIT_ROUNDOFF[precision]), limit)


def _without_flips(
    whole: Check, executor: Executor, proved: Executor, batches: tuple[Arrays, Arrays], answer: Arrays
) -> Check:
    """Repeat a failed check at neighbouring weights, where other ReLUs flip, if any do.

    The noise that measures a network's sensitivity may flip fewer ReLUs than the roundings of one
    pass. A wrong gradient is wrong at all weights. A flip recurs at the same weights: if the first
    answer does not recur, it was wrong.
    """

    def check(found: Arrays, expected: Arrays) -> Check:
        return _whole(whole.name, executor.network, (found, expected), executor.precision, whole.tolerance)

    with contextlib.closing(neighbours(executor, proved, batches, WHOLE_POINTS - 1)) as around:
        checks = itertools.starmap(check, around)
        passed, points = next(((each, points) for points, each in enumerate(checks, 2) if each.passed), (whole, 1))
    if not passed.passed or not check(differentiate(executor, batches[0]), answer).passed:
        return whole
    return replace(passed, detail=f"{passed.detail}, least error at {points} weights")


def _statistics_errors(start: Arrays, found: Arrays, expected: Arrays, roundoff: float) -> dict[str, float]:
    """Return each running statistic's error, beyond rounding, relative to how far it moved."""
    errors = {}
    for name, wanted in expected.items():
        rounding = CANCELLED * roundoff * (norm(start[name]) + norm(wanted))
        distance, moved = norm(found[name] - wanted), norm(wanted - start[name])
        error = max(distance - rounding, 0.0) / (moved or 1.0)
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def check_dropout(executor: Executor, feed: Native) -> Check:
    """Check that Dropout draws: the losses of two passes over one batch differ.

    The rest of such a network is checked on its twin without Dropout. This moves running
    statistics.
    """
    loss = executor.network.require_loss()[1]
    first, second = (float(executor.fetch(executor.forward_backward(feed))[loss]) for _ in range(2))
    drops = math.isfinite(first) and math.isfinite(second) and first != second
    return Check(
        f"Dropout draws anew in each pass ({executor.mode} {executor.precision})", 0.0 if drops else math.inf, 0.0,
        f"losses {first:.6g} and {second:.6g} over one batch",
    )  # fmt: skip
