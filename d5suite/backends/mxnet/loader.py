"""MXNet's own image loader, as its users write it: a Gluon dataset over OpenCV, and a `DataLoader` with processes.

The yardstick for d5suite's input pipeline, whose code it does not use. (MXNet's faster loader, `ImageRecordIter`, reads
RecordIO files only.) Images that shrink are resized by OpenCV's area averaging, its way of antialiasing, so pixels are
alike and not equal to the neutral ones; and OpenCV follows a JPEG's EXIF rotation. Imports MXNet, NumPy and, for the
transform's definition only, `d5suite.data`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import numpy as np

from d5suite.backends.mxnet.runtime import mx
from d5suite.data.imagenet import ImageNet
from d5suite.data.transforms import MEAN, STD, EvalTransform, TrainTransform

Transform = TrainTransform | EvalTransform

_BILINEAR, _AREA = 1, 3
"""OpenCV's numbers of its interpolations."""


class ImageFolder(mx.gluon.data.Dataset):
    """Decoded, augmented and normalised images with their labels, asked for by (number of the draw, index)."""

    def __init__(self, files: list[str], labels: list[int], transform: Transform, seed: int) -> None:
        self.files, self.labels, self.transform, self.seed = files, labels, transform, seed

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, draw: tuple[int, int]) -> tuple[Any, int]:
        """One image, float32 (3, size, size), and its label."""
        number, index = draw
        image = mx.image.imread(self.files[index])
        size, flip = self.transform.size, False
        if isinstance(self.transform, TrainTransform):
            rng = np.random.default_rng([self.seed, number])
            top, left, height, width, flip = self.transform.parameters(image.shape[0], image.shape[1], rng)
            interpolation = _AREA if min(height, width) > size else _BILINEAR
            image = mx.image.fixed_crop(image, left, top, width, height, (size, size), interpolation)
        else:
            height, width, top, left = self.transform.parameters(image.shape[0], image.shape[1])
            interpolation = _AREA if height < image.shape[0] else _BILINEAR
            image = mx.image.imresize(image, width, height, interpolation)
            image = mx.image.fixed_crop(image, left, top, size, size)
        if flip:
            image = mx.nd.image.flip_left_right(image)
        return mx.nd.image.normalize(mx.nd.image.to_tensor(image), mean=MEAN, std=STD), self.labels[index]


class EndlessSampler(mx.gluon.data.Sampler):
    """Epoch after epoch without a pause: the workers of a small dataset would otherwise idle at each end."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        rng = np.random.default_rng(self.seed)
        orders = (rng.permutation(self.length).tolist() for _ in itertools.count())
        return enumerate(itertools.chain.from_iterable(orders))


def _batch(samples: list[tuple[Any, int]], context: Any) -> list[Any]:
    """Images and labels, each as one array."""
    images, labels = zip(*samples, strict=True)
    together = mx.nd.empty((len(images), *images[0].shape), ctx=context)
    mx.nd.stack(*images, out=together)
    return [together, mx.nd.ndarray.array(np.array(labels), context, "int64")]


def native_loader(
    dataset: ImageNet, transform: Transform, *, batch_size: int, workers: int, seed: int
) -> Generator[tuple[np.ndarray, np.ndarray], None, None]:
    """Batches without end, in random order.

    Parameters
    ----------
    dataset : ImageNet
    transform : TrainTransform or EvalTransform
    batch_size : int
    workers : int
        Worker processes; 0 works in this one.
    seed : int
        Of the order and of the augmentation.

    Yields
    ------
    images : numpy.ndarray
        float32 (batch_size, 3, size, size): a copy of MXNet's array, which NumPy cannot read, and so complete.
    labels : numpy.ndarray
        int64 (batch_size,).
    """
    images = ImageFolder(dataset.files, dataset.labels.tolist(), transform, seed)
    context = mx.Context("cpu_shared", 0) if workers else mx.cpu()
    loader = mx.gluon.data.DataLoader(
        images,
        batch_size=batch_size,
        sampler=EndlessSampler(len(images), seed),
        last_batch="discard",
        batchify_fn=partial(_batch, context=context),
        num_workers=workers,
    )
    batches = iter(loader)
    try:
        for pixels, classes in batches:
            yield pixels.asnumpy(), classes.asnumpy()
    finally:
        pool = loader._worker_pool if workers else None
        if pool is not None:
            pool.terminate()
            with contextlib.suppress(ValueError):
                pool.join()
