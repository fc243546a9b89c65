"""Where the time goes, steps under the machine's roofs, and models beside measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from d5suite.errors import D5Error
from d5suite.models.ceilings import read_ceilings
from d5suite.report.compare import is_reduced, setting
from d5suite.report.formats import BY_DEFINITION
from d5suite.report.page.gather import Row
from d5suite.report.roofline import Roofline, rooflines, timed_nodes
from d5suite.report.study.claims import Claim, Heading, ReportTable, said, say, words
from d5suite.report.study.figures import StatedFigure, place_in, pointer
from d5suite.report.study.gathered import Gathered

LEAST_SHARE = 0.01
"""Least part of a step for which an operator is mentioned."""

MOST_OPERATORS = 6
"""Most operators of a step that are mentioned."""

LEAST_COVERAGE = 0.9
"""Part of a step that the nodes of a profile must explain, or the report says that they do not."""

MOST_TOLD = 12


ROOF_FORMS = {"flops": "GFLOP/s", "bandwidth": "GB/s"}
"""How ceilings are shown, by what they limit."""


def layered(found: Gathered) -> list[Row]:
    """Return the rows with layer times."""
    sound = [row for row in found.rows if not row.failed and not is_reduced(row.record)]
    return [row for row in sound if (part := row.record.get("layers")) and not part.get("missing")]


def where_time_goes(found: Gathered) -> tuple[list[Claim], list[ReportTable]]:
    """Return which operators take the time of steps, by case and backend."""
    claims: list[Claim | None] = []
    lines: list[Any] = []
    for row in layered(found):
        operators = _operators(found, row)
        step = place_in(found.place(row), "layers.step_s")
        coverage = found.of(row, "layers.coverage", "percent")
        for place, (name, seconds) in enumerate(list(operators.items())[:MOST_OPERATORS]):
            share = found.figure("share", [*seconds, step], "percent")
            if share is None or share.value < LEAST_SHARE:
                continue
            lines.append([
                f"{row.case} {row.measurement}", row.backend, name, found.figure("sum", seconds, "ms"), share, coverage,
            ])  # fmt: skip
            if place == 0 and row.record["layers"]["coverage"] >= LEAST_COVERAGE and found.decides(row):
                claims.append(say(
                    f"{row.case} {row.measurement.replace('_', ' ')} on {row.backend} ({setting(row.record)}): ", share,
                    f" of the step is in {name}; nodes explain ", coverage, " of it.",
                ))  # fmt: skip
    headings = [
        *words("case", "backend", "operator"),
        Heading("ms", ("seconds",)), Heading("of the step", ("share",)), Heading("explained by nodes", ("coverage",)),
    ]  # fmt: skip
    caption = "Where the time of a step goes: its slowest operators, of at least 1%"
    return said(claims)[:MOST_TOLD], [ReportTable.of("layers", caption, headings, lines)] if lines else []


def _operators(found: Gathered, row: Row) -> dict[str, list[str]]:
    """Return where the raw data hold each operator's seconds, the slowest operator first."""
    seconds: dict[str, float] = defaultdict(float)
    places: dict[str, list[str]] = defaultdict(list)
    for group, op_type, work in timed_nodes(row.record["layers"]):
        seconds[op_type] += work.seconds
        places[op_type] += [place_in(found.place(row), f"layers.times.{each}.seconds") for each in group.places]
    return {name: places[name] for name in sorted(places, key=lambda name: -seconds[name])}


def under_roofs(found: Gathered) -> tuple[list[Claim], list[ReportTable], list[tuple[str, list[Roofline]]]]:
    """Return steps under their machine's roofs: sentences, a table, and what to draw by machine."""
    claims: list[Claim | None] = []
    lines: list[Any] = []
    drawn: list[tuple[str, list[Roofline]]] = []
    for machine, file in found.ceilings.items():
        try:
            ceilings = read_ceilings(found.folder / file)
        except D5Error as error:
            found.left_out[file] = error.what
            continue
        own = [row for row in layered(found) if found.run_of(row).machine == machine]
        placed: list[Roofline] = []
        for row in own:
            key = (f"{row.case}/{row.measurement}", tuple(_conditions(found, row).items()), row.backend)
            made, _ = rooflines({key: row.record}, ceilings)
            placed += made
            share, rate = (
                _roof(found, row, file, what, form) for what, form in (("share", "percent"), ("flops", "GFLOP/s"))
            )
            if not made or share is None or not share.value or not found.decides(row):
                continue
            bound = made[0].step.placed.bound
            intensity = _roof(found, row, file, "intensity", "figure")
            lines.append([
                f"{row.case} {row.measurement}", row.backend, found.of(row, "threads", "count"),
                found.of(row, "batch_size", "count"), rate, intensity, share, bound,
            ])  # fmt: skip
            claims.append(say(
                f"{row.case} {row.measurement.replace('_', ' ')} on {row.backend} ({setting(row.record)}) runs at ",
                rate, " GFLOP/s, ", share, f" of its roof, which {bound} sets.",
            ))  # fmt: skip
        if placed:
            drawn.append((machine, placed))
    headings = [
        *words("case", "backend"), Heading("threads"), Heading("batch"), Heading("GFLOP/s", ("flops per s",)),
        Heading("FLOP/byte"), Heading("of its roof", ("share",)), *words("roof set by"),
    ]  # fmt: skip
    caption = "Steps under the machine's roofs; bytes are counted from shapes"
    return said(claims)[:MOST_TOLD], [ReportTable.of("rooflines", caption, headings, lines)] if lines else [], drawn


def _conditions(found: Gathered, row: Row) -> Mapping[str, str]:
    return next(section.conditions for section, group in found.groups if row in group.rows)


def _roof(found: Gathered, row: Row, file: str, what: str, form: str) -> StatedFigure | None:
    return found.raw.figure(f"roof:{what}", [found.place(row), f"{file}#"], form)


def models_and_measured(found: Gathered) -> tuple[list[Claim], list[ReportTable]]:
    """Return memory by definition beside memory measured, and how far fitted lines are off."""
    lines, quotients = [], list[tuple[float, Claim | None]]()
    for row in found.rows:
        memory = row.record.get("memory") or {}
        if row.failed or row.record["level"] == 3 or not all(name in memory for name in ("peak_bytes", *BY_DEFINITION)):
            continue
        place = found.place(row)
        needed = [place_in(place, f"memory.{name}") for name in BY_DEFINITION]
        over = found.figure("over sum", [place_in(place, "memory.peak_bytes"), *needed], "times")
        if over is None:
            continue
        what = f"{row.case} {row.measurement.replace('_', ' ')}"
        peak = found.of(row, "memory.peak_bytes", "MiB")
        lines.append([what, row.backend, peak, found.figure("sum", needed, "MiB"), over])
        quotients.append(
            (over.value, say(f"{what} on {row.backend} takes ", over, " times the memory that it needs by definition."))
        )
    quotients.sort(key=lambda each: each[0])
    claims = [quotients[0][1], quotients[-1][1]] if len(quotients) > 1 else [each for _, each in quotients]
    off = [
        place_in(found.place(row), "line.residual") for row in found.rows if not row.failed and row.record.get("line")
    ]
    claims.append(say(
        "The line of latency and bandwidth is fitted to ", found.figure("count", off), " collectives; half of the fits "
        "are less than ", found.figure("median", off, "percent"), " off, and the worst one ",
        found.figure("most", off, "percent"), ".",
    ))  # fmt: skip
    headings = [
        *words("case", "backend"), Heading("measured MiB", ("measured bytes",)),
        Heading("by definition MiB", ("by definition bytes",)), Heading("quotient"),
    ]  # fmt: skip
    caption = "Peak memory, that of the whole process, and what a step needs by definition"
    return said(claims), [ReportTable.of("memory", caption, headings, lines)] if lines else []


def lacking_coverage(found: Gathered) -> Iterator[Claim | None]:
    """Say how many profiles explain too little of a step, and which one explains least."""
    rows = layered(found)
    places = [place_in(found.place(row), "layers.coverage") for row in rows]
    few = found.figure(f"below:{LEAST_COVERAGE}", places)
    if few and few.value:
        least = min(rows, key=lambda row: row.record["layers"]["coverage"])
        what = f"{least.case} {least.measurement.replace('_', ' ')} on {least.backend}"
        yield say(
            few, " of ", found.figure("count", places), f" profiles of layers explain less than {LEAST_COVERAGE:.0%} "
            f"of their step. The least: the nodes of {what} explain ", found.of(least, "layers.coverage", "percent"),
            " of the step only.",
        )  # fmt: skip


def doubtful_ceilings(found: Gathered) -> Iterator[Claim | None]:
    """Say which ceilings may be below what the machine does."""
    for machine, file in found.ceilings.items():
        try:
            entries = read_ceilings(found.folder / file).entries
        except D5Error:  # `under_roofs` says that it is left out
            continue
        places = [f"{file}#{pointer('ceilings', place)}" for place in range(len(entries))]
        judged = [f"{place}/agrees" for place, each in zip(places, entries, strict=True) if "agrees" in each]
        apart, lost = found.figure("false", judged), found.figure("length", [f"{file}#/not_kept"])
        if apart and apart.value:
            yield say(
                apart, " of ", found.figure("count", judged), f" ceilings of {machine} were reached by one way of "
                "measuring only; independent ways stayed below.",
            )  # fmt: skip
        if lost and lost.value:
            yield say(lost, f" measurements of the ceilings of {machine} were disturbed and are left out.")
        fewer: dict[tuple[Any, ...], tuple[str, Mapping[str, Any]]] = {}
        for place, each in sorted(zip(places, entries, strict=True), key=lambda one: one[1].get("threads", 1)):
            below, base = fewer.setdefault(
                tuple(each.get(name) for name in ("what", "level", "precision", "device")), (place, each)
            )  # fmt: skip
            form = ROOF_FORMS.get(each["what"])
            if form and each["value"] < base["value"]:
                value, more = (found.figure("value", [f"{one}/value"], form) for one in (place, below))
                threads, single = (found.figure("value", [f"{one}/threads"]) for one in (place, below))
                yield say(
                    f"The ceiling of {each.get('level') or each.get('precision')} on {machine} is too low for ",
                    threads, " threads: ", value, f" {form}, and ", more, f" {form} for ", single, ".",
                )  # fmt: skip
