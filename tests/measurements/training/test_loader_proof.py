"""A framework's own loader that gives other images than it should is no result."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from d5suite.data.transforms import EvalTransform
from d5suite.errors import ValidationError
from d5suite.measurements.training import loaders
from d5suite.measurements.training.loader_proof import prove_known_images
from d5suite.measurements.training.native_pipeline import NativeInputPipeline
from d5suite.validate.check import Validation

SIZE = 32

FAULTS = {
    "bgr": "not red, green, blue.*what should be blue is channel 1 of 3",
    "normalised by a tenth too much": "normalisation of",
    "an eighth of the resolution": "resolution lost",
    "an eighth of the JPEG": "resolution lost",
    "all labels 0": "labels of .* first: 0 instead of",
    "labels of the next image": "labels of",
    "with replacement": "repeats or leaves out within an epoch",
    "half of an epoch": "repeats or leaves out within an epoch",
    "one order": "is the same in each epoch",
    "sorted": "is the same in each epoch",
    "no augmentation": "augmentation of .*: mirrored images",
    "no crops": "augmentation of .*: mean area of crops",
    "never mirrored": "augmentation of .*: mirrored images",
    "one crop per place in a batch": "augmentation of",
}


def faulty(fault: str) -> Any:
    """Return a loader over Pillow with a fault, in the way of an adapter's ``native_loader``."""

    def loader(dataset: Any, transform: Any, *, batch_size: int, workers: int, seed: int) -> Iterator[Any]:
        def image(number: int, rng: np.random.Generator) -> np.ndarray:
            file = Image.open(dataset.files[number])
            picture: Image.Image = file
            if fault == "an eighth of the JPEG":
                file.draft("RGB", (file.width // 8, file.height // 8))
                picture = picture.resize((SIZE + 8, SIZE + 8))
            if fault == "no augmentation":
                return EvalTransform(SIZE)(picture)
            if fault == "no crops":
                picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else picture
                return EvalTransform(SIZE)(picture)
            if fault == "never mirrored":
                crop = transform.parameters(picture.height, picture.width, rng)
                box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
                return EvalTransform(SIZE, SIZE)(picture.crop(box).resize((SIZE, SIZE), Image.Resampling.BILINEAR))
            found: np.ndarray = transform(picture, rng)
            if fault == "bgr":
                found = found[::-1]
            if fault == "normalised by a tenth too much":
                found = found / 1.1
            if fault == "an eighth of the resolution":
                found = np.repeat(np.repeat(found[:, 4::8, 4::8], 8, 1), 8, 2)
            return found

        count, rng = len(dataset), np.random.default_rng(seed)

        def order(epoch: int) -> np.ndarray:
            if fault == "with replacement":
                return rng.integers(0, count, count)
            if fault == "half of an epoch":
                return rng.permutation(count)[: count // 2]
            if fault == "sorted":
                return np.arange(count)
            return np.random.default_rng(0 if fault == "one order" else epoch).permutation(count)

        numbers = itertools.chain.from_iterable(order(epoch) for epoch in itertools.count())
        while chosen := list(itertools.islice(numbers, batch_size)):
            draws = [
                np.random.default_rng(place) if fault == "one crop per place in a batch" else rng
                for place in range(batch_size)
            ]
            images = np.stack([image(number, draw) for number, draw in zip(chosen, draws, strict=True)])
            labels = dataset.labels[chosen]
            if fault == "all labels 0":
                labels = np.zeros_like(labels)
            if fault == "labels of the next image":
                labels = np.roll(labels, 1)
            yield images, labels

    return loader


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_of_known_images(fault: str) -> None:
    checks = prove_known_images(faulty(fault), stored="folder", size=SIZE, workers=0, seed=0)
    if fault:
        with pytest.raises(ValidationError, match=FAULTS[fault]):
            Validation().require(checks)
    else:
        Validation().require(checks)


def test_a_recipe_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = np.random.default_rng(0).standard_normal((4, 3, SIZE, SIZE), np.float32), np.arange(4)
    workload: Any = SimpleNamespace(
        case=SimpleNamespace(batch_size=4, network={"classes": 4}),
        batches=[(images, labels)],
        stored_as="folder",
        job=SimpleNamespace(loader_workers=1, seed=0),
        backend=SimpleNamespace(load=lambda module: SimpleNamespace(native_loader=faulty("bgr"))),
        once=lambda name, checks: checks(),
    )

    def own(workload: Any) -> Iterator[Any]:
        yield images, labels

    monkeypatch.setattr(loaders, "native_loader", own)
    with pytest.raises(ValidationError, match="not red, green, blue"):
        Validation().require(NativeInputPipeline().prove(workload, SimpleNamespace()))  # type: ignore[arg-type]
