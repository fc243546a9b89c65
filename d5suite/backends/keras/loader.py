"""Keras's own image loader, as its users write it: a `keras.utils.PyDataset` over Pillow.

The baseline of d5suite's input pipeline; both share only the transform's definition. Like
``Model.fit``, it reads batches through Keras's ordered queue, which threads fill ahead. The encoded
images come from files, or from an HDF5 file through h5py. Imports Keras, NumPy, Pillow,
`d5suite.levels` and, for transforms and the location of images only, `d5suite.data`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Mapping
from functools import lru_cache
from typing import Any

import keras
import numpy as np
from keras import ops
from PIL import Image

from d5suite.data.formats.store import Store
from d5suite.data.imagenet import ImageNet
from d5suite.data.transforms import MEAN, STD, EvalTransform, TrainTransform, crop_and_resize
from d5suite.levels.loader import EncodedImages

Transform = TrainTransform | EvalTransform

Open = Callable[[int], Image.Image]

NAMES: Mapping[str, str] = {"folder": "keras.utils.PyDataset", "hdf5": "keras.utils.PyDataset over h5py"}
"""The loader's name in reports, by storage format."""


class ImageBatches(keras.utils.PyDataset):
    """Batches of decoded, augmented and normalized images, without end.

    Parameters
    ----------
    open_image : callable
        Takes an image's number; returns the encoded image, open.
    labels : numpy.ndarray
        Label of each image.
    transform : TrainTransform or EvalTransform
    batch_size : int
    seed : int
        Seed of the order and of the augmentation.
    channels_first : bool
    **queue
        ``workers`` and ``max_queue_size`` of `keras.utils.PyDataset`.
    """

    def __init__(
        self,
        open_image: Open,
        labels: np.ndarray,
        transform: Transform,
        batch_size: int,
        seed: int,
        *,
        channels_first: bool,
        **queue: Any,
    ) -> None:
        super().__init__(**queue)
        self.open_image, self.labels, self.transform = open_image, labels, transform
        self.batch_size, self.seed, self.channels_first = batch_size, seed, channels_first
        self.mean, self.std = np.array(MEAN, np.float32), np.array(STD, np.float32)
        self.order = lru_cache(maxsize=2)(self._order)

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.labels))

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return float32 images (N, size, size, 3) or (N, 3, size, size), and int32 labels (N,)."""
        places = range(index * self.batch_size, (index + 1) * self.batch_size)
        chosen = [self.order(place // len(self.labels))[place % len(self.labels)] for place in places]
        size = self.transform.size
        images = np.empty((self.batch_size, size, size, 3), np.float32)
        for i, (place, number) in enumerate(zip(places, chosen, strict=True)):
            images[i] = self._pixels(number, np.random.default_rng([self.seed, 1, place]))
        images /= 255
        images -= self.mean
        images /= self.std
        return images.transpose(0, 3, 1, 2) if self.channels_first else images, self.labels[chosen].astype(np.int32)

    def _pixels(self, number: int, rng: np.random.Generator) -> np.ndarray:
        with self.open_image(number) as file:
            image = file.convert("RGB")
        return np.asarray(crop_and_resize(image, self.transform, rng))

    @property
    def num_batches(self) -> None:
        """None: the dataset has no end."""
        return None


def _encoded(dataset: ImageNet | Store) -> tuple[Open, np.ndarray]:
    """Return a function that opens an image by its number, and the labels."""
    if isinstance(dataset, ImageNet):
        paths = dataset.paths
        return lambda number: Image.open(paths[number]), dataset.labels
    images = EncodedImages(dataset.path, dataset.split, len(dataset.label_names))
    return lambda number: Image.open(io.BytesIO(images.read(number))), images.labels


def native_loader(
    dataset: ImageNet | Store, transform: Transform, *, batch_size: int, workers: int, seed: int
) -> Generator[tuple[Any, Any], None, None]:
    """Yield batches without end, in random order.

    Parameters
    ----------
    dataset : ImageNet or Store
        In a format of `NAMES`.
    transform : TrainTransform or EvalTransform
    batch_size : int
    workers : int
        Decoding threads, which run in parallel because Pillow releases the GIL; 0 decodes in the
        calling thread.
    seed : int
        Seed of the order and of the augmentation.

    Yields
    ------
    images : tensor of Keras's backend
        float32 (batch_size, size, size, 3), or channels first on PyTorch, on the CPU.
    labels : tensor of Keras's backend
        int32 (batch_size,).
    """
    channels_first = keras.backend.backend() == "torch"
    batches = ImageBatches(
        *_encoded(dataset), transform, batch_size, seed, channels_first=channels_first, workers=workers
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
    """Yield the batches through the queue of ``Model.fit``, which has no public name."""
    from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer

    queue = OrderedEnqueuer(batches, workers=batches.workers, max_queue_size=batches.max_queue_size)
    queue.start()
    try:
        yield from queue.get()
    finally:
        queue.stop()
