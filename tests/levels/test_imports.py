"""Imports that leave optional libraries out, and change nothing else."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from pathlib import Path

import pytest

from d5suite.levels.imports import lean_imports

FRAMEWORK = """
try:
    import {0}
except ImportError:
    {0} = None
"""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A framework and a library that it imports if it can, neither imported yet."""
    framework, library = f"framework_{tmp_path.name}", f"library_{tmp_path.name}"
    (tmp_path / f"{framework}.py").write_text(FRAMEWORK.format(library))
    (tmp_path / f"{library}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    return framework, library


def test_a_library_is_hidden_within_and_not_after(names: tuple[str, str]) -> None:
    framework, library = names
    with lean_imports(library):
        assert getattr(importlib.import_module(framework), library) is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(library)
    assert library not in sys.modules
    assert importlib.import_module(library).__name__ == library


def test_what_is_imported_already_stays(names: tuple[str, str]) -> None:
    framework, library = names
    imported = importlib.import_module(library)
    with lean_imports(library):
        assert getattr(importlib.import_module(framework), library) is imported
    assert sys.modules[library] is imported


@pytest.mark.parametrize("collects", [True, False])
def test_an_import_that_fails_leaves_everything_as_it_was(names: tuple[str, str], collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with contextlib.suppress(ModuleNotFoundError), lean_imports(names[1]):
            assert not gc.isenabled()
            importlib.import_module("no_such_framework")
            pytest.fail("imported what does not exist")
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    assert names[1] not in sys.modules
