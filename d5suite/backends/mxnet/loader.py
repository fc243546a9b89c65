"""MXNet's native image loaders, as its users write them: the baseline for d5suite's input pipeline.

`ImageRecordIter`, which is C++ with threads, reads RecordIO files. A Gluon dataset over OpenCV and
a `DataLoader` with processes read image files and, through h5py, HDF5. Pixels resemble the neutral
ones but differ: OpenCV antialiases by area averaging when images shrink and applies a JPEG's EXIF
rotation, and `ImageRecordIter` rounds the position of a central crop down. Imports MXNet, NumPy,
`d5suite.errors`, `d5suite.levels`, the adapter's `runtime` and, only for the transforms'
definitions and the files' layouts, `d5suite.data`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from multiprocessing.util import get_temp_dir
from typing import Any

import numpy as np

from d5suite.backends.mxnet.runtime import mx
from d5suite.data.formats import open_store, stored_as
from d5suite.data.formats.store import Store
from d5suite.data.imagenet import ImageNet
from d5suite.data.transforms import MEAN, STD, EvalTransform, TrainTransform
from d5suite.errors import ConfigurationError
from d5suite.levels.loader import EncodedImages

Transform = TrainTransform | EvalTransform

NAMES: Mapping[str, str] = {
    "folder": "mx.gluon.data.DataLoader",
    "hdf5": "mx.gluon.data.DataLoader over h5py",
    "recordio": "mx.io.ImageRecordIter",
}
"""The loader's name in reports, by storage format."""

_BILINEAR, _AREA = 1, 3
"""OpenCV's interpolation codes."""

_AUTOMATIC = 9
"""MXNet's interpolation code for area averaging of images that shrink."""


class ImageFolder(mx.gluon.data.Dataset):
    """Decoded, augmented and normalized images with labels; a key is (draw number, index)."""

    def __init__(self, labels: list[int], transform: Transform, seed: int, files: list[str]) -> None:
        self.labels, self.transform, self.seed, self.files = labels, transform, seed, files

    def __len__(self) -> int:
        return len(self.labels)

    def decode(self, index: int) -> Any:
        """Return the pixels of an image: uint8 (height, width, 3)."""
        return mx.image.imread(self.files[index])

    def __getitem__(self, draw: tuple[int, int]) -> tuple[Any, int]:
        """Return one image, float32 (3, size, size), and its label."""
        number, index = draw
        image = self.decode(index)
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


class ImageStore(ImageFolder):
    """An `ImageFolder` whose encoded images come from an HDF5 file."""

    def __init__(self, images: EncodedImages, transform: Transform, seed: int) -> None:
        super().__init__(images.labels.tolist(), transform, seed, [])
        self.images = images

    def decode(self, index: int) -> Any:
        """Return the pixels of an image, whose bytes the HDF5 library reads."""
        return mx.image.imdecode(self.images.read(index))


class EndlessSampler(mx.gluon.data.Sampler):
    """Endless epochs: otherwise the workers of a small dataset would idle at the end of each."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        rng = np.random.default_rng(self.seed)
        orders = (rng.permutation(self.length).tolist() for _ in itertools.count())
        return enumerate(itertools.chain.from_iterable(orders))


def _batch(samples: list[tuple[Any, int]], context: Any) -> list[Any]:
    """Collate images and labels into one array each."""
    images, labels = zip(*samples, strict=True)
    together = mx.nd.empty((len(images), *images[0].shape), ctx=context)
    mx.nd.stack(*images, out=together)
    return [together, mx.nd.ndarray.array(np.array(labels), context, "int64")]


def native_loader(
    dataset: ImageNet | Store, transform: Transform, *, batch_size: int, workers: int, seed: int
) -> Generator[tuple[np.ndarray, np.ndarray], None, None]:
    """Yield batches without end, in random order.

    Parameters
    ----------
    dataset : ImageNet or Store
        In a format of `NAMES`. RecordIO files are read completely, whatever classes are chosen.
    transform : TrainTransform or EvalTransform
    batch_size : int
    workers : int
        Worker processes, or threads for RecordIO files. 0 means this process, or one thread.
    seed : int
        Seed of the order and of the augmentation.

    Yields
    ------
    images : numpy.ndarray
        float32 (batch_size, 3, size, size), copied from MXNet's array, and so computed.
    labels : numpy.ndarray
        int64 (batch_size,).

    Raises
    ------
    ConfigurationError
        With the first batch, if a RecordIO file has fewer images than a batch.
    """
    if not isinstance(dataset, ImageNet) and stored_as(dataset) == "recordio":
        return _records(dataset, transform, batch_size, workers, seed)
    if isinstance(dataset, ImageNet):
        images = ImageFolder(dataset.labels.tolist(), transform, seed, dataset.files)
    else:
        images = ImageStore(EncodedImages(dataset.path, dataset.split, len(dataset.label_names)), transform, seed)
    return _images(images, batch_size, workers, seed)


def _images(
    images: ImageFolder, batch_size: int, workers: int, seed: int
) -> Generator[tuple[np.ndarray, np.ndarray], None, None]:
    context = mx.Context("cpu_shared", 0) if workers else mx.cpu()
    get_temp_dir()  # workers share this folder: they are killed, and would leave their own behind
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


def _records(
    dataset: Store, transform: Transform, batch_size: int, workers: int, seed: int
) -> Generator[tuple[np.ndarray, np.ndarray], None, None]:
    file = dataset.path / f"{dataset.split}.rec"
    index = file.with_suffix(".idx")
    augmentation = (
        {
            "random_resized_crop": True,
            "min_random_area": 0.08,
            "max_random_area": 1.0,
            "min_aspect_ratio": 3 / 4,
            "max_aspect_ratio": 4 / 3,
            "rand_mirror": True,
        }
        if isinstance(transform, TrainTransform)
        else {"resize": transform.resize}
    )
    colours = ("r", "g", "b")
    records = mx.io.ImageRecordIter(
        path_imgrec=str(file),
        # Without an index, images are shuffled only within chunks of the file.
        **({"path_imgidx": str(index)} if index.exists() else {}),
        data_shape=(3, transform.size, transform.size),
        batch_size=batch_size,
        round_batch=False,
        preprocess_threads=max(workers, 1),
        shuffle=True,
        seed=seed,
        verbose=False,
        inter_method=_AUTOMATIC,
        **{f"mean_{colour}": 255 * value for colour, value in zip(colours, MEAN, strict=True)},
        **{f"std_{colour}": 255 * value for colour, value in zip(colours, STD, strict=True)},
        **augmentation,
    )
    # An epoch's last batch, if it is not full, has old images and says pad 0: docs/findings.md.
    whole = len(open_store(dataset.path, dataset.split)) // batch_size
    if not whole:
        raise ConfigurationError(
            f"it has fewer images than a batch of {batch_size}", where=str(file), hint="Give a smaller --batch-size."
        )
    while True:
        for batch in itertools.islice(records, whole):
            yield batch.data[0].asnumpy(), batch.label[0].asnumpy().astype(np.int64)
        records.reset()
