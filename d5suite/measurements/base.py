"""A measurement: data about what it needs and shows, and code that prepares and proves one step.

A measurement is a subclass of `Measurement` in its own file. The worker prepares its step once;
every pass (peak memory, energy, time) runs that same `Step`. Imports `d5suite.instruments`,
`d5suite.validate` and its neighbours.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from d5suite.errors import ValidationError
from d5suite.instruments.clock import now
from d5suite.instruments.events import EventLog, TwoClocks
from d5suite.instruments.freshness import Durations
from d5suite.instruments.outside import Fetches, Outside
from d5suite.instruments.sampling import Samples, sample
from d5suite.instruments.settings import SamplingSettings
from d5suite.measurements.tables import Table
from d5suite.validate.check import Check


class Phase(NamedTuple):
    """A part of a step that a recording shows.

    Attributes
    ----------
    holder : object
        An object, or a dict.
    attribute : str
        The holder's attribute, or the dict's key, in which the step looks up what ``kind`` says at
        each use. A recording replaces it for a while.
    name : str
        The phase's name in a recording, such as ``forward``.
    kind : str
        ``call``: a function. ``iterator``: an iterator of batches. ``context``: a function that
        returns a context manager. ``loader``: a function that takes a callback, which is called for
        each piece of work of a loader process.
    role : str
        OTF2's region role, in lower case.
    """

    holder: Any
    attribute: str
    name: str
    kind: str = "call"
    role: str = "function"


STEP = "step"
"""The phase that is one whole step."""


class Step:
    """One prepared step, which every pass runs.

    A pass enters the step as a context manager. What the step needs only while it runs, such as
    loader processes, exists only then.

    Attributes
    ----------
    items : int
        Images or calls per step.
    macs : int or None
        Multiply-accumulates of one forward pass of the batch; None where no network runs.
    built_s : float
        Seconds that building the native code took. A framework may compile then, or in the first
        call.
    first_call_s : float or None
        Duration of building and of the very first call, with compilation; None before that call.
    memory : mapping
        The step's peak memory after the pass ``memory``, if that was taken.
    events : EventLog or None
        Receives each call's time on the device's clock, if the backend can read one.
    calls_per_sample : int
        Calls in a sample; samples are divided by this number.
    flush : callable or None
        Makes the device's L2 cache cold before a call, if requested.
    """

    items: int = 1
    macs: int | None = None
    built_s: float = 0.0
    first_call_s: float | None = None
    memory: Mapping[str, Any] = {}
    events: EventLog | None = None
    calls_per_sample: int = 1
    flush: Callable[[], object] | None = None

    def __enter__(self) -> Step:
        """Acquire what the step needs while it runs."""
        return self

    def __exit__(self, *error: object) -> None:
        """Release what the step needed while it ran."""

    def run(self) -> object:
        """Make the step once. Work may still be pending on the device."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""

    def next_input(self) -> None:
        """Choose the next step's input; called before each sample, outside the clock."""

    def make_one(self) -> None:
        """Make the step once, from its input to the end of its work."""
        self.next_input()
        self.run()
        self.synchronize()

    def make(self, count: int) -> None:
        """Make some steps as they are timed; all ranks make equally many."""
        for _ in range(count):
            self.make_one()

    def phases(self) -> Iterable[Phase]:
        """Yield what a recording shows of the step, once it is entered."""
        yield Phase(self, "make_one", STEP)
        yield Phase(self, "synchronize", "wait for the device")

    def call_first(self) -> None:
        """Run the step for the first time, with compilation, and record how long it took."""
        if self.first_call_s is None:
            start = now()
            self.run()
            self.synchronize()
            self.first_call_s = self.built_s + now() - start

    def reset(self) -> None:
        """Undo what runs of the step have changed, such as parameters."""

    def begin(self) -> None:
        """Bring the step's state, such as weights, to where timing begins."""

    def time(self, settings: SamplingSettings) -> Samples:
        """Take the samples, once the step has begun.

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

    def kept_bytes(self) -> int:
        """Return about how many bytes of inputs and answers the samples have kept."""
        return 0

    def record(self, samples: Samples) -> dict[str, Any]:
        """Return the measurement's part of the record, as in `Measurement.schema`; JSON-able."""
        return {}

    def series(self) -> dict[str, list[float]]:
        """Return further series by name, per sample or per step."""
        return {}

    def memory_by_definition(self) -> dict[str, int]:
        """Return the bytes that network and optimizer need by their definition."""
        return {}


def check_computes(found: Durations) -> Check:
    """Check that a step computes its answers: new input must not take much longer."""
    detail = f"{found.again_s * 1e3:.3g} ms on input fed before, {found.fresh_s * 1e3:.3g} ms on new input"
    return Check("answers remembered instead of computed", float(not found.computes), 0.0, detail)


def check_inside(found: Outside) -> Check:
    """Check that feeding and fetching only copy: a call must not leave its work to them."""
    detail = (
        f"feeding and fetching took {found.outside_s * 1e3:.3g} ms, a timed call {found.call_s * 1e3:.3g} ms, "
        f"copying as many bytes {found.copy_s * 1e3:.3g} ms"
    )
    excess = found.outside_s > found.limit_s
    return Check("work outside the clock, when feeding or fetching", float(excess), 0.0, detail)


def check_fetches(found: Fetches, call_s: float) -> Check:
    """Check that a timed answer was there when the clock stopped, after a call of ``call_s`` s."""
    detail = (
        f"after calls of {call_s * 1e3:.3g} ms, the first fetch took {found.first_s * 1e3:.3g} ms, "
        f"the second {found.second_s * 1e3:.3g} ms"
    )
    return Check("work outside the clock, when a timed answer is fetched", float(found.are_late(call_s)), 0.0, detail)


def check_waits(found: TwoClocks) -> Check:
    """Check that the device had finished when the host's clock stopped."""
    median = statistics.median(found.host_s)
    detail = f"the device worked {found.early_s * 1e3:.3g} ms after synchronize had returned"
    return Check("samples end before the device does", found.early_s / median, found.slack_s / median, detail)


class Measurement(ABC):
    """One kind of measurement.

    Attributes
    ----------
    name : str
        The measurement's name in recipes, options and results.
    level : int
        The benchmark level; see `d5suite.levels.LEVELS`.
    unit : str
        Unit of the throughput.
    needs : sequence of str
        A backend with one of these keys in `Backend.absent` cannot make the measurement.
        ``{format}`` stands for the recipe's storage format.
    takes_memory : bool
        Whether to take the step's peak memory.
    without_memory : str
        The reason if peak memory is not taken.
    takes_energy : bool
        Whether to take the step's energy. The step must be able to run any number of times after
        `Step.reset`, which follows the proof of what was timed.
    without_energy : str
        The reason if energy is not taken.
    takes_layers : bool
        Whether a pass can time the network's nodes in the step: it runs ``workload.executor`` or
        ``workload.trainer``, and little else.
    takes_cold : bool
        Whether samples can be taken with a cold L2 cache: `Step.time` takes them, or passes
        `Step.flush` on.
    runs_network : bool
        Whether a network runs. If not, even a backend too slow for a preset is measured with it.
    of_any_network : bool
        Whether the measurement needs nothing but a network's graph; see
        ``recipes/test_your_network.py``.
    backward : bool
        At level 0, whether the operator's derivatives are needed.
    ranks_of : str
        Name of another measurement. With ``--ranks``, recipes that list that one make this one.
    trains : bool
        Whether the step trains to the target in a preset's `Training`; the preset must have one.
    takes_turns : bool
        Whether samples can be taken in turn with another worker's: the step takes them with
        `d5suite.instruments.sampling.sample` or ``sample_kernel``, and does no background work
        between calls.
    loads : bool
        Whether loader processes run while the step is timed, so that their number matters.
    table : Table
        The table that shows the results; measurements with the same table share it.
    plot : str or None
        A key of `d5suite.report.plots.PLOTS`.
    schema : mapping
        The measurement's part of the record in JSON schema: ``required`` and ``properties``.
    derived : sequence of str
        Names in the schema that `derive` adds.
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
    takes_layers: ClassVar[bool] = False
    takes_cold: ClassVar[bool] = False
    runs_network: ClassVar[bool] = True
    of_any_network: ClassVar[bool] = False
    backward: ClassVar[bool] = False
    ranks_of: ClassVar[str] = ""
    trains: ClassVar[bool] = False
    takes_turns: ClassVar[bool] = True
    loads: ClassVar[bool] = False
    table: ClassVar[Table]
    plot: ClassVar[str | None] = None
    schema: ClassVar[Mapping[str, Any]] = {}
    derived: ClassVar[Sequence[str]] = ()
    checks_after: ClassVar[Sequence[Callable[[Any, Any], Iterable[Check]]]] = ()

    @classmethod  # noqa: B027  (most derive nothing)
    def derive(cls, records: Sequence[dict[str, Any]]) -> None:
        """Add what can only be computed from all records of a run.

        Parameters
        ----------
        records : sequence of dict
            The records of all measurements that share this function; JSON-able.
        """

    @abstractmethod
    def prepare(self, workload: Any) -> Step:
        """Build the step, ready to run: native code built, inputs on the device.

        Parameters
        ----------
        workload : NetworkWorkload or OperatorWorkload
            What all measurements of a case share.
        """

    @abstractmethod
    def prove(self, workload: Any, step: Any) -> Iterable[Check]:
        """Compare the answers with an independent reference before timing.

        Parameters
        ----------
        workload : NetworkWorkload or OperatorWorkload
        step : Step
            What `prepare` returned.
        """

    def check_timed(self, workload: Any, step: Any) -> Iterator[Check]:
        """Run `checks_after`, which prove what was timed; a failed check discards the samples."""
        for check in self.checks_after:
            yield from check(workload, step)

    def explain(self, workload: Any, step: Any, error: ValidationError) -> ValidationError:
        """Return the error of a failed proof, with details that locate the fault."""
        return error

    @classmethod
    def describe(cls) -> dict[str, Any]:
        """Describe the measurement for a reader of results; JSON-able."""
        return {
            "level": cls.level,
            "unit": cls.unit,
            "plot": cls.plot,
            "table": cls.table.to_dict(),
            "schema": dict(cls.schema),
        }
