"""Networks of two public model libraries, by both of PyTorch's exporters, on every backend.

Two processes write the files, one per backend runs them: inference in float32, gradients in
float64, and in float32 of as many networks as have all operators. Each network is written by one
exporter: the newer one takes seconds, so it writes those that together have all its operators.
PyTorch runs what the older one writes of these, too. ``EVERY_FILE=1`` adds the rest. Batches are
open; some files have a fixed one, and text has two inputs, tokens and their mask. JAX compiles
without optimization, which takes half the time.
``pytest -s tests/test_public_networks.py`` prints the table.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from rich.console import Console
from rich.table import Table

from d5suite.backends import discover, select
from d5suite.errors import UnsupportedOperatorError
from d5suite.instruments.threads import thread_environment
from d5suite.network.user_network import load_user_network
from d5suite.validate.norms import relative_l2
from tests.conftest import end_with_tests, plugin_environment

BATCH, CLASSES, TOKENS = 2, 10, 12
OUTPUTS, GRADIENTS = 1e-5, 1e-9
ROUNDED = 1e-2
"""Largest error of a whole gradient in float32: a ReLU that a rounding flips changes it."""
BACKENDS = ("torch", "tensorflow", "keras", "mxnet", "jax", "deep500")
LIBRARIES = {"pytorchcv": 48, "transformers": 64}
"""Model libraries, and the images' size."""

_TWO = {"hidden_sizes": [16, 32], "depths": [1, 1]}
"""Two stages, without and with what stands between stages; the published networks have four."""
_VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 64}
_TEXT = {"vocab_size": 96, "max_position_embeddings": 32}

NETWORKS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "get_resnet": ("resnet", {"blocks": 10, "width_scale": 0.25}),
    "get_preresnet": ("preresnet", {"blocks": 10, "width_scale": 0.25}),
    "mobilenet_wd4": ("mobilenet", {}),
    "mobilenetv2_wd4": ("mobilenetv2", {}),
    "mobilenetv3_small_w7d20": ("mobilenetv3", {}),
    "shufflenetv2_wd2": ("shufflenetv2", {}),
    "squeezenet_v1_1": ("squeezenet", {}),
    "nin_cifar10": ("nin_cifar", {}),
    "ViTForImageClassification": ("", {**_VISION, "intermediate_size": 64}),
    "Dinov2ForImageClassification": ("", {**_VISION, "patch_size": 16}),
    "ConvNextForImageClassification": ("", {**_TWO, "num_stages": 2}),
    "ConvNextV2ForImageClassification": ("", {**_TWO, "num_stages": 2}),
    "SwinForImageClassification": (
        "", {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "image_size": 64},
    ),
    "RegNetForImageClassification": ("", {**_TWO, "groups_width": 16, "embedding_size": 16}),
    "ResNetForImageClassification": ("", {**_TWO, "embedding_size": 16}),
    "PoolFormerForImageClassification": ("", {**_TWO, "num_encoder_blocks": 2}),
    "SegformerForImageClassification": (
        "", {**_TWO, "num_encoder_blocks": 2, "num_attention_heads": [1, 2], "sr_ratios": [4, 1]},
    ),
    "LevitForImageClassification": (
        "", {"hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
             "key_dim": [8, 8, 8], "image_size": 64},
    ),
    "BertForSequenceClassification": (
        "", {**_TEXT, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64},
    ),
    "DistilBertForSequenceClassification": ("", {**_TEXT, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 64}),
}  # fmt: skip
"""A class of `transformers`, or a function of a module of `pytorchcv`, with what makes it small."""

NEWER = (
    "get_preresnet", "shufflenetv2_wd2", "nin_cifar10", "ViTForImageClassification",
    "ConvNextV2ForImageClassification", "SegformerForImageClassification", "BertForSequenceClassification",
)  # fmt: skip
"""Networks that the newer exporter writes, too: with every operator that only it writes for any of
the networks, with all its sets of attributes (but for a Reshape without any)."""

FIXED = ("shufflenetv2_wd2", "ViTForImageClassification", "BertForSequenceClassification")
"""Networks that the older exporter writes for one batch size, too."""

OTHER_PARAMETERS = {
    "Dinov2ForImageClassification": "a mask token that inference does not use is not exported",
    "SwinForImageClassification": "the exporter looks attention's biases up in their table",
}
"""Networks whose files have other parameters than the library's."""

NOT_EXPORTED = {"SwinForImageClassification.new": "PyTorch's newer exporter fails to decompose a view of a transpose"}


EVERY_FILE = bool(os.environ.get("EVERY_FILE"))


def _library(name: str) -> str:
    return "pytorchcv" if NETWORKS[name][0] else "transformers"


def _built(name: str) -> Any:
    """A network in evaluation mode whose every weight matters."""
    import torch

    torch.manual_seed(0)
    module, settings = NETWORKS[name]
    if module:
        network = getattr(importlib.import_module(f"pytorchcv.models.{module}"), name)(num_classes=CLASSES, **settings)
        for path, part in list(network.named_modules()):
            if isinstance(part, torch.nn.AvgPool2d) and part.kernel_size not in (2, 3):  # the last: 7x7 of 224 pixels
                network.set_submodule(path, torch.nn.AdaptiveAvgPool2d(1))
        _shorten(network.eval(), _drawn(name))
    else:
        library = importlib.import_module("transformers")
        config = getattr(library, name.rpartition("For")[0] + "Config")(num_labels=CLASSES, **settings)
        network = getattr(library, name)(config)
        forward = network.forward
        if "Sequence" in name:
            network.forward = lambda x, mask: forward(x, attention_mask=mask).logits
        else:
            network.forward = lambda x: forward(x).logits
    with torch.no_grad():  # scales of 1 and biases of 0 would hide errors, and small weights everything
        for weight in network.parameters():
            weight.copy_(torch.randn_like(weight) * (2 / max(weight[0].numel(), 1)) ** 0.5 if weight.ndim > 1
                         else weight + 0.25 * torch.randn_like(weight))  # fmt: skip
        for part in network.modules():
            if isinstance(part, torch.nn.BatchNorm2d | torch.nn.BatchNorm1d):
                part.momentum = 0.5  # half their own, so that no small variance amplifies roundings
        network.train()(*_drawn(name, 16).values())
    return network.eval()


def _shorten(network: Any, drawn: Mapping[str, Any]) -> None:
    """Keep one of a stage's equal units: those that give what they take, the same shape."""
    import torch

    stages = [part for part in network.features.children() if isinstance(part, torch.nn.Sequential)]
    equal: set[Any] = set()

    def note(unit: Any, given: tuple[Any], answer: Any) -> None:
        if given[0].shape == answer.shape:
            equal.add(unit)

    hooks = [unit.register_forward_hook(note) for stage in stages for unit in stage]
    network(*drawn.values())
    for hook in hooks:
        hook.remove()
    for stage in stages:
        for index in reversed([i for i, unit in enumerate(stage) if unit in equal][1:]):
            del stage[index]


def _drawn(name: str, samples: int = BATCH) -> dict[str, Any]:
    """Draw images, or tokens of sequences that are padded from different places on."""
    import torch

    generator = torch.Generator().manual_seed(samples)
    if "Sequence" in name:
        tokens = torch.randint(1, _TEXT["vocab_size"], (samples, TOKENS), generator=generator)
        ends = torch.arange(samples).remainder(TOKENS // 2) + TOKENS // 2
        return {"input": tokens, "mask": (torch.arange(TOKENS) < ends[:, None]).long()}
    size = LIBRARIES[_library(name)]
    return {"input": torch.randn(samples, 3, size, size, generator=generator)}


def export(library: str, folder: Path) -> None:
    """Write a library's networks by both exporters, with onnxruntime's answers."""
    import onnxruntime
    import torch

    logging.disable(logging.CRITICAL)
    batch = torch.export.Dim("N")
    for name in filter(lambda name: _library(name) == library, NETWORKS):
        network, drawn = _built(name), _drawn(name)
        size = sum(weight.numel() for weight in network.parameters())
        fixed = {"dynamo": False, "training": torch.onnx.TrainingMode.PRESERVE, "opset_version": 17}
        exporters: dict[str, dict[str, Any]] = {
            "old": {**fixed, "dynamic_axes": {each: {0: "N"} for each in (*drawn, "output")}},
            "new": {
                "dynamo": True,
                "dynamic_shapes": ({0: batch},) * len(drawn),
                "external_data": False,
                "verbose": False,
            },
            **({"fixed": fixed} if name in FIXED else {}),
        }
        if name not in NEWER and not EVERY_FILE:
            del exporters["new"]
        for exporter, options in exporters.items():
            path = folder / f"{name}.{exporter}.onnx"
            try:
                torch.onnx.export(
                    network, tuple(drawn.values()), path, input_names=[*drawn], output_names=["output"], **options
                )
            except Exception as error:  # exporters raise whatever they meet
                path.unlink(missing_ok=True)
                (folder / f"{path.stem}.failed").write_text(f"{type(error).__name__}: {error}")
                continue
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            arrays = {each: value.numpy() for each, value in drawn.items()}
            np.savez(folder / f"{path.stem}.inputs", **arrays)
            np.savez(folder / f"{path.stem}.expected", output=session.run(None, arrays)[0], parameters=size)


def run(backend: str, folder: Path) -> None:
    """Run every file; write the answers, and why there is none."""
    chosen = select(backend)
    chosen.backend.load("runtime", chosen.mode).configure(threads=1, seed=0, device="cpu")
    refused = {}
    rounded: set[str] = set()
    for path in sorted(folder.glob("*.onnx")):
        if not _is_run(path, backend):
            continue
        gradient, operators = _differentiated(path), _operators(path)
        in_float32 = gradient and not operators <= rounded
        rounded |= operators if in_float32 else set()
        try:
            np.savez(
                folder / f"{path.stem}.{backend}", **_answers(chosen, path, gradient=gradient, in_float32=in_float32)
            )
        except UnsupportedOperatorError as error:
            refused[path.stem] = error.what
        except Exception as error:  # a cell of the table
            refused[path.stem] = f"FAILED {type(error).__name__}: {error}"
    (folder / f"{backend}.json").write_text(json.dumps(refused))


def _is_run(path: Path, backend: str) -> bool:
    """Whether a backend runs a file."""
    return backend == BACKENDS[0] or path.suffixes[0] == ".fixed" or _differentiated(path)


def _differentiated(path: Path) -> bool:
    """Whether a file's gradients are compared."""
    name, _, exporter = path.stem.rpartition(".")
    return exporter == ("new" if name in NEWER else "old") or EVERY_FILE


def _operators(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node}


def _answers(chosen: Any, path: Path, *, gradient: bool, in_float32: bool) -> dict[str, Any]:
    """Return the outputs in float32, and a sample of every gradient in float64, by number."""
    with np.load(path.with_suffix(".inputs.npz")) as stored:
        arrays = dict(stored)
    network = load_user_network(path, shapes={}, batch_size=BATCH).network.without_dropout()
    chosen.backend.check_operators(network)
    single = chosen.backend.executor(network, mode=chosen.mode, device="cpu", precision="fp32")
    output = single.fetch(single.forward(single.feed(arrays)))["output"]
    parameters = sum(network.initializers[each].size for each in network.parameters)
    answers = {"output": output, "parameters": np.array(parameters)}
    if not gradient:
        return answers
    double = chosen.backend.executor(network, mode=chosen.mode, device="cpu", precision="fp64")
    gradients = double.fetch(double.forward_backward(double.feed({**arrays, "label": np.arange(BATCH)})))
    if in_float32:
        rounded = single.fetch(single.forward_backward(single.feed({**arrays, "label": np.arange(BATCH)})))
        flat = [np.concatenate([each[name].ravel() for name in gradients]) for each in (rounded, gradients)]
        answers["rounding"] = np.array(relative_l2(*flat))
    samples = {f"{i}": g.ravel()[:: 1 + g.size // 4096] for i, (_, g) in enumerate(sorted(gradients.items()))}
    return {**answers, **samples}


def _load(folder: Path, file: str) -> dict[str, dict[str, Any]]:
    found = {}
    for path in (folder / f"{file}.{backend}.npz" for backend in BACKENDS):
        if path.exists():
            with np.load(path) as stored:
                found[path.suffixes[-2][1:]] = dict(stored)
    return found


def _expected(folder: Path, file: str) -> dict[str, Any]:
    with np.load(folder / f"{file}.expected.npz") as stored:
        return dict(stored)


def errors(folder: Path, file: str) -> dict[str, tuple[float, float]]:
    """Return by backend the error of the output, and the largest of a gradient.

    Gradients are held to those of the first backend. One that cancels is a sum of roundings, so it
    is compared with the whole gradient, not with itself.
    """
    found = _load(folder, file)
    expected = _expected(folder, file)["output"]
    reference = next(iter(found.values()), {})
    names = [name for name in reference if name.isdigit()]
    floor = 1e-4 * float(np.sqrt(sum(np.vdot(reference[name], reference[name]) for name in names)))
    return {
        backend: (
            relative_l2(arrays["output"], expected),
            max(
                float(np.linalg.norm(arrays[name] - reference[name]))
                / max(float(np.linalg.norm(reference[name])), floor)
                for name in names
            ) if names else 0.0,
        )
        for backend, arrays in found.items()
    }  # fmt: skip


def faults(folder: Path, file: str) -> dict[str, tuple[float, float]]:
    """Return the errors of the backends that are wrong."""
    return {
        backend: (output, gradient)
        for backend, (output, gradient) in errors(folder, file).items()
        if not (output < OUTPUTS and gradient < GRADIENTS)
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = discover()[0]
    missing = [name for name in (*LIBRARIES, "onnxscript", "torch") if importlib.util.find_spec(name) is None]
    missing += [name for name in BACKENDS if found[name].problem() is not None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("public")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: _process(folder, name), LIBRARIES))
        list(pool.map(lambda name: _process(folder, name), ("jax", "keras", "tensorflow", "mxnet", "torch", "deep500")))
    return folder


def _process(folder: Path, task: str) -> None:
    flags = ("backend_optimization_level=0", "llvm_disable_expensive_passes=true", "cpu_use_fusion_emitters=false")
    quick = {"XLA_FLAGS": " ".join(f"--xla_{flag}" for flag in flags)}
    environment = {**plugin_environment(), **thread_environment(1), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.test_public_networks", task, str(folder)],
        cwd=Path(__file__).parents[1], env=environment | (quick if task == "jax" else {}), capture_output=True,
        text=True, preexec_fn=end_with_tests,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def _files(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.onnx"))


def _table(folder: Path) -> Table:
    table = Table("network", "exporter", *BACKENDS, title="Error of the output · of the gradient")
    for path in sorted([*folder.glob("*.onnx"), *folder.glob("*.failed")]):
        name, _, exporter = path.stem.rpartition(".")
        found = errors(folder, path.stem) if path.suffix == ".onnx" else {}
        table.add_row(
            name.rpartition("For")[0] or name.removeprefix("get_"), exporter,
            *("{:.0e} · {:.0e}".format(*found[backend]) if backend in found else "–" for backend in BACKENDS),
        )  # fmt: skip
    return table


@pytest.mark.slow
def test_public_networks_run_on_every_backend(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        Console(width=150).print("", _table(folder), sep="\n")
    failed = {path.stem: path.read_text() for path in folder.glob("*.failed")}
    assert failed.keys() == (NOT_EXPORTED.keys() if EVERY_FILE else set()), failed
    exported = Counter(file.rpartition(".")[2] for file in _files(folder))
    assert exported["old"] == len(NETWORKS) and exported["new"] >= len(NEWER)
    refused = {backend: json.loads((folder / f"{backend}.json").read_text()) for backend in BACKENDS}
    assert refused == {backend: {} for backend in BACKENDS}
    operators = {file: _operators(folder / f"{file}.onnx") for file in _files(folder)}
    tried = {
        backend: {each for file in operators if backend in _load(folder, file) for each in operators[file]}
        for backend in BACKENDS
    }
    assert tried == dict.fromkeys(BACKENDS, set().union(*operators.values()))
    compared = {file.rpartition(".")[0] for file in _files(folder) if "0" in _load(folder, file)["torch"]}
    assert compared == set(NETWORKS)
    # The newer exporter folds what is constant in evaluation mode, such as scales of convolutions.
    counted = [f for f in _files(folder) if f[-4:] != ".new" and f.partition(".")[0] not in OTHER_PARAMETERS]
    sizes = {file: int(_expected(folder, file)["parameters"]) for file in counted}
    assert {file: int(_load(folder, file)["torch"]["parameters"]) for file in counted} == sizes
    roundings = {
        (file, backend): float(arrays["rounding"])
        for file in _files(folder)
        for backend, arrays in _load(folder, file).items()
        if "rounding" in arrays
    }
    in_gradients = set().union(*(operators[file] for file in operators if "0" in _load(folder, file)["torch"]))
    for backend in BACKENDS:
        assert in_gradients == {each for file, run in roundings if run == backend for each in operators[file]}
    assert {each: error for each, error in roundings.items() if not error < ROUNDED} == {}
    wrong = {file: faults(folder, file) for file in _files(folder)}
    assert {file: found for file, found in wrong.items() if found} == {}


@pytest.mark.parametrize(("array", "factor"), [("output", 1 + 1e-4), ("1", 1 + 1e-8)], ids=["output", "gradient"])
def test_a_backend_that_is_off_in_one_network_is_seen(tmp_path: Path, array: str, factor: float) -> None:
    random = np.random.default_rng(0)
    right: dict[str, Any] = {name: random.standard_normal(9) for name in ("output", "0", "1", "2")}
    np.savez(tmp_path / "net.old.expected", output=right["output"])
    for backend in BACKENDS:
        np.savez(tmp_path / f"net.old.{backend}", **right)
    assert faults(tmp_path, "net.old") == {}
    np.savez(tmp_path / "net.old.mxnet", **{**right, array: right[array] * factor})
    assert list(faults(tmp_path, "net.old")) == ["mxnet"]


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    task, where = sys.argv[1], Path(sys.argv[2])
    export(task, where) if task in LIBRARIES else run(task, where)
