"""Workers that live side by side and take turns: one scheduler for all policies.

Only one worker runs at a time, from its start on; the others are blocked on a read. The policies
are rounds of backends (`d5suite.session.rounds`) and the two sides of a comparison
(`d5suite.session.pairs`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence

from d5suite.errors import describe_error
from d5suite.launch.turns import TurnWorker

TurnJob = Generator[tuple[str, TurnWorker], None, None]
"""A job whose workers wait for turns: `Session.run`."""


class TurnScheduler(ABC):
    """Runs jobs side by side.

    Parameters
    ----------
    keys : sequence of str
        All measurements, in order.

    Attributes
    ----------
    errors : dict of str to str
        By name of a job: why it ended, if an exception did.
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
            By name: why a worker must give up the measurement.
        """

    def has_room(self) -> bool:
        """Return whether one more job may start beside the others."""
        return True

    def run(self, jobs: Mapping[str, TurnJob]) -> None:
        """Run jobs by name until all have ended; end them after an interrupt."""
        waiting: dict[str, tuple[str, TurnWorker] | None] = {}
        try:
            for name in jobs:
                if not self.has_room():
                    break
                waiting[name] = self._next(name, jobs)
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
                    waiting[name] = self._next(name, jobs)
        finally:
            for job in jobs.values():
                job.close()

    def _next(self, name: str, jobs: Mapping[str, TurnJob]) -> tuple[str, TurnWorker] | None:
        """Let a job run until its worker waits for its turns; return None at the job's end."""
        try:
            return next(jobs[name], None)
        except Exception as error:  # of any kind: it costs this job and no other
            self.errors[name] = describe_error(error)
            return None
