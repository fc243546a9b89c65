"""One direction of an operator: many calls per sample, and the rates they achieve."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.errors import ValidationError
from d5suite.instruments.freshness import ROUNDS, Durations, compare_durations, timed
from d5suite.instruments.outside import Fetches, measure_outside, time_fetches, time_work
from d5suite.instruments.sampling import Samples, sample_kernel
from d5suite.instruments.settings import SamplingSettings
from d5suite.measurements.base import Measurement, Step, check_computes, check_fetches, check_inside
from d5suite.measurements.schemas import array, boolean, by_name, integer, mapping, number, or_null, record, text
from d5suite.measurements.tables import KERNELS
from d5suite.network.work import traffic, work
from d5suite.validate.check import Check
from d5suite.validate.operator.compare import Another, Findings
from d5suite.validate.operator.evidence import Evidence, save_heat_map
from d5suite.workloads.operator import FURTHER, OperatorWorkload

_RATES = {
    "flops_per_s": or_null(number("of arithmetic; null where no operations are counted")),
    "bytes_per_s": or_null(number("of memory traffic; null where nothing is moved")),
}

SCHEMA = record(
    {
        "operator": text("the ONNX operator, or a custom one as domain::Name"),
        "shapes": by_name(array(integer()), "of the node's inputs"),
        "source": text("where the sizes are published"),
        "iterations": integer("calls per sample; samples are divided by it", minimum=1),
        "work": mapping(
            {
                "flops": or_null(integer("floating-point operations of one call; null where not counted")),
                "bytes": integer("compulsory traffic of a call; 0 if all answers are views"),
            },
            description="of one call, counted from shapes",
        ),
        "views": array(text(), "outputs or gradients that are views of existing memory: nothing is moved"),
        "achieved": mapping(_RATES, description="work by median time"),
        "fraction_of_ceiling": mapping(_RATES, description="achieved rates by the ceilings; above 1 docs/operators.md"),
        "ceiling": by_name(
            mapping({"value": number(exclusiveMinimum=0), "backend": text()}),
            "the best of all backends in this run: a large matrix product and a large copy",
        ),
        "accuracy": by_name(
            number(minimum=0),
            "of the worst tensor, against its reference",
            required=["relative_l2", "l_inf", "ulp_max", "ulp_median"],
        ),
        "repeatability": mapping(
            {
                "reruns": integer("calls after the one that was proved"),
                "identical": boolean("whether all gave the same bits"),
                "variance": number("of an element, the largest", minimum=0),
            },
            description="of the answer, over reruns",
        ),
    },
    optional=["views"],
)
"""The part of the record that both directions share."""


class KernelStep(Step):
    """Calls of one direction, forward or backward.

    The proof makes the first call. Samples take two inputs in turn, or two gradients of the
    outputs.

    Parameters
    ----------
    workload : OperatorWorkload
    backward : bool

    Attributes
    ----------
    findings : Findings
        The proof's findings, with the call to time.
    others : sequence of Another
        The second input, and one that is fed after timing.
    answers : dict of int to list of numpy.ndarray
        The last timed answer to each input.
    fetches : list of Fetches
        How long fetching each of these answers took.
    median_s : float
        Median of the samples, in seconds.
    """

    findings: Findings
    others: Sequence[Another]

    evidence: Callable[[], Evidence | None] = staticmethod(lambda: None)

    def __init__(self, workload: OperatorWorkload, *, backward: bool) -> None:
        self.workload = workload
        self.backward = backward
        self.median_s = 0.0
        self.answers: dict[int, list[np.ndarray]] = {}
        self.fetches: list[Fetches] = []

    def call_first(self) -> None:
        """Do nothing: the proof makes the first call."""

    def run(self) -> object:
        return self.findings.call(*self.findings.arguments)

    def synchronize(self) -> None:
        self.workload.operator.synchronize()

    def time(self, settings: SamplingSettings) -> Samples:
        found, wait = self.findings, self.workload.operator.synchronize
        _, second = self.others[0].feed()

        def keep(turn: int, result: Any) -> None:
            def fetch() -> list[np.ndarray]:
                self.answers[turn] = self.fetch(result)
                return self.answers[turn]

            known = sum(array.nbytes for answer in self.answers.values() for array in answer if array is not None)
            self.fetches.append(time_fetches([fetch], self.workload.job.device, known))

        samples, self.calls_per_sample = sample_kernel(
            found.call, tuple(found.arguments), wait, settings, others=[tuple(second)], keep=keep, events=self.events,
            flush=self.flush,
        )  # fmt: skip
        self.median_s = samples.median_s
        return replace(samples, first_call_s=self.workload.operator_s + found.first_call_s)

    def fetch(self, result: Any) -> list[np.ndarray]:
        """Fetch a call's native result."""
        operator = self.workload.operator
        return operator.fetch_gradients(result) if self.backward else operator.fetch(result)

    def record(self, samples: Samples) -> dict[str, Any]:
        operation, backward, found = self.workload.operation, self.backward, self.findings
        cost = work(operation)
        flops = (cost.backward_flops or 0) if backward else cost.flops
        shared = self.workload.operator.views(self.run(), found.arguments, backward=backward)
        moved = traffic(operation, backward=backward, views=shared)
        median = samples.median_s
        return {
            "operator": operation.node.op_type,
            "shapes": {name: list(operation.shapes[name]) for name in operation.node.inputs if name},
            "iterations": self.calls_per_sample,
            "work": {"flops": flops or None, "bytes": moved},
            "views": [f"gradient of {name}" if backward else name for name in shared],
            "achieved": {
                "flops_per_s": flops / median if flops else None,
                "bytes_per_s": moved / median if moved else None,
            },
            "accuracy": asdict(found.accuracy),
            "repeatability": {key: found.repeatability[key] for key in ("reruns", "identical", "variance")},
        }


def finished_answers(workload: OperatorWorkload, step: KernelStep) -> Iterator[Check]:
    """Time fetching of timed answers: a call may return a promise, and fetching it computes."""
    yield check_fetches(min(step.fetches, key=lambda each: each.late_s), step.median_s)
    step.fetches.clear()


def last_answers(workload: OperatorWorkload, step: KernelStep) -> Iterator[Check]:
    """Check the last timed answers to both inputs: a replayed graph answers the other input."""
    found = step.findings
    repeats = workload.backend.tolerances[workload.operation.precision].repeats
    yield found.check_repeated("the last timed call", step.answers[0], repeats)
    yield found.check_again("the last timed call with other inputs", step.answers[1], step.others[0].expected)
    step.answers.clear()


def unseen_answer(workload: OperatorWorkload, step: KernelStep) -> Iterator[Check]:
    """Check the answer to inputs never fed before: code may remember the timed answers."""
    found = step.findings

    def time_call(call: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, float]:
        return timed(lambda: call(*arguments), workload.operator.synchronize, hand_over=True)

    def other(number: int) -> Callable[[], float]:
        arguments = found.feed(FURTHER + 1 + number)
        return lambda: time_call(found.call, arguments)[1]

    output, took = time_call(*step.others[1].feed())
    answer = step.fetch(output)  # at once: further calls may overwrite it
    first = Durations(step.median_s, took)
    yield check_computes(compare_durations(lambda: time_call(found.call, found.arguments)[1], other, first))
    yield found.check_again("inputs never fed before", answer, step.others[1].expected)


def work_outside(workload: OperatorWorkload, step: KernelStep) -> Iterator[Check]:
    """Time feeding and fetching around a call, to which the call may leave its work."""
    operator, found = workload.operator, step.findings
    sizes = [0]

    def surround(number: int) -> float:
        arrays = workload.operation.draw(workload.job.seed + FURTHER + ROUNDS + 2 + number)

        def feed() -> Sequence[Any]:
            arguments = found.arguments if step.backward else operator.feed(arrays)
            operator.synchronize()
            return arguments

        arguments, fed_s = time_work(feed, workload.job.device)
        result = found.call(*arguments)
        operator.synchronize(result)
        answer, fetched_s = time_work(lambda: step.fetch(result), workload.job.device)
        sizes[0] = sum(array.nbytes for array in (*arrays, *answer) if array is not None)
        return fed_s + fetched_s

    surround(-1)
    yield check_inside(measure_outside(step.median_s, sizes[0], surround))


class SingleOperator(Measurement):
    """One direction of a single operator."""

    level = 0
    unit = "calls/s"
    without_memory = "not taken at level 0"
    without_energy = "not taken at level 0"
    takes_cold = True
    table = KERNELS
    plot = "ceilings"
    schema = SCHEMA
    derived = ("ceiling", "fraction_of_ceiling")
    checks_after = (finished_answers, last_answers, unseen_answer, work_outside)

    @classmethod
    def derive(cls, records: Sequence[dict[str, Any]]) -> None:
        """Relate each result to the ceilings: the best rates of all backends in the run."""
        measured = [info for info in records if "ceilings" in info]
        best: dict[str, tuple[float, str]] = {}
        for info in measured:
            own = info.pop("ceilings")
            if wrong := [key for key, value in own.items() if value is None]:
                info.setdefault("warnings", []).append(
                    f"its own ceiling of {' and '.join(wrong)} counts for none: the answer was wrong, or late"
                )
            for key, value in ((key, value) for key, value in own.items() if value is not None):
                best[key] = max(best.get(key, (0.0, "")), (value, info["backend"]["name"]))
        for info in measured:
            achieved = info["achieved"]
            info["ceiling"] = {key: {"value": value, "backend": name} for key, (value, name) in best.items()}
            info["fraction_of_ceiling"] = {
                key: achieved[key] / best[key][0] if achieved[key] and key in best else None for key in achieved
            }

    def prepare(self, workload: OperatorWorkload) -> Step:
        return KernelStep(workload, backward=self.backward)

    def prove(self, workload: OperatorWorkload, step: KernelStep) -> Iterator[Check]:
        """Prove the answers against the reference."""
        yield from self.prove_first(workload, step)
        found = step.findings = self.check(workload)
        step.evidence = lambda: found.evidence
        yield from found.checks
        found.evidence = None
        step.others = [found.another(number) for number in range(1, FURTHER + 1)]

    def prove_first(self, workload: OperatorWorkload, step: KernelStep) -> Iterable[Check]:
        """Make the checks that come before `check`."""
        return ()

    @abstractmethod
    def check(self, workload: OperatorWorkload) -> Findings:
        """Compare the answers, as timed, with their reference."""

    def explain(self, workload: OperatorWorkload, step: KernelStep, error: ValidationError) -> ValidationError:
        """Return the error with a picture of the wrong answer and its reference."""
        name = f"{workload.operation.name}/{self.name}"
        where, hint = f"{workload.selection}, {name}", error.hint
        evidence = step.evidence() if workload.reference is not None else None
        if evidence is not None and workload.reference is not None:
            tensor, answer, expected = evidence
            path = Path(workload.reference).parent / f"{workload.selection}-{name}.png".replace("/", "-")
            save_heat_map(path, f"{where}, {tensor}", answer, expected)
            hint = f"Where it is wrong: {path}"
        return ValidationError(error.what, where=where, hint=hint)
