"""More than 100% of a ceiling is explained or refused."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest

from d5suite.cli import main
from d5suite.report.ceilings import not_believed, share_of_ceiling
from tests.report.pages import content, record, write
from tests.report.test_views import OPERATORS

MIB = 1 << 20


def an_operator(share: float, rate: str = "bytes_per_s", **facts: Any) -> dict[str, Any]:
    environment = {"cpu": {"cache_bytes": facts.pop("cache", None)}}
    known = {"operator": "Relu", "device": "cpu", "work": {"bytes": 6 * MIB}, "environment": environment}
    return {**known, "fraction_of_ceiling": {rate: share}, **facts}


@pytest.mark.parametrize(
    ("found", "why", "believed"),
    [
        (an_operator(0.9), "", True),
        (an_operator(2.6, cache=32 * MIB), "6.29 MB fit into the cache of 33.6 MB", True),
        (an_operator(2.6), "whose size this file does not tell", True),
        (an_operator(1.05, cache=4 * MIB), "the copy that sets the ceiling", True),
        (an_operator(2.6, cache=4 * MIB), "does not fit into a cache", False),
        (an_operator(2.6, cache=32 * MIB, l2_cold={"cache_bytes": MIB}), "does not fit into a cache", False),
        (an_operator(2.6, work={"bytes": 100 * MIB}), "does not fit into a cache", False),
        (an_operator(1.5, "flops_per_s"), "is not the fastest one possible", True),
        (an_operator(3.5, "flops_per_s", operator="Conv"), "needs fewer operations", True),
        (an_operator(3.5, "flops_per_s", operator="Gemm"), "nothing explains that", False),
        (an_operator(2000.0, "flops_per_s", operator="Conv"), "nothing explains that", False),
    ],
)
def test_a_rate_above_its_ceiling_is_explained_or_not_believed(found: dict[str, Any], why: str, believed: bool) -> None:
    (rate,) = found["fraction_of_ceiling"]
    share = share_of_ceiling(found, rate)
    assert share.believed is believed and why in share.why and bool(share.why) is bool(why)
    assert list(not_believed(found)) == ([] if believed else [share.why])


def test_a_product_of_458_tflops_on_a_cpu_wins_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = content(OPERATORS)
    found["benchmarks"] = [each for each in found["benchmarks"] if each["group"] == "gemm.heads_b1/forward"]
    (liar,) = [record(each) for each in found["benchmarks"] if each["param"].endswith("mxnet")]
    factor = 458e12 / liar["achieved"]["flops_per_s"]
    liar["achieved"]["flops_per_s"] *= factor
    liar["fraction_of_ceiling"]["flops_per_s"] *= factor
    liar["throughput"]["value"] *= factor
    for each in found["benchmarks"]:
        if record(each) is liar:
            each["stats"]["data"] = [sample / factor for sample in each["stats"]["data"]]
            each["stats"]["median"] /= factor
    liar["median_s"] /= factor
    file = write(tmp_path / "x.json", found)
    assert main(["compare", "--tables", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "gemm.heads_b1/forward, mxnet: it claims" in said and "times the machine's ceiling of arithmetic" in said
    assert main(["report", str(file), "-o", str(tmp_path / "x.html")]) == 0
    page = html.unescape((tmp_path / "x.html").read_text())
    headline = page.partition('class="headline">')[2].partition("</p>")[0]
    assert headline.startswith("torch is fastest in 1 of 1") and "mxnet" not in headline


def test_the_reference_explains_what_is_above_a_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--tables", str(OPERATORS)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "above 100% of the ceiling of memory traffic: " in said
    assert "above 100% of the ceiling of arithmetic: 2 results; convolution." in said
