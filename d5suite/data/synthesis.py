"""Small learnable image sets in exactly the layouts of ImageNet and of Open Images, made in seconds.

Each class is a shape, a filling and a colour: "red striped star". The first ten differ from each other in all three; a
thousand classes are all combinations. Within a class position, size, rotation, shade, background and noise vary, so a
network has to learn what the class is, and can. An image of ImageNet's shows one class, one of Open Images' up to four.

Among the files are those that trip readers of the real sets: a greyscale JPEG, a CMYK JPEG and a PNG named like a JPEG;
in Open Images also labels that are not trainable, and an image of which nobody verified any other label.

The same parameters and seed give the same bytes, with the same versions of NumPy and Pillow. Imports NumPy and Pillow.
"""

from __future__ import annotations

import colorsys
import contextlib
import csv
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image, ImageDraw

from d5suite.data.convert import convert
from d5suite.data.imagenet import MAPPING_FILE, VAL_LABELS_FILE
from d5suite.data.openimages import DESCRIPTIONS_FILE, LABELS_HEADER, SPLITS, TRAINABLE_FILE, labels_file
from d5suite.errors import ConfigurationError, DataError
from d5suite.files import cache_folder

FORMAT_VERSION = 1
"""Raised whenever the same parameters give other files, so that cached sets are made anew."""

SHAPES = ("disc", "square", "triangle", "star", "ring", "cross", "hexagon", "crescent", "diamond", "hourglass")
FILLINGS = (
    "plain", "striped", "chequered", "dotted", "shaded", "hooped", "gridded", "speckled", "slanted", "outlined",
)  # fmt: skip
COLOURS = ("red", "orange", "yellow", "lime", "green", "cyan", "azure", "blue", "violet", "pink")
MAX_CLASSES = len(SHAPES) * len(FILLINGS) * len(COLOURS)
_HUES = (0, 27, 55, 85, 130, 178, 205, 235, 275, 325)  # degrees, of COLOURS
_Task = TypeVar("_Task")
_MOST_SHOWN = 4  # classes in one image of Open Images
_UNTRAINABLE = {"/m/0bl9f": "Drawing", "/m/01mwkf": "Monochrome, or nearly"}


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
    _check_ranges(classes, seed, min_side, max_side, train_per_class=train_per_class, val_per_class=val_per_class)

    def write(root: Path) -> None:
        _write_imagenet(root, classes, train_per_class, val_per_class, seed, (min_side, max_side), progress)

    _make(Path(os.path.abspath(out)), write)


def make_openimages(
    out: str | os.PathLike[str],
    *,
    classes: int = 10,
    train_images: int = 320,
    validation_images: int = 80,
    test_images: int = 80,
    seed: int = 0,
    min_side: int = 250,
    max_side: int = 500,
    progress: bool = True,
) -> None:
    """Make an image set with Open Images' folders, file names and label files.

    An image shows from one to four classes. The first of them is verified as present, each further one with probability
    3/4; as many other classes as are shown, drawn at random, are verified as absent. The rest is unknown. The set is
    made in a temporary folder beside `out` and renamed when complete.

    Parameters
    ----------
    out : path
        The folder to make; it may exist if it is empty.
    classes : int
        At most 1000.
    train_images, validation_images, test_images : int
        Images of each split with labels; there is one more without. Each class in turn is the first one of an image, so
        that every class is present in every split of at least `classes` images.
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
    counts = {"train_images": train_images, "validation_images": validation_images, "test_images": test_images}
    _check_ranges(classes, seed, min_side, max_side, **counts)

    def write(root: Path) -> None:
        _write_openimages(root, classes, tuple(counts.values()), seed, (min_side, max_side), progress)

    _make(Path(os.path.abspath(out)), write)


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
    name = f"imagenet-v{FORMAT_VERSION}-{classes}x{train_per_class}+{val_per_class}-{min_side}-{max_side}px-seed{seed}"
    make = partial(make_imagenet, classes=classes, train_per_class=train_per_class, val_per_class=val_per_class)
    return _cached(name, partial(make, seed=seed, min_side=min_side, max_side=max_side, progress=progress))


def cached_openimages(
    classes: int = 10,
    train_images: int = 320,
    validation_images: int = 80,
    test_images: int = 80,
    *,
    seed: int = 0,
    min_side: int = 250,
    max_side: int = 500,
    progress: bool = True,
) -> Path:
    """Return the folder of the image set with these parameters, made by `make_openimages` when first asked for.

    It lies where `cached_imagenet` puts its own.

    Raises
    ------
    DataError
        The cache folder cannot be written.
    """
    images = f"{train_images}+{validation_images}+{test_images}"
    name = f"openimages-v{FORMAT_VERSION}-{classes}x{images}-{min_side}-{max_side}px-seed{seed}"
    make = partial(
        make_openimages,
        classes=classes,
        train_images=train_images,
        validation_images=validation_images,
        test_images=test_images,
    )
    return _cached(name, partial(make, seed=seed, min_side=min_side, max_side=max_side, progress=progress))


def cached_conversion(source: Path, to: str) -> Path:
    """Return what a set of the cache is in another storage format, converted when it is first asked for.

    It lies beside the set.

    Raises
    ------
    DataError
        The cache folder cannot be written, or as `d5suite.data.convert.convert`.
    """
    return _cached(f"{source.name}-{to}", lambda target: convert(source, target, to))


def class_name(label: int) -> str:
    """Return what the images of a class show, like "red plain disc"."""
    shape, filling, colour = _looks(label)
    return f"{COLOURS[colour]} {FILLINGS[filling]} {SHAPES[shape]}"


def draw(label: int, height: int, width: int, rng: np.random.Generator) -> Image.Image:
    """Draw one image of a class: RGB, of this height and width in pixels."""
    filled, mask = _figure(label, height, width, rng)
    picture = _background(height, width, rng)
    picture.paste(filled, mask=mask)
    return _noisy(picture, rng)


def draw_several(labels: Sequence[int], height: int, width: int, rng: np.random.Generator) -> Image.Image:
    """Draw one image that shows up to four classes, each in a quarter of its own: RGB, of this height and width."""
    picture = _background(height, width, rng)
    for label, quarter in zip(labels, rng.permutation(4)[: len(labels)].tolist(), strict=True):
        filled, mask = _figure(label, height // 2, width // 2, rng)
        picture.paste(filled, (quarter % 2 * (width // 2), quarter // 2 * (height // 2)), mask)
    return _noisy(picture, rng)


def _figure(label: int, height: int, width: int, rng: np.random.Generator) -> tuple[Image.Image, Image.Image]:
    """Draw what a class looks like: its colours on all of this extent, and the mask of where it is."""
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
    """Draw a muted, smooth background, so that colour alone does not say where a shape is."""
    blobs = rng.integers(60, 190, (4, 5, 1)) + rng.integers(-25, 26, (4, 5, 3))
    return Image.fromarray(blobs.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)


def _noisy(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    strength = int(rng.integers(6, 16))
    noise = rng.integers(-strength, strength + 1, (picture.height, picture.width, 3), dtype=np.int16)
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


def _check_ranges(classes: int, seed: int, min_side: int, max_side: int, **images: int) -> None:
    for name, value, least, most in (
        ("classes", classes, 1, MAX_CLASSES),
        *((name, value, 1, 100_000) for name, value in images.items()),
        ("seed", seed, 0, 2**63),
        ("min_side", min_side, 16, max_side),
        ("max_side", max_side, min_side, 10_000),
    ):
        if not least <= value <= most:
            raise ConfigurationError(f"{name} is {value}; it must be from {least} to {most}")


def _make(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder and rename it to `target`, which must not exist or be empty."""
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            kind = "the directory is not empty" if target.is_dir() else "exists and is not a directory"
            raise DataError(f"{kind}; nothing was changed", where=str(target), hint="Name a new directory.")
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial"))
        try:
            write(unfinished)
            unfinished.chmod(0o755)
            os.rename(unfinished, target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise DataError(f"cannot make the image set: {error.strerror or error}", where=str(target)) from None


def _cached(name: str, make: Callable[[Path], object]) -> Path:
    """Return a set of the cache; one process makes it when it is first asked for, and the others wait."""
    cache = cache_folder()
    target = cache / name
    if target.exists():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{name}.lock"):
            if not target.exists():
                for leftover in cache.glob(f".{name}.*.partial"):  # of a process that was killed
                    shutil.rmtree(leftover, ignore_errors=True)
                make(target)
    except OSError as error:
        raise DataError(
            f"the cache cannot be written: {error.strerror or error}",
            where=str(cache),
            hint="Set D5SUITE_CACHE to a folder that can.",
        ) from None
    return target


def _write_imagenet(
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

    odd_files = _odd_files([task[0] for task in work if task[2] == 0])

    def write(task: tuple[str, int, int, int]) -> None:
        file, label, split, number = task
        rng = np.random.default_rng([seed, 2, split, label, number])
        height, width = rng.integers(sides[0], sides[1] + 1, 2).tolist()
        _save(draw(label, height, width, rng), root / file, odd_files.get(file, "JPEG"))

    _write_all(write, work, progress)


def _write_openimages(
    root: Path, classes: int, counts: tuple[int, ...], seed: int, sides: tuple[int, int], progress: bool
) -> None:
    label_names = [_label_name(label) for label in range(classes)]
    described = {name: class_name(label) for label, name in enumerate(label_names)} | _UNTRAINABLE
    _write_csv(root / DESCRIPTIONS_FILE, sorted(described.items()))  # without a header, as published
    (root / TRAINABLE_FILE).write_text("".join(f"{name}\n" for name in label_names), encoding="utf-8")

    work: list[tuple[str, list[int], int, int]] = []  # file, classes shown, split, number within the split
    for split, (split_name, count) in enumerate(zip(SPLITS, counts, strict=True)):
        (root / split_name).mkdir()
        rng = np.random.default_rng([seed, 3, split])
        ids = sorted(f"{number:016x}" for number in rng.choice(2**48, count + 1, replace=False).tolist())
        firsts = rng.permutation(np.arange(count) % classes).tolist()
        unverified = ids.pop(int(rng.integers(count)))  # on disk, without a trainable label
        rows = [(unverified, "verification", name, "1") for name in _UNTRAINABLE]
        work.append((f"{split_name}/{unverified}.jpg", [], split, count))
        for number, (image, first) in enumerate(zip(ids, firsts, strict=True)):
            others = rng.permutation(np.delete(np.arange(classes), first)).tolist()
            more = int(rng.integers(min(_MOST_SHOWN, classes)))
            shown, absent = [first, *others[:more]], others[more:]
            work.append((f"{split_name}/{image}.jpg", shown, split, number))
            verified = [(label, "1") for label in shown if label == first or rng.random() < 0.75]
            verified += [(label, "0") for label in absent[: len(shown)]]
            for label, confidence in sorted(verified):
                source = "verification" if split or rng.random() < 0.9 else "crowdsource-verification"
                rows.append((image, source, label_names[label], confidence))
            if rng.random() < 0.2:
                rows.append((image, "verification", "/m/0bl9f", "0"))
        _write_csv(root / labels_file(split_name), [LABELS_HEADER, *sorted(rows)])

    odd_files = _odd_files([task[0] for task in work if task[1] and task[2] == 0])

    def write(task: tuple[str, list[int], int, int]) -> None:
        file, shown, split, number = task
        rng = np.random.default_rng([seed, 4, split, number])
        height, width = rng.integers(sides[0], sides[1] + 1, 2).tolist()
        _save(draw_several(shown, height, width, rng), root / file, odd_files.get(file, "JPEG"))

    _write_all(write, work, progress)


def _label_name(label: int) -> str:
    """Make a name like those of Open Images, which are in no order that a reader could guess."""
    return f"/m/0{(label + 1) * 7_368_787 % 2**25:07x}"


def _write_csv(file: Path, rows: Sequence[Sequence[str]]) -> None:
    with open(file, "w", encoding="utf-8", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows(rows)


def _odd_files(files: Sequence[str]) -> dict[str, str]:
    """Choose files, spread over all, that are not RGB or not JPEG, and say what they are instead."""
    return {files[place * len(files) // 3]: kind for place, kind in enumerate(("L", "CMYK", "PNG"))}


def _save(image: Image.Image, file: Path, kind: str) -> None:
    if kind == "PNG":
        image.save(file, "PNG")
    else:
        image = image.convert(kind) if kind != "JPEG" else image
        image.save(file, "JPEG", quality=90)


def _write_all(write: Callable[[_Task], None], work: Sequence[_Task], progress: bool) -> None:
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
