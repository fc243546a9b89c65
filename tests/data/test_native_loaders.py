"""Frameworks' own loaders read what d5suite's converter wrote, from every format that they say
they read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from d5suite.backends import discover
from d5suite.cases.case import Settings
from d5suite.cases.recipe import Preset, Recipe
from d5suite.data.convert import convert
from d5suite.data.formats import KINDS
from d5suite.measurements import find
from tests.conftest import plugin_environment

LOADING = ("input_pipeline", "native_input_pipeline", "cost_of_loading")

LOADERS = {
    name: backend
    for name, backend in discover()[0].items()
    if backend.package.startswith("d5suite.") and "loader" not in backend.absent
}

READ = """
    import json, sys
    from pathlib import Path

    import numpy as np

    from d5suite.backends import backend
    from d5suite.data.decode import decode_image
    from d5suite.data.formats import open_store
    from d5suite.data.imagenet import ImageNet
    from d5suite.data.transforms import EvalTransform, TrainTransform

    name, folder = sys.argv[1], Path(sys.argv[2])
    tree = ImageNet(folder / "folder", "train")
    expected = np.stack([EvalTransform(32)(decode_image(path)) for path in tree.files])
    loader = backend(name).load("loader")
    found = {}
    for kind in loader.NAMES:
        dataset = open_store(folder / kind, "train")
        batches = loader.native_loader(dataset, EvalTransform(32), batch_size=4, workers=1, seed=0)
        seen, worst = [], 0.0
        for _ in range(len(dataset) // 4):
            for image, label in zip(*map(np.asarray, next(batches)), strict=True):
                image = image.transpose(2, 0, 1) if image.shape[-1] == 3 else image
                errors = np.sqrt(((expected - image) ** 2).mean((1, 2, 3)))
                assert label == tree.labels[errors.argmin()]
                seen.append(int(errors.argmin()))
                worst = max(worst, float(errors.min()))
        batches.close()
        batches = loader.native_loader(dataset, TrainTransform(32), batch_size=3, workers=1, seed=0)
        training = [np.asarray(next(batches)[0]) for _ in range(2 * len(dataset) // 3)]  # into the second epoch
        batches.close()
        assert all(images.size == 3 * 3 * 32 * 32 for images in training)
        found[kind] = [worst, seen, float(np.std(training))]
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, imagenet_tree: Path) -> Path:
    folder = tmp_path_factory.mktemp("native")
    (folder / "folder").symlink_to(imagenet_tree)
    for kind in KINDS[1:]:
        convert(imagenet_tree, folder / kind, kind)
    return folder


@pytest.mark.parametrize(  # Keras has TensorFlow's
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "keras" else name for name in LOADERS]
)
def test_every_format_gives_the_same_images(stores: Path, name: str) -> None:
    backend = LOADERS[name]
    if problem := backend.problem():
        pytest.skip(problem)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(READ), name, str(stores)],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {kind for kind in KINDS if f"loader:{kind}" not in backend.absent}
    for kind, (worst, seen, spread) in found.items():
        # ImageRecordIter rounds the place of the central crop down, and the others do not: one
        # pixel of 32
        assert worst < (0.75 if kind == "recordio" else 0.15)
        assert sorted(seen) == list(range(32))
        assert seen != sorted(seen)
        assert 0.5 < spread < 2


WHOLE = """
    import json, sys
    from pathlib import Path

    from d5suite.backends import backend
    from d5suite.data.formats import open_store
    from d5suite.data.transforms import EvalTransform

    dataset = open_store(Path(sys.argv[1]) / "recordio", "train")
    loader = backend("mxnet").load("loader").native_loader
    batches = loader(dataset, EvalTransform(32), batch_size=3, workers=1, seed=0)
    print(json.dumps([[image.tobytes().hex() for image in next(batches)[0]] for _ in range(20)]))
    batches.close()
    try:
        next(loader(dataset, EvalTransform(32), batch_size=33, workers=1, seed=0))
    except Exception as error:
        print(str(error).splitlines()[0])
"""


def test_record_files_give_whole_batches_only(stores: Path) -> None:
    if problem := LOADERS["mxnet"].problem():
        pytest.skip(problem)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WHOLE), str(stores)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    images, refused = done.stdout.splitlines()[-2:]
    batches = json.loads(images)
    for epoch in (batches[:10], batches[10:]):  # 32 images are ten batches of three, and two more
        assert len({image for batch in epoch for image in batch}) == 30
    assert "fewer images than a batch of 33" in refused


def test_rows_that_a_backend_cannot_make_say_why() -> None:
    backends = discover()[0]
    recipe = Recipe("r", "resnet50", "imagenet", None, {"smoke": Preset(32, 4, 4)}, LOADING, formats=KINDS)  # type: ignore[arg-type]
    by_name = {variant.name: variant for variant in recipe.variants()}
    assert by_name["r-hdf5"].why_unsupported(backends["torch"], find("native_input_pipeline"), Settings()) is None
    why = by_name["r-tfrecord"].why_unsupported(backends["torch"], find("cost_of_loading"), Settings())
    assert why == "torch has no loader:tfrecord: PyTorch has no reader of TFRecord files of its own"
    assert "has no loader: " in str(
        by_name["r-folder"].why_unsupported(backends["jax"], find("native_input_pipeline"), Settings())
    )
    # deep500 is not too slow for a recipe without a network
    assert by_name["r-folder"].why_unsupported(backends["deep500"], find("input_pipeline"), Settings()) is None


@pytest.mark.slow
def test_the_frameworks_loader_is_measured_from_its_own_format(stores: Path, small_onnx: Path, tmp_path: Path) -> None:
    if problem := LOADERS["mxnet"].problem():
        pytest.skip(problem)
    case = {
        "kind": "network",
        "name": "by_hand",
        "preset": "smoke",
        "measurements": list(LOADING),
        "sampling": {"max_time_s": 0.05, "min_rounds": 2, "warmup": "off"},
        "network": {"onnx": str(small_onnx), "classes": 4, "image_size": 32},
        "dataset": {"kind": "imagenet", "root": str(stores / "recordio")},
        "batch_size": 4,
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "validation_steps": 2,
    }
    job = {
        "schema": "d5suite-job-3",
        "backend": {"name": "mxnet", "mode": "hybrid"},
        "device": "cpu",
        "precision": "fp32",
        "threads": 1,
        "seed": 0,
        "loader_workers": 1,
        "cases": [case],
    }
    path = tmp_path / "hand.job.json"

    def work(content: dict[str, object]) -> tuple[int, str]:
        path.write_text(json.dumps(content))
        done = subprocess.run(
            [sys.executable, "-m", "d5suite.worker", str(path)],
            env=plugin_environment(),
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr

    code, said = work(job)
    assert code == 0, said
    found = json.loads((tmp_path / "hand.result.json").read_text())["measurements"]
    native = found["by_hand/native_input_pipeline"]
    assert native["extra"]["loader"] == "mx.io.ImageRecordIter"
    assert native["extra"]["format"] == "recordio"
    count = native["extra"]["batches_per_sample"] * len(native["passes"]["time"]["samples"]["samples_s"])
    assert len(native["series"]["wait_s"]) == count
    assert sum(native["series"]["wait_s"]) <= sum(native["passes"]["time"]["samples"]["samples_s"])
    assert found["by_hand/cost_of_loading"]["extra"]["loader"] == "mx.io.ImageRecordIter"

    code, said = work(job | {"loader_workers": 2})
    assert code == 1
    assert "2 loader workers, but this job may use 1 core" in said
    code, said = work(
        job
        | {
            "cases": [
                case
                | {
                    "measurements": ["cost_of_loading"],
                    "dataset": {"kind": "imagenet", "root": str(stores / "tfrecord")},
                }
            ]
        }
    )
    assert code == 1
    assert "MXNet cannot read TFRecord files" in said
