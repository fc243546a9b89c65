"""The training step (forward, backward, update), against a float64 run proved by the formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from d5suite.measurements.base import Measurement, Step
from d5suite.measurements.network.gradient import prove_gradient
from d5suite.measurements.tables import TIMES
from d5suite.measurements.training import checks
from d5suite.measurements.training.steps import TrainingStep
from d5suite.validate.check import Check
from d5suite.validate.network.gradient_references import sampled
from d5suite.validate.norms import FLOAT64
from d5suite.validate.training.amplification import ProvedRun, RunComparison
from d5suite.validate.training.trajectory import Trajectory, check_trajectory, train, train_by_formula
from d5suite.workloads.network import FEEDS, NetworkWorkload

FORMULA_STEPS = 3
"""Steps over which the native optimizer must follow its formula: momentum shows from the second
step on, its decay from the third."""

FIRST_STEPS = 2
"""Steps after which parameters are compared once more: the first timed ones, or as many made
back to back after timing."""


class TrainingStepTime(Measurement):
    """Forward, backward and update."""

    name = "training_step"
    level = 2
    needs = ("gradient", "level 2")
    of_any_network = True
    takes_memory = True
    takes_energy = True
    takes_cold = True
    table = TIMES
    checks_after = (
        checks.finite_losses,
        checks.first_losses,
        checks.counted_updates,
        checks.next_update,
        checks.whole_batch_step,
        checks.first_parameters,
        checks.same_draws,
    )

    def prepare(self, workload: NetworkWorkload) -> Step:
        return TrainingStep(workload)

    def prove(self, workload: NetworkWorkload, step: Step) -> Iterable[Check]:
        """Prove a short run with a float64 run, which the formula or other backends prove."""
        return prove_training(workload)


def prove_training(workload: NetworkWorkload) -> Iterator[Check]:
    """Check all gradients and a short training run, each once per case."""
    yield from prove_gradient(workload)
    yield from workload.once("training", lambda: _checks(workload))


def _checks(workload: NetworkWorkload) -> Iterator[Check]:
    case, count = workload.case, workload.oracle_batch
    steps = [(images[:count], labels[:count]) for images, labels in workload.batches[: case.validation_steps]]
    exact = workload.exact
    workload.restore(exact)
    label = f"{exact.mode} fp64"
    early = min(FORMULA_STEPS, len(steps))
    native = workload.backend.trainer(exact, workload.optimizer)
    recorded = train(native, steps, early=(min(FIRST_STEPS, early), early))
    runs = RunComparison(native, steps, recorded, workload.backend.tolerances)
    short, found = runs.runs[early], recorded[-1]
    peers = {f"{label} vs {name} fp64": peer for peer, name in (Trajectory.load(Path(path)) for path in case.peers)}
    agreements = [
        check
        for name, peer in peers.items()
        for check in check_trajectory(name, found, peer, tolerance=FLOAT64, parameters=True)
    ]
    if not agreements or not all(check.passed for check in agreements):  # peers that agree were proved by the formula
        expected = train_by_formula(exact, workload.optimizer, steps[:early])
        yield from runs.compare(f"{label} vs the update formula", native, short, expected, FLOAT64, parameters=True)
    for name, peer in peers.items():
        yield from runs.compare(name, native, found, peer, FLOAT64, parameters=True)
    if case.trajectory:
        found.save(Path(case.trajectory), str(workload.selection))
    executor, tolerance = workload.comparable, workload.tolerance.trajectory
    same = executor is workload.executor
    trainer = workload.trainer if same else workload.backend.trainer(executor, workload.optimizer)
    (timed,) = train(trainer, steps, back_to_back=True)  # the sampler synchronizes, and its steps are checked too
    yield from runs.compare(
        f"{executor.mode} {executor.precision} vs {label}", trainer, timed, found, tolerance, parameters=False
    )
    first = runs.first(executor.precision, tolerance)
    end = sampled({name: first.run.parameters[name] for name in workload.network.parameters})
    first = replace(first, run=replace(first.run, parameters=end))
    workload.proved_run = ProvedRun(label, *runs.again(trainer, timed, tolerance, FEEDS), first)
