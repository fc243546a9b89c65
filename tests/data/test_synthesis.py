"""The small image set: its layout, its odd files, its determinism, and that it can be learnt."""

from __future__ import annotations

import csv
import hashlib
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import types
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image

from d5suite import files
from d5suite.data.decode import decode, decode_image
from d5suite.data.drawing import MAX_CLASSES, class_name
from d5suite.data.imagenet import ImageNet
from d5suite.data.synthesis import cached_imagenet, make_imagenet
from d5suite.errors import ConfigurationError, DataError

SMALL = {"classes": 10, "train_per_class": 8, "val_per_class": 4, "min_side": 48, "max_side": 96, "progress": False}


def fingerprint(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "imagenet"
    make_imagenet(root, **SMALL)  # type: ignore[arg-type]
    return root


def test_the_layout_is_that_of_imagenet(tree: Path) -> None:
    train, val = ImageNet(tree, "train"), ImageNet(tree, "val")
    assert (len(train), len(val)) == (80, 40)
    assert train.wnids == val.wnids
    assert len(train.wnids) == 10
    assert all(re.fullmatch(r"n\d{8}", wnid) for wnid in train.wnids)
    assert set(Counter(val.labels.tolist()).values()) == {4}
    assert train.class_names[train.wnids[3]] == class_name(3) == "lime dotted star"
    assert sorted(path.name for path in (tree / "val").iterdir())[0] == "ILSVRC2012_val_00000001.JPEG"
    with open(tree / "LOC_val_solution.csv", newline="") as lines:
        assert next(csv.reader(lines)) == ["ImageId", "PredictionString"]


def test_it_holds_the_odd_files_and_varied_sizes(tree: Path) -> None:
    kinds: Counter[tuple[str | None, str]] = Counter()
    sizes = set()
    for path in ImageNet(tree, "train").paths:
        assert path.suffix == ".JPEG"
        with Image.open(path) as image:
            kinds[image.format, image.mode] += 1
            sizes.add(image.size)
        assert decode(path).ndim == 3
    assert kinds == {("JPEG", "RGB"): 77, ("JPEG", "L"): 1, ("JPEG", "CMYK"): 1, ("PNG", "RGB"): 1}
    assert len(sizes) > 60
    assert min(min(size) for size in sizes) >= 48
    assert max(max(size) for size in sizes) <= 96


def test_same_seed_same_bytes(tree: Path, tmp_path: Path) -> None:
    make_imagenet(tmp_path / "again", **SMALL)  # type: ignore[arg-type]
    assert fingerprint(tmp_path / "again") == fingerprint(tree)
    make_imagenet(tmp_path / "other", **SMALL | {"seed": 1})  # type: ignore[arg-type]
    other = fingerprint(tmp_path / "other")
    assert other.keys() == fingerprint(tree).keys()
    assert sum(other[name] == digest for name, digest in fingerprint(tree).items()) == 1  # only the class names


def test_classes_can_be_learnt(tree: Path) -> None:
    """A linear model on coarse colour histograms, fitted on the 80 training images, knows most
    validation images."""

    def features(split: Literal["train", "val"]) -> tuple[np.ndarray, np.ndarray]:
        dataset = ImageNet(tree, split)
        rows = []
        for path in dataset.paths:
            pixels = np.asarray(decode_image(path).resize((32, 32))).reshape(-1, 3)
            rows.append(np.bincount((pixels // 64).astype(int) @ [16, 4, 1], minlength=64) / 1024)
        return np.sqrt(rows), dataset.labels

    (x, y), (x_val, y_val) = features("train"), features("val")
    weights = np.linalg.solve(x.T @ x + 0.01 * np.eye(64), x.T @ np.eye(10)[y])
    assert np.mean((x_val @ weights).argmax(axis=1) == y_val) > 0.6


def test_a_thousand_different_classes(tmp_path: Path) -> None:
    assert len({class_name(label) for label in range(MAX_CLASSES)}) == MAX_CLASSES == 1000
    words = [word for label in range(10) for word in class_name(label).split()]
    assert len(set(words)) == 30  # the first ten differ in colour, filling and shape
    make_imagenet(
        tmp_path / "set", classes=1000, train_per_class=1, val_per_class=1, min_side=16, max_side=20, progress=False
    )
    assert len(ImageNet(tmp_path / "set", "train").wnids) == 1000


def test_an_existing_directory_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="not empty"):
        make_imagenet(out, **SMALL)  # type: ignore[arg-type]
    assert [path.name for path in out.rglob("*")] == ["thesis.txt"]
    with pytest.raises(DataError, match="not a directory"):
        make_imagenet(out / "thesis.txt", **SMALL)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    make_imagenet(out, **SMALL | {"classes": 2, "train_per_class": 1})  # type: ignore[arg-type]
    assert len(ImageNet(out, "train")) == 2
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_failing_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []

    def save(image: Image.Image, *arguments: object, **options: object) -> None:
        saved.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", save)
    with pytest.raises(DataError, match="No space left"):
        make_imagenet(tmp_path / "out", **SMALL)  # type: ignore[arg-type]
    assert saved
    assert list(tmp_path.iterdir()) == []


def test_numbers_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="from 1 to 1000"):
        make_imagenet(tmp_path / "out", classes=1001)
    with pytest.raises(ConfigurationError, match="min_side is 100"):
        make_imagenet(tmp_path / "out", min_side=100, max_side=50)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_keyed_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D5SUITE_CACHE", str(tmp_path / "cache"))
    options = {"min_side": 16, "max_side": 20, "progress": False}
    first = cached_imagenet(2, 1, 1, **options)  # type: ignore[arg-type]
    written = (first / "LOC_synset_mapping.txt").stat().st_mtime_ns
    assert cached_imagenet(2, 1, 1, **options) == first  # type: ignore[arg-type]
    assert (first / "LOC_synset_mapping.txt").stat().st_mtime_ns == written
    assert first.parent == tmp_path / "cache"
    others = {cached_imagenet(3, 1, 1, **options), cached_imagenet(2, 2, 1, **options)}  # type: ignore[arg-type]
    assert len(others | {first, cached_imagenet(2, 1, 1, seed=1, **options)}) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["cut short", "changed", "missing", "another folder missing"])
def test_a_damaged_or_incomplete_drawn_set_is_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    monkeypatch.setenv("D5SUITE_CACHE", str(tmp_path))

    def content() -> dict[Path, bytes]:
        root = cached_imagenet(2, 3, 1, min_side=16, max_side=20, progress=False)
        return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}

    whole = content()
    image = next(path for path in whole if path.suffix == ".JPEG" and path.parent.parent.name == "train")
    if damage == "cut short":
        os.truncate(image, 100)
    elif damage == "changed":
        image.write_bytes(bytes(len(whole[image])))
    elif damage == "missing":
        image.unlink()
    else:
        shutil.rmtree(image.parents[2] / "val")
    assert content() == whole
    assert "damaged or missing checksums" in capsys.readouterr().err
    assert content() == whole
    assert capsys.readouterr().err == ""


def test_who_waits_for_another_process_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(files, "PATIENCE_S", 0.0)
    monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(write=said.put, flush=lambda: None))
    monkeypatch.setenv("D5SUITE_CACHE", str(tmp_path))
    with files.locked(tmp_path / ".x.lock"):  # another open file, as another process has
        waiting = threading.Thread(target=files.made_once, args=("x", lambda target: target.write_bytes(b"x")))
        waiting.start()
        assert "waiting for another process" in said.get(timeout=300)
        assert not (tmp_path / "x").exists()
    waiting.join(300)
    assert (tmp_path / "x").read_bytes() == b"x"


def test_an_unwritable_cache_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("D5SUITE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="D5SUITE_CACHE"):
        cached_imagenet(2, 1, 1)


def test_processes_that_ask_at_once_share_one_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D5SUITE_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    code = (
        "from d5suite.data.synthesis import cached_imagenet; print(cached_imagenet(3, 3, 3, min_side=32, max_side=64))"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [racer.communicate(timeout=300) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0], answers
    assert len({folder for folder, _ in answers}) == 1
    assert len(ImageNet(answers[0][0].strip(), "train")) == 9
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [Path(answers[0][0].strip()).name]
