"""Speed of reading encoded images in random order, each storage format against a folder.

Each round reads every image once from each format, in random order of formats, with a new reader:
TFRecord's checksums are thus checked in every round. A format must be as fast as the folder in the
median; while the interval of the ratio includes 1, more rounds are taken.

``fsync`` and ``posix_fadvise(DONTNEED)`` make files cold: they drop the files' pages and need no
privileges. They keep the names and positions of files, which favours the folder, and the cache of a
virtual machine's host.

``pytest benchmarks/bench_formats.py`` prints the figures; ``--benchmark-json`` keeps them in
``extra_info``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from d5suite.data.formats import KINDS, open_store
from d5suite.data.reading import FileLocation, ImageReader
from d5suite.data.synthesis import cached_conversion, cached_imagenet
from d5suite.statistics.ratios import Ratio, paired_ratio

IMAGES = 2000
LEAST_ROUNDS = 15
MOST_ROUNDS = 60
"""Rounds at most, while a format is neither slower nor faster than the folder."""


def files_of(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def make_cold(files: Sequence[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def part_in_memory(files: Sequence[Path]) -> float:
    """Return the fraction of the files' pages that the kernel holds, by mincore(2)."""
    library = ctypes.CDLL(None, use_errno=True)
    held = pages = 0
    for file in files:
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            view = np.frombuffer(content, np.uint8)
            count = -(-len(view) // mmap.PAGESIZE)
            states = (ctypes.c_ubyte * count)()
            if library.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), states):
                raise OSError(ctypes.get_errno(), "mincore failed", str(file))
            held, pages = held + sum(state & 1 for state in states), pages + count
            del view
    return held / pages


def read_all(locations: Sequence[FileLocation], order: Sequence[int]) -> float:
    """Return the seconds that reading every image takes."""
    reader = ImageReader()
    start = time.perf_counter()
    for number in order:
        reader.read(locations[number], number)
    took = time.perf_counter() - start
    reader.close()
    return took


def beside_the_folder(times: Mapping[str, Sequence[float]]) -> dict[str, Ratio]:
    """Return each format's speed relative to the folder, from the seconds of each round."""
    return {kind: paired_ratio(times["folder"], times[kind]) for kind in times}


def undecided(faster: Ratio) -> bool:
    """Return whether the rounds leave open which of the two is faster."""
    low, high = faster.interval
    return low < 1 < high


def goes_on(times: Mapping[str, Sequence[float]]) -> bool:
    """Return whether to take another round."""
    rounds = len(times["folder"])
    if rounds < LEAST_ROUNDS:
        return True
    return rounds < MOST_ROUNDS and any(undecided(faster) for faster in beside_the_folder(times).values())


def slower(times: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the formats that are slower than the folder."""
    return [kind for kind, faster in beside_the_folder(times).items() if faster.value < 1]


@pytest.mark.parametrize("state", ["warm", "cold"])
def test_records_are_read_as_fast_as_files(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    root = cached_imagenet(classes=10, train_per_class=IMAGES // 10, val_per_class=1)
    roots = {kind: root if kind == "folder" else cached_conversion(root, kind) for kind in KINDS}
    locations = {kind: list(open_store(path, "train").files) for kind, path in roots.items()}
    files = {kind: files_of(path) for kind, path in roots.items()}
    draw = random.Random(0)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    left = dict.fromkeys(KINDS, 0.0)

    def run() -> None:
        for kind in KINDS:  # bring the files into memory
            read_all(locations[kind], range(IMAGES))
        while goes_on(times):
            for kind in draw.sample(KINDS, len(KINDS)):
                if state == "cold":
                    make_cold(files[kind])
                    left[kind] = max(left[kind], part_in_memory(files[kind]))
                times[kind].append(read_all(locations[kind], draw.sample(range(IMAGES), IMAGES)))

    benchmark.pedantic(run, rounds=1)
    with capsys.disabled():
        how = ", after fsync and posix_fadvise(DONTNEED) of each file" if state == "cold" else ""
        print(f"\n{state}{how}; {IMAGES} images, {len(times['folder'])} rounds; limit 1")
        for kind, faster in beside_the_folder(times).items():
            median = statistics.median(times[kind])
            still = f"; still in memory before reading: at most {left[kind]:.1%}" if state == "cold" else ""
            benchmark.extra_info[kind] = {
                "images_per_s": IMAGES / median,
                "times_the_folder": faster.value,
                "ci95": list(faster.interval),
                "seconds": times[kind],
            }
            print(
                f"  {kind:9} {IMAGES / median:7.0f} images/s, {faster.value:.2f} times the folder "
                f"({faster.low:.2f} to {faster.high:.2f}{', undecided' if undecided(faster) else ''}){still}"
            )
    assert not slower(times), "slower than the folder"
