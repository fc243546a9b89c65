"""Tables as data: which figures of a record they show, and how.

`d5suite.report.compare` draws them. Imports `d5suite.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from d5suite.errors import ConfigurationError


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes
    ----------
    heading : str
    value : str
        Path of the value in a record: names separated by dots.
    format : str
        A key of `d5suite.report.formats.FORMATS`.
    scale : float
        Factor of the value.
    shown : {"always", "wide", "one file", "wide, one file", "wide or one file"}
        Where the column is shown: always, in a wide terminal, or in a table of one file.
    better : {"", "lower", "higher"}
        Which values are better, if ``d5suite compare`` is to judge the figure. It must then be a
        number that is not negative.
    least : float
        Smallest difference that counts as a change, in the unit of the record.
    """

    heading: str
    value: str
    format: str = "figure"
    scale: float = 1.0
    shown: str = "always"
    better: str = ""
    least: float = 0.0

    def __post_init__(self) -> None:
        if self.better not in ("", "lower", "higher"):
            raise ConfigurationError(
                f"better is {self.better!r}", where=f"column {self.heading!r}", hint='Write "lower" or "higher".'
            )


@dataclass(frozen=True)
class Table:
    """The columns of one or several measurements.

    Attributes
    ----------
    columns : tuple of Column
    note : str
        Explanation of the headings, in one line.
    width : int
        Smallest width of the first column, in characters.
    """

    columns: tuple[Column, ...]
    note: str = ""
    width: int = 20

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON-able values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Table:
        """Rebuild a table from `to_dict`."""
        return cls(tuple(Column(**each) for each in content["columns"]), content["note"], content["width"])


IN_WIDE_TERMINAL = ", in a terminal of 100 columns or more"
"""Part of a note that a page leaves out."""

WORST_ERROR = Column("err/tol", "validation.checks", "worst share")
"""The largest error as a part of its tolerance."""

TIMES = Table(
    (
        Column("median ms", "median_s", scale=1e3),
        Column("interval", "median_ci95", "interval", scale=1e3),
        Column("images/s", "throughput.value"),
        Column("first s", "first_call_s", "hundredths", shown="wide, one file"),
        Column("MiB", "peak_memory_bytes", "mebibytes", shown="one file"),
        Column("needed", "memory", "needed mebibytes", shown="wide, one file"),
        WORST_ERROR,
    ),
    f"MiB: peak memory; needed: what the step must hold at least{IN_WIDE_TERMINAL}",
    width=16,
)
"""A step's time."""

LOADING = Table(
    (
        Column("median ms", "median_s", scale=1e3),
        Column("interval", "median_ci95", "interval", scale=1e3, shown="wide"),
        Column("images/s", "throughput.value"),
        Column("per core", "images_per_s_per_core"),
        Column("wait ms", "wait_s", scale=1e3),
        WORST_ERROR,
    ),
    "per core: images/s by cores of the job; wait: for a batch, without its feeding",
    width=21,
)
"""Loading images."""

RATIOS = Table(
    (
        Column("median ms", "median_s", scale=1e3),
        Column("interval", "median_ci95", "interval", scale=1e3, shown="wide"),
        Column("÷ native", "ratio.median", "thousandths"),
        Column("its interval", "ratio.ci95", "range of thousandths"),
        WORST_ERROR,
    ),
)
"""d5suite over the framework's own way."""

KERNELS = Table(
    (
        Column("median µs", "median_s", scale=1e6),
        Column("interval", "median_ci95", "interval", scale=1e6),
        Column("GFLOP/s", "achieved.flops_per_s", scale=1e-9),
        Column("of peak", "fraction_of_ceiling.flops_per_s", "part of the arithmetic ceiling"),
        Column("GB/s", "achieved.bytes_per_s", scale=1e-9),
        WORST_ERROR,
    ),
    "of peak: percent of the run's fastest large matrix product, on any backend",
)
"""Single operators."""

COLLECTIVES = Table(
    (
        Column("least µs", "latency_s", scale=1e6),
        Column("α µs", "line.alpha_s", scale=1e6, shown="wide"),
        Column("largest ms", "median_s", scale=1e3),
        Column("bus GB/s", "bus_bytes_per_s", scale=1e-9),
        Column("1/β GB/s", "line.bytes_per_s", scale=1e-9),
        Column("off", "line.residual", "percent", shown="wide"),
        WORST_ERROR,
    ),
    "least, largest: time of the smallest and largest size; bus: best bus bandwidth; α + β·bytes: fitted, and how far "
    "off",
)
"""Collectives of all sizes."""

WORKFLOWS = Table(
    (
        Column("makespan s", "median_s"),
        Column("interval", "median_ci95", "interval", shown="wide"),
        Column("steps/s", "throughput.value"),
        Column("in situ", "efficiency", "percent"),
        Column("waits", "idle_share", "percent"),
        WORST_ERROR,
    ),
    "in situ: efficiency of the least efficient coupling; waits: the component that waits most",
    width=24,
)
"""Coupled workflows."""
