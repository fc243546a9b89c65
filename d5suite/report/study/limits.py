"""How near operators come to their ceilings, and whether loading keeps pace with training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from d5suite.report.ceilings import RATES, share_of_ceiling
from d5suite.report.compare import is_reduced, setting
from d5suite.report.page.gather import Row
from d5suite.report.study.claims import Claim, say
from d5suite.report.study.figures import place_in
from d5suite.report.study.gathered import Gathered

LIMITS = {
    "flops_per_s": ("arithmetic", "the run's fastest large product"),
    "bytes_per_s": ("memory traffic", "the run's fastest copy"),
}
"""By rate: what its ceiling limits, and what sets the ceiling. The nearer ceiling need not be the
one that limits."""


def pace(found: Gathered, loading: Sequence[Row], training: Sequence[Row]) -> Iterator[tuple[float, Claim | None]]:
    """Yield the rate of loading over that of the training step, and a sentence on it."""

    def key(row: Row) -> tuple[str, ...]:
        return row.file, row.case, row.backend, setting(row.record)

    steps = {key(row): row for row in training if row.measurement == "training_step"}
    for row in loading:
        step = steps.get(key(row))
        if row.measurement == "input_pipeline" and step is not None and found.decides(row, step):
            rates = [place_in(found.place(each), "throughput.value") for each in (row, step)]
            ratio = found.figure("quotient", rates, "times")
            yield ratio.value if ratio else 0.0, say(
                f"{row.case} on {row.backend} ({setting(row.record)}): loading alone gives ",
                found.of(row, "throughput.value", "figure"), f" {row.record['throughput']['unit']}, ", ratio,
                " times the rate of the training step.",
            )  # fmt: skip


def near_ceilings(found: Gathered, rows: Sequence[Row]) -> Iterator[Claim | None]:
    """Say how near the best backend of each case comes to the nearer of two ceilings.

    Cases that exceed one, as from a cache, are left out.
    """
    nearest: dict[tuple[str, ...], tuple[float, str, Row]] = {}
    for row in rows:
        if found.decides(row) and not is_reduced(row.record):
            share, rate = max((share_of_ceiling(row.record, rate).value or 0.0, rate) for rate in RATES)
            key = (found.run_of(row).machine, row.case, row.measurement, setting(row.record))
            if share > nearest.get(key, (0.0,))[0]:
                nearest[key] = share, rate, row
    for rate, (kind, best) in LIMITS.items():
        own = [(share, row) for share, of, row in nearest.values() if of == rate and share <= 1]
        if own:
            places = [place_in(found.place(row), f"fraction_of_ceiling.{rate}") for _, row in own]
            top = max(own, key=lambda each: each[0])[1]
            yield say(
                found.figure("count", places), f" cases are nearest to the ceiling of {kind}, {best}: ",
                "the best backend reaches ",
                found.figure("median", places, "percent"), " of it in the median, and ",
                found.figure("most", places, "percent"), f" at most ({top.case} {top.measurement} on {top.backend}).",
            )  # fmt: skip
