"""Who is fastest and who is within noise, from the rounds in a result file; and files whose rounds
are not what they say."""

from __future__ import annotations

import copy
import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from d5suite.cli import main
from d5suite.report.compare import contests_in_turn
from d5suite.report.reading import load_results
from tests.report.pages import content, record, settle

REFERENCE = Path(__file__).parents[2] / "results" / "reference-2core-cpu-smoke.json"
ROUNDS = [2] * 6
NOISE = [1.0, 1.01, 1.02, 0.99, 1.0, 0.98]


def benchmarks(times: dict[str, float], launches: int = 1, group: str = "token") -> list[dict[str, Any]]:
    """Inference on backends that took turns, with so many times as long a sample."""
    content = json.loads(REFERENCE.read_text())
    (template,) = [
        each for each in content["benchmarks"]
        if each["param"] == "torch" and each["group"] == "imagenet_resnet50/inference"
    ]  # fmt: skip
    made = []
    for place, (name, time) in enumerate(times.items()):
        bench = copy.deepcopy(template)
        noise = [NOISE[(each + place) % 6] for each in range(6)]
        bench["param"], bench["name"] = name, f"test_inference[{name}]"
        settle(bench, [time * each for _ in range(launches) for each in noise for _ in range(2)])
        bench["extra_info"]["d5suite"]["backend"]["name"] = name
        beside = [other for other in times if other != name]
        bench["extra_info"]["d5suite"]["turns"] = [
            {"group": f"{group}{launch}", "beside": beside, "rounds": ROUNDS} for launch in range(launches)
        ]
        made.append(bench)
    return made


def write(path: Path, made: list[dict[str, Any]]) -> Path:
    content = json.loads(REFERENCE.read_text())
    path.write_text(json.dumps({**content, "d5suite": {"schema": content["d5suite"]["schema"]}, "benchmarks": made}))
    return path


def test_the_table_says_who_is_fastest_and_who_is_within_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    path = write(tmp_path / "out.json", benchmarks({"torch": 0.03, "jax": 0.02, "mxnet": 0.0302}))
    assert main(["compare", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "× fastest: time divided by the fastest backend's (95% interval for a repeat run)" in shown
    rows = [line.split() for line in shown.splitlines() if re.match(r"  (jax|torch|mxnet) ", line)]
    assert [row[0] for row in rows[:1]] == ["jax"] and rows[0][3] == "1"
    assert all(re.fullmatch(r"1\.5\d \(1\.\d\d–1\.\d\d\)", " ".join(row[3:5])) for row in rows[1:])
    assert re.search(r"imagenet_resnet50/inference, within noise: (torch and mxnet|mxnet and torch)\n", shown)
    assert "jax and" not in shown and "one launch cannot decide leads below 1.21" in shown
    path = write(tmp_path / "three.json", benchmarks({"torch": 0.03, "jax": 0.02}, launches=3))
    assert main(["compare", str(path)]) == 0
    assert "one launch cannot decide" not in capsys.readouterr().out
    (contest,) = contests_in_turn(load_results(path))
    (_, (row, ratio)) = contest.standing
    assert (row.backend, ratio.method, ratio.n) == ("torch", "launches", 3)
    assert ratio.value == pytest.approx(1.5, rel=0.02)


def test_only_those_that_took_turns_are_put_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apart = benchmarks({"torch": 0.03, "jax": 0.02}) + benchmarks({"mxnet": 0.01, "keras": 0.02}, group="other")
    alone = benchmarks({"tensorflow": 0.001}, group="alone")
    alone[0]["extra_info"]["d5suite"]["turns"][0]["note"] = "memory had no room"
    contests = contests_in_turn(load_results(write(tmp_path / "out.json", apart + alone)))
    assert [[row.backend for row, _ in each.standing] for each in contests] == [["jax", "torch"], ["mxnet", "keras"],
                                                                        ["tensorflow"]]  # fmt: skip
    assert main(["compare", str(tmp_path / "out.json")]) == 0
    assert "memory had no room" in capsys.readouterr().out
    content = json.loads(REFERENCE.read_text())
    for bench in content["benchmarks"]:
        bench["extra_info"]["d5suite"].pop("turns", None)
    assert not contests_in_turn(
        load_results(write(tmp_path / "before.json", content["benchmarks"]))
    )  # of a time before turns


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        ([2] * 5, "its rounds hold 10 samples, not 12"),
        ([10**18], "its rounds hold"),
        ([4] * 3, "its rounds differ from those of a backend measured in turn"),
        ([], "does not fit results/schema.json"),
        (["\x1b[2J"], "does not fit results/schema.json"),
    ],
)
def test_rounds_that_are_not_what_they_say_are_one_error(
    rounds: list[Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = benchmarks({"torch": 0.03, "jax": 0.02})
    made[1]["extra_info"]["d5suite"]["turns"][0]["rounds"] = rounds
    assert main(["compare", str(write(tmp_path / "out.json", made))]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and said in shown.err and "\x1b" not in shown.err


def disturb(bench: dict[str, Any], share: float) -> None:
    record(bench)["machine"] = {
        "disturbed": True,
        "reasons": ["other processes used 1.6 of 2 CPUs"],
        "taken_share": share,
    }


@pytest.mark.parametrize(("share", "decided"), [(0.05, True), (0.4, False), (None, False)])
def test_a_disturbed_run_decides_no_contest(
    share: float | None, decided: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a program that used 1.6 of 2 CPUs, a lead of 54.8 was called clear."""
    found = content()
    for bench in found["benchmarks"]:
        if bench["param"] != "torch":  # a lead that is clear
            settle(bench, [2 * each for each in bench["stats"]["data"]])
        disturb(bench, share if share is not None else 1.0)
        if share is None:  # a file of an earlier version
            del record(bench)["machine"]["taken_share"]
    file = tmp_path / "out.json"
    file.write_text(json.dumps(found))
    assert main(["compare", "--tables", str(file)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("is not decided (?), because the machine was disturbed" in shown) is not decided
    assert (" ? " in shown) is not decided
    page = tmp_path / "page.html"
    assert main(["report", str(file), "-o", str(page), "--csv", str(tmp_path / "csv")]) == 0
    text = page.read_text()
    assert ("comparisons are not decided, because the machine was disturbed" in text) is not decided
    assert ("clearly" in text.partition('class="headline"')[2].partition("</p>")[0]) is decided
    rows = list(csv.DictReader((tmp_path / "csv" / "fastest.csv").open()))
    assert any(not row["close"] and row["next"] for row in rows) is decided
    assert all((row["fastest"] == "undecided") is bool(row["close"]) for row in rows)
    if not decided:
        assert not any(row["next"] for row in rows)
        assert '<td><span class="close">undecided</span></td>' in text and 'class="n best"' not in text


def test_one_disturbed_backend_ties_with_all_and_the_others_are_decided() -> None:
    from d5suite.statistics.contests import Competitor, Ranking

    samples = [[value * (1 + 0.001 * place) for place in range(30)] for value in (1.0, 2.0, 4.0)]
    ranking = Ranking([Competitor(samples[0]), Competitor(samples[1], veto="busy"), Competitor(samples[2])], 0.01)
    assert [ranking.is_tie(a, b) for a, b in ((0, 1), (1, 2), (0, 2))] == [True, True, False]


def test_an_undecided_contest_names_all_who_may_be_fastest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    path = write(tmp_path / "out.json", benchmarks({"torch": 0.03, "jax": 0.02, "mxnet": 0.0201}))
    assert main(["compare", str(path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"imagenet_resnet50/inference is undecided: (jax, mxnet|mxnet, jax)\n", shown)
    assert "within noise" not in shown  # torch is not
    assert main(["report", str(path), "-o", str(tmp_path / "page.html"), "--csv", str(tmp_path / "csv")]) == 0
    (row,) = csv.DictReader((tmp_path / "csv" / "fastest.csv").open())
    assert (row["fastest"], row["fastest_id"], row["next"]) == ("undecided", "", "")
    assert set(row["close"].split()) == {"jax", "mxnet"}
    page = (tmp_path / "page.html").read_text()
    leads = page.partition('<table class="leads">')[2].partition("</table>")[0]
    over = leads.partition("too close to call:")[2].partition("</td>")[0]
    assert ">undecided<" in leads and "jax" in over and "mxnet" in over and "torch" not in over


def test_a_round_of_no_samples_costs_its_own_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = benchmarks({"torch": 0.03, "jax": 0.02})
    made[1]["extra_info"]["d5suite"]["turns"][0]["rounds"] = [0] * 6 + [12]
    assert main(["compare", str(write(tmp_path / "out.json", made))]) == 0
    shown = capsys.readouterr().out
    assert "failed, without a result" in shown and "jax" in shown.partition("failed, without a result")[2]
