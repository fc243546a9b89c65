"""The checks that stand between a framework's answer and a timing.

Each returns `Check` records; `Validation` gathers them and says whether timing may begin. What is compared with what:

=====================  ================================================================================================
inference              the output, in the mode and precision to be timed, with an independent evaluator
gradient (float64)     loss and running statistics with ONNX's reference evaluator, and the gradient with its central
                       differences along random directions that weigh every parameter tensor alike
gradient               every tensor, in the mode and precision to be timed, with the float64 gradient just proved;
                       without a float64, as above with the tolerances of the precision that there is
trajectory (float64)   ten steps of the native optimizer with the update formula in NumPy on proved gradients, and with
                       every other backend that ran before
trajectory             the loss of each step, in the mode and precision to be timed, with the float64 trajectory
=====================  ================================================================================================

Imports the contract and NumPy; no framework.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.errors import ValidationError
from d5suite.files import atomic_hdf5, read_json, write_json
from d5suite.levels.backend import Tolerance
from d5suite.levels.contract import require_answer
from d5suite.levels.network import Arrays, Executor, Native
from d5suite.levels.training import LOSS_SCALE, STEPS, Optimizer, Trainer
from d5suite.network import Network
from d5suite.validate.norms import relative_l2
from d5suite.validate.optimizers import update
from d5suite.validate.oracle import Oracle, inference

FLOAT64 = 1e-8
"""Accepted relative L2 error between two float64 computations of the same quantity."""

DIFFERENCES = 1e-4
"""Accepted relative error of a float64 gradient against central differences. On ResNet-50 the differences themselves
are good to about 1e-6; a tensor whose gradient is off by 1 part in 100 shows as about 1e-3."""

FEW = 4
"""Images of a batch that ONNX's reference evaluator, which is slow, checks in inference mode."""

DIRECTIONS = 2
"""Random directions; each weighs every parameter tensor, the second guards against a chance cancellation."""

STEP = 5e-11
"""Step of the central difference along a direction whose derivative is about the root of the number of tensors.
Larger steps cross kinks of ReLU and max-pooling: on ResNet-50 with 8 images of 64 px that costs 8e-4 at 2e-9, and
nothing at 2e-10. Smaller ones lose digits of the loss: the differences are good to 1e-7 here and to 9e-7 at 1e-11."""

UNIT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Largest relative error of one rounding to nearest (IEEE 754; bfloat16 has 8 significant bits, float16 11)."""

SENSITIVITY_NOISE = 32.0
"""Relative noise on the weights, in units of roundoff, that stands for all roundings of a pass. It must be large enough
to flip some ReLUs in every layer: a float32 pass flips about one in a million, and a single flip in ResNet-18's last
stage (8 images of 64 px) moves a gradient by 2%, where noise of one unit often flips none."""

SENSITIVITY_DRAWS = 2
"""Draws of that noise, of which the one that moves the gradient most counts: a flip is rare, and its size varies."""

SATURATION = 0.9
"""No gradient error above this is accepted, however sensitive the network: at 1 a gradient of zero would pass."""

NEGLIGIBLE = 1e-3
"""A tensor's gradient error is measured against its own norm, or this part of the whole gradient's where its own is
smaller: a convolution bias ahead of BatchNormalization has a gradient of nothing but rounding."""


ROUNDING = 1e-6
"""A tensor's error after training is measured against its own norm, or this part of all tensors' where its own is
smaller: a convolution bias ahead of BatchNormalization holds nothing but rounding, of 1e-16 of what surrounds it."""


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes
    ----------
    name : str
        What was compared with what.
    error, tolerance : float
        Relative L2 error and the most that is accepted.
    detail : str
        Which tensor or step was worst.
    """

    name: str
    error: float
    tolerance: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return self.error <= self.tolerance

    @property
    def finding(self) -> str:
        """What disagrees, by how much, and the first tensor or step, as a sentence; for a check that fails."""
        text = f"{self.name}: relative error {self.error:.3g} exceeds {self.tolerance:.3g}"
        return f"{text}; {self.detail}" if self.detail else text

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; an error that is not finite becomes the largest float."""
        error = self.error if math.isfinite(self.error) else float(np.finfo(np.float64).max)
        return {
            "name": self.name,
            "error": error,
            "tolerance": self.tolerance,
            "passed": self.passed,
            "detail": self.detail,
        }


@dataclass
class Validation:
    """Checks gathered so far."""

    checks: list[Check] = field(default_factory=list)

    def require(self, checks: Iterable[Check]) -> None:
        """Add checks, and raise at the first that fails.

        Raises
        ------
        ValidationError
            Naming what disagrees, by how much, and the first tensor or step.
        """
        for check in checks:
            self.checks.append(check)
            if not check.passed:
                raise ValidationError(
                    check.finding,
                    hint="Nothing was timed. The job file reproduces this: python -m d5suite.worker JOB",
                )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: ``passed`` and ``checks``."""
        return {"passed": all(c.passed for c in self.checks), "checks": [c.to_dict() for c in self.checks]}


def _precision_label(executor: Executor) -> str:
    return f"{executor.mode} {executor.precision}"


def check_inference(
    executor: Executor, images: np.ndarray, *, tolerance: float, threads: int, network: Network | None = None
) -> list[Check]:
    """The output in inference mode against an independent evaluator.

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
        The executor's network with other initial weights, if it has been given those.
    """
    network = network or executor.network
    answer = executor.fetch(executor.forward(executor.feed({network.input: images})))
    if executor.precision == "fp64":  # onnxruntime has no float64 convolution, and the evaluator that has one is slow
        some = network.batch_size or min(FEW, len(images))
        expected, evaluator = Oracle(network, training=False).run(images[:some])[0], "onnx.reference"
    else:
        some = len(images)
        expected, evaluator = inference(network, images, threads=threads)
    require_answer(executor, "executor.forward", answer, {network.output: (len(images), *expected.shape[1:])})
    error = relative_l2(answer[network.output][:some], expected)
    return [Check(f"output ({_precision_label(executor)}) vs {evaluator}", error, tolerance, network.output)]


def check_gradient_float64(
    executor: Executor,
    images: np.ndarray,
    labels: np.ndarray,
    *,
    network: Network | None = None,
    recorded: Path | None = None,
    keep: dict[str, np.ndarray] | None = None,
) -> list[Check]:
    """Loss, running statistics and every gradient of a float64 executor against ONNX's reference evaluator.

    Parameters
    ----------
    executor : Executor
        In float64 with the network's initial weights, which it has again afterwards.
    images, labels : numpy.ndarray
        A small batch: float32 (n, C, H, W) and int64 (n,).
    network : Network, optional
        The executor's network with other initial weights, if it has been given those.
    recorded : Path, optional
        A file in which the evaluator's answers are kept for the next executor of the same network and batch: they do
        not depend on who asks, and take long.
    keep : dict, optional
        Receives the executor's loss and gradients.
    """
    return _check_gradient_alone(executor, images, labels, None, network, recorded, keep)


def check_gradient_without_float64(
    executor: Executor, images: np.ndarray, labels: np.ndarray, tolerance: Tolerance
) -> list[Check]:
    """The same for an executor whose backend has no float64 that could vouch for it.

    The derivative along a direction may be off by as much as noise of this precision's roundoff on the weights moves
    the evaluator's own, times the tolerance for gradients; loss and statistics by the tolerance for outputs.

    Parameters
    ----------
    executor : Executor
        With the network's initial weights, which it has again afterwards.
    images, labels : numpy.ndarray
        A small batch: float32 (n, C, H, W) and int64 (n,).
    tolerance : Tolerance
        The backend's, for the executor's precision.
    """
    return _check_gradient_alone(executor, images, labels, tolerance, None, None, None)


def _check_gradient_alone(
    executor: Executor,
    images: np.ndarray,
    labels: np.ndarray,
    tolerance: Tolerance | None,
    network: Network | None,
    recorded: Path | None,
    keep: dict[str, np.ndarray] | None,
) -> list[Check]:
    network = network or executor.network
    label_name, loss_name = network.require_loss()
    start = executor.parameters()
    answer = executor.fetch(executor.forward_backward(executor.feed({network.input: images, label_name: labels})))
    after = executor.parameters()
    executor.load_parameters(start)
    if keep is not None:
        keep.update(answer)
    gradients = {name: answer[name] for name in network.parameters if name in answer}
    require_answer(
        executor,
        "executor.forward_backward",
        answer,
        {loss_name: (), **{name: network.initializers[name].shape for name in network.parameters}},
    )
    answers = _recorded(recorded, network, images, labels)
    if answers is None:
        answers = _ask(Oracle(network, training=True), images, labels, _scales(gradients))
    close, slope = FLOAT64, DIFFERENCES
    if tolerance is not None:
        close = tolerance.outputs
        sensitivity = _sensitivity(network, answers, images, labels, executor.precision)
        slope = max(DIFFERENCES, min(tolerance.gradients * sensitivity, SATURATION))
    label = _precision_label(executor)
    loss_error = relative_l2(answer[loss_name], answers.loss)
    checks = [Check(f"loss ({label}) vs onnx.reference", loss_error, close, loss_name)]
    if answers.statistics:
        checks.append(
            _worst(
                f"running statistics ({label}) vs onnx.reference",
                {name: relative_l2(after[name], value) for name, value in answers.statistics.items()},
                close,
            )
        )
    for index, derivative in enumerate(answers.derivatives):
        along = _direction(network, answers.scales, index)
        claimed = sum(float(np.vdot(gradients[name], d)) for name, d in along.items())
        error = abs(claimed - derivative) / math.sqrt(len(network.parameters))
        detail = "" if error <= slope else _first_wrong(network, images, labels, gradients, along, slope)
        checks.append(Check(f"gradient ({label}) vs central differences, direction {index + 1}", error, slope, detail))
    if recorded is not None and all(check.passed for check in checks):
        _record(recorded, answers, network, images, labels)
    return checks


@dataclass(frozen=True)
class _Answers:
    """What the reference evaluator says of a network and a batch.

    Attributes
    ----------
    loss : float
    statistics : mapping of str to numpy.ndarray
        Running statistics after one pass.
    scales : mapping of str to float
        By parameter: the deviation of the directions' noise.
    derivatives : sequence of float
        The loss's derivative along each direction.
    """

    loss: np.ndarray
    statistics: Arrays
    scales: Mapping[str, float]
    derivatives: Sequence[float]


def _ask(oracle: Oracle, images: np.ndarray, labels: np.ndarray, scales: Mapping[str, float]) -> _Answers:
    loss, statistics = oracle.run(images, labels)
    derivatives = [
        oracle.derivative(images, labels, _direction(oracle.network, scales, index), STEP)
        for index in range(DIRECTIONS)
    ]
    return _Answers(loss, statistics, scales, derivatives)


def _sensitivity(network: Network, answers: _Answers, images: np.ndarray, labels: np.ndarray, precision: str) -> float:
    """How far noise of a precision's roundoff on the weights moves the derivatives, on the scale of their errors."""
    noise = SENSITIVITY_NOISE * UNIT_ROUNDOFF[precision]
    generator = np.random.default_rng(0xD5)
    found = noise
    for _ in range(SENSITIVITY_DRAWS):
        oracle = Oracle(network, training=True)
        for name in network.parameters:
            oracle.weights[name] = oracle.weights[name] * (
                1 + noise * generator.uniform(-1, 1, oracle.weights[name].shape)
            )
        for index, derivative in enumerate(answers.derivatives):
            moved = oracle.derivative(images, labels, _direction(network, answers.scales, index), STEP)
            found = max(found, abs(moved - derivative) / math.sqrt(len(network.parameters)))
    return found


def _key(network: Network, images: np.ndarray, labels: np.ndarray) -> str:
    digest = hashlib.sha256(network.model.SerializeToString(deterministic=True))
    for array in (images, labels):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _recorded(path: Path | None, network: Network, images: np.ndarray, labels: np.ndarray) -> _Answers | None:
    """The answers in a file, if they are to the same question."""
    import h5py

    if path is None or not path.exists():
        return None
    with h5py.File(path, "r") as file:
        if file.attrs["key"] != _key(network, images, labels):
            return None
        names = [name.decode() for name in file["names"][()]]
        statistics = {name.decode(): file["statistics"][str(i)][()] for i, name in enumerate(file["moved"][()])}
        scales = dict(zip(names, file["scales"][()].tolist(), strict=True))
        return _Answers(file["loss"][()], statistics, scales, file["derivatives"][()].tolist())


def _record(path: Path, answers: _Answers, network: Network, images: np.ndarray, labels: np.ndarray) -> None:
    import h5py

    with atomic_hdf5(path) as file:
        file.attrs["key"] = _key(network, images, labels)
        file["loss"] = answers.loss
        file["names"] = np.array(list(answers.scales), dtype=h5py.string_dtype())
        file["scales"] = np.array(list(answers.scales.values()))
        file["derivatives"] = np.array(answers.derivatives)
        file["moved"] = np.array(list(answers.statistics), dtype=h5py.string_dtype())
        group = file.create_group("statistics")
        for index, value in enumerate(answers.statistics.values()):
            group[str(index)] = value


def _scales(gradients: Arrays) -> dict[str, float]:
    """Noise in inverse proportion to a gradient's norm, so that each tensor weighs alike in the derivative."""
    norms = {name: float(np.linalg.norm(gradient.ravel())) for name, gradient in gradients.items()}
    floor = NEGLIGIBLE * max(norms.values())
    return {name: 1.0 / max(norm, floor or 1.0) for name, norm in norms.items()}


def _direction(network: Network, scales: Mapping[str, float], index: int) -> dict[str, np.ndarray]:
    """Normal noise of these deviations, by parameter."""
    generator = np.random.default_rng([0xD5, index])
    shapes = {name: network.initializers[name].shape for name in network.parameters}
    return {name: generator.standard_normal(shape) * scales[name] for name, shape in shapes.items()}


def _first_wrong(
    network: Network, images: np.ndarray, labels: np.ndarray, gradients: Arrays, along: Arrays, tolerance: float
) -> str:
    """The first tensor without which the gradient would be accepted, by bisection over prefixes."""
    oracle = Oracle(network, training=True)

    def accepted(names: Sequence[str]) -> bool:
        part = {name: along[name] for name in names}
        derivative = oracle.derivative(images, labels, part, STEP)
        claimed = sum(float(np.vdot(gradients[name], d)) for name, d in part.items())
        return abs(claimed - derivative) / math.sqrt(len(network.parameters)) <= tolerance

    low, high = 0, len(network.parameters)
    while high - low > 1:
        middle = (low + high) // 2
        if accepted(network.parameters[:middle]):
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
    recorded: Path | None = None,
) -> list[Check]:
    """Loss and every gradient, as they will be timed, against a float64 executor whose gradients are proved.

    Parameters
    ----------
    executor : Executor
        To be timed; keeps its weights.
    proved : Executor
        Of the same network, in float64, from the same weights; keeps its weights.
    images, labels : numpy.ndarray
        The batch to be timed: float32 (N, C, H, W) and int64 (N,).
    tolerance : Tolerance
        The backend's, for the executor's precision.
    reference : mapping, optional
        What ``proved`` answers, if that is known.
    recorded : Path, optional
        A file in which the network's sensitivity is kept for the next backend: it does not depend on who computes.
    """
    network = executor.network
    label_name, loss = network.require_loss()
    arrays = {network.input: images, label_name: labels}
    answer = _differentiate(executor, arrays)
    reference = reference or _differentiate(proved, arrays)
    shapes = {name: value.shape for name, value in reference.items()}
    require_answer(executor, "executor.forward_backward", answer, shapes)
    whole = math.sqrt(sum(float(np.vdot(reference[name], reference[name])) for name in network.parameters))
    # Where large terms cancel in a small gradient, as in a bias ahead of BatchNormalization, their rounding remains.
    remainder = 2 * UNIT_ROUNDOFF[executor.precision] * whole

    def errors(values: Arrays) -> dict[str, float]:
        found = {}
        for name in network.parameters:
            scale = max(float(np.linalg.norm(reference[name].ravel())), NEGLIGIBLE * whole) or 1.0
            distance = float(np.linalg.norm((values[name] - reference[name]).ravel()))
            found[name] = max(distance - remainder, 0.0) / scale
        return found

    noise = SENSITIVITY_NOISE * UNIT_ROUNDOFF[executor.precision]
    key = f"{_key(network, images, labels)} {executor.precision}"
    known = read_json(recorded) if recorded is not None and recorded.exists() else {}
    if key not in known:
        known[key] = max(noise, *(max(errors(values).values()) for values in _disturbed(proved, arrays, noise)))
        if recorded is not None:
            write_json(recorded, known)
    sensitivity = known[key]
    label = _precision_label(executor)
    against = f"{proved.mode} fp64"
    return [
        Check(f"loss ({label}) vs {against}", relative_l2(answer[loss], reference[loss]), tolerance.outputs, loss),
        _worst(f"gradient ({label}) vs {against}", errors(answer), min(tolerance.gradients * sensitivity, SATURATION)),
    ]


def check_dropout(executor: Executor, feed: Native) -> Check:
    """That an executor whose network has Dropout drops: the loss of two passes over one batch differs.

    Everything else of such a network is checked on its twin without Dropout. Running statistics move.
    """
    loss = executor.network.require_loss()[1]
    first, second = (float(executor.fetch(executor.forward_backward(feed))[loss]) for _ in range(2))
    drops = math.isfinite(first) and math.isfinite(second) and first != second
    return Check(
        f"Dropout draws anew in each pass ({_precision_label(executor)})", 0.0 if drops else math.inf, 0.0,
        f"losses {first:.6g} and {second:.6g} over one batch",
    )  # fmt: skip


def _disturbed(proved: Executor, arrays: Arrays, noise: float) -> Iterator[dict[str, np.ndarray]]:
    """Loss and gradients with noise on the weights, drawn several times; the weights are as before afterwards."""
    start = proved.parameters()
    generator = np.random.default_rng(0xD5)
    for _ in range(SENSITIVITY_DRAWS):
        factors = {name: 1 + noise * generator.uniform(-1, 1, start[name].shape) for name in proved.network.parameters}
        proved.load_parameters({name: start[name] * factor for name, factor in factors.items()})
        yield _differentiate(proved, arrays)
    proved.load_parameters(start)


def _differentiate(executor: Executor, arrays: Arrays) -> dict[str, np.ndarray]:
    """Loss and gradients; the executor's parameters and running statistics are as before afterwards."""
    start = executor.parameters()
    answer = executor.fetch(executor.forward_backward(executor.feed(arrays)))
    executor.load_parameters(start)
    return answer


@dataclass(frozen=True)
class Trajectory:
    """A short training run.

    Attributes
    ----------
    losses : numpy.ndarray
        float64 (steps,): the loss before each update.
    parameters : mapping of str to numpy.ndarray
        All parameters and running statistics after the last update.
    """

    losses: np.ndarray
    parameters: Arrays


Batches = Sequence[tuple[np.ndarray, np.ndarray]]
"""Image and label arrays, one pair per batch."""


def train(
    trainer: Trainer,
    batches: Batches,
    *,
    early: int | None = None,
    durations: list[float] | None = None,
    rates: Sequence[float] = (),
    accumulate: int = 1,
) -> list[Trajectory]:
    """Run the native optimizer over the batches, and put the starting weights back.

    In ``fp16`` a step that updates nothing, because the loss was scaled too much, is repeated: runs of other precisions
    make an update in each.

    Parameters
    ----------
    trainer : Trainer
        Its optimizer's state at zero.
    batches : sequence
        Pairs of images and labels.
    early : int, optional
        A number of steps after which the run is recorded too.
    durations : list of float, optional
        Receives the seconds of each step.
    rates : sequence of float
        Learning rates of the first steps, of which the last one stays; by default the optimizer's own.
    accumulate : int
        Batches per step.

    Returns
    -------
    list of Trajectory
        The run after ``early`` steps, where asked for, and the whole run.
    """
    executor = trainer.executor
    network = executor.network
    label, loss = network.require_loss()
    start = executor.parameters()
    losses: list[float] = []
    found = []
    scaled = executor.precision == "fp16"
    updates = int(trainer.state()[STEPS]) if scaled else 0
    steps = _steps(batches, accumulate)
    for index, group in enumerate(steps):
        feeds = [executor.feed({network.input: images, label: labels}) for images, labels in group]
        if index < len(rates):
            trainer.set_learning_rate(rates[index])
        begin = time.perf_counter()
        native = trainer.step(*feeds)
        executor.synchronize()
        if durations is not None:
            durations.append(time.perf_counter() - begin)
        if scaled:
            _repeat_until_updated(trainer, feeds, updates := updates + 1)
        answer = executor.fetch(native)
        require_answer(executor, "trainer.loss", answer, {loss: ()})
        losses.append(float(answer[loss]))
        ended = [len(losses) == early, len(losses) == len(steps)]
        found += [Trajectory(np.array(losses), executor.parameters()) for end in ended if end]
    executor.load_parameters(start)
    return found


def _repeat_until_updated(trainer: Trainer, feeds: Sequence[Native], updates: int) -> None:
    """Repeat a step, whose loss then stays the same, until the trainer has made so many updates.

    Raises
    ------
    ValidationError
        If the scale of the loss has become less than 1.
    """
    while int((state := trainer.state())[STEPS]) < updates:
        if state[LOSS_SCALE] < 1:
            raise ValidationError("the gradients are not finite in fp16, however little the loss is scaled")
        trainer.step(*feeds)


def _steps(batches: Batches, accumulate: int) -> list[Batches]:
    return [batches[start : start + accumulate] for start in range(0, len(batches), accumulate)]


def train_by_formula(
    executor: Executor,
    optimizer: Optimizer,
    batches: Batches,
    *,
    rates: Sequence[float] = (),
    accumulate: int = 1,
    state: dict[str, np.ndarray] | None = None,
) -> Trajectory:
    """The same run with the executor's gradients and the neutral update formula in NumPy.

    ``state`` receives what the optimizer remembers at the end; the other arguments are as in `train`.
    """
    network = executor.network
    label, loss = network.require_loss()
    start = executor.parameters()
    parameters = {name: start[name].astype(np.float64) for name in network.parameters}
    state = {} if state is None else state
    losses = []
    for index, group in enumerate(_steps(batches, accumulate)):
        feeds = (executor.feed({network.input: images, label: labels}) for images, labels in group)
        answers = [executor.fetch(executor.forward_backward(feed)) for feed in feeds]
        losses.append(float(np.mean([answer[loss] for answer in answers])))
        gradients = {name: np.mean([answer[name] for answer in answers], axis=0) for name in parameters}
        rate = rates[min(index, len(rates) - 1)] if rates else None
        update(optimizer, parameters, gradients, state, learning_rate=rate)
        executor.load_parameters(parameters)
    end = executor.parameters()
    executor.load_parameters(start)
    return Trajectory(np.array(losses), end)


def check_trajectory(
    name: str, found: Trajectory, expected: Trajectory, *, tolerance: float, parameters: bool
) -> list[Check]:
    """Compare two runs step by step, and with ``parameters`` also every final parameter and statistic.

    Parameters
    ----------
    name : str
        What is compared with what, for the checks' names.
    found, expected : Trajectory
    tolerance : float
        Relative, for each loss and each tensor.
    parameters : bool
        Whether the final tensors count.
    """
    if len(found.losses) != len(expected.losses):
        raise ValidationError(f"{name}: {len(found.losses)} steps against {len(expected.losses)}")
    errors = [relative_l2(a, b) for a, b in zip(found.losses, expected.losses, strict=True)]
    late = next((i for i, error in enumerate(errors) if not error <= tolerance), None)
    worst = int(np.argmax(errors))
    detail = f"worst at step {worst + 1}" if late is None else f"first disagrees at step {late + 1}"
    checks = [Check(f"losses of {len(errors)} steps, {name}", errors[worst], tolerance, detail)]
    if parameters:
        whole = math.sqrt(sum(float(np.vdot(v, v)) for v in expected.parameters.values()))
        checks.append(
            _worst(
                f"parameters after {len(errors)} steps, {name}",
                {
                    key: relative_l2(found.parameters[key], value, floor=ROUNDING * whole)
                    for key, value in expected.parameters.items()
                },
                tolerance,
            )
        )
    return checks


def _worst(name: str, errors: Mapping[str, float], tolerance: float) -> Check:
    """One check for many tensors: the largest error, with the first tensor that fails named."""
    worst = max(errors, key=lambda key: errors[key] if not math.isnan(errors[key]) else math.inf)
    wrong = next((key for key, error in errors.items() if not error <= tolerance), None)
    detail = f"worst: {worst}" if wrong is None else f"first tensor that disagrees: {wrong} ({errors[wrong]:.3g})"
    return Check(f"{name}, {len(errors)} tensors", errors[worst], tolerance, detail)
