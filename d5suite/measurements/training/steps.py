"""Timed steps that update a network's parameters."""

from __future__ import annotations

from collections.abc import Iterable

from d5suite.levels.network import Arrays
from d5suite.measurements.base import Phase, Step
from d5suite.measurements.network.steps import KeptAnswers, NetworkStep, training_feeds, whole_feeds
from d5suite.measurements.training.kept_steps import KeptSteps
from d5suite.validate.training.updates import sampled_parameters
from d5suite.workloads.network import NetworkWorkload

WHOLE = "forward, backward and update"
"""What `Trainer.step` does, as a recording names it: it may be one compiled unit."""

COPIES = 12
"""Copies of parameters and state, at most, that `KeptSteps` and reading them hold at a time."""


class TrainerStep(Step):
    """A step of the trainer that the sampler does not time.

    Attributes
    ----------
    answers : KeptAnswers
        Losses of timed steps, where they are kept.
    updates : int
        Timed updates since the initial state.
    """

    updates = 0

    def __init__(self, workload: NetworkWorkload) -> None:
        self.workload = workload
        self.answers = KeptAnswers(workload.network.require_loss()[1:])
        self.items = workload.case.batch_size
        self.macs = workload.macs
        self.built_s = workload.built_s(trainer=True)

    def run(self) -> object:
        return self.workload.trainer.step(self.workload.feed())

    def synchronize(self) -> None:
        self.workload.executor.synchronize()

    def phases(self) -> Iterable[Phase]:
        yield from super().phases()
        yield Phase(self.workload.trainer, "step", WHOLE)
        yield Phase(self.workload.executor, "feed", "feed", role="data_transfer")

    def reset(self) -> None:
        self.workload.restart()


class TrainingStep(NetworkStep):
    """One update of the parameters per training batch, from the initial state.

    Attributes
    ----------
    random : mapping of str to numpy.ndarray
        The state of Dropout's generator before timing; empty without Dropout.
    early : mapping of str to numpy.ndarray or None
        Parameters after as many timed steps as the proof's first run has, `sampled`. None if the
        timed steps differ from the proof's.
    kept : KeptSteps
        Some timed steps, to be made again.
    """

    computes = WHOLE

    def __init__(self, workload: NetworkWorkload) -> None:
        super().__init__(workload, workload.trainer.step, training_feeds(workload), whole=whole_feeds(workload))
        self.built_s = workload.built_s(trainer=True)
        self.random: Arrays = {}
        self.early: Arrays | None = None
        self.kept = KeptSteps(workload.trainer)

    @property
    def updates(self) -> int:
        """Timed updates since the initial state."""
        return self.answers.calls

    def reset(self) -> None:
        self._forget()
        self.workload.restart()

    def begin(self) -> None:
        self.reset()
        self.early = None
        self.kept = KeptSteps(self.workload.trainer)
        executor = self.workload.executor
        self.random = executor.random_state() if executor.drops else {}

    def next_input(self) -> None:
        super().next_input()
        self.kept.before(self.updates + 1, self.turn)

    def keep_answer(self) -> None:
        super().keep_answer()
        if self.answer is not None:
            self.kept.after(self.updates, self.answer)
        executor, proved = self.workload.executor, self.workload.proved_run
        # In fp16 steps are repeated, and a run that amplifies less has its own learning rates.
        same = executor.precision != "fp16" and not proved.first.rates
        if self.early is None and same and self.updates == len(proved.first.run.losses):
            self.early = sampled_parameters(executor)

    def kept_bytes(self) -> int:
        held = self.memory_by_definition()
        return super().kept_bytes() + COPIES * (held["parameters_bytes"] + held["optimizer_state_bytes"])

    def series(self) -> dict[str, list[float]]:
        losses = self.answers.losses(self.workload.executor)
        return {"final_losses": [found[-1] for _, found in sorted(losses.items())]}

    def memory_by_definition(self) -> dict[str, int]:
        return self.workload.memory_by_definition(gradients=True, optimizer=True)
