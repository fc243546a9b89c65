"""Decoding: the odd files of ImageNet, broken ones, hostile ones."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from d5suite.data.decode import MAX_PIXELS, decode
from d5suite.errors import DataError


def picture(height: int = 40, width: int = 60) -> Image.Image:
    """A smooth picture, so that JPEG changes it little, with a different ramp in each channel."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([40 + 3 * x, 40 + 4 * y, 200 - 2 * x], axis=-1)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"quality": 95} | options if kind == "JPEG" else options))
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    ihdr = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", ihdr) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_of_each_kind_gives_the_colours_it_was_made_from(tmp_path: Path, mode: str) -> None:
    original = picture().convert(mode)
    file = tmp_path / "a.JPEG"
    file.write_bytes(encoded(original))
    pixels = decode(file)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (40, 60, 3)
    expected = np.asarray(original.convert("RGB"), dtype=int)
    assert np.abs(pixels - expected).mean() < 2.5
    assert pixels.flags.writeable


def test_inverted_cmyk_white_is_white() -> None:
    ink_free = Image.new("CMYK", (16, 16), (0, 0, 0, 0))
    assert decode(encoded(ink_free)).min() == 255


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1"])
def test_png_named_jpeg_is_read_by_its_content(tmp_path: Path, mode: str) -> None:
    original = picture().convert(mode)
    file = tmp_path / "n02105855_2933.JPEG"
    file.write_bytes(encoded(original, "PNG"))
    np.testing.assert_array_equal(decode(file), np.asarray(original.convert("RGB")))


def test_16_bit_grey_keeps_its_high_byte() -> None:
    grey = np.array([[0, 255, 256, 65535]], np.uint16)
    np.testing.assert_array_equal(decode(encoded(Image.fromarray(grey), "PNG"))[0, :, 0], [0, 0, 1, 255])


def test_exif_orientation_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    np.testing.assert_array_equal(decode(encoded(picture(), exif=exif)), decode(encoded(picture())))


WHOLE = {
    "baseline": encoded(picture()),
    "progressive": encoded(picture(), progressive=True),
    "PNG": encoded(picture(), "PNG"),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_file_cut_in_half_is_an_error_naming_it(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "cut.JPEG"
    file.write_bytes(WHOLE[kind][: len(WHOLE[kind]) // 2])
    with pytest.raises(DataError, match=r"cut\.JPEG.*truncated or corrupt"):
        decode(file)


@given(st.sampled_from(sorted(WHOLE)), st.data())
def test_a_file_cut_anywhere_is_an_error_or_complete(kind: str, data: st.DataObject) -> None:
    whole = WHOLE[kind]
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        pixels = decode(cut)
    except DataError:
        return
    np.testing.assert_array_equal(pixels, decode(whole))


@given(st.sampled_from(sorted(WHOLE)), st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=8))
@pytest.mark.filterwarnings("ignore")  # Pillow warns about odd metadata
def test_damaged_bytes_raise_nothing_but_data_errors(kind: str, damage: list[tuple[int, int]]) -> None:
    content = bytearray(WHOLE[kind])
    for place, value in damage:
        content[place % len(content)] = value
    try:
        pixels = decode(bytes(content), max_pixels=1_000_000)
    except DataError:
        return
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3


@pytest.mark.parametrize("content", [b"", b"GIF89a not allowed", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"\0" * 1000])
def test_what_is_no_image_is_an_error(content: bytes) -> None:
    with pytest.raises(DataError):
        decode(content)


def test_an_unreadable_file_is_an_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.JPEG: cannot read"):
        decode(tmp_path / "gone.JPEG")
    with pytest.raises(DataError, match="cannot read"):
        decode(tmp_path)


@pytest.mark.filterwarnings("error")  # Pillow's own bomb warning must not show: ours is the one message
@pytest.mark.parametrize("side", [10_000, 60_000])
def test_an_image_bomb_is_refused_before_it_is_decoded(tmp_path: Path, side: int) -> None:
    bomb = tmp_path / "bomb.JPEG"
    bomb.write_bytes(png_header(side, side))
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as caught:
            decode(bomb)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    for part in ("bomb.JPEG", f"{side} x {side}", f"{MAX_PIXELS:,}"):
        assert part in str(caught.value)


def test_the_limit_is_exact() -> None:
    content = encoded(picture(40, 60))
    assert decode(content, max_pixels=2400).shape == (40, 60, 3)
    with pytest.raises(DataError, match="60 x 40"):
        decode(content, max_pixels=2399)
