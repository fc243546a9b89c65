"""The nodes of a cluster in a record: the state of every node, and warnings about slow nodes."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d5suite.errors import JobError
from d5suite.job import Job, Result, of_rank

SLOWER = 1.1
"""Ratio of a node's computing time to the other nodes' median above which the node is reported. On
a quiet machine, the times of steps differ by less than 5%."""


def add_nodes(record: dict[str, Any], key: str, job: Job, first: Result, path: Path) -> None:
    """Add a job's nodes to a record, with reasons to doubt the result: disturbed or slow nodes.

    Parameters
    ----------
    record : dict
        Rank 0's record.
    key : str
        The measurement.
    job : Job
    first : Result
        Rank 0's result.
    path : Path
        Rank 0's result file; the files of the other ranks are in the same folder.
    """
    results: list[Result] = [first]
    for rank in range(1, job.ranks):
        try:
            results.append(Result.load(of_rank(path, rank)))
        except JobError:
            results.append(Result())
    names = [each.environment.get("slurm", {}).get("node") for each in results]
    if names[0] is None:
        return
    parts = {each["rank"]: each.get("parts") or {} for each in record.get("distributed", {}).get("ranks", ())}
    computing = {rank: part.get("computing_s") for rank, part in parts.items()}
    nodes = []
    for name in filter(None, dict.fromkeys(names)):
        ranks = [rank for rank, node in enumerate(names) if node == name]
        measured = [results[rank].measurements[key] for rank in ranks if key in results[rank].measurements]
        times = [seconds for rank in ranks if (seconds := computing.get(rank)) is not None]
        details = measured[0].machine.get("details", {}) if measured else {}
        nodes.append(
            {
                "name": name,
                "ranks": ranks,
                "computing_s": statistics.median(times) if times else None,
                "disturbed": any(each.machine["disturbed"] for each in measured),
                "reasons": list(dict.fromkeys(reason for each in measured for reason in each.machine["reasons"])),
                "frequency_mhz": details.get("frequency_mhz"),
                "temperature_c": details.get("temperature_c"),
                "gpus": details.get("gpus", []),
            }
        )
    reasons = [*record["machine"]["reasons"]]
    others = _other_jobs(str(first.environment["slurm"].get("job")), path)
    if others is not None:
        record["other_jobs"] = others
        reasons += [f"other jobs on its nodes: {', '.join(others)}"] if others else []
    for node in nodes[1:]:
        reasons += [f"{node['name']}: {reason}" for reason in node["reasons"]]
    record["nodes"] = nodes
    record["machine"] = {"disturbed": bool(reasons), "reasons": reasons}  # no taken_share: unknown for other jobs
    slow = slow_nodes(nodes)
    if slow:
        record["warnings"] = [*record.get("warnings", []), *slow]


def slow_nodes(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a warning for every node whose ranks compute longer than the ranks of other nodes."""
    times = {each["name"]: each["computing_s"] for each in nodes if each["computing_s"]}
    warnings = []
    for name, own in times.items():
        peers = statistics.median(other for each, other in times.items() if each != name) if len(times) > 1 else own
        if own > SLOWER * peers:
            warnings.append(f"node {name} is slow: its ranks compute {own / peers:.2f} times as long as its peers'")
    return warnings


def _other_jobs(own: str, path: Path) -> list[str] | None:
    """Return the other jobs on the nodes, as the batch script saw them before and after the run.

    None if the script did not look. Parts of heterogeneous jobs have numbers such as ``17+1``, and
    parts of job arrays such as ``17_1``.
    """
    stem = path.name.removesuffix(".result.json")
    try:
        lines = path.with_name(f"{stem}.jobs").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    jobs = [line.split() for line in dict.fromkeys(lines)]
    return [
        f"{job[0]} of {job[1]} on {job[2]}"
        for job in jobs
        if len(job) == 3 and re.fullmatch(r"\d+([+_]\d+)?", job[0]) and re.split(r"[+_]", job[0])[0] != own
    ]
