"""What is published: the wheel, its metadata, the citation, the image."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml

import d5suite
from tests.conftest import made_once

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline from a copy: building leaves folders in the source."""

    def build() -> Path:
        source = tmp_path_factory.mktemp("source")
        for name in ("d5suite", "recipes"):
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        run("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", source / "dist", source)
        (found,) = (source / "dist").glob("*.whl")
        return found

    return Path(made_once(tmp_path_factory, "wheel", lambda: str(build())))


def run(*arguments: str | Path, cwd: Path | None = None) -> None:
    done = subprocess.run([sys.executable, "-m", *map(str, arguments)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_the_recipes_and_nothing_of_the_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    held = {name.removeprefix("d5suite/recipes/") for name in names if name.startswith("d5suite/recipes/")}
    assert held == {path.name for path in (ROOT / "recipes").glob("test_*.py")}
    assert {name.split("/")[0] for name in names} == {"d5suite", f"d5suite-{d5suite.__version__}.dist-info"}
    assert "d5suite/commands/bench.ini" in names


@pytest.mark.slow
def test_an_installed_wheel_measures_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    run("venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # Borrows what d5suite depends on, but not the editable d5suite: no .pth is read there.
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"])
    run("pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel)
    folder = tmp_path / "empty"
    folder.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PY")}

    def bench(*arguments: str) -> str:
        command = [str(tmp_path / "venv/bin/d5suite"), "bench", *arguments]
        done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert str(site / "d5suite/recipes") in bench("--list")
    bench("digits_lenet", "--backend", "deep500", "-k", "inference", "--threads", "1", "--benchmark-json", "out.json")
    (benchmark,) = json.loads((folder / "out.json").read_text())["benchmarks"]
    assert benchmark["extra_info"]["d5suite"]["backend"]["name"] == "deep500"


def test_one_version_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    codemeta = json.loads((ROOT / "codemeta.json").read_text())
    assert citation["version"] == codemeta["version"] == d5suite.__version__
    assert citation["date-released"] == codemeta["dateModified"]
    heading = f"## [{d5suite.__version__}] - {citation['date-released']}"
    text = (ROOT / "CHANGELOG.md").read_text()
    assert heading in text
    section = text.partition(heading)[2].partition("\n## ")[0]
    assert len(section.splitlines()) <= 60, "a release's changelog is a page"
    assert citation["license"] == codemeta["license"].rpartition("/")[2] == "BSD-3-Clause"


def test_the_citation_is_valid(tmp_path: Path) -> None:
    def check(path: Path) -> int:
        command = ["check_jsonschema", "--builtin-schema", "vendor.citation-file-format", str(path)]
        return subprocess.run([sys.executable, "-m", *command], capture_output=True).returncode

    assert check(ROOT / "CITATION.cff") == 0
    wrong = tmp_path / "CITATION.cff"
    wrong.write_text((ROOT / "CITATION.cff").read_text().replace("authors:", "writers:", 1))
    assert check(wrong) == 1


def test_the_image_copies_and_installs_what_exists() -> None:
    text = (ROOT / "Containerfile").read_text()
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    assert all((ROOT / name).exists() for names in copied for name in names)
    built = {"pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "d5suite", "recipes"}
    assert built < {name for names in copied for name in names}
    project = (ROOT / "pyproject.toml").read_text()
    for name in re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE):
        assert f"\n{name} = [" in project
    assert "mxnet==" in (ROOT / "constraints.txt").read_text()
