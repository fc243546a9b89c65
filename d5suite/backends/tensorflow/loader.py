"""TensorFlow's own image loader, as its users write it: a tf.data pipeline.

The baseline of d5suite's input pipeline, whose code it does not use. TensorFlow decodes and
resizes. Crops follow the neutral transform's distribution, drawn by TensorFlow's generator; of a
JPEG file, only the crop is decoded. Images are resized with antialiasing as in the neutral
transform, but not rounded to 8 bits between the two passes: pixels agree to one level of 255. The
encoded images come from files, or from TFRecord files through TensorFlow's own reader. Imports
TensorFlow and `d5suite.data` (the transform's definition and the files' places only).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from typing import Any

import tensorflow as tf

from d5suite.data.formats.store import CLASSES_FILE, Store
from d5suite.data.imagenet import ImageNet
from d5suite.data.reading import FilePieces
from d5suite.data.transforms import MEAN, STD, EvalTransform, TrainTransform

Transform = TrainTransform | EvalTransform

NAMES: Mapping[str, str] = {"folder": "tf.data", "tfrecord": "tf.data.TFRecordDataset"}
"""The loader's name in reports, by storage format."""

_DCT = "INTEGER_ACCURATE"

_MOST_SHUFFLED = 10_000
"""Size of the shuffle buffer, which is in memory: as in TensorFlow's own ResNet-50 for ImageNet."""

_FILES_AT_ONCE = 10
"""Record files that are interleaved: as in TensorFlow's own ResNet-50 for ImageNet."""


def _random_resized_crop(height: Any, width: Any) -> Any:
    """Return the first of ten random crops that fits, else the largest centred crop.

    A crop is a tensor (top, left, height, width).
    """
    tall, wide = tf.cast(height, tf.float32), tf.cast(width, tf.float32)
    area = tall * wide * tf.random.uniform([10], 0.08, 1.0)
    ratio = tf.exp(tf.random.uniform([10], math.log(3 / 4), math.log(4 / 3)))
    widths = tf.cast(tf.round(tf.sqrt(area * ratio)), tf.int32)
    heights = tf.cast(tf.round(tf.sqrt(area / ratio)), tf.int32)
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    first = tf.argmax(fits)
    found = fits[first]
    widest = tf.minimum(width, tf.cast(tf.round(tall * (4 / 3)), tf.int32))
    tallest = tf.minimum(height, tf.cast(tf.round(wide / (3 / 4)), tf.int32))
    crop_height, crop_width = tf.where(found, heights[first], tallest), tf.where(found, widths[first], widest)
    free_height, free_width = height - crop_height, width - crop_width
    top = tf.where(found, tf.random.uniform([], 0, free_height + 1, tf.int32), free_height // 2)
    left = tf.where(found, tf.random.uniform([], 0, free_width + 1, tf.int32), free_width // 2)
    return tf.stack([top, left, crop_height, crop_width])


def _training_image(content: Any, size: int) -> Any:
    def jpeg() -> Any:
        shape = tf.image.extract_jpeg_shape(content)
        crop = _random_resized_crop(shape[0], shape[1])
        return tf.image.decode_and_crop_jpeg(content, crop, channels=3, dct_method=_DCT)

    def png() -> Any:
        image = tf.image.decode_png(content, channels=3)
        top, left, height, width = tf.unstack(_random_resized_crop(tf.shape(image)[0], tf.shape(image)[1]))
        return image[top : top + height, left : left + width]

    image = tf.cond(tf.image.is_jpeg(content), jpeg, png)
    image = tf.image.resize(image, [size, size], antialias=True)
    return tf.image.random_flip_left_right(image)


def _evaluation_image(content: Any, size: int, resize: int) -> Any:
    image = tf.cond(
        tf.image.is_jpeg(content),
        lambda: tf.image.decode_jpeg(content, channels=3, dct_method=_DCT),
        lambda: tf.image.decode_png(content, channels=3),
    )
    shape = tf.shape(image)[:2]
    resized = resize * shape // tf.reduce_min(shape)
    image = tf.image.resize(image, resized, antialias=True)
    top, left = tf.unstack(tf.cast(tf.round((resized - size) / 2), tf.int32))
    return image[top : top + size, left : left + size]


def _items(dataset: ImageNet | Store, seed: int) -> tuple[Any, Callable[..., tuple[Any, Any]]]:
    """Return shuffled files or records, and a function that reads image and label from one."""
    if isinstance(dataset, ImageNet):
        files = tf.data.Dataset.from_tensor_slices((dataset.files, dataset.labels))
        return files.shuffle(len(dataset), seed=seed), lambda file, label: (tf.io.read_file(file), label)
    assert isinstance(dataset.files, FilePieces)
    files = tf.data.Dataset.from_tensor_slices(dataset.files.files).shuffle(len(dataset.files.files), seed=seed)
    records = files.interleave(tf.data.TFRecordDataset, cycle_length=_FILES_AT_ONCE)
    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }
    first = 0 if (dataset.path / CLASSES_FILE).exists() else 1  # TensorFlow's own scripts count labels from 1

    def read(record: Any) -> tuple[Any, Any]:
        example = tf.io.parse_single_example(record, features)
        return example["image/encoded"], example["image/class/label"] - first

    return records.shuffle(min(len(dataset), _MOST_SHUFFLED), seed=seed), read


def native_loader(
    dataset: ImageNet | Store, transform: Transform, *, batch_size: int, workers: int, seed: int
) -> Generator[tuple[tf.Tensor, tf.Tensor], None, None]:
    """Yield batches without end, in random order.

    Parameters
    ----------
    dataset : ImageNet or Store
        In a format of `NAMES`; record files are read whole, whichever classes are chosen.
    transform : TrainTransform or EvalTransform
    batch_size : int
    workers : int
        Decoding threads; 0 means one.
    seed : int
        Seed of the order; the augmentation follows TensorFlow's global seed.

    Yields
    ------
    images : tf.Tensor
        float32 (batch_size, size, size, 3) on the CPU.
    labels : tf.Tensor
        int64 (batch_size,).
    """
    mean, deviation = 255 * tf.constant(MEAN), 255 * tf.constant(STD)

    def load(*item: Any) -> tuple[Any, Any]:
        content, label = read(*item)
        if isinstance(transform, TrainTransform):
            image = _training_image(content, transform.size)
        else:
            image = _evaluation_image(content, transform.size, transform.resize)
        return tf.ensure_shape((image - mean) / deviation, [transform.size, transform.size, 3]), label

    options = tf.data.Options()
    options.threading.private_threadpool_size = max(workers, 1)
    with tf.device("/CPU:0"):
        items, read = _items(dataset, seed)
        batches = (
            items.repeat()
            .map(load, num_parallel_calls=max(workers, 1), deterministic=True)
            .batch(batch_size, drop_remainder=True)
            .prefetch(2)
            .with_options(options)
        )
        yield from batches
