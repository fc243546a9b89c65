"""Command-line options and their early validation."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from d5suite.errors import ConfigurationError, D5Error
from d5suite.files import given_path
from d5suite.passes import find as find_pass
from d5suite.passes import requested
from d5suite.pytest_plugin import saving, stash, sweep, turns
from d5suite.pytest_plugin.settings import (
    cores_of,
    elsewhere,
    inputs_of,
    memory_of,
    optimizer_of,
    pythons,
    ranks_of,
    shapes_of,
)
from d5suite.pytest_plugin.storage import check_storage

if TYPE_CHECKING:
    from d5suite.backends import Selection


BOUNDS = {
    "threads": (1, 4096),
    "batch_size": (1, 2**31 - 1),
    "seed": (0, 2**31 - 1),  # as a 32-bit integer, which some frameworks' generators take
    "loader_workers": (0, 4096),
    "job_timeout": (1, math.inf),
    "launches": (1, 100),
    "wait_quiet": (0, 86_400),
    "slice": (1, 2**40),
    "credit": (1, 2**40),
}
"""The smallest and the largest value of each numeric option."""

RANKED = (
    *("scheme", "order", "slice", "credit", "communicator", "algorithm", "interface", "scaling", "oversubscribe"),
)
"""Options that make sense with ``--ranks`` only."""


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
    group.addoption("--precision", default="fp32", choices=sweep.PRECISIONS, help="default: %(default)s")
    group.addoption(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads per framework (default: every allowed CPU, up to a container's quota)",
    )
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
        type=given_path,
        metavar="PATH",
        help="ImageNet as a tree of files or in a converted format (default: draw and cache a small set)",
    )
    group.addoption(
        "--openimages",
        type=given_path,
        metavar="PATH",
        help="Open Images V4 tree or converted file, for recipes/test_openimages_*.py",
    )
    group.addoption(
        "--network", type=given_path, metavar="FILE.onnx", help="your own network, for recipes/test_your_network.py"
    )
    group.addoption(
        "--shape",
        action="append",
        default=[],
        metavar="INPUT=NxCxHxW",
        help="dimensions of an input that the file leaves open; repeat it for each input",
    )
    group.addoption(
        "--input",
        action="append",
        default=[],
        metavar="INPUT=VALUE|LOW..HIGH",
        help="value of an input, or the range of its drawn values (HIGH excluded); repeat it for each input",
    )
    group.addoption(
        "--inputs", type=given_path, metavar="FILE.npz", help="inputs of the network: arrays by input name, not drawn"
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
        help="memory limit of a worker: 8G, 500M or 80%% of all memory, or of what a container may use (default: 90%%)",
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
        "--order",
        metavar="NAME[,…]",
        help="order in which tensors are sent: tic, tac, tac:FILE, forward, backward, random:SEED or framework "
        "(default: tensors are not sent one by one)",
    )
    group.addoption("--slice", type=int, metavar="BYTES", help="the most bytes of a transfer (default: whole tensors)")
    group.addoption(
        "--credit", type=int, metavar="BYTES", help="the most bytes that a rank has on their way (default: no limit)"
    )
    group.addoption(
        "--communicator", metavar="NAME[,…]", help="communicator: gloo, mpi or nccl (default: the first installed)"
    )
    group.addoption(
        "--algorithm", metavar="NAME[,…]", help="algorithm of the collectives, such as ring (default: native)"
    )
    group.addoption(
        "--interface",
        metavar="NAME",
        help="network interface for messages between ranks, such as eth1 (default: each transport chooses)",
    )
    group.addoption(
        "--scaling",
        choices=["weak", "strong"],
        help="weak: each rank has the recipe's batch (default); strong: the recipe's batch is split across ranks",
    )
    group.addoption("--oversubscribe", action="store_true", help="allow more ranks than cores or GPUs; results get a !")
    sweep.add_options(group)
    turns.add_options(group)
    group.addoption(
        "--passes",
        metavar="NAME[,…]",
        help="passes over each step besides time, which is always taken: memory, energy, layers, a plug-in's, or the "
        "path of a Python file that defines some (default: memory,energy)",
    )
    group.addoption("--wrap", metavar="CMD", help="command to run each worker under, such as 'perf stat -d'")
    group.addoption("--jobs", type=given_path, metavar="DIR", help="folder for job files (default: .d5suite/jobs)")
    group.addoption(
        "--write-jobs",
        type=given_path,
        metavar="DIR",
        help="level 3: write job files to run elsewhere, and measure nothing",
    )
    group.addoption(
        "--from-jobs", type=given_path, metavar="DIR", help="read the results of such job files, and measure nothing"
    )
    group.addoption(
        "--tuned", type=given_path, metavar="FILE.toml", help="run with the settings that d5suite tune has found"
    )
    group.addoption(
        "--tuned-anywhere", action="store_true", help="use --tuned on another kind of machine than it was tuned on, too"
    )
    parser.addini(
        "d5suite_python", "interpreter per backend, one 'NAME = PYTHON' per line", type="linelist", default=[]
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Validate the options, and make pytest-benchmark's JSON file atomic."""
    config.addinivalue_line("markers", "gpu: needs a GPU")
    config.addinivalue_line("markers", "slurm: needs a Slurm cluster")
    config.addinivalue_line("markers", "d5suite_deselected(reason): excluded by the options")
    # Checked now: while a test runs, pytest captures standard error.
    config.stash[stash.TERMINAL] = sys.__stderr__ is not None and sys.__stderr__.isatty()
    config.stash[stash.RECORDS] = {}
    config.stash[stash.KEPT] = {}
    config.stash[stash.FAILURES] = []
    config.stash[stash.RESULTS] = []
    config.stash[stash.REMARKS] = []
    config.stash[stash.DESELECTED] = {}
    # Registered after pytest-benchmark, whose saving it wraps, and before pytest's reporter.
    config.pluginmanager.register(saving, "d5suite-saving")
    path = config.getoption("benchmark_json", None)
    try:
        if path is not None:
            _keep_inputs(config, Path(path))
            config.option.benchmark_json = config.stash[saving.DESTINATION] = saving.AtomicDestination(Path(path))
            _keep_folders(config)
        if config.getoption("backend") is not None:
            config.stash[stash.SELECTIONS] = _requested_backends(config)
        _check(config)
        check_storage(config)
    except D5Error as error:
        raise pytest.UsageError(str(error)) from error
    except OSError as error:
        raise pytest.UsageError(f"{error.filename}: {error.strerror}") from error


def _requested_backends(config: pytest.Config) -> list[Selection]:
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
    """Raise `ConfigurationError` if the results would replace the recipe, network or sample."""
    from d5suite.report.outputs import check_outputs

    option, given = "--benchmark-json", [config.getoption(name) for name in ("network", "inputs")]
    if path.suffix == ".py" and os.path.exists(path):
        raise ConfigurationError("results would replace a Python file", where=f"{option} {path}")
    if os.path.isfile(path):
        check_outputs({option: path}, [config.invocation_params.dir / each for each in given if each is not None])


def _keep_folders(config: pytest.Config) -> None:
    """Raise `ConfigurationError` if a pass's files would go into a folder that is not ours."""
    from d5suite.passes.base import FILES

    destination = config.stash[saving.DESTINATION]
    for name, file in requested(config.getoption("passes"), config.invocation_params.dir).items():
        if FILES in find_pass(name, file).schema.get("properties", {}):
            destination.require_free(f".{name}")


def _check(config: pytest.Config) -> None:
    """Raise `ConfigurationError` if an option is invalid by itself."""
    for name, (least, most) in BOUNDS.items():
        value = config.getoption(name)
        if value is not None and not least <= value <= most:
            rule = f"at least {least}" if not value >= least else f"at most {most}"
            raise ConfigurationError(f"--{name.replace('_', '-')} is {value}; it must be {rule}")
    turns.check_options(config)
    sweep.check_options(config)
    requested(config.getoption("passes"), config.invocation_params.dir)
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

        check_workers(config.getoption("loader_workers"), cores_of(config))
    if config.getoption("optimizer") is not None:
        optimizer_of(config.getoption("optimizer"))
    of_inputs = {"--shape": shapes_of(config), "--input": inputs_of(config), "--inputs": config.getoption("inputs")}
    for option, given in of_inputs.items():
        if given and config.getoption("network") is None:
            raise ConfigurationError(f"{option} is for the inputs of a network", hint="Add --network FILE.onnx.")
    memory_of(config.getoption("job_memory"))
    if config.getoption("write_jobs") and config.getoption("from_jobs"):
        raise ConfigurationError("--write-jobs comes first, and --from-jobs in a later run")
    if elsewhere(config) and (config.getoption("ranks") is None or config.getoption("threads") is None):
        raise ConfigurationError("jobs that run elsewhere need --ranks and --threads, of all ranks together")
    if config.getoption("tuned_anywhere") and config.getoption("tuned") is None:
        raise ConfigurationError("--tuned-anywhere is for a file of tuned settings", hint="Add --tuned FILE.toml.")
    if config.getoption("tuned") is not None and (elsewhere(config) or config.getoption("sweep")):
        raise ConfigurationError("tuned settings are for one run on this machine", where="--tuned",
                                 hint="Leave out --sweep, --write-jobs and --from-jobs.")  # fmt: skip
    if config.getoption("ranks") is None:
        given = [name for name in RANKED if config.getoption(name)]
        if given:
            raise ConfigurationError(f"--{given[0]} is for several ranks", hint="Add --ranks N.")
    else:
        ranks_of(config)
