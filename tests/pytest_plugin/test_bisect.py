"""``d5suite bisect`` on a repository whose revisions only pretend to be measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from d5suite.cli import main
from d5suite.errors import ConfigurationError
from d5suite.pytest_plugin.bisect import Culprit, find_culprit
from d5suite.report.runs import BenchmarkRun
from d5suite.report.verdicts import RunComparison, Verdict
from d5suite.statistics.decisions import Decision
from d5suite.statistics.ratios import Ratio

NUMBERS = range(12)


@pytest.fixture(scope="module")
def commits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A repository of empty commits, and their names."""
    folder = tmp_path_factory.mktemp("bisect")
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run([*git, "init", "--quiet", "--initial-branch=main"], check=True)
    for number in NUMBERS:
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", f"--message=number {number}"], check=True)
    listed = subprocess.run([*git, "rev-list", "--reverse", "main"], capture_output=True, text=True, check=True)
    return folder, listed.stdout.split()


class Measured:
    """Pretends to measure: a benchmark is slower from a number on; odd ones say odd things."""

    def __init__(self, names: list[str], slow_from: int, odd: dict[int, str] | None = None) -> None:
        self.names, self.slow_from, self.odd = [*names, "main"], slow_from, odd or {}
        self.asked: list[int] = []

    def __call__(self, good: str, revision: str, only: str | None) -> RunComparison:
        number = min(self.names.index(revision), len(NUMBERS) - 1)
        self.asked.append(number)
        verdict = self.odd.get(number, "slower" if number >= self.slow_from else "same")
        if verdict == "unmakeable":
            raise ConfigurationError("this revision holds no d5suite")
        ratio = 1.3 if verdict == "slower" else 1.0
        names = [only] if only else ["steady", "a/b torch"]
        base, new = (BenchmarkRun(Path(each), "side", [], {}) for each in (good, revision))
        verdicts = [
            Verdict(
                name,
                "same" if name == "steady" else verdict,
                decision=Decision(verdict, Ratio(ratio, 0.9 * ratio, 1.1 * ratio, 0.95, "pairs", 10)),
            )
            for name in names
        ]
        return RunComparison(base, new, verdicts, {}, [])


@pytest.mark.parametrize("slow_from", NUMBERS[1:])
def test_each_revision_is_found(
    slow_from: int, commits: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, names = commits
    monkeypatch.chdir(folder)
    measured = Measured(names, slow_from)
    found = find_culprit(names[0], "main", measured, lambda what: None)
    assert isinstance(found, Culprit)
    assert (found.benchmark, found.ratio, found.revisions) == ("a/b torch", 1.3, [names[slow_from]])
    assert len(measured.asked) <= 1 + 4  # log2 of 12, and the whole


@pytest.mark.parametrize(
    ("slow_from", "odd", "expected"),
    [
        (7, {5: "unmakeable"}, [7]),
        (8, {7: "uncertain"}, [7, 8]),
        (8, {6: "unmakeable", 7: "missing"}, [6, 7, 8]),
        (5, dict.fromkeys(range(1, 11), "invalid"), list(range(1, 12))),
    ],
)
def test_what_cannot_be_told_is_left_out(
    slow_from: int, odd: dict[int, str], expected: list[int], commits: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder, names = commits
    monkeypatch.chdir(folder)
    found = find_culprit(names[0], "main", Measured(names, slow_from, odd), lambda what: None)
    assert isinstance(found, Culprit)
    assert [names.index(each) for each in found.revisions] == expected


def test_without_a_slowdown_the_comparison_is_the_answer(
    commits: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, names = commits
    monkeypatch.chdir(folder)
    measured = Measured(names, len(NUMBERS))
    found = find_culprit(names[0], "main", measured, lambda what: None)
    assert isinstance(found, RunComparison) and len(measured.asked) == 1


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("main", "main~3", "no revision lies between them"),
        ("main", "main", "no revision lies between them"),
        ("nobody", "main", "git rev-parse --verify nobody"),
        ("--all", "main", "not a range of revisions"),
        ("main~1", "main", "this revision holds no d5suite"),
    ],
)
def test_revisions_that_make_no_sense_are_one_clear_error(
    good: str, bad: str, message: str, commits: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(commits[0])
    assert main(["bisect", f"--good={good}", f"--bad={bad}", "recipes"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said
