"""How many batches the loader prepares ahead."""

from __future__ import annotations

import pytest

from d5suite.data.prefetch import AHEAD, PREFETCH, prefetch_by_default
from d5suite.errors import ConfigurationError


def test_a_variable_says_how_many_batches_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PREFETCH, raising=False)
    assert prefetch_by_default() == AHEAD
    monkeypatch.setenv(PREFETCH, "8")
    assert prefetch_by_default() == 8


@pytest.mark.parametrize("text", ["0", "-1", "many", "1e9", ""])
def test_a_variable_without_a_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFETCH, text)
    with pytest.raises(ConfigurationError, match=PREFETCH):
        prefetch_by_default()
