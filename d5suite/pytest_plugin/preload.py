"""pytest, imported before its run begins.

    python -m d5suite.pytest_plugin.preload FD ARGUMENT…

Importing the modules that gather results takes longer than gathering them. So ``d5suite slurm run``
starts this process while its jobs run. When the last job has ended, it writes a byte into the pipe
whose reading end is FD, and pytest starts. If the other end is closed, nothing runs. With ``-`` for
FD pytest starts at once, without early imports. Arguments, output and exit codes are pytest's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

MODULES = (
    "pytest", "d5suite.session.session", "d5suite.session.record", "d5suite.report.schema", "d5suite.report.series",
    "d5suite.report.scaling", "d5suite.report.plots", "d5suite.report.compare", "pytest_benchmark.plugin", "jsonschema",
    "psutil", "scipy.special", "d5suite.cases.recipe",
)  # fmt: skip
"""Slow imports of gathering, apart from pytest and the measurements."""


def main(arguments: Sequence[str]) -> None:
    """Run pytest when the byte arrives.

    Parameters
    ----------
    arguments : sequence of str
        FD or ``-``, and the arguments of pytest.

    Raises
    ------
    SystemExit
        With pytest's exit code.
    """
    descriptor, *words = arguments
    if descriptor != "-":
        # Ctrl-C is for the process that waits for the jobs; its end closes the pipe.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        with contextlib.suppress(Exception):  # pytest will report it
            _prepare()
        with open(int(descriptor), "rb", buffering=0) as pipe:
            if not pipe.read(1):
                return
        signal.signal(signal.SIGINT, before)
        words = ["--assert=plain", *words]  # modules that are imported already cannot be rewritten
    import pytest

    sys.argv = [str(Path(pytest.__file__).with_name("__main__.py")), *words]
    try:
        runpy.run_module("pytest", run_name="__main__")
    finally:
        gc.freeze()  # Python would look for garbage among all modules once more, a quarter of a second


def _prepare() -> None:
    """Import what pytest will import, and draw one figure."""
    for name in MODULES:
        importlib.import_module(name)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from d5suite import backends, measurements

    backends.discover()
    measurements.discover()
    figure = Figure(layout="constrained")
    figure.subplots().set_title("finds fonts")
    FigureCanvasAgg(figure).print_png(io.BytesIO())


if __name__ == "__main__":
    main(sys.argv[1:])
