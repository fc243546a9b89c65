"""The training step (forward, backward, update), against a float64 run proved by the formula."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from d5suite.levels.training import Trainer
from d5suite.measurements.base import Step
from d5suite.measurements.network.checks import finished_answers
from d5suite.measurements.network.gradient import prove_gradient
from d5suite.measurements.network.steps import NetworkMeasurement
from d5suite.measurements.training import checks
from d5suite.measurements.training.steps import TrainingStep
from d5suite.validate.check import Check
from d5suite.validate.network.gradient_references import sampled
from d5suite.validate.norms import FLOAT64
from d5suite.validate.training.amplification import ProvedRun, TrainingComparison
from d5suite.validate.training.trajectory import (
    BatchList,
    Trajectory,
    check_trajectory,
    load_runs,
    save_runs,
    train,
    train_by_formula,
)
from d5suite.workloads.network import FEEDS, NetworkWorkload

FORMULA_STEPS = 3
"""Steps over which the native optimizer must follow its formula: momentum shows from the second
step on, its decay from the third."""

FIRST_STEPS = 2
"""Steps after which parameters are compared once more: the first timed ones, or as many made
back to back after timing."""


class TrainingStepTime(NetworkMeasurement):
    """Forward, backward and update."""

    name = "training_step"
    level = 2
    needs = ("gradient", "level 2")
    checks_after = (
        finished_answers,
        checks.finite_losses,
        checks.first_losses,
        checks.counted_updates,
        checks.next_update,
        checks.whole_batch_step,
        checks.first_parameters,
        checks.same_draws,
        checks.middle_steps,
        checks.step_outside,
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
    proved = [path for each in case.peers if (path := Path(each)).exists()]
    peers = {name: runs for runs, name in map(load_runs, proved)}
    exact = workload.exact
    workload.restore(exact)
    native = workload.backend.trainer(exact, workload.optimizer)
    early = min(FORMULA_STEPS, len(steps))
    marks = (min(FIRST_STEPS, early), early)
    executor, timed = workload.comparable, None
    same = executor is workload.executor
    trainer = workload.trainer if same else workload.backend.trainer(executor, workload.optimizer)
    if source := next((name for name, runs in peers.items() if len(steps) in runs), ""):
        recorded = train(native, steps[:early], early=marks)
        agreements = list(_agreements(workload, recorded[-1], peers))
        if all(check.passed for check in agreements):
            timed = _run_as_timed(trainer, steps)
            runs = TrainingComparison(
                native, steps, [*recorded, peers[source][len(steps)]], workload.backend.tolerances
            )
            if runs.is_plain(timed, workload.tolerance.trajectory):
                yield from agreements
                _save(workload, recorded)
                yield from _compare_timed(workload, runs, trainer, timed, f"{source} fp64")
                return
        native = workload.backend.trainer(exact, workload.optimizer)  # a fresh state may differ from a loaded one
    runs = yield from _own_run(workload, native, steps, peers, marks)
    timed = timed or _run_as_timed(trainer, steps)
    yield from _compare_timed(workload, runs, trainer, timed, f"{exact.mode} fp64")


def _own_run(
    workload: NetworkWorkload,
    native: Trainer,
    steps: BatchList,
    peers: Mapping[str, Mapping[int, Trajectory]],
    marks: tuple[int, int],
) -> Generator[Check, None, TrainingComparison]:
    """Make all steps in float64, and prove them by the update formula, or by peers that agree."""
    exact = native.executor
    label = f"{exact.mode} fp64"
    recorded = train(native, steps, early=marks)
    runs = TrainingComparison(native, steps, recorded, workload.backend.tolerances)
    short = runs.runs[marks[1]]
    agreements = [check for run in (short, recorded[-1]) for check in _agreements(workload, run, peers)]
    if not agreements or not all(check.passed for check in agreements):  # peers that agree were proved by the formula
        expected = train_by_formula(exact, workload.optimizer, steps[: marks[1]])
        yield from runs.compare(f"{label} vs the update formula", native, short, expected, FLOAT64, parameters=True)
    for name, known in peers.items():
        if common := runs.runs.keys() & known.keys():
            found, peer = runs.runs[max(common)], known[max(common)]
            yield from runs.compare(f"{label} vs {name} fp64", native, found, peer, FLOAT64, parameters=True)
    _save(workload, recorded)
    return runs


def _agreements(
    workload: NetworkWorkload, found: Trajectory, peers: Mapping[str, Mapping[int, Trajectory]]
) -> Iterator[Check]:
    """Compare a float64 run with the runs of other backends over as many steps."""
    steps = len(found.losses)
    for name, known in peers.items():
        if steps in known:
            what = f"{workload.exact.mode} fp64 vs {name} fp64"
            yield from check_trajectory(what, found, known[steps], tolerance=FLOAT64, parameters=True)


def _save(workload: NetworkWorkload, recorded: Sequence[Trajectory]) -> None:
    """Save the runs that other backends compare theirs with."""
    if workload.case.trajectory:
        least = min(FORMULA_STEPS, len(recorded[-1].losses))
        compared = [run for run in recorded if len(run.losses) >= least]
        save_runs(Path(workload.case.trajectory), str(workload.selection), compared)


def _run_as_timed(trainer: Trainer, steps: BatchList) -> Trajectory:
    """Train in the mode and precision under test; the sampler synchronizes, this does not."""
    (timed,) = train(trainer, steps, back_to_back=True)
    return timed


def _compare_timed(
    workload: NetworkWorkload, runs: TrainingComparison, trainer: Trainer, timed: Trajectory, source: str
) -> Iterator[Check]:
    """Compare the run in the precision under test with the float64 run, and keep what is proved."""
    executor, tolerance = trainer.executor, workload.tolerance.trajectory
    found = runs.runs[len(timed.losses)]
    name = f"{executor.mode} {executor.precision} vs {source}"
    yield from runs.compare(name, trainer, timed, found, tolerance, parameters=False)
    first = runs.first(executor.precision, tolerance)
    end = sampled({name: first.run.parameters[name] for name in workload.network.parameters})
    first = replace(first, run=replace(first.run, parameters=end))
    workload.proved_run = ProvedRun(source, *runs.again(trainer, timed, tolerance, FEEDS), first)
