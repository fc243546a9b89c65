"""The command ``d5suite``: look at the machine, the backends, the networks, the data and the results.

Measuring is pytest's job: ``pytest recipes/``. Imports what a command needs when it runs, and no framework.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from d5suite.errors import ConfigurationError, D5Error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns
    -------
    int
        0, 1 where a backend does not conform or two data sets differ, or 2 after an error, which is printed to
        standard error.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 0
    try:
        return options.run(options) or 0
    except D5Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    from d5suite import __version__

    parser = argparse.ArgumentParser(
        prog="d5suite",
        description="Deep-learning benchmarks: described once, run natively on every framework, proved before timed.",
        epilog="To measure: pytest recipes/ --benchmark-json out.json, or operators/ in place of recipes/",
    )
    parser.add_argument("--version", action="version", version=f"d5suite {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what is installed and usable, and how quiet the machine is")
    doctor.set_defaults(run=_doctor)

    backends = commands.add_parser("backends", help="backends, their modes, devices and operators")
    backends.set_defaults(run=_backends)

    operators = commands.add_parser("operators", help="which backend has which operator at level 0")
    operators.set_defaults(run=_operators)

    compare = commands.add_parser("compare", help="tables from one or several result files")
    compare.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    compare.set_defaults(run=_compare)

    conformance = commands.add_parser("conformance", help="prove that a backend keeps the contract")
    conformance.add_argument("backend", metavar="NAME[:MODE]")
    conformance.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: %(default)s")
    conformance.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all allowed)")
    conformance.add_argument("-k", dest="only", metavar="EXPRESSION", help="only cases whose name fits, as in pytest")
    conformance.add_argument("--zoo", action="store_true", help="every network of the zoo, instead of the usual cases")
    conformance.set_defaults(run=_conformance)

    network = commands.add_parser("network", help="layers, parameters and multiply-accumulates of a network")
    network.add_argument("network", metavar="NAME|FILE.onnx", help="a network of the zoo or an ONNX file")
    network.add_argument("--batch-size", type=int, default=1, metavar="N")
    network.add_argument("--image-size", type=int, default=224, metavar="PIXELS")
    network.add_argument("--layers", action="store_true", help="one row per layer, not only the totals")
    network.set_defaults(run=_network)

    data = commands.add_parser("data", help="make, convert and compare data sets")
    data_commands = data.add_subparsers(metavar="COMMAND", required=True)
    convert = data_commands.add_parser("convert", help="store a data set in another format; images stay as they are")
    convert.add_argument("source", type=Path, metavar="SOURCE", help="a data set in any format")
    convert.add_argument("destination", type=Path, metavar="DESTINATION", help="a file for hdf5, else a folder")
    convert.add_argument("--to", required=True, choices=["folder", "hdf5", "tfrecord", "recordio"])
    convert.set_defaults(run=_convert)
    verify = data_commands.add_parser("verify", help="prove that two data sets hold the same images and labels")
    verify.add_argument("first", type=Path, metavar="A", help="a data set in any format")
    verify.add_argument("second", type=Path, metavar="B", help="another")
    verify.set_defaults(run=_verify)
    make = data_commands.add_parser("make", help="write a small synthetic set in a real set's layout")
    sets = make.add_subparsers(metavar="SET", required=True)
    imagenet = sets.add_parser("imagenet", help="JPEG files in ImageNet's layout")
    imagenet.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a folder that does not exist or is empty"
    )
    imagenet.add_argument("--classes", type=int, default=10, metavar="N", help="default: %(default)s")
    imagenet.add_argument("--train-per-class", type=int, default=32, metavar="N", help="default: %(default)s")
    imagenet.add_argument("--val-per-class", type=int, default=8, metavar="N", help="default: %(default)s")
    imagenet.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    imagenet.set_defaults(run=_make_imagenet)
    openimages = sets.add_parser("openimages", help="JPEG files with several labels each, in Open Images' layout")
    openimages.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a folder that does not exist or is empty"
    )
    openimages.add_argument("--classes", type=int, default=10, metavar="N", help="default: %(default)s")
    openimages.add_argument("--train-images", type=int, default=320, metavar="N", help="default: %(default)s")
    openimages.add_argument("--validation-images", type=int, default=80, metavar="N", help="default: %(default)s")
    openimages.add_argument("--test-images", type=int, default=80, metavar="N", help="default: %(default)s")
    openimages.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    openimages.set_defaults(run=_make_openimages)
    return parser


def _convert(options: argparse.Namespace) -> None:
    from d5suite.data.convert import convert

    for store in convert(options.source, options.destination, options.to):
        print(f"{store.split}: {len(store):,} images, {len(store.label_names):,} classes")
    print(f"{options.destination}: prove it with d5suite data verify {options.source} {options.destination}")


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


def _compare(options: argparse.Namespace) -> None:
    from rich.console import Console

    from d5suite.report.compare import show

    show(options.results, Console(markup=False))


def _backends(options: argparse.Namespace) -> None:
    from rich.console import Console

    from d5suite.report.backends import show_backends

    show_backends(Console(markup=False))


def _operators(options: argparse.Namespace) -> None:
    from rich.console import Console

    from d5suite.report.operators import show_operators

    show_operators(Console(markup=False))


def _conformance(options: argparse.Namespace) -> int:
    import subprocess

    from d5suite import testing
    from d5suite.backends import select
    from d5suite.measure.threads import allowed_cpus, thread_environment

    precision = select(options.backend).backend.precisions[0]  # the kit takes each; pytest asks for one that is there
    threads = options.threads or len(allowed_cpus())
    folder = Path(testing.__file__).parent
    cases = "d5suite.testing.whole_zoo" if options.zoo else "d5suite.testing"
    command = [sys.executable, "-m", "pytest", "-c", str(folder / "conformance.ini"), "--rootdir", str(folder),
               "--no-header", "--tb=short", "--pyargs", cases, "--backend", options.backend,
               "--device", options.device, "--precision", precision, "--threads", str(threads)]  # fmt: skip
    if options.only:
        command += ["-k", options.only]
    # A process of its own: it imports the framework, and libraries read the thread budget when they load.
    return subprocess.run(command, env={**os.environ, **thread_environment(threads)}).returncode


def _doctor(options: argparse.Namespace) -> None:
    from rich.console import Console

    from d5suite.report.doctor import show_doctor

    show_doctor(Console(markup=False))


def _network(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from d5suite.network import Network
    from d5suite.network.analysis import analyse
    from d5suite.network.zoo import build

    if options.batch_size < 1 or options.image_size < 1:
        raise ConfigurationError("batch size and image size must be at least 1")
    if options.network.endswith(".onnx"):
        network = Network.load(options.network)
    else:
        network = build(options.network, image_size=options.image_size)
    cost = analyse(network, batch_size=options.batch_size)
    console = Console(markup=False)
    table = Table(title=f"{network.name}, batch {network.batch_size or options.batch_size}", title_justify="left")
    for column in ("layer", "operator", "output"):
        table.add_column(column)
    for column in ("parameters", "MMAC", "activation KiB"):
        table.add_column(column, justify="right")
    if options.layers:
        for node in cost.nodes:
            shape = "×".join(str(n) for n in node.output_shape)
            table.add_row(
                node.name, node.op_type, shape, f"{node.parameters:,}", f"{node.macs / 1e6:,.1f}",
                f"{node.activation_bytes / 1024:,.0f}",
            )  # fmt: skip
        table.add_section()
    table.add_row(
        f"{len(cost.nodes)} layers", "", "", f"{cost.parameters:,}", f"{cost.macs / 1e6:,.3f}",
        f"{cost.activation_bytes / 1024:,.0f}",
    )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
