"""Tune one measurement on one backend within a budget: search, reduce, confirm.

Imports its neighbours and `d5suite.session`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from d5suite.cases.case import Settings
from d5suite.errors import ConfigurationError, D5Error
from d5suite.levels.knobs import BATCH, MODE, TuningKnob
from d5suite.models.ceilings import Ceilings, Roof
from d5suite.session.results import Wanted
from d5suite.session.session import Session
from d5suite.statistics.ratios import Ratio
from d5suite.tuning.confirm import (
    DEFAULT,
    FEWEST_LAUNCHES,
    ROUNDS_S,
    STOCK,
    TUNED,
    Confirmed,
    ablate,
    confirm,
)
from d5suite.tuning.course import known_trials, pareto, trial_of, wrong
from d5suite.tuning.profiles import Tuned, space_of
from d5suite.tuning.proposals import (
    THREADS,
    StepLayers,
    bound_by,
    by_cores,
    by_layers,
    by_memory,
    by_roofline,
    first_of_knobs,
)
from d5suite.tuning.search import FINALISTS, BudgetSpentError, Course, Search, TrialOutcome
from d5suite.tuning.space import Candidate, Change, Space
from d5suite.tuning.trials import Trial, Trials, takes_turns
from d5suite.tuning.whole_runs import run_whole, trials_of

LAUNCHES = 4
"""Fresh launches of each side."""

CONFIRMING = 0.4
"""Most of the budget that is kept for fresh launches, if three of them fit into it."""

FEWEST_TRIALS = 3
"""Fewest trials for which a search is worth its time."""

LAYERS_PART = 0.1
"""Most of the budget that a launch may take which tells the times of layers."""


@dataclass(frozen=True)
class TuningRequest:
    """What the user asks for.

    Attributes
    ----------
    budget_s : float
        Budget for one measurement on one backend, in seconds.
    goal : str
        One of `d5suite.tuning.trials.GOALS`.
    most : int
        Most trials.
    launches : int
        Fresh launches of each side.
    seed : int
    decides_disturbed : bool
        Whether settings are taken although something disturbed the fresh launches.
    further : sequence of TuningKnob
        Knobs that the user allows, such as precisions.
    layers : StepLayers
        What is known of the default's layers.
    read_layers : callable, optional
        Returns `StepLayers` of a record with layer times. If `layers` is empty, a launch of the
        default takes them.
    ceilings : Ceilings, optional
        Ceilings of this machine.
    only : sequence of str
        Names of the knobs to search; empty: all.
    """

    budget_s: float
    goal: str = "time"
    most: int = 200
    launches: int = LAUNCHES
    seed: int = 0
    decides_disturbed: bool = False
    further: Sequence[TuningKnob] = ()
    layers: StepLayers = field(default_factory=StepLayers)
    read_layers: Callable[[Mapping[str, Any]], StepLayers] | None = None
    ceilings: Ceilings | None = None
    only: Sequence[str] = ()


class DefaultKept(Exception):
    """Raised where nothing is taken; says why."""


class Tuning:
    """One measurement on one backend.

    Parameters
    ----------
    wanted : Wanted
    settings : Settings
        Settings of the default candidate.
    plan : TuningRequest
    tell : callable
        Receives what is being done.
    save : callable
        Receives the course after each trial, as JSON values.
    known : mapping, optional
        The course of an earlier run, whose trials are not made again.

    Raises
    ------
    ConfigurationError
        If there is nothing to tune.
    """

    def __init__(
        self, wanted: Wanted, settings: Settings, plan: TuningRequest, tell: Callable[[str], None],
        save: Callable[[dict[str, Any]], None], known: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._firsts: dict[str, Any] = {each.name: each.value_of(each.default) for each in plan.further}
        settings = replace(settings, **self._firsts)
        self._wanted, self.settings, self._tell, self._save = wanted, settings, tell, save
        backend, mode = wanted.selection.backend, wanted.selection.mode
        self._plan = plan = replace(plan, further=list(filter(None, map(self._able, plan.further))))
        self.space = space_of(
            backend, threads=settings.threads, device=settings.device, mode=mode, further=plan.further,
            loader_workers=settings.loader_workers if wanted.measurement.loads else None, ranks=wanted.ranks,
        )  # fmt: skip
        if plan.only:
            self.space = _with_knobs(self.space, plan.only)
        if not self.space.knobs:
            raise ConfigurationError("there is no knob to tune", where=f"{wanted.key} {wanted.selection}")
        self._known: dict[Candidate, list[dict[str, Any]]] = known_trials(known, self.space) if known else {}
        self._earlier = known
        self._trials: list[dict[str, Any]] = []
        self._proposals: list[Candidate] = []
        self._ruled_out: dict[str, dict[str, str]] = {}
        self.course: dict[str, Any] = {
            "case": wanted.case.name, "measurement": wanted.measurement.name, "backend": backend.name, "mode": mode,
            "version": backend.version() or "", "goal": plan.goal, "seed": plan.seed, "budget_s": plan.budget_s,
            "threads": settings.threads, "ranks": str(wanted.ranks or ""), "space": self.space.to_list(),
            "size": self.space.size(), "proposed": [], "ruled_out": [], "trials": self._trials,
        }  # fmt: skip

    def _able(self, knob: TuningKnob) -> TuningKnob | None:
        """Return a knob without precisions that the backend lacks; None if nothing is left."""
        if knob.name != "precision":
            return knob
        able, lacking = [knob.default], ""
        for value in knob.values[1:]:
            try:
                self._wanted.selection.backend.check(device=self.settings.device, precision=value)
                able.append(value)
            except D5Error as error:
                lacking = error.what
                self._tell(f"precision {value} is left out: {lacking}")
        return replace(knob, values=tuple(able)) if len(able) > 1 else None

    def run(self) -> Tuned | None:
        """Search, reduce and confirm; return what is taken, or None if the default is kept.

        Raises
        ------
        ConfigurationError
            If the default itself cannot be measured, or has no figure of the goal.
        KeyboardInterrupt
            After Ctrl-C; the trials so far are saved.
        """
        start = time.monotonic()
        self._deadline = start + self._plan.budget_s
        memory = self.settings.memory_bytes // 2 if takes_turns(self._wanted) else self.settings.memory_bytes
        session = Session(replace(self.settings, memory_bytes=memory))
        self._launches = itertools.count(1)
        try:
            return self._confirmed(session, self._search(session))
        except DefaultKept as kept:
            self.course["decision"] = {"taken": False, "reason": str(kept)}
            self._tell(f"{kept}; the default is kept")
            return None
        finally:
            self.course["seconds"] = time.monotonic() - start
            self._save(self.course)
            session.close()

    def _search(self, session: Session) -> Course:
        with trials_of(session, self._wanted, Change(), self._launches, goal=self._plan.goal, seed=self._plan.seed,
                       tell=self._tell) as trials:  # fmt: skip
            first = self._made(trials, self.space.default, math.inf)
            if first.status != "measured":
                raise ConfigurationError(f"the default itself fails: {first.reason}", where=self._wanted.key)
            self._ask_models(session, trials.record, first)
            prepared = trials.prepared_s or first.prepared_s
            sides = 2 + (self._stock() is not None)
            launch_s = sides * (prepared + trials.ended_s) + ROUNDS_S
            self._reserve_s = self._launches_in(self._plan.budget_s, launch_s) * launch_s + 2 * first.seconds
            spent_s = time.monotonic() - self._deadline + self._plan.budget_s
            fits = 1 + max(0, int((self._plan.budget_s - spent_s - self._reserve_s) / first.seconds))
            most, fewest = self._plan.most + len(self._known), min(FEWEST_TRIALS, self.space.size() - 1)
            if fits + len(self._known) <= fewest:
                least_s = self._least_s(spent_s + (fewest + 2) * first.seconds, launch_s)
                raise DefaultKept(
                    f"the budget is too small to find anything: {math.ceil(least_s)} s is the least, and more is better"
                )
            fits = min(self._plan.most, fits)
            again = 2 if fits >= 20 else 1 if fits >= 8 else 0
            again_s = again * FINALISTS * first.seconds
            count = fits - again * FINALISTS + len(self._known)
            self._tell(
                f"{self.space.size()} candidates of {len(self.space.knobs)} knobs; about {count} trials of "
                f"{first.seconds:.0f} s fit into the budget"
            )
            first_outcome = iter([first])

            def measure(candidate: Candidate, bar: float) -> TrialOutcome:
                keep_s = again_s if bar < math.inf else 0.0  # finalists have no bar
                trial = next(first_outcome, None) or self._trial(trials, candidate, bar, keep_s)
                return TrialOutcome(trial.status, trial.value, trial.reason)

            search = Search(self.space, measure, limit=count, most=most, seed=self._plan.seed,
                            proposals=self._proposals, again=again, rules_out=self._why_ruled_out)  # fmt: skip
            found = search.run()
            self.course["notes"] = trials.notes
        return found

    def _launches_in(self, budget_s: float, launch_s: float) -> int:
        """Return the number of fresh launches that fit into a budget."""
        return min(self._plan.launches, max(FEWEST_LAUNCHES, int(CONFIRMING * budget_s / launch_s)))

    def _least_s(self, search_s: float, launch_s: float) -> float:
        """Return the least budget for a search and the fresh launches; a larger budget has more."""
        count = FEWEST_LAUNCHES
        while (more := self._launches_in(search_s + count * launch_s, launch_s)) > count:
            count = more
        return search_s + count * launch_s

    def _ask_models(self, session: Session, record: Mapping[str, Any], first: Trial) -> None:
        """Let models propose the first candidates, and rule out what cannot win or cannot run."""
        settings, seconds = session.settings, first.figures["time_s"]
        layers = self._plan.layers if self._plan.layers.shares else self._measured_layers(session, first.seconds)
        if not takes_turns(self._wanted):  # their seconds are of an item, and counted work is of a step
            layers = replace(layers, works=())
        roofs: dict[int, Roof | str] = {}
        if self._plan.ceilings is not None:
            counts = self.space.knobs[self.space.places[THREADS]].values if THREADS in self.space.places else ()
            roofs = {
                each: self._plan.ceilings.roof(device=settings.device, precision=settings.precision, threads=each)
                for each in {settings.threads, *map(int, counts)}
            }  # fmt: skip
        bound = bound_by(layers, seconds, roofs.get(settings.threads))
        self.space, for_layers = by_layers(self.space, layers.shares, bound)
        if self._earlier:
            self._known = known_trials(self._earlier, self.space)
        batches, too_large = by_memory(self.space, record, settings.memory_bytes)
        self._ruled_out = {BATCH: too_large, THREADS: by_roofline(self.space, layers, seconds, roofs)}
        proposed = [
            *((each, "as many threads as cores, or half of them") for each in by_cores(self.space)),
            *((each, self._said_of_layers(name, layers, bound))
              for name, each in zip(for_layers, first_of_knobs(self.space, for_layers), strict=True)),
            *((each, "the largest batch that fits, by the memory model") for each in batches),
        ]  # fmt: skip
        proposed = [each for each in proposed if not self._why_ruled_out(each[0])]
        self._proposals = [each for each, _ in proposed]
        self.course |= {
            "space": self.space.to_list(), "shares": dict(layers.shares), "bound": bound,
            "proposed": [{"knobs": self.space.differences(each), "reason": why} for each, why in proposed],
            "ruled_out": [
                {"knob": name, "value": value, "reason": why}
                for name, values in self._ruled_out.items() for value, why in values.items()
            ],
        }  # fmt: skip
        for part in self.course["proposed"]:
            self._tell(f"tried first: {_in_words(part['knobs'])}: {part['reason']}")
        for part in self.course["ruled_out"]:
            self._tell(f"left out: {part['knob']}={part['value']}: {part['reason']}")

    def _said_of_layers(self, name: str, layers: StepLayers, bound: str) -> str:
        knob = self.space.knobs[self.space.places[name]]
        own = {each: layers.shares[each] for each in knob.layers if each in layers.shares}
        if own:
            return f"{', '.join(f'{each} takes {share:.0%}' for each, share in own.items())} of the step"
        return f"the step is bound by {bound}, by its roofline"

    def _measured_layers(self, session: Session, trial_s: float) -> StepLayers:
        """Return the layers of the default's step from a launch, if that is possible and cheap."""
        backend, read = self._wanted.selection.backend, self._plan.read_layers
        if read is None or not self._wanted.measurement.takes_layers or "profile" in backend.absent:
            return StepLayers()
        if trial_s > LAYERS_PART * self._plan.budget_s or not any(knob.layers for knob in self.space.knobs):
            return StepLayers()
        passes = {**self.settings.passes, "layers": None}
        found = run_whole(session.varied(passes=passes), self._wanted, Change(), next(self._launches))
        return read(found.record) if found.record is not None else StepLayers()

    def _why_ruled_out(self, candidate: Candidate) -> str:
        """Return why a candidate is not tried; threads count at the default's batch only."""
        values = self.space.differences(candidate)
        for name, reasons in self._ruled_out.items():
            if values.get(name) in reasons and (name == BATCH or not {BATCH, "precision"} & values.keys()):
                return reasons[values[name]]
        return ""

    def _trial(self, trials: Trials, candidate: Candidate, bar: float, keep_s: float) -> Trial:
        """Make a trial unless an earlier run has made it, or no time is left beside `keep_s`."""
        waiting = self._known.get(candidate)
        if waiting:
            content = waiting.pop(0)
            self._trials.append(content)
            return trial_of(content)
        spent = [each["seconds"] for each in self._trials]
        if time.monotonic() + max(spent[-3:], default=0.0) > self._deadline - self._reserve_s - keep_s:
            raise BudgetSpentError
        return self._made(trials, candidate, bar)

    def _made(self, trials: Trials, candidate: Candidate, bar: float) -> Trial:
        changes = self.space.differences(candidate)
        trial = trials.measure(self.space.change(candidate), bar)
        content = {"knobs": changes, "environment": dict(self.space.change(candidate).environment), **trial.to_dict()}
        self._trials.append(content)
        self._save(self.course)
        named = _in_words(changes) or "the default against itself"
        said = trial.reason if math.isnan(trial.value) else f"{math.exp(trial.value):.3f} times the default"
        if trial.status == "wrong" and not math.isnan(trial.time):
            said = f"{'faster but ' * (trial.time < 0)}wrong, {math.exp(trial.time):.3f} times as long: {trial.reason}"
        self._tell(f"trial {len(self._trials)}: {named}: {said}" + f" ({trial.status})" * (trial.status != "measured"))
        return trial

    def _stock(self) -> Change | None:
        """Return the framework as it comes, if that is another mode than the default's."""
        selection = self._wanted.selection
        has = STOCK in selection.backend.modes and selection.mode != STOCK
        return Change(STOCK) if has else None

    def _confirmed(self, session: Session, found: Course) -> Tuned:
        self.course["wrong"] = wrong(self._trials)
        self.course["pareto"] = pareto(self._trials)
        try:
            best = self._reduced(session, found.best)
        except DefaultKept:
            if self._stock() is not None:  # the default is what the user gets: say what it gains
                self._launched(session, self.space.default)
            raise
        return self._decided(best, self._launched(session, best))

    def _reduced(self, session: Session, best: Candidate) -> Candidate:
        """Return the best candidate without the knobs that give nothing."""
        if best == self.space.default:
            made = len(self._trials) - 1
            others = self.space.size() - 1
            only = f"; the budget had time for {made} of {others} others" if made < min(FEWEST_TRIALS, others) else ""
            raise DefaultKept(f"no candidate was better than the default{only}")
        if len(self.space.differences(best)) > 1:
            with trials_of(
                session, self._wanted, self.space.change(best), self._launches, seed=self._plan.seed + 1,
                goal=self._plan.goal,
            ) as back:  # fmt: skip
                until = self._deadline - self._reserve_s / 2
                try:
                    best, parts = ablate(self.space, best, back, until, self._tell)
                except ConfigurationError as error:
                    raise DefaultKept(f"the best candidate fails in a fresh launch: {error.what}") from None
            self.course["ablation"] = parts
            if best == self.space.default:
                raise DefaultKept("no knob of the best candidate gives anything by itself")
        return best

    def _launched(self, session: Session, best: Candidate) -> Confirmed:
        """Measure the default, a candidate and the framework as it comes in fresh launches."""
        goal, sides, stock = self._plan.goal, {DEFAULT: Change()}, self._stock()
        if best != self.space.default:
            sides[TUNED] = self.space.change(best)
        if stock is not None:
            sides[STOCK] = stock
        fresh = confirm(session, self._wanted, sides, self._launches, count=self._plan.launches,
                        deadline=self._deadline, tell=self._tell)  # fmt: skip
        ratios = {f"versus_{over}": fresh.ratio(TUNED, over) for over in (DEFAULT, STOCK)}
        if not fresh.failure and (not fresh.disturbed or self._plan.decides_disturbed):
            ratios["default_versus_stock"] = fresh.ratio(DEFAULT, STOCK)
        ratios[f"{goal}_versus_default"] = None if fresh.failure else fresh.goal_ratio(goal, self._wanted)
        self.course["confirmed"] = {
            "knobs": self.space.differences(best), "rounds": fresh.rounds,
            **{name: _ratio(ratio) for name, ratio in ratios.items() if ratio is not None},
            "failure": fresh.failure, "disturbed": fresh.disturbed,
        }  # fmt: skip
        return fresh

    def _decided(self, best: Candidate, fresh: Confirmed) -> Tuned:
        goal, changed = self._plan.goal, self.space.differences(best)
        ratios = {over: fresh.ratio(TUNED, over) for over in (DEFAULT, STOCK)}
        reached = None if fresh.failure else fresh.goal_ratio(goal, self._wanted)
        if fresh.failure:
            raise DefaultKept(f"a fresh launch failed: {fresh.failure}")
        if fresh.disturbed and not self._plan.decides_disturbed:
            raise DefaultKept(f"the machine was disturbed, so that nothing follows: {fresh.disturbed}")
        if why := fresh.why_not(goal, self._wanted):
            raise DefaultKept(why)
        ratio = reached or ratios[DEFAULT]
        assert ratio is not None
        if len(changed) == 1 and not self.course.get("ablation"):
            (name, value), inverse = next(iter(changed.items())), [1 / ratio.value, 1 / ratio.high, 1 / ratio.low]
            part = {"knob": name, "value": value, "without": inverse[0], "interval": inverse[1:], "stays": True}
            self.course["ablation"] = [part]  # taking the only knob back is the default
        self.course["decision"] = {"taken": True, "reason": ""}
        known, selection, knobs = self.course, self._wanted.selection, dict(changed)
        if selection.mode != selection.backend.default_mode:
            knobs.setdefault(MODE, selection.mode)
        for name, value in self._firsts.items():  # the user's, and no default elsewhere
            knobs.setdefault(name, str(value))
        names = ("case", "measurement", "backend", "version", "goal")
        figures = {name: each for name, each in known["confirmed"].items() if "versus" in name}
        tuned = Tuned(**{name: known[name] for name in names}, knobs=knobs, figures=figures)
        for over, each in ratios.items():
            if each is not None:
                name = "the framework as it comes (stock)" if over == STOCK else "d5suite's default"
                self._tell(
                    f"tuned: {each.value:.3f} times as long as {name} ({each.low:.3f} to {each.high:.3f}, "
                    f"{each.n} fresh launches)"
                )
        if reached is not None:
            self._tell(f"tuned: {reached.value:.3f} times the {goal} ({reached.low:.3f} to {reached.high:.3f})")
        return tuned


def _ratio(ratio: Ratio) -> list[float]:
    return [round(each, 5) for each in (ratio.value, ratio.low, ratio.high) if math.isfinite(each)]


def _in_words(knobs: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in knobs.items())


def _with_knobs(space: Space, names: Sequence[str]) -> Space:
    """Return a space of some knobs only, without those that depend on others."""
    if unknown := [name for name in names if name not in space.places]:
        raise ConfigurationError(f"there is no knob {unknown[0]!r} here", where="--knobs",
                                 hint=f"Knobs: {', '.join(space.places)}.")  # fmt: skip
    return Space(tuple(knob for knob in space.knobs if knob.name in names and set(knob.when) <= set(names)))
