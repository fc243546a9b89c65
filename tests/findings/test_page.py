"""docs/findings.md lists every finding that has a test, and a mended one is reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.findings.mended import require

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "findings.md").read_text()


def test_the_page_has_every_finding() -> None:
    listed = set(re.findall(r"`(test_[a-z]\w*)`", PAGE))
    files = [path for path in HERE.glob("test_*.py") if path != Path(__file__)]
    assert listed == {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    for target in re.findall(r"\]\(\.\./([^)#]+)", PAGE):
        assert (HERE.parents[1] / target).exists(), target


def test_a_mended_finding_says_what_to_remove() -> None:
    require(True, "numpy", "there")
    with pytest.raises(AssertionError, match=r"mended in numpy [\d.]+: remove the workaround in there"):
        require(False, "numpy", "there")
