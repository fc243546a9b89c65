"""``d5suite ab`` as a user runs it: planted slowdowns, wrong answers and crashes on one side, sides
that cannot be made; and workers that do not keep to their turns."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree as XML

import pytest

import d5suite
from d5suite.backends import Selection
from d5suite.cli import main
from d5suite.launch.base import Limits
from d5suite.launch.turns import TurnWorker
from d5suite.session.pairs import Duel, Pair
from d5suite.session.session import Found, Wanted
from d5suite.session.sides import made
from tests.conftest import plugin_environment, write_recipe

QUICK = ("--max-pairs", "12")
"""A few more than a clear answer takes."""


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
        cwd=folder, env=plugin_environment(), capture_output=True, text=True, timeout=300,
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
def test_equal_sides_are_never_called_slower(folder: Path, imagenet_tree: Path) -> None:
    done = ab(folder, imagenet_tree, "here", "mode:good", "--max-pairs", "30")
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

    def run(self: Duel, batch: Sequence[Wanted], selection: Selection, tests: object, alpha: float) -> list[Pair]:
        if batch[0].case.name == "two":
            os.kill(os.getpid(), signal.SIGTERM)
        return [Pair(batch[0], selection, Found(failure="the disk is full"), Found())]

    monkeypatch.setattr(Duel, "run", run)
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
    ("rev:no-such-revision", "git -C"),
    ("install:--index-url=x", "it names no requirement"),
    ("/bin/false", "no worker of d5suite runs there\n  It exited with status 1."),
    ("/bin/true", "this is no Python interpreter"),
    (os.curdir, "this folder is no virtual environment"),
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
def repository(tmp_path: Path) -> Path:
    """d5suite in two revisions; in the second one, every sample is told three times as long."""
    repository = tmp_path / "repository"
    ignored = shutil.ignore_patterns("__pycache__", "third_party")
    shutil.copytree(Path(d5suite.__file__).parent, repository / "d5suite", ignore=ignored)
    told = "return clock() - start\n"
    commit(repository, first=(told, f"{told}\n"), slower=(told, "return 3 * (clock() - start)\n"))
    return repository


def test_a_revision_is_as_it_was_and_the_repository_stays_as_it_is(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    with made("rev:HEAD~1", "--a") as before, made("rev:main", "--b") as after:
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


@pytest.mark.slow
def test_the_revision_that_made_it_slower_is_found(repository: Path, folder: Path, imagenet_tree: Path) -> None:
    commit(repository, later=("WAKE_S = 0.02", "WAKE_S = 0.01"))
    shutil.copytree(folder / "recipes", repository / "recipes")
    done = subprocess.run(
        [sys.executable, "-m", "d5suite.cli", "bisect", "--good", "main~2", "--bad", "main", "recipes/test_two.py",
         "--backend", "faulty", "--max-pairs", "20", "--", "--imagenet", str(imagenet_tree), "--threads", "1"],
        cwd=repository, env=plugin_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert said[-2].startswith("two/inference faulty takes ") and said[-1].endswith(" slower")


def test_what_pip_installs_lies_over_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D5SUITE_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "extra_side-1.0-py3-none-any.whl"
    info = "extra_side-1.0.dist-info"
    files = {
        "extra_side.py": "VALUE = 17\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: extra-side\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]))
    spec = f"install:extra-side @ {wheel.as_uri()}"
    for _ in range(2):  # made, and taken again
        with made(spec, "--a") as side:
            assert side.python is not None
            code = "import extra_side, numpy, d5suite; print(extra_side.VALUE, d5suite.__file__)"
            said = subprocess.run(
                [side.python, "-c", code], env={**os.environ, **side.environment}, cwd=side.folder,
                capture_output=True, text=True, check=True,
            ).stdout.split()  # fmt: skip
            assert said == ["17", d5suite.__file__]


LIAR = """#!{python}
import json, socket, sys, time
channel = socket.socket(fileno=int(sys.argv[sys.argv.index("--turns") + 1]))
say = lambda text: channel.sendall(text.encode())
hear = lambda: json.loads(channel.makefile().readline())
{code}
"""
READY = 'say(json.dumps({"ready": "a/b"}) + "\\n"); hear()\n'
LIARS = {
    "say('no JSON\\n')": "does not keep to its turns, it says",
    "say('[]\\n')": "does not keep to its turns, it says",
    "say('{\"samples_s\": []}\\n')": "it is not ready, but says",
    "say('x' * (2 << 20))": "its message is too long",
    READY + 'say(\'{"samples_s": [1.0], "took_s": 1}\\n\')': "instead of 2 positive samples",
    READY + 'say(\'{"samples_s": [1.0, -1.0], "took_s": 1}\\n\')': "instead of 2 positive samples",
    READY + 'say(\'{"samples_s": [1.0, NaN], "took_s": 1}\\n\')': "instead of 2 positive samples",
    READY + "say('{\"samples_s\": [1.0, 2.0]}\\n')": "instead of 2 positive samples",
    READY + "channel.close(); time.sleep(600)": "did not finish within 0.3 s",
    READY + "time.sleep(600)": "did not finish within 0.3 s",
    READY + "sys.exit(7)": "exited with status 7",
    READY + "hoard = b'x' * (300 << 20); time.sleep(600)": "over its limit of 0.20 GiB",
}
"""Code of a worker that keeps to no turns, and what is said of it."""


@pytest.mark.parametrize("code", LIARS)
def test_a_worker_that_does_not_keep_to_its_turns_is_ended(code: str, tmp_path: Path) -> None:
    python, job = tmp_path / "python", tmp_path / "liar.job.json"
    python.write_text(LIAR.format(python=sys.executable, code=code))
    python.chmod(0o755)
    job.write_text("{}")
    limits = Limits(60.0 if "hoard" in code else 0.3, (200 << 20) if "hoard" in code else sys.maxsize)
    worker = TurnWorker(job, threads=1, device="cpu", limits=limits, python=str(python))
    ready = worker.ready()
    if READY in code:
        assert ready == "a/b"
        ready = worker.take(2)  # type: ignore[assignment]
    assert ready is None
    outcome = worker.end()
    assert not outcome.ok and LIARS[code] in outcome.reason


def test_a_worker_whose_threads_spin_after_their_turn_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d5suite.launch.turns.REST_S", 60.0)
    python, job, rested = tmp_path / "python", tmp_path / "spinner.job.json", tmp_path / "rested"
    code = f"""{READY}say('{{"samples_s": [1.0], "took_s": 1}}\\n')
end = time.monotonic() + 0.1
while time.monotonic() < end: pass
open({str(rested)!r}, "w").close()
time.sleep(600)
"""
    python.write_text(LIAR.format(python=sys.executable, code=code))
    python.chmod(0o755)
    job.write_text("{}")
    worker = TurnWorker(job, threads=1, device="cpu", limits=Limits(60.0, sys.maxsize), python=str(python))
    try:
        assert worker.ready() == "a/b" and worker.take(1) == [1.0]
        worker.rest()
        assert rested.exists()
    finally:
        worker.end()
