"""Records of each node that ran ranks of a job: its state, and whether it is slow."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d5suite.errors import JobError
from d5suite.job import Job, Result, of_rank

SLOWER = 1.1
"""A node is named if its ranks compute for this multiple of the median node's time: spread over
steps is below 5% on a quiet machine."""


def add_nodes(record: dict[str, Any], key: str, job: Job, first: Result, path: Path) -> None:
    """Give a record its nodes; another disturbed node, or a slow one, is a reason to doubt it.

    Parameters
    ----------
    record : dict
        Of rank 0.
    key : str
        Of the measurement.
    job : Job
    first : Result
        Of rank 0.
    path : Path
        Where rank 0's result is; those of the others lie beside it.
    """
    results: list[Result | None] = [first]
    for rank in range(1, job.ranks):
        try:
            results.append(Result.load(of_rank(path, rank)))
        except JobError:
            results.append(None)
    names = [each.environment.get("slurm", {}).get("node") if each is not None else None for each in results]
    if names[0] is None:
        return
    parts = {each["rank"]: each.get("parts") or {} for each in record.get("distributed", {}).get("ranks", ())}
    nodes = []
    for name in dict.fromkeys(name for name in names if name is not None):
        ranks = [rank for rank, own in enumerate(names) if own == name]
        measured = [results[rank].measurements[key] for rank in ranks if _has(results[rank], key)]  # type: ignore[union-attr]
        times = [parts[rank]["computing_s"] for rank in ranks if parts.get(rank, {}).get("computing_s") is not None]
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
    record["nodes"] = nodes
    _add_others(record, first, path)
    reasons = [*record["machine"]["reasons"]]
    for node in nodes[1:]:
        reasons += [f"{node['name']}: {reason}" for reason in node["reasons"]]
    record["machine"] = {"disturbed": bool(reasons), "reasons": reasons}
    slow = slow_nodes(nodes)
    if slow:
        record["warnings"] = [*record.get("warnings", []), *slow]


def slow_nodes(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name nodes whose ranks compute longer than those of their peers."""
    times = {each["name"]: each["computing_s"] for each in nodes if each["computing_s"]}
    found = []
    for name, own in times.items():
        peers = statistics.median(other for each, other in times.items() if each != name) if len(times) > 1 else own
        if own > SLOWER * peers:
            found.append(f"node {name} is slow: its ranks compute {own / peers:.2f} times as long as its peers'")
    return found


def _has(result: Result | None, key: str) -> bool:
    return result is not None and key in result.measurements


def _add_others(record: dict[str, Any], first: Result, path: Path) -> None:
    """Add other jobs on the nodes, as the batch script found them before and after."""
    own = str(first.environment["slurm"].get("job"))
    stem = path.name.removesuffix(".result.json")
    try:
        lines = path.with_name(f"{stem}.jobs").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    others = [line.split() for line in dict.fromkeys(lines)]
    named = [f"{job[0]} of {job[1]} on {job[2]}" for job in others if len(job) == 3 and job[0].isdecimal()]
    found = [each for each in named if each.split()[0] != own]
    record["other_jobs"] = found
    if found:
        record["machine"]["reasons"] = [*record["machine"]["reasons"], f"other jobs on its nodes: {', '.join(found)}"]
