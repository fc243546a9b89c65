"""The datasets that a job can name, as batches for training and for evaluation.

Imports its neighbours and `d5suite.errors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from d5suite.data.arrays import ArrayBatches
from d5suite.data.digits import Digits
from d5suite.data.formats import open_store
from d5suite.data.formats.store import Store
from d5suite.data.imagenet import ImageNet
from d5suite.data.loader import Loader
from d5suite.data.openimages import OpenImages
from d5suite.data.samplers import Ordered, Shuffled
from d5suite.data.transforms import EvalTransform, TrainTransform
from d5suite.errors import ConfigurationError, DataError

Batch = tuple[np.ndarray, np.ndarray]
"""Images float32 (N, C, H, W), and labels int64 (N,) or (N, classes)."""


class Stream(Protocol, AbstractContextManager["Stream"]):
    """Batches, to be closed after use."""

    def __len__(self) -> int:
        """Batches per epoch."""

    def epoch(self, number: int, *, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from 0 on, without its first ``start``."""

    def batches(self, first_epoch: int = 0) -> Iterator[Batch]:
        """Batches without end."""


class Source(ABC):
    """A dataset at the size that a network takes.

    Parameters
    ----------
    root : path
        Where it lies; datasets that come with a library have none.
    classes : int
        Its first so many classes.
    shape : tuple of int
        Channels, height and width of the images.
    """

    def __init__(self, root: Path, *, classes: int, shape: tuple[int, int, int]) -> None:
        self.root = root
        self.classes = classes
        self.shape = shape

    @abstractmethod
    def training(self, *, batch_size: int, workers: int, seed: int) -> Stream:
        """The training images, augmented where that is usual, in a new order every epoch, in whole batches."""

    @abstractmethod
    def evaluation(self, *, batch_size: int, workers: int) -> Stream:
        """The images to evaluate on, in their own order, all of them."""


Images = ImageNet | OpenImages | Store
"""A split of image files, or of their bytes in a store."""


class ImageNetSource(Source):
    """Images in ImageNet's layout or converted from it: trained on ``train``, evaluated on ``val``."""

    several = False
    evaluation_split = "val"

    @cached_property
    def training_set(self) -> Images:
        """The training images."""
        return self._opened("train")

    @cached_property
    def evaluation_set(self) -> Images:
        """The images to evaluate on."""
        return self._opened(self.evaluation_split)

    def _opened(self, split: str) -> Images:
        images = open_store(self.root, split, classes=self.classes)
        several = isinstance(images, OpenImages) or (isinstance(images, Store) and images.several)
        if several != self.several:
            held, wanted = ("several labels", "one label") if several else ("one label", "several labels")
            raise DataError(f"an image has {held} here, and this recipe takes {wanted}", where=str(self.root))
        return images

    @property
    def training_transform(self) -> TrainTransform:
        """What turns a training file into pixels."""
        return TrainTransform(self.shape[-1])

    def training(self, *, batch_size: int, workers: int, seed: int) -> Stream:
        """See `Source.training`."""
        return Loader(self.training_set, self.training_transform, batch_size=batch_size, workers=workers, seed=seed)

    def evaluation(self, *, batch_size: int, workers: int) -> Stream:
        """See `Source.evaluation`."""
        return Loader(
            self.evaluation_set,
            EvalTransform(self.shape[-1]),
            batch_size=batch_size,
            workers=workers,
            shuffle=False,
            drop_last=False,
        )


class DigitsSource(Source):
    """`Digits`, held in memory."""

    def _part(self, split: Literal["train", "test"]) -> Digits:
        channels, height, width = self.shape
        if height != width or self.classes != 10 or channels not in (1, 3):
            raise ConfigurationError(
                f"the digits have 10 classes and square images, not {self.classes} classes of {self.shape} values"
            )
        return Digits(split, size=height, channels=1 if channels == 1 else 3)

    def training(self, *, batch_size: int, workers: int, seed: int) -> Stream:
        """See `Source.training`."""
        part = self._part("train")
        return ArrayBatches(part.images, part.labels, Shuffled(len(part), seed), batch_size=batch_size)

    def evaluation(self, *, batch_size: int, workers: int) -> Stream:
        """See `Source.evaluation`."""
        part = self._part("test")
        return ArrayBatches(part.images, part.labels, Ordered(len(part)), batch_size=batch_size, drop_last=False)


class OpenImagesSource(ImageNetSource):
    """Images in Open Images' layout or converted from it: trained on ``train``, evaluated on ``validation``."""

    several = True
    evaluation_split = "validation"


SOURCES: Mapping[str, type[Source]] = {
    "imagenet": ImageNetSource,
    "openimages": OpenImagesSource,
    "digits": DigitsSource,
}
"""By the name that recipes and jobs use."""
