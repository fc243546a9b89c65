"""The datasets that a job can name, as batches for training and for evaluation.

May import NumPy and, from d5suite, `data` and `errors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

from d5suite.data.arrays import ArrayBatches
from d5suite.data.arrays import Stream as Stream
from d5suite.data.digits import Digits
from d5suite.data.formats import open_store
from d5suite.data.formats.store import Store
from d5suite.data.imagenet import ImageNet
from d5suite.data.loader import Loader
from d5suite.data.openimages import OpenImages
from d5suite.data.samplers import Ordered, Sampler, Sharded, Shuffled
from d5suite.data.transforms import EvalTransform, TrainTransform
from d5suite.errors import ConfigurationError, DataError

WHOLE = (0, 1)
"""All of the data: shard 0 of 1."""


class DataSource(ABC):
    """A dataset at the size of a network's input.

    Parameters
    ----------
    root : path
        Folder or file; ignored by datasets that come with a library.
    classes : int
        Number of classes to use, from the first.
    shape : tuple of int
        Channels, height and width of the images.
    """

    def __init__(self, root: Path, *, classes: int, shape: tuple[int, int, int]) -> None:
        self.root = root
        self.classes = classes
        self.shape = shape

    @abstractmethod
    def training(self, *, batch_size: int, workers: int, seed: int, shard: tuple[int, int] = WHOLE) -> Stream:
        """Return the training images, augmented and shuffled, in full batches.

        ``shard`` is a rank's number and the number of ranks, whose data are `Sharded`.
        """

    @abstractmethod
    def evaluation(self, *, batch_size: int, workers: int) -> Stream:
        """Return all evaluation images, in order."""


def _part(sampler: Sampler, shard: tuple[int, int], batch_size: int) -> Sampler:
    return sampler if shard == WHOLE else Sharded(sampler, *shard, batch_size)


ImageSet = ImageNet | OpenImages | Store
"""A split of image files or of a store."""


class ImageNetSource(DataSource):
    """Images in ImageNet's layout or converted from it; evaluation takes ``val``."""

    several = False
    evaluation_split = "val"

    @cached_property
    def training_set(self) -> ImageSet:
        """The training images."""
        return self._opened("train")

    @cached_property
    def evaluation_set(self) -> ImageSet:
        """The evaluation images."""
        return self._opened(self.evaluation_split)

    def left_out(self) -> list[str]:
        """Describe what the splits in use leave out of their folders."""
        opened = (value for value in vars(self).values() if isinstance(value, ImageNet | OpenImages))
        return [f"{images.split}: {images.left_out}" for images in opened if images.left_out]

    def _opened(self, split: str) -> ImageSet:
        images = open_store(self.root, split, classes=self.classes)
        several = isinstance(images, OpenImages) or (isinstance(images, Store) and images.several)
        if several != self.several:
            held, wanted = ("several labels", "one label") if several else ("one label", "several labels")
            raise DataError(f"images have {held} here, but this recipe takes {wanted}", where=str(self.root))
        return images

    @property
    def training_transform(self) -> TrainTransform:
        """The transform of training images."""
        return TrainTransform(self.shape[-1])

    def training(self, *, batch_size: int, workers: int, seed: int, shard: tuple[int, int] = WHOLE) -> Stream:
        """See `DataSource.training`."""
        images = self.training_set
        sampler = _part(Shuffled(len(images), seed), shard, batch_size)
        return Loader(
            images, self.training_transform, batch_size=batch_size, workers=workers, seed=seed, sampler=sampler
        )

    def evaluation(self, *, batch_size: int, workers: int) -> Stream:
        """See `DataSource.evaluation`."""
        return Loader(
            self.evaluation_set,
            EvalTransform(self.shape[-1]),
            batch_size=batch_size,
            workers=workers,
            shuffle=False,
            drop_last=False,
        )


class DigitsSource(DataSource):
    """`Digits`, held in memory."""

    def _part(self, split: Literal["train", "test"]) -> Digits:
        channels, height, width = self.shape
        if height != width or self.classes != 10 or channels not in (1, 3):
            raise ConfigurationError(
                f"the digits have 10 classes and square images, not {self.classes} classes of {self.shape} values"
            )
        return Digits(split, size=height, channels=1 if channels == 1 else 3)

    def training(self, *, batch_size: int, workers: int, seed: int, shard: tuple[int, int] = WHOLE) -> Stream:
        """See `DataSource.training`."""
        part = self._part("train")
        sampler = _part(Shuffled(len(part), seed), shard, batch_size)
        return ArrayBatches(part.images, part.labels, sampler, batch_size=batch_size)

    def evaluation(self, *, batch_size: int, workers: int) -> Stream:
        """See `DataSource.evaluation`."""
        part = self._part("test")
        return ArrayBatches(part.images, part.labels, Ordered(len(part)), batch_size=batch_size, drop_last=False)


class OpenImagesSource(ImageNetSource):
    """Images in Open Images' layout or converted from it; evaluation takes ``validation``."""

    several = True
    evaluation_split = "validation"


SOURCES: Mapping[str, type[DataSource]] = {
    "imagenet": ImageNetSource,
    "openimages": OpenImagesSource,
    "digits": DigitsSource,
}
"""Data sources by their names in recipes and jobs."""
