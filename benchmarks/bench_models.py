"""Errors of the models against published measurements, and against results of this suite.

Prints tables: what, points, mean, median, 90th percentile and worst error. ``--fit`` first
fits the calibration again and prints it, for ``examples/machines/``. Result files are judged by
``benchmarks/models_of_results.py``; ``--measure DIR`` makes a small set first.

Data
----
``data/a100_transformer_iterations.csv`` holds 720 iteration times of GPT-like training on 2 to 8
A100, every second row of a table published with vTrain (Bang et al., MICRO 2024,
github.com/VIA-Research/vTrain, MIT licence, copyright of its authors). The fit uses every second of
them. Megatron's iteration times and activations are those of table 5 and figure 1 of Korthikanti et
al., arXiv:2205.05198; the fit uses the four with full recomputation.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from d5suite.errors import D5Error
from d5suite.models.ceilings import read_ceilings
from d5suite.models.machine import Calibration, Machine, read_machine
from d5suite.models.memory import memory_of
from d5suite.models.plan import Plan
from d5suite.models.step_time import step_time
from d5suite.models.transformer import Transformer

sys.path.insert(0, str(Path(__file__).parents[1]))  # also if it is run as a script
from benchmarks import models_of_results as of_results
from benchmarks import published_convnets as convnets

HERE = Path(__file__).parent
MACHINES = HERE.parent / "examples" / "machines"
VOCABULARY = 51200

Case = tuple[Transformer, Plan, float]

MEGATRON = {
    "22B": (Transformer(48, 6144, 64, 2048, VOCABULARY), Plan(1, 8, 1, 4, 4)),
    "175B": (Transformer(96, 12288, 96, 2048, VOCABULARY), Plan(1, 8, 8, 64, 1, chunks=3)),
    "530B": (Transformer(105, 20480, 128, 2048, VOCABULARY), Plan(1, 8, 35, 280, 1, chunks=3)),
    "1T": (Transformer(128, 25600, 160, 2048, VOCABULARY), Plan(1, 8, 64, 512, 1)),
}
FULL_S = {"22B": 1.42, "175B": 18.13, "530B": 49.05, "1T": 94.42}
"""Seconds of an iteration with full recomputation; arXiv:2205.05198, table 5."""
SELECTIVE_S = {"22B": 1.10, "175B": 13.75, "530B": 37.83, "1T": 71.49}
"""The same with sequence parallelism and selective recomputation."""
ACTIVATIONS_GIB = {
    "22B": (59.25, 9.5625),
    "175B": (66.84375, 12.3515625),
    "530B": (114.0234375, 23.076171875),
    "1T": (131.25, 26.5625),
}
"""Activations of a device without and with both; figure 1."""
FITTED = (
    "gemm_peak_share", "gemm_half_size", "gemm_exponent", "elementwise_passes", "layer_floor_s", "head_passes",
    "reduction_latency_s", "exposed_share", "fixed_s",
)  # fmt: skip


def single_node() -> list[Case]:
    """Return the published iterations on one node, in seconds."""
    found = []
    with (HERE / "data" / "a100_transformer_iterations.csv").open(encoding="utf-8") as file:
        for row in list(csv.reader(file))[1:]:
            _, batch, micro, hidden, heads, layers, sequence, tensor, data, pipeline = map(int, row[:10])
            network = Transformer(layers, hidden, heads, sequence, VOCABULARY)
            found.append((network, Plan(data, tensor, pipeline, batch, micro), float(row[10]) / 1e3))
    return found


def megatron(times: dict[str, float], *, selective: bool) -> list[Case]:
    """Return Megatron's iterations with one kind of recomputation."""
    changed = {"recompute": "selective", "sequence_parallel": True} if selective else {"recompute": "full"}
    return [(network, replace(plan, **changed), times[name]) for name, (network, plan) in MEGATRON.items()]


def errors(cases: list[Case], machine: Machine) -> np.ndarray:
    """Return the relative errors of the predicted times."""
    return np.array([step_time(network, machine, plan).total / seconds - 1 for network, plan, seconds in cases])


def activation_errors() -> np.ndarray:
    """Return the relative errors of the predicted activations."""
    found = []
    for name, (network, plan) in MEGATRON.items():
        sharded = replace(plan, recompute="selective", sequence_parallel=True)
        for kept, each in zip(ACTIVATIONS_GIB[name], (plan, sharded), strict=True):
            found.append(memory_of(network, each).activations / 2**30 / kept - 1)
    return np.array(found)


def fit(small: Machine, large: Machine) -> Calibration:
    """Fit the calibration to the points that are for it."""
    from scipy.optimize import least_squares

    start = small.calibration
    known, full = single_node()[::2], megatron(FULL_S, selective=False)

    def calibration(logarithms: np.ndarray) -> Calibration:
        return replace(start, **dict(zip(FITTED, map(float, np.exp(logarithms)), strict=True)))

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        found = calibration(logarithms)
        near = np.log1p(errors(known, replace(small, calibration=found)))
        far = np.log1p(errors(full, replace(large, calibration=found)))
        return np.concatenate([near, 3 * far])  # four large machines weigh as much as 36 small ones

    first = np.log([getattr(start, name) for name in FITTED])
    return calibration(least_squares(residuals, first, loss="soft_l1", f_scale=0.05).x)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="*", help="results of this suite, to judge its models on")
    parser.add_argument(
        "--results", type=Path, action="append", default=[], metavar="DIR",
        help="a folder of results, such as raw/NAME of a study; its machine.json has the ceilings",
    )  # fmt: skip
    parser.add_argument("--machine", type=Path, help="ceilings of the machine that made them")
    parser.add_argument("--measure", type=Path, metavar="DIR", help="measure a small set into this folder (see above)")
    parser.add_argument("--backend", default="", help="of --measure (default: all installed)")
    parser.add_argument("--batches", default="4,8", help="of --measure (%(default)s)")
    parser.add_argument("--networks", default=",".join(of_results.NETWORKS), help="of --measure (%(default)s)")
    parser.add_argument("--disturbed", action="store_true", help="use times of a disturbed machine, too")
    parser.add_argument("--classes", action="store_true", help="also print the errors of each class of nodes")
    parser.add_argument("--fit", action="store_true", help="fit the calibration of transformers again, and print it")
    options = parser.parse_args()
    console = Console(width=120)
    files, machine = list(options.files), options.machine
    try:
        for folder in options.results:
            found, own_machine = of_results.result_files(folder)
            files, machine = files + found, machine or own_machine
    except D5Error as error:
        raise SystemExit(str(error)) from None
    if not options.results and not files:
        console.print(published(fit_again=options.fit))
        console.print(published_networks())
    if options.measure:
        files += of_results.measure(options.measure, options.backend, options.batches, options.networks.split(","))
        machine = machine or options.measure / "machine.json"
    if not files:
        return
    rows, missing = of_results.lines(files, machine, disturbed=options.disturbed)
    table = _table("relative error of models on this suite's results", "in interval")
    for line in rows:
        _add(table, line)
    console.print(table)
    for each in missing:
        console.print(f"missing: {each}", markup=False, highlight=False)
    if options.classes and machine is not None:
        points = of_results.all_points(files, read_ceilings(machine), disturbed=options.disturbed)
        console.print(_classes(of_results.class_errors(points)))


def _table(title: str, last: str) -> Table:
    table = Table(box=None, title=title)
    for name in ("what", "points", "mean", "median", "90%", "worst", last):
        table.add_column(name, justify="left" if name == "what" else "right")
    return table


def _add(table: Table, line: of_results.Line) -> None:
    covered = "" if line.covered is None else f"{line.covered:.0%}"
    table.add_row(
        line.what, str(len(line.errors)), *(f"{each:.2%}" for each in of_results.figures(line.errors)), covered
    )


def _classes(found: Iterable[of_results.ClassError]) -> Table:
    table = Table(box=None, title="time of nodes of networks that were left out: predicted / measured")
    for name in ("of", "class", "part of the time", "by network"):
        table.add_column(name, justify="right" if name.startswith("part") else "left")
    for each in found:
        by_network = ", ".join(f"{name} {ratio:.2f}" for name, ratio in each.networks.items())
        kind = f"{each.kind.backend}, {each.kind.measurement}"
        table.add_row(kind, f"{each.name}, {each.direction}", f"{each.share:.0%}", by_network)
    return table


def published_networks() -> Table:
    """Return the table of errors of convolutional networks against published rates."""
    table = _table("relative error of steps of convolutional networks, each left out of the fit", "in interval")
    known = {name: convnets.Published(name) for name in convnets.NAMES}
    for name, each in known.items():
        device = convnets.NAMES[name]
        judged = each.left_out()
        _add(table, of_results.Line(f"five networks on one {device}", [one.error for one in judged],
                                    _share(one.covered for one in judged)))  # fmt: skip
        steps = list(each.resnet50_steps())
        for what, least, most in (("1", 1, 1), ("2 to 8", 2, 8), ("16 to 64", 16, 64)):
            own = [found for rate, found in steps if least <= rate.devices <= most]
            if own:
                _add(table, of_results.Line(f"ResNet-50 on {what} {device}", [one.error for one in own],
                                            _share(one.covered for one in own)))  # fmt: skip
    few, many = convnets.goyal(known["p100-dgx1"])
    for what, one in (("8", few), ("256", many)):
        _add(table, of_results.Line(f"ImageNet in an hour, {what} P100, Caffe2", [one.error], float(one.covered)))
    scaling = many.advice.seconds / few.advice.seconds / (many.seconds / few.seconds) - 1
    _add(table, of_results.Line("ImageNet in an hour, 256 P100 against 8", [scaling]))
    return table


def _share(covered: Iterable[bool]) -> float:
    return float(np.mean(list(covered)))


def published(*, fit_again: bool) -> Table:
    """Return the table of errors against published measurements."""
    small, large = (read_machine(MACHINES / f"a100-{size}gb.json") for size in (40, 80))
    if fit_again:
        found = fit(small, large)
        print({name: float(f"{value:.4g}") for name, value in asdict(found).items()})
        small, large = replace(small, calibration=found), replace(large, calibration=found)
    node = single_node()
    table = _table("relative error of models", "published by others")
    for what, error, others in (
        ("iteration on one node, used for the fit", errors(node[::2], small), ""),
        ("iteration on one node, left out", errors(node[1::2], small), "vTrain 8.37% mean"),
        ("Megatron, full recomputation, used", errors(megatron(FULL_S, selective=False), large), ""),
        (
            "Megatron, selective, left out",
            errors(megatron(SELECTIVE_S, selective=True), large),
            "Calculon 3.65%, 8.87%",
        ),
        ("Megatron's activations, no fit", activation_errors(), "Calculon 2.08%, 8.74%"),
    ):
        own = (f"{each:.2%}" for each in of_results.figures(error))
        table.add_row(what, str(len(error)), *own, others)
    return table


if __name__ == "__main__":
    main()
