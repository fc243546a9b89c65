"""Shared by the tests: a small network, a small image tree, and pytest runs in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import onnx
import pytest

from d5suite.network import Network
from d5suite.network.builder import Builder

# A shell that starts the tests in the background leaves interrupts ignored, here and in every child process.
signal.signal(signal.SIGINT, signal.default_int_handler)

PLUGINS = Path(__file__).parent / "plugins"


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


@pytest.fixture
def recipe_folder(tmp_path: Path, small_onnx: Path) -> Path:
    """A folder with a recipe for the small network and nothing else."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "test_small.py").write_text(
        "from d5suite import SGD, Recipe\n"
        "from d5suite.recipe import Preset\n"
        f"RECIPE = Recipe(name='small', network={str(small_onnx)!r}, dataset='imagenet',\n"
        "    optimizer=SGD(learning_rate=0.125, momentum=0.5),\n"
        "    presets={name: Preset(image_size=32, batch_size=4, classes=4, max_time_s=0.05)\n"
        "             for name in ('smoke', 'reduced')})\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return folder


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_pytest(tmp_path: Path, imagenet_tree: Path) -> Run:
    """Run pytest on a recipe folder as a user would; the plug-ins of ``tests/plugins`` are installed."""

    def run(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, "--imagenet", str(imagenet_tree)],
            cwd=tmp_path,
            env=plugin_environment() | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def plugin_environment() -> dict[str, str]:
    """An environment in which the tests' plug-ins are installed."""
    path = os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"PYTHONPATH": path, "COLUMNS": "100"}
