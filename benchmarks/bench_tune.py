"""``d5suite tune`` beside other ways to search, on the same space and with the same time.

===========  =====================================================================================
d5suite      `d5suite.tuning.search` with trials in pairs, as ``d5suite tune``
random       candidates at random, each by the median of a run of its own
tpe          optuna's TPE with its own settings, each candidate by the median of a run of its own
launcher     PyTorch's ``torch.backends.xeon.run_cpu``, which sets threads, affinity, allocator and
             OpenMP's variables by rules; one candidate, with no search
===========  =====================================================================================

Every way that finds something is then measured in the same fresh launches, in turn with the
default, so that its own figures do not count. ``--ways`` makes a part of it. ``--start`` begins
from a bad point instead, and asks how near to a known good one the search of d5suite comes back::

    python -m benchmarks.bench_tune --network lenet --backend torch --budget 60 --ways d5suite,tpe
    python -m benchmarks.bench_tune --network lenet --backend torch --start one-thread
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import optuna

from d5suite.cases.case import Settings
from d5suite.commands.tune import chosen_targets
from d5suite.errors import ConfigurationError
from d5suite.files import write_json
from d5suite.instruments.threads import allowed_cpus
from d5suite.pytest_plugin.selected_tests import BenchmarkSelection
from d5suite.session.results import Wanted
from d5suite.session.session import Session
from d5suite.tuning.confirm import DEFAULT, confirm
from d5suite.tuning.profiles import space_of
from d5suite.tuning.proposals import by_cores
from d5suite.tuning.search import BudgetSpentError, Search, TrialOutcome
from d5suite.tuning.space import Candidate, Change, Space
from d5suite.tuning.trials import TrialJob
from d5suite.tuning.whole_runs import trials_of

RUN_S = 2.0
"""Seconds that a run of its own takes samples for, about as a trial does of both sides."""

FEWEST = 4
"""Fewest trials of a search, the default's among them, that say anything about the search."""

RECIPES = Path(__file__).parents[1] / "recipes"


class Start(NamedTuple):
    """A bad point, what is good there, and how many processes compute beside it all the time."""

    settings: Callable[[Settings, int], Settings]
    good: Callable[[int], Change]
    beside: int = 0


STARTS = {
    "one-thread": Start(lambda own, cpus: replace(own, threads=1), lambda cpus: Change(settings={"threads": cpus})),
    "oversubscribed": Start(
        lambda own, cpus: replace(own, threads=8 * cpus), lambda cpus: Change(settings={"threads": cpus})
    ),
    "spinning": Start(
        lambda own, cpus: replace(
            own, threads=cpus, environment={**own.environment, "OMP_WAIT_POLICY": "active"}
        ),
        lambda cpus: Change(environment={"OMP_WAIT_POLICY": "passive"}),
        beside=1,
    ),
}  # fmt: skip
"""Bad points by name: where factors are won in the field."""


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def by_pairs(session: Session, wanted: Wanted, space: Space, budget_s: float, launches: itertools.count[int]) -> Change:
    """Search as ``d5suite tune`` does, without the confirmation."""
    end = time.monotonic() + budget_s
    with trials_of(session, wanted, Change(), launches) as trials:
        spent: list[float] = []
        again_s = 0.0

        def measure(candidate: Candidate, bar: float) -> TrialOutcome:
            keep_s = 0.0 if bar == math.inf else again_s
            if spent and time.monotonic() + spent[-1] > end - keep_s:
                raise BudgetSpentError
            trial = trials.measure(space.change(candidate), bar)
            spent.append(trial.seconds)
            tell(f"  {space.differences(candidate) or 'default'}: {trial.status} {math.exp(trial.value):.3f}")
            return TrialOutcome(trial.status, trial.value, trial.reason)

        measure(space.default, math.inf)
        again_s = 3 * spent[0]
        search = Search(space, measure, limit=max(3, int(budget_s / spent[0]) - 3), again=1, proposals=by_cores(space))
        course = search.run()
    tell(f"  {len(spent)} trials")
    if len(spent) < min(FEWEST, space.size()):
        raise ConfigurationError(
            f"{budget_s:g} s are too few: a trial takes {spent[0]:.0f} s", where="--budget",
            hint=f"Give {2 * FEWEST * spent[0]:.0f} s or more.",
        )  # fmt: skip
    return space.change(course.best)


def by_medians(
    session: Session, wanted: Wanted, space: Space, budget_s: float, launches: itertools.count[int],
    propose: Callable[[dict[Candidate, float]], Candidate],
) -> Change:  # fmt: skip
    """Measure what is proposed, each candidate by the median of a run of its own."""
    end, known = time.monotonic() + budget_s, dict[Candidate, float]()
    last_s = 0.0
    while not known or time.monotonic() + last_s < end:
        candidate, start = propose(known), time.monotonic()
        job = TrialJob(session, wanted, space.change(candidate), next(launches))
        worker = job.ready()
        known[candidate] = math.inf
        if worker is not None:
            count = max(3, int(RUN_S / max(worker.sample_s, 1e-6)))
            worker.take(min(count, 2000))
            worker.finish()
            result = job.end()
            if result.record is not None:
                known[candidate] = result.record["median_s"]
        job.close()
        last_s = time.monotonic() - start
    tell(f"  {len(known)} trials")
    return space.change(min(known, key=lambda each: known[each]))


def at_random(space: Space) -> Callable[[dict[Candidate, float]], Candidate]:
    draw = random.Random(0)

    def propose(known: dict[Candidate, float]) -> Candidate:
        if not known:
            return space.default
        return space.complete({knob.name: draw.choice(knob.values) for knob in space.knobs})

    return propose


def by_tpe(space: Space) -> Callable[[dict[Candidate, float]], Candidate]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    asked: list[tuple[optuna.trial.Trial, Candidate]] = []

    def propose(known: dict[Candidate, float]) -> Candidate:
        if asked:
            trial, candidate = asked.pop()
            value = known[candidate]
            study.tell(trial, value if math.isfinite(value) else 1e3)
        trial = study.ask()
        candidate = space.complete(
            {knob.name: trial.suggest_categorical(knob.name, knob.values) for knob in space.knobs}
        )
        asked.append((trial, candidate))
        return candidate

    return propose


def by_launcher() -> Change | None:
    """Return what PyTorch's launcher would set for one instance on this machine."""
    code = "import os; print('\\n'.join(f'{k}={v}' for k, v in os.environ.items()))"
    done = subprocess.run(
        [sys.executable, "-m", "torch.backends.xeon.run_cpu", "--ninstances", "1", "--no-python", sys.executable, "-c",
         code],
        capture_output=True, text=True,
    )  # fmt: skip
    names = ("LD_PRELOAD", "OMP_PROC_BIND", "OMP_SCHEDULE", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_BLOCKTIME")
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if line.partition("=")[0] in names)
    tell(f"  launcher: exit {done.returncode}, {found or done.stderr.strip().splitlines()[-1:]}")
    return Change(environment=found) if done.returncode == 0 and found else None


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many CPUs busy meanwhile, as a loader does."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


WAYS = ("d5suite", "random", "tpe", "launcher")


def recipe_of(network: str) -> str:
    """Return the recipe whose file name has a network's name.

    Raises
    ------
    ConfigurationError
        If there is none.
    """
    found = sorted(path for path in RECIPES.glob(f"test_*{network}*.py"))
    if not found:
        raise ConfigurationError(f"no recipe has {network!r} in its name", where="--network")
    return str(found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--network", help="instead of a recipe: a part of its file's name, such as lenet")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of each search")
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--measurement")
    parser.add_argument("--knobs", help="search these only")
    parser.add_argument("--ways", default=",".join(WAYS), help="which of them")
    parser.add_argument("--start", choices=STARTS, help="begin from a bad point, with d5suite only")
    parser.add_argument("--json", type=Path, help="where the ratios go")
    options = parser.parse_args()
    ways = options.ways.split(",")
    if not (options.recipe or options.network) or set(ways) - set(WAYS):
        parser.error(f"give a recipe or --network, and ways among {', '.join(WAYS)}")
    recipe = options.recipe or recipe_of(options.network)
    selected = BenchmarkSelection([recipe], [f"--backend={options.backend}"]).here
    assert selected.settings is not None
    wanted = chosen_targets(selected.targets, options.measurement)[0].wanted
    settings = replace(selected.settings, memory_bytes=selected.settings.memory_bytes // 4)
    start = STARTS[options.start] if options.start else None
    cpus = len(allowed_cpus())
    if start is not None:
        settings, ways = start.settings(settings, cpus), ["d5suite"]
    space = space_of(wanted.selection.backend, threads=settings.threads, mode=wanted.selection.mode)
    if options.knobs:
        names = options.knobs.split(",")
        space = Space(tuple(each for each in space.knobs if each.name in names and set(each.when) <= set(names)))
    session, launches = Session(settings), itertools.count(1)
    print(f"{wanted.key} {wanted.selection}: {space.size()} candidates, {options.budget:g} s for each search")
    found: dict[str, Change] = {}
    searches: dict[str, Callable[[], Change | None]] = {
        "d5suite": lambda: by_pairs(session, wanted, space, options.budget, launches),
        "random": lambda: by_medians(session, wanted, space, options.budget, launches, at_random(space)),
        "tpe": lambda: by_medians(session, wanted, space, options.budget, launches, by_tpe(space)),
        "launcher": by_launcher if wanted.selection.backend.name == "torch" else lambda: None,
    }
    try:
        with busy(start.beside if start else 0):
            for name in ways:
                tell(name)
                change = searches[name]()
                if change is not None:
                    found[name] = change
                    print(f"{name}: {change.mode or ''} {dict(change.settings)} {dict(change.environment)}", flush=True)
            if start is not None:
                found["good"] = start.good(cpus)
            sides = {DEFAULT: Change(), **found}
            fresh = confirm(session, wanted, sides, launches, count=options.launches, deadline=math.inf, tell=tell)
        ratios = {}
        for name, over in [*((each, DEFAULT) for each in found), *[("d5suite", "good")] * (start is not None)]:
            ratio = fresh.ratio(name, over)
            if ratio is None:
                print(f"{name}: {fresh.failure}")
            else:
                ratios[f"{name} over {over}"] = [ratio.value, ratio.low, ratio.high]
                print(f"{name:10} {ratio.value:.3f} times the {over} ({ratio.low:.3f} to {ratio.high:.3f})")
        if options.json:
            facts = {"case": wanted.key, "backend": options.backend, "start": options.start, "budget_s": options.budget}
            write_json(options.json, {**facts, "load": os.getloadavg()[0], "ratios": ratios})
    finally:
        session.close()


if __name__ == "__main__":
    main()
