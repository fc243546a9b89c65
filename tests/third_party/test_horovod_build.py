"""``make horovod`` says what is missing, builds a wheel once, and again if anything changes.

The build itself takes minutes; continuous integration makes it before the tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "third_party" / "horovod"


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a cache and patches of its own, and a framework that is installed."""
    spec = importlib.util.spec_from_file_location("horovod_build", FOLDER / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("D5SUITE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(FOLDER, tmp_path / "horovod")
    monkeypatch.setattr(module, "HERE", tmp_path / "horovod")
    monkeypatch.setattr(module, "FRAMEWORKS", {"torch": ("PYTORCH", ("numpy",), ""), "mxnet": ("MXNET", ("none",), "")})
    monkeypatch.setattr(module, "compiler", lambda: f"{sys.executable} -q")  # it says its version, too
    return module


def test_a_missing_compiler_is_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "build.py"), "torch"],
        env={**os.environ, "CXX": "no-such-compiler"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    if "lacks" not in done.stderr:  # the framework is looked for first
        assert "building Horovod needs a C++ compiler, and 'no-such-compiler' was not found: install it" in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_missing_framework_is_one_sentence(build: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["mxnet"]) == 2
    said = capsys.readouterr().err
    assert "for mxnet, which this environment lacks" in said and "make horovod FRAMEWORKS=torch" in said


def test_a_wheel_is_built_once(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def make(place: Path, framework: str, log: Path) -> Path:
        made.append(place)
        (place / "horovod-0.whl").write_text("a wheel")
        return place / "horovod-0.whl"

    monkeypatch.setattr(build, "build", make)
    monkeypatch.setattr(build, "probe", lambda *_: None)
    monkeypatch.setattr(build, "pip", lambda *_: None)
    first, again = build.wheel("torch"), build.wheel("torch")
    assert first == again and first.read_text() == "a wheel" and len(made) == 1
    assert not made[0].exists()  # nothing but the wheel and its lock is left
    assert {path.suffix for path in first.parents[1].iterdir()} == {"", ".lock"}


def test_a_wheel_that_fails_its_trial_is_not_kept(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(place: Path, framework: str, log: Path) -> Path:
        (place / "horovod-0.whl").write_text("a wheel")
        return place / "horovod-0.whl"

    def fail(*_: object) -> None:
        raise subprocess.CalledProcessError(1, ["python"])

    monkeypatch.setattr(build, "build", make)
    monkeypatch.setattr(build, "probe", fail)
    monkeypatch.setattr(build, "pip", lambda *_: None)
    with pytest.raises(subprocess.CalledProcessError):
        build.wheel("torch")
    assert not list((build.cache_folder() / "horovod").rglob("*.whl"))


def test_whatever_a_wheel_depends_on_names_another(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [build.digest("torch")]
    assert build.digest("torch") == names[0]
    for patch in ("cxx17.patch", "requirements.txt"):
        with (build.HERE / patch).open("a") as file:
            file.write("# changed\n")
        names.append(build.digest("torch"))
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    names.append(build.digest("torch"))
    monkeypatch.setattr(build, "version", lambda framework: f"{framework} 99")
    names.append(build.digest("torch"))
    assert len(set(names)) == len(names)


def test_wheels_of_several_frameworks_are_joined(build: ModuleType, tmp_path: Path) -> None:
    made = []
    for name in ("torch", "tensorflow"):
        root = tmp_path / name / "horovod-0.28.1"
        (root / "horovod" / name).mkdir(parents=True)
        (root / "horovod" / "__init__.py").write_text("")
        (root / "horovod" / name / "mpi_lib.so").write_text(name)
        (root / build.METADATA).write_text(json.dumps({name: "1.0", "dummy": "none"}))
        information = root / "horovod-0.28.1.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
        (information / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
        (information / "RECORD").write_text("")
        pack = [sys.executable, "-m", "wheel", "pack", "--dest-dir", str(tmp_path / name), str(root)]
        subprocess.run(pack, check=True, capture_output=True)
        made.append(next((tmp_path / name).glob("*.whl")))
    place = tmp_path / "place"
    place.mkdir()
    with zipfile.ZipFile(build.join(place, made)) as joined:
        for name in ("torch", "tensorflow"):
            assert joined.read(f"horovod/{name}/mpi_lib.so") == name.encode()
        assert set(json.loads(joined.read(str(build.METADATA)))) == {"torch", "tensorflow", "dummy"}
        assert "horovod/tensorflow/mpi_lib.so" in joined.read("horovod-0.28.1.dist-info/RECORD").decode()


def test_every_patch_says_why(build: ModuleType) -> None:
    patches = list(FOLDER.glob("*.patch"))
    assert patches
    for patch in patches:
        reason, _, rest = patch.read_text(encoding="utf-8").partition("\n\n--- ")
        assert len(reason.split()) > 8 and rest.startswith("a/")
