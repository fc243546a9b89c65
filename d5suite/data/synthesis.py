"""A small learnable image set in exactly ImageNet's layout, made in seconds.

Each class is a shape, a filling and a colour: "red striped star". The first ten differ from each other in all three; a
thousand classes are all combinations. Within a class position, size, rotation, shade, background and noise vary, so a
network has to learn what the class is, and can.

Among the files are those that trip readers of the real set: a greyscale JPEG, a CMYK JPEG and a PNG named .JPEG.

The same parameters and seed give the same bytes, with the same versions of NumPy and Pillow. Imports NumPy and Pillow.
"""

from __future__ import annotations

import colorsys
import contextlib
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from d5suite.data.imagenet import MAPPING_FILE, VAL_LABELS_FILE
from d5suite.errors import ConfigurationError, DataError

FORMAT_VERSION = 1
"""Raised whenever the same parameters give other files, so that cached sets are made anew."""

SHAPES = ("disc", "square", "triangle", "star", "ring", "cross", "hexagon", "crescent", "diamond", "hourglass")
FILLINGS = (
    "plain", "striped", "chequered", "dotted", "shaded", "hooped", "gridded", "speckled", "slanted", "outlined",
)  # fmt: skip
COLOURS = ("red", "orange", "yellow", "lime", "green", "cyan", "azure", "blue", "violet", "pink")
MAX_CLASSES = len(SHAPES) * len(FILLINGS) * len(COLOURS)
_HUES = (0, 27, 55, 85, 130, 178, 205, 235, 275, 325)  # degrees, of COLOURS


def make_imagenet(
    out: str | os.PathLike[str],
    *,
    classes: int = 10,
    train_per_class: int = 32,
    val_per_class: int = 8,
    seed: int = 0,
    min_side: int = 250,
    max_side: int = 500,
    progress: bool = True,
) -> None:
    """Make an image set with ImageNet's folders, file names and label files.

    The set is made in a temporary folder beside `out` and renamed when complete, so `out` is never half a set.

    Parameters
    ----------
    out : path
        The folder to make; it may exist if it is empty.
    classes : int
        At most 1000.
    train_per_class, val_per_class : int
        Images of each class in ``train/<wnid>/`` and in the flat ``val/``.
    seed : int
        Of everything random.
    min_side, max_side : int
        Range of the height and of the width in pixels.
    progress : bool
        Show a progress bar, if standard error is a terminal.

    Raises
    ------
    DataError
        `out` is not empty, is no folder, or cannot be written.
    ConfigurationError
        A number is out of range.
    """
    for name, value, least, most in (
        ("classes", classes, 1, MAX_CLASSES),
        ("train_per_class", train_per_class, 1, 100_000),
        ("val_per_class", val_per_class, 1, 100_000),
        ("seed", seed, 0, 2**63),
        ("min_side", min_side, 16, max_side),
        ("max_side", max_side, min_side, 10_000),
    ):
        if not least <= value <= most:
            raise ConfigurationError(f"{name} is {value}; it must be from {least} to {most}")
    target = Path(os.path.abspath(out))
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            kind = "the directory is not empty" if target.is_dir() else "exists and is not a directory"
            raise DataError(f"{kind}; nothing was changed", where=str(target), hint="Name a new directory.")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial"))
        try:
            _write_tree(partial, classes, train_per_class, val_per_class, seed, (min_side, max_side), progress)
            partial.chmod(0o755)
            os.rename(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(f"cannot make the image set: {error.strerror or error}", where=str(target)) from None


def cached_imagenet(
    classes: int = 10,
    train_per_class: int = 32,
    val_per_class: int = 8,
    *,
    seed: int = 0,
    min_side: int = 250,
    max_side: int = 500,
    progress: bool = True,
) -> Path:
    """Return the folder of the image set with these parameters, made by `make_imagenet` when first asked for.

    It lies in ``$D5SUITE_CACHE``, else ``$XDG_CACHE_HOME/d5suite``, else ``~/.cache/d5suite``. When several processes
    ask at once, one makes it and the others wait.

    Raises
    ------
    DataError
        The cache folder cannot be written.
    """
    cache = cache_folder()
    name = f"imagenet-v{FORMAT_VERSION}-{classes}x{train_per_class}+{val_per_class}-{min_side}-{max_side}px-seed{seed}"
    target = cache / name
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{name}.lock"):
            if not target.is_dir():
                for leftover in cache.glob(f".{name}.*.partial"):  # of a process that was killed
                    shutil.rmtree(leftover, ignore_errors=True)
                make_imagenet(
                    target,
                    classes=classes,
                    train_per_class=train_per_class,
                    val_per_class=val_per_class,
                    seed=seed,
                    min_side=min_side,
                    max_side=max_side,
                    progress=progress,
                )
    except OSError as error:
        raise DataError(
            f"the cache cannot be written: {error.strerror or error}",
            where=str(cache),
            hint="Set D5SUITE_CACHE to a folder that can.",
        ) from None
    return target


def cache_folder() -> Path:
    """Return the folder for files that d5suite makes once and reuses; it need not exist."""
    if own := os.environ.get("D5SUITE_CACHE"):
        return Path(os.path.abspath(own))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "d5suite"


def class_name(label: int) -> str:
    """Return what the images of a class show, like "red plain disc"."""
    shape, filling, colour = _looks(label)
    return f"{COLOURS[colour]} {FILLINGS[filling]} {SHAPES[shape]}"


def draw(label: int, height: int, width: int, rng: np.random.Generator) -> Image.Image:
    """Draw one image of a class: RGB, of this height and width in pixels."""
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
    filled = Image.composite(_plain(dark, (width, height)), _plain(bright, (width, height)), pattern)

    # A muted, smooth background, so that colour alone does not say where the shape is.
    blobs = rng.integers(60, 190, (4, 5, 1)) + rng.integers(-25, 26, (4, 5, 3))
    picture = Image.fromarray(blobs.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    picture.paste(filled, mask=mask)
    strength = int(rng.integers(6, 16))
    noise = rng.integers(-strength, strength + 1, (height, width, 3), dtype=np.int16)
    return Image.fromarray(np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8))


def _looks(label: int) -> tuple[int, int, int]:
    """Return indices of shape, filling and colour; the first ten labels differ in all of them."""
    ones, tens, hundreds = label % 10, label // 10 % 10, label // 100
    return ones, (ones + tens) % 10, (ones + hundreds) % 10


def _wnid(label: int) -> str:
    return f"n{1440764 + 2773 * label:08d}"


def _plain(colour: tuple[float, float, float], size: tuple[int, int]) -> Image.Image:
    return Image.new("RGB", size, tuple(round(255 * value) for value in colour))


def _shape_mask(
    shape: str, extent: tuple[int, int], centre: tuple[float, float], size: float, angle: float
) -> Image.Image:
    """Draw the shape in white on black; `size` is its full width in pixels."""
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
    """Return where the filling is dark, as a mask, in coordinates that turn and grow with the shape."""
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


def _write_tree(
    root: Path,
    classes: int,
    train_per_class: int,
    val_per_class: int,
    seed: int,
    sides: tuple[int, int],
    progress: bool,
) -> None:
    wnids = [_wnid(label) for label in range(classes)]
    names = [f"{wnid} {class_name(label)}\n" for label, wnid in enumerate(wnids)]
    (root / MAPPING_FILE).write_text("".join(names), encoding="utf-8")

    work: list[tuple[str, int, int, int]] = []  # file, label, split, number within the split
    for label, wnid in enumerate(wnids):
        (root / "train" / wnid).mkdir(parents=True)
        work += [(f"train/{wnid}/{wnid}_{number}.JPEG", label, 0, number) for number in range(train_per_class)]
    (root / "val").mkdir()
    val_labels = np.random.default_rng([seed, 1]).permutation(np.repeat(np.arange(classes), val_per_class)).tolist()
    lines = ["ImageId,PredictionString"]
    seen = [0] * classes
    for number, label in enumerate(val_labels, start=1):
        name = f"ILSVRC2012_val_{number:08d}"
        work.append((f"val/{name}.JPEG", label, 1, seen[label]))
        seen[label] += 1
        lines.append(f"{name},{wnids[label]}")
    (root / VAL_LABELS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")

    training = [task[0] for task in work if task[2] == 0]
    odd_files = {training[place * len(training) // 3]: kind for place, kind in enumerate(("L", "CMYK", "PNG"))}

    def write(task: tuple[str, int, int, int]) -> None:
        file, label, split, number = task
        rng = np.random.default_rng([seed, 2, split, label, number])
        height, width = rng.integers(sides[0], sides[1] + 1, 2).tolist()
        image = draw(label, height, width, rng)
        kind = odd_files.get(file, "JPEG")
        if kind == "PNG":
            image.save(root / file, "PNG")
        else:
            image = image.convert(kind) if kind != "JPEG" else image
            image.save(root / file, "JPEG", quality=90)

    # Threads, because Pillow and NumPy release the interpreter lock in all that takes long here.
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        for _ in _shown(pool.map(write, work), len(work), progress):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def _shown(items: Iterator[None], total: int, progress: bool) -> Iterator[None]:
    """Pass items on, with a progress bar if wanted and standard error is a terminal."""
    if not (progress and sys.stderr.isatty()):
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, "Making images", total=total, console=Console(stderr=True), transient=True)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock that vanishes with the process, however it ends."""
    import fcntl

    with open(file, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
