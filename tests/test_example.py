"""The worked example: the page shows its files as they are, and installed it is found, conforms and is measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from d5suite.levels.contract import CLAUSES
from tests.conftest import plugin_environment

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "d5suite-onnxruntime"
PAGE = (ROOT / "docs" / "write-a-backend.md").read_text()
FILES = [
    "pyproject.toml",
    *(f"d5suite_onnxruntime/{name}.py" for name in ("__init__", "runtime", "network")),
]


@pytest.mark.parametrize("name", FILES)
def test_the_page_shows_the_file_as_it_is(name: str) -> None:
    shown = re.search(rf"^`{re.escape(name)}`\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert shown[1] == (EXAMPLE / name).read_text()


def test_the_page_shows_every_file_of_the_example() -> None:
    there = {str(path.relative_to(EXAMPLE)) for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")}
    assert {name for name in there if "build" not in name} == set(FILES)


def test_the_page_names_every_clause() -> None:
    for clause, text in CLAUSES.items():
        assert f"| `{clause}` | {text} |" in PAGE


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The example installed by pip, into a folder of its own beside this environment."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "d5suite-onnxruntime"
    (source / "d5suite_onnxruntime").mkdir(parents=True)
    for name in FILES:
        (source / name).write_text((EXAMPLE / name).read_text())
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--target", str(target), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    given = plugin_environment()
    return {**given, "PYTHONPATH": os.pathsep.join([str(target), given["PYTHONPATH"]])}


def _run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=600
    )


def test_the_example_conforms_for_what_it_declares(environment: dict[str, str]) -> None:
    done = _run(environment, "d5suite.cli", "conformance", "onnxruntime")
    assert done.returncode == 0, done.stdout[-3000:]
    total = next(line.split() for line in done.stdout.splitlines() if line.startswith("total"))
    passed, failed, expected, skipped = map(int, total[1:])
    assert passed > 200 and failed == 0 and expected == 1 and skipped > 50
    assert "expected to fail (1): onnxruntime's LRN takes odd sizes only" in done.stdout
    assert "no gradient: onnxruntime runs networks forwards" in done.stdout
    assert _rows(PAGE) == _rows(done.stdout)


def _rows(text: str) -> list[list[str]]:
    """The table at the end of a run of the kit, without the number of skipped cases, which grows with the kit."""
    return [line.split()[:-1] for line in text.splitlines() if re.fullmatch(r" *[a-zA-Z].*(\s+\d+){4}", line)]


def test_the_example_is_measured_and_skips_the_rest(
    environment: dict[str, str], recipe_folder: Path, imagenet_tree: Path
) -> None:
    done = _run(environment, "pytest", "-p", "no:cacheprovider", str(recipe_folder), "-rs", "--backend", "onnxruntime",
                "--imagenet", str(imagenet_tree))  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 passed, 2 skipped" in done.stdout
    assert "onnxruntime has no gradient: onnxruntime runs networks forwards" in done.stdout
