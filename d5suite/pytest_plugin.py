"""Recipes as pytest tests, their samples as ordinary pytest-benchmark results.

A module-level `d5suite.Recipe` becomes one test per measurement and backend. The samples that a worker took are
replayed through pytest-benchmark's timer, everything else goes to ``extra_info["d5suite"]``. Uses public hooks of
pytest and pytest-benchmark only, and imports no framework.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from d5suite.errors import ConfigurationError, D5Error

if TYPE_CHECKING:
    from d5suite.backends import Selection
    from d5suite.measure.sampling import SamplingSettings
    from d5suite.problem import Problems, Task
    from d5suite.recipe import Recipe
    from d5suite.session import Found, Session

FIXTURE = "d5suite_backend"

SUM_TOLERANCE = 0.02
"""How far the parts of a step may be from the whole of it before it is said."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add d5suite's options."""
    group = parser.getgroup("d5suite", "d5suite: validated, comparable deep-learning benchmarks")
    group.addoption(
        "--backend",
        metavar="NAME[:MODE][,…]",
        help="backends to measure, such as torch:compile,tensorflow (default: every installed one in its default mode)",
    )
    group.addoption("--preset", metavar="NAME", help="size of the workload: smoke (default), standard or full")
    group.addoption("--device", default="cpu", choices=["cpu", "cuda"], help="default: %(default)s")
    precisions = ["fp32", "bf16", "fp16", "fp64"]  # those of d5suite.levels.backend, which would import NumPy
    group.addoption("--precision", default="fp32", choices=precisions, help="default: %(default)s")
    group.addoption("--threads", type=int, metavar="N", help="CPU threads for each framework (default: all allowed)")
    group.addoption("--batch-size", type=int, metavar="N", help="images per batch (default: the preset's)")
    group.addoption(
        "--optimizer",
        metavar="KEY=VALUE[,…]",
        help="in place of the recipe's: learning_rate=0.1,momentum=0.9,nesterov=true,weight_decay=1e-4, or with "
        "name=adam, adamw, rmsprop or adagrad their settings; all of them also take clip_norm and clip_value",
    )
    group.addoption(
        "--imagenet",
        type=Path,
        metavar="PATH",
        help="ImageNet as a tree of files or converted to another format (default: a small one is made and cached)",
    )
    group.addoption(
        "--openimages", type=Path, metavar="PATH", help="Open Images V4, likewise; for recipes/test_openimages_*.py"
    )
    group.addoption(
        "--loader-workers", type=int, metavar="N", help="image loader processes (default: as many as cores)"
    )
    group.addoption(
        "--seed", type=int, default=0, metavar="N", help="of weights and image order (default: %(default)s)"
    )
    group.addoption(
        "--job-timeout",
        type=float,
        metavar="SECONDS",
        help="limit of one worker (default: 1800, and none where a preset trains to a published accuracy)",
    )
    group.addoption(
        "--job-memory",
        default="90%",
        metavar="SIZE",
        help="limit of one worker: 8G, 500M or 80%% of memory (default: 90%%)",
    )
    group.addoption("--wrap", metavar="CMD", help="command in front of each worker, such as 'perf stat -d'")
    group.addoption("--jobs", type=Path, metavar="DIR", help="where job files go (default: .d5suite/jobs)")
    parser.addini("d5suite_python", "interpreters by backend, one 'NAME = PYTHON' a line", type="linelist", default=[])


_session = pytest.StashKey["Session"]()
_selections = pytest.StashKey["list[Selection]"]()
_terminal = pytest.StashKey[bool]()
_destination = pytest.StashKey["AtomicDestination"]()
_records = pytest.StashKey["dict[str, dict[str, Any]]"]()


class Kept(NamedTuple):
    """What a test that failed leaves: `d5suite.session.Found.kept`, with its group and backend."""

    group: str
    backend: str
    facts: dict[str, Any]


_kept = pytest.StashKey["dict[str, Kept]"]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check the options at once, and make pytest-benchmark's JSON file atomic."""
    config.addinivalue_line("markers", "gpu: needs a GPU")
    config.addinivalue_line("markers", "slurm: needs a Slurm cluster")
    # Asked now: while a test runs, standard error is pytest's.
    config.stash[_terminal] = sys.__stderr__ is not None and sys.__stderr__.isatty()
    config.stash[_records] = {}
    config.stash[_kept] = {}
    path = config.getoption("benchmark_json", None)
    try:
        if path is not None:
            config.option.benchmark_json = config.stash[_destination] = AtomicDestination(Path(path))
        if config.getoption("backend") is not None:
            config.stash[_selections] = _asked_selections(config)
        _check_settings(config)
    except D5Error as error:
        raise pytest.UsageError(str(error)) from error


def _asked_selections(config: pytest.Config) -> list[Selection]:
    from d5suite.backends import select
    from d5suite.launch.local import interpreter

    names = [name for name in str(config.getoption("backend")).split(",") if name.strip()]
    if not names:
        raise ConfigurationError("--backend names no backend")
    chosen = []
    for name in names:
        selection = select(name)
        if selection in chosen:
            raise ConfigurationError(f"--backend names {name!r} twice")
        selection.backend.check(device=config.getoption("device"), precision=config.getoption("precision"))
        problem = selection.backend.problem(selection.mode)
        if problem and interpreter(selection.backend.name, _pythons(config)) is None:
            raise ConfigurationError(problem, where=f"--backend {name}")
        chosen.append(selection)
    return chosen


def _check_settings(config: pytest.Config) -> None:
    """What can be seen to be wrong with the options alone."""
    for name, least in (("threads", 1), ("batch_size", 1), ("seed", 0), ("loader_workers", 0), ("job_timeout", 1)):
        value = config.getoption(name)
        if value is not None and not value >= least:
            raise ConfigurationError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    for name in ("imagenet", "openimages"):
        given = config.getoption(name)
        if given is not None and not given.exists():
            raise ConfigurationError("there is no such dataset", where=f"--{name} {given}")
    if config.getoption("loader_workers") is not None:
        from d5suite.data.loader import check_workers

        check_workers(config.getoption("loader_workers"), _cores(config))
    if config.getoption("optimizer"):
        _optimizer(config.getoption("optimizer"))
    _memory(config.getoption("job_memory"))


def _cores(config: pytest.Config) -> int:
    """How many cores each job may use."""
    from d5suite.measure.threads import allowed_cpus

    cores = len(allowed_cpus())
    return max(1, min(config.getoption("threads") or cores, cores))


def _pythons(config: pytest.Config) -> dict[str, str]:
    pairs = [line.partition("=") for line in config.getini("d5suite_python")]
    return {name.strip(): python.strip() for name, _, python in pairs}


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item | pytest.Collector] | None:
    """Turn a recipe, or problems, into one test function per measurement, which pytest parametrises over backends."""
    if not _is_a("d5suite.recipe", "Recipe", obj) and not _is_a("d5suite.problem", "Problems", obj):
        return None
    described: Recipe | Problems = obj  # type: ignore[assignment]
    items: list[pytest.Item | pytest.Collector] = []
    for one, measurement, function_name in _tests_of(described):
        if hasattr(collector.obj, function_name):
            raise collector.CollectError(f"{name}: there is already a {function_name} here; one recipe per file")
        function = _test_function(one, measurement, function_name)
        setattr(collector.obj, function_name, function)
        made = collector.ihook.pytest_pycollect_makeitem(collector=collector, name=function_name, obj=function)
        items.extend(made if isinstance(made, list) else [made])
    return items


def _tests_of(described: Recipe | Problems) -> Iterator[tuple[Recipe | Problems, str, str]]:
    """What each test measures, and its name."""
    if _is_a("d5suite.problem", "Problems", described):
        yield from ((described, direction, f"test_{direction}") for direction in ("forward", "backward"))
        return
    recipe: Recipe = described  # type: ignore[assignment]
    for variant in recipe.variants():
        for measurement in variant.measurements:
            yield variant, measurement, "_".join(("test", measurement, *variant.formats))


def _is_a(module: str, name: str, obj: object) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(obj, getattr(loaded, name))


def _test_function(described: Recipe | Problems, measurement: str, name: str) -> Callable[..., None]:
    timer = ReplayTimer()

    @pytest.mark.benchmark(group=f"{described.name}/{measurement}", timer=timer)
    @pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")
    def test(request: pytest.FixtureRequest, benchmark: Any, d5suite_backend: Any) -> None:
        if isinstance(d5suite_backend, str):
            found = _recipe_found(request, described, measurement, d5suite_backend)  # type: ignore[arg-type]
        else:
            task, backend = d5suite_backend
            benchmark.group = f"{task.group}/{measurement}"
            found = _task_found(request, task, backend)
        _replay(request, benchmark, found, timer)

    test.__name__ = test.__qualname__ = name
    test.__doc__ = f"{measurement} of {described.name}"
    test.d5suite = (described, measurement)
    return test


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise the tests over the chosen backends; those not installed are skipped with the reason."""
    if FIXTURE not in metafunc.fixturenames or not hasattr(metafunc.function, "d5suite"):
        return
    described, measurement = metafunc.function.d5suite
    if _is_a("d5suite.problem", "Problems", described):
        parameters = list(_tasks(metafunc.config, described, measurement))
    else:
        path = metafunc.definition.path
        named = any(
            metafunc.config.invocation_params.dir / str(arg).split("::")[0] == path for arg in metafunc.config.args
        )
        unasked = f"runs when its file is named: pytest {path.name}" if described.on_request and not named else None
        unasked = unasked or _stored_otherwise(metafunc.config, described)
        preset = _known_preset(described, metafunc.config.getoption("preset"))
        parameters = [
            _parameter(
                str(selection),
                str(selection),
                reason or unasked or described.cannot(selection.backend, measurement, preset),
            )
            for selection, reason in _choices(metafunc.config)
        ]
    metafunc.parametrize(FIXTURE, parameters)


def _stored_otherwise(config: pytest.Config, recipe: Recipe) -> str | None:
    """Why a recipe for one storage format leaves the user's dataset alone, or None."""
    given = config.getoption(recipe.dataset, None)
    if not recipe.formats or given is None:
        return None
    from d5suite.data.formats import kind_of

    try:
        stored = kind_of(given)
    except D5Error:  # the test says what is wrong
        return None
    if stored in recipe.formats:
        return None
    return f"--{recipe.dataset} {given} is stored as {stored}; it is not converted"


def pytest_collection_finish(session: pytest.Session) -> None:
    """End the run before anything is measured where a recipe that is asked for cannot be as the options have it."""
    config = session.config
    if config.option.collectonly:
        return
    for item in session.items:
        described = getattr(getattr(item, "function", None), "d5suite", None)
        if described is None or item.get_closest_marker("skip") is not None:
            continue
        recipe, measurement = described
        if _is_a("d5suite.recipe", "Recipe", recipe):
            backend = item.callspec.params[FIXTURE]  # type: ignore[attr-defined]
            try:
                _check_asked(config, recipe, measurement, backend)
            except D5Error as error:
                raise pytest.UsageError(str(error)) from error


def _check_asked(config: pytest.Config, recipe: Recipe, measurement: str, backend: str) -> None:
    """That the preset is one, and what it asks of the dataset."""
    from d5suite.backends import select
    from d5suite.data.synthesis import MAX_CLASSES
    from d5suite.recipe import TIME_TO_ACCURACY

    name, preset = recipe.preset_for(select(backend).backend, config.getoption("preset"))
    if recipe.dataset == "digits" or config.getoption(recipe.dataset) is not None:
        return
    where = f"{recipe.name}, preset {name!r}"
    if measurement == TIME_TO_ACCURACY and preset.training is not None and preset.training.source:
        raise ConfigurationError(
            f"{preset.training.metric} {preset.training.target} is a target on the real {recipe.dataset}, and the "
            "images that are made without one are drawn",
            where=where,
            hint=f"Give --{recipe.dataset} PATH, or leave this measurement out: -k 'not {TIME_TO_ACCURACY}'.",
        )
    if preset.classes > MAX_CLASSES:
        raise ConfigurationError(
            f"this needs a dataset of {preset.classes} classes, and of drawn images there are at most {MAX_CLASSES}",
            where=where,
            hint=f"Give --{recipe.dataset} PATH.",
        )


def _known_preset(recipe: Recipe, preset: str | None) -> str | None:
    """The preset, or None if the recipe has none of that name: what is collected is checked afterwards."""
    return preset if preset in recipe.presets else None


def _parameter(value: Any, name: str, why: str | None) -> Any:
    return pytest.param(value, marks=[pytest.mark.skip(reason=why)] if why else [], id=name)


def _tasks(config: pytest.Config, problems: Problems, direction: str) -> Iterator[Any]:
    """Every problem on every backend."""
    from d5suite.problem import Task

    preset = config.getoption("preset")
    try:
        chosen = problems.preset(preset)
    except D5Error as error:
        raise pytest.UsageError(str(error)) from error
    for problem in chosen:
        task = Task(problems.name, problem, direction)
        for selection, reason in _choices(config):
            why = reason or task.cannot(
                selection.backend, config.getoption("precision"), preset or "smoke", config.getoption("device")
            )
            yield _parameter((task, str(selection)), f"{problem.name}-{selection}", why)


def _choices(config: pytest.Config) -> Iterator[tuple[Selection, str | None]]:
    if _selections in config.stash:
        yield from ((selection, None) for selection in config.stash[_selections])
        return
    from d5suite.backends import Selection, discover
    from d5suite.launch.local import interpreter

    backends, faults = discover()
    for fault in faults.values():
        warnings.warn(pytest.PytestWarning(f"left out: {fault.what}"), stacklevel=1)
    for backend in backends.values():
        reason = None
        try:
            if interpreter(backend.name, _pythons(config)) is None:
                reason = backend.problem()
            backend.check(device=config.getoption("device"), precision=config.getoption("precision"))
        except D5Error as error:
            reason = str(error)
        yield Selection(backend, backend.default_mode), reason


def _recipe_found(request: pytest.FixtureRequest, recipe: Recipe, measurement: str, backend: str) -> Found:
    from d5suite.backends import select

    wanted = [
        item.function.d5suite[1]  # type: ignore[attr-defined]
        for item in request.session.items
        if getattr(getattr(item, "function", None), "d5suite", (None,))[0] is recipe
        and item.callspec.params[FIXTURE] == backend  # type: ignore[attr-defined]
        and item.get_closest_marker("skip") is None
    ]
    return _ask(request.config, lambda session: session.measurement(recipe, select(backend), measurement, wanted))


def _task_found(request: pytest.FixtureRequest, task: Task, backend: str) -> Found:
    from d5suite.backends import select

    parameters = (
        getattr(item, "callspec", None) and item.callspec.params.get(FIXTURE)  # type: ignore[attr-defined]
        for item in request.session.items
        if hasattr(getattr(item, "function", None), "d5suite") and item.get_closest_marker("skip") is None
    )
    wanted = [each[0] for each in parameters if isinstance(each, tuple) and each[1] == backend]
    return _ask(request.config, lambda session: session.task(task, select(backend), wanted))


def _ask(config: pytest.Config, question: Callable[[Session], Found]) -> Found:
    try:
        session = _the_session(config)
        with _uncaptured(config):
            return question(session)
    except D5Error as error:
        pytest.fail(str(error), pytrace=False)


def _replay(request: pytest.FixtureRequest, benchmark: Any, found: Found, timer: ReplayTimer) -> None:
    if found.record is None:
        failure = found.failure or "no result"
        if found.kept:
            request.config.stash[_kept][request.node.nodeid] = Kept(benchmark.group, benchmark.param, found.kept)
            failure += _where_kept(request.config, benchmark.group)
        pytest.fail(failure, pytrace=False)
    record = found.record
    benchmark.extra_info["d5suite"] = record["d5suite"]
    request.config.stash[_records][request.node.nodeid] = record["series"]
    part = record["d5suite"].get("sum_over_step")
    if part is not None and abs(part - 1) > SUM_TOLERANCE:
        message = f"the parts of a step sum to {part:.1%} of it, which is more than {SUM_TOLERANCE:.0%} off"
        request.node.warn(pytest.PytestWarning(message))
    timer.load(record["samples_s"])
    benchmark.pedantic(lambda: None, rounds=len(record["samples_s"]), iterations=1)


@contextlib.contextmanager
def _uncaptured(config: pytest.Config) -> Iterator[None]:
    """Let progress reach the terminal; in a pipe there is none, and capturing goes on."""
    manager = config.pluginmanager.getplugin("capturemanager")
    if manager is None or not config.stash[_terminal]:
        yield
    else:
        with manager.global_and_fixture_disabled():
            yield


def _the_session(config: pytest.Config) -> Session:
    if _session in config.stash:
        return config.stash[_session]
    from d5suite.measure.threads import allowed_cpus
    from d5suite.session import Session, Settings

    threads = config.getoption("threads") or len(allowed_cpus())
    workers = config.getoption("loader_workers")
    optimizer = config.getoption("optimizer")
    settings = Settings(
        preset=config.getoption("preset"),
        device=config.getoption("device"),
        precision=config.getoption("precision"),
        threads=threads,
        seed=config.getoption("seed"),
        loader_workers=_cores(config) if workers is None else workers,
        batch_size=config.getoption("batch_size"),
        optimizer=_optimizer(optimizer) if optimizer else None,
        datasets={name: config.getoption(name) for name in ("imagenet", "openimages")},
        timeout_s=config.getoption("job_timeout"),
        memory_bytes=_memory(config.getoption("job_memory")),
        wrap=config.getoption("wrap"),
        pythons=_pythons(config),
        sampling=_sampling(config),
        jobs=config.getoption("jobs") or config.rootpath / ".d5suite" / "jobs",
    )
    progress = _show_progress if config.stash[_terminal] else None
    session = config.stash[_session] = Session(settings, progress)
    return session


def _show_progress(line: str) -> None:
    fits = line[: shutil.get_terminal_size().columns - 3]  # of a line that wraps, a part would stay
    print(f"\r\033[K  {fits}", end="", file=sys.__stderr__, flush=True)


def _optimizer(text: str) -> Any:
    from d5suite.levels.training import optimizer_from_dict

    settings: dict[str, Any] = {"name": "sgd"}
    for pair in text.split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        if key == "name":
            settings[key] = value
            continue
        try:
            settings[key] = value.lower() == "true" if value.lower() in ("true", "false") else float(value)
        except ValueError as error:
            raise ConfigurationError(f"{pair!r} is not KEY=VALUE with a number", where="--optimizer") from error
    return optimizer_from_dict(settings)


def _memory(text: str) -> int:
    import psutil

    units = {"%": psutil.virtual_memory().total / 100, "G": 2**30, "M": 2**20}
    try:
        amount = float(text[:-1]) * units[text[-1].upper()]
    except (KeyError, ValueError, IndexError):
        raise ConfigurationError(f"{text!r} is not a size such as 8G, 500M or 80%", where="--job-memory") from None
    if not amount > 0:
        raise ConfigurationError(f"{text!r} must be more than nothing", where="--job-memory")
    return int(amount)


def _sampling(config: pytest.Config) -> dict[str, Any]:
    """What the user gave of pytest-benchmark's options, as `SamplingSettings` fields."""
    given = {
        str(argument).partition("=")[0]: str(argument).partition("=")[2]
        for argument in (*config.invocation_params.args, *config.getini("addopts"))
        if str(argument).startswith("--benchmark-")
    }
    sampling: dict[str, Any] = {"min_rounds": config.getoption("benchmark_min_rounds")}
    if "--benchmark-max-time" in given:
        sampling["max_time_s"] = float(config.getoption("benchmark_max_time"))
    if "--benchmark-precision" in given and config.getoption("benchmark_precision"):
        sampling["relative_precision"] = float(config.getoption("benchmark_precision"))
    if "--benchmark-warmup" in given:
        asked = given["--benchmark-warmup"]
        if asked != "auto":  # pytest-benchmark reads auto as off on CPython
            sampling["warmup"] = "on" if config.getoption("benchmark_warmup") else "off"
    sampling["warmup_iterations"] = config.getoption("benchmark_warmup_iterations")
    from d5suite.measure.sampling import SamplingSettings

    settings: SamplingSettings = SamplingSettings.from_dict(sampling)
    return {key: value for key, value in settings.to_dict().items() if key in sampling}


class ReplayTimer:
    """A timer for pytest-benchmark that repeats times taken elsewhere, to the last bit."""

    __name__ = "d5suite_replay"

    def __init__(self) -> None:
        self._readings: Iterator[float] = iter(())

    def load(self, samples_s: list[float]) -> None:
        """Replay these durations, in seconds, one per round."""
        self._readings = (reading for sample in samples_s for reading in (0.0, sample))

    def __call__(self) -> float:
        """The next reading: 0 at a round's start, the sample at its end."""
        return next(self._readings)


class AtomicDestination(os.PathLike[str]):
    """A result path that pytest-benchmark writes to beside, and that is replaced when the writing ended well.

    Parameters
    ----------
    path : Path
        Where the JSON file is to be.

    Raises
    ------
    ConfigurationError
        If nothing can be written there; the run then ends before anything is measured.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.direct = path.exists() and not path.is_file()
        self.temporary = path if self.direct else path.with_name(f".{path.name}.{os.getpid()}.part")
        if path.is_dir():
            raise ConfigurationError("this is a folder", where=f"--benchmark-json {path}")
        if not self.direct:
            try:
                self.temporary.touch()
                self.temporary.unlink()
            except OSError as error:
                raise ConfigurationError(
                    f"results cannot be written here: {error.strerror}",
                    where=f"--benchmark-json {path}",
                    hint="Choose a file in a folder that exists and may be written to.",
                ) from error

    def __fspath__(self) -> str:
        return str(self.temporary)

    def __str__(self) -> str:
        return str(self.path)

    def commit(self) -> None:
        """Put the new file in place, if one was written."""
        if self.direct or not self.temporary.exists():
            return
        with self.temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(self.temporary, self.path)

    def discard(self) -> None:
        """Remove what was written, if it was not committed."""
        if not self.direct:
            self.temporary.unlink(missing_ok=True)


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Make the JSON strictly valid, and write the raw series to an HDF5 file beside it."""
    add_fractions([b["extra_info"]["d5suite"] for b in output_json["benchmarks"] if "d5suite" in b["extra_info"]])
    finite = _finite(output_json)
    output_json.clear()
    output_json.update(finite)
    destination = config.stash.get(_destination, None)
    if destination is None or destination.direct or (not config.stash[_records] and not config.stash[_kept]):
        return
    from d5suite.report.series import save_series

    series = {
        bench["fullname"]: config.stash[_records][bench["fullname"]]
        for bench in output_json["benchmarks"]
        if bench["fullname"] in config.stash[_records]
    }
    path = destination.path.with_suffix(".h5")
    save_series(path, series)
    output_json["d5suite"] = {"schema": "d5suite-1", "series": path.name}
    pictures = _save_trained(destination.path, output_json["benchmarks"], series, config.stash[_kept])
    if pictures:
        output_json["d5suite"]["pictures"] = pictures


def _save_trained(
    path: Path, benchmarks: list[dict[str, Any]], series: Mapping[str, Any], kept: dict[str, Kept]
) -> list[str]:
    """A picture beside the JSON for each recipe that was trained to accuracy, reached or not; their names.

    Series of runs that missed their target have no place in the JSON's own HDF5 file, and get one of theirs.
    """
    from d5suite.report.curves import curves_of, save_curves
    from d5suite.report.series import save_series

    targets: dict[str, dict[str, Any]] = {}
    trained: dict[str, dict[str, Mapping[str, Any]]] = {}
    for bench in benchmarks:
        facts = bench["extra_info"].get("d5suite", {})
        if "target" in facts and bench["fullname"] in series:
            targets[bench["group"]] = facts["target"]
            trained.setdefault(bench["group"], {})[bench["param"]] = series[bench["fullname"]]
    for each in kept.values():
        targets[each.group] = each.facts["target"]
        trained.setdefault(each.group, {})[f"{each.backend}, not finished"] = each.facts["series"]
    if kept:
        save_series(_missed_path(path), {name: each.facts["series"] for name, each in kept.items()})
    for group, found in trained.items():
        metric, target = targets[group]["metric"], targets[group]["value"]
        title = f"{group.partition('/')[0]}: time to accuracy"
        save_curves(_picture_path(path, group), title, metric, target, curves_of(found, metric))
    return [_picture_path(path, group).name for group in trained]


def _missed_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.missed.h5")


def _picture_path(path: Path, group: str) -> Path:
    return path.with_name(f"{path.stem}.{group.partition('/')[0]}.png")


def _where_kept(config: pytest.Config, group: str) -> str:
    destination = config.stash.get(_destination, None)
    if destination is None or destination.direct:
        return ""
    return f"\ncurves of its runs: {_picture_path(destination.path, group)}, {_missed_path(destination.path)}"


def add_fractions(found: list[dict[str, Any]]) -> None:
    """Give every level-0 result its part of the machine's ceilings: the best of all backends measured in this run."""
    measured = [info for info in found if "ceilings" in info]
    best: dict[str, tuple[float, str]] = {}
    for info in measured:
        for key, value in info.pop("ceilings").items():
            best[key] = max(best.get(key, (0.0, "")), (value, info["backend"]["name"]))
    for info in measured:
        achieved = info["achieved"]
        info["ceiling"] = {key: {"value": value, "backend": name} for key, (value, name) in best.items()}
        info["fraction_of_ceiling"] = {
            key: achieved[key] / best[key][0] if achieved[key] and key in best else None for key in achieved
        }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Around pytest-benchmark's saving: put the file in place only when it is whole."""
    config = session.config
    destination = config.stash.get(_destination, None)
    try:
        result = yield
        if destination is not None and not destination.direct and not destination.temporary.exists():
            _save_trained(destination.path, [], {}, config.stash[_kept])  # pytest-benchmark had nothing to save
        if destination is not None:
            destination.commit()
        return result
    except OSError as error:
        if destination is None:
            raise
        raise pytest.UsageError(
            f"--benchmark-json {destination}: the results could not be saved: {error.strerror}; "
            "what was there before is untouched, and the workers' result files are in the job folder"
        ) from error
    finally:
        if destination is not None:
            destination.discard()
        if _session in config.stash:
            config.stash[_session].close()
            if config.stash[_terminal]:
                print("\r\033[K", end="", file=sys.__stderr__, flush=True)
