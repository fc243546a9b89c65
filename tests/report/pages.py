"""Result files for tests of report pages: pieces of the reference, changed as a test needs."""

from __future__ import annotations

import copy
import json
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "results"
SMOKE, RANKS, OPERATORS = (RESULTS / f"reference-2core-cpu-{name}.json" for name in ("smoke", "ranks", "operators"))

HOSTILE = [
    "</script><script>window.hacked=1</script>",
    "\"><img src=x onerror='window.hacked=1'>",
    "';window.hacked=1;//{{7*7}}${7*7}",
    "\u202egnp.exe \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "x" * 10_000,
    "&lt;b&gt; &amp; $\\frac{1}{0}$ ]]>",
]
"""Names that would do something if a page took them for more than text."""


def content(path: Path = SMOKE) -> dict[str, Any]:
    """A result file of this repository."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def record(bench: dict[str, Any]) -> dict[str, Any]:
    """What d5suite says of a benchmark."""
    found: dict[str, Any] = bench["extra_info"]["d5suite"]
    return found


def settle(bench: dict[str, Any], samples: list[float]) -> None:
    """Give a benchmark other samples, and what is said of them."""
    median = statistics.median(samples)
    bench["stats"] |= {"data": samples, "median": median}
    record(bench).update(median_s=median, median_ci95=[min(samples), max(samples)])


def write(path: Path, value: object) -> Path:
    """Write JSON."""
    path.write_text(json.dumps(value))
    return path


def named(found: dict[str, Any], case: str, measurement: str | None = None) -> dict[str, Any]:
    """Rename the case of all results."""
    for bench in found["benchmarks"]:
        own = measurement or record(bench)["measurement"]
        bench["group"] = f"{case.replace('/', '|')}/{own}"
        record(bench)["recipe"] = case.replace("/", "|")
    return found


def hostile() -> dict[str, Any]:
    """A file in which every name is hostile."""
    found = content()
    few = [bench for bench in found["benchmarks"] if record(bench)["measurement"] == "inference"][1:]
    found["benchmarks"] = []
    for number, name in enumerate(HOSTILE):
        for bench in copy.deepcopy(few[:2]):
            bench["group"] = f"{name.replace('/', '|')}/inference"
            bench["param"] = bench["params"]["d5suite_backend"] = f"{bench['param']} {name}"
            bench["fullname"] = f"{number} {bench['fullname']} {name}"
            info = record(bench)
            info["recipe"], info["measurement"] = name.replace("/", "|"), "inference"
            info["backend"] |= {"mode": name, "version": name, "versions": {name: name}}
            info["throughput"]["unit"] = "images/s"
            info["validation"]["checks"][0] |= {"name": name, "error": 1.0 if number == 0 else 0.0}
            info["warnings"] = [name]
            info["machine"] = {"disturbed": True, "reasons": [name]}
            info["environment"]["environment_variables"] = {name: name}
            info["environment"]["cpu"]["model"] = name
            found["benchmarks"].append(bench)
    group = f"{HOSTILE[1].replace('/', '|')}/inference"
    found["d5suite"]["failures"] = [{"group": group, "backend": HOSTILE[0], "wrong": True, "message": HOSTILE[1]}]
    found["commit_info"] = {"id": HOSTILE[0]}
    found["datetime"] = HOSTILE[0]
    return found


def many(count: int) -> dict[str, Any]:
    """A file of so many results, six backends to a case."""
    found = content()
    few = [bench for bench in found["benchmarks"] if record(bench)["measurement"] == "inference"]
    found["benchmarks"] = []
    for number in range(count):
        bench = copy.deepcopy(few[number % len(few)])
        case = f"case_{number // len(few):05}"
        bench["group"], record(bench)["recipe"] = f"{case}/inference", case
        bench["fullname"] = f"recipes/test_{case}.py::{bench['name']}"
        found["benchmarks"].append(bench)
    return found
