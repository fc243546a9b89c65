"""A trace of a step: its phases, messages and loader processes, on all ranks and on one clock."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from d5suite.distributed.clocks import Offset, compare_clocks
from d5suite.distributed.gathering import gather
from d5suite.errors import D5Error
from d5suite.instruments.clock import now
from d5suite.instruments.recorder import Recorder
from d5suite.instruments.resources import sampled
from d5suite.instruments.sampling import quiet_interpreter
from d5suite.levels.distributed import Communicator
from d5suite.measurements import schemas as s
from d5suite.measurements.base import STEP, Step
from d5suite.passes.base import FILES, Pass, PassError, PreparedStep
from d5suite.passes.recording import recorded
from d5suite.statistics.ratios import paired_ratio
from d5suite.traces.analysis import analyse
from d5suite.traces.archive import ANCHOR, require_library, write_archive
from d5suite.traces.events import Trace
from d5suite.traces.recorded import read_recording

STEPS = (3, 50)
"""Fewest and most steps to record."""

RECORDED_S = 1.0
"""Seconds of steps to record, within the limits of `STEPS`."""

PAIRS = (5, 20)
"""Fewest and most pairs of turns with and without the recorder."""

PAIRS_S = 2.0
"""Seconds of such pairs, within the limits of `PAIRS`."""

TURN_S = 0.02
"""Approximate length of a turn in seconds: shorter steps are made several times."""

SCHEMA = s.record(
    {
        FILES: s.text("the folder of the archive"),
        "archive": s.text("its file in that folder"),
        "steps": s.integer(minimum=1),
        "events": s.integer(minimum=0),
        "dropped_events": s.integer(minimum=0),
        "slowdown": s.mapping(
            {"ratio": s.number(), "ci95": s.pair(), "confidence": s.number(), "pairs": s.integer(minimum=1)},
            optional=["confidence"],
            description="of the same step with the recorder over without, in turn; the median of pairs",
        ),
        "clock_error_s": s.or_null(s.number("of ranks' times; null: not known")),
        "phases_s": s.by_name(s.number(), "seconds of a step in each region itself, mean of steps and ranks"),
        "waiting_s": s.by_name(s.number(), "by wait state, of all ranks"),
        "notes": s.array(s.text()),
    },
    optional=["clock_error_s", "phases_s", "waiting_s", "notes"],
)


class TraceOfStep(Pass):
    """An OTF2 archive of some steps, with a summary of the trace."""

    name = "trace"
    schema: ClassVar[Mapping[str, Any]] = SCHEMA | {
        "description": "of steps of their own, which were recorded; d5suite trace reads the archive"
    }

    def problem(self, prepared: PreparedStep) -> str:
        """See `Pass.problem`."""
        if prepared.workload.folder is None:
            return "there is no result file to put a trace beside"
        step = type(prepared.step)
        if step.run is Step.run and step.make is Step.make and step.make_one is Step.make_one:
            return f"{prepared.measurement.name} has no single step to record"
        try:
            require_library()
        except D5Error as error:
            return str(error)
        return ""

    def take(self, prepared: PreparedStep) -> dict[str, Any]:
        """See `Pass.take`; rank 0 writes the archive of all ranks."""
        workload, step = prepared.workload, prepared.step
        assert workload.folder is not None
        title = f"{workload.name}, {prepared.measurement.name}"
        files = Path(f"{workload.folder.name}.trace") / re.sub(r"[^\w.-]+", "-", title)
        ranks = _Ranks(getattr(workload, "communicator", None), getattr(workload, "component", ""))
        folder = workload.folder.parent / files
        run = ranks.common(uuid.uuid4().hex)
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
        ranks.meet()
        with step:
            step_s = ranks.slowest(_timed(lambda: step.make(1)))
            slowdown = self._slowdown(step, step_s, ranks, folder, run)
            count = max(STEPS[0], min(STEPS[1], int(RECORDED_S / step_s)))
            recorder = ranks.recorder(folder / "recording", run)
            _say(recorder, ranks.offset())
            with (
                sampled(recorder, gpu=workload.job.device != "cpu"),
                quiet_interpreter(prepared.settings),
                recorded(recorder, step.phases(), ranks.communicator),
            ):
                step.make(count)
            _say(recorder, ranks.offset())
        dropped = recorder.dropped
        ranks.agree(recorder.close)
        ranks.meet()
        if ranks.rank > 0:
            return {"of": "rank 0"}
        try:
            trace = read_recording(folder / "recording")
            write_archive(trace, folder / "otf2", description=title)
        except D5Error as error:
            raise PassError(f"{error}; the events are in {folder / 'recording'}") from error
        shutil.rmtree(folder / "recording")
        return {
            FILES: str(files),
            "archive": f"otf2/{ANCHOR}",
            "steps": count,
            "slowdown": slowdown,
            **_summary(trace, count),
            "dropped_events": int(trace.properties.get("dropped events", dropped)),
        }

    def _slowdown(self, step: Step, step_s: float, ranks: _Ranks, folder: Path, run: str) -> dict[str, Any]:
        """Make the step with and without a recorder in turn; return the ratio of the times."""
        turn = max(1, int(TURN_S / step_s))
        pairs = max(PAIRS[0], min(PAIRS[1], int(PAIRS_S / (2 * turn * step_s))))
        plain: list[float] = []
        watched: list[float] = []
        recorder = ranks.recorder(folder / "overhead", run)
        for number in range(pairs):
            for record in ((False, True), (True, False))[number % 2]:
                if record:
                    with sampled(recorder), recorded(recorder, step.phases(), ranks.communicator):
                        watched.append(ranks.slowest(_timed(lambda: step.make(turn))))
                else:
                    plain.append(ranks.slowest(_timed(lambda: step.make(turn))))
        recorder.close()
        ranks.meet()
        if ranks.rank == 0:
            shutil.rmtree(folder / "overhead", ignore_errors=True)
        ratio = paired_ratio(watched, plain)
        return {"ratio": ratio.value, "ci95": list(ratio.interval), "confidence": ratio.confidence, "pairs": ratio.n}


def _timed(function: Callable[[], object]) -> float:
    start = now()
    function()
    return now() - start


def _say(recorder: Recorder, offset: Offset | None) -> None:
    if offset is not None:
        recorder.say_clock(*offset)


def _summary(trace: Trace, steps: int) -> dict[str, Any]:
    found = analyse(trace, step=STEP)
    error, ranks = trace.properties.get("clock error ns", "unknown"), max(1, len(found.ranks))
    phases = {name: trace.seconds(own) / steps / ranks for name, (own, _, _) in found.regions.items() if own}
    return {
        "events": len(trace),
        "clock_error_s": None if error == "unknown" else int(error) * 1e-9,
        "phases_s": phases,
        "waiting_s": {name: trace.seconds(ticks) for name, (_, ticks) in found.patterns.items()},
        **({"notes": list(trace.notes)} if trace.notes else {}),
    }


class _Ranks:
    """All ranks of a measurement, or the only rank; in a workflow, ranks have components."""

    def __init__(self, communicator: Communicator | None, component: str = "") -> None:
        self.communicator = communicator if communicator is not None and communicator.size > 1 else None
        self.rank = communicator.rank if communicator is not None else 0
        self.name = f"rank {self.rank}{f' ({component})' * bool(component)}"
        self.host = communicator.hosts[communicator.rank] if communicator is not None else ""

    def _gathered(self, value: Any) -> list[Any]:
        return [value] if self.communicator is None else gather(self.communicator, value)

    def meet(self) -> None:
        if self.communicator is not None:
            self.communicator.barrier()

    def common(self, value: str) -> str:
        """Return rank 0's value."""
        found: str = self._gathered(value)[0]
        return found

    def slowest(self, seconds: float) -> float:
        """Return the largest of all ranks' values."""
        return max(1e-9, *self._gathered(seconds), 0.0)

    def agree(self, make: Callable[[], Any]) -> Any:
        """Call ``make`` on all ranks; if it fails on one rank, raise on all, so that none waits."""
        made, problem = None, ""
        try:
            made = make()
        except D5Error as error:
            problem = str(error)
        problems = [each for each in self._gathered(problem) if each]
        if problems:
            raise PassError(problems[0])
        return made

    def recorder(self, folder: Path, run: str) -> Recorder:
        """Begin this rank's recording."""
        made: Recorder = self.agree(lambda: Recorder(folder, self.name, run=run, host=self.host))
        return made

    def offset(self) -> Offset | None:
        return None if self.communicator is None else compare_clocks(self.communicator)
