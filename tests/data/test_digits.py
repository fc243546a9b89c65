"""The digits that come with scikit-learn, in their fixed split."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from d5suite.data.digits import Digits
from d5suite.errors import ConfigurationError


def levels(part: Digits) -> np.ndarray:
    """The original 8×8 pixels from 0 to 16, which are every third one of the 32, inside the
    frame."""
    core = part.images[:, 0, 5:28:3, 5:28:3]
    return np.rint((core - core.min()) / (core.max() - core.min()) * 16).astype(np.uint8)


def test_the_split_is_fixed_and_stratified() -> None:
    train, test = Digits("train"), Digits("test")
    assert (len(train), len(test)) == (1437, 360)
    shares = np.bincount(test.labels) / np.bincount(np.concatenate([train.labels, test.labels]))
    assert np.all(abs(shares - 0.2) < 0.005)
    # Whatever the version of scikit-learn: accuracies of different machines are of the same images.
    assert hashlib.sha256(test.labels.astype("<i8").tobytes()).hexdigest()[:16] == "4493b2052e7b4258"
    assert hashlib.sha256(levels(test).tobytes()).hexdigest()[:16] == "3cc232bd25364446"


def test_both_parts_are_the_whole_set() -> None:
    from sklearn.datasets import load_digits

    bundled = load_digits()
    parts = Digits("train"), Digits("test")
    pixels = np.concatenate([levels(part) for part in parts]).reshape(-1, 64)
    ours = np.column_stack([pixels, np.concatenate([part.labels for part in parts])])
    theirs = np.column_stack([bundled.data, bundled.target]).astype(int)
    assert sorted(map(tuple, ours.tolist())) == sorted(map(tuple, theirs.tolist()))


def test_images_are_normalised_by_the_training_part() -> None:
    train, test = Digits("train"), Digits("test")
    assert train.images.dtype == np.float32
    assert train.images.shape == (1437, 1, 32, 32)
    assert train.labels.dtype == np.int64
    assert train.images.mean() == pytest.approx(0, abs=1e-5)
    assert train.images.std() == pytest.approx(1, abs=1e-5)
    assert (test.images.min(), test.images.max()) == (train.images.min(), train.images.max())  # one scale for both


@pytest.mark.parametrize("size", [11, 28, 32, 64])
def test_size_frame_and_channels(size: int) -> None:
    images = Digits("test", size=size, channels=3).images
    assert images.shape == (360, 3, size, size)
    assert np.array_equal(images[:, 0], images[:, 1]) and np.array_equal(images[:, 0], images[:, 2])
    edges = np.concatenate([images[:, 0, 0], images[:, 0, -1], images[:, 0, :, 0], images[:, 0, :, -1]])
    assert np.all(edges == images.min())
    inked = (images[:, 0] > images.min()).any(axis=0)
    assert inked.any(axis=0).sum() == inked.any(axis=1).sum() == size * 3 // 4
    between = images[:, 0, size // 2 - 1 : size // 2 + 1].mean(axis=(1, 2))
    assert np.corrcoef(between, Digits("test").images[:, 0, 15:17].mean(axis=(1, 2)))[0, 1] > 0.9


def test_settings_out_of_range() -> None:
    with pytest.raises(ConfigurationError, match="train and test"):
        Digits("val")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="at least 11"):
        Digits("test", size=10)
    with pytest.raises(ConfigurationError, match="1 or 3"):
        Digits("test", channels=4)
