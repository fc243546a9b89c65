"""A measurement: data that says what it needs and shows, and code that prepares one step.

A measurement is a subclass of `Measurement` in a file of its own. The worker prepares its step
once; every pass (peak memory, time, later traces) runs that same `Step`. Imports
`d5suite.instruments`, `d5suite.validate` and its neighbours.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from d5suite.errors import ValidationError
from d5suite.instruments.clock import now
from d5suite.instruments.events import EventLog, TwoClocks
from d5suite.instruments.freshness import Durations
from d5suite.instruments.sampling import Samples, sample
from d5suite.instruments.settings import SamplingSettings
from d5suite.measurements.tables import Table
from d5suite.validate.check import Check


class Step:
    """One prepared step, which every pass runs.

    A pass enters it as a context manager, so that what a step needs only while it runs, such as
    loader processes, exists only then.

    Attributes
    ----------
    items : int
        Images or calls per step.
    macs : int or None
        Multiply-accumulates of one forward pass of the batch; None where no network runs.
    first_call_s : float or None
        Seconds that the very first call took, compilation included; None before it.
    memory : mapping
        Its peak memory, once that is taken: `d5suite.job.Measured.memory`.
    events : EventLog or None
        Receives the device's own time of each call, where the backend has a clock for it.
    calls_per_sample : int
        By which samples are divided.
    flush : callable or None
        Makes the device's L2 cache cold, where that was asked for.
    """

    items: int = 1
    macs: int | None = None
    first_call_s: float | None = None
    memory: Mapping[str, Any] = {}
    events: EventLog | None = None
    calls_per_sample: int = 1
    flush: Callable[[], object] | None = None

    def __enter__(self) -> Step:
        """Acquire what running needs."""
        return self

    def __exit__(self, *error: object) -> None:
        """Release it."""

    def run(self) -> object:
        """Do the step once. Work may still be pending on the device."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Return when all work has finished."""

    def next_input(self) -> None:
        """Choose the input of the next step; called before each sample, outside the clock."""

    def call_first(self) -> None:
        """Run the step for the first time, compilation included, and note how long it took."""
        if self.first_call_s is None:
            start = now()
            self.run()
            self.synchronize()
            self.first_call_s = now() - start

    def reset(self) -> None:
        """Undo what running has changed, such as parameters."""

    def time(self, settings: SamplingSettings) -> Samples:
        """Take the samples.

        Parameters
        ----------
        settings : SamplingSettings
        """
        samples = sample(
            self.run,
            self.synchronize,
            settings,
            before_sample=self.next_input,
            events=self.events,
            flush=self.flush,
        )
        return samples if self.first_call_s is None else replace(samples, first_call_s=self.first_call_s)

    def record(self, samples: Samples) -> dict[str, Any]:
        """Return the measurement's own part of the record by `Measurement.schema`; JSON-able."""
        return {}

    def series(self) -> dict[str, list[float]]:
        """Return further per-sample or per-step series."""
        return {}

    def memory_by_definition(self) -> dict[str, int]:
        """Return the bytes that network and optimizer need by definition."""
        return {}


def check_computes(found: Durations) -> Check:
    """Check that a step computes its answers: new input must not take far longer."""
    detail = f"{found.again_s * 1e3:.3g} ms on input fed before, {found.fresh_s * 1e3:.3g} ms on new input"
    return Check("answers remembered instead of computed", float(not found.computes), 0.0, detail)


def check_waits(found: TwoClocks) -> Check:
    """Check that the host's clock stopped after the device had finished."""
    median = statistics.median(found.host_s)
    detail = f"the device worked {found.early_s * 1e3:.3g} ms after synchronize had returned"
    return Check("samples end before the device does", found.early_s / median, found.slack_s / median, detail)


class Measurement(ABC):
    """One kind of measurement.

    Attributes
    ----------
    name : str
        As recipes, options and results call it.
    level : int
        The benchmark level; see `d5suite.levels.LEVELS`.
    unit : str
        Of its throughput.
    needs : sequence of str
        Keys of `Backend.absent` under which a backend cannot make it. ``{format}`` stands for the
        storage format of the recipe.
    takes_memory : bool
        Whether the peak memory of its step is taken.
    without_memory : str
        Otherwise, why not.
    takes_energy : bool
        Whether the energy of its step is taken: the step can run any number of times before it is
        timed, and `Step.time` begins from the start.
    without_energy : str
        Otherwise, why not.
    takes_cold : bool
        Whether its samples can be taken with a cold L2 cache: they are made by `Step.time`, or pass
        `Step.flush` on.
    runs_network : bool
        Whether it runs a network: a backend that is too slow for a preset is not too slow for one
        that does not.
    of_any_network : bool
        Whether it measures a network of which nothing is known but its graph; see
        ``recipes/test_your_network.py``.
    backward : bool
        At level 0: whether it needs the operator's derivatives.
    ranks_of : str
        A measurement: each recipe that makes it makes this one with ``--ranks``.
    trains : bool
        Whether it trains to the target of a preset's `Training`, which it then needs.
    takes_turns : bool
        Whether its samples can be taken in turn with another worker's: the step makes them through
        `d5suite.instruments.sampling.sample` or ``sample_kernel``, and nothing of it works between
        two calls.
    table : Table
        The table that shows it; measurements with one table stand in it together.
    plot : str or None
        A key of `d5suite.report.plots.PLOTS`.
    schema : mapping
        Its part of the record in JSON schema: ``required`` and ``properties``.
    derived : sequence of str
        The names in it that `derive` adds.
    checks_after : sequence of callable
        What is checked after timing, in this order. Each takes workload and step, and yields
        checks.
    """

    name: ClassVar[str]
    level: ClassVar[int]
    unit: ClassVar[str] = "images/s"
    needs: ClassVar[Sequence[str]] = ()
    takes_memory: ClassVar[bool] = False
    without_memory: ClassVar[str] = "not taken for this measurement"
    takes_energy: ClassVar[bool] = False
    without_energy: ClassVar[str] = "not taken for this measurement"
    takes_cold: ClassVar[bool] = False
    runs_network: ClassVar[bool] = True
    of_any_network: ClassVar[bool] = False
    backward: ClassVar[bool] = False
    ranks_of: ClassVar[str] = ""
    trains: ClassVar[bool] = False
    takes_turns: ClassVar[bool] = True
    table: ClassVar[Table]
    plot: ClassVar[str | None] = None
    schema: ClassVar[Mapping[str, Any]] = {}
    derived: ClassVar[Sequence[str]] = ()
    checks_after: ClassVar[Sequence[Callable[[Any, Any], Iterable[Check]]]] = ()

    @classmethod  # noqa: B027  (most derive nothing)
    def derive(cls, records: Sequence[dict[str, Any]]) -> None:
        """Add to the records of a run what needs all of them.

        Parameters
        ----------
        records : sequence of dict
            Of all measurements that share this function; JSON-able.
        """

    @abstractmethod
    def prepare(self, workload: Any) -> Step:
        """Build the step, ready to run: native code built, inputs on the device.

        Parameters
        ----------
        workload : NetworkWorkload or OperatorWorkload
            What the measurements of a case share.
        """

    @abstractmethod
    def prove(self, workload: Any, step: Any) -> Iterable[Check]:
        """Compare the answers with an independent reference, before they are timed.

        Parameters
        ----------
        workload : NetworkWorkload or OperatorWorkload
        step : Step
            What `prepare` returned.
        """

    def check_timed(self, workload: Any, step: Any) -> Iterator[Check]:
        """Make `checks_after`, which prove what was timed; a failed one discards the samples."""
        for check in self.checks_after:
            yield from check(workload, step)

    def explain(self, workload: Any, step: Any, error: ValidationError) -> ValidationError:
        """Return the error of a failed proof, with details that locate the fault."""
        return error

    @classmethod
    def describe(cls) -> dict[str, Any]:
        """Return all that a reader of results needs to know about it, JSON-able."""
        return {
            "level": cls.level,
            "unit": cls.unit,
            "plot": cls.plot,
            "table": cls.table.to_dict(),
            "schema": dict(cls.schema),
        }
