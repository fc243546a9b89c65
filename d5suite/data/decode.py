"""Decode an image file to RGB pixels; the file may be broken or hostile.

The pixels are the same for every backend and machine with the same Pillow:

- JPEG is decoded by libjpeg-turbo at full size with its accurate integer transform, which gives the
  same bits with and without SIMD. Colour profiles are ignored.
- Greyscale is repeated into three channels. CMYK and YCCK are taken as inverted (as Adobe's
  programs write them, and as all such files in ImageNet are) and converted by R = (1 - C)(1 - K).
- EXIF orientation is ignored, as in the frameworks' reference pipelines behind the published
  accuracies.
- A PNG is read whatever its name says (ImageNet has one named .JPEG). Its transparency is dropped.

May import NumPy and Pillow. Only Pillow's JPEG and PNG readers see a file, so an untrusted one
cannot reach the readers of other formats.
"""

from __future__ import annotations

import io
import os

import numpy as np
from PIL import Image, JpegImagePlugin, PngImagePlugin

from d5suite.errors import DataError

MAX_PIXELS = 1024**3 // 4 // 3
"""The largest image decoded, in pixels (89,478,485): 256 MiB of RGB, Pillow's own threshold."""

_JPEG_START = b"\xff\xd8\xff"
_PNG_START = b"\x89PNG\r\n\x1a\n"


def decode(source: str | os.PathLike[str] | bytes, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode a JPEG or PNG image.

    Parameters
    ----------
    source : path or bytes
        The file, or its content.
    max_pixels : int
        Refuse larger images by their header, before any pixel is decoded.

    Returns
    -------
    numpy.ndarray
        uint8, shape (height, width, 3), RGB.

    Raises
    ------
    DataError
        If the file cannot be read, is truncated or corrupt, is neither JPEG nor PNG, or is larger
        than `max_pixels`.
    """
    return np.array(decode_image(source, max_pixels=max_pixels))


def decode_image(
    source: str | os.PathLike[str] | bytes, *, max_pixels: int = MAX_PIXELS, where: str | None = None
) -> Image.Image:
    """Decode like `decode` to a Pillow image of mode RGB, which saves a copy before resizing.

    `where` names the image in errors, by default its path.
    """
    where = where or ("<bytes>" if isinstance(source, bytes) else os.fspath(source))
    try:
        if isinstance(source, bytes):
            content = source
        else:
            with open(source, "rb") as file:
                content = file.read()
    except OSError as error:
        raise DataError(f"cannot read the image: {error.strerror or error}", where=where) from None

    try:
        image = _opened(content)
        if image is None:
            kind = "empty file" if not content else "neither JPEG nor PNG"
            raise DataError(kind, where=where, hint="Replace the file, or remove it from the dataset.")
        width, height = image.size
        if width * height > max_pixels:
            raise DataError(
                f"the header declares {width} x {height} pixels ({width * height:,}), "
                f"more than the limit of {max_pixels:,}; not decoded",
                where=where,
                hint="Make the image smaller, or remove it from the dataset.",
            )
        image.load()
        if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip at 255
            image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
        return image if image.mode == "RGB" else image.convert("RGB")
    except DataError:
        raise
    except Exception as error:  # Pillow's readers raise many types: OSError, SyntaxError, ValueError, struct.error, ...
        raise DataError(
            f"truncated or corrupt image: {error}",
            where=where,
            hint="Fetch the file again, or remove it from the dataset.",
        ) from error


def header(content: bytes) -> tuple[str, int, int] | None:
    """Return the format (``JPEG``, ``PNG``), height and width of an image; None for other data."""
    try:
        image = _opened(content)
    except Exception:  # as in `decode_image`
        return None
    return (str(image.format), image.height, image.width) if image else None


def _opened(content: bytes) -> Image.Image | None:
    """Read the header of a JPEG or PNG; return None for anything else."""
    if content.startswith(_JPEG_START):
        return JpegImagePlugin.JpegImageFile(io.BytesIO(content))
    if content.startswith(_PNG_START):
        return PngImagePlugin.PngImageFile(io.BytesIO(content))
    return None
