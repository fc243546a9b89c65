"""Workers that live side by side and take turns: one scheduler for all policies.

While anything is measured, only one worker runs; the others are blocked on a read, or stopped. By
default a worker runs alone from the start. A worker that was started to run beside others may
import its framework and prove at the same time as others (`d5suite.worker.turns`). The policies are
rounds of backends (`d5suite.session.rounds`) and the two sides of a comparison
(`d5suite.session.pairs`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Mapping, Sequence

from d5suite.errors import describe_error
from d5suite.instruments.settings import ALONE, BESIDE
from d5suite.launch.turns import TurnWorker, run_beside

TurnJob = Generator[tuple[str, TurnWorker], None, None]
"""A job whose workers wait for turns: `Session.run`."""

Waiting = dict[str, tuple[str, TurnWorker] | None]
"""By name of a job: the measurement that the worker waits for, and the worker; None once the job
has ended."""


class TurnScheduler(ABC):
    """Runs jobs side by side.

    Parameters
    ----------
    keys : sequence of str
        All measurements, in order.

    Attributes
    ----------
    errors : dict of str to str
        By name of a job: the exception that ended the job, if any.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._places = {key: place for place, key in enumerate(keys)}
        self.errors: dict[str, str] = {}

    @abstractmethod
    def take(self, key: str, workers: Mapping[str, TurnWorker]) -> Mapping[str, str]:
        """Take all samples of a measurement from the workers that wait for it.

        Returns
        -------
        mapping of str to str
            By name of a job: why the worker must give up the measurement.
        """

    def has_room(self) -> bool:
        """Return whether one more job may start beside the others."""
        return True

    def may_prepare(self, name: str, proving: Collection[str]) -> bool:
        """Return whether a job may prepare, and then prove beside the jobs in ``proving``."""
        return not proving

    def run(self, jobs: Mapping[str, TurnJob]) -> None:
        """Run jobs by name until all have ended; end them after an interrupt."""
        prepared: Waiting = {}
        try:
            self._prepare(jobs, prepared)
            waiting = {name: prepared[name] for name in jobs if name in prepared}
            while any(waiting.values()):
                there = {name: each for name, each in waiting.items() if each is not None}
                key = min((key for key, _ in there.values()), key=lambda key: self._places.get(key, -1))
                ready = {name: worker for name, (its_key, worker) in there.items() if its_key == key}
                gives_up = self.take(key, ready)
                for name, worker in ready.items():  # one after the other, so that only one runs
                    if name in gives_up:
                        worker.leave(gives_up[name])
                    else:
                        worker.finish()
                    waiting[name] = self._alone(name, jobs)
        finally:
            for job in jobs.values():
                job.close()

    def _prepare(self, jobs: Mapping[str, TurnJob], waiting: Waiting) -> None:
        """Let jobs prepare and prove, as memory permits, until their workers wait for turns."""
        left, active, prepared = list(jobs), dict[str, TurnWorker](), set[str]()

        def go_on(name: str) -> None:
            step = self._next(name, jobs)
            if step is not None and not step[0]:
                active[name] = step[1]
                return
            waiting[name] = step
            active.pop(name, None)
            prepared.discard(name)

        while True:
            if left and active.keys() <= prepared and self.has_room():
                go_on(left.pop(0))
                continue
            if not active:
                return
            for each in active.values():
                if each.asks == BESIDE:
                    each.let()
            alone = self._next_alone(active, prepared)
            if alone is None:
                run_beside([each for each in active.values() if not each.asks])
                for name in list(active):
                    go_on(name)
                continue
            others = [each for each in active.values() if not each.asks]
            for each in others:
                each.pause()
            prepared.add(alone)
            active[alone].let()
            go_on(alone)
            for each in others:
                each.resume()

    def _next_alone(self, active: Mapping[str, TurnWorker], prepared: Collection[str]) -> str | None:
        """Return the job to run alone next: a job that has proved, else a job that may prepare."""
        asking = [name for name, each in active.items() if each.asks == ALONE]
        proved = [name for name in asking if name in prepared]
        return next(iter(proved or (name for name in asking if self.may_prepare(name, prepared))), None)

    def _alone(self, name: str, jobs: Mapping[str, TurnJob]) -> tuple[str, TurnWorker] | None:
        """Let a job run while all others wait, until its worker waits for turns."""
        step = self._next(name, jobs)
        while step is not None and not step[0]:
            worker = step[1]
            if worker.asks:
                worker.let()
            else:
                run_beside([worker])
            step = self._next(name, jobs)
        return step

    def _next(self, name: str, jobs: Mapping[str, TurnJob]) -> tuple[str, TurnWorker] | None:
        """Let a job run until its worker waits; return None at the job's end.

        The measurement's key is empty unless the worker waits for turns.
        """
        try:
            return next(jobs[name], None)
        except Exception as error:  # of any kind: it costs this job and no other
            self.errors[name] = describe_error(error)
            return None
