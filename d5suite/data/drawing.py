"""Draw images of classes that a network can learn: a shape, a filling and a colour.

A class is like "red striped star". The first ten classes differ in shape, filling and colour; a
thousand classes are all combinations. Within a class position, size, rotation, shade, background
and noise vary.

The same generator gives the same pixels, with the same versions of NumPy and Pillow. May import
NumPy and Pillow.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

SHAPES = ("disc", "square", "triangle", "star", "ring", "cross", "hexagon", "crescent", "diamond", "hourglass")
FILLINGS = (
    "plain", "striped", "chequered", "dotted", "shaded", "hooped", "gridded", "speckled", "slanted", "outlined",
)  # fmt: skip
COLOURS = ("red", "orange", "yellow", "lime", "green", "cyan", "azure", "blue", "violet", "pink")
MAX_CLASSES = len(SHAPES) * len(FILLINGS) * len(COLOURS)
_HUES = (0, 27, 55, 85, 130, 178, 205, 235, 275, 325)  # degrees, of COLOURS


def class_name(label: int) -> str:
    """Name what a class shows, like "red plain disc"."""
    shape, filling, colour = _looks(label)
    return f"{COLOURS[colour]} {FILLINGS[filling]} {SHAPES[shape]}"


def draw(label: int, height: int, width: int, rng: np.random.Generator) -> Image.Image:
    """Draw an RGB image of one class; height and width in pixels."""
    filled, mask = _figure(label, height, width, rng)
    picture = _background(height, width, rng)
    picture.paste(filled, mask=mask)
    return _noisy(picture, rng)


def draw_several(labels: Sequence[int], height: int, width: int, rng: np.random.Generator) -> Image.Image:
    """Draw an RGB image of up to four classes, each in a quarter; height and width in pixels."""
    picture = _background(height, width, rng)
    for label, quarter in zip(labels, rng.permutation(4)[: len(labels)].tolist(), strict=True):
        filled, mask = _figure(label, height // 2, width // 2, rng)
        picture.paste(filled, (quarter % 2 * (width // 2), quarter // 2 * (height // 2)), mask)
    return _noisy(picture, rng)


def _figure(label: int, height: int, width: int, rng: np.random.Generator) -> tuple[Image.Image, Image.Image]:
    """Draw a class: its colours over the full extent, and the mask of its shape."""
    shape, filling, colour = _looks(label)
    size = min(height, width) * rng.uniform(0.45, 0.85)
    angle = rng.uniform(-0.35, 0.35)
    centre_x = width / 2 + (width - size) / 2 * rng.uniform(-0.8, 0.8)
    centre_y = height / 2 + (height - size) / 2 * rng.uniform(-0.8, 0.8)

    hue = (_HUES[colour] + rng.uniform(-7, 7)) / 360 % 1
    bright = colorsys.hsv_to_rgb(hue, rng.uniform(0.8, 1), rng.uniform(0.85, 1))
    dark = colorsys.hsv_to_rgb(hue, rng.uniform(0.8, 1), rng.uniform(0.25, 0.4))

    mask = _shape_mask(SHAPES[shape], (height, width), (centre_x, centre_y), size, angle)
    pattern = _pattern(FILLINGS[filling], (height, width), (centre_x, centre_y), size, angle, mask, rng)
    return Image.composite(_plain(dark, (width, height)), _plain(bright, (width, height)), pattern), mask


def _background(height: int, width: int, rng: np.random.Generator) -> Image.Image:
    """Draw a muted, smooth background, so that colour alone does not reveal the shape."""
    blobs = rng.integers(60, 190, (4, 5, 1)) + rng.integers(-25, 26, (4, 5, 3))
    return Image.fromarray(blobs.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)


def _noisy(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    strength = int(rng.integers(6, 16))
    noise = rng.integers(-strength, strength + 1, (picture.height, picture.width, 3), dtype=np.int16)
    return Image.fromarray(np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8))


def _looks(label: int) -> tuple[int, int, int]:
    """Return the indices of shape, filling and colour; the first ten labels differ in all three."""
    ones, tens, hundreds = label % 10, label // 10 % 10, label // 100
    return ones, (ones + tens) % 10, (ones + hundreds) % 10


def _plain(colour: tuple[float, float, float], size: tuple[int, int]) -> Image.Image:
    return Image.new("RGB", size, tuple(round(255 * value) for value in colour))


def _shape_mask(
    shape: str, extent: tuple[int, int], centre: tuple[float, float], size: float, angle: float
) -> Image.Image:
    """Draw a shape in white on black; `size` is its full width in pixels."""
    height, width = extent
    mask = Image.new("L", (width, height))
    pen = ImageDraw.Draw(mask)
    radius = size / 2

    def disc(x: float, y: float, r: float, fill: int) -> None:
        pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)

    def polygon(points: list[tuple[float, float]]) -> None:
        cos, sin = math.cos(angle), math.sin(angle)
        pen.polygon(
            [(centre[0] + radius * (x * cos - y * sin), centre[1] + radius * (x * sin + y * cos)) for x, y in points],
            fill=255,
        )

    def regular(corners: int, inner: float = 1.0) -> list[tuple[float, float]]:
        steps = range(corners)
        radii = [inner if step % 2 else 1.0 for step in steps]
        turns = [2 * math.pi * step / corners - math.pi / 2 for step in steps]
        return [(r * math.cos(turn), r * math.sin(turn)) for r, turn in zip(radii, turns, strict=True)]

    third = 1 / 3
    if shape in ("disc", "ring", "crescent"):
        disc(*centre, radius, 255)
        if shape == "ring":
            disc(*centre, radius * 0.55, 0)
        elif shape == "crescent":
            bite = radius / 2
            disc(centre[0] + bite * math.cos(angle), centre[1] + bite * math.sin(angle), radius * 0.8, 0)
    elif shape == "cross":
        polygon([(-third, -1), (third, -1), (third, 1), (-third, 1)])
        polygon([(-1, -third), (-1, third), (1, third), (1, -third)])
    else:
        corners: dict[str, list[tuple[float, float]]] = {
            "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
            "triangle": regular(3),
            "star": regular(10, inner=0.42),
            "hexagon": regular(6),
            "diamond": [(0, -1), (0.6, 0), (0, 1), (-0.6, 0)],
            "hourglass": [(-0.8, -1), (0.8, -1), (-0.8, 1), (0.8, 1)],
        }
        polygon(corners[shape])
    return mask


def _pattern(
    filling: str,
    extent: tuple[int, int],
    centre: tuple[float, float],
    size: float,
    angle: float,
    mask: Image.Image,
    rng: np.random.Generator,
) -> Image.Image:
    """Return a mask of where the filling is dark; the pattern turns and scales with the shape."""
    height, width = extent
    if filling == "plain":
        return Image.new("L", (width, height))
    if filling == "outlined":
        smaller = mask.resize((max(1, round(width * 0.72)), max(1, round(height * 0.72))))
        inside = Image.new("L", (width, height))
        inside.paste(smaller, (round(centre[0] * 0.28), round(centre[1] * 0.28)))
        return inside
    if filling == "speckled":
        cells = rng.integers(0, 2, (24, 24), dtype=np.uint8) * np.uint8(255)
        return Image.fromarray(cells).resize((width, height), Image.Resampling.NEAREST)
    y, x = np.ogrid[:height, :width]
    x = ((x - centre[0]) / size).astype(np.float32)
    y = ((y - centre[1]) / size).astype(np.float32)
    across = x * np.float32(math.cos(angle)) + y * np.float32(math.sin(angle))
    down = y * np.float32(math.cos(angle)) - x * np.float32(math.sin(angle))
    shift = np.float32(rng.uniform(0, 1))
    u, v = across * 7 + shift, down * 7 + shift  # seven periods over the shape
    if filling == "shaded":
        return Image.fromarray((np.clip(down + 0.5, 0, 1) * 255).astype(np.uint8))
    half = np.float32(0.5)
    dark = {
        "striped": lambda: u % 1 < half,
        "hooped": lambda: np.sqrt(across**2 + down**2) * 8 % 1 < half,
        "chequered": lambda: (u % 1 < half) ^ (v % 1 < half),
        "dotted": lambda: (u % 1 - half) ** 2 + (v % 1 - half) ** 2 < np.float32(0.1),
        "gridded": lambda: (u % 1 < np.float32(0.25)) | (v % 1 < np.float32(0.25)),
        "slanted": lambda: (u + v) * np.float32(0.7) % 1 < half,
    }[filling]()
    return Image.fromarray(dark.astype(np.uint8) * np.uint8(255))
