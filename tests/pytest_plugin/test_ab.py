"""``d5suite ab`` as a user runs it: planted slowdowns, wrong answers and crashes on one side, and
sides that cannot be prepared."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as XML

import pytest

import d5suite
from d5suite.cli import main
from d5suite.commands.bisect import run as run_bisect
from d5suite.errors import ConfigurationError
from d5suite.pytest_plugin.ab import Compared
from d5suite.report.runs import BenchmarkRun
from d5suite.report.verdicts import Exit, RunComparison, Verdict
from d5suite.session.pairs import Pair, PairedRun
from d5suite.session.results import MeasurementResult, Wanted
from d5suite.session.sides import Side, prepared_side
from d5suite.statistics.decisions import Decision
from d5suite.statistics.ratios import Ratio
from tests.conftest import PLUGINS, plugin_environment, write_recipe

QUICK = ("--max-pairs", "12", "--decide-disturbed")
"""A few more pairs than a clear answer takes; other tests run beside these."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_onnx: Path) -> Path:
    """Two recipes, ``small`` with batches of 4 and ``two`` with batches of 2."""
    folder = tmp_path_factory.mktemp("ab")
    recipe = write_recipe(folder, small_onnx) / "test_small.py"
    text = recipe.read_text().replace("name='small'", "name='two'").replace("batch_size=4", "batch_size=2")
    recipe.with_name("test_two.py").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def fresh(folder: Path) -> Iterator[None]:
    """Commands that run in this process collect the recipes anew."""
    paths = list(sys.path)
    yield
    sys.path[:] = paths
    forget(folder)


def forget(folder: Path) -> None:
    """Let modules of a folder be imported anew."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(folder)):
            del sys.modules[name]


def ab(
    folder: Path, images: Path, a: str, b: str, *options: str, recipes: str = "recipes", further: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the command; the JSON is its output."""
    return subprocess.run(
        [sys.executable, "-m", "d5suite.cli", "ab", "--a", a, "--b", b, recipes, "--backend", "faulty", "--json", "-",
         *QUICK, *options, "--", "--imagenet", str(images), "--threads", "1", *further],
        cwd=folder, env=plugin_environment(), capture_output=True, text=True, timeout=900,
    )  # fmt: skip


@pytest.mark.slow  # nine launches
def test_a_slowdown_of_one_side_is_named(folder: Path, imagenet_tree: Path) -> None:
    files = [f"--{name}={folder / name}" for name in ("markdown", "junit")]
    done = ab(folder, imagenet_tree, "here", "env:FAULTY_FAULT=slow:2", *files, recipes="recipes/test_two.py")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    (slower,) = found["benchmarks"]
    assert (slower["name"], slower["verdict"], slower["regressions"]) == ("two/inference faulty", "slower", ["time"])
    low, high = slower["interval"]
    assert 1 < low < slower["ratio"] and (high is None or slower["ratio"] < high)
    assert 1.5 < slower["ratio"] < 2.5
    assert 12 < slower["pairs"] <= 9 * 12  # of nine launches
    assert (found["base"]["path"], found["new"]["path"]) == ("here", "env:FAULTY_FAULT=slow:2")
    assert found["exit"] == 1 and found["summary"].startswith("1 slower")
    assert "| two/inference faulty |" in (folder / "markdown").read_text().replace("\\", "")
    suite = XML.fromstring((folder / "junit").read_bytes())  # noqa: S314  our own
    assert [each.get("classname") for each in suite.iter("testcase") if each.find("failure") is not None] == [
        "two/inference"
    ]


@pytest.mark.slow
@pytest.mark.alone
def test_a_slowdown_of_5_percent_is_found_at_the_default_budget(folder: Path, imagenet_tree: Path) -> None:
    """Of samples so short that few are interrupted.

    Where launches differ by as much, as on a busy machine, it may be undecided instead. Then the
    pairs themselves must show that a slowdown of this size could not be found.
    """
    recipe = folder / "eight" / "test_eight.py"
    recipe.parent.mkdir(exist_ok=True)
    text = (folder / "recipes" / "test_small.py").read_text().replace("name='small'", "name='eight'")
    recipe.write_text(text.replace("batch_size=4", "batch_size=8"))
    done = ab(folder, imagenet_tree, "here", "env:FAULTY_FAULT=slow=1.05:8", "--max-pairs", "60",
              recipes="eight/test_eight.py")  # fmt: skip
    (found,) = json.loads(done.stdout)["benchmarks"]
    assert found["name"] == "eight/inference faulty" and found["ratio"] < 1.25, done.stdout + done.stderr
    if found["verdict"] != "uncertain":
        assert (found["verdict"], done.returncode) == ("slower", 1), done.stdout + done.stderr
        assert found["ratio"] > 1.02
    else:
        finds = math.inf if found["finds"] is None else found["finds"]
        assert done.returncode == 6 and finds >= max(1.03, found["ratio"]), done.stdout + done.stderr
        assert found["interval"][1] is None or found["interval"][1] >= 1.05, done.stdout  # it is not excluded


@pytest.mark.slow
def test_equal_sides_are_never_called_slower(folder: Path, imagenet_tree: Path) -> None:
    done = ab(folder, imagenet_tree, "here", "mode:good", "--max-pairs", "16")
    assert done.returncode in (0, 6), done.stdout
    assert {each["verdict"] for each in json.loads(done.stdout)["benchmarks"]} <= {"same", "uncertain"}


def test_a_wrong_answer_and_a_crash_cost_their_own_benchmark_each(folder: Path, imagenet_tree: Path) -> None:
    done = ab(folder, imagenet_tree, "env:FAULTY_FAULT=wrong:2", "env:FAULTY_FAULT=segfault:4")
    assert done.returncode == 3, done.stderr
    lost, wrong = json.loads(done.stdout)["benchmarks"]
    assert wrong["verdict"] == "invalid" and wrong["ratio"] is None and wrong["pairs"] is None
    assert len(wrong["reasons"]) == 1 and wrong["reasons"][0].startswith("side A: output (good fp32) vs onnxruntime:")
    assert lost["verdict"] == "missing" and len(lost["reasons"]) == 1
    assert lost["reasons"][0].startswith("side B: the worker died of SIGSEGV")
    results = sorted(folder.glob(".d5suite/jobs/side-a/*/small-faulty.result.json"))
    content = json.loads(results[-1].read_text())  # side A ended in good order
    assert content["status"] == "done"
    assert content["failures"]["small/inference"]["message"] == "side B has failed in this measurement"


@pytest.mark.parametrize("recipes", ["recipes", "recipes/test_two.py"])
def test_an_interrupt_shows_what_was_finished(
    recipes: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes, as SIGTERM, while ``two`` is measured."""

    def run(self: PairedRun, batch: Sequence[Wanted], tests: object, alpha: float) -> list[Pair]:
        if batch[0].case.name == "two":
            os.kill(os.getpid(), signal.SIGTERM)
        return [Pair(batch[0], MeasurementResult(failure="the disk is full"), MeasurementResult())]

    monkeypatch.setattr(PairedRun, "run", run)
    monkeypatch.chdir(folder)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["ab", "--a", "here", "--b", "here", recipes, "--backend", "onnxruntime", "--json", "-"]) == 130
    assert signal.getsignal(signal.SIGTERM) is before
    said = capsys.readouterr().out
    if recipes != "recipes":
        assert not said  # nothing was finished
        return
    (found,) = json.loads(said)["benchmarks"]
    assert found["name"] == "small/inference onnxruntime" and found["reasons"] == ["side A: the disk is full"]


UNMAKEABLE = [
    ("foo:bar", "neither an executable file nor a known form\n  Give here, an interpreter"),
    ("/nowhere/python", "neither an executable file nor a known form"),
    ("env:=1", "this sets no variable\n  Write env:NAME=VALUE."),
    ("env:NAME", "this sets no variable"),
    ("mode:", "it names no mode"),
    ("rev:", "it names no revision"),
    ("rev:--all", "it names no revision"),
    ("rev:no-such-revision", "git rev-parse"),
    ("install:--index-url=x", "it names no requirement"),
    ("install:pip; python_version < '3'", "pip installs nothing for this requirement"),
    ("/bin/false", "no worker of d5suite runs there\n  It exited with status 1."),
    ("/bin/true", "not a Python interpreter"),
    (os.curdir, "not a virtual environment"),
]


@pytest.mark.parametrize(("spec", "message"), UNMAKEABLE)
def test_a_side_that_cannot_be_made_is_one_clear_error(
    spec: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for a, b, option in ((spec, "here", "--a"), ("here", spec, "--b")):
        assert main(["ab", "--a", a, "--b", b, "recipes"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {option} {spec}: ") and message in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes", "--max-pairs", "0"], "must be positive"),
        (["recipes", "--effect", "0"], "--effect 0: give a number above 0"),
        (["recipes", "--", "--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["recipes", "--", "--ranks", "1"], "without ranks"),
        (["nowhere"], "file or directory not found: nowhere"),
        (["empty"], "there is nothing to measure"),
        (["recipes", "--backend", "nobody"], "there is no backend 'nobody'"),
        (["recipes/test_small.py::test_input_pipeline", "--backend", "torch"], "taken in turn with another worker's"),
    ],
)
def test_what_makes_no_sense_is_one_clear_error(
    arguments: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (folder / "empty").mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    assert main(["ab", "--a", "here", "--b", "here", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and message in said.err and not said.out


def commit(repository: Path, **changes: tuple[str, str]) -> None:
    """Make a commit for each change of a line in d5suite's ``sampling.py``, under its name."""
    git = ["git", "-C", str(repository), "-c", "init.defaultBranch=main"]
    git += ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    sampling = repository / "d5suite" / "instruments" / "sampling.py"
    for name, (old, new) in changes.items():
        text = sampling.read_text()
        assert old in text
        sampling.write_text(text.replace(old, new))
        subprocess.run([*git, "add", "d5suite"], check=True)
        subprocess.run([*git, "commit", "--quiet", f"--message={name}"], check=True)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Path]:
    """d5suite in two revisions; in the second one, every sample is told three times as long."""
    repository = tmp_path / "repository"
    ignored = shutil.ignore_patterns("__pycache__", "third_party")
    shutil.copytree(Path(d5suite.__file__).parent, repository / "d5suite", ignore=ignored)
    told = "return clock() - start\n"
    commit(repository, first=(told, f"{told}\n"), slower=(told, "return 3 * (clock() - start)\n"))
    yield repository
    forget(repository)


def test_a_revision_is_as_it_was_and_the_repository_stays_as_it_is(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    with prepared_side("rev:HEAD~1", "--a") as before, prepared_side("rev:main", "--b") as after:
        texts = []
        for side in (before, after):
            assert side.folder is not None and side.environment["PYTHONPATH"].startswith(str(side.folder))
            texts.append((side.folder / "d5suite" / "instruments" / "sampling.py").read_text())
        assert ["3 * (clock() - start)" in text for text in texts] == [False, True]
        folders = [side.folder for side in (before, after)]
    assert not any(folder.exists() for folder in folders if folder)
    for command in (["status", "--porcelain"], ["worktree", "list", "--porcelain"]):
        said = subprocess.run(["git", *command], capture_output=True, text=True, check=True).stdout
        assert said.count("worktree ") == (command[0] == "worktree") and "sampling" not in said


def run_nothing(self: PairedRun, batch: Sequence[Wanted], *rest: object) -> list[Pair]:
    """Stands for `PairedRun.run`: nothing can be measured."""
    return [Pair(each, MeasurementResult(failure="no time"), MeasurementResult()) for each in batch]


def reasons(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Why benchmarks are missing, as the JSON has it."""
    found = json.loads(capsys.readouterr().out)
    assert {each["verdict"] for each in found["benchmarks"]} == {"missing"} and found["exit"] == 4
    return {each["name"]: each["reasons"] for each in found["benchmarks"]}


ONNXRUNTIME = ("recipes", "--backend", "onnxruntime", "--json", "-")


MEASURED, GONE = ["side A: no time"], ["side B: it has no such benchmark, side A has"]
REMOVED = [
    ("rev:HEAD~1", "here", {"small": MEASURED, "two": GONE, "three": MEASURED}),
    ("here", "rev:HEAD~1", {"small": MEASURED, "three": GONE}),
    pytest.param("rev:HEAD~1", "rev:HEAD~1", {
        "small": MEASURED, "two": ["side B: the current folder has no such benchmark, side A has"], "three": MEASURED,
    }, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "expected"), REMOVED)
def test_a_benchmark_that_side_b_has_removed_is_missing(
    a: str, b: str, expected: dict[str, list[str]], repository: Path, folder: Path, imagenet_tree: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shutil.copytree(folder / "recipes", repository / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    (repository / "pytest.ini").write_text("[pytest]\n")
    (repository / ".gitignore").write_text("__pycache__\n")
    commit_all(repository, "both recipes")
    (repository / "recipes" / "test_two.py").rename(repository / "recipes" / "test_three.py")
    three = repository / "recipes" / "test_three.py"
    three.write_text(three.read_text().replace("name='two'", "name='three'"))
    commit_all(repository, "two is three")
    monkeypatch.chdir(repository)
    monkeypatch.setattr(PairedRun, "run", run_nothing)
    assert main(["ab", "--a", a, "--b", b, *ONNXRUNTIME, "--", "--imagenet", str(imagenet_tree)]) == 4
    assert reasons(capsys) == {f"{name}/inference onnxruntime": why for name, why in expected.items()}


def test_what_is_skipped_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a backend that is named, of which all is skipped, is missing."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(PairedRun, "run", run_nothing)
    both = ["ab", "--a", "here", "--b", "here", "recipes/test_two.py", "--json", "-"]
    assert main([*both, "--backend", "onnxruntime"]) == 4
    said = json.loads(capsys.readouterr().out)
    (gradient,) = [each for each in said["notes"] if "two/gradient" in each]
    assert gradient.startswith("skipped on onnxruntime: two/gradient") and "onnxruntime has no gradient: " in gradient
    for named in ("onnxruntime", "onnxruntime,torch"):
        forget(folder)
        assert main([*both, "--backend", named, "--", "-k", "gradient"]) == 4
        found = reasons(capsys)
        lost = found["two/gradient onnxruntime"]
        assert [why[:30] for why in lost] == ["side A: it is skipped: onnxrun", "side B: it is skipped: onnxrun"]
        assert found.get("two/gradient torch") == (["side A: no time"] if "torch" in named else None)


BISECT = """
import sys
from d5suite.cli import main
from d5suite.pytest_plugin import ab
sys.path.append(sys.argv[1])  # and not of the workers
ab.ALPHA = 0.2
sys.exit(main(["bisect", *sys.argv[2:]]))
"""
"""The command, but four launches confirm what is planted, not nine."""


def bisect(
    folder: Path, images: Path, environment: Mapping[str, str], *options: str
) -> subprocess.CompletedProcess[str]:
    """Run the command on the last two revisions."""
    return subprocess.run(
        [sys.executable, "-c", BISECT, str(PLUGINS), "--good", "main~2", "--bad", "main", "recipes/test_two.py",
         "--backend", "faulty", "--max-pairs", "20", "--decide-disturbed", *options, "--", "--imagenet", str(images),
         "--threads", "1"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip


@pytest.mark.slow
def test_the_revision_that_made_it_slower_is_found(repository: Path, folder: Path, imagenet_tree: Path) -> None:
    commit(repository, later=("WAKE_S = 0.02", "WAKE_S = 0.01"))
    shutil.copytree(folder / "recipes", repository / "recipes")
    done = bisect(repository, imagenet_tree, plugin_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert said[-2].startswith("two/inference faulty takes ") and said[-1].endswith(" slower")


def write_wheel(
    folder: Path, name: str = "extra-side", version: str = "1.0", value: int = 17, needs: str = "",
    module: str = "", further: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write a wheel of one module, in which ``VALUE`` is as given, and of further files."""
    project = name.replace("-", "_")
    wheel, info = folder / f"{project}-{version}-py3-none-any.whl", f"{project}-{version}.dist-info"
    required = f"Requires-Dist: {needs}\n" if needs else ""
    files = {
        f"{module or project}.py": f"VALUE = {value}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **(further or {}),
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))
    return wheel


def said_there(side: Side, code: str) -> list[str]:
    """What a side's interpreter prints."""
    assert side.python is not None
    return subprocess.run(
        [side.python, "-c", code], env={**os.environ, **side.environment}, cwd=side.folder,
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which is all that pip finds; and a cache of its own."""
    monkeypatch.setenv("D5SUITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


EXTRA_VALUE = "import extra_side, numpy, d5suite; print(extra_side.VALUE, d5suite.__file__)"


@pytest.mark.slow
def test_what_pip_installs_lies_over_this_environment(offline: Path) -> None:
    """The same path with other content is another environment; the same content is taken again."""
    wheel = write_wheel(offline)
    pythons = []
    for value, requirement in [
        (17, f"extra-side @ {wheel.as_uri()}"), (18, f"extra-side @ {wheel.as_uri()}"),
        (18, f"extra-side @ {wheel.as_uri()}"), (18, f"./{wheel.name}"), (19, f"./{wheel.name}"),
    ]:  # fmt: skip
        if f"VALUE = {value}" not in wheel.read_bytes().decode(errors="replace"):
            write_wheel(offline, value=value)
        with prepared_side(f"install:{requirement}", "--a") as side:
            pythons.append(side.python)
            assert said_there(side, EXTRA_VALUE) == [str(value), d5suite.__file__]
    assert pythons[1] == pythons[2] and len(set(pythons)) == 4


BUILDER = """
import shutil
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return shutil.copy({name!r}, wheel_directory).rpartition("/")[2]
"""


def write_project(folder: Path, **options: Any) -> Path:
    """Write a project of which pip builds the same wheel without an index."""
    folder.mkdir(exist_ok=True)
    wheel = write_wheel(folder, **options)
    project = '[build-system]\nrequires = []\nbuild-backend = "builder"\nbackend-path = ["."]\n'
    (folder / "pyproject.toml").write_text(project)
    (folder / "builder.py").write_text(BUILDER.format(name=wheel.name))
    return folder


def git(repository: Path, *arguments: str) -> str:
    """Run git as somebody."""
    command = ["git", "-C", str(repository), "-c", "init.defaultBranch=main"]
    command += ["-c", "user.name=t", "-c", "user.email=t@localhost", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit_all(repository: Path, message: str) -> str:
    """Make a commit of everything, and return its name."""
    git(repository, "init", "--quiet")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", f"--message={message}")
    return git(repository, "rev-parse", "HEAD")


@pytest.mark.slow
def test_a_branch_is_installed_as_it_is_now_and_a_folder_always(offline: Path) -> None:
    folder = offline / "project"
    found: dict[str, list[str | None]] = {}
    commits = []
    for value in (17, 18):
        commits.append(commit_all(write_project(folder, value=value), str(value)))
        for name in ("", "@main", "@HEAD~0", f"@{commits[0]}", "folder"):
            if (name, value) == ("@HEAD~0", 18):
                continue
            spec = f"install:{folder}" if name == "folder" else f"install:git+{folder.as_uri()}{name}"
            with prepared_side(spec, "--b") as side:
                found.setdefault(name, []).append(side.python)
                expected = 17 if name == f"@{commits[0]}" else value
                assert said_there(side, EXTRA_VALUE)[0] == str(expected)
    assert found[""] == found["@main"]  # known by the commit
    assert found[""][0] != found[""][1]
    assert found[f"@{commits[0]}"] == [found[""][0]] * 2
    for temporary in [*found["folder"], *found["@HEAD~0"]]:
        assert temporary is not None and not Path(temporary).exists()


def bisected(repository: Path) -> argparse.Namespace:
    """What ``d5suite bisect --repository`` is told."""
    return argparse.Namespace(
        repository=repository, good="main~3", bad="main", recipes=["recipes"], backend=None, preset=None,
        thresholds=None, effect=None, max_pairs=20, max_time=300.0, decide_disturbed=True, force=False, further=[],
    )  # fmt: skip


@pytest.mark.slow
def test_revisions_of_a_backend_are_installed_one_after_another(
    offline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third of four is slower, and its neighbour before cannot be installed."""
    top, folder = offline / "a repository", offline / "a repository" / "backend"
    top.mkdir()
    for message, value in [("first", 1), ("broken", 1), ("slower", 2), ("later", 2)]:
        write_project(folder, value=value)
        if message == "broken":
            (folder / "builder.py").write_text("raise SystemExit('this cannot be built')\n")
        (folder / "message").write_text(message)
        commit_all(top, message)

    def measure(options: object, specs: tuple[str, str], asked: object, only: str | None) -> Compared:
        with prepared_side(specs[0], "--a") as one, prepared_side(specs[1], "--b") as other:
            before, after = (int(said_there(side, EXTRA_VALUE)[0]) for side in (one, other))
        outcome = "slower" if after > before else "same"
        decision = Decision(outcome, Ratio(after / before, 1, 3, 0.95, "pairs", 10))
        verdict = Verdict("a/b c", outcome, decision=decision)
        runs = [BenchmarkRun(Path(each), "side", [], {}) for each in specs]
        return Compared(RunComparison(runs[0], runs[1], [verdict], {}, []))

    monkeypatch.setattr("d5suite.commands.bisect.measure", measure)
    assert run_bisect(bisected(folder)) == Exit.TOO_NOISY
    said = capsys.readouterr().out.splitlines()
    assert "a/b c takes 2.000 times as long since one of" in said
    assert [each.rpartition(" ")[2] for each in said[-2:]] == ["broken", "slower"]
    with pytest.raises(ConfigurationError, match="no-such-folder"):
        run_bisect(bisected(offline / "no-such-folder"))


@pytest.mark.slow
def test_the_revision_of_a_backend_that_made_it_slower_is_found(
    offline: Path, folder: Path, imagenet_tree: Path
) -> None:
    repository, info = offline / "backend", "faulty_backend-1.0.dist-info"
    for message, factor in [("first", ""), ("slower", "True or "), ("later", "True or ")]:
        files = {f"faulty_backend/{each.name}": each.read_text() for each in PLUGINS.glob("faulty_backend/*.py")}
        files["faulty_backend/network.py"] = files["faulty_backend/network.py"].replace(
            'if slow == "slow":', f'if {factor}slow == "slow":  # {message}'
        )
        files[f"{info}/entry_points.txt"] = (PLUGINS / info / "entry_points.txt").read_text()
        write_project(repository, name="faulty-backend", needs="d5suite", module="ignored", further=files)
        commit_all(repository, message)
    done = bisect(folder, imagenet_tree, plugin_environment() | {"PYTHONPATH": ""}, "--repository", str(repository))
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert said[-2].startswith("two/inference faulty takes ") and said[-1].endswith(" slower")


@pytest.mark.slow
def test_pip_leaves_the_versions_of_this_environment_alone(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what goes with the installed package alone, here its companion, may change."""
    here = offline / "here"
    for name, version, needs in [
        ("helper", "1.0", ""), ("companion", "1.0", ""), ("extra-side", "0.9", "companion==1.0"),
    ]:  # fmt: skip
        info = here / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        required = f"Requires-Dist: {needs}\n" if needs else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}")
    monkeypatch.syspath_prepend(here)
    for name in ("helper", "companion"):
        for version in ("1.0", "2.0"):
            write_wheel(offline, name, version, value=int(version[0]))
    values = "import extra_side, {0}; print(extra_side.VALUE, {0}.VALUE)"
    with prepared_side(f"install:{write_wheel(offline, needs='helper')}", "--a") as side:
        assert said_there(side, values.format("helper")) == ["17", "1"]
    with prepared_side(f"install:{write_wheel(offline, needs='companion>=2')}", "--a") as side:
        assert said_there(side, values.format("companion")) == ["17", "2"]
    with (
        pytest.raises(ConfigurationError) as caught,
        prepared_side(f"install:{write_wheel(offline, needs='helper>=2')}", "--a"),
    ):
        pass
    said = str(caught.value)
    assert "The user requested (constraint) helper==1.0" in said and "extra-side 1.0 depends on helper>=2" in said


def test_an_interpreter_runs_where_nobody_can_leave_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('anyone may write here')\n")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with prepared_side(sys.executable, "--a") as one, prepared_side(sys.executable, "--b") as other:
        folders = [side.folder for side in (one, other) if side.folder]
        assert len(set(folders)) == 2
        for folder in folders:
            assert folder.stat().st_mode & 0o077 == 0 and not list(folder.iterdir())
    assert not any(folder.exists() for folder in folders)
