"""The neutral transforms, against their definition and against independent computations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from d5suite import data
from d5suite.data.transforms import (
    MEAN,
    STD,
    EvalTransform,
    TrainTransform,
    normalise,
    random_resized_crop,
    sample_order,
    sample_rng,
)
from d5suite.errors import ConfigurationError, DataError

sides = st.integers(1, 3000)
seeds = st.integers(0, 2**32)


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def triangle_resize(pixels: np.ndarray, size: int) -> np.ndarray:
    """Antialiased bilinear resize by its definition, in float64 and without intermediate
    rounding."""

    def weights(length: int) -> np.ndarray:
        scale = length / size
        centres = (np.arange(size) + 0.5) * scale
        distance = np.abs(np.arange(length) + 0.5 - centres[:, None]) / max(scale, 1)
        triangle = np.clip(1 - distance, 0, None)
        return triangle / triangle.sum(axis=1, keepdims=True)

    rows = np.tensordot(weights(pixels.shape[0]), pixels.astype(float), 1)  # (size, width, 3)
    return np.tensordot(weights(pixels.shape[1]), rows, (1, 1)).transpose(1, 0, 2)


@given(sides, sides, seeds)
def test_the_crop_lies_inside_the_image(height: int, width: int, seed: int) -> None:
    crop = random_resized_crop(height, width, np.random.default_rng(seed))
    assert crop.height >= 1
    assert crop.width >= 1
    assert 0 <= crop.top <= height - crop.height
    assert 0 <= crop.left <= width - crop.width


@given(st.integers(100, 1000), st.integers(100, 1000), seeds)
def test_the_crop_has_the_published_area_and_ratio(height: int, width: int, seed: int) -> None:
    crop = random_resized_crop(height, width, np.random.default_rng(seed))
    assert 0.98 * 3 / 4 < crop.width / crop.height < 1.02 * 4 / 3
    assert crop.height * crop.width >= 0.07 * min(height * width, min(height, width) ** 2 * 4 / 3)


def test_crops_are_spread_as_published() -> None:
    crops = [random_resized_crop(400, 400, sample_rng(0, 0, index)) for index in range(4000)]
    area = np.array([crop.height * crop.width for crop in crops]) / 400**2
    # The area is uniform on 0.08-1 but for the crops that do not fit; those small enough to fit
    # always are unbiased.
    assert np.mean(area < 0.29) / np.mean((area >= 0.29) & (area < 0.5)) == pytest.approx(1, abs=0.12)
    assert np.mean([crop.flip for crop in crops]) == pytest.approx(0.5, abs=0.03)
    assert {crop.top for crop in crops} >= set(range(100))


@given(seeds, st.integers(0, 10**6), st.integers(0, 2 * 10**6))
def test_random_numbers_depend_on_seed_epoch_and_index_alone(seed: int, epoch: int, index: int) -> None:
    draws = sample_rng(seed, epoch, index).random(4)
    np.testing.assert_array_equal(draws, sample_rng(seed, epoch, index).random(4))
    for other in ((seed + 1, epoch, index), (seed, epoch + 1, index), (seed, epoch, index + 1)):
        assert not np.array_equal(draws, sample_rng(*other).random(4))


@given(seeds, st.integers(0, 1000), st.integers(1, 500))
def test_the_order_is_a_permutation(seed: int, epoch: int, length: int) -> None:
    assert sorted(sample_order(seed, epoch, length).tolist()) == list(range(length))


def test_the_order_changes_with_the_epoch() -> None:
    assert not np.array_equal(sample_order(0, 0, 100), sample_order(0, 1, 100))


@pytest.mark.parametrize(("height", "width"), [(300, 400), (50, 40), (90, 700)])
def test_training_pixels_follow_the_definition(height: int, width: int) -> None:
    image = noise(height, width)
    transform = TrainTransform(64)
    for index in range(8):
        top, left, crop_height, crop_width, flip = transform.parameters(height, width, sample_rng(1, 2, index))
        cut = np.asarray(image)[top : top + crop_height, left : left + crop_width]
        resized = triangle_resize(cut, 64)
        expected = (resized[:, ::-1] if flip else resized).transpose(2, 0, 1) / 255
        actual = transform(image, sample_rng(1, 2, index))
        assert actual.dtype == np.float32
        assert actual.shape == (3, 64, 64)
        restored = actual * np.array(STD)[:, None, None] + np.array(MEAN)[:, None, None]
        assert np.abs(restored - expected).max() < 1.6 / 255  # two roundings to 8 bits


def test_both_flips_and_the_given_output_are_used() -> None:
    image, transform, out = noise(80, 80), TrainTransform(32), np.zeros((3, 32, 32), np.float32)
    flips = {transform.parameters(80, 80, sample_rng(0, 0, index)).flip for index in range(20)}
    assert flips == {True, False}
    assert transform(image, sample_rng(0, 0, 0), out) is out
    np.testing.assert_array_equal(out, transform(image, sample_rng(0, 0, 0)))


def test_normalising_every_value() -> None:
    values = np.arange(256, dtype=np.uint8)[None, :, None].repeat(3, axis=2)
    expected = (np.arange(256)[None] / 255 - np.array(MEAN)[:, None]) / np.array(STD)[:, None]
    np.testing.assert_allclose(normalise(values)[:, 0], expected, rtol=0, atol=4e-7)


@pytest.mark.parametrize(
    ("height", "width", "parameters"),
    # From torchvision's Resize(256) and CenterCrop(224): the long side is cut to a whole number,
    # the offset rounded.
    [
        (375, 500, (256, 341, 16, 58)),
        (500, 375, (341, 256, 58, 16)),
        (256, 256, (256, 256, 16, 16)),
        (100, 333, (256, 852, 16, 314)),
    ],
)
def test_evaluation_geometry(height: int, width: int, parameters: tuple[int, int, int, int]) -> None:
    assert EvalTransform(224).resize == 256
    assert EvalTransform(224).parameters(height, width) == parameters


def test_evaluation_pixels_are_the_centre_of_the_resized_image() -> None:
    image = noise(375, 500)
    whole = np.asarray(image.resize((341, 256), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(EvalTransform(224)(image), normalise(whole[16:240, 58:282]))


@given(st.integers(1, 2000), st.integers(1, 2000), st.sampled_from([32, 64, 97, 224]))
def test_evaluation_crop_always_fits(height: int, width: int, size: int) -> None:
    resized_height, resized_width, top, left = EvalTransform(size).parameters(height, width)
    assert min(resized_height, resized_width) == round(size * 256 / 224)
    assert 0 <= top <= resized_height - size
    assert 0 <= left <= resized_width - size


def test_sizes_out_of_range() -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        TrainTransform(0)
    with pytest.raises(ConfigurationError, match="smaller than the crop"):
        EvalTransform(224, 200)


@pytest.mark.parametrize("shape", [(60000, 2), (2, 60000)])
def test_a_thin_image_is_refused_before_it_fills_the_memory(shape: tuple[int, int]) -> None:
    with pytest.raises(DataError, match=r"pixels become 256 x 7,680,000 when the short side is resized"):
        EvalTransform(224)(Image.new("RGB", shape))


def test_names_of_the_package_are_imported_on_first_use() -> None:
    assert data.EvalTransform is EvalTransform and all(callable(getattr(data, name)) for name in data.__all__)
