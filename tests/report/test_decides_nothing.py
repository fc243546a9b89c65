"""``report/`` renders: whatever estimates or decides is in ``statistics/``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import d5suite.report

FILES = sorted(Path(d5suite.report.__file__).parent.rglob("*.py"))

ESTIMATORS = {"scipy", "ruptures", "d5suite.statistics.intervals", "d5suite.statistics.sequential"}
"""Modules that estimate; `d5suite.statistics` has functions for reports that call them."""

TYPES = {
    "d5suite.statistics.ratios": {"Ratio"},
    "d5suite.statistics.medians": {"Summary", "summarize"},
    "d5suite.statistics.rounds": {"least_lead"},
}
"""What reports may import of modules that estimate."""


def decisions(source: str) -> Iterator[str]:
    """Yield what a module does beside rendering."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in ESTIMATORS)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module in ESTIMATORS or node.module.split(".")[0] in ESTIMATORS:
                yield f"imports {node.module}"
            names = {alias.name for alias in node.names} - TYPES.get(node.module, {alias.name for alias in node.names})
            yield from (f"imports {name} from {node.module}" for name in sorted(names))
        elif isinstance(node, ast.Compare):
            ends = [each for each in ast.walk(node) if isinstance(each, ast.Attribute) and each.attr in ("low", "high")]
            yield from (f"compares {ast.unparse(end)}" for end in ends)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_reports_render_and_decide_nothing(path: Path) -> None:
    assert not list(decisions(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    from scipy.stats import t",
        "import scipy.stats",
        "from d5suite.statistics.intervals import median_interval",
        "from d5suite.statistics.medians import ratio_of_medians, Summary",
        "verdict = 'slower' if ratio.low > 1 else 'same'",
    ],
)
def test_a_report_that_decides_is_seen(source: str) -> None:
    assert len(list(decisions(source))) == 1
