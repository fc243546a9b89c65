"""What a run of the kit shows: cases and seconds as they come, errors by tolerance, an adapter's
own lines, and the options of ``d5suite conformance``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from d5suite.backends import Backend, discover
from d5suite.testing.bounds import Bound
from d5suite.testing.raised import broken_clause
from tests.conftest import plugin_environment

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the mistakes are made in PyTorch")

CONVOLUTIONS = "test_operator_means_what_onnx_says and Conv and not ConvT"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "d5suite.cli", "conformance", *arguments]


def conformance(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run ``d5suite conformance`` in a folder, with the tests' plug-ins."""
    return subprocess.run(
        command(*arguments), cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=300
    )


def kit(folder: Path, module: str, *arguments: str, **more: str) -> str:
    """Run one module of the kit, which collects faster, and return what a failure shows."""
    chosen = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", f"d5suite.testing.{module}"]
    done = subprocess.run(
        [*chosen, "--backend", *arguments],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def environment(**more: str) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return plugin_environment() | {"PYTHONPATH": os.pathsep.join([root, plugin_environment()["PYTHONPATH"]])} | more


@pytest.mark.slow
def test_a_pipe_gets_a_line_per_test_and_per_failure_while_the_kit_runs(tmp_path: Path) -> None:
    """The options -x, --lf, --durations and --quick do what pytest's do."""
    process = subprocess.Popen(
        command("wrong:padding", "--quick", "-x", "--durations", "2", "-k", CONVOLUTIONS),
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if re.match(r" +\d+\.\d\d s    FAILED test_operators.py::.*relative error", line):
            assert process.poll() is None  # it comes before the end
    assert process.wait() == 1
    shown = "".join(seen)
    assert re.search(r"^ +\d+\.\d\d s  test_operators.py::\w+: \d passed, 1 failed$", shown, re.MULTILINE), shown
    assert "stopping after 1 failures" in shown and "slowest 2 durations" in shown
    assert re.search(r"^FAILED .*test_operator_means_what_onnx_says\[Conv", shown, re.MULTILINE)
    again = conformance(tmp_path, "wrong:padding", "--quick", "--lf")
    assert again.returncode == 1
    assert re.search(r"^total +0 +1 ", again.stdout, re.MULTILINE), again.stdout


def test_the_exit_code_is_pytests(tmp_path: Path) -> None:
    assert conformance(tmp_path, "faulty", "--device", "cuda").returncode == 4


@pytest.mark.slow
def test_an_interrupted_kit_shows_its_table_and_a_crashed_one_its_signal(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("wrong:right", "-k", "operators"), cwd=tmp_path, env=environment(),
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("collected"):
            os.killpg(process.pid, signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait() == 2
    assert "conformance of wrong:right on cpu" in rest
    crashed = conformance(tmp_path, "wrong:crash", "-k", "test_forward and Softmax-axis")
    assert crashed.returncode == 128 + signal.SIGSEGV
    assert "error: wrong:crash died of SIGSEGV" in crashed.stderr


def test_a_terminal_gets_a_line_per_case_with_its_seconds(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pytest",
            "--pyargs",
            "d5suite.testing.test_operators",
            "--backend",
            "wrong:right",
            "-k",
            CONVOLUTIONS,
        ],
        cwd=tmp_path,
        env=environment(),
        stdout=theirs,
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # Linux's word for the end
                part = b""
            if not part:
                break
            shown += part
    os.close(ours)
    assert process.returncode == 0
    lines = re.findall(r"\r +\d+\.\d\d s    test_operators.py::\S+\[Conv\S*\]  \S+ of 1\.0e-12", shown.decode())
    assert len(lines) == 7, shown.decode()


@pytest.mark.slow
def test_messages_name_precision_and_tolerance_and_the_end_the_worst_errors(tmp_path: Path) -> None:
    """An author sets tolerances from this table."""
    training = kit(tmp_path, "test_training", "wrong:uphill", "-k", "agrees_with_the_recorded_run[lenet5_digits-fp32]")
    found = re.search(
        r"relative error (\S+) exceeds (\S+);.* \(Backend\.tolerances\['fp32'\]\.trajectory\)$",
        training,
        re.MULTILINE,
    )
    assert found is not None, training
    rows = {line[:26].strip(): line[26:].split() for line in training.splitlines() if line.startswith("fp")}
    declared, worst, checks, case = rows["fp32 trajectory"]
    assert declared == found[2] and float(worst) >= 0.9 * float(found[1])
    assert int(checks) == 2 and case.endswith("recorded_run[lenet5_digits-fp32]")
    assert rows["fp32 gradients"][1:3] == ["-", "0"]


def test_a_multiple_of_a_tolerance_still_names_it() -> None:
    bound = min(Bound.of(4.0, "fp32", "gradients", 4.0) * 0.01, 0.9)
    assert float(bound) == 0.04
    assert str(bound) == "Backend.tolerances['fp32'].gradients, 4, times the network's sensitivity, 0.01"


@pytest.fixture
def planted(tmp_path: Path) -> str:
    """A backend that raises, or has a wrong output or gradient; the path that finds it."""
    package, about = tmp_path / "planted_backend", tmp_path / "planted_backend-1.0.dist-info"
    package.mkdir()
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-backend\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[d5suite.backends]\nplanted = planted_backend:BACKEND\n")
    (package / "__init__.py").write_text(
        "from dataclasses import replace\n"
        "from d5suite.backends.torch import BACKEND as RIGHT\n"
        "MODES = dict.fromkeys(('raises', 'output', 'gradient', 'replica'), 'planted')\n"
        "BACKEND = replace(RIGHT, name='planted', package='planted_backend', modes=MODES)\n"
    )
    for module in ("runtime", "operators", "training"):
        (package / f"{module}.py").write_text(f"from d5suite.backends.torch.{module} import *\n")
    (package / "network.py").write_text(
        "import torch\n"
        "from d5suite.backends.torch import network as right\n"
        "class Executor(right.Executor):\n"
        "    def forward(self, feed):\n"
        "        return self._scaled() if self.mode == 'raises' else super().forward(feed)\n"
        "    def _scaled(self):\n"
        "        return {'scores': torch.zeros(3) + torch.zeros(4)}\n"
        "    def __init__(self, network, *, mode, **settings):\n"
        "        if mode == 'output':\n"
        "            right.OPERATORS['Concat'] = lambda node, _: lambda a, b: torch.cat([b, a], 1)\n"
        "        if mode == 'gradient':\n"
        "            right.OPERATORS['Sigmoid'] = lambda *_: lambda x: torch.sigmoid(x.detach()) + x - x.detach()\n"
        "        super().__init__(network, mode=mode, **settings)\n"
    )
    (package / "distributed.py").write_text(
        "from d5suite.backends.torch import distributed as right\n"
        "class Replica(right.Replica):\n"
        "    def gradients(self, feed):\n"
        "        if self.trainer.executor.mode == 'replica':\n"
        "            raise RuntimeError('no gradients')\n"
        "        return super().gradients(feed)\n"
    )
    return os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])


@pytest.mark.slow
def test_an_adapters_exception_names_the_clause_and_the_adapters_lines(planted: str, tmp_path: Path) -> None:
    chosen = ("test_networks", "planted:raises", "-k", "test_inference_changes_nothing")
    shown = kit(tmp_path, *chosen, PYTHONPATH=planted).split("= FAILURES =")[1].split("= conformance of")[0]
    broken = "backend 'planted' breaks clause 'executor.forward' of the contract: "
    assert f"{broken}forward raises RuntimeError: The size" in shown
    assert ", at planted_backend/network.py:7\n" in shown
    assert "  The clause: forward returns the network's output" in shown
    where = "    planted_backend/network.py:5, in forward\n      return self._scaled() if self.mode"
    assert where in shown
    assert "d5suite/testing" not in shown
    assert "d5suite/testing/test_networks.py" in kit(tmp_path, *chosen, "--full-trace", PYTHONPATH=planted)


def test_a_replicas_exception_names_its_clause(planted: str, tmp_path: Path) -> None:
    chosen = ("test_distributed", "planted:replica", "-k", "test_gradients_are_those_of_the_network")
    shown = kit(tmp_path, *chosen, PYTHONPATH=planted).split("= FAILURES =")[1].split("= conformance of")[0]
    broken = "backend 'planted' breaks clause 'replica.gradients' of the contract: "
    assert f"{broken}gradients raises RuntimeError: no gradients, at planted_backend/distributed.py:5\n" in shown
    assert "  The clause: gradients returns the loss and the gradient of every parameter" in shown


PARTS = {
    "Replica": ("distributed", ("buffers", "native", "weights", "load_weights")),
    "Trainer": ("training", ("step", "state", "load_state", "_change_rate", "gradients", "apply")),
}
"""By class of the contract: its module, and methods of an adapter that all raise."""


@pytest.mark.parametrize(
    ("part", "method", "clause"),
    [
        ("Replica", "gradients_early", "replica.gradients"),
        ("Replica", "buffers", "replica.gradients"),
        ("Replica", "native", "replica.gradients"),
        ("Replica", "apply", "replica.apply"),
        ("Replica", "weights", "replica.weights"),
        ("Replica", "load_weights", "replica.weights"),
        ("Replica", "__init__", "replica.class"),
        ("Trainer", "gradients", "replica.gradients"),
        ("Trainer", "apply", "replica.apply"),
        ("Trainer", "step", "trainer.meaning"),
        ("Trainer", "load_state", "trainer.state"),
    ],
)
def test_every_method_has_its_clause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, method: str, clause: str
) -> None:
    """The contract's own apply calls an adapter's native: the update is what fails."""
    module, methods = PARTS[part]
    body = "raise RuntimeError('planted')"
    made = [name for name in (*methods, method) if (part, name) != ("Replica", "apply")]
    lines = [f"    def {name}(self, *_): {body}" for name in dict.fromkeys(made)]
    lines += [] if method == "__init__" else ["    def __init__(self): pass"]
    package = tmp_path / "raising_backend"
    package.mkdir()
    (package / "__init__.py").write_text(
        f"from d5suite.levels.{module} import {part}\n"
        f"class Planted({part}):\n    class trainer: apply = None\n" + "\n".join(lines) + "\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "raising_backend", raising=False)
    backend: Backend = replace(discover()[0]["torch"], name="raising", package="raising_backend")
    with pytest.raises(RuntimeError, match="planted") as raised:
        getattr(importlib.import_module("raising_backend").Planted(), method)({})
    found, _ = broken_clause(raised.value, backend)
    assert found is not None and found.clause == clause


@pytest.mark.parametrize(
    ("mode", "module", "case", "node"),
    [
        ("output", "test_networks", "test_output_equals_the_reference", "Concat 'both', relative error "),
        pytest.param(
            "gradient",
            "test_gradients",
            "every_operator and generic",
            "Sigmoid 'gate', relative error ",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["output", "gradient"],
)
def test_a_wrong_network_names_the_node_at_fault(
    planted: str, tmp_path: Path, mode: str, module: str, case: str, node: str
) -> None:
    shown = kit(tmp_path, module, f"planted:{mode}", "-k", case, PYTHONPATH=planted)
    broken = next(line for line in shown.splitlines() if line.startswith("backend 'planted' breaks clause"))
    assert f"; the first node that disagrees is {node}" in broken
