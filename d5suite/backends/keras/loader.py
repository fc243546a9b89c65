"""Keras's own image loader, as its users write it: a `keras.utils.PyDataset` over Pillow, read ahead by threads.

The yardstick for d5suite's input pipeline, whose code it does not use. ``Model.fit`` reads such a dataset through
Keras's queue of batches in order; so does this. Imports Keras, NumPy, Pillow and, for the transform's definition only,
`d5suite.data`.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops
from PIL import Image

from d5suite.data.imagenet import ImageNet
from d5suite.data.transforms import MEAN, STD, EvalTransform, TrainTransform

Transform = TrainTransform | EvalTransform


class ImageBatches(keras.utils.PyDataset):
    """Batches of decoded, augmented and normalised images, epoch after epoch without end.

    Parameters
    ----------
    paths, labels : list
    transform : TrainTransform or EvalTransform
    batch_size : int
    seed : int
        Of the order and of the augmentation.
    channels_first : bool
    **queue
        ``workers`` and ``max_queue_size`` of `keras.utils.PyDataset`.
    """

    def __init__(
        self,
        paths: list[Path],
        labels: np.ndarray,
        transform: Transform,
        batch_size: int,
        seed: int,
        *,
        channels_first: bool,
        **queue: Any,
    ) -> None:
        super().__init__(**queue)
        self.paths, self.labels, self.transform = paths, labels, transform
        self.batch_size, self.seed, self.channels_first = batch_size, seed, channels_first
        self.mean, self.std = np.array(MEAN, np.float32), np.array(STD, np.float32)
        self.order = lru_cache(maxsize=2)(self._order)

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.paths))

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The images float32 (N, size, size, 3), or (N, 3, size, size), and the labels int32 (N,)."""
        places = range(index * self.batch_size, (index + 1) * self.batch_size)
        chosen = [self.order(place // len(self.paths))[place % len(self.paths)] for place in places]
        size = self.transform.size
        images = np.empty((self.batch_size, size, size, 3), np.float32)
        for i, (place, number) in enumerate(zip(places, chosen, strict=True)):
            images[i] = self._pixels(self.paths[number], np.random.default_rng([self.seed, 1, place]))
        images /= 255
        images -= self.mean
        images /= self.std
        return images.transpose(0, 3, 1, 2) if self.channels_first else images, self.labels[chosen].astype(np.int32)

    def _pixels(self, path: Path, rng: np.random.Generator) -> np.ndarray:
        with Image.open(path) as file:
            image = file.convert("RGB")
        size = self.transform.size
        if isinstance(self.transform, TrainTransform):
            top, left, height, width, flip = self.transform.parameters(image.height, image.width, rng)
            image = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
            if flip:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        else:
            height, width, top, left = self.transform.parameters(image.height, image.width)
            image = image.resize((width, height), Image.Resampling.BILINEAR)
            image = image.crop((left, top, left + size, top + size))
        return np.asarray(image)

    @property
    def num_batches(self) -> None:
        """No number: the dataset has no end."""
        return None


def native_loader(
    dataset: ImageNet, transform: Transform, *, batch_size: int, workers: int, seed: int
) -> Generator[tuple[Any, Any], None, None]:
    """Batches without end, in random order.

    Parameters
    ----------
    dataset : ImageNet
    transform : TrainTransform or EvalTransform
    batch_size : int
    workers : int
        Threads that decode, which Pillow lets work side by side; 0 works in this one.
    seed : int
        Of the order and of the augmentation.

    Yields
    ------
    images : tensor of Keras's backend
        float32 (batch_size, size, size, 3), or channels first on PyTorch, on the CPU.
    labels : tensor of Keras's backend
        int32 (batch_size,).
    """
    batches = ImageBatches(
        dataset.paths,
        dataset.labels,
        transform,
        batch_size,
        seed,
        channels_first=keras.backend.backend() == "torch",
        workers=workers,
    )
    for images, labels in _read_ahead(batches) if workers else _one_by_one(batches):
        with keras.device("cpu"):
            yield ops.convert_to_tensor(images), ops.convert_to_tensor(labels)


def _one_by_one(batches: ImageBatches) -> Generator[Any, None, None]:
    index = 0
    while True:
        yield batches[index]
        index += 1


def _read_ahead(batches: ImageBatches) -> Generator[Any, None, None]:
    """The batches through the queue of ``Model.fit``, which has no public name of its own."""
    from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer

    queue = OrderedEnqueuer(batches, workers=batches.workers, max_queue_size=batches.max_queue_size)
    queue.start()
    try:
        yield from queue.get()
    finally:
        queue.stop()
