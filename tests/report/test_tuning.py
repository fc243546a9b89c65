"""The course of a search on a page and in a picture; a stranger's file."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from d5suite.cli import main
from d5suite.report.tuning import front, rows_of
from tests.report.pages import HOSTILE
from tests.report.planted import bench, result


def trial(value: float | None, status: str = "measured", **more: Any) -> dict[str, Any]:
    figures = {"time_s": 0.1, "memory_bytes": 1e8} if status == "measured" else {}
    return {"knobs": {}, "status": status, "value": value, "time": value, "interval": [None, None], "reason": "",
            "figures": figures, **more}  # fmt: skip


def course(**more: Any) -> dict[str, Any]:
    """A search: the default, a faster one, a faster but wrong one, a slower one."""
    trials = [
        trial(0.001),
        trial(-0.223, knobs={"OMP_WAIT_POLICY": "passive"}, interval=[-0.24, -0.21],
              figures={"time_s": 0.08, "memory_bytes": 2e8}),
        trial(None, "wrong", knobs={"PLANTED": "1"}, reason="outputs differ"),
        trial(0.5, "pruned", knobs={"threads": "1"}),
    ]  # fmt: skip
    found = {
        "case": "digits_lenet", "measurement": "training_step", "backend": "torch", "mode": "eager", "goal": "time",
        "size": 512, "seconds": 61.0, "trials": trials,
        "wrong": [{"knobs": {"PLANTED": "1"}, "time": 0.5, "reason": "outputs differ"}],
        "proposed": [{"knobs": {"mode": "channels_last"}, "reason": "Conv takes 70% of the step"}],
        "ruled_out": [{"knob": "batch_size", "value": "4096", "reason": "9 GiB are needed"}],
        "ablation": [{"knob": "OMP_WAIT_POLICY", "value": "passive", "without": 1.25, "interval": [1.2, 1.3],
                      "stays": True}],
        "confirmed": {"knobs": {"OMP_WAIT_POLICY": "passive"}, "versus_default": [0.8, 0.78, 0.83],
                      "versus_stock": [0.5, 0.48, 0.53]},
        "decision": {"taken": True, "reason": ""}, "notes": [],
    }  # fmt: skip
    return {**found, **more}


def page_of(folder: Path, *courses: Any) -> tuple[int, str]:
    result(folder / "out.json", bench())
    (folder / "tuned.json").write_text(json.dumps({"schema": "d5suite-tune-1", "courses": list(courses)}))
    page = folder / "page.html"
    code = main(["report", str(folder / "out.json"), "-o", str(page), "--tuning", str(folder / "tuned.json")])
    return code, page.read_text(encoding="utf-8") if page.exists() else ""


def test_a_page_tells_the_course_trial_by_trial(tmp_path: Path) -> None:
    code, page = page_of(tmp_path, course())
    assert code == 0 and '<a href="#tuning">Tuning</a>' in page
    part = page.partition('<section id="tuning"')[2].partition("</section>")[0]
    text = re.sub(r"\s+", " ", html.unescape(re.sub("<[^>]+>", " ", part)))
    assert "taken: OMP_WAIT_POLICY=passive" in text
    assert "0.500 times as long as the framework as it comes (stock) (0.480 to 0.530), from fresh launches" in text
    assert "0.800 times as long as d5suite's default (0.780 to 0.830), from fresh launches: 1.25 times as fast" in text
    assert "PLANTED=1: faster but wrong, 0.500 times: outputs differ" in text
    assert "without it 1.250 times as much (1.200 to 1.300)" in text
    assert "OMP_WAIT_POLICY=passive measured 0.800 0.787 to 0.811 0.800" in text  # ratio, interval, best so far
    assert "tried first: mode=channels_last: Conv takes 70% of the step" in text
    assert "left out: batch_size = 4096: 9 GiB are needed" in text
    assert "<svg" in part and "peak memory in MiB" in part and "beaten by no other" in part


def test_what_a_strangers_course_says_stays_text(tmp_path: Path) -> None:
    hostile = HOSTILE[0]
    trials = [trial(0.0, knobs={hostile: HOSTILE[1]}, reason=hostile), trial(None, hostile)]
    found = course(case=hostile, trials=trials, notes=[HOSTILE[1]], decision={"taken": False, "reason": hostile})
    code, page = page_of(tmp_path, found)
    assert code == 0 and "<script>window" not in page and "<img src=x" not in page


@pytest.mark.parametrize(
    "damage",
    [{"trials": [{}]}, {"trials": [trial(1e9)]}, {"confirmed": {"knobs": []}}, {"size": None}, {"wrong": [3]}],
    ids=["empty", "huge", "list", "none", "number"],
)
def test_a_damaged_course_is_one_error(
    damage: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, page = page_of(tmp_path, course(**damage))
    assert code == 2 and not page and "a course is damaged" in capsys.readouterr().err


def test_an_interrupted_course_is_shown(tmp_path: Path) -> None:
    found = rows_of({**course(), "decision": None, "confirmed": None, "ablation": None, "wrong": None})
    assert found.decision == "the default is kept: the search was interrupted" and len(found.trials) == 4


def test_a_front_has_what_nothing_beats() -> None:
    assert front([(2, 1), (1, 3), (3, 1), (1.5, 2), (1, 4)]) == [(1, 3), (1.5, 2), (2, 1)]
