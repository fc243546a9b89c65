"""``d5suite conformance``: the conformance kit, run by pytest in a process of its own."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser("conformance", help="check that a backend keeps the contract")
    command.add_argument("backend", metavar="NAME[:MODE]")
    command.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: %(default)s")
    command.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: every allowed CPU)")
    command.add_argument("-k", dest="only", metavar="EXPRESSION", help="run cases whose names match, as for pytest")
    extent = command.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="check every clause, operator and level, on fewer cases")
    extent.add_argument("--zoo", action="store_true", help="check every network of the zoo instead of the usual cases")
    command.add_argument("-x", "--exitfirst", action="store_true", help="stop at the first failure")
    command.add_argument(
        "--lf", "--last-failed", dest="last_failed", action="store_true",
        help="run the cases that failed in the last run from this folder",
    )  # fmt: skip
    command.add_argument("--durations", type=int, metavar="N", help="list the N slowest cases, 0 for all")
    command.add_argument("--full-trace", action="store_true", help="show whole tracebacks with d5suite's lines")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    import signal
    import subprocess

    from d5suite import testing
    from d5suite.backends import select
    from d5suite.instruments.threads import allowed_cpus, thread_environment

    precision = select(options.backend).backend.precisions[0]  # any that it has: the kit runs them all
    threads = options.threads or len(allowed_cpus())
    folder = Path(testing.__file__).parent
    cases = "d5suite.testing.whole_zoo" if options.zoo else "d5suite.testing"
    command = [sys.executable, "-m", "pytest", "-c", str(folder / "conformance.ini"), "--rootdir", str(folder),
               "--no-header", "--tb=short", "--pyargs", cases, "--backend", options.backend,
               "--device", options.device, "--precision", precision, "--threads", str(threads)]  # fmt: skip
    command += ["-m", "not slow"] if options.quick else []
    command += ["-k", options.only] if options.only else []
    command += ["--exitfirst"] if options.exitfirst else []
    command += ["--last-failed", "--last-failed-no-failures=none"] if options.last_failed else []
    command += ["--durations", str(options.durations)] if options.durations is not None else []
    command += ["--full-trace"] if options.full_trace else []
    remembered = Path(".d5suite", "conformance", f"{options.backend.replace(':', '-')}-{options.device}").absolute()
    command += ["-o", f"cache_dir={remembered}"]
    # In a subprocess: the kit imports the framework, and libraries read the thread budget on load.
    process = subprocess.Popen(command, env={**os.environ, **thread_environment(threads)})
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # which the kit gets, too, and ends with its table
            continue
    if code < 0:
        name = signal.Signals(-code).name
        print(f"error: {options.backend} died of {name}: the lines above name the running case", file=sys.stderr)
        return 128 - code
    return code
