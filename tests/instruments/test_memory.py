"""Growth of the peak memory: what is allocated counts, what the kernel reads in again does not."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from d5suite.instruments.memory import watch_peak

MIB = 2**20


def allocated(nbytes: int) -> mmap.mmap:
    """Take memory from the kernel, past the allocator, which may hold freed memory."""
    taken = mmap.mmap(-1, nbytes)
    for place in range(0, nbytes, mmap.PAGESIZE):
        taken[place] = 1
    return taken


def test_pages_of_files_that_were_dropped_and_read_again_are_no_growth(tmp_path: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(bytes(64 * MIB))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        if not hasattr(mmap, "MADV_DONTNEED") or (grown := watch_peak()) is None:
            pytest.skip("needs Linux")
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        assert grown() < 16 * MIB
        mapped.madvise(mmap.MADV_DONTNEED)  # as under memory pressure
        grown = watch_peak()
        assert grown is not None and sum(mapped[:: mmap.PAGESIZE]) == 0
        assert grown() < 16 * MIB
        with allocated(32 * MIB):
            assert 24 * MIB < grown() < 48 * MIB


def test_memory_that_was_freed_again_has_grown() -> None:
    if (grown := watch_peak()) is None:
        pytest.skip("needs Linux")
    allocated(64 * MIB).close()
    assert grown() > 48 * MIB


def test_freed_memory_that_is_used_again_is_within_what_the_heap_had_free() -> None:
    code = """
from d5suite.instruments.memory import free_heap_bytes, return_freed_memory, watch_peak
blocks = [bytes(100_000) for _ in range(1000)]  # below the size from which malloc maps memory
kept = blocks[::2]
del blocks
return_freed_memory()
free, grown = free_heap_bytes(), watch_peak()
again = [bytes(90_000) for _ in range(400)]
print(free, -1 if grown is None else grown())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    free, grown = map(int, done.stdout.split())
    if not free or grown < 0:
        pytest.skip("needs GNU's C library and Linux")
    assert free > 40_000_000 and 20_000_000 < grown < free
