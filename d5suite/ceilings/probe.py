"""Ceilings that need no adapter: NumPy, compiled kernels, storage; and copies to a device.

Runs in a separate process, ``python -m d5suite.ceilings.probe REQUEST.json ANSWER.json``, because
libraries read their number of threads when they load. Every result is compared with a known answer.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.ceilings.combine import way_of
from d5suite.errors import JobError, describe_error
from d5suite.files import read_json, write_json
from d5suite.instruments.clock import now
from d5suite.instruments.machine import disturbance, snapshot
from d5suite.instruments.threads import set_affinity

SAMPLE_S = 5e-3
"""Approximate seconds of a sample: long compared with the clock's resolution, the overhead of a
call and the start of a thread."""

FEWEST = 5
"""Fewest samples of a way."""

LARGEST = 4
"""Largest magnitude of the whole numbers drawn, so that products and sums are exact in float32."""

BLOCK = 8 << 20
"""Bytes of a read from storage."""

Run = Callable[[int], object]
"""A function that makes a given number of calls, one after the other."""


def main(request: Path, answer: Path) -> None:
    """Make the measurements that a request asks for."""
    asked = read_json(request)
    set_affinity(asked["threads"])
    found: dict[str, list[Any]] = {"ways": [], "missing": []}
    for measure in (_products, _numpy_copies, _kernels, _storage, _transfer):
        try:
            for each in measure(asked):
                found["ways"].append(each)
        except Exception as error:  # of any kind, frameworks' too: it costs this way and no other
            found["missing"].append(f"{measure.__name__.strip('_').replace('_', ' ')}: {describe_error(error)}")
    write_json(answer, found)


def _timed(run: Run, work: float, way: str, by: str, asked: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """Sample calls; a sample consists of as many calls as take about `SAMPLE_S`."""
    run(1)
    calls = 1
    while True:
        start = now()
        run(calls)
        took = now() - start
        if took >= SAMPLE_S / 2:
            break
        calls = math.ceil(calls * min(8.0, SAMPLE_S / max(took, 1e-9)))
    samples: list[float] = []
    before, end = snapshot(), now() + asked["seconds"]
    while len(samples) < FEWEST or now() < end:
        start = now()
        run(calls)
        samples.append((now() - start) / calls)
    found = disturbance(before, snapshot(), threads=asked["threads"])
    return {**way_of(way, [by], work, samples, found.reasons), "threads": asked["threads"], "device": "cpu", **facts}


def _repeated(call: Callable[[], object]) -> Run:
    def run(calls: int) -> None:
        for _ in range(calls):
            call()

    return run


def _require(right: bool, what: str) -> None:
    if not right:
        raise JobError(f"{what} gave a wrong answer, so its rate means nothing")


def _products(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure NumPy's product of two square matrices."""
    rng, size = np.random.default_rng(0), asked["product"]
    for precision in asked["precisions"]:
        dtype = {"fp32": np.float32, "fp64": np.float64}.get(precision)
        if dtype is None:
            continue
        a, b = (rng.integers(-LARGEST, LARGEST + 1, (size, size)).astype(dtype) for _ in range(2))
        out = np.empty((size, size), dtype)
        way = f"NumPy {np.__version__}: product of {size} × {size}"
        found = _timed(
            _repeated(lambda a=a, b=b, out=out: np.matmul(a, b, out=out)),  # type: ignore[misc]
            2 * size**3, way, "numpy", asked, what="flops", precision=precision,
        )  # fmt: skip
        vector = rng.integers(-LARGEST, LARGEST + 1, size)
        expected = a.astype(np.int64) @ (b.astype(np.int64) @ vector)  # Freivalds: exact in whole numbers
        _require(bool((out.astype(np.int64) @ vector == expected).all()), way)
        yield found


def _numpy_copies(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure NumPy's copy, which uses one thread."""
    if asked["threads"] > 1:
        return
    for level in asked["levels"]:
        count = level["working_set_bytes"] // 2
        source = np.resize(np.arange(251, dtype=np.uint8), count)
        target = np.zeros_like(source)
        way = f"NumPy {np.__version__}: copy"
        found = _timed(
            _repeated(lambda source=source, target=target: np.copyto(target, source)),  # type: ignore[misc]
            2 * count, way, "numpy", asked, what="bandwidth", **level,
        )  # fmt: skip
        _require(bool((source == target).all()), way)
        yield found


def _kernels(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure STREAM's triad and a sum, compiled for this processor."""
    if not asked["levels"]:
        return
    from d5suite.custom.build import compile_library

    library = ctypes.CDLL(str(compile_library("stream", Path(__file__).with_name("stream.cc"))))
    library.d5_sum.restype = ctypes.c_double

    def pointer(array: np.ndarray) -> ctypes.c_void_p:
        return ctypes.c_void_p(array.ctypes.data)

    def whole(number: int) -> ctypes.c_int64:
        return ctypes.c_int64(number)

    for level in asked["levels"]:
        count = level["working_set_bytes"] // 24
        a, b, c = (np.empty(count) for _ in range(3))
        for array, period in ((a, 1), (b, 7), (c, 5)):
            library.d5_fill(pointer(array), whole(count), whole(period))
        facts = {"what": "bandwidth", **level}
        yield _timed(
            lambda calls, a=a, b=b, c=c, n=count: library.d5_triad(  # type: ignore[misc]
                pointer(a), pointer(b), pointer(c), whole(n), whole(calls)
            ),
            24 * count, "STREAM's triad, compiled", "compiler", asked, **facts,
        )  # fmt: skip
        place = np.arange(min(count, 1 << 20))
        _require(bool((a[: len(place)] == place % 7 + 3 * (place % 5)).all()), "STREAM's triad")
        total: list[float] = []
        yield _timed(
            lambda calls, b=b, n=count, total=total: total.append(  # type: ignore[misc]
                library.d5_sum(pointer(b), whole(n), whole(calls))
            ),
            8 * count, "a sum, compiled", "compiler", asked, **facts,
        )  # fmt: skip
        _require(total[-1] == float(21 * (count // 7) + sum(range(count % 7))), "the sum")


def _storage(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure reads of a new file that bypass the system's page cache."""
    given = asked.get("storage")
    if not given:
        return
    size = given["bytes"] // BLOCK * BLOCK or BLOCK
    block, digest = np.random.default_rng(0).bytes(BLOCK), 0
    with tempfile.NamedTemporaryFile(dir=given["folder"], prefix=".d5suite-storage-") as file:
        for number in range(size // BLOCK):
            part = number.to_bytes(8, "little") + block[8:]
            file.write(part)
            digest = zlib.crc32(part, digest)
        file.flush()
        os.fsync(file.fileno())
        buffer = mmap.mmap(-1, BLOCK)  # aligned, as direct reads require
        refused = []
        for way, flag in (("direct reads", getattr(os, "O_DIRECT", None)), ("reads after dropping the cache", 0)):
            try:
                if flag is None:
                    raise OSError("this system has no direct reads")
                yield _reads(way, flag, Path(file.name), size, digest, buffer, asked)
            except OSError as error:
                refused.append(f"{way}: {error.strerror or error}")
        if refused:
            raise OSError("; ".join(refused))


def _reads(
    way: str, flag: int, path: Path, size: int, digest: int, buffer: mmap.mmap, asked: Mapping[str, Any]
) -> dict[str, Any]:
    handle = os.open(path, os.O_RDONLY | flag)
    try:
        found = 0

        def read(check: bool = False) -> None:
            nonlocal found
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            for place in range(0, size, BLOCK):
                if os.preadv(handle, [buffer], place) != BLOCK:
                    raise OSError("a read ended early")
                if check:
                    found = zlib.crc32(buffer, found)

        read(check=True)
        _require(found == digest, way)
        facts = {"what": "storage", "threads": 1}
        return {**_timed(_repeated(read), size, f"{way} of {size >> 20} MiB", way, asked), **facts}
    finally:
        os.close(handle)


def _transfer(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure copies from the host to a device, by a framework's ``feed``."""
    given = asked.get("transfer")
    if not given:
        return
    from d5suite.backends import select
    from d5suite.network.operation import Operation

    selection = select(given["backend"])
    runtime = selection.backend.load("runtime", selection.mode)
    runtime.configure(threads=asked["threads"], seed=0, device=given["device"])
    if problem := runtime.device_problem(given["device"]):
        raise JobError(problem)
    rows = max(1, given["bytes"] // 4096)
    operation = Operation("Relu", {"X": (rows, 1024)}, {}, name="transfer", precision="fp32")
    operator = selection.backend.operator(operation, mode=selection.mode, device=given["device"])
    arrays = operation.draw(0)

    def feed() -> tuple[Any, ...]:
        fed = tuple(operator.feed(arrays))
        operator.synchronize()
        return fed

    way = f"{selection}: feeds of {rows * 4096 >> 20} MiB"
    found = _timed(_repeated(feed), rows * 4096, way, selection.backend.name, asked)
    result = operator.forward(*feed())
    operator.synchronize(result)
    (answer,) = operator.fetch(result)
    _require(bool((answer == np.maximum(np.asarray(arrays[0]), 0)).all()), way)
    yield {**found, "what": "host_to_device", "device": given["device"]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
