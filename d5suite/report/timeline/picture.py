"""One step of a trace as a picture for papers: SVG, ranks as rows. Imports `d5suite.traces`."""

from __future__ import annotations

import html
import math
import zlib

from d5suite.errors import TraceError
from d5suite.report.timeline.pack import NANOSECOND, step_spans
from d5suite.traces.analysis import Analysis
from d5suite.traces.waits import SYNCHRONIZING

WIDTH, LABELS, ROW, WAIT, GAP, AXIS = 900, 90, 16, 4, 6, 30
"""Sizes in pixels."""

CHARACTER = 5.6
"""Pixels of a character, roughly."""

NARROWEST = 0.3
"""Pixels below which a region is not drawn."""

WAITING, IN_MPI = "#d9480f", "#b4bcc7"


def picture(found: Analysis, *, number: int, step: str = "step") -> str:
    """Return one step as SVG.

    Parameters
    ----------
    found : Analysis
    number : int
        Number of the step, from 1.
    step : str
        The region that is one step.

    Raises
    ------
    TraceError
        If there is no such step.
    """
    spans = step_spans(found, step)[1]
    if not 1 <= number <= len(spans):
        known = f"the trace has {len(spans)}" if spans else f"no region is called {step!r}"
        raise TraceError(f"there is no step {number}: {known}", hint="--step names the region that is one step.")
    start, end = spans[number - 1]
    trace = found.trace
    labels = max(LABELS, *(math.ceil(12 + CHARACTER * len(each.process)) for each in trace.locations))
    scale = (WIDTH - labels - 10) / (end - start)
    tick = NANOSECOND / trace.ticks_per_second

    def x(time: int) -> float:
        return labels + ((time - trace.begin) * tick - start) * scale

    shapes, top = [], AXIS
    for location, calls in enumerate(found.states.calls):
        columns = (each.tolist() for each in (calls.enter, calls.leave, calls.region, calls.depth))
        deepest, drawn = 0, []
        for enter, leave, index, depth in zip(*columns, strict=True):
            left, right = max(x(enter), labels), min(x(leave), WIDTH - 10)
            if right - left >= NARROWEST:
                deepest = max(deepest, depth)
                region = trace.regions[index]
                colour = IN_MPI if region.is_mpi else WAITING if region.waits else _colour(region.name)
                drawn.append((left, right, depth, colour, region.name))
        if not drawn:
            continue
        shapes.append(f'<text x="4" y="{top + WAIT + 12}">{html.escape(trace.locations[location].process)}</text>')
        for left, right, level, colour, name in drawn:
            y = top + WAIT + level * ROW
            shapes.append(
                f'<rect x="{left:.2f}" y="{y}" width="{right - left:.2f}" height="{ROW - 1}" fill="{colour}">'
                f"<title>{html.escape(name)}</title></rect>"
            )
            if room := int((right - left - 4) / CHARACTER):
                shown = name if len(name) <= room else name[: room - 1] + "…" if room > 3 else ""
                if shown:
                    shapes.append(f'<text x="{left + 2:.2f}" y="{y + 11}">{html.escape(shown)}</text>')
        for wait in found.states.waits:
            if wait.location == location and wait.pattern in SYNCHRONIZING:
                left, right = max(x(wait.begin), labels), min(x(wait.end), WIDTH - 10)
                if right - left >= NARROWEST:
                    shapes.append(
                        f'<rect x="{left:.2f}" y="{top}" width="{right - left:.2f}" height="{WAIT}" fill="{WAITING}">'
                        f"<title>{wait.pattern}</title></rect>"
                    )
        top += WAIT + (deepest + 1) * ROW + GAP
    milliseconds = (end - start) * 1e-6
    legend = f"step {number}: {milliseconds:.4g} ms; orange: waiting for another rank; grey: in MPI"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="10" role="img" aria-label="{html.escape(legend)}">'
        f'<rect width="{WIDTH}" height="{top}" fill="#fff"/><text x="4" y="14">{html.escape(legend)}</text>'
        + "".join(shapes)
        + "</svg>\n"
    )


def _colour(name: str) -> str:
    """Return a colour by a name without its numbers, so that layers of one kind are alike."""
    kind = "".join(character for character in name if not character.isdigit())
    return f"hsl({zlib.crc32(kind.encode()) % 24 * 15},50%,76%)"
