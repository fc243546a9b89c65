"""Handwritten digits bundled with scikit-learn: no download, and trained in a minute anywhere.

The test part of the UCI set "Optical recognition of handwritten digits" (E. Alpaydin and C. Kaynak,
1998): 1,797 images of 8×8 pixels with 17 levels of grey. May import NumPy and, inside functions,
scikit-learn.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from d5suite.errors import ConfigurationError

SIZE = 32
"""Height and width in pixels of the images that LeNet-5 takes."""

TEST_IMAGES = 360
"""The number of images reserved for testing."""

SPLIT_SEED = 0
"""The seed of the fixed split."""

_LEAST_SIZE = 11  # three quarters are 8


class Digits:
    """1,437 digits to train on, or 360 to test on, stratified by digit.

    The split is fixed: scikit-learn's ``train_test_split`` with ``test_size=360``, ``stratify`` by
    digit and ``random_state=0``. The set does not identify writers, so both parts may hold digits
    of one writer.

    Parameters
    ----------
    split : {"train", "test"}
        Which images.
    size : int
        Height and width in pixels, at least 11. A digit is enlarged to three quarters of this size
        by linear interpolation, within a blank margin, as LeNet-5's digits of 20 pixels were
        centred in 32.
    channels : {1, 3}
        3 repeats the grey value, for networks that take colour.

    Attributes
    ----------
    images : numpy.ndarray
        float32 (N, channels, size, size); mean 0 and standard deviation 1 over the training images.
    labels : numpy.ndarray
        int64 (N,), the digit.

    Raises
    ------
    ConfigurationError
        For another split, size or number of channels.
    """

    def __init__(self, split: Literal["train", "test"], *, size: int = SIZE, channels: int = 1) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        if split not in ("train", "test"):
            raise ConfigurationError(f"unknown split {split!r}", hint="The splits are train and test.")
        if size < _LEAST_SIZE:
            raise ConfigurationError(f"size is {size}; it must be at least {_LEAST_SIZE}")
        if channels not in (1, 3):
            raise ConfigurationError(f"channels is {channels}; it must be 1 or 3")
        bundled = load_digits()
        train, test, train_labels, test_labels = train_test_split(
            bundled.images, bundled.target, test_size=TEST_IMAGES, stratify=bundled.target, random_state=SPLIT_SEED
        )
        pixels, labels = (train, train_labels) if split == "train" else (test, test_labels)
        enlarge = _enlarging(size)
        grey = enlarge @ pixels @ enlarge.T
        reference = grey if split == "train" else enlarge @ train @ enlarge.T
        grey = (grey - reference.mean()) / reference.std()
        self.images = np.repeat(grey[:, None], channels, axis=1).astype(np.float32)
        self.labels = labels.astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)


def _enlarging(size: int) -> np.ndarray:
    """Return the matrix (size, 8) that enlarges one axis of 8 pixels; its margin is 0 (blank)."""
    inner = size * 3 // 4
    places = np.clip((np.arange(inner) + 0.5) * (8 / inner) - 0.5, 0, 7)
    matrix = np.zeros((size, 8))
    start = (size - inner) // 2
    matrix[start : start + inner] = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(8)))
    return matrix


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return all images and labels, in the set's own order.

    Returns
    -------
    images : numpy.ndarray
        float32 (1797, 1, 32, 32), of mean 0 and standard deviation 1 over the whole set.
    labels : numpy.ndarray
        int64 (1797,), the digit.
    """
    from sklearn.datasets import load_digits

    bundled = load_digits()
    pixels = bundled.images.astype(np.float64)
    pixels = (pixels - pixels.mean()) / pixels.std()
    images = np.kron(pixels, np.ones((SIZE // 8, SIZE // 8)))[:, None]
    return images.astype(np.float32), bundled.target.astype(np.int64)
