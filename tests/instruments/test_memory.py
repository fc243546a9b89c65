"""Growth of the peak memory: what is allocated counts, what the kernel reads in again does not."""

from __future__ import annotations

import mmap
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
