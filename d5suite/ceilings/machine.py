"""The content of a machine file: all ceilings of this machine, measured in order."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from d5suite.backends import Selection
from d5suite.ceilings import jobs
from d5suite.ceilings.combine import combined
from d5suite.errors import ConfigurationError, D5Error, JobError
from d5suite.files import read_json, write_json
from d5suite.instruments.environment import data_caches, describe
from d5suite.instruments.threads import allowed_cpus, choose_cpus, thread_environment
from d5suite.models.ceilings import KINDS, WHOLE
from d5suite.models.machine import SCHEMA

PART_OF_CACHE = 0.5
"""Share of a cache that the working set fills: the rest is for other programs."""

BEYOND_CACHE = 4
"""A working set in memory is at least this many times as large as the last-level cache, as STREAM's
rules demand."""

LEAST_BEYOND = 2
"""If free memory does not suffice, this multiple of the last-level cache is enough; with less,
memory has no ceiling."""

LEAST_MEMORY_SET = 64 << 20
"""Least bytes of a working set in memory."""

SHARE_OF_FREE = 0.4
"""Share of the free memory that a working set in memory may take."""

DEVICE_SET = 512 << 20
"""Bytes of the working set in a device's memory: larger than the device's caches."""

PROBE_LIMIT_S = 600.0
"""Time limit of the probe, in seconds."""

TRIES = 2
"""Most tries of a measurement, if the machine was disturbed."""


@dataclass(frozen=True)
class MachinePlan:
    """The ceilings to measure, and settings.

    Attributes
    ----------
    threads : sequence of int
    precisions : sequence of str
    backends : sequence of Selection
        Frameworks, which measure in separate workers.
    device : {"cpu", "cuda"}
    kinds : sequence of str
        Kinds of ceilings, from `d5suite.models.ceilings.KINDS`.
    storage : Path
        Folder on the file system to read from.
    product : int
        Rows and columns of the matrices.
    seconds : float
        Sampling budget of a way, in seconds.
    storage_bytes, transfer_bytes : int
    largest_set : int or None
        Limit of a working set in bytes.
    """

    threads: Sequence[int]
    precisions: Sequence[str]
    backends: Sequence[Selection]
    device: str = "cpu"
    kinds: Sequence[str] = KINDS
    storage: Path = Path()
    product: int = 2048
    seconds: float = 0.5
    storage_bytes: int = 256 << 20
    transfer_bytes: int = 256 << 20
    largest_set: int | None = None


@dataclass
class _Found:
    ways: list[dict[str, Any]] = field(default_factory=list)
    transports: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def measure_machine(plan: MachinePlan, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure a machine's ceilings.

    Parameters
    ----------
    plan : MachinePlan
    tell : callable
        Receives messages on the progress.

    Returns
    -------
    dict
        The content of a machine file: ``ceilings``; ``not_kept``, measured while the machine was
        disturbed; ``missing``, with reasons.

    Raises
    ------
    ConfigurationError
        If no ceiling could be measured on a quiet machine.
    """
    found = _Found()
    with tempfile.TemporaryDirectory(prefix="d5suite-machine-") as name:
        folder = Path(name)
        for number, threads in enumerate(plan.threads):
            levels = _levels(plan, threads, found)  # once: it depends on what is free
            _probe(plan, threads, levels, number == 0, folder, found, tell)
            for selection in plan.backends:
                _framework(plan, selection, threads, levels, folder, found, tell)
        if "transport" in plan.kinds:
            _transports(plan, folder, found, tell)
    when = datetime.now(timezone.utc).isoformat(timespec="minutes")
    ceilings, spoiled = combined(found.ways, when)
    for each in found.transports:
        reasons = each.pop("disturbed")
        if reasons:
            spoiled.append({**each, "way": f"ping-pong of {each['transport']}", "disturbed": reasons})
        else:
            ceilings.append({**each, "source": f"measured {when}: ping-pong of two ranks on this machine"})
    if not ceilings:
        reasons = list(dict.fromkeys(reason for each in spoiled for reason in each["disturbed"]))
        raise ConfigurationError(
            "no ceiling was measured on a quiet machine",
            hint="\n  ".join((reasons or found.missing)[:8] or ["Nothing was to be measured."]),
        )
    missing = list(dict.fromkeys(found.missing))
    host = describe_host(plan.device, plan.backends)
    return {
        "schema": SCHEMA,
        "name": f"{host['cpu']}, {host['cpus']} CPUs" + (f", {host['device_name']}" if "device_name" in host else ""),
        "host": host,
        "ceilings": sorted(ceilings, key=lambda each: KINDS.index(each["what"])),
        "not_kept": spoiled,
        "missing": missing,
    }


def describe_host(device: str, backends: Sequence[Selection] = ()) -> dict[str, Any]:
    """Return the facts that identify this machine, to tell results of other machines apart."""
    facts = describe()
    found = {
        "cpu": facts["cpu"]["model"],
        "cpus": facts["cpu"]["logical_cores"],
        "memory_bytes": facts["memory"].get("total_bytes", 0),
        "caches": {f"L{level}": size for level, size in data_caches(allowed_cpus()).items()},
    }
    names = [gpu["name"] for gpu in facts["gpus"] or () if gpu.get("name")]
    return found | ({"device_name": names[0]} if device != "cpu" and names else {})


def working_sets(threads: int, largest: int | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the memory levels that this number of threads uses, and why levels are left out.

    Parameters
    ----------
    threads : int
    largest : int, optional
        Limit of a working set in bytes.

    Returns
    -------
    list of dict, list of str
        Levels, with ``level`` (L1, L2, …, memory), ``capacity_bytes`` and ``working_set_bytes``;
        and the reasons.
    """
    import psutil

    caches = data_caches(choose_cpus(threads))
    missing = []
    levels: list[dict[str, Any]] = []
    for level, size in caches.items():
        own = int(PART_OF_CACHE * size) // 4096 * 4096
        levels.append({"level": f"L{level}", "capacity_bytes": size, "working_set_bytes": own})
    last = max(caches.values(), default=0)
    free = int(SHARE_OF_FREE * psutil.virtual_memory().available)
    wanted = min(max(BEYOND_CACHE * last, LEAST_MEMORY_SET), free)
    if wanted < LEAST_BEYOND * last:
        missing.append(f"memory, {threads} threads: {free:,} free bytes are not {LEAST_BEYOND} times the last cache")
    else:
        levels.append({"level": "memory", "capacity_bytes": WHOLE, "working_set_bytes": wanted // 4096 * 4096})
    for each in [each for each in levels if largest is not None and each["working_set_bytes"] > largest]:
        missing.append(f"{each['level']}, {threads} threads: its working set is above {largest:,} bytes")
        levels.remove(each)
    return levels, missing


def _levels(plan: MachinePlan, threads: int, found: _Found) -> list[dict[str, Any]]:
    if "bandwidth" not in plan.kinds:
        return []
    if plan.device != "cpu":  # the host's caches are not the device's
        return [{"level": "memory", "capacity_bytes": WHOLE, "working_set_bytes": DEVICE_SET}]
    levels, missing = working_sets(threads, plan.largest_set)
    found.missing += missing
    return levels


def _probe(
    plan: MachinePlan,
    threads: int,
    levels: Sequence[Mapping[str, Any]],
    first: bool,
    folder: Path,
    found: _Found,
    tell: Callable[[str], None],
) -> None:
    """Measure the ceilings that the probe measures, most of them without an adapter."""
    request: dict[str, Any] = {
        "threads": threads,
        "seconds": plan.seconds,
        "product": plan.product,
        "precisions": list(plan.precisions) if "flops" in plan.kinds else [],
        "levels": list(levels),
    }
    if plan.device != "cpu":  # what the host computes and moves is no ceiling of the device
        request |= {"precisions": [], "levels": []}
        if first and "host_to_device" in plan.kinds and plan.backends:
            request["transfer"] = {
                "backend": str(plan.backends[0]), "device": plan.device, "bytes": plan.transfer_bytes,
            }  # fmt: skip
    if first and "storage" in plan.kinds:
        request["storage"] = {"folder": str(plan.storage.resolve()), "bytes": plan.storage_bytes}
    if not any(request.get(key) for key in ("precisions", "levels", "storage", "transfer")):
        return
    tell(f"NumPy, compiled kernels and storage, {threads} threads")

    def once() -> tuple[list[dict[str, Any]], list[str]]:
        return run_probe(request, folder)

    _undisturbed(once, found)


def run_probe(request: Mapping[str, Any], folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the probe in a separate process; return the ways, and why some are missing."""
    import os

    asked, answer = folder / "probe.json", folder / "probe.answer.json"
    write_json(asked, dict(request))
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "d5suite.ceilings.probe", str(asked), str(answer)]
    environment = {**os.environ, **thread_environment(request["threads"])}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=PROBE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return [], [f"the probe took longer than {PROBE_LIMIT_S:.0f} s"]
    try:
        content = read_json(answer)
    except JobError:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return [], [f"the probe ended with status {done.returncode}: {last}"]
    return content["ways"], content["missing"]


def _framework(
    plan: MachinePlan, selection: Selection, threads: int, levels: Sequence[Mapping[str, Any]], folder: Path,
    found: _Found, tell: Callable[[str], None],
) -> None:  # fmt: skip
    import psutil

    for number, precision in enumerate(plan.precisions):
        if problem := jobs.selection_problem(selection, plan.device, precision):
            found.missing.append(f"{selection}: {problem}")
            continue
        own = levels if number == 0 else ()
        product = plan.product if "flops" in plan.kinds else 0
        if not own and not product:
            continue
        tell(f"{selection}, {precision}, {threads} threads")

        def once(precision: str = precision, own: Any = own, product: int = product) -> Any:
            return jobs.framework_ways(
                selection, device=plan.device, precision=precision, threads=threads, product=product, levels=own,
                seconds=plan.seconds, memory_bytes=int(0.9 * psutil.virtual_memory().total), folder=folder,
            )  # fmt: skip

        _undisturbed(once, found)


def _undisturbed(once: Callable[[], tuple[list[dict[str, Any]], list[str]]], found: _Found) -> None:
    """Measure; if the machine was disturbed, measure again, and replace the disturbed ways."""
    kept: dict[str, dict[str, Any]] = {}
    missing: list[str] = []
    for _ in range(TRIES):
        try:
            ways, missing = once()
        except D5Error as error:
            missing = [str(error)]
            break
        for each in ways:
            name = "/".join(str(each.get(key)) for key in ("what", "precision", "level", "threads", "way"))
            if name not in kept or kept[name]["disturbed"]:
                kept[name] = each
        if not any(each["disturbed"] for each in kept.values()):
            break
    found.ways += kept.values()
    found.missing += missing


def _transports(plan: MachinePlan, folder: Path, found: _Found, tell: Callable[[str], None]) -> None:
    import psutil

    if len(allowed_cpus()) < 2:
        found.missing.append("transports: two ranks need two CPUs")
        return
    for name, problem in jobs.transports(plan.device).items():
        if problem:
            found.missing.append(f"{name}: {problem}")
            continue
        tell(f"ping-pong of {name}")
        way: dict[str, Any] | None = None
        missing: list[str] = []
        for _ in range(TRIES):
            try:
                way, missing = jobs.transport_way(
                    name, device=plan.device, threads=min(2, len(allowed_cpus())), seconds=plan.seconds / 2,
                    memory_bytes=int(0.9 * psutil.virtual_memory().total), folder=folder,
                )  # fmt: skip
            except D5Error as error:  # such as no mpiexec
                missing = [f"{name}: {error.what}"]
            if way is None or not way["disturbed"]:
                break
        found.missing += missing
        if way is not None:
            found.transports.append(way)
