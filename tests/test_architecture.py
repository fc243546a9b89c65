"""The rules of the code's structure, held by looking at it and by importing it in fresh processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from d5suite.backends import backend, discover
from d5suite.levels.backend import MODULES

PACKAGE = Path(__file__).parents[1] / "d5suite"
BACKENDS = sorted(p.name for p in (PACKAGE / "backends").iterdir() if (p / "__init__.py").exists())
FRAMEWORKS = {"torch", "tensorflow", "keras", "mxnet", "jax", "deep500", "horovod", "torchvision"}
ENGINES = {"keras": {"tensorflow", "torch", "jax"}}
"""Frameworks that one adapter's framework runs on; it may import them."""

ADAPTER_FILES = {"__init__.py", *(f"{module}.py" for module in MODULES)}
FURTHER_FILES = {"deep500": {"bridge.py", "repairs.py"}, "keras": {"engine.py"}}
"""What one adapter has beyond the others: the way back into deep500 and repairs of it, and Keras's own backends."""

MAY_IMPORT = {
    "errors": set(),
    "files": {"errors"},
    "network": {"network", "errors"},
    "custom": {"custom", "network", "errors", "files"},
    "levels": {"levels", "network", "errors"},
    "data": {"data", "errors", "files"},
    "measure": {"measure", "errors"},
    "training": {"training", "levels", "measure", "validate", "errors", "files"},
    "validate": {"validate", "levels", "network", "errors", "files"},
    "launch": {"launch", "measure", "errors"},
    "report": {"report", "backends", "measure", "errors", "files"},
    "recipe": {"levels", "errors"},
    "problem": {"levels", "network", "custom", "errors"},
    "job": {"errors", "files"},
}
"""d5suite's parts and the parts each may import; ``docs/architecture.md`` says it in words."""


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield f"{node.module}"


def _files(part: str) -> list[Path]:
    single = PACKAGE / f"{part}.py"
    return [single] if single.exists() else sorted((PACKAGE / part).rglob("*.py"))


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_one_way(part: str) -> None:
    assert _files(part)
    for path in _files(part):
        for name in _imports(path):
            if name.startswith("d5suite."):
                assert name.split(".")[1] in MAY_IMPORT[part], f"{path} imports {name}"


def test_only_adapters_import_frameworks_and_only_their_own() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        own = parts[1] if parts[0] == "backends" and len(parts) > 2 else None
        for name in _imports(path):
            foreign = FRAMEWORKS - {own} - ENGINES.get(own or "", set())
            assert name.split(".")[0] not in foreign, f"{path} imports {name}"
            if name.startswith("d5suite.backends.") and name.split(".")[2] in BACKENDS:
                assert name.split(".")[2] == own, f"{path} imports {name}"


@pytest.mark.parametrize("name", BACKENDS)
def test_adapters_mirror_each_other(name: str) -> None:
    files = {p.name for p in (PACKAGE / "backends" / name).glob("*.py")}
    absent = {f"{module}.py" for module in backend(name).absent}
    assert files - FURTHER_FILES.get(name, set()) == ADAPTER_FILES - absent


def test_every_adapter_is_published() -> None:
    assert set(BACKENDS) <= set(discover()[0])


def _fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_d5suite_imports_no_framework() -> None:
    loaded = _fresh(
        "import sys, d5suite, d5suite.backends, d5suite.session, d5suite.pytest_plugin, d5suite.cli\n"
        "import d5suite.network, d5suite.recipe, d5suite.report.compare, d5suite.report.doctor\n"
        "import d5suite.problem, d5suite.custom, d5suite.report.operators\n"
        "d5suite.backends.discover()\n"
        "print(' '.join(sorted({m.split('.')[0] for m in sys.modules})))"
    )
    assert not set(loaded.split()) & FRAMEWORKS


def test_importing_d5suite_alone_is_light() -> None:
    # A stand-in for the speed target (0.3 s) that no noisy machine can fail: none of the slow libraries is loaded.
    loaded = _fresh("import sys, d5suite\nprint(' '.join(sys.modules))").split()
    assert not {"numpy", "onnx", "onnxruntime", "scipy", "h5py", "rich", "pytest", "psutil"} & set(loaded)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_data_until_it_is_loaded(name: str) -> None:
    loaded = _fresh(f"import sys\nfrom d5suite.backends.{name} import BACKEND\nprint(' '.join(sys.modules))")
    assert not {m.split(".")[0] for m in loaded.split()} & FRAMEWORKS
