"""The checks of a single operator, and the references that they compare with.

==================  ===================================================================================================
forward             every wanted output, as timed, with ONNX's reference evaluator in float64 at the same inputs
backward (float64)  every gradient with the evaluator's central differences along random directions and, where a backend
                    declares its gradient of this operator right, with that one element by element
backward            every gradient, as timed, with the float64 gradient just proved, at the same inputs
==================  ===================================================================================================

An operation that is large for the evaluator, which is slow, is cut into pieces where it falls apart into independent
ones (`d5suite.validate.pieces`): the float64 operator of one piece is proved as above, then answers for every piece,
and the whole, as timed, is compared with what they make together; a very large matrix product along random directions
(`d5suite.validate.products`). The differences of a large operation move all inputs at once.

Imports ONNX, NumPy, `d5suite.levels` and `d5suite.network`; no framework.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import onnx
import onnx.inliner

from d5suite.errors import NetworkError
from d5suite.files import atomic_path
from d5suite.levels.contract import ContractError
from d5suite.levels.operator import Operator
from d5suite.network.operation import PRECISIONS, Operation, is_floating
from d5suite.network.work import work
from d5suite.validate.checks import UNIT_ROUNDOFF, Check
from d5suite.validate.norms import relative_l2
from d5suite.validate.oracle import corrected_operators
from d5suite.validate.pieces import in_pieces, is_large
from d5suite.validate.products import Product, is_product, product, product_gradients

DIFFERENCE_STEP = 2.0**-24
"""Step of central differences in float64, for inputs of about 1: the answer is good to about 1e-8."""

KINKED_STEP = 2.0**-30
"""The same for operators with kinks. A longer step crosses one of a large tensor's: at 2**-24 the maxima of 8 images of
112 px and 64 channels were off by 1.1e-4. Rounding costs 1e-7 here."""

KINKED = frozenset({"Clip", "GlobalMaxPool", "LeakyRelu", "MaxPool", "ReduceMax", "Relu"})
"""Operators whose slope jumps."""

DIFFERENCES = 1e-6
"""Accepted error of a float64 gradient against central differences, in parts of the gradient's norm; 1e-8 is seen."""

DEVIATIONS = 4.0
"""Accepted roundings of a gradient along a standard normal direction, in standard deviations: what `DIFFERENCES` is
widened by for a custom operator that is proved in a shorter type than float64. Differences are always in float64."""

FLOAT64_GRADIENTS = 1e-10
"""Accepted relative L2 error between two float64 gradients of one operator."""

DIRECTIONS = 2
"""Random directions per input, or of all inputs of a large operation; a second one guards against a chance
cancellation."""

ROUNDINGS = 4.0
"""Roundings to the tensors' own type that an answer may carry, in units of roundoff: of itself, and of what its last
steps start from. A recurrence carries √steps times as many."""

ACCUMULATION = 16.0
"""Allowance for sums, in units of float32's or float64's roundoff times √terms: rounding errors of random sign add up
so (Higham, "Accuracy and Stability of Numerical Algorithms", section 2.8). Fast convolution algorithms take the factor;
sums in float16 or bfloat16, or inputs cut to TF32, exceed it many times."""

RERUNS = 4
"""Further calls on the same inputs, which show whether a kernel repeats itself."""

RERUN_TIME_S = 1.0
"""No further one is started after this long."""

GRID = 48
"""Elements of a gradient, evenly spread, whose central differences are pictured when it is wrong."""


@dataclass(frozen=True)
class Accuracy:
    """How far an answer lies from its reference.

    Attributes
    ----------
    relative_l2 : float
        ``norm(answer - reference) / norm(reference)``.
    l_inf : float
        Largest absolute difference.
    ulp_max, ulp_median : float
        Differences in units in the last place of the reference, in the answer's type (Goldberg, "What every computer
        scientist should know about floating-point arithmetic", 1991). Large where sums cancel.
    """

    relative_l2: float
    l_inf: float
    ulp_max: float
    ulp_median: float

    def to_dict(self) -> dict[str, float]:
        """JSON-able."""
        return asdict(self)


def accuracy(answer: np.ndarray, reference: np.ndarray) -> Accuracy:
    """Compare an answer, in its own type, with a float64 reference of the same shape."""
    if answer.shape != reference.shape or not np.isfinite(answer.astype(np.float64)).all():
        return Accuracy(math.inf, math.inf, math.inf, math.inf)
    if not answer.size:
        return Accuracy(0.0, 0.0, 0.0, 0.0)
    difference = np.abs(answer.astype(np.float64) - reference)
    rounded = np.abs(reference).astype(answer.dtype)
    unit = np.spacing(np.maximum(rounded, _smallest(answer.dtype))).astype(np.float64)
    ulps = difference / unit
    return Accuracy(relative_l2(answer, reference), float(difference.max()), float(ulps.max()), float(np.median(ulps)))


def _smallest(dtype: np.dtype) -> Any:
    import ml_dtypes

    return ml_dtypes.finfo(dtype).smallest_normal


def tolerance(operation: Operation, *, backward: bool = False, dtype: np.dtype | None = None) -> float:
    """Accepted relative L2 error of an operation's answers; see `ROUNDINGS` and `ACCUMULATION`.

    ``dtype`` is the type of the tensor where that is not the operation's precision: some statistics are always float32.
    """
    cost = work(operation)
    precision = operation.precision
    if dtype is not None:
        precision = next((key for key, value in PRECISIONS.items() if value == dtype), precision)
    own = UNIT_ROUNDOFF[precision]
    sums = UNIT_ROUNDOFF["fp64" if precision == "fp64" else "fp32"]
    terms = cost.backward_terms if backward else cost.terms
    return ROUNDINGS * own * math.sqrt(cost.steps) * (2 if backward else 1) + ACCUMULATION * sums * math.sqrt(terms)


# The reference.


class Oracle:
    """ONNX's reference evaluator of one operation in float64.

    Raises
    ------
    NetworkError
        If the evaluator does not implement the operator.
    """

    def __init__(self, operation: Operation) -> None:
        from onnx.reference import ReferenceEvaluator

        self.operation = operation
        self._double = {
            name for name in operation.node.inputs if name and operation.dtypes[name] in PRECISIONS.values()
        }
        model = onnx.ModelProto()
        model.CopyFrom(operation.model)
        if operation.custom is not None:
            model = onnx.inliner.inline_local_functions(model)
        for info in model.graph.input:
            if info.name in self._double:
                info.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
        try:
            self._evaluator = ReferenceEvaluator(model, new_ops=corrected_operators())
        except NotImplementedError as error:
            raise NetworkError(f"ONNX's reference evaluator cannot run it: {error}", where=operation.name) from error

    def run(self, arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """The wanted outputs.

        Parameters
        ----------
        arrays : sequence of numpy.ndarray or None
            The inputs, as `Operation.draw` gives them; floating-point ones are taken as they are, in float64.

        Raises
        ------
        NetworkError
            If the evaluator fails, whatever it raises.
        """
        feed = {
            name: array.astype(np.float64) if name in self._double else array
            for name, array in zip(self.operation.node.inputs, arrays, strict=True)
            if array is not None
        }
        try:
            with np.errstate(all="ignore"):
                found = self._evaluator.run(None, feed)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            raise NetworkError(
                f"ONNX's reference evaluator fails on {self.operation.describe()}: {type(error).__name__}: {lines[0]}",
                where=self.operation.name,
            ) from error
        named = dict(zip((o.name for o in self.operation.model.graph.output), found, strict=True))
        return [np.asarray(named[name]) for name in self.operation.outputs]

    def derivative(
        self,
        arrays: Sequence[np.ndarray | None],
        gradients: Sequence[np.ndarray],
        directions: Mapping[int, np.ndarray],
    ) -> float:
        """How the sum of outputs times gradients changes along a direction, by a central difference.

        Parameters
        ----------
        arrays : sequence
            The inputs.
        gradients : sequence of numpy.ndarray
            For the outputs in `Operation.differentiated`.
        directions : mapping of int to numpy.ndarray
            By number of an input that moves: float64, like that input.
        """
        operation = self.operation
        step = KINKED_STEP if operation.kinds & KINKED else DIFFERENCE_STEP
        ends = []
        for sign in (1.0, -1.0):
            point = list(arrays)
            for index, along in directions.items():
                moved = arrays[index]
                assert moved is not None  # an omitted input is not differentiable
                point[index] = moved.astype(np.float64) + sign * step * along
            ends.append(self.run(point))
        wanted = list(operation.outputs)
        chosen = [wanted.index(operation.node.outputs[i]) for i in operation.differentiated]
        changes = (ends[0][i] - ends[1][i] for i in chosen)
        total = sum(float((c * g.astype(np.float64)).sum()) for c, g in zip(changes, gradients, strict=True))
        return total / (2 * step)


def direction(operation: Operation, index: int, draw: int) -> np.ndarray:
    """A standard normal direction for one input, float64; the same for everybody."""
    shape = operation.shapes[operation.node.inputs[index]]
    return np.random.default_rng([0xD5, index, draw]).standard_normal(shape)


TOGETHER = -1
"""In place of an input's number: all inputs that have a gradient."""


@dataclass
class Reference:
    """What one operation's answers are compared with.

    Attributes
    ----------
    whole : bool
        Whether it is of the whole operation; otherwise of one piece, in float64.
    outputs : list of numpy.ndarray
        The wanted outputs in float64; of a whole operation at the inputs rounded to the timed precision.
    derivatives : dict of (int, int) to float
        By input, or `TOGETHER`, and draw: the central difference, at float64 inputs.
    gradients : dict of int to numpy.ndarray
        By input: the gradient of a backend that is right about this operator, at float64 inputs; empty without one.
    source : str
        That backend.
    """

    whole: bool
    outputs: list[np.ndarray]
    derivatives: dict[tuple[int, int], float] = field(default_factory=dict)
    gradients: dict[int, np.ndarray] = field(default_factory=dict)
    source: str = ""

    def save(self, path: Path, name: str) -> None:
        """Add it to an HDF5 file under an operation's name."""
        key = name.replace("/", "|")
        with h5py.File(path, "a") as file:
            if key in file:
                del file[key]
            group = file.create_group(key)
            group.attrs.update(whole=self.whole, source=self.source)
            for i, output in enumerate(self.outputs):
                group[f"output/{i}"] = output
            for (index, draw), value in self.derivatives.items():
                group[f"derivative/{index}/{draw}"] = value
            for index, gradient in self.gradients.items():
                group[f"gradient/{index}"] = gradient

    @classmethod
    def load(cls, path: Path, name: str) -> Reference | None:
        """What `save` wrote, or None if it is not there."""
        if not path.exists():
            return None
        with h5py.File(path, "r") as file:
            key = name.replace("/", "|")
            if key not in file:
                return None
            group = file[key]
            outputs = group.get("output", {})
            return cls(
                whole=bool(group.attrs["whole"]),
                outputs=[np.asarray(outputs[str(i)]) for i in range(len(outputs))],
                derivatives={
                    (int(index), int(draw)): float(value[()])
                    for index, draws in group.get("derivative", {}).items()
                    for draw, value in draws.items()
                },
                gradients={int(index): np.asarray(value) for index, value in group.get("gradient", {}).items()},
                source=str(group.attrs["source"]),
            )


def reference(operation: Operation, seed: int, *, backward: bool, trusted: Operator | None = None) -> Reference:
    """Compute an operation's reference.

    Parameters
    ----------
    operation : Operation
        In the precision that will be timed.
    seed : int
        Of the inputs.
    backward : bool
        Whether gradients are wanted too.
    trusted : Operator, optional
        The float64 operator of a backend whose gradient is right, for `exact_part` of the operation.
    """
    pieces = in_pieces(operation)
    oracle = Oracle(operation if pieces is None else pieces.part)
    found = Reference(pieces is None, oracle.run(oracle.operation.draw(seed)))
    if not backward:
        return found
    exact = exact_part(operation)
    arrays, gradients = exact.draw(seed), exact.draw_gradients(seed)
    together = pieces is not None or is_large(exact)
    for moved in [exact.differentiable] if together else [(index,) for index in exact.differentiable]:
        for draw in range(DIRECTIONS):
            directions = {index: direction(exact, index, draw) for index in moved}
            key = TOGETHER if together else moved[0]
            found.derivatives[key, draw] = oracle.derivative(arrays, gradients, directions)
    if trusted is not None:
        answer = trusted.fetch_gradients(trusted.backward(trusted.feed(arrays))(*trusted.feed_gradients(gradients)))
        found.gradients = dict(zip(exact.differentiable, answer, strict=True))
        found.source = trusted.backend
    return found


def exact_part(operation: Operation) -> Operation:
    """The float64 operation whose gradient `reference` describes: a piece of a large one, or the whole.

    Of a custom operator without float64, it is in its widest precision.
    """
    pieces = in_pieces(operation)
    return operation.exact if pieces is None else pieces.part


# The checks.


class Evidence(NamedTuple):
    """A tensor that is wrong, for a picture."""

    name: str
    answer: np.ndarray
    expected: np.ndarray


@dataclass
class Findings:
    """Checks, and what else was learned on the way.

    Attributes
    ----------
    checks : list of Check
    accuracy : Accuracy
        Of the worst tensor.
    repeatability : dict
        ``reruns``, ``identical``, and the largest ``variance`` of an element over the runs.
    call : callable
        The native call that was checked, and that is timed.
    arguments : sequence
        Its native arguments.
    first_call_s : float
        Time of the first call, tracing and compilation included; backward, of recording the forward pass too.
    evidence : Evidence or None
        Of the first tensor that failed.
    """

    checks: list[Check]
    accuracy: Accuracy
    repeatability: dict[str, Any]
    call: Callable[..., Any]
    arguments: Sequence[Any]
    first_call_s: float
    evidence: Evidence | None = None


def _require_types(operator: Operator, clause: str, names: Sequence[str], answer: Sequence[np.ndarray]) -> None:
    operation = operator.operation
    if len(answer) != len(names):
        raise ContractError(operator.backend, clause, f"{len(answer)} tensors where {len(names)} are wanted")
    for name, value in zip(names, answer, strict=True):
        if value.shape != operation.shapes[name] or value.dtype != operation.dtypes[name]:
            raise ContractError(
                operator.backend, "operator.fetch", f"tensor {name!r} of {operation.name} is {value.dtype} of shape "
                f"{value.shape}, not {operation.dtypes[name]} of shape {operation.shapes[name]}",
            )  # fmt: skip


def _repeatability(first: Sequence[np.ndarray], again: Callable[[], list[np.ndarray]], reruns: int) -> dict[str, Any]:
    """Call once more, and again until `RERUN_TIME_S` is over; answers that are the same are not kept."""
    start = time.perf_counter()
    count, others = 0, []
    while count < reruns and (count == 0 or time.perf_counter() - start < RERUN_TIME_S):
        run = again()
        count += 1
        if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, run, strict=True)):
            others.append(run)
    variance = 0.0
    if others:
        runs = [*others, *[first] * (1 + count - len(others))]
        variance = max(
            float(np.var(np.stack([run[i].astype(np.float64) for run in runs]), axis=0).max(initial=0.0))
            for i in range(len(first))
        )
    return {"reruns": count, "identical": not others, "variance": variance}


def _compare(
    what: str,
    names: Sequence[str],
    answer: Sequence[np.ndarray],
    expected: Iterable[np.ndarray | Product],
    limit: Callable[[np.dtype], float],
) -> tuple[list[Check], Accuracy, Evidence | None]:
    """Compare tensors one by one; those that should be products by some of their rows, and along random directions."""
    checks, evidence = [], None
    worst = Accuracy(-1.0, 0.0, 0.0, 0.0)
    compared: list[tuple[str, np.ndarray, np.ndarray]] = []
    for name, got, wanted in zip(names, answer, expected, strict=True):
        if isinstance(wanted, Product):
            compared.append((f"{name}, random rows of it,", *wanted.rows(got)))
            along, right = wanted.projected(got)
            checks.append(Check(f"{name} along random directions {what}", relative_l2(along, right), limit(got.dtype)))
            if not checks[-1].passed and evidence is None:
                evidence = Evidence(f"{name} along random directions", along, right)
        else:
            compared.append((name, got, wanted))
    for name, got, wanted in compared:
        rounded = is_floating(got.dtype)
        found = accuracy(got, wanted) if rounded else Accuracy(relative_l2(got, wanted), 0.0, 0.0, 0.0)
        check = Check(f"{name} {what}", found.relative_l2, limit(got.dtype) if rounded else 0.0)
        checks.append(check)
        if not check.passed and evidence is None:
            evidence = Evidence(name, got, wanted)
        if found.relative_l2 > worst.relative_l2:
            worst = found
    return checks, worst, evidence


def check_forward(
    operator: Operator, known: Reference, seed: int, exact: Operator | None = None, reruns: int = RERUNS
) -> Findings:
    """The wanted outputs against the reference.

    Parameters
    ----------
    operator : Operator
        As it is timed.
    known : Reference
    seed : int
    exact : Operator, optional
        The same backend's operator of `exact_part`, needed if the reference is of a piece.
    reruns : int
    """
    operation = operator.operation
    arrays = operation.draw(seed)
    operation.rehearse(arrays)
    feed = operator.feed(arrays)
    start = time.perf_counter()
    output = operator.forward(*feed)
    operator.synchronize(output)
    first_call_s = time.perf_counter() - start
    answer = operator.fetch(output)
    _require_types(operator, "operator.forward", operation.outputs, answer)
    repeatability = _repeatability(answer, lambda: operator.fetch(operator.forward(*feed)), reruns)
    proof: list[Check] = []
    expected: Sequence[np.ndarray | Product]
    pieces = None if known.whole else in_pieces(operation)
    if pieces is None:
        expected, what = known.outputs, "ONNX's reference evaluator"
    else:
        assert exact is not None  # the caller sees to it
        part = exact.operation
        piece = exact.fetch(exact.forward(*exact.feed(part.draw(seed))))
        _require_types(exact, "operator.forward", part.outputs, piece)
        what = f"ONNX's reference evaluator, one of {pieces.count} pieces"
        names = [f"output {i} (fp64)" for i in range(len(piece))]
        proof, worst, evidence = _compare(f"vs {what}", names, piece, known.outputs, lambda _: tolerance(part))
        if evidence is not None:
            return Findings(proof, worst, repeatability, operator.forward, feed, first_call_s, evidence)
        if is_product(operation):
            expected, what = product(operation, arrays), "a product in fp64"
        else:
            expected, what = pieces.outputs(exact, arrays), f"its {pieces.count} pieces in fp64"
    checks, worst, evidence = _compare(
        f"({operation.precision}) vs {what}",
        [f"output {i}" for i in range(len(answer))],
        answer,
        expected,
        lambda dtype: tolerance(operation, dtype=dtype),
    )
    return Findings([*proof, *checks], worst, repeatability, operator.forward, feed, first_call_s, evidence)


def _widened(arrays: Sequence[np.ndarray | None], exact: Operation) -> list[np.ndarray | None]:
    """The same numbers in the types of the float64 operation."""
    return [
        None if array is None else array.astype(exact.dtypes[name])
        for name, array in zip(exact.node.inputs, arrays, strict=True)
    ]


def _gradients64(exact: Operator, seed: int) -> list[np.ndarray]:
    """The gradients of the operator's own float64 inputs, by input in `Operation.differentiable`."""
    operation = exact.operation
    arrays, gradients = operation.draw(seed), operation.draw_gradients(seed)
    operation.rehearse(arrays, backward=True)
    answer = exact.fetch_gradients(exact.backward(exact.feed(arrays))(*exact.feed_gradients(gradients)))
    names = [operation.node.inputs[index] for index in operation.differentiable]
    _require_types(exact, "operator.backward", names, answer)
    return answer


def check_backward_float64(exact: Operator, known: Reference, seed: int) -> list[Check]:
    """Every float64 gradient against central differences and, where there is one, a gradient known to be right.

    Parameters
    ----------
    exact : Operator
        The float64 operator of `exact_part`.
    known : Reference
    seed : int
    """
    operation = exact.operation
    limit = DIFFERENCES + DEVIATIONS * tolerance(operation, backward=True)
    found = dict(zip(operation.differentiable, _gradients64(exact, seed), strict=True))
    checks = []
    for key in sorted({key for key, _ in known.derivatives}):
        moved = operation.differentiable if key == TOGETHER else (key,)
        finite = all(bool(np.isfinite(found[index]).all()) for index in moved)
        norm = math.sqrt(sum(float(np.linalg.norm(found[index])) ** 2 for index in moved))
        errors = []
        for draw in range(DIRECTIONS):
            along = sum(float((found[index] * direction(operation, index, draw)).sum()) for index in moved)
            wanted = known.derivatives[key, draw]
            errors.append(abs(along - wanted) / (max(norm, abs(wanted)) or 1.0))
        names = ", ".join(operation.node.inputs[index] for index in moved)
        text = f"gradient of {names} ({operation.precision}) vs central differences"
        checks.append(Check(text, max(errors) if finite else math.inf, limit))
    for index, right in known.gradients.items():
        name = f"gradient of {operation.node.inputs[index]} (fp64) vs {known.source}'s"
        checks.append(Check(name, relative_l2(found[index], right), FLOAT64_GRADIENTS))
    return checks


def gradient_evidence(exact: Operator, known: Reference, seed: int) -> Evidence:
    """Where a float64 gradient that `check_backward_float64` found wrong is wrong.

    It is the gradient that is furthest off: all of it where a right one is known, otherwise `GRID` elements, evenly
    spread along all axes, beside their central differences.
    """
    operation = exact.operation
    found = dict(zip(operation.differentiable, _gradients64(exact, seed), strict=True))
    arrays, gradients = operation.draw(seed), operation.draw_gradients(seed)
    oracle = Oracle(operation)
    candidates = []
    for index, gradient in found.items():
        name = f"gradient of {operation.node.inputs[index]} ({operation.precision})"
        if index in known.gradients:
            candidates.append(Evidence(name, gradient, known.gradients[index]))
            continue
        places = np.ix_(*_spread(gradient.shape))
        expected = np.zeros(gradient[places].shape)
        numbers = np.arange(gradient.size).reshape(gradient.shape)[places]
        for place in np.ndindex(expected.shape):
            unit = np.zeros(gradient.shape)
            unit.reshape(-1)[numbers[place]] = 1.0
            expected[place] = oracle.derivative(arrays, gradients, {index: unit})
        text = f"{name}, {expected.size} of {gradient.size} elements"
        candidates.append(Evidence(text, gradient[places], expected))
    return max(candidates, key=lambda each: relative_l2(each.answer, each.expected))


def _spread(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Evenly spread indices along every axis, `GRID` combinations of them at most; the last axes get the most."""
    counts = [1] * len(shape)
    while True:
        longer = [i for i, n in enumerate(counts) if n < shape[i] and math.prod(counts) // n * (n + 1) <= GRID]
        if not longer:
            return [np.linspace(0, n - 1, count).astype(int) for n, count in zip(shape, counts, strict=True)]
        counts[min(longer, key=lambda i: (counts[i], -i))] += 1


def check_backward(operator: Operator, exact: Operator, seed: int, reruns: int = RERUNS) -> Findings:
    """Every gradient, as timed, against the proved float64 operator's at the same inputs.

    Parameters
    ----------
    operator : Operator
        As it is timed.
    exact : Operator
        The same backend's float64 operator of `exact_part`.
    seed : int
    reruns : int
    """
    operation, proved = operator.operation, exact.operation
    arrays, gradients = operation.draw(seed), operation.draw_gradients(seed)
    feed, heads = operator.feed(arrays), operator.feed_gradients(gradients)
    start = time.perf_counter()
    call = operator.backward(feed)
    output = call(*heads)
    operator.synchronize(output)
    first_call_s = time.perf_counter() - start
    answer = operator.fetch_gradients(output)
    names = [operation.node.inputs[index] for index in operation.differentiable]
    _require_types(operator, "operator.backward", names, answer)
    repeatability = _repeatability(answer, lambda: operator.fetch_gradients(call(*heads)), reruns)
    pieces = in_pieces(operation)
    expected: Sequence[np.ndarray | Product]
    if pieces is None:
        heads64 = [
            g.astype(proved.dtypes[proved.node.outputs[i]])
            for i, g in zip(proved.differentiated, gradients, strict=True)
        ]
        native = exact.backward(exact.feed(_widened(arrays, proved)))(*exact.feed_gradients(heads64))
        expected, what = exact.fetch_gradients(native), proved.precision
    elif is_product(operation):
        expected, what = product_gradients(operation, arrays, gradients[0]), "products in fp64"
    else:
        expected, what = pieces.gradients(exact, arrays, gradients), f"its {pieces.count} pieces in fp64"
    checks, worst, evidence = _compare(
        f"({operation.precision}) vs {what}",
        [f"gradient of {name}" for name in names],
        answer,
        expected,
        lambda dtype: tolerance(operation, backward=True, dtype=dtype),
    )
    return Findings(checks, worst, repeatability, call, heads, first_call_s, evidence)


def save_heat_map(path: Path, title: str, answer: np.ndarray, expected: np.ndarray) -> None:
    """A picture of where an answer is wrong: its absolute error as a plane, leading axes above one another.

    Parameters
    ----------
    path : Path
        A PNG file.
    title : str
    answer, expected : numpy.ndarray
        Of any number of axes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    got = answer.astype(np.float64)
    if got.shape != expected.shape:
        raise ValueError(f"shapes {got.shape} and {expected.shape} have no picture")
    error = np.abs(np.nan_to_num(got, nan=np.inf) - expected)
    plane = np.atleast_1d(error).reshape(-1, error.shape[-1] if error.ndim else 1)
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.add_subplot()
    finite = np.where(np.isfinite(plane), plane, np.nan)
    image = axes.imshow(finite, aspect="auto", interpolation="nearest", cmap="magma")
    axes.set_title(f"{title}: absolute error", fontsize=10)
    axes.set_xlabel(f"last axis of {list(answer.shape)}")
    axes.set_ylabel("all other axes, in order")
    figure.colorbar(image, ax=axes, label="|answer - reference|")
    with atomic_path(path) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))
