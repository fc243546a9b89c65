"""Shared by the tests: a small network, a small image tree, and runs of pytest in processes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import psutil
import pytest

from d5suite.files import locked, write_bytes
from d5suite.network import Network
from d5suite.network.builder import Builder

# A shell ignores interrupts in background jobs, and child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# The same examples in every run, so that a commit passes or fails for what it changed. Others:
# --hypothesis-profile=random. No deadline: other processes may hold an example up.
with contextlib.suppress(ModuleNotFoundError):  # pytest imports this file, too, if a recipe's path is mistyped
    import hypothesis

    hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True)
    hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("fixed")


LONGEST = ("test_public_networks.py", "test_example.py", "test_convergence.py", "test_frameworks_agree.py", "slurm")
"""Files, or folders of files, with the longest tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first, so that no process is left with one of them at the end."""
    items.sort(key=lambda item: not set(LONGEST) & set(item.path.parts))


gc.set_threshold(50_000, 20, 20)  # as in the processes that the tests start: see ``sitecustomize.py``


@pytest.fixture(autouse=True, scope="module")
def earlier_objects() -> None:
    """Exclude imported modules from garbage collections, each of which would take half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def attempt(request: pytest.FixtureRequest) -> int:
    """The test's try, from 1: the second one must not look at the first one's answer."""
    return int(getattr(request.node, "execution_count", 1))


PLUGINS = Path(__file__).parent / "plugins"


def order_of_cpus() -> list[int]:
    """Return the CPUs, in another order in every test process: see ``sitecustomize.py``."""
    cpus = sorted(os.sched_getaffinity(0))
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(cpus)
    return cpus[first:] + cpus[:first]


os.environ["D5SUITE_TESTS_CPUS"] = ",".join(map(str, order_of_cpus()))
# TensorFlow leaves oneDNN off on CPUs without AVX-512: tests find the same kernels on all machines.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def small_network(image_size: int = 32, classes: int = 4, seed: int = 0) -> Network:
    """A residual network of two convolutions that trains in milliseconds."""
    b = Builder("small", seed=seed, image_size=image_size)
    x = b.relu(b.batch_norm(b.conv(b.image, "conv1", 8, 3, stride=2), "bn1"))
    y = b.batch_norm(b.conv(x, "conv2", 8, 3), "bn2")
    x = b.relu(b.add(x, y, "add"))
    return b.classifier(b.linear(b.flatten(b.global_average_pool(x, "avgpool"), "flatten"), "fc", classes))


@pytest.fixture(scope="session")
def small_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small network as an ONNX file without label and loss."""
    network = small_network()
    model = onnx.ModelProto()
    model.CopyFrom(network.model)
    del model.graph.node[-1]  # the loss
    del model.graph.output[-1]
    del model.graph.input[-1]
    path = tmp_path_factory.mktemp("onnx") / "small.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture(scope="session")
def imagenet_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set in ImageNet's layout: 4 classes, 8 training and 4 validation images each."""
    from d5suite.data.synthesis import make_imagenet

    out = tmp_path_factory.mktemp("data") / "imagenet"
    make_imagenet(out, classes=4, train_per_class=8, val_per_class=4, progress=False)
    return out


@pytest.fixture(scope="session")
def tiny_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same classes in images of 32 to 48 pixels, which are quick to decode."""
    from d5suite.data.synthesis import make_imagenet

    out = tmp_path_factory.mktemp("data") / "imagenet"
    make_imagenet(out, classes=4, train_per_class=8, val_per_class=4, min_side=32, max_side=48, progress=False)
    return out


@pytest.fixture
def recipe_folder(tmp_path: Path, small_onnx: Path) -> Path:
    """A folder with a recipe for the small network and nothing else."""
    return write_recipe(tmp_path, small_onnx)


def write_recipe(parent: Path, small_onnx: Path) -> Path:
    """Write the recipe for the small network, and return its folder."""
    folder = parent / "recipes"
    folder.mkdir()
    (folder / "test_small.py").write_text(
        "from d5suite import SGD, Recipe\n"
        "from d5suite.cases.recipe import Preset\n"
        f"RECIPE = Recipe(name='small', network={str(small_onnx)!r}, dataset='imagenet',\n"
        "    optimizer=SGD(learning_rate=0.125, momentum=0.5),\n"
        "    presets={name: Preset(image_size=32, batch_size=4, classes=4, max_time_s=0.05)\n"
        "             for name in ('smoke', 'reduced')})\n"
    )
    # Starting a second loader process takes longer than decoding these images.
    (parent / "pytest.ini").write_text("[pytest]\naddopts = --loader-workers 1\n")
    return folder


def require_installed(*modules: str) -> None:
    """Skip a file unless modules are installed. It does not import them: every process collects."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_pytest(tmp_path: Path, tiny_images: Path) -> Run:
    """Run pytest on a recipe folder as a user does, with the plug-ins of ``tests/plugins``."""

    return partial(run_recipe, tmp_path, tiny_images)


def run_recipe(
    folder: Path, imagenet_tree: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder on the small image tree."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, "--imagenet", str(imagenet_tree)],
        cwd=folder,
        env=plugin_environment() | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=900,
    )


SEVERAL = """
import contextlib, io, json, runpy, sys
answers = []
for module, *arguments in json.load(sys.stdin):
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = [module, *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
    for name in [each for each in sys.modules if each.startswith("test_")]:  # of recipes: collected anew
        del sys.modules[name]
    answers.append((code, out.getvalue(), err.getvalue()))
json.dump(answers, sys.stdout)
"""


def run_several(commands: Sequence[Sequence[str]], folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run several ``python -m MODULE ARGUMENTS`` in one process, for commands that end early.

    NumPy has one thread: it is imported before a worker keeps to its cores, and more threads would
    wait for each other.
    """
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL], cwd=folder, env=plugin_environment() | {"OPENBLAS_NUM_THREADS": "1"},
        input=json.dumps(commands),
        capture_output=True, text=True, timeout=900, check=True,
    )  # fmt: skip
    return [subprocess.CompletedProcess(c, *a) for c, a in zip(commands, json.loads(done.stdout), strict=True)]


def made_once(folders: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """Return what the first of the run's test processes made, as JSON; the others wait for it."""
    base = folders.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    file = folder / f"{name}.json"
    with locked(folder / f".{name}.lock"):
        if not file.exists():
            write_bytes(file, json.dumps(make()).encode())
    return json.loads(file.read_bytes())


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return once a condition holds; fail after a time that no busy machine needs."""
    deadline = time.monotonic() + 500
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.02)  # leaves the core to what is waited for


def end_with_tests() -> None:
    """In a child, let the kernel end it with the thread that started it (Linux: prctl(2))."""
    _LIBC.prctl(1, signal.SIGTERM)


_LIBC = ctypes.CDLL(None)


def is_dead(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def plugin_environment() -> dict[str, str]:
    """Return an environment in which the tests' plug-ins are installed.

    Without plug-ins of no use here, which take more than a second to import in every run of pytest,
    or to collect garbage at its end.
    """
    plugins = "-p no:hypothesispytest -p no:anyio -p no:unraisableexception"
    path = os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    ours = {"PYTHONPATH": path, "COLUMNS": "100", "PYTEST_ADDOPTS": plugins}
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | ours
