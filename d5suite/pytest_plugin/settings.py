"""The session's `Settings`, from command-line options that `options` declares."""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from d5suite.errors import ConfigurationError
from d5suite.job import Distributed, Ranks
from d5suite.passes import requested
from d5suite.pytest_plugin import stash

if TYPE_CHECKING:
    from d5suite.backends import Selection
    from d5suite.cases.case import Settings
    from d5suite.cases.user_network import Given
    from d5suite.tuning.profiles import TunedProfile

MOST_RANKS = 4096

MOST_ROUNDS = 1_000_000
"""Most rounds that ``--benchmark-min-rounds`` may ask for: more would outlast every time limit."""

PREFERRED = ("nccl", "gloo", "mpi")
"""Communicators in order of preference: the first usable one is the default."""


def elsewhere(config: pytest.Config) -> bool:
    """Return whether jobs run on other machines, so that this one's resources do not matter."""
    return bool(config.getoption("write_jobs") or config.getoption("from_jobs"))


def settings(config: pytest.Config) -> Settings:
    """Return the user's choices for the whole session; made once."""
    if stash.SETTINGS not in config.stash:
        from d5suite.cases.case import Settings

        network = config.getoption("network")
        workers = config.getoption("loader_workers")
        optimizer = config.getoption("optimizer")
        folder = config.invocation_params.dir
        config.stash[stash.SETTINGS] = Settings(
            preset=config.getoption("preset"),
            device=config.getoption("device"),
            precision=config.getoption("precision"),
            threads=config.getoption("threads") or default_threads(),
            seed=config.getoption("seed"),
            loader_workers=cores_of(config) if workers is None else workers,
            batch_size=config.getoption("batch_size"),
            optimizer=None if optimizer is None else optimizer_of(optimizer),
            datasets={name: config.getoption(name) for name in ("imagenet", "openimages")},
            timeout_s=config.getoption("job_timeout"),
            memory_bytes=memory_of(config.getoption("job_memory")),
            wrap=config.getoption("wrap"),
            pythons=pythons(config),
            sampling=_sampling(config),
            jobs=config.getoption("jobs") or config.rootpath / ".d5suite" / "jobs",
            network=None if network is None else folder / network,
            shapes=shapes_of(config),
            inputs=inputs_of(config),
            sample=_absolute(folder, config.getoption("inputs")),
            ranks=ranks_of(config) if config.getoption("ranks") is not None else (),
            divides_batch=config.getoption("scaling") == "strong",
            passes=requested(config.getoption("passes"), folder),
            wait_quiet_s=config.getoption("wait_quiet"),
            write_jobs=_absolute(folder, config.getoption("write_jobs")),
            from_jobs=_absolute(folder, config.getoption("from_jobs")),
            tuned=_tuned(config).settings if config.getoption("tuned") else {},
            named=[folder / str(argument).split("::")[0] for argument in config.args],
        )
    return config.stash[stash.SETTINGS]


def _tuned(config: pytest.Config) -> TunedProfile:
    """Return the settings of ``--tuned``; made once."""
    if stash.TUNED not in config.stash:
        from d5suite.tuning.profiles import use_tuned

        config.stash[stash.TUNED] = found = use_tuned(
            config.invocation_params.dir / config.getoption("tuned"),
            threads=config.getoption("threads") or default_threads(),
            device=config.getoption("device"),
            loader_workers=cores_of(config),
            anywhere=config.getoption("tuned_anywhere"),
        )
        config.stash[stash.REMARKS] += found.remarks
    return config.stash[stash.TUNED]


def tuned_selection(config: pytest.Config, case: str, selection: Selection) -> Selection:
    """Return a backend in the mode that ``--tuned`` has for a case, unless a mode is named."""
    if config.getoption("tuned") is None or selection.mode != selection.backend.default_mode:
        return selection
    mode = _tuned(config).modes.get((case, selection.backend.name), selection.mode)
    chosen = replace(selection, mode=mode)
    return selection if chosen in config.stash.get(stash.SELECTIONS, []) else chosen


def _absolute(folder: Path, given: Path | None) -> Path | None:
    return None if given is None else folder / given


def shapes_of(config: pytest.Config) -> dict[str, tuple[int, ...]]:
    """Return the dimensions of the inputs that ``--shape`` gives."""
    if not config.getoption("shape"):
        return {}
    from d5suite.cases.user_network import parse_shapes

    return parse_shapes(config.getoption("shape"))


def inputs_of(config: pytest.Config) -> dict[str, Given]:
    """Return the values and ranges of inputs that ``--input`` gives."""
    if not config.getoption("input"):
        return {}
    from d5suite.cases.user_network import parse_inputs

    return parse_inputs(config.getoption("input"))


SIZES_OF_TRANSFERS = {"slice_bytes": "slice", "credit_bytes": "credit"}
"""Options of pytest, by the setting of a scheme's transfers that they give."""


def ranks_of(config: pytest.Config) -> list[Ranks]:
    """Return every requested combination of ranks, scheme, order, communicator and algorithm."""
    from d5suite.distributed.algorithms import ALGORITHMS
    from d5suite.distributed.communicators import COMMUNICATORS
    from d5suite.distributed.network import require_interface
    from d5suite.distributed.order_tasks import check_order
    from d5suite.distributed.schemes import SCHEMES, refusal, settings_from_dict
    from d5suite.instruments.threads import allowed_cpus

    counts = [_count(text) for text in _listed(config, "ranks", "")]
    cores = min(config.getoption("threads") or sys.maxsize, len(allowed_cpus()))
    if max(counts) > cores and not config.getoption("oversubscribe") and not elsewhere(config):
        raise ConfigurationError(
            f"{max(counts)} ranks are more than the {cores} core{'s' if cores > 1 else ''} that they may use",
            where="--ranks",
            hint="Their times would mean little. To run them anyway, give --oversubscribe.",
        )
    interface = config.getoption("interface") or ""
    if interface and not elsewhere(config):
        require_interface(interface, "--interface")
    found: list[Ranks] = []
    transfers = {
        name: config.getoption(option) for name, option in SIZES_OF_TRANSFERS.items() if config.getoption(option)
    }
    for scheme, order, algorithm, communicator, count in itertools.product(
        _listed(config, "scheme", "all_reduce"),
        _listed(config, "order", ""),
        _listed(config, "algorithm", "native"),
        _listed(config, "communicator", ""),
        counts,
    ):
        name, *pairs = scheme.split(":")
        settings = dict(_setting(pair) for pair in pairs)
        native = name not in SCHEMES
        if order:
            check_order(order, "--order")
        asked = {**({"order": order} if order else {}), **transfers}
        honoured = {key: value for key, value in asked.items() if refusal(name, key) is None}
        if native:
            _check_native(config, name, settings, algorithm)
        else:
            settings_from_dict({"name": name, **settings, **honoured})
        settings |= asked if count > 1 else honoured
        _require("algorithm", algorithm, ALGORITHMS)
        # With a framework's own scheme the communicator only lets ranks agree, on the CPU.
        device = "cpu" if native else config.getoption("device")
        chosen = _communicator(communicator, count, device, elsewhere(config))
        launcher = COMMUNICATORS[chosen].launcher if count > 1 else "none"
        how = Distributed(
            name, settings, chosen, algorithm, launcher, config.getoption("oversubscribe"), native, interface
        )  # fmt: skip
        if native and count == 1:  # every backend has this one
            how = replace(how, scheme=next(iter(SCHEMES)), settings={}, native=False)
        if count > 1 or all(each.size > 1 for each in found):  # one rank is the same with every scheme
            found.append(Ranks(count, how))
    return found


def _check_native(config: pytest.Config, name: str, settings: dict[str, Any], algorithm: str) -> None:
    """Raise `ConfigurationError` if no backend has a scheme of its own with these settings."""
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
    """Return the named communicator, or the first usable one if none is named."""
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


def cores_of(config: pytest.Config) -> int:
    """Return the number of cores that each job may use."""
    from d5suite.instruments.threads import allowed_cpus

    cores = config.getoption("threads") if elsewhere(config) else len(allowed_cpus())
    return max(1, min(config.getoption("threads") or default_threads(), cores))


def default_threads() -> int:
    """Return the default number of threads: the allowed CPUs, or the container's quota if less."""
    from d5suite.instruments.environment import cpu_quota
    from d5suite.instruments.threads import allowed_cpus

    return max(1, int(min(len(allowed_cpus()), cpu_quota() or math.inf)))


def optimizer_of(text: str) -> Any:
    """Return the optimizer that ``--optimizer`` describes."""
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


def memory_of(text: str) -> int:
    """Return the bytes of a size such as 8G, 500M or 80% (of what this process may use)."""
    from d5suite.instruments.control_groups import total_memory

    units = {"%": total_memory() / 100, "G": 2**30, "M": 2**20}
    try:
        amount = float(text[:-1]) * units[text[-1].upper()]
    except (KeyError, ValueError, IndexError):
        raise ConfigurationError(f"{text!r} is not a size such as 8G, 500M or 80%", where="--job-memory") from None
    if not 1 <= amount < math.inf:
        raise ConfigurationError(f"{text!r} must be positive and finite", where="--job-memory")
    return int(amount)


def benchmark_options(config: pytest.Config) -> dict[str, str]:
    """Return the user's pytest-benchmark options by name."""
    variable = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    words = [str(each) for each in (*config.invocation_params.args, *config.getini("addopts"), *variable)]
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--benchmark-"):
            name, equals, value = word.partition("=")
            found[name] = value if equals or following.startswith("-") else following
    return found


SINGLE_CALLS = "d5suite takes samples of single calls by its own clock, without garbage collection"
APART = "workers measure in processes of their own; --passes layers takes the time of each layer"
WITHOUT_EFFECT = {
    **dict.fromkeys(("min-time", "calibration-precision", "timer", "disable-gc"), SINGLE_CALLS),
    "confidence": "d5suite's intervals are of 95%",
    **dict.fromkeys(("cprofile", "cprofile-loops", "cprofile-top", "cprofile-dump"), APART),
}
"""Options of pytest-benchmark that do not change what d5suite does, with the reasons."""

_SAMPLING = ("max_time", "precision", "warmup", "warmup_iterations")


def without_effect(config: pytest.Config) -> list[str]:
    """Say which of the user's pytest-benchmark options have no effect on d5suite's measurements."""
    reasons: dict[str, list[str]] = {}
    for option in benchmark_options(config):
        if why := WITHOUT_EFFECT.get(option.removeprefix("--benchmark-")):
            reasons.setdefault(why, []).append(option)
    return [f"no effect on d5suite's measurements: {', '.join(given)}: {why}" for why, given in reasons.items()]


def taken_options(config: pytest.Config, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a benchmark that d5suite used, as pytest-benchmark states them."""
    given = benchmark_options(config)
    taken = ["min_rounds", *(name for name in _SAMPLING if f"--benchmark-{name.replace('_', '-')}" in given)]
    return {name: options[name] for name in taken if name in options}


def _sampling(config: pytest.Config) -> dict[str, Any]:
    """Return the user's pytest-benchmark options as `SamplingSettings` fields."""
    given = benchmark_options(config)
    sampling: dict[str, Any] = {"min_rounds": config.getoption("benchmark_min_rounds")}
    if sampling["min_rounds"] > MOST_ROUNDS:
        raise ConfigurationError(f"more than {MOST_ROUNDS} rounds", where="--benchmark-min-rounds")
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
