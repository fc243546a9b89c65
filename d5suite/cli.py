"""The command ``d5suite``: machine, backends, networks, data and results.

To measure, run pytest: ``pytest recipes/``. Each command imports what it needs when it runs; none
imports a framework.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from d5suite.errors import ConfigurationError, D5Error

if TYPE_CHECKING:
    from rich.console import Console

    from d5suite.report.verdicts import Comparison


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns
    -------
    int
        0 on success; 1 if a backend does not conform, two datasets differ, or no backend can run a
        network; 2 after an error, printed to standard error, also one that nobody foresaw: 1 would
        be a verdict. ``conformance`` passes on the exit code of pytest, which runs it; ``compare``
        of two files and ``ab`` have codes of their own (`d5suite.report.verdicts.Exit`).
    """
    parser = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if words[:1] in (["slurm"], ["ab"], ["bisect"]) and "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.further = words[cut + 1 :]  # of `slurm run`, `ab`, `bisect`: options of pytest
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
    except Exception:
        import traceback

        _complain(f"{traceback.format_exc()}error: a fault of d5suite; report it with the lines above\n")
        return 2


def _complain(text: str) -> None:
    """Write to standard error what a terminal cannot obey: paths and names come from anywhere."""
    from d5suite.report.reading import printable

    sys.stderr.write("\n".join(map(printable, text.expandtabs().split("\n"))))


def _parser() -> argparse.ArgumentParser:
    from d5suite import __version__

    parser = argparse.ArgumentParser(
        prog="d5suite",
        description="Deep-learning benchmarks: described once, run natively on every framework, proved before timed.",
        epilog="To measure: pytest recipes/ --benchmark-json out.json, or pytest operators/",
    )
    parser.add_argument("--version", action="version", version=f"d5suite {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="show what is installed and usable, and how quiet the machine is")
    doctor.add_argument("backend", nargs="*", help="try these backends only")
    doctor.set_defaults(run=_doctor)

    backends = commands.add_parser("backends", help="list backends with their modes, devices and operators")
    backends.set_defaults(run=_backends)

    operators = commands.add_parser("operators", help="show which backend has which operator at level 0")
    operators.set_defaults(run=_operators)

    compare = commands.add_parser(
        "compare", help="judge each benchmark of two runs, or show result files as tables",
        description="Two files: a verdict on each benchmark. One, or more than two: tables.",
        epilog="exit codes: 0 nothing wrong, 1 regression, 2 usage, 3 wrong answer, 4 benchmark missing, "
        "5 not comparable, 6 too noisy to tell or nothing to judge (docs/compare.md)",
    )  # fmt: skip
    compare.add_argument("results", type=Path, nargs="+", metavar="RESULT.json", help="BASE.json NEW.json")
    compare.add_argument("--tables", action="store_true", help="also show two files as tables side by side")
    compare.add_argument("--force", action="store_true", help="also compare runs of different machines or settings")
    compare.add_argument("--thresholds", type=Path, metavar="FILE.toml", help="what counts as a change, by benchmark")
    compare.add_argument("--history", type=Path, metavar="FOLDER", help="judge one file against the runs of a folder")
    compare.add_argument(
        "--between-runs", type=float, metavar="FRACTION",
        help="standard deviation of a median from run to run (default: 0.15)",
    )  # fmt: skip
    _add_forms(compare)
    compare.set_defaults(run=_compare)

    ab = commands.add_parser(
        "ab", help="measure two sides in turn and judge each benchmark by its pairs",
        description="A SPEC is here, an interpreter, a virtual environment, env:NAME=VALUE, mode:NAME, rev:REVISION of "
        "d5suite, or install:REQUIREMENT. Further options of pytest follow after --.",
        epilog="exit codes: as for compare (docs/compare.md)",
    )  # fmt: skip
    ab.add_argument("--a", required=True, metavar="SPEC", help="the base")
    ab.add_argument("--b", required=True, metavar="SPEC", help="the side compared with it")
    _add_paired(ab)
    _add_forms(ab)
    ab.set_defaults(run=_ab)

    bisect = commands.add_parser(
        "bisect", help="find the revision of d5suite, or of a backend, that made a benchmark slower",
        description="Measures revisions in turn with the good one, as ab does. Further options of pytest follow "
        "after --.",
        epilog="exit codes: 0 found, 2 usage, 6 several revisions are left; those of ab if BAD is not slower",
    )  # fmt: skip
    bisect.add_argument("--good", required=True, metavar="REVISION")
    bisect.add_argument("--bad", required=True, metavar="REVISION", help="a later revision that is slower")
    bisect.add_argument(
        "--repository", type=Path, metavar="PATH",
        help="Git repository of a backend, whose revisions are installed (default: d5suite's own)",
    )  # fmt: skip
    _add_paired(bisect)
    bisect.set_defaults(run=_bisect)

    conformance = commands.add_parser("conformance", help="check that a backend keeps the contract")
    conformance.add_argument("backend", metavar="NAME[:MODE]")
    conformance.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: %(default)s")
    conformance.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: every allowed CPU)")
    conformance.add_argument("-k", dest="only", metavar="EXPRESSION", help="run cases whose names match, as for pytest")
    extent = conformance.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="check every clause, operator and level, on fewer cases")
    extent.add_argument("--zoo", action="store_true", help="check every network of the zoo instead of the usual cases")
    conformance.add_argument("-x", "--exitfirst", action="store_true", help="stop at the first failure")
    conformance.add_argument(
        "--lf", "--last-failed", dest="last_failed", action="store_true",
        help="run the cases that failed in the last run from this folder",
    )  # fmt: skip
    conformance.add_argument("--durations", type=int, metavar="N", help="list the N slowest cases, 0 for all")
    conformance.add_argument("--full-trace", action="store_true", help="show whole tracebacks with d5suite's lines")
    conformance.set_defaults(run=_conformance)

    network = commands.add_parser("network", help="show a network's cost, and which backends can run it")
    network.add_argument("network", metavar="NAME|FILE.onnx", help="network of the zoo, or an ONNX file")
    network.add_argument("--batch-size", type=int, default=1, metavar="N")
    network.add_argument("--image-size", type=int, default=224, metavar="PIXELS")
    network.add_argument(
        "--shape", action="append", default=[], metavar="INPUT=NxCxHxW",
        help="dimensions of an input that the file leaves open; repeat it for each input",
    )  # fmt: skip
    network.add_argument("--json", action="store_true", help="print JSON instead of tables")
    network.add_argument("--layers", action="store_true", help="show each layer, not only the totals")
    network.set_defaults(run=_network)

    data = commands.add_parser("data", help="make, convert and verify datasets")
    data_commands = data.add_subparsers(metavar="COMMAND", required=True)
    convert = data_commands.add_parser("convert", help="store a dataset in another format; images keep their bytes")
    convert.add_argument("source", type=Path, metavar="SOURCE", help="dataset in any format")
    convert.add_argument("destination", type=Path, metavar="DESTINATION", help="file for hdf5, otherwise a folder")
    convert.add_argument("--to", required=True, choices=["folder", "hdf5", "tfrecord", "recordio"])
    convert.set_defaults(run=_convert)
    verify = data_commands.add_parser("verify", help="check that two datasets hold the same images and labels")
    verify.add_argument("first", type=Path, metavar="A", help="dataset in any format")
    verify.add_argument("second", type=Path, metavar="B", help="dataset to compare it with")
    verify.set_defaults(run=_verify)
    make = data_commands.add_parser("make", help="draw a small synthetic dataset in a real dataset's layout")
    sets = make.add_subparsers(metavar="SET", required=True)
    imagenet = sets.add_parser("imagenet", help="JPEG files in ImageNet's layout")
    imagenet.add_argument("--out", type=Path, required=True, metavar="DIR", help="new or empty folder")
    imagenet.add_argument("--classes", type=int, default=10, metavar="N", help="default: %(default)s")
    imagenet.add_argument("--train-per-class", type=int, default=32, metavar="N", help="default: %(default)s")
    imagenet.add_argument("--val-per-class", type=int, default=8, metavar="N", help="default: %(default)s")
    imagenet.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    imagenet.set_defaults(run=_make_imagenet)
    openimages = sets.add_parser("openimages", help="JPEG files with several labels each, in Open Images' layout")
    openimages.add_argument("--out", type=Path, required=True, metavar="DIR", help="new or empty folder")
    openimages.add_argument("--classes", type=int, default=10, metavar="N", help="default: %(default)s")
    openimages.add_argument("--train-images", type=int, default=320, metavar="N", help="default: %(default)s")
    openimages.add_argument("--validation-images", type=int, default=80, metavar="N", help="default: %(default)s")
    openimages.add_argument("--test-images", type=int, default=80, metavar="N", help="default: %(default)s")
    openimages.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    openimages.set_defaults(run=_make_openimages)
    from d5suite.launch.slurm.command import add_commands
    from d5suite.report.history_command import add_history
    from d5suite.report.page.command import add_command

    add_commands(commands)
    add_command(commands)
    add_history(commands)
    return parser


def _add_paired(command: argparse.ArgumentParser) -> None:
    """Add the options of commands that measure two sides in turn."""
    command.add_argument("recipes", nargs="+", metavar="RECIPE", help="files, folders or FILE::TEST, as for pytest")
    command.add_argument("--backend", metavar="NAME[:MODE][,…]", help="as for pytest")
    command.add_argument("--preset", metavar="NAME", help="as for pytest")
    command.add_argument(
        "--max-pairs", type=int, default=60, metavar="N", help="limit per benchmark (default: %(default)s)"
    )
    command.add_argument(
        "--max-time", type=float, default=300.0, metavar="SECONDS", help="limit per benchmark (default: %(default)g)"
    )
    command.add_argument("--force", action="store_true", help="also judge measurements under different conditions")
    command.add_argument("--thresholds", type=Path, metavar="FILE.toml", help="what counts as a change, by benchmark")
    command.add_argument("--effect", type=float, metavar="FRACTION", help="relative change to find (default: 0.02)")


def _add_forms(command: argparse.ArgumentParser) -> None:
    for name, what in (("json", "JSON"), ("markdown", "a summary in Markdown"), ("junit", "JUnit XML")):
        command.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {what}; - prints it instead")


def _convert(options: argparse.Namespace) -> None:
    from d5suite.data.convert import convert

    for store in convert(options.source, options.destination, options.to):
        print(f"{store.split}: {len(store):,} images, {len(store.label_names):,} classes")
    print(f"{options.destination}: verify it with d5suite data verify {options.source} {options.destination}")


def _verify(options: argparse.Namespace) -> int:
    from d5suite.data.verify import compare

    differences = 0
    for split in compare(options.first, options.second):
        differences += split.differences
        verdict = f"{split.differences:,} differences" if split.differences else f"same, sha256 {split.digest[:16]}"
        print(f"{split.split}: {split.images:,} images in both, {split.size:,} bytes: {verdict}")
        for difference in split.named:
            print(f"  {difference}")
        if split.differences > len(split.named):
            print("  ...")
    return 1 if differences else 0


def _make_imagenet(options: argparse.Namespace) -> None:
    from d5suite.data.synthesis import make_imagenet

    make_imagenet(
        options.out,
        classes=options.classes,
        train_per_class=options.train_per_class,
        val_per_class=options.val_per_class,
        seed=options.seed,
    )
    print(f"{options.out}: {options.classes} classes; use it with pytest recipes/ --imagenet {options.out}")


def _make_openimages(options: argparse.Namespace) -> None:
    from d5suite.data.synthesis import make_openimages

    make_openimages(
        options.out,
        classes=options.classes,
        train_images=options.train_images,
        validation_images=options.validation_images,
        test_images=options.test_images,
        seed=options.seed,
    )
    recipe = "recipes/test_openimages_resnet50.py"
    print(f"{options.out}: {options.classes} classes; use it with pytest {recipe} --openimages {options.out}")


def _compare(options: argparse.Namespace) -> int:
    from rich.console import Console

    _check_forms(options, [*options.results, *_given_files(options)])
    if options.history:
        return _judge_by_history(options, Console(markup=False))
    if len(options.results) == 2 and not options.tables:
        return _judge(options, Console(markup=False))
    given = [f"--{name.replace('_', '-')}" for name in _OF_TWO if getattr(options, name)]
    if given:
        raise ConfigurationError(f"{given[0]} is for two files: the second is compared with the first")
    from d5suite.report.compare import show

    show(options.results, Console(markup=False))
    return 0


_OF_TWO = ("force", "thresholds", "between_runs", "json", "markdown", "junit")
"""Options of `compare` that only verdicts have."""


def _judge(options: argparse.Namespace, console: Console) -> int:
    from dataclasses import replace

    from d5suite.report.runs import read_run
    from d5suite.report.thresholds import Thresholds, read_thresholds
    from d5suite.report.verdicts import compare_runs

    thresholds = read_thresholds(options.thresholds) if options.thresholds else Thresholds()
    if options.between_runs is not None:
        if not 0 <= options.between_runs <= 10:
            raise ConfigurationError(f"--between-runs {options.between_runs:g}: give a number from 0 to 10")
        thresholds.default = replace(thresholds.default, between_runs=options.between_runs)
    base, new = map(read_run, options.results)
    found = compare_runs(base, new, thresholds, force=options.force)
    _announce(found, options, console)
    return int(found.exit)


def _judge_by_history(options: argparse.Namespace, console: Console) -> int:
    from d5suite.report.judging import compare_with_history
    from d5suite.report.runs import read_run
    from d5suite.report.thresholds import Thresholds, read_thresholds

    if len(options.results) != 1 or options.tables or options.between_runs is not None:
        raise ConfigurationError(
            "--history is for one file, without --tables and --between-runs: a history shows how runs vary"
        )
    thresholds = read_thresholds(options.thresholds) if options.thresholds else Thresholds()
    found = compare_with_history(options.history, read_run(options.results[0]), thresholds, force=options.force)
    _announce(found, options, console)
    return int(found.exit)


def _ab(options: argparse.Namespace) -> int:
    from rich.console import Console

    from d5suite.pytest_plugin.ab import measure

    _check_forms(options, _given_files(options))
    found = measure(options, (options.a, options.b))
    if not found.interrupted or found.comparison.verdicts:
        _announce(found.comparison, options, Console(markup=False))
    if found.interrupted:
        raise KeyboardInterrupt
    return int(found.comparison.exit)


def _bisect(options: argparse.Namespace) -> int:
    from d5suite.pytest_plugin.bisect import run_bisect

    return run_bisect(options)


def _check_forms(options: argparse.Namespace, inputs: Sequence[Path]) -> None:
    from d5suite.report.outputs import check_outputs

    check_outputs({f"--{name}": getattr(options, name) for name in ("json", "markdown", "junit")}, inputs)


def _given_files(options: argparse.Namespace) -> list[Path]:
    """Return other files that options name: thresholds, and runs of a history."""
    history = getattr(options, "history", None)
    return [*filter(None, [options.thresholds]), *(history.glob("*.json") if history else ())]


def _announce(found: Comparison, options: argparse.Namespace, console: Console) -> None:
    """Show a comparison, or write it in the requested formats."""
    import json

    from d5suite.files import write_bytes
    from d5suite.report.announcing import show_comparison, to_junit, to_markdown
    from d5suite.report.verdicts import to_json

    forms = {
        options.json: lambda: (json.dumps(to_json(found), indent=1, allow_nan=False) + "\n").encode(),
        options.markdown: lambda: to_markdown(found).encode(),
        options.junit: lambda: to_junit(found),
    }
    for path, form in forms.items():
        if path is not None and str(path) != "-":
            try:
                write_bytes(path, form())
            except OSError as error:
                raise ConfigurationError(
                    f"the comparison cannot be written: {error.strerror}", where=str(path)
                ) from None
    if Path("-") in forms:
        sys.stdout.write(forms[Path("-")]().decode())
    else:
        show_comparison(found, console)


def _backends(options: argparse.Namespace) -> None:
    from rich.console import Console

    from d5suite.report.backends import show_backends

    show_backends(Console(markup=False))


def _operators(options: argparse.Namespace) -> None:
    from rich.console import Console

    from d5suite.report.operators import show_operators

    show_operators(Console(markup=False))


def _conformance(options: argparse.Namespace) -> int:
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


def _doctor(options: argparse.Namespace) -> None:
    from rich.console import Console

    from d5suite.report.doctor import show_doctor

    show_doctor(Console(markup=False), options.backend)


def _network(options: argparse.Namespace) -> int:
    import json

    from rich.console import Console

    from d5suite.network.analysis import analyse
    from d5suite.network.given import Given, load_given, parse_shapes
    from d5suite.network.zoo import build
    from d5suite.report.network import cost_table, description, show_network

    for name, most in (("batch_size", 2**31 - 1), ("image_size", 2**16)):
        value = getattr(options, name)
        if not 1 <= value <= most:
            rule = "at least 1" if value < 1 else f"at most {most}"
            raise ConfigurationError(f"--{name.replace('_', '-')} is {value}; it must be {rule}")
    if options.network.endswith(".onnx"):
        given = load_given(options.network, shapes=parse_shapes(options.shape), batch_size=options.batch_size)
    elif options.shape:
        raise ConfigurationError("--shape is for the inputs of an ONNX file", where=options.network)
    else:
        given = Given(build(options.network, image_size=options.image_size), "")
    found = description(given, batch_size=options.batch_size)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        console, network = Console(markup=False), given.network
        title = f"{network.name}, batch {network.batch_size or options.batch_size}"
        if not found["cost_unknown"]:
            console.print(cost_table(analyse(network, batch_size=options.batch_size), title, layers=options.layers))
        show_network(found, console)
    return 0 if any(each["can"] for each in found["backends"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
