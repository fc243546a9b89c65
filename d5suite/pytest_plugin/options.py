"""Command-line options, their early validation, and the session's `Settings`."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shlex
import shutil
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from d5suite.errors import ConfigurationError, D5Error
from d5suite.job import Distributed, Ranks
from d5suite.pytest_plugin import saving, stash, turns

if TYPE_CHECKING:
    from d5suite.backends import Selection
    from d5suite.cases.case import Settings


BOUNDS = {
    "threads": (1, 4096),
    "batch_size": (1, 2**31 - 1),
    "seed": (0, 2**31 - 1),  # as a 32-bit integer, which some frameworks' generators take
    "loader_workers": (0, 4096),
    "job_timeout": (1, math.inf),
    "launches": (1, 100),
    "wait_quiet": (0, 86_400),
}
"""The least and the most that options of numbers take."""

MOST_RANKS = 4096

RANKED = ("scheme", "communicator", "algorithm", "scaling", "oversubscribe")
"""Options that make sense with ``--ranks`` only."""

PREFERRED = ("nccl", "gloo", "mpi")
"""Communicators in the order in which one that can be used is taken."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add d5suite's options."""
    group = parser.getgroup("d5suite", "d5suite: validated, comparable deep-learning benchmarks")
    group.addoption(
        "--backend",
        metavar="NAME[:MODE][,…]",
        help="backends to measure, such as torch:compile,tensorflow (default: all installed, each in its default mode)",
    )
    group.addoption("--preset", metavar="NAME", help="workload size: smoke (default), standard or full")
    group.addoption("--device", default="cpu", choices=["cpu", "cuda"], help="default: %(default)s")
    group.addoption(
        "--l2-cold",
        action="store_true",
        help="on a GPU: before each sample, write a buffer larger than the L2 cache, so that the step finds it cold",
    )
    precisions = ["fp32", "bf16", "fp16", "fp64"]  # d5suite.levels.backend has these too, but imports NumPy
    group.addoption("--precision", default="fp32", choices=precisions, help="default: %(default)s")
    group.addoption("--threads", type=int, metavar="N", help="CPU threads per framework (default: every allowed CPU)")
    group.addoption("--batch-size", type=int, metavar="N", help="images per batch (default: the preset's)")
    group.addoption(
        "--optimizer",
        metavar="KEY=VALUE[,…]",
        help="replace the recipe's optimizer, for example learning_rate=0.1,momentum=0.9,nesterov=true,"
        "weight_decay=1e-4; name=adam, adamw, rmsprop or adagrad selects another optimizer with its own settings; all "
        "take clip_norm and clip_value",
    )
    group.addoption(
        "--imagenet",
        type=Path,
        metavar="PATH",
        help="ImageNet as a tree of files or in a converted format (default: draw and cache a small set)",
    )
    group.addoption(
        "--openimages",
        type=Path,
        metavar="PATH",
        help="Open Images V4 tree or converted file, for recipes/test_openimages_*.py",
    )
    group.addoption(
        "--network", type=Path, metavar="FILE.onnx", help="your own network, for recipes/test_your_network.py"
    )
    group.addoption(
        "--shape",
        action="append",
        default=[],
        metavar="INPUT=NxCxHxW",
        help="dimensions of an input that the file leaves open; repeat it for each input",
    )
    group.addoption("--loader-workers", type=int, metavar="N", help="image loader processes (default: one per core)")
    group.addoption(
        "--seed", type=int, default=0, metavar="N", help="seed of weights and image order (default: %(default)s)"
    )
    group.addoption(
        "--job-timeout",
        type=float,
        metavar="SECONDS",
        help="time limit of a worker (default: 1800; none if the preset trains to a published accuracy)",
    )
    group.addoption(
        "--job-memory",
        default="90%",
        metavar="SIZE",
        help="memory limit of a worker: 8G, 500M or 80%% of all memory (default: 90%%)",
    )
    group.addoption(
        "--ranks",
        metavar="N[,…]",
        help="level 3: train with N processes; 1,2,4 measures each number (default: level 3 is not measured)",
    )
    group.addoption(
        "--scheme",
        metavar="NAME[:KEY=VALUE…][,…]",
        help="scheme that combines ranks' updates, such as all_reduce,top_k:density=0.01, or a framework's own, such "
        "as ddp (default: all_reduce)",
    )
    group.addoption(
        "--communicator", metavar="NAME[,…]", help="communicator: gloo, mpi or nccl (default: the first installed)"
    )
    group.addoption(
        "--algorithm", metavar="NAME[,…]", help="algorithm of the collectives, such as ring (default: native)"
    )
    group.addoption(
        "--scaling",
        choices=["weak", "strong"],
        help="weak: each rank has the recipe's batch (default); strong: the recipe's batch is split across ranks",
    )
    group.addoption("--oversubscribe", action="store_true", help="allow more ranks than cores or GPUs; results get a !")
    turns.add_options(group)
    group.addoption("--wrap", metavar="CMD", help="command to run each worker under, such as 'perf stat -d'")
    group.addoption("--jobs", type=Path, metavar="DIR", help="folder for job files (default: .d5suite/jobs)")
    group.addoption(
        "--write-jobs", type=Path, metavar="DIR", help="level 3: write job files to run elsewhere, and measure nothing"
    )
    group.addoption(
        "--from-jobs", type=Path, metavar="DIR", help="read the results of such job files, and measure nothing"
    )
    parser.addini(
        "d5suite_python", "interpreter per backend, one 'NAME = PYTHON' per line", type="linelist", default=[]
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Validate the options, and make pytest-benchmark's JSON file atomic."""
    config.addinivalue_line("markers", "gpu: needs a GPU")
    config.addinivalue_line("markers", "slurm: needs a Slurm cluster")
    config.addinivalue_line("markers", "d5suite_not_asked(reason): deselected, because the options do not ask for it")
    # Checked now: while a test runs, pytest captures standard error.
    config.stash[stash.TERMINAL] = sys.__stderr__ is not None and sys.__stderr__.isatty()
    config.stash[stash.RECORDS] = {}
    config.stash[stash.KEPT] = {}
    config.stash[stash.FAILURES] = []
    config.stash[stash.RESULTS] = []
    config.stash[stash.REMARKS] = []
    config.stash[stash.UNASKED] = {}
    config.stash[stash.SIGNALS] = contextlib.ExitStack()
    # Registered after pytest-benchmark, whose saving it wraps, and before pytest's reporter.
    config.pluginmanager.register(saving, "d5suite-saving")
    path = config.getoption("benchmark_json", None)
    try:
        if path is not None:
            _keep_inputs(config, Path(path))
            config.option.benchmark_json = config.stash[saving.DESTINATION] = saving.AtomicDestination(Path(path))
        if config.getoption("backend") is not None:
            config.stash[stash.SELECTIONS] = _asked_selections(config)
        _check(config)
    except D5Error as error:
        raise pytest.UsageError(str(error)) from error


def _asked_selections(config: pytest.Config) -> list[Selection]:
    from d5suite.backends import select
    from d5suite.launch.base import interpreter

    names = [name for name in str(config.getoption("backend")).split(",") if name.strip()]
    if not names:
        raise ConfigurationError("--backend names no backend")
    chosen = []
    for name in names:
        selection = select(name)
        if selection in chosen:
            raise ConfigurationError(f"--backend names {name!r} twice")
        selection.backend.check(device=config.getoption("device"), precision=config.getoption("precision"))
        problem = None if elsewhere(config) else selection.backend.problem(selection.mode)
        if problem and interpreter(selection.backend.name, pythons(config)) is None:
            raise ConfigurationError(problem, where=f"--backend {name}")
        chosen.append(selection)
    return chosen


def _keep_inputs(config: pytest.Config, path: Path) -> None:
    """Raise `ConfigurationError` if the results would replace a recipe or the network."""
    from d5suite.report.outputs import check_outputs

    option, network = "--benchmark-json", config.getoption("network")
    if path.suffix == ".py" and path.exists():
        raise ConfigurationError("results would replace a Python file", where=f"{option} {path}")
    if network is not None and path.exists():
        check_outputs({option: path}, [config.invocation_params.dir / network])


def elsewhere(config: pytest.Config) -> bool:
    """Return whether jobs run on other machines, so that this one's resources do not matter."""
    return bool(config.getoption("write_jobs") or config.getoption("from_jobs"))


def _check(config: pytest.Config) -> None:
    """Raise `ConfigurationError` if an option is invalid by itself."""
    for name, (least, most) in BOUNDS.items():
        value = config.getoption(name)
        if value is not None and not least <= value <= most:
            rule = f"at least {least}" if not value >= least else f"at most {most}"
            raise ConfigurationError(f"--{name.replace('_', '-')} is {value}; it must be {rule}")
    turns.check_options(config)
    if config.getoption("l2_cold") and config.getoption("device") == "cpu":
        raise ConfigurationError("--l2-cold is for a GPU: CPU caches are not flushed", hint="Add --device cuda.")
    try:
        words = shlex.split(config.getoption("wrap") or "")
    except ValueError as error:
        raise ConfigurationError(f"{error} in {config.getoption('wrap')!r}", where="--wrap") from None
    if words and shutil.which(words[0]) is None:
        raise ConfigurationError(f"{words[0]!r} cannot be run as a command", where="--wrap")
    for name in ("imagenet", "openimages"):
        given = config.getoption(name)
        if given is not None and not given.exists():
            raise ConfigurationError("there is no such dataset", where=f"--{name} {given}")
    if config.getoption("loader_workers") is not None:
        from d5suite.data.loader import check_workers

        check_workers(config.getoption("loader_workers"), _cores(config))
    if config.getoption("optimizer") is not None:
        _optimizer(config.getoption("optimizer"))
    if _shapes(config) and config.getoption("network") is None:
        raise ConfigurationError("--shape is for the inputs of a network", hint="Add --network FILE.onnx.")
    _memory(config.getoption("job_memory"))
    if config.getoption("write_jobs") and config.getoption("from_jobs"):
        raise ConfigurationError("--write-jobs comes first, and --from-jobs in a later run")
    if elsewhere(config) and (config.getoption("ranks") is None or config.getoption("threads") is None):
        raise ConfigurationError("jobs that run elsewhere need --ranks and --threads, of all ranks together")
    if config.getoption("ranks") is None:
        given = [name for name in RANKED if config.getoption(name)]
        if given:
            raise ConfigurationError(f"--{given[0]} is for several ranks", hint="Add --ranks N.")
    else:
        _ranks(config)


def settings(config: pytest.Config) -> Settings:
    """Return the user's choices for the whole session."""
    if stash.SETTINGS not in config.stash:
        from d5suite.cases.case import Settings
        from d5suite.instruments.threads import allowed_cpus

        network = config.getoption("network")
        workers = config.getoption("loader_workers")
        optimizer = config.getoption("optimizer")
        folder = config.invocation_params.dir
        config.stash[stash.SETTINGS] = Settings(
            preset=config.getoption("preset"),
            device=config.getoption("device"),
            precision=config.getoption("precision"),
            threads=config.getoption("threads") or len(allowed_cpus()),
            seed=config.getoption("seed"),
            loader_workers=_cores(config) if workers is None else workers,
            batch_size=config.getoption("batch_size"),
            optimizer=None if optimizer is None else _optimizer(optimizer),
            datasets={name: config.getoption(name) for name in ("imagenet", "openimages")},
            timeout_s=config.getoption("job_timeout"),
            memory_bytes=_memory(config.getoption("job_memory")),
            wrap=config.getoption("wrap"),
            pythons=pythons(config),
            sampling=_sampling(config),
            jobs=config.getoption("jobs") or config.rootpath / ".d5suite" / "jobs",
            network=None if network is None else folder / network,
            shapes=_shapes(config),
            ranks=_ranks(config) if config.getoption("ranks") is not None else (),
            divides_batch=config.getoption("scaling") == "strong",
            wait_quiet_s=config.getoption("wait_quiet"),
            write_jobs=_absolute(folder, config.getoption("write_jobs")),
            from_jobs=_absolute(folder, config.getoption("from_jobs")),
            named=[folder / str(argument).split("::")[0] for argument in config.args],
        )
    return config.stash[stash.SETTINGS]


def _absolute(folder: Path, given: Path | None) -> Path | None:
    return None if given is None else folder / given


def _shapes(config: pytest.Config) -> dict[str, tuple[int, ...]]:
    if not config.getoption("shape"):
        return {}
    from d5suite.cases.user_network import parse_shapes

    return parse_shapes(config.getoption("shape"))


def _ranks(config: pytest.Config) -> list[Ranks]:
    """Return every combination of ranks, scheme, communicator and algorithm that was asked for."""
    from d5suite.distributed.algorithms import ALGORITHMS
    from d5suite.distributed.communicators import COMMUNICATORS
    from d5suite.distributed.schemes import SCHEMES, settings_from_dict
    from d5suite.instruments.threads import allowed_cpus

    counts = [_count(text) for text in _listed(config, "ranks", "")]
    cores = min(config.getoption("threads") or sys.maxsize, len(allowed_cpus()))
    if max(counts) > cores and not config.getoption("oversubscribe") and not elsewhere(config):
        raise ConfigurationError(
            f"{max(counts)} ranks are more than the {cores} core{'s' if cores > 1 else ''} that they may use",
            where="--ranks",
            hint="Their times would mean little. To run them anyway, give --oversubscribe.",
        )
    found: list[Ranks] = []
    for scheme, algorithm, communicator, count in itertools.product(
        _listed(config, "scheme", "all_reduce"),
        _listed(config, "algorithm", "native"),
        _listed(config, "communicator", ""),
        counts,
    ):
        name, *pairs = scheme.split(":")
        settings = dict(_setting(pair) for pair in pairs)
        native = name not in SCHEMES
        if native:
            _check_native(config, name, settings, algorithm)
        else:
            settings_from_dict({"name": name, **settings})
        _require("algorithm", algorithm, ALGORITHMS)
        # With a framework's own scheme it only lets ranks agree, on the CPU.
        device = "cpu" if native else config.getoption("device")
        chosen = _communicator(communicator, count, device, elsewhere(config))
        launcher = COMMUNICATORS[chosen].launcher if count > 1 else "none"
        how = Distributed(name, settings, chosen, algorithm, launcher, config.getoption("oversubscribe"), native)
        if native and count == 1:  # every backend has this one
            how = replace(how, scheme=next(iter(SCHEMES)), settings={}, native=False)
        if count > 1 or all(each.size > 1 for each in found):  # one rank is the same, whatever the others do
            found.append(Ranks(count, how))
    return found


def _check_native(config: pytest.Config, name: str, settings: dict[str, Any], algorithm: str) -> None:
    """Raise `ConfigurationError` unless a backend has a scheme of its own with these settings."""
    from d5suite.backends import discover
    from d5suite.distributed.schemes import SCHEMES, settings_from_dict

    backends = list(discover()[0].values())
    own = list(dict.fromkeys(each for backend in backends for each in backend.schemes))
    _require("scheme", name, [*SCHEMES, *own])
    if algorithm != "native":
        raise ConfigurationError(
            f"{name} is a framework's own scheme, which does not use d5suite's collectives",
            where=f"--algorithm {algorithm}",
            hint="Leave --algorithm out, or measure the others in a run of their own.",
        )
    asked = [selection.backend for selection in config.stash.get(stash.SELECTIONS, [])] or backends
    for backend in asked:
        if name in backend.schemes:
            settings_from_dict({"name": name, **settings}, backend)


def _communicator(name: str, ranks: int, device: str, elsewhere: bool) -> str:
    """Return a communicator that can be used, by default the first one."""
    from d5suite.distributed.communicators import COMMUNICATORS, problem

    if ranks == 1:
        return "local"
    usable = [each for each, of in COMMUNICATORS.items() if of.launcher != "none" and device in of.devices]
    if not name:
        ready = (each for each in PREFERRED if each in usable and (elsewhere or problem(each) is None))
        name = next(ready, usable[0])
    _require("communicator", name, COMMUNICATORS)
    lacking = None if elsewhere else problem(name)
    if lacking is None and not elsewhere and COMMUNICATORS[name].launcher == "mpi":
        from d5suite.launch.mpi import mpiexec

        mpiexec(ranks)
    if lacking is not None:
        raise ConfigurationError(lacking, where=f"--communicator {name}")
    if name == "local":
        raise ConfigurationError(f"'local' is for one rank, not {ranks}", where="--communicator")
    return name


def _listed(config: pytest.Config, name: str, default: str) -> list[str]:
    given = config.getoption(name)
    values = [default] if given is None else [each.strip() for each in given.split(",") if each.strip()]
    if not values or len(set(values)) < len(values):
        raise ConfigurationError(f"{given!r} names {'something twice' if values else 'nothing'}", where=f"--{name}")
    return values


def _require(option: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigurationError(
            f"there is no {option} {name!r}", where=f"--{option}", hint=f"Known: {', '.join(known)}."
        )


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_RANKS:
        raise ConfigurationError(f"{text!r} is not a number of ranks from 1 to {MOST_RANKS}", where="--ranks")
    return int(text)


def _setting(pair: str) -> tuple[str, Any]:
    key, _, text = pair.partition("=")
    try:
        return key, json.loads(text)
    except ValueError:
        if key and text:
            return key, text
        raise ConfigurationError(f"{pair!r} is not KEY=VALUE", where="--scheme") from None


def pythons(config: pytest.Config) -> dict[str, str]:
    """Return the interpreters by backend from the ini file."""
    pairs = [line.partition("=") for line in config.getini("d5suite_python")]
    return {name.strip(): python.strip() for name, _, python in pairs}


def _cores(config: pytest.Config) -> int:
    """Return the number of cores that each job may use."""
    from d5suite.instruments.threads import allowed_cpus

    cores = config.getoption("threads") if elsewhere(config) else len(allowed_cpus())
    return max(1, min(config.getoption("threads") or cores, cores))


def _optimizer(text: str) -> Any:
    from d5suite.optimizers.settings import optimizer_from_dict

    chosen: dict[str, Any] = {"name": "sgd"}
    given: set[str] = set()
    for pair in text.split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        if key in given:
            raise ConfigurationError(f"{key} is given twice", where="--optimizer")
        given.add(key)
        if key == "name":
            chosen[key] = value
            continue
        try:
            chosen[key] = value.lower() == "true" if value.lower() in ("true", "false") else float(value)
        except ValueError as error:
            raise ConfigurationError(f"{pair!r} is not KEY=VALUE with a number", where="--optimizer") from error
    return optimizer_from_dict(chosen)


def _memory(text: str) -> int:
    import psutil

    units = {"%": psutil.virtual_memory().total / 100, "G": 2**30, "M": 2**20}
    try:
        amount = float(text[:-1]) * units[text[-1].upper()]
    except (KeyError, ValueError, IndexError):
        raise ConfigurationError(f"{text!r} is not a size such as 8G, 500M or 80%", where="--job-memory") from None
    if not 1 <= amount < math.inf:
        raise ConfigurationError(f"{text!r} must be positive and finite", where="--job-memory")
    return int(amount)


def benchmark_options(config: pytest.Config) -> dict[str, str]:
    """Return the user's pytest-benchmark options by name."""
    arguments = (*config.invocation_params.args, *config.getini("addopts"))
    pairs = (str(argument).partition("=") for argument in arguments if str(argument).startswith("--benchmark-"))
    return {name: value for name, _, value in pairs}


def _sampling(config: pytest.Config) -> dict[str, Any]:
    """Return the user's pytest-benchmark options as `SamplingSettings` fields."""
    given = benchmark_options(config)
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
    if config.getoption("l2_cold"):
        sampling["l2_cold"] = True
    from d5suite.instruments.settings import SamplingSettings

    checked: SamplingSettings = SamplingSettings.from_dict(sampling)
    return {key: value for key, value in checked.to_dict().items() if key in sampling}
