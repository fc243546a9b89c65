"""``d5suite report``: what a page says of result files, and what it refuses."""

from __future__ import annotations

import ast
import copy
import csv
import html
import itertools
import json
import math
import re
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import d5suite.report
import d5suite.report.plots
from d5suite.cli import main
from d5suite.report.colours import PALETTE, places
from d5suite.report.compare import TableRow, contests_in_turn, is_reduced
from d5suite.report.contests import Contest, contests_of
from d5suite.report.formats import figure as digits
from d5suite.report.page.figures import MOST_BARS
from d5suite.report.page.gather import gather
from d5suite.report.page.render import MOST_CHECKS, brief
from d5suite.report.page.sparklines import WIDTH, samples_strip
from d5suite.report.page.svg import drawing, inline
from d5suite.report.plots import Plot
from d5suite.report.reading import load_results
from d5suite.report.scaling import size_text
from d5suite.report.series import read_series
from tests.conftest import end_with_tests, plugin_environment
from tests.report.pages import HOSTILE, RANKS, SMOKE, content, hostile, named, record, settle, write

ROOT = Path(__file__).parents[2]

PARTS_OF_MEMORY = ("parameters", "gradients", "optimizer_state", "activations")


def page_of(folder: Path, *results: Path, code: int = 0) -> str:
    out = folder / "report.html"
    assert main(["report", *map(str, results), "-o", str(out)]) == code
    return out.read_text()


def data_of(page: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    read: dict[str, Any] = json.loads(found)
    return read


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["report", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_every_result_is_on_the_page_with_its_numbers_proof_and_command(tmp_path: Path) -> None:
    page = page_of(tmp_path, SMOKE)
    found = data_of(page)["rows"]
    benchmarks = content()["benchmarks"]
    assert len(found) == len(benchmarks) == page.count('class="row ')
    for bench in benchmarks:
        info = record(bench)
        (row,) = [
            each
            for each in found.values()
            if each["title"] == f"{info['recipe']} {info['measurement']}: {bench['param']}"
        ]
        assert row["checks"] == [[f"✓ {c['name']}", c["error"], c["tolerance"]] for c in info["validation"]["checks"]]
        assert bench["fullname"] in row["commands"][0].replace("'", "")
        assert any(value == info["median_s"] for _, _, value in row["figures"])


def test_the_fastest_is_named_with_its_lead_and_a_small_one_is_too_close(tmp_path: Path) -> None:
    found = content()
    found["benchmarks"] = [
        b for b in found["benchmarks"] if b["group"].endswith("/gradient") and b["param"] != "deep500"
    ]
    for factor, verdict in ((1.0, "too close to call"), (0.2, "torch is fastest in 1 of 1 comparisons (clearly)")):
        for bench in found["benchmarks"]:
            if bench["param"] == "torch":
                slow = copy.deepcopy(bench)
                settle(slow, [each * factor for each in slow["stats"]["data"]])
                record(slow)["throughput"]["value"] /= factor
                others = [b for b in found["benchmarks"] if b["param"] != "torch"]
        page = page_of(tmp_path, write(tmp_path / "x.json", found | {"benchmarks": [*others, slow]}))
        assert verdict in html.unescape(page)
        leads = page.partition('<table class="leads">')[2].partition("</table>")[0]
        assert (">undecided<" in leads) is (factor == 1) and ('class="n best"' in page) is (factor != 1)


def contest_of(results: list[dict[str, Any]], between_runs: float) -> Contest[TableRow]:
    """The contest of results, whose backends are named by their places."""
    rows = [TableRow("m", str(place), "", {"ranks": 1, **each}) for place, each in enumerate(results)]
    (contest,) = contests_of(rows, between_runs=between_runs)
    return contest


@given(st.floats(1.0, 50), st.floats(0, 0.3))
def test_a_lead_is_the_ratio_of_medians_and_its_interval_grows_with_the_noise(ratio: float, noise: float) -> None:
    def result(median: float) -> dict[str, Any]:
        return {
            "data": [median * each for each in (0.99, 1.0, 1.01)] * 5,
            "median_s": median,
            "throughput": {"value": 1 / median},
        }

    results = [result(ratio), result(1.0)]
    contest = contest_of(results, noise)
    (_, (_, lead)) = contest.standing
    assert lead.value == pytest.approx(ratio, rel=1e-9)
    (_, (_, wider)) = contest_of(results, noise + 0.1).standing
    assert wider.low < lead.low <= lead.value <= lead.high < wider.high
    assert bool(contest.rivals) == (lead.low <= 1)


def test_samples_of_other_sizes_are_compared_by_item() -> None:
    small = {"data": [1.0] * 9, "median_s": 1.0, "throughput": {"value": 10.0}}
    large = {"data": [4.0] * 9, "median_s": 4.0, "throughput": {"value": 20.0}}
    ((first, _), (_, lead)) = contest_of([small, large], 0.01).standing
    assert first.backend == "1" and lead.value == pytest.approx(2)


def test_backends_that_took_turns_are_compared_by_their_rounds() -> None:
    drift = [1.0 + 0.1 * round for round in range(12)]  # twice as slow at the end, for both

    def result(median: float, token: str) -> dict[str, Any]:
        data = [median * each * wobble for each in drift for wobble in (0.999, 1.001)]
        turns = [{"group": token, "rounds": [2] * 12}]
        return {"data": data, "median_s": median, "throughput": {"value": 1 / median}, "turns": turns, "place": ""}

    (_, (_, together)) = contest_of([result(1.0, "a"), result(1.5, "a")], 0.15).standing
    (_, (_, apart)) = contest_of([result(1.0, "a"), result(1.5, "b")], 0.15).standing
    assert together.value == pytest.approx(1.5, rel=1e-3) == pytest.approx(apart.value, rel=0.05)
    assert together.low > 1 and together.high / together.low < apart.high / apart.low


def test_the_fastest_of_those_that_took_turns_is_so_in_its_rounds() -> None:
    """One took most of its samples while the machine was slow: its median misleads."""

    def result(factor: float, many_when_slow: bool) -> dict[str, Any]:
        counts = [1 if slow != many_when_slow else 9 for slow in (False, True) * 6]
        data = [factor * (1 + index % 2) for index, count in enumerate(counts) for _ in range(count)]
        median = float(np.median(data))
        turns = [{"group": "a", "rounds": counts}]
        return {"data": data, "median_s": median, "throughput": {"value": 1 / median}, "turns": turns, "place": ""}

    slower, faster = result(1.1, False), result(1.0, True)
    assert slower["median_s"] < faster["median_s"]
    ((first, _), (_, lead)) = contest_of([slower, faster], 0.15).standing
    assert first.backend == "1" and lead.value == pytest.approx(1.1)


def test_only_schemes_that_compute_the_same_compete(tmp_path: Path) -> None:
    def contests(path: Path) -> dict[str, set[str]]:
        (group,) = [group for _, group in gather([path], between_runs=0.15).groups]
        return {
            contest.ranks: {row.record["distributed"]["scheme"] for row in contest.results}
            for contest in group.contests
        }

    same = {"all_reduce", "parameter_server", "ddp", "fsdp", "sharded", "multi_worker_mirrored", "dist_sync", "horovod"}
    others = {"asynchronous", "stale_synchronous", "model_averaging", "gossip", "top_k", "quantised", "dist_async"}
    each_own = {"1 rank": {"all_reduce"}} | {f"2 ranks, {each}": {each} for each in others}
    assert contests(RANKS) == each_own | {"2 ranks, synchronous": same}
    found = json.loads(RANKS.read_bytes())
    for bench in found["benchmarks"]:  # as of earlier results, which do not say what is synchronous
        record(bench)["distributed"].pop("synchronous", None)
    earlier = each_own | {f"2 ranks, {each}": {each} for each in same}
    assert contests(write(tmp_path / "x.json", found)) == earlier


def test_backends_compete_within_a_run_and_not_with_themselves(tmp_path: Path) -> None:
    def ratios(contest: Contest[Any]) -> list[Any]:
        return [(row.backend, ratio) for row, ratio in contest.standing]

    found = content()
    first, again = (write(tmp_path / f"{name}.json", found) for name in ("first", "again"))
    alone = {group.measurement: group.contests for _, group in gather([first], between_runs=0.15).groups}
    assert all(contest.file == "" for several in alone.values() for contest in several)
    for _, group in gather([first, again], between_runs=0.15).groups:
        (once,) = alone[group.measurement]
        assert [contest.file for contest in group.contests] == ["(1)", "(2)"]
        assert all(ratios(contest) == ratios(once) for contest in group.contests)
        assert all({row.file for row in contest.results} == {contest.file} for contest in group.contests)
    parts = [write(tmp_path / f"{name}.json", found | {"benchmarks": [b for b in found["benchmarks"] if
             (b["param"] == "torch") == (name == "torch")]}) for name in ("torch", "others")]  # fmt: skip
    for _, group in gather(parts, between_runs=0.15).groups:  # each backend once: they compete
        (contest,) = group.contests
        assert contest.file == "" and len(contest.results) == len(alone[group.measurement][0].results)


def test_the_verdict_leaves_out_what_all_names_end_with(tmp_path: Path) -> None:
    assert brief(["torch-gossip-gloo-2", "jax-gossip-gloo-2"]) == {
        "torch-gossip-gloo-2": "torch", "jax-gossip-gloo-2": "jax",
    }  # fmt: skip
    assert list(brief(["torch-ddp-2", "jax-all_reduce-gloo-2"]).values()) == ["torch-ddp", "jax-all_reduce-gloo"]
    assert list(brief(["torch-ddp-2"]).values()) == ["torch-ddp-2"]
    assert brief([]) == {}
    verdict = page_of(tmp_path, RANKS).partition('id="verdict"')[2].partition("</section>")[0]
    assert ">torch<" in verdict and ">torch-gossip" not in verdict


def test_what_failed_its_proof_is_named_and_never_the_fastest(tmp_path: Path) -> None:
    found = content()
    for bench in found["benchmarks"]:
        if bench["param"] == "torch":
            record(bench)["validation"]["checks"][0]["error"] = 0.5
    found["d5suite"]["failures"] = [
        {"group": "imagenet_resnet50/inference", "backend": "mine", "wrong": True, "message": "off by one"}
    ]
    raw = page_of(tmp_path, write(tmp_path / "x.json", found))
    page = html.unescape(raw)
    verdict = page.partition('id="verdict"')[2].partition("</section>")[0]
    assert "torch is fastest" not in verdict
    assert verdict.count("failed its proof") == 4 and "error 0.5 of" in verdict
    assert "wrong answer: off by one" in verdict
    rows = re.findall(r'<tr id="[^"]+" class="row[^"]*wrong".*?</tr>', page, re.DOTALL)
    assert len(rows) == 4 and all("failed</td>" in row and "data-v" not in row for row in rows)
    told = [each for each in data_of(raw)["rows"].values() if each["title"].endswith(": torch")]
    assert len(told) == 4 and all(value is None for each in told for *_, value in each["figures"])
    assert all(each["facts"] == [["times", "not shown: the answer was wrong"]] for each in told)


def test_marks_and_their_reasons_are_shown(tmp_path: Path) -> None:
    found = content()
    info = record(found["benchmarks"][3])
    info["machine"] = {"disturbed": True, "reasons": ["another process took 30% of a CPU"]}
    info["warnings"] = ["more threads than CPUs"]
    page = html.unescape(page_of(tmp_path, write(tmp_path / "x.json", found)))
    assert "disturbed: another process took 30% of a CPU" in page
    assert "doubtful: more threads than CPUs" in page
    assert "results at a reduced size are not compared" in page


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("preset", lambda info: info.update(preset="standard")),
        ("threads", lambda info: info.update(threads=1)),
        ("machine: memory", lambda info: info["environment"]["memory"].update(total_bytes=1 << 40)),
    ],
)
def test_results_of_other_conditions_stand_apart_and_it_is_said(tmp_path: Path, name: str, change: Any) -> None:
    other = content()
    for bench in other["benchmarks"]:
        change(record(bench))
    found = gather([SMOKE, write(tmp_path / "other.json", other)], 0.15)
    assert name in found.apart
    for section in found.sections:
        assert len({row.file for row in section.rows}) == 1
    page = html.unescape(page_of(tmp_path, SMOKE, tmp_path / "other.json"))
    assert f"differ in {', '.join(found.apart)}" in page and f"Kept apart by: {name}" in page


def test_two_files_of_one_machine_stand_in_one_table(tmp_path: Path) -> None:
    halves = content(), content()
    halves[0]["benchmarks"] = [b for b in halves[0]["benchmarks"] if b["param"] in ("torch", "keras")]
    halves[1]["benchmarks"] = [b for b in halves[1]["benchmarks"] if b["param"] in ("jax", "mxnet")]
    paths = [write(tmp_path / f"{number}.json", half) for number, half in enumerate(halves)]
    found = gather(paths, 0.15)
    assert not found.apart and len(found.sections) == 1
    assert {row.file for row in found.rows} == {"(1)", "(2)"}


def test_a_file_of_another_schema_is_left_out_named_and_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = content()
    other["d5suite"]["schema"] = "d5suite-9"
    path = write(tmp_path / "other.json", other)
    page = html.unescape(page_of(tmp_path, SMOKE, path, code=1))
    assert f"{path} is left out" in page and "d5suite-9" in page
    assert "left out" in capsys.readouterr().err
    assert "d5suite-9" in refused(capsys, str(path), "-o", str(tmp_path / "none.html"))
    assert not (tmp_path / "none.html").exists()


def test_a_missing_series_file_is_said(tmp_path: Path) -> None:
    page = page_of(tmp_path, write(tmp_path / "moved.json", content()))
    assert "are not beside it" in page


def test_bad_input_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "report.html")
    empty = write(tmp_path / "empty.json", content() | {"benchmarks": []})
    assert "no d5suite results here" in refused(capsys, str(empty), "-o", out)
    assert "cannot read the file" in refused(capsys, str(tmp_path / "absent.json"), "-o", out)
    assert "given twice" in refused(capsys, str(SMOKE), str(SMOKE), "-o", out)
    assert "between-runs" in refused(capsys, str(SMOKE), "-o", out, "--between-runs", "-1")
    assert "cannot be written" in refused(capsys, str(SMOKE), "-o", str(tmp_path / "no" / "report.html"))
    assert "Is a directory" in refused(capsys, str(SMOKE), "-o", str(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == ["empty.json"]


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    page = page_of(tmp_path, write(tmp_path / "hostile.json", hostile()))
    without = page.replace(re.findall(r"<script>.*?</script>", page, re.DOTALL)[-1], "")
    assert re.findall(r"<script[^>]*>", without) == ['<script type="application/json" id="data">']
    assert "<img" not in page and "49" not in re.findall(r"hacked=1;//(.{7})", page)
    assert "\u202e" not in page  # an escape is shown instead
    assert max(map(len, re.findall(r">([^<>]*)<", without.partition("</style>")[2].partition("<script")[0]))) < 2500
    assert html.escape(HOSTILE[0][:20]) in page


def test_the_page_loads_nothing_and_runs_no_other_script(tmp_path: Path) -> None:
    page = page_of(tmp_path, SMOKE, RANKS)
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=\"(?!#)", page.replace('srcdoc="', "")), "a link that leaves the page"
    assert not re.search(r"https?://", page)


def test_a_measurement_from_outside_has_its_table(tmp_path: Path) -> None:
    found = content()
    found["benchmarks"] = [b for b in found["benchmarks"] if b["group"].endswith("/inference")]
    found = named(found, "mine", "fetch")
    for bench in found["benchmarks"]:
        record(bench).update(measurement="fetch", bytes_per_s=2.5e6)
    columns = [{"heading": "MB/s", "value": "bytes_per_s", "format": "figure", "scale": 1e-6, "shown": "always"}]
    columns.append(
        {"heading": "err/tol", "value": "validation.checks", "format": "worst share", "scale": 1.0, "shown": "wide"}
    )
    table = {"columns": columns, "note": "MB/s: scores brought back", "width": 20}
    found["d5suite"]["measurements"] = {"fetch": {"level": 1, "unit": "images/s", "table": table, "schema": {}}}
    page = page_of(tmp_path, write(tmp_path / "x.json", found))
    assert "MB/s</button>" in page and ">2.5</td>" in page and "scores brought back" in page
    assert "mine</bdi>" in page.partition('id="grid"')[0]


def test_a_frame_holds_the_same_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, SMOKE)
    assert main(["report", str(SMOKE), "-o", str(tmp_path / "frame.html"), "--embed"]) == 0
    frame = (tmp_path / "frame.html").read_text()
    (inside,) = re.findall(r'srcdoc="([^"]*)"', frame)
    assert html.unescape(inside) == page
    assert d5suite.report.show(SMOKE)._repr_html_() == frame


def test_links_are_the_same_in_every_page_of_the_same_results(tmp_path: Path) -> None:
    alone = set(re.findall(r'<tr id="(r-\w+)"', page_of(tmp_path, SMOKE)))
    assert alone == set(re.findall(r'<tr id="(r-\w+)"', page_of(tmp_path, SMOKE)))
    page = page_of(tmp_path, SMOKE, RANKS)
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)


@given(st.lists(st.floats(1e-9, 1e4), min_size=1, max_size=200), st.floats(1e-9, 1e4))
def test_a_strip_stays_within_its_cell(samples: list[float], longest: float) -> None:
    inside = samples_strip(samples, (min(samples), max(samples)), sorted(samples)[len(samples) // 2], longest)
    places = [float(each) for each in re.findall(r"[Mx](?:=\")?([\d.e+-]+)", inside)]
    assert all(0 <= each <= WIDTH and math.isfinite(each) for each in places)
    assert len(inside) < 2000


def test_every_bar_says_its_row_and_a_number_of_the_json(tmp_path: Path) -> None:
    found = content()
    shown = [bench for bench in found["benchmarks"] if not is_reduced(record(bench))]
    record(shown[0])["first_call_s"] = 0.0123  # shorter than a bar is thick
    expected = []
    for bench in shown:
        info = record(bench)
        value, unit = info["throughput"]["value"], info["throughput"]["unit"]
        sure = info["median_ci_confidence"]
        high, low = (digits(value * info["median_s"] / bound) for bound in info["median_ci95"])
        needed = [info["memory"].get(f"{part}_bytes", 0) for part in PARTS_OF_MEMORY]
        expected += [
            f"{info['measurement']}, {bench['param']}: {told}"
            for told in (
                f"{digits(value)} {unit} ({low} to {high}, {sure:.0%})",
                f"peak memory {digits(info['peak_memory_bytes'] / 2**20)} MiB",
                f"first call {digits(info['first_call_s'])} s, compilation included",
                *[f"{digits(sum(needed) / 2**20)} MiB by definition"] * any(needed),
            )
        ]
    page = page_of(tmp_path, write(tmp_path / "x.json", found))
    tips = [html.unescape(tip) for tip in re.findall(r'data-tip="([^"]*)"', page.partition("<figure")[2])]
    assert {re.sub(r", [\d.]+ times the fastest one's time", "", tip) for tip in tips} == set(expected)
    assert any("first call 0.0123 s" in tip for tip in tips)


def test_an_overview_of_many_rows_is_several_pictures(tmp_path: Path) -> None:
    found = content()
    few = next(
        bench for bench in found["benchmarks"] if bench["group"].endswith("/inference") and bench["param"] == "jax"
    )
    found["benchmarks"] = []
    for number in range(MOST_BARS + 2):
        bench = copy.deepcopy(few)
        bench["param"] = f"{few['param']}-{number}"
        record(bench)["throughput"]["value"] = 1000.0 + number
        record(bench).pop("turns")
        found["benchmarks"].append(bench)
    path = write(tmp_path / "x.json", named(found, "case"))
    page = html.unescape(page_of(tmp_path, path))
    assert "rows 1 to 48 of 50" in page and "rows 49 to 50 of 50" in page
    tips = re.findall(r'data-tip="inference, [^"]*?-(\d+): first call', page)
    assert sorted(map(int, tips)) == list(range(MOST_BARS + 2))
    slowest = re.findall(r"-0: 1000 images/s \([^)]*\), ([\d.]+) times the fastest", page)
    assert set(slowest) == {f"{1049 / 1000:.2f}"}  # of all pictures
    assert main(["report", str(path), "-o", str(tmp_path / "r.html"), "--svg", str(tmp_path / "svg")]) == 0
    names = {each.name for each in (tmp_path / "svg").iterdir()}
    assert names == {"case.overview.svg", "case.overview.2.svg"}


def test_failed_checks_come_first_and_those_left_out_are_counted(tmp_path: Path) -> None:
    found = content()
    info = record(found["benchmarks"][0])
    checks = [{"name": f"check {number}", "error": 0.0, "tolerance": 1e-3} for number in range(MOST_CHECKS + 10)]
    checks[-1]["error"] = 0.5
    checks[-3]["passed"] = False
    info["validation"]["checks"] = checks
    rows = data_of(page_of(tmp_path, write(tmp_path / "x.json", found)))["rows"].values()
    (row,) = [each for each in rows if len(each["checks"]) == MOST_CHECKS]
    assert [name for name, *_ in row["checks"][:3]] == ["✗ check 67", "✗ check 69", "✓ check 0"]
    assert row["left_out"] == "10 further checks are left out here; none of them failed."
    assert sum("left_out" in each for each in rows) == 1


def test_energy_clocks_and_caches_are_among_the_facts_and_energy_is_in_the_csv(tmp_path: Path) -> None:
    found = content()
    info = record(found["benchmarks"][0])
    info["energy"] = {
        "joules_per_step": 1.25, "joules_per_item": 0.625, "error_j": 0.05, "steps": 40, "seconds": 2.0,
        "mean_power_w": 25.0, "method": "counter", "of": "the whole GPU",
    }  # fmt: skip
    info["device_events"] = {
        "samples_s": [1e-3] * 9, "median_s": 1e-3, "launch_overhead_s": 2e-5, "difference_s": 1.5e-5, "agree": True,
        "trusted": True,
    }  # fmt: skip
    info["l2_cold"] = {"cache_bytes": 50 * 2**20, "buffer_bytes": 100 * 2**20}
    info["memory"]["nvml"] = {"peak_bytes": 512 * 2**20, "baseline_bytes": 256 * 2**20, "of": "this process"}
    other = record(found["benchmarks"][1])
    other["device_events"] = {"missing": "no events here"}
    path = write(tmp_path / "x.json", found)
    rows = data_of(page_of(tmp_path, path))["rows"].values()
    facts = [dict(each["facts"]) for each in rows]
    (own,) = [each for each in facts if "L2 cache" in each]
    assert own["energy"].startswith("0.625 J per item; 1.25 J per step; which may be off by 0.05 J; 25 W on average")
    assert own["energy"].endswith("40 steps; 2\u00a0s; counter; of the whole GPU")
    assert own["device's clock"] == (
        "agrees with the host's; median 1\u00a0ms; the host's is 15\u00a0µs longer; launch overhead 20\u00a0µs"
    )
    assert own["L2 cache"] == "cold: 50 MiB; 100 MiB written before each sample"
    assert own["memory by the driver"] == "peak 512 MiB; 256 MiB before; of this process"
    assert "not taken: no events here" in [each.get("device's clock") for each in facts]
    assert sum(each["energy"].startswith("not taken: ") for each in facts) == len(facts) - 1
    assert main(["report", str(path), "-o", str(tmp_path / "r.html"), "--csv", str(tmp_path / "csv")]) == 0
    with open(tmp_path / "csv" / "results.csv", newline="") as file:
        lines = [line["energy.joules_per_item"] for line in csv.DictReader(file)]
    assert sorted(filter(None, lines)) == ["0.625"] and len(lines) == len(facts)


def test_a_page_says_nothing_of_terminals(tmp_path: Path) -> None:
    page = page_of(tmp_path, SMOKE)
    assert "MiB: peak memory; needed: what the step must hold at least</p>" in page and "100 columns" not in page


def test_declared_pictures_are_drawn_from_the_series(tmp_path: Path) -> None:
    page = page_of(tmp_path, RANKS)
    assert page.count("<figure") == 1 and "steps of several ranks" in page
    assert "2 ranks, " in page, "a point says its numbers"
    assert "var(--b6)" in page and PALETTE[6] not in page.partition("</style>")[2], (
        "torch has its colour in both themes"
    )


@pytest.mark.slow
def test_operators_curves_and_collectives_say_their_numbers(tmp_path: Path) -> None:
    """Of a real run, every cell and point of these pictures says what the result file holds."""
    chosen = ["operators/test_softmax.py", "recipes/test_digits_lenet.py", "-k", "forward or time_to_accuracy"]
    several = ["collectives/test_all_reduce.py", "--ranks", "2", "--communicator", "gloo"]
    for name, options in (("one", [*chosen, "--backend", "deep500"]), ("ranks", several)):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *options, "--benchmark-json", str(tmp_path / f"{name}.json")],
            cwd=ROOT, env=plugin_environment(), capture_output=True, text=True, preexec_fn=end_with_tests,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    found = [record(bench) for name in ("one", "ranks") for bench in content(tmp_path / f"{name}.json")["benchmarks"]]
    out = tmp_path / "r.html"
    paths = [str(tmp_path / f"{name}.json") for name in ("one", "ranks")]
    assert main(["report", *paths, "-o", str(out), "--svg", str(tmp_path / "svg")]) == 0
    page = html.unescape(out.read_text())
    drawn = {path.stem for path in (tmp_path / "svg").glob("*.svg")}
    assert drawn == {"softmax.ceilings", "digits_lenet.time_to_accuracy", "all_reduce.collectives"}
    assert page.count("<figure") == 3
    tips = set(re.findall(r'data-tip="([^"]*)"', page))
    (operator,) = [each for each in found if each["recipe"].endswith("heads_b1")]
    (cell,) = {tip for tip in tips if tip.startswith("heads_b1/forward, deep500: ")}
    assert f"{100 * max(operator['fraction_of_ceiling'].values()):.0f}% of the ceiling" in cell
    (training,) = [each for each in found if each["measurement"] == "time_to_accuracy"]
    runs = read_series(tmp_path / "one.h5", [b["fullname"] for b in content(tmp_path / "one.json")["benchmarks"]])
    (series,) = [each for each in runs.values() if "run_0_seconds" in each]
    for number in range(len(training["runs"])):
        for seconds, value in zip(
            series[f"run_{number}_seconds"], series[f"run_{number}_{training['target']['metric']}"], strict=True
        ):
            assert f"deep500, run {number + 1}: {digits(value)} after {digits(seconds)} s of training" in tips
    (collective,) = [each for each in found if each["measurement"] == "collectives"]
    for each in collective["sizes"]:
        assert f"gloo-2: {digits(1e6 * each['median_s'])} µs for {size_text(each['bytes'])}" in tips


def test_every_number_is_in_the_csv_files_as_in_the_json(tmp_path: Path) -> None:
    assert main(["report", str(SMOKE), "-o", str(tmp_path / "r.html"), "--csv", str(tmp_path / "csv")]) == 0
    with open(tmp_path / "csv" / "results.csv", newline="") as file:
        results = list(csv.DictReader(file))
    with open(tmp_path / "csv" / "samples.csv", newline="") as file:
        samples = list(csv.DictReader(file))
    benchmarks = content()["benchmarks"]
    assert len(results) == len(benchmarks)
    for bench in benchmarks:
        info = record(bench)
        (line,) = [r for r in results if (r["measurement"], r["backend"]) == (info["measurement"], bench["param"])]
        assert float(line["median_s"]) == info["median_s"] and float(line["throughput"]) == info["throughput"]["value"]
        assert [float(line[f"median_{side}_s"]) for side in ("low", "high")] == info["median_ci95"]
        assert [float(s["seconds"]) for s in samples if s["id"] == line["id"]] == bench["stats"]["data"]
    with open(tmp_path / "csv" / "fastest.csv", newline="") as file:
        fastest = {line["measurement"]: line["fastest"] for line in csv.DictReader(file)}
    in_turn = {
        contest.name.partition("/")[2]: "undecided" if contest.rivals else contest.standing[0][0].backend
        for contest in contests_in_turn(load_results(SMOKE))
    }
    assert {"inference", "gradient", "training_step"} <= set(in_turn)
    assert {name: fastest[name] for name in in_turn} == in_turn  # as below the terminal's tables


def test_no_cell_of_a_csv_file_is_a_formula(tmp_path: Path) -> None:
    found = named(content(), "=1+cmd|' !A0")
    path = write(tmp_path / "x.json", found)
    assert main(["report", str(path), "-o", str(tmp_path / "r.html"), "--csv", str(tmp_path / "csv")]) == 0
    with open(tmp_path / "csv" / "results.csv", newline="") as file:
        assert {line["case"] for line in csv.DictReader(file)} == {"'=1+cmd|' !A0"}


def test_pictures_are_written_without_a_browser(tmp_path: Path) -> None:
    options = [f"--{kind}={tmp_path / kind}" for kind in ("png", "svg")]
    assert main(["report", str(RANKS), str(SMOKE), "-o", str(tmp_path / "r.html"), *options]) == 0
    names = {"digits_lenet.distributed_step", "imagenet_resnet50.overview"}
    assert {each.name for each in (tmp_path / "png").iterdir()} == {f"{name}.png" for name in names}
    for name in names:
        assert (tmp_path / "png" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert ElementTree.parse(tmp_path / "svg" / f"{name}.svg").getroot().tag.endswith("svg")  # noqa: S314


def test_what_cannot_be_drawn_costs_no_number_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such picture")

    monkeypatch.setitem(d5suite.report.plots.PLOTS, "steps", Plot(broken))  # type: ignore[arg-type]
    page = html.unescape(page_of(tmp_path, RANKS))
    assert "no picture of digits_lenet" in page and page.count('class="row ') == 65


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text_in_pictures(name: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    with drawing():
        axes = figure.subplots()
        axes.plot([1, 2], [3, 4], marker="o", label=name[:300])
        axes.set(title=name[:300], xlabel=name[:300])
        axes.legend()
    root = ElementTree.fromstring(inline(figure, "f0", name))  # noqa: S314
    tags = {each.tag.rpartition("}")[2] for each in root.iter()}
    assert tags <= {"svg", "g", "defs", "path", "use", "text", "tspan", "clipPath", "rect", "style"}
    assert root.get("aria-label") == name
    assert [each.text for each in root.iter("text")].count(name[:300]) == 3, "a formula or markup was made of it"


def test_a_history_is_shown_with_its_changes_and_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    day = datetime(2026, 1, 1, tzinfo=timezone.utc)
    found = content()
    found["benchmarks"] = [b for b in found["benchmarks"] if b["param"] == "tensorflow"]
    samples = {bench["fullname"]: bench["stats"]["data"] for bench in found["benchmarks"]}
    for run in range(30):
        found["datetime"] = (day + timedelta(days=run + 40 * (run > 5))).isoformat()
        for bench in found["benchmarks"]:
            factor = (1.5 if run >= 15 and bench["group"].endswith("/gradient") else 1.0) * (1 + 0.001 * (run % 3))
            settle(bench, [each * factor for each in samples[bench["fullname"]]])
        assert main(["history", "add", str(tmp_path / "past"), str(write(tmp_path / "run.json", found))]) == 0
    out = tmp_path / "r.html"
    options = ["-o", str(out), "--history", str(tmp_path / "past"), "--csv", str(tmp_path / "csv")]
    options += ["--svg", str(tmp_path / "svg")]
    assert main(["report", str(SMOKE), *options]) == 0
    shown = html.unescape(out.read_text()).partition('id="history"')[2].partition("</section>")[0]
    assert shown.count("<tr data-f") == 4 and shown.count("no change") == 3
    changed = f"1.50× since {(day + timedelta(days=55)).date()}"
    assert changed in shown and shown.index(changed) < shown.index("no change")
    assert f"no run from {(day + timedelta(days=5)).date()} to {(day + timedelta(days=46)).date()}" in shown
    assert len((tmp_path / "csv" / "history.csv").read_text().splitlines()) == 1 + 4 * 30
    pictures = re.findall(r"<figure.*?</figure>", shown, re.DOTALL)
    assert len(pictures) == 4 and "×1.50 since 2026-02-25" in pictures[0]
    for picture in pictures:  # a point of each run, and a line that ends before the gap
        assert len(re.findall(r'data-tip="tensorflow: [0-9.]+ ms on 2026-', picture)) == 30
    drawn = (tmp_path / "svg" / "history.imagenet_resnet50-gradient.svg").read_text()
    assert "×1.50 since 2026-02-25" in drawn and len(list((tmp_path / "svg").glob("history.*.svg"))) == 4
    capsys.readouterr()
    assert "there is no such folder" in refused(capsys, str(SMOKE), "-o", str(out), "--history", str(tmp_path / "none"))


def _seen(colour: str, blindness: list[list[float]]) -> list[float]:
    """CIE L*a*b* of a colour as a blind eye sees it; D65."""
    linear = [((c + 0.055) / 1.055) ** 2.4 if c > 0.04045 else c / 12.92 for c in _rgb(colour)]
    seen = [min(max(sum(a * b for a, b in zip(row, linear, strict=True)), 0), 1) for row in blindness]
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = [sum(a * b for a, b in zip(row, seen, strict=True)) for row in to_xyz]
    x, y, z = ((v / w) ** (1 / 3) for v, w in zip(xyz, (0.9505, 1.0, 1.089), strict=True))
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


def _rgb(colour: str) -> list[float]:
    return [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]


def _luminance(colour: str) -> float:
    linear = [((c + 0.055) / 1.055) ** 2.4 if c > 0.04045 else c / 12.92 for c in _rgb(colour)]
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


STYLE = (Path(d5suite.report.__file__).parent / "page" / "page.css").read_text()
LIGHT, DARK = (dict(re.findall(r"--(\w+): (#\w+)", part)) for part in STYLE.split("}")[:2])
BLINDNESS: dict[str, list[list[float]]] = {  # Machado, Oliveira and Fernandes 2009, severity 1
    "none": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_frameworks_that_people_compare_differ_in_hue(theme: str) -> None:
    """torch and MXNet were both purple."""
    colours, own = {"light": LIGHT, "dark": DARK}[theme], places(["mxnet", "tensorflow", "torch", "jax"])
    hues = {
        name: math.degrees(math.atan2(*_seen(colours[f"b{place}"], BLINDNESS["none"])[:0:-1])) % 360
        for name, place in own.items()
    }
    for pair in (("torch", "mxnet"), ("torch", "jax"), ("mxnet", "tensorflow"), ("mxnet", "jax")):
        apart = abs(hues[pair[0]] - hues[pair[1]])
        assert min(apart, 360 - apart) > 45, (pair, hues)


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_colours_of_backends_can_be_told_apart(theme: str, blindness: str) -> None:
    colours = {"light": LIGHT, "dark": DARK}[theme]
    backends = [colours[f"b{number}"] for number in range(len(PALETTE))]
    seen = [_seen(colour, BLINDNESS[blindness]) for colour in backends]
    near = {
        (backends[i], backends[j]): round(math.dist(seen[i], seen[j]), 1)
        for i, j in itertools.combinations(range(len(seen)), 2)
    }
    assert min(near.values()) > (30 if blindness == "none" else 14), min(near, key=lambda pair: near[pair])


def test_a_plug_in_changes_no_colour() -> None:
    """One whose name comes before others in the alphabet."""
    code = "from d5suite.report.colours import places; print(places(['torch', 'jax', 'faulty']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=plugin_environment()
    )
    found = ast.literal_eval(done.stdout)
    assert {name: found[name] for name in ("jax", "torch")} == places(["torch", "jax"])
    assert found["faulty"] > found["torch"]


def test_up_to_eight_backends_have_colours_of_their_own() -> None:
    used = ["deep500", "jax", "torch", *(f"theirs{number}" for number in range(5))]
    found = places(used)
    assert sorted(place % len(PALETTE) for place in found.values()) == list(range(len(PALETTE)))
    assert {name: found[name] for name in used[:3]} == places(used[:3])


def test_the_colours_have_contrast_and_are_those_of_pictures() -> None:
    assert [LIGHT[f"b{number}"] for number in range(len(PALETTE))] == list(PALETTE)
    for theme in (LIGHT, DARK):
        paper = _luminance(theme["paper"]) if theme["paper"] != "#fff" else 1.0
        for number in range(len(PALETTE)):
            own = _luminance(theme[f"b{number}"])
            assert (max(own, paper) + 0.05) / (min(own, paper) + 0.05) >= 3, theme[f"b{number}"]  # WCAG 2.2, 1.4.11
