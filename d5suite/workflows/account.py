"""Where the time of a workflow went: by component, by coupling, and the bottleneck in a sentence.

In the terms of Do et al., "A lightweight method for evaluating in situ workflow efficiency"
(Journal of Computational Science 48, 2021), one step of a coupling is: the source computes S and
writes W, the target reads R and computes A. The step takes σ = max(S + W, R + A), and the side with
less to do is idle for the rest: *idle simulation* or *idle analyzer*, here the learner. The
efficiency is ``(S + W) / σ + (R + A) / σ - 1``: 1 if neither is idle. Waiting is no part of S, W, R
and A. Imports the standard library.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

WAITS = 0.1
"""Share of the makespan that counts as waiting."""

Row = Mapping[str, Any]
"""The account of one rank, as `rank_account` makes it."""


def moments(values: Sequence[float]) -> list[float]:
    """Return how many values there are, their sum, and the sum of their squares."""
    return [float(len(values)), sum(values), sum(each * each for each in values)]


def spread(of: Sequence[Sequence[float]]) -> dict[str, float] | None:
    """Return mean and standard deviation, given moments; None without values."""
    count, total, squares = _added(of)
    if not count:
        return None
    mean = total / count
    return {"mean": mean, "std": math.sqrt(max(0.0, squares / count - mean * mean))}


def _added(of: Sequence[Sequence[float]]) -> list[float]:
    return [sum(each[place] for each in of) for place in range(3)]


def rank_account(
    component: str, rank: int, total_s: float, exchange_s: float, ports: Mapping[str, Row],
    iterations_s: Sequence[float] = (),
) -> Row:  # fmt: skip
    """Return the account of one rank over all timed runs.

    Parameters
    ----------
    component : str
    rank : int
        In the job.
    total_s : float
        From the common start to its end.
    exchange_s : float
        In messages between the component's own ranks.
    ports : mapping of str to mapping
        By coupling: ``other``, ``wait_s``, ``move_s``, ``messages``, ``bytes``, ``dropped``,
        ``latency_s``, and by message the `moments` of seconds (``moves``) and of bytes per second
        (``rates``).
    iterations_s : sequence of float
        Seconds of each step of the program.

    Returns
    -------
    mapping
        ``ended_s``, from its end to the slowest rank's, is 0 until all have told their times.
    """
    wait_s, move_s = (sum(each[what] for each in ports.values()) for what in ("wait_s", "move_s"))
    return {
        "component": component, "rank": rank, "total_s": total_s, "ended_s": 0.0, "exchange_s": exchange_s,
        "wait_s": wait_s, "move_s": move_s, "iterations": moments(iterations_s), "ports": dict(ports),
    }  # fmt: skip


def summed(runs: Sequence[Row]) -> dict[str, Any]:
    """Return one rank's account of several runs: sums, and medians of latencies."""
    found: dict[str, Any] = {key: runs[0][key] for key in ("component", "rank")}
    for key in ("total_s", "ended_s", "exchange_s", "wait_s", "move_s"):
        found[key] = sum(row[key] for row in runs)
    found["iterations"] = _added([row["iterations"] for row in runs])
    found["ports"] = {}
    for name, port in runs[0]["ports"].items():
        own = [row["ports"][name] for row in runs]
        sums: dict[str, Any] = {
            key: sum(each[key] for each in own) for key in ("wait_s", "move_s", "messages", "bytes", "dropped")
        }
        latencies = [each["latency_s"] for each in own if each["latency_s"] is not None]
        latency = statistics.median(latencies) if latencies else None
        sums |= {key: _added([each[key] for each in own]) for key in ("moves", "rates")}
        found["ports"][name] = {"other": port["other"], "latency_s": latency, **sums}
    return found


def components_of(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the time of each component: means over its ranks, as shares of the makespan.

    Parameters
    ----------
    rows : sequence of mapping
        By rank, of one run or from `summed`.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["component"] for row in rows):
        own = [row for row in rows if row["component"] == name]
        total = statistics.fmean(row["total_s"] for row in own) or 1e-12

        def share(values: Sequence[float], total: float = total) -> float:
            return min(1.0, max(0.0, statistics.fmean(values) / total))

        computing = [r["total_s"] - r["ended_s"] - r["wait_s"] - r["move_s"] - r["exchange_s"] for r in own]
        waits: dict[str, float] = {}
        for row in own:
            for each in row["ports"].values():
                waits[each["other"]] = waits.get(each["other"], 0.0) + each["wait_s"] / len(own)
        found[name] = {
            "ranks": [row["rank"] for row in own],
            "computing": share(computing),
            "exchanging": share([row["exchange_s"] for row in own]),
            "moving": share([row["move_s"] for row in own]),
            "waiting": share([row["wait_s"] for row in own]),
            "ended": share([row["ended_s"] for row in own]),
            "waits_for": {other: share([seconds]) for other, seconds in waits.items()},
            "iteration_s": spread([row["iterations"] for row in own]),
        }
    return found


def couplings_of(rows: Sequence[Row], kinds: Mapping[str, Row], runs: int) -> dict[str, dict[str, Any]]:
    """Return what each coupling moved, per run, and the efficiency of the two that it joins.

    Parameters
    ----------
    rows : sequence of mapping
        By rank, over all runs.
    kinds : mapping of str to mapping
        By coupling: ``kind``, ``policy``, ``capacity``, ``source``, ``target``.
    runs : int
    """
    found: dict[str, dict[str, Any]] = {}
    for name, said in kinds.items():
        sides: dict[str, dict[str, Any]] = {}
        for side in ("source", "target"):
            own = [row for row in rows if row["component"] == said[side] and name in row["ports"]]
            ports = [row["ports"][name] for row in own]
            sides[side] = {
                "own": own,
                "ports": ports,
                "wait_s": statistics.fmean(each["wait_s"] for each in ports) / runs if ports else 0.0,
                "move_s": statistics.fmean(each["move_s"] for each in ports) / runs if ports else 0.0,
                "busy_s": statistics.fmean(
                    each["total_s"] - each["ended_s"] - each["wait_s"] - each["move_s"] for each in own
                ) / runs if own else 0.0,
            }  # fmt: skip
        gave, took = sides["source"], sides["target"]
        one, other = gave["busy_s"] + gave["move_s"], took["busy_s"] + took["move_s"]
        longest = max(one, other) or 1e-12
        latencies = [each["latency_s"] for each in took["ports"] if each["latency_s"] is not None]
        moved = sum(each["bytes"] for each in took["ports"]) / runs
        seconds = max(gave["move_s"], took["move_s"])
        found[name] = {
            **said,
            "messages": round(sum(each["messages"] for each in gave["ports"]) / runs, 3),
            "taken": round(sum(each["messages"] for each in took["ports"]) / runs, 3),
            "dropped": round(sum(each["dropped"] for each in gave["ports"]) / runs, 3),
            "bytes": moved,
            "write_s": gave["move_s"], "read_s": took["move_s"],
            "wait_for_room_s": gave["wait_s"], "wait_for_data_s": took["wait_s"],
            "latency_s": statistics.median(latencies) if latencies else None,
            **{
                f"message_{what}": spread([each[key] for each in side["ports"]])
                for verb, side in (("write", gave), ("read", took))
                for what, key in ((f"{verb}_s", "moves"), (f"{verb}_bytes_per_s", "rates"))
            },
            "bytes_per_s": moved / seconds if seconds else None,
            "efficiency": one / longest + other / longest - 1.0,
            "idle": "source" if one < other else "target",
            "idle_share": 1.0 - min(one, other) / longest,
        }  # fmt: skip
    return found


def bottleneck(
    components: Mapping[str, Mapping[str, Any]], couplings: Mapping[str, Mapping[str, Any]], makespan_s: float
) -> dict[str, str]:
    """Return what limits the makespan: ``kind``, ``where``, a ``sentence``, and what would mend it.

    Parameters
    ----------
    components, couplings : mapping
        From `components_of` and `couplings_of`.
    makespan_s : float
        Makespan of a run.
    """
    total = makespan_s or 1e-12

    def idle(name: str) -> float:
        return float(components[name]["waiting"] + components[name]["ended"])

    busiest = min(components, key=idle)
    others = [name for name in components if name != busiest]
    most = max(others, key=idle, default=busiest)
    for name, each in couplings.items():
        full, empty = each["wait_for_room_s"] / total, each["wait_for_data_s"] / total
        if min(full, empty) >= WAITS:
            return {
                "kind": "buffer", "where": name,
                "sentence": f"{each['source']} waits {full:.0%} of the time for room in {name}, and {each['target']} "
                f"{empty:.0%} for data: its buffer of {each['capacity']} is full and empty in turn",
                "mend": f"give {name} a larger buffer (capacity)",
            }  # fmt: skip
    if not others or idle(most) < WAITS:
        return {
            "kind": "none", "where": busiest,
            "sentence": "no component waits for more than a tenth of the time: they are balanced",
            "mend": "make every component faster, or give all of them more cores",
        }  # fmt: skip
    one = components[busiest]
    waits = f"{most} is idle {idle(most):.0%} of the time"
    if one["moving"] > one["computing"] + one["exchanging"]:
        sides = {
            name: each["write_s"] if each["source"] == busiest else each["read_s"]
            for name, each in couplings.items()
            if busiest in (each["source"], each["target"])
        }
        name = max(sides, key=lambda key: sides[key])
        return {
            "kind": "moving", "where": name,
            "sentence": f"{busiest} spends {one['moving']:.0%} of the time moving data, most of it through {name} "
            f"({couplings[name]['kind']}); {waits}",
            "mend": f"choose a faster coupling than {couplings[name]['kind']} for {name}, or send less",
        }  # fmt: skip
    if idle(busiest) >= WAITS and one["waits_for"] and max(one["waits_for"].values()) >= WAITS:
        other = max(one["waits_for"], key=lambda key: one["waits_for"][key])
        return {
            "kind": "turns", "where": busiest,
            "sentence": f"{busiest} and {other} wait for each other in turn, {idle(busiest):.0%} and {idle(other):.0%} "
            "of the time",
            "mend": "let each go on while the other works: ask earlier, or for more at once",
        }  # fmt: skip
    if one["exchanging"] > one["computing"]:
        return {
            "kind": "exchanging", "where": busiest,
            "sentence": f"{busiest} spends {one['exchanging']:.0%} of the time in messages between its own ranks and "
            f"computes {one['computing']:.0%}; {waits}",
            "mend": f"give {busiest} fewer ranks, place them nearer to each other, or send less between them",
        }  # fmt: skip
    between = f" and spends {one['exchanging']:.0%} in messages between its own ranks" * (one["exchanging"] >= WAITS)
    return {
        "kind": "computing", "where": busiest,
        "sentence": f"{busiest} computes {one['computing']:.0%} of the time{between}; {waits}",
        "mend": f"give {busiest} more ranks or threads and {most} fewer, or let a policy discard what {busiest} "
        "cannot use",
    }  # fmt: skip
