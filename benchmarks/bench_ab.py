"""How often verdicts of real ``d5suite ab`` runs are wrong, at the default budget.

A suite is four benchmarks: a small network on onnxruntime, by the tests' adapter, with batches of
four sizes. Both sides are the same code, but on side B the adapter waits busily in one benchmark,
so that it takes FACTOR times as long there; a factor of 1 plants nothing. So a suite counts once
for the slowdown that was found or missed, and all other benchmarks for false alarms. The figures in
docs/compare.md come from::

    python -m benchmarks.bench_ab 5 1 1.02 1.05

which makes five suites of each factor, in turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import onnx
from scipy.stats import binomtest

from d5suite.data.synthesis import make_imagenet
from d5suite.network.builder import Builder
from tests.conftest import plugin_environment

BATCHES = (8, 16, 32, 64)
PLANTED = 16
"""The batch of the benchmark that is slowed down."""

UNUSED = 1
"""A batch of no benchmark. Side A gets the variable, too: looking for one that is not set takes
longer, by 1% of the shortest benchmark, and `d5suite ab` finds that."""

RECIPE = """
from d5suite import SGD, Recipe
from d5suite.cases.recipe import Preset
RECIPE = Recipe(name="batch{batch}", network={network!r}, dataset="imagenet", optimizer=SGD(learning_rate=0.125),
    measurements=("inference",), presets={{"smoke": Preset(image_size=32, batch_size={batch}, classes=4)}})
"""


def prepare(folder: Path) -> None:
    """Write recipes, their network and images."""
    make_imagenet(folder / "imagenet", classes=4, train_per_class=16, val_per_class=16, progress=False)
    b = Builder("small", seed=0, image_size=32)
    x = b.relu(b.conv(b.image, "conv", 16, 3))
    model = onnx.ModelProto()
    model.CopyFrom(b.classifier(b.linear(b.flatten(b.global_average_pool(x, "pool"), "flatten"), "fc", 4)).model)
    del model.graph.node[-1], model.graph.output[-1], model.graph.input[-1]  # label and loss
    onnx.save(model, folder / "small.onnx")
    (folder / "recipes").mkdir()
    for batch in BATCHES:
        text = RECIPE.format(batch=batch, network=str(folder / "small.onnx"))
        (folder / "recipes" / f"test_batch{batch}.py").write_text(text)


def suite(folder: Path, factor: float) -> dict[str, str]:
    """Run a suite; return the verdicts by benchmark."""
    a, b = (f"env:FAULTY_FAULT=slow={each}:{PLANTED if each != 1 else UNUSED}" for each in (1, factor))
    done = subprocess.run(
        [sys.executable, "-m", "d5suite.cli", "ab", "--a", a, "--b", b, "recipes", "--backend", "faulty",
         "--json", "-", "--", "--imagenet", str(folder / "imagenet"), "--threads", "1"],
        cwd=folder, env=plugin_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1, 6):
        raise SystemExit(done.stdout + done.stderr)
    return {each["name"].partition("/")[0]: each["verdict"] for each in json.loads(done.stdout)["benchmarks"]}


def rate(hits: int, runs: int) -> str:
    """A rate with its exact interval (Clopper and Pearson)."""
    low, high = binomtest(hits, runs).proportion_ci(0.95)
    return f"{hits} of {runs} ({low:.1%} to {high:.1%} at 95%)"


def main(suites: int, factors: list[float]) -> None:
    """Make the suites, and print a line for each and the rates."""
    equal: list[str] = []
    alarms = 0
    planted: dict[float, list[str]] = {factor: [] for factor in factors}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for number in range(suites):
            for factor in factors:
                start = time.perf_counter()
                found = suite(folder, factor)
                slowed = found.pop(f"batch{PLANTED}")
                planted[factor].append(slowed)
                others = [*found.values(), *([slowed] if factor == 1 else [])]
                equal += others
                alarms += any(each in ("slower", "faster") for each in others)
                took = time.perf_counter() - start
                told = f"{slowed}; others {', '.join(found.values())} ({took:.0f} s)"
                print(f"suite {number + 1}, {factor} times: {told}", flush=True)
    wrong = sum(each in ("slower", "faster") for each in equal)
    print(f"suites with a false alarm: {rate(alarms, suites * len(factors))}; {wrong} of {len(equal)} equal benchmarks")
    for factor in factors:
        if factor != 1:
            print(f"{factor} times: found in {rate(planted[factor].count('slower'), suites)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), [float(each) for each in sys.argv[2:]] or [1.0])
