"""Ceilings that adapters and transports reach, measured by workers, which prove the answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.backends import Selection
from d5suite.ceilings.combine import way_of
from d5suite.distributed.calls import BURST, PAUSE_S
from d5suite.distributed.communicators import COMMUNICATORS, problem
from d5suite.errors import D5Error, JobError
from d5suite.job import TIME, CollectiveCase, Distributed, Job, Measured, OperationCase, Result, result_path
from d5suite.launch.base import Launch, Limits, interpreter
from d5suite.launch.run import run_job
from d5suite.models.communication import LogGP, loggp
from d5suite.network.operation import PRECISIONS, Operation
from d5suite.statistics.messages import line_intervals

LIMIT_S = 600.0
"""Time limit of a worker, in seconds."""

LARGEST_COPY = 512 << 20
"""Most bytes that a framework's copy reads and writes: the proof holds eight times as many."""

ROW = 256
"""Elements of a row of the copy: 1 KiB of float32, so that a row fits into every cache."""

SIZES = tuple(4**power for power in range(1, 12))
"""Bytes of the messages of a ping-pong: 4 B to 4 MiB."""


def framework_ways(
    selection: Selection, *, device: str, precision: str, threads: int, product: int,
    levels: Sequence[Mapping[str, Any]], seconds: float, memory_bytes: int, folder: Path,
) -> tuple[list[dict[str, Any]], list[str]]:  # fmt: skip
    """Measure a framework's matrix product, and copies by the size of their working set.

    Parameters
    ----------
    selection : Selection
    device, precision : str
    threads : int
    product : int
        Rows and columns of the matrices; 0 for no product.
    levels : sequence of mapping
        Memory levels, with ``level`` and ``working_set_bytes``.
    seconds : float
        Sampling budget of every operation.
    memory_bytes : int
        Memory limit of the worker.
    folder : Path
        Folder for the job files.

    Returns
    -------
    list of dict, list of str
        Ways, and why some are missing.
    """
    backend = selection.backend
    operations: dict[str, tuple[Operation, dict[str, Any]]] = {}
    if product and backend.lacks_operator("Gemm", precision) is None:
        square = (product, product)
        operation = Operation("Gemm", {"A": square, "B": square}, {}, name="ceiling.product", precision=precision)
        operations["product"] = operation, {"what": "flops", "precision": precision}
    itemsize, left_out = PRECISIONS[precision].itemsize, []
    for each in levels:
        rows = each["working_set_bytes"] // 4 // itemsize // ROW
        if each["working_set_bytes"] > LARGEST_COPY:
            left_out.append(f"{selection}, {each['level']}: copies of more than {LARGEST_COPY:,} bytes are not made")
        elif rows and backend.lacks_operator("Concat", precision) is None:
            half = (rows, ROW)
            name = f"copy_{each['level']}"
            operation = Operation(
                "Concat", {"A": half, "B": half}, {"axis": 0}, name=f"ceiling.{name}", precision=precision
            )
            operations[name] = operation, {"what": "bandwidth", **each}
    if not operations:
        return [], left_out or [f"{selection}: it has neither Gemm nor Concat in {precision}"]
    cases = [
        OperationCase(
            name=f"ceiling.{name}", preset="ceiling", measurements=["forward"],
            sampling={"max_time_s": seconds, "min_rounds": 5}, operation=operation.to_dict(),
        )
        for name, (operation, _) in operations.items()
    ]  # fmt: skip
    job = Job(
        backend={"name": backend.name, "mode": selection.mode}, device=device, precision=precision, threads=threads,
        seed=0, cases=list(cases), passes=[TIME],
    )  # fmt: skip
    slug = f"{backend.name}-{selection.mode}-{precision}-{threads}"
    found, missing = _measured(job, folder, slug, memory_bytes, str(selection))
    libraries = (*backend.requires, *backend.mode_requires.get(selection.mode, {}))
    ways = []
    for key, measured in found:
        operation, facts = operations[key.partition("/")[0].removeprefix("ceiling.")]
        work = measured.extra["work"]["flops" if facts["what"] == "flops" else "bytes"]
        shape = f"product of {product} × {product}" if facts["what"] == "flops" else "copy"
        way = f"{selection}: {shape}"
        ways.append({
            **way_of(way, libraries, work, measured.samples["samples_s"], _disturbed(measured)), "threads": threads,
            "device": device, **facts,
        })  # fmt: skip
    return ways, left_out + missing


def transports(device: str) -> dict[str, str | None]:
    """Return the transports that move a device's arrays between ranks, with what they lack."""
    return {
        name: problem(name)
        for name, each in COMMUNICATORS.items()
        if each.launcher != "none" and device in each.devices
    }


def transport_way(
    name: str, *, device: str, threads: int, seconds: float, memory_bytes: int, folder: Path
) -> tuple[dict[str, Any] | None, list[str]]:
    """Measure latency and time per byte between two ranks of this machine, by ping-pong.

    Returns
    -------
    dict or None, list of str
        ``alpha_s`` and ``beta_s_per_byte`` of a message in one direction, with their intervals,
        ``loggp`` and ``disturbed``; and why measurements are missing.
    """

    def case(collective: str, sizes: Sequence[int]) -> CollectiveCase:
        return CollectiveCase(
            name=collective, preset="ceiling", measurements=["collectives"],
            sampling={"max_time_s": seconds, "min_rounds": 10}, collective=collective, sizes=list(sizes),
        )  # fmt: skip

    cases = [case("ping_pong", SIZES), *(case(each, SIZES[:2]) for each in ("ping_burst", "ping_paced"))]
    how = Distributed(scheme="", communicator=name, launcher=COMMUNICATORS[name].launcher, oversubscribe=threads < 2)
    job = Job(
        backend={"name": name, "mode": "native"}, device=device, precision="fp32", threads=max(2, threads), seed=0,
        cases=list(cases), passes=[TIME], ranks=2, distributed=how,
    )  # fmt: skip
    found, missing = _measured(job, folder, f"ping-pong-{name}", memory_bytes, name)
    by_call = {key.partition("/")[0]: measured for key, measured in found}
    if "ping_pong" not in by_call:
        return None, missing
    played = by_call["ping_pong"]
    samples = {size: played.series[f"seconds_of_{size}_bytes"] for size in SIZES}
    line, alpha, beta = line_intervals({size: [each / 2 for each in own] for size, own in samples.items()})
    way = {
        "what": "transport", "transport": name, "alpha_s": line.alpha_s, "alpha_interval_s": list(alpha),
        "beta_s_per_byte": line.beta_s_per_byte, "beta_interval_s_per_byte": list(beta),
        "residual": line.residual, "bytes": [SIZES[0], SIZES[-1]], "disturbed": _disturbed(played),
    }  # fmt: skip
    if len(by_call) == len(cases):
        small = [each.series[f"seconds_of_{SIZES[0]}_bytes"] for each in by_call.values()]
        way["loggp"] = loggp_intervals(*small, beta=line.beta_s_per_byte)
        way["disturbed"] = list(dict.fromkeys(reason for each in by_call.values() for reason in _disturbed(each)))
    return way, missing


def loggp_intervals(
    single: Sequence[float], burst: Sequence[float], paced: Sequence[float], *, beta: float, draws: int = 200
) -> dict[str, list[float]]:
    """Return LogGP's parameters of small messages, with the ends of their 95% intervals.

    Parameters
    ----------
    single, burst, paced : sequence of float
        Samples of ``ping_pong``, ``ping_burst`` and ``ping_paced``, in seconds.
    beta : float
        Seconds per byte.
    draws : int
        Number of bootstrap draws from the samples.
    """
    rng, samples = np.random.default_rng(0), (single, burst, paced)

    def of(values: Sequence[float]) -> list[float]:
        found = loggp(*values, messages=BURST, pause_s=PAUSE_S, beta=beta)
        return list(vars(found).values())

    best = of([float(np.median(each)) for each in samples])
    drawn = [of([float(np.median(rng.choice(each, len(each)))) for each in samples]) for _ in range(draws)]
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    names = [each.name for each in fields(LogGP)]
    return {name: list(map(float, each)) for name, *each in zip(names, best, low, high, strict=True)}


def _disturbed(measured: Measured) -> list[str]:
    machine = measured.machine
    return list(machine["reasons"]) if machine["disturbed"] else []


def _measured(
    job: Job, folder: Path, slug: str, memory_bytes: int, who: str
) -> tuple[list[tuple[str, Measured]], list[str]]:
    """Run a job; return the measurements by key, and why the other measurements are missing."""
    path = folder / f"{slug}.job.json"
    job.save(path)
    python = None
    if job.distributed is None:
        python = interpreter(job.backend["name"], {})
    outcome = run_job(job, path, Launch(Limits(LIMIT_S, memory_bytes), python))
    if outcome.interrupt is not None:
        raise outcome.interrupt
    result, lost = Result(), [f"{who}: {outcome.reason}"]
    with contextlib.suppress(JobError):
        result = Result.load(result_path(path))
        lost = list(_reasons(result, job, who, outcome.reason))
    return list(result.measurements.items()), lost


def _reasons(result: Result, job: Job, who: str, reason: str) -> Iterator[str]:
    if result.error is not None:
        yield f"{who}: {result.error.message}"
        return
    keys = job.keys()
    for key in keys:
        if key not in result.measurements:
            failure = result.failures.get(key)
            yield f"{who}, {key.partition('/')[0].removeprefix('ceiling.')}: {failure.message if failure else reason}"


def selection_problem(selection: Selection, device: str, precision: str) -> str | None:
    """Return why a framework cannot measure a ceiling, or None."""
    try:
        selection.backend.check(device=device, precision=precision)
    except D5Error as error:
        return error.what
    return selection.backend.problem(selection.mode)
