"""The command ``d5suite``: machine, backends, networks, data and results.

To measure, run ``d5suite bench``, or ``pytest recipes/`` in a checkout.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from d5suite.commands import (
    ab,
    advise,
    backends,
    bench,
    bisect,
    compare,
    conformance,
    crossover,
    data,
    doctor,
    explain,
    history,
    layers,
    machine,
    network,
    operators,
    report,
    roofline,
    simulate,
    slurm,
    study,
    trace,
    tune,
)
from d5suite.errors import D5Error, escaped

COMMANDS = (
    bench,
    doctor, backends, operators, compare, ab, bisect, conformance, network, data, slurm, report, layers, history, trace,
    advise, machine, roofline, explain, simulate, study, crossover, tune,
)  # fmt: skip
"""All commands, in the order of ``d5suite --help``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns
    -------
    int
        0 on success; 1 if a backend does not conform, two datasets differ, or no backend can run a
        network; 2 after an error, which is printed to standard error; 130 after Ctrl-C.
        ``bench`` and ``conformance`` return pytest's exit code; ``ab``, and ``compare`` with two
        files, return the codes of `d5suite.report.verdicts.Exit`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack characters
            stream.reconfigure(errors="replace")
    parser = command_line()
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = _first_of_pytest(words)
    options = parser.parse_args(words[:cut])
    options.further = words[cut + 1 :] if words[cut : cut + 1] == ["--"] else words[cut:]
    if not hasattr(options, "run"):
        parser.print_help()
        return 0
    try:
        return options.run(options) or 0
    except D5Error as error:
        _complain(f"error: {error}\n")
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # exit code 1 would mean a verdict
        if isinstance(error, OSError) and error.filename is not None:
            _complain(f"error: {error.filename}: {error.strerror}\n")
            return 2
        import traceback

        _complain(f"{traceback.format_exc()}error: a fault of d5suite; report it with the lines above\n")
        return 2


def _first_of_pytest(words: Sequence[str]) -> int:
    """Return the index of the first word to pass on to pytest, as some commands do."""
    if words[:1] == ["bench"]:
        return 1 + bench.find_pytest_options(words[1:])
    return words.index("--") if "--" in words and words[0] in ("slurm", "ab", "bisect", "tune") else len(words)


def _complain(text: str) -> None:
    """Write to standard error without control characters: paths and names come from anywhere."""
    sys.stderr.write(escaped(text.expandtabs()))


def command_line() -> argparse.ArgumentParser:
    """Return the parser of all commands; the documentation reads it, too."""
    from d5suite import __version__

    parser = argparse.ArgumentParser(
        prog="d5suite",
        description="Deep-learning benchmarks: described once, run natively on every framework, proved before timed.",
        epilog="In a checkout also: pytest recipes/ --benchmark-json out.json, or pytest operators/",
    )
    parser.add_argument("--version", action="version", version=f"d5suite {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
