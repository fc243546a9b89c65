"""What pytest-benchmark reads and writes itself, checked before anything is measured.

It reads and writes its storage (``--benchmark-save``, ``--benchmark-compare``) and histograms.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from d5suite.errors import ConfigurationError
from d5suite.files import check_writable


def has_benchmark(config: pytest.Config) -> bool:
    """Return whether pytest-benchmark takes part; ``-p no:benchmark`` keeps it out."""
    return hasattr(config.option, "benchmark_storage")


def stores(config: pytest.Config) -> bool:
    """Return whether results go into pytest-benchmark's storage."""
    option = config.option
    return bool(getattr(option, "benchmark_save", None) or getattr(option, "benchmark_autosave", None))


def check_storage(config: pytest.Config) -> None:
    """Check the storage, which pytest-benchmark opens when the run begins.

    Raises
    ------
    ConfigurationError
        If it cannot be opened or, if results go there, cannot be written to; or if what
        ``--benchmark-compare`` names is no file in it.
    """
    if not has_benchmark(config) or hasattr(config, "workerinput"):
        return
    from pytest_benchmark.logger import Logger
    from pytest_benchmark.utils import get_machine_id, load_storage

    option = config.option
    where = f"--benchmark-storage {option.benchmark_storage}"
    try:
        logger = Logger(Logger.QUIET, config=config)
        storage: Any = load_storage(
            option.benchmark_storage, logger=logger, default_machine_id=get_machine_id(), netrc=option.benchmark_netrc
        )
        if stores(config) and hasattr(storage, "get"):
            check_writable(Path(storage.get(f"0000_{option.benchmark_save or option.benchmark_autosave}.json")))
    except Exception as error:  # of pytest-benchmark, and of a client of Elasticsearch
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigurationError(
            f"results cannot be stored here: {why}", where=where, hint="Give a folder: file://PATH."
        ) from error
    if isinstance(option.benchmark_compare, str) and hasattr(storage, "query"):
        try:
            storage.query(option.benchmark_compare)
        except (OSError, ValueError) as error:
            raise ConfigurationError(str(error), where=f"--benchmark-compare {option.benchmark_compare}") from error


def check_display(config: pytest.Config) -> None:
    """Check what pytest-benchmark does only once all is measured.

    Raises
    ------
    ConfigurationError
        If it cannot draw the histograms that are asked for, or has no earlier run for
        ``--benchmark-compare-fail``.
    """
    option = config.option
    if option.benchmark_histogram:
        where = f"--benchmark-histogram {option.benchmark_histogram[0]}"
        if importlib.util.find_spec("pygal") is None:
            hint = "Install it: pip install 'pytest-benchmark[histogram]'."
            raise ConfigurationError("histograms need pygal, which is not installed", where=where, hint=hint)
        folder = Path(option.benchmark_histogram[0]).absolute().parent
        while not folder.exists():  # pytest-benchmark makes them
            folder = folder.parent
        try:
            check_writable(folder / "d5suite.svg")
        except OSError as error:
            raise ConfigurationError(f"histograms cannot be written here: {error.strerror}", where=where) from error
    if option.benchmark_compare_fail and not config._benchmarksession.compared_mapping:  # type: ignore[attr-defined]
        raise ConfigurationError(
            "there is no earlier run to compare with",
            where="--benchmark-compare-fail",
            hint="Keep one with --benchmark-autosave, and name it: --benchmark-compare.",
        )
