"""Tools that a session runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from d5suite.session.tools import commit_of, top_of


def _repository(folder: Path) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), (*author, "commit", "-q", "--allow-empty", "-m", folder.name)):
        subprocess.run(["git", "-C", folder, *words], check=True)
    return (
        subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], check=True, capture_output=True)
        .stdout.decode()
        .strip()
    )


def test_a_hooks_variables_do_not_lead_to_its_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Git sets them in hooks, and a hook that changes the folder keeps them."""
    commits = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        commits[name] = _repository(tmp_path / name)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "two" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "two"))
    assert top_of("here", tmp_path / "one").samefile(tmp_path / "one")
    assert commit_of("HEAD", "here", tmp_path / "one") == commits["one"] != commits["two"]
