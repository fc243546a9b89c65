"""The search: which candidate is measured next. It knows nothing of workers.

1. The default itself, which shows the noise, and what others propose.
2. Screening. Every value of every knob is tried once: knob by knob from the best candidate so far,
   if that leaves half of the trials for the rest. Otherwise in groups: a candidate changes all
   knobs that are left at once, each to another value, until every value was in a group. A group
   that is faster is adopted. One that is slower or fails is divided, because a good value may hide
   in it: group testing, D. Du and F. Hwang, "Combinatorial Group Testing and Its Applications"
   (2000).
3. optuna's tree-structured Parzen estimator (TPE), which knows all trials, in turn with changes of
   one knob of the best candidate: knobs interact. A space that fits into the trials is tried whole.
4. The best few are measured again: the fastest of many is also the luckiest.

Imports its neighbours and optuna.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from d5suite.errors import ConfigurationError
from d5suite.tuning.space import Candidate, Space

if TYPE_CHECKING:
    import optuna

GAIN = 0.005
"""Relative gain from which on a candidate is adopted as the best one."""

FINALISTS, AGAIN = 3, 2
"""Candidates that are measured again at the end, and how often."""

SCREENING = 0.5
"""Part of the trials that knob after knob may take."""

REPEATED = 5
"""Candidates at random in a row that are all known: then the space is about spent."""


class BudgetSpentError(Exception):
    """Raised by what measures: there is no time for another candidate."""


@dataclass(frozen=True)
class TrialOutcome:
    """What a trial found.

    Attributes
    ----------
    status : {"measured", "pruned", "wrong", "failed"}
        Pruned: slower than the best one, so that it ended early. Wrong: its answer was.
    value : float
        Logarithm of the goal's ratio, the candidate's over the default's; NaN if there is none.
    reason : str
        Why it failed.
    """

    status: str
    value: float = math.nan
    reason: str = ""

    @property
    def counts(self) -> bool:
        """Whether the candidate may be taken."""
        return self.status == "measured"


Measure = Callable[[Candidate, float], TrialOutcome]
"""Measures a candidate, given the best value so far; a slower one may end early."""


@dataclass
class Course:
    """All trials of a search, in order.

    Attributes
    ----------
    space : Space
    trials : list of (Candidate, TrialOutcome, str)
        With the stage that asked for each.
    """

    space: Space
    trials: list[tuple[Candidate, TrialOutcome, str]] = field(default_factory=list)

    def value(self, candidate: Candidate) -> float:
        """Return the mean of a candidate's values; infinite if it may not be taken."""
        own = [outcome for each, outcome, _ in self.trials if each == candidate]
        if not own or not all(each.counts for each in own):
            return math.inf
        return sum(each.value for each in own) / len(own)

    @property
    def candidates(self) -> list[Candidate]:
        """The different candidates, in the order of their first trial."""
        return list(dict.fromkeys(each for each, _, _ in self.trials))

    def ranked(self) -> list[Candidate]:
        """Return the valid candidates, the fastest first; on a tie, fewer changes first."""
        sound = [each for each in self.candidates if self.value(each) < math.inf]
        return sorted(sound, key=lambda each: (self.value(each), len(self.space.differences(each))))

    @property
    def best(self) -> Candidate:
        """The fastest candidate, of those measured again if any were; the default without one."""
        again = {each for each, _, stage in self.trials if stage == "again"}
        found = [each for each in self.ranked() if not again or each in again]
        return next(iter(found), self.space.default)


class Search:
    """One search.

    Parameters
    ----------
    space : Space
    measure : callable
        May raise `BudgetSpentError`.
    limit : int
        Trials for which the search is laid out, those of the finalists not counted.
    most : int, optional
        Most trials, if `measure` ends the search when its time is spent; by default `limit`.
    seed : int
    proposals : sequence of Candidate
        Tried first.
    rules_out : callable, optional
        Returns why a candidate is never tried; empty if it may be.
    again : int
        How often the best few are measured again.

    Raises
    ------
    ConfigurationError
        If optuna is not installed.
    """

    def __init__(
        self, space: Space, measure: Measure, *, limit: int, most: int | None = None, seed: int = 0,
        proposals: Sequence[Candidate] = (), again: int = AGAIN,
        rules_out: Callable[[Candidate], str] = lambda candidate: "",
    ) -> None:  # fmt: skip
        self.course = Course(space)
        self._space, self._measure, self._limit, self._again = space, measure, limit, again
        self._most = limit if most is None else most
        self._proposals, self._random, self._seed = proposals, random.Random(seed), seed
        self._study = _study(seed)
        self._best, self._best_value, self._rules_out = space.default, 0.0, rules_out

    def run(self) -> Course:
        """Search until the trials or the budget are spent."""
        try:
            self._try(self._space.default, "default", math.inf)
            for each in self._proposals:
                self._try(each, "proposed")
            if self._space.size() <= self._limit:
                self._whole()
            else:
                self._screen()
                self._model()
        except (_LimitReachedError, BudgetSpentError):
            pass
        try:
            for _ in range(self._again):
                for each in self.course.ranked()[:FINALISTS]:
                    self._record(each, "again", math.inf)
        except BudgetSpentError:
            pass
        return self.course

    def _record(self, candidate: Candidate, stage: str, bar: float) -> TrialOutcome:
        outcome = self._measure(candidate, bar)
        self.course.trials.append((candidate, outcome, stage))
        return outcome

    def _try(self, candidate: Candidate, stage: str, bar: float | None = None) -> float:
        """Measure a candidate unless it is known or ruled out; return its value, else infinite."""
        if self._is_known(candidate):
            return self.course.value(candidate)
        if len(self.course.trials) >= self._most:
            raise _LimitReachedError
        outcome = self._record(candidate, stage, self._best_value if bar is None else bar)
        self._tell(candidate, outcome)
        if outcome.counts and outcome.value < self._best_value - GAIN:
            self._best, self._best_value = candidate, outcome.value
        return outcome.value if outcome.counts else math.inf

    def _is_known(self, candidate: Candidate) -> bool:
        return candidate in self.course.candidates or bool(self._rules_out(candidate))

    def _screen(self) -> None:
        moves = list(self._space.moves(self._best))
        if len(self.course.trials) + len(moves) <= SCREENING * self._limit:
            self._one_by_one()
        else:
            self._groups()

    def _one_by_one(self) -> None:
        for knob in self._space.knobs:
            for value in knob.values:
                other = self._space.changed(self._best, **{knob.name: value})
                if other[self._space.places[knob.name]] == value:
                    self._try(other, "screened")

    def _groups(self) -> None:
        """Try all values in groups; adopt fast ones, and divide slow ones."""
        waiting = deque(self._rows())
        while waiting:
            group = waiting.popleft()
            candidate = self._space.changed(self._best, **group)
            group = self._space.differences(candidate, self._best)
            before = self._best_value
            if not group:
                continue
            value = self._try(candidate, "group")
            if len(group) > 1 and value > before + GAIN:
                names = sorted(group)
                self._random.shuffle(names)
                middle = len(names) // 2
                waiting += [{name: group[name] for name in half} for half in (names[:middle], names[middle:])]

    def _rows(self) -> Iterator[dict[str, str]]:
        """Yield groups in which every value but the present ones is once."""
        base = dict(zip(self._space.places, self._best, strict=True))
        left = {knob.name: [value for value in knob.values if value != base[knob.name]] for knob in self._space.knobs}
        for values in left.values():
            self._random.shuffle(values)
        for number in range(max(map(len, left.values()), default=0)):
            yield {name: values[number] for name, values in left.items() if number < len(values)}

    def _model(self) -> None:
        """Ask TPE, in turn with changes of one knob of the best candidate."""
        known = 0
        while known <= REPEATED:
            neighbours = [each for each in self._space.moves(self._best) if not self._is_known(each)]
            if neighbours:
                self._try(self._random.choice(neighbours), "neighbour")
            candidate = self._ask()
            if self._is_known(candidate):
                candidate = self._any()
            known = known + 1 if self._is_known(candidate) and not neighbours else 0
            self._try(candidate, "model")

    def _any(self) -> Candidate:
        """Return a candidate at random."""
        return self._space.complete({knob.name: self._random.choice(knob.values) for knob in self._space.knobs})

    def _whole(self) -> None:
        for candidate in self._space.candidates():
            self._try(candidate, "whole")

    def _ask(self) -> Candidate:
        """Return the candidate that optuna proposes; a known one is told at once."""
        trial, values = self._study.ask(), dict[str, str]()
        for knob in self._space.knobs:
            active = self._space.is_active(knob, values)
            values[knob.name] = trial.suggest_categorical(knob.name, knob.values) if active else knob.default
        candidate = self._space.complete(values)
        self._study.tell(trial, state=_states().FAIL)  # `_tell` adds it with its outcome
        return candidate

    def _tell(self, candidate: Candidate, outcome: TrialOutcome) -> None:
        """Add a trial to optuna's study; one without a value as pruned at once."""
        import optuna

        values = dict(zip(self._space.places, candidate, strict=True))
        active = [knob for knob in self._space.knobs if self._space.is_active(knob, values)]
        made: dict[str, Any] = {"state": _states().PRUNED, "intermediate_values": {0: WORST}}
        if outcome.counts:
            made = {"state": _states().COMPLETE, "value": outcome.value}
        elif outcome.status == "pruned":
            made["intermediate_values"] = {1: outcome.value}
        self._study.add_trial(
            optuna.trial.create_trial(
                params={knob.name: values[knob.name] for knob in active},
                distributions={knob.name: optuna.distributions.CategoricalDistribution(knob.values) for knob in active},
                **made,
            )
        )


WORST = 10.0
"""Logarithm of a ratio, told for a candidate that failed or was wrong."""


class _LimitReachedError(Exception):
    """There are no trials left."""


def _states() -> Any:
    import optuna

    return optuna.trial.TrialState


def _study(seed: int) -> optuna.Study:
    """Return optuna's study; `search` says what it is asked."""
    try:
        import optuna
    except ModuleNotFoundError:
        raise ConfigurationError(
            "the search needs optuna, which is not installed", hint="pip install 'd5suite[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of multivariate and group
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=1)
    return optuna.create_study(sampler=sampler)
