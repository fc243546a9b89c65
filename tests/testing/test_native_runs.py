"""One start of ranks for all precisions of a framework's own scheme, and what a failure means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from d5suite.backends import discover
from d5suite.testing import test_native
from d5suite.testing.native_rank import AGAIN, ALONE, RANKS, RUNS
from d5suite.testing.scheme_rank import RankRun
from d5suite.testing.subject import Subject
from d5suite.testing.test_native import NativeRuns

BOTH = "fp64,fp32"


@pytest.mark.parametrize(
    ("breaks", "starts", "failures"),
    [
        pytest.param("", [BOTH], {"fp64": "", "fp32": ""}, id="nothing"),
        pytest.param("fp64", [BOTH, "fp32"], {"fp64": BOTH, "fp32": ""}, id="the first"),
        pytest.param("fp32", [BOTH, "fp64"], {"fp64": "", "fp32": BOTH}, id="the second"),
        pytest.param("leaving", [BOTH], {"fp64": BOTH, "fp32": BOTH}, id="after both"),
    ],
)
def test_a_failure_is_that_of_the_precision_that_broke_the_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, breaks: str, starts: list[str], failures: dict[str, str]
) -> None:
    """The other one gets ranks of its own; a failure when the ranks leave is that of both."""
    started: list[str] = []

    def run_ranks(_: str, folder: Path, count: int, *arguments: str, **more: Any) -> str:
        precisions = arguments[2]
        started.append(precisions)
        for precision in precisions.split(","):
            if precision == breaks:
                return precisions
            for what in RUNS:
                for kind in (*AGAIN, ALONE):
                    for rank in range(RANKS):
                        RankRun.file(folder, what + kind, precision, rank).touch()
        return precisions if breaks == "leaving" else ""

    monkeypatch.setattr(test_native, "run_ranks", run_ranks)
    subject = Subject(discover()[0]["torch"], "eager", "cpu", 1)
    runs = NativeRuns(subject, {"ddp": BOTH.split(",")}, tmp_path)
    assert {precision: runs.ranks("ddp", precision)[1] for precision in failures} == failures
    assert started == starts
