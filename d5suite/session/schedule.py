"""The order in which a run measures: jobs one after another, or the backends of a case in turn."""

from __future__ import annotations

from collections.abc import Sequence

from d5suite.session.results import MeasurementResult, Wanted
from d5suite.session.rounds import can_take_turns, measure_in_turns
from d5suite.session.session import Session


class MeasurementSchedule:
    """Measures all that a run wants. A job runs when one of its results is first requested.

    Parameters
    ----------
    session : Session
    wanted : sequence of Wanted
        All measurements that the run wants.
    turns : bool
        Whether the backends of a case take turns, if they can.
    launches : int
        Number of launches of workers that take turns.
    alone : bool
        Whether a single backend's worker takes turns, too.
    """

    def __init__(
        self,
        session: Session,
        wanted: Sequence[Wanted],
        *,
        turns: bool = True,
        launches: int = 1,
        alone: bool = False,
    ) -> None:
        self._session, self._turns, self._launches, self._least = session, turns, launches, 1 if alone else 2
        self._jobs: dict[tuple[str, str], list[Wanted]] = {}
        for each in wanted:
            self._jobs.setdefault(each.job, []).append(each)

    def write(self) -> None:
        """Write all job files, to be run elsewhere.

        Raises
        ------
        ConfigurationError
            A case is invalid, or two cases have the same name.
        """
        for batch in self._jobs.values():
            self._session.write(batch)

    def result(self, wanted: Wanted) -> MeasurementResult:
        """Return the result of a measurement; if its job has not run, run the whole job first.

        Raises
        ------
        KeyboardInterrupt
            After Ctrl-C; the session has the finished results.
        """
        if not self._session.has_run(wanted):
            self._measure(wanted)
        return self._session.result(wanted)

    def _measure(self, wanted: Wanted) -> None:
        session = self._session
        session.wait_until_quiet()
        beside = [batch for batch in self._jobs.values() if batch[0].case.batch == wanted.case.batch]
        may_take_turns = self._turns and not any(session.has_run(batch[0]) for batch in beside)
        if may_take_turns and can_take_turns(session, beside, self._least):
            measure_in_turns(session, beside, self._launches)
        if not session.has_run(wanted):
            session.measure(self._jobs[wanted.job])
