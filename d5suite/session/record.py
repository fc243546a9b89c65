"""The record of a measurement, from its job and its worker's result: ``extra_info["d5suite"]``."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d5suite.cases.case import Case
from d5suite.errors import ConfigurationError, JobError
from d5suite.job import CaseJob, Job, Measured, Result, key_of
from d5suite.measurements.base import Measurement
from d5suite.passes import DEFAULT
from d5suite.passes import find as find_pass
from d5suite.passes.base import FILES
from d5suite.statistics.intervals import launch_interval

SCHEMA = "d5suite-1"
"""Schema of records; ``results/schema.json``."""


def record(
    case: Case, part: CaseJob, measurement: type[Measurement], job: Job, result: Result, measured: Measured
) -> dict[str, Any]:
    """Return a measurement's record as JSON values: all that a comparison needs.

    Parameters
    ----------
    case : Case
    part : CaseJob
        The case's part of the job.
    measurement : type of Measurement
    job : Job
    result : Result
        The worker's result.
    measured : Measured
        The result of this measurement.
    """
    facts = case.facts(part, result)
    notes = [facts, measured.extra, *measured.passes.values()]
    warnings = [*result.threads["notes"], *(each for part in notes for each in part.get("warnings", []))]
    found = {
        "schema": SCHEMA,
        "recipe": case.name,
        "level": measured.level,
        "measurement": measurement.name,
        "backend": {key: result.backend[key] for key in ("name", "mode", "version", "versions")},
        "device": job.device,
        "device_name": result.device["name"],
        "precision": job.precision,
        "threads": job.threads,
        "cpus": result.threads["cpus"],
        "ranks": job.ranks,
        **facts,
        "preset": part.preset,
        "seed": job.seed,
        "throughput": {"value": measured.items / measured.samples["median_s"], "unit": measurement.unit},
        "macs": measured.macs,
        "validation": result.validation[key_of(case.name, measurement.name)],
        "environment": result.environment,
        **measured.extra,
        **({"warnings": warnings} if warnings else {}),
    }
    for name, own in measured.passes.items():
        one = find_pass(name, job.pass_files.get(name))
        added = one.record(own)
        if taken := added.keys() & found.keys():
            raise ConfigurationError(f"the pass {name!r} records {', '.join(taken)}, which the record has already")
        found |= added
        if name not in DEFAULT:
            found.setdefault("passes", {})[name] = one.describe()
    found.setdefault("peak_memory_bytes", None)
    return found


def place_files(content: dict[str, Any], measured: Measured, folder: Path) -> None:
    """Add the paths of the passes' folders to a record, relative to the current folder.

    Parameters
    ----------
    content : dict
        The record.
    measured : Measured
    folder : Path
        The folder of the job's result, where the passes left their folders.

    Raises
    ------
    JobError
        If a result names a folder elsewhere.
    """
    for name, part in measured.passes.items():
        if isinstance(given := part.get(FILES), str):
            place = (folder / given).resolve()
            if folder.resolve() not in place.parents:
                raise JobError(f"the pass {name!r} names a folder outside of the job's", where=given)
            content[name] = {**content[name], FILES: os.path.relpath(place)}


def with_samples(
    first: Mapping[str, Any], launches_s: Sequence[Sequence[float]], later: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of earlier launches with the samples of a later launch added.

    The confidence interval is computed over launches. Peak memory, and the error of every check,
    are the largest of all launches. The first call is taken from the first launch.

    Parameters
    ----------
    first, later : mapping
        Records of the earlier launches and of the later launch.
    launches_s : sequence of sequences of float
        Samples by launch, in seconds.
    """
    median = statistics.median(itertools.chain.from_iterable(launches_s))
    interval, confidence = launch_interval(launches_s)
    peaks = [each for each in (first["peak_memory_bytes"], later["peak_memory_bytes"]) if each is not None]
    rate = first["throughput"]
    reasons = [*dict.fromkeys([*first["machine"]["reasons"], *later["machine"]["reasons"]])]
    warnings = [*dict.fromkeys([*first.get("warnings", []), *later.get("warnings", [])])]
    return {
        **first,
        "throughput": {**rate, "value": rate["value"] * first["median_s"] / median},
        "median_s": median,
        "median_ci95": list(interval),
        "median_ci_confidence": confidence,
        "steady": first["steady"] and later["steady"],
        "peak_memory_bytes": max(peaks, default=None),
        "validation": {**first["validation"], "checks": _worst(first["validation"], later["validation"])},
        "machine": {
            **first["machine"],
            "disturbed": bool(reasons),
            "reasons": reasons,
            "taken_share": max(each["machine"]["taken_share"] for each in (first, later)),
        },
        **({"warnings": warnings} if warnings else {}),
    }


def _worst(first: Mapping[str, Any], later: Mapping[str, Any]) -> list[Any]:
    """Return all checks of two launches, with the larger error relative to the tolerance."""
    found = {check["name"]: check for check in first["checks"]}
    for check in later["checks"]:
        known = found.get(check["name"], check)
        found[check["name"]] = max(known, check, key=lambda each: each["error"] / (each["tolerance"] or 1))
    return list(found.values())
