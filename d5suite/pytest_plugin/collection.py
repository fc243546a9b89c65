"""Declarations to tests: one per case, measurement and backend, job by job."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from d5suite.errors import D5Error, escaped
from d5suite.launch.base import interpreter
from d5suite.pytest_plugin import busy, stash
from d5suite.pytest_plugin.measuring import measured, schedule
from d5suite.pytest_plugin.progress import begin
from d5suite.pytest_plugin.replay import ReplayTimer, replay
from d5suite.pytest_plugin.settings import elsewhere, pythons, tuned_selection, without_effect
from d5suite.pytest_plugin.storage import check_display, has_benchmark
from d5suite.pytest_plugin.sweep import SweepPoint, points

if TYPE_CHECKING:
    from d5suite.backends import Selection
    from d5suite.cases.case import Case, Declaration, Runner, Settings, Test
    from d5suite.job import Ranks


def _declaration(obj: object) -> Declaration | None:
    cases = sys.modules.get("d5suite.cases.case")
    return obj if cases is not None and isinstance(obj, cases.Declaration) else None


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item | pytest.Collector] | None:
    """Turn a declaration into one test function per measurement."""
    declaration = _declaration(obj)
    if declaration is None:
        return None
    if not has_benchmark(collector.config):
        collector.config.stash[stash.WRONG] = "d5suite needs pytest-benchmark: leave out -p no:benchmark"
        return []
    busy.begin(collector.config)
    items: list[pytest.Item | pytest.Collector] = []
    try:
        tests = list(declaration.tests())
    except D5Error as error:
        raise collector.CollectError(str(error)) from error
    has_ranks = collector.config.getoption("ranks") is not None
    for each in tests:
        if (each.measurement.level == 3) != has_ranks:
            continue
        if hasattr(collector.obj, each.function):
            raise collector.CollectError(f"{name}: there is already a {each.function} here; one recipe per file")
        function = _test_function(declaration, each)
        setattr(collector.obj, each.function, function)
        made = collector.ihook.pytest_pycollect_makeitem(collector=collector, name=each.function, obj=function)
        items.extend(made if isinstance(made, list) else [made])
    return items


def _test_function(declaration: Declaration, described: Test) -> Callable[..., None]:
    timer = ReplayTimer()
    measurement = described.measurement.name

    @pytest.mark.benchmark(group=f"{declaration.name}/{measurement}", timer=timer)
    @pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")
    def test(request: pytest.FixtureRequest, benchmark: Any, d5suite_backend: stash.BenchmarkTarget) -> None:
        benchmark.group = f"{d5suite_backend.case.name}/{measurement}"
        result = measured(request.config, d5suite_backend)
        replay(request, benchmark, d5suite_backend, timer, result)

    test.__name__ = test.__qualname__ = described.function
    test.__doc__ = f"{measurement} of {declaration.name}"
    test.d5suite = described
    return test


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise the tests over cases and the chosen backends."""
    if stash.FIXTURE not in metafunc.fixturenames or not hasattr(metafunc.function, "d5suite"):
        return
    described: Test = metafunc.function.d5suite
    config = metafunc.config
    try:
        swept = [(point, case) for point in points(config) for case in described.cases(point.settings)]
    except D5Error as error:
        config.stash[stash.WRONG] = str(error)
        metafunc.parametrize(stash.FIXTURE, [])
        return
    parameters = []
    for point, case in swept:
        chosen = point.settings
        deselected = case.why_excluded(described.measurement, chosen, metafunc.definition.path)
        for selection, ranks, reason in _runners(config, case, chosen):
            why = reason or point.why_not(case, selection)
            why = why or case.why_unsupported(selection.backend, described.measurement, chosen)
            why = why or _stays_warm(selection, described, chosen)
            why = why or (None if deselected else point.contradiction(case, selection, described.measurement))
            marks = [pytest.mark.d5suite_deselected(deselected)] if deselected else []
            marks += [pytest.mark.skip(reason=why)] if why and not deselected else []
            target = _target(case, described, selection, ranks, point)
            parameters.append(pytest.param(target, marks=marks, id=str(target)))
    metafunc.parametrize(stash.FIXTURE, parameters)


def _runners(config: pytest.Config, case: Case, chosen: Settings) -> Iterator[Runner]:
    """Return a case's runners: its own, or the chosen backends with each number of ranks."""
    own = case.runners(chosen)
    if own is not None:
        yield from own
        return
    from d5suite.cases.case import Runner

    for selection, reason in _choices(config, chosen):
        selection = tuned_selection(config, case.name, selection)
        if selection.backend.on_request and stash.SELECTIONS not in config.stash and not case.every_backend:
            continue
        seen = set()
        for ranks in chosen.ranks or (None,):
            used, unfit = (None, None) if ranks is None else case.of_ranks(ranks)
            if used == ranks:
                unfit = unfit or _lacks_scheme(config, selection, ranks, chosen) or _lacks_collective(ranks)
                unfit = unfit or _lacks_order(ranks)
            elif str(used) in seen:  # schemes that mean nothing to the case
                continue
            seen.add(str(used))
            yield Runner(selection, used, reason or unfit)


def _lacks_scheme(config: pytest.Config, selection: Selection, ranks: Ranks | None, chosen: Settings) -> str | None:
    """Return why a backend lacks the requested native scheme, or None.

    Requirements of a scheme are checked in the workers' environment, which may be another one.
    """
    if ranks is None or not ranks.distributed.native:
        return None
    backend = selection.backend
    if elsewhere(config) or interpreter(backend.name, pythons(config)) is not None:
        schemes = {name: replace(each, requires={}) for name, each in backend.schemes.items()}
        backend = replace(backend, schemes=schemes)
    return backend.lacks_scheme(
        ranks.distributed.scheme, mode=selection.mode, device=chosen.device, precision=chosen.precision
    )


def _lacks_order(ranks: Ranks | None) -> str | None:
    """Return why a scheme cannot honour the order of transfers, slices or credit, or None."""
    from d5suite.distributed.schemes import refusal

    if ranks is None or ranks.size == 1:
        return None
    how = ranks.distributed
    found = {name: refusal(how.scheme, name) for name in how.settings}
    return next((f"{how.scheme} cannot honour {name}: {why}" for name, why in found.items() if why), None)


def _lacks_collective(ranks: Ranks | None) -> str | None:
    """Return why an algorithm of collectives would measure the same as ``native``, or None."""
    from d5suite.distributed.algorithms import ALGORITHMS
    from d5suite.distributed.schemes import SCHEMES

    if ranks is None or ranks.size == 1 or ranks.distributed.native or ranks.distributed.algorithm == "native":
        return None
    scheme, algorithm = ranks.distributed.scheme, ranks.distributed.algorithm
    used = SCHEMES[scheme].collective
    if not used:
        return f"{scheme} makes no collective, so that {algorithm} would change nothing"
    return None if used in ALGORITHMS[algorithm] else f"{algorithm} has no {used}, the collective of {scheme}"


def _stays_warm(selection: Selection, described: Test, chosen: Settings) -> str | None:
    """Return why the L2 cache cannot be flushed as requested, or None."""
    if not chosen.sampling.get("l2_cold"):
        return None
    if not described.measurement.takes_cold:
        return f"{described.measurement.name} takes its samples in its own way, with the L2 cache as it is"
    lacking = selection.backend.absent.get("L2 flush")
    return f"{selection.backend.name} has no L2 flush: {lacking}" if lacking else None


def _target(
    case: Case, described: Test, selection: Selection, ranks: Ranks | None, point: SweepPoint
) -> stash.BenchmarkTarget:
    name = "-".join(str(each) for each in (case.label, selection, ranks) if each)
    target = stash.BenchmarkTarget(name + point.label)
    target.case, target.measurement, target.selection, target.ranks = case, described.measurement, selection, ranks
    target.point, target.settings = point.label, point.settings
    return target


def _choices(config: pytest.Config, chosen: Settings) -> Iterator[tuple[Selection, str | None]]:
    """Return the backends to measure, each with the reason why it cannot run, if any."""
    if stash.SELECTIONS in config.stash:
        yield from ((selection, None) for selection in config.stash[stash.SELECTIONS])
        return
    from d5suite.backends import Selection, discover

    backends, faults = discover()
    for fault in faults.values():
        warnings.warn(pytest.PytestWarning(escaped(f"left out: {fault.what}")), stacklevel=1)
    for backend in backends.values():
        reason = None
        try:
            if not elsewhere(config) and interpreter(backend.name, pythons(config)) is None:
                reason = backend.problem()
            backend.check(device=chosen.device, precision=chosen.precision)
        except D5Error as error:
            reason = str(error)
        yield Selection(backend, backend.default_mode), reason


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what the options exclude, and group the tests by job."""
    marks = ((item, item.get_closest_marker("d5suite_deselected")) for item in items)
    deselected = config.stash[stash.DESELECTED] = {item: mark.args[0] for item, mark in marks if mark is not None}
    if deselected:
        config.hook.pytest_deselected(items=list(deselected))
        items[:] = [item for item in items if item not in deselected]
    places = [index for index, item in enumerate(items) if stash.target(item) is not None]
    jobs: dict[tuple[str, str], list[pytest.Item]] = {}
    for index in places:
        target = stash.target(items[index])
        assert target is not None
        jobs.setdefault(target.job, []).append(items[index])
    batches = list(dict.fromkeys(batch for batch, _ in jobs))
    ordered = [item for wanted in batches for (batch, _), its in jobs.items() if batch == wanted for item in its]
    for index, item in zip(places, ordered, strict=True):
        items[index] = item


def pytest_collection_finish(session: pytest.Session) -> None:
    """End the run before anything is measured if the options contradict a case."""
    config, option = session.config, session.config.option
    begin(config, session.items)
    if stash.WRONG in config.stash:
        raise pytest.UsageError(config.stash[stash.WRONG])
    targets = [stash.target(item) for item in session.items if item.get_closest_marker("skip") is None]
    if option.collectonly or not any(targets):
        return
    saved = next((name for name in ("json", "save", "autosave") if getattr(option, f"benchmark_{name}")), None)
    if option.benchmark_disable and not option.benchmark_enable and saved:
        raise pytest.UsageError(f"--benchmark-disable saves no results: leave it out, or --benchmark-{saved}")
    try:
        check_display(config)
        for target in filter(None, targets):
            target.case.check(target.selection.backend, target.measurement, target.settings)
        schedule(session)
        _tell_without_effect(config)
        busy.tell(config)
    except D5Error as error:
        raise pytest.UsageError(str(error)) from error


def _tell_without_effect(config: pytest.Config) -> None:
    reporter: Any = config.pluginmanager.getplugin("terminalreporter")
    for line in without_effect(config) if reporter is not None else ():
        reporter.write_line(f"d5suite: {line}", yellow=True)
