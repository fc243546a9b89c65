"""The worked examples: the page shows their code as it is, and they are found, conform and are
measured."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from d5suite.levels.contract import CLAUSES
from tests.conftest import plugin_environment

ROOT = Path(__file__).parents[1]
SKELETON = ROOT / "examples" / "d5suite-skeleton"
TRAINABLE = ROOT / "examples" / "d5suite-tinygrad"
PAGE = (ROOT / "docs" / "write-a-backend.md").read_text()
FILES = {
    path.relative_to(SKELETON).as_posix(): path for path in (SKELETON / "pyproject.toml", *SKELETON.glob("*/*.py"))
}


@pytest.mark.parametrize("name", FILES)
def test_the_page_shows_the_file_as_it_is(name: str) -> None:
    shown = re.search(rf"^`{re.escape(name)}`\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert shown[1] == FILES[name].read_text()


def test_the_page_quotes_the_trainable_example_as_it_is() -> None:
    quoted = re.findall(
        r"^`(d5suite_tinygrad/\w+\.py)`, in part\n\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
    )
    assert {name for name, _ in quoted} == {
        f"d5suite_tinygrad/{name}.py" for name in ("operators", "network", "training")
    }
    for name, text in quoted:  # of a method, perhaps without its indentation
        flat, whole = (re.sub(r"^ +", "", each, flags=re.MULTILINE) for each in (text, (TRAINABLE / name).read_text()))
        assert flat in whole


def test_the_page_names_every_clause() -> None:
    for clause, text in CLAUSES.items():
        assert f"| `{clause}` | {text} |" in PAGE


def _installed(example: Path, folder: Path) -> dict[str, str]:
    """Install an example by pip, beside this environment, and return one that finds it."""
    source, target = folder / example.name, folder / "site"
    shutil.copytree(example, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--target", str(target), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    given = plugin_environment()
    return {**given, "PYTHONPATH": os.pathsep.join([str(target), given["PYTHONPATH"]])}


@pytest.fixture(scope="module")
def trainable(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if importlib.util.find_spec("tinygrad") is None:
        pytest.skip("tinygrad is not installed; it needs Python 3.11")
    if shutil.which(os.environ.get("CC", "clang")) is None:
        pytest.skip("tinygrad compiles with clang, which is not installed")
    return _installed(TRAINABLE, tmp_path_factory.mktemp("tinygrad"))


def _run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=1800
    )


RECIPE = """
from d5suite import SGD, Recipe
from d5suite.cases.recipe import Preset
RECIPE = Recipe(name="digits", network="lenet5", dataset="digits", optimizer=SGD(learning_rate=0.0625),
    measurements=("inference", "gradient"),
    presets={"smoke": Preset(image_size=32, batch_size=8, classes=10, max_time_s=0.05)})
"""

PROBLEM = """
from d5suite.cases.problem import Problem, Problems
SUMS = [Problem("sum", "Add", {"A": (64, 64), "B": (64,)})]
PROBLEMS = Problems("sums", smoke=SUMS, standard=SUMS, full=SUMS)
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Copy the skeleton by the page's own commands, and install the copy."""
    clone = tmp_path_factory.mktemp("page") / "clone"
    clone.mkdir()
    (clone / "examples").symlink_to(ROOT / "examples")
    commands = re.findall(r"^    ((?:cp|cd|mv|grep) .*)$", PAGE, re.MULTILINE)
    assert [each.split()[0] for each in commands] == ["cp", "cd", "mv", "grep"]
    subprocess.run(["bash", "-ec", "\n".join(commands)], cwd=clone, check=True)
    copy = clone.parent / "d5suite-mine"
    return copy, _installed(copy, clone.parent / "installed")


def test_a_copy_of_the_skeleton_passes_the_short_form_of_the_kit(mine: tuple[Path, dict[str, str]]) -> None:
    assert "    d5suite conformance mine --quick\n" in PAGE
    done = _run(mine[1], "d5suite.cli", "conformance", "mine", "--quick")
    assert done.returncode == 0, done.stdout[-3000:]
    assert _rows(PAGE) == _rows(done.stdout)
    for row in ("level 0: operators", "ONNX node tests", "level 1: operators", "level 1: networks"):
        assert re.search(rf"^{row} +[1-9]", done.stdout, re.MULTILINE), done.stdout
    assert len(re.findall("has no operator", done.stdout)) < len(_rows(done.stdout))  # one line for each row


@pytest.mark.slow
def test_a_copy_of_the_skeleton_is_measured_and_skips_networks_with_other_operators(
    mine: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "test_lenet.py").write_text(RECIPE)
    (tmp_path / "test_sum.py").write_text(PROBLEM)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--backend", "mine", "-rs"], cwd=tmp_path,
        env=mine[1], capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "mine has no operator AveragePool, Conv, Tanh of lenet5" in done.stdout
    assert "mine has no gradient: NumPy does not differentiate" in done.stdout
    assert re.search(r"\b1 passed, \d+ skipped", done.stdout), done.stdout[-3000:]


@pytest.mark.slow
def test_the_backend_of_whole_graphs_conforms_for_what_it_declares() -> None:
    done = _run(plugin_environment(), "d5suite.cli", "conformance", "onnxruntime")
    assert done.returncode == 0, done.stdout[-3000:]
    total = next(line.split() for line in done.stdout.splitlines() if line.startswith("total"))
    passed, failed, expected, skipped = map(int, total[1:])
    assert passed > 200 and failed == 0 and expected > 1 and skipped > 50
    assert "onnxruntime's LRN supports odd sizes only" in done.stdout
    assert "no gradient: onnxruntime does inference only" in done.stdout


def _rows(text: str) -> dict[str, list[bool]]:
    """The table at the end of a run of the kit: in which columns a row has cases. Their numbers
    grow with the kit."""
    rows = re.findall(r"^ *([a-zA-Z][^\n]*?)((?: +\d+){4})$", text, re.MULTILINE)
    return {name: [bool(int(number)) for number in numbers.split()] for name, numbers in rows}


def test_the_backend_of_whole_graphs_is_measured_on_request_and_skips_the_rest(
    recipe_folder: Path, imagenet_tree: Path
) -> None:
    done = _run(plugin_environment(), "pytest", "-p", "no:cacheprovider", str(recipe_folder), "-rs",
                "--backend", "onnxruntime", "--imagenet", str(imagenet_tree))  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 passed, 2 skipped" in done.stdout
    assert "onnxruntime has no gradient: onnxruntime does inference only" in done.stdout


@pytest.mark.slow
def test_the_trainable_example_passes_the_short_form_of_the_kit(trainable: dict[str, str]) -> None:
    """Leave out what takes long to compile: large networks, second precisions, what level 1 proves,
    the seed, for which three processes compile a network, and the memory of two hundred calls.

    tinygrad optimizes no kernels, except where work takes a while: answers count, not times.
    """
    large = "every_operator or today or light or sharing or larger_batch or LRN or two_hundred or a_seed or later_calls"
    level1 = "test_backward or every_backward_pass or test_forward and fp64"
    again = "gradients-fp64 or steps-fp64 or forward-fp64 or waits_for and gradients or updates"
    proved = 0
    for unoptimized, chosen in (("0", "test_process and not printed"), ("1", "(not test_process or printed)")):
        done = _run({**trainable, "NOOPT": unoptimized}, "d5suite.cli", "conformance", "tinygrad", "--quick",
                    "-k", f"{chosen} and not ({large} or {level1} or {again})")  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:]
        passed, failed, *_ = re.findall(r"^total((?: +\d+){4})$", done.stdout, re.MULTILINE)[0].split()
        assert int(failed) == 0
        proved += int(passed)
    assert proved > 150


@pytest.mark.slow
def test_the_trainable_example_is_measured(trainable: dict[str, str], recipe_folder: Path, imagenet_tree: Path) -> None:
    done = _run({**trainable, "NOOPT": "1"}, "pytest", "-p", "no:cacheprovider", str(recipe_folder), "-rs",
                "--backend", "tinygrad", "--imagenet", str(imagenet_tree))  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "4 passed" in done.stdout
