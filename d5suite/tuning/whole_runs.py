"""Trials of whole runs, for what cannot take turns: loaders, training to a target, several ranks.

The base and the candidates run in turn, so that a candidate lies between two runs of the base. It
is compared with the mean of their logarithms: a drift that is even cancels. The run of the base
behind one candidate is the one before the next. Imports its neighbours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from d5suite.session.results import MeasurementResult, Wanted
from d5suite.session.session import Session
from d5suite.tuning.space import Change
from d5suite.tuning.trials import HOPELESS, Trial, TrialJob, Trials, item_s, takes_turns

STALE_S = 60.0
"""A run of the base that ended longer ago is made again."""


def run_whole(session: Session, wanted: Wanted, change: Change, launch: int) -> MeasurementResult:
    """Return the result of one launch that takes no turns."""
    job = TrialJob(session, wanted, change, launch, in_turns=False)
    try:
        return job.end()
    finally:
        job.close()


class WholeTrials(Trials):
    """Trials whose blocks are whole runs; see `Trials`."""

    _before: Mapping[str, Any] | None = None
    _ended = 0.0

    def _measured(self, change: Change, bar: float) -> Trial:
        if self._before is None or time.monotonic() - self._ended > STALE_S:
            start = time.monotonic()
            self._before = self._run_base()
            self.prepared_s = time.monotonic() - start
        start = time.monotonic()
        result = run_whole(self._limited(), self._wanted, change, next(self._launches))
        prepared_s, trial = time.monotonic() - start, Trial("measured")
        if result.record is not None:
            trial = self._compared(result, self._before, bar)
        if trial.status == "measured":
            trial = self._judged(trial, result, change.items - self._base.items)
        return replace(trial, seconds=time.monotonic() - start, prepared_s=prepared_s)

    def _run_base(self) -> Mapping[str, Any]:
        result = run_whole(self._session, self._wanted, self._base, next(self._launches))
        if result.record is None:
            raise self._base_fails(result)
        self._ended = time.monotonic()
        return result.record

    def _compared(self, result: MeasurementResult, record: Mapping[str, Any], bar: float) -> Trial:
        """Compare a candidate's run with that of the base before it, and one after it."""
        assert result.record is not None
        own, before = (math.log(item_s(self._wanted, each)) for each in (result.record, record))
        spread = float(np.quantile(result.samples_s, 0.99) / np.median(result.samples_s))
        figures = {"time_s": math.exp(own), "p99_s": math.exp(own) * spread}
        if own - before > bar + HOPELESS:
            return Trial("pruned", own - before, own - before, blocks=1, figures=figures)
        self._before = self._run_base()
        after_s = item_s(self._wanted, self._before)
        self._watch(after_s)
        value = own - (before + math.log(after_s)) / 2
        return Trial("measured", value, value, blocks=1, figures=figures)

    def _items_of_base(self, record: Mapping[str, Any], items: float) -> float:
        """Return 1: figures of whole runs are per item."""
        return 1.0


def trials_of(session: Session, wanted: Wanted, base: Change, launches: Any, **more: Any) -> Trials:
    """Return trials of the kind that a measurement allows; see `Trials`."""
    return (Trials if takes_turns(wanted) else WholeTrials)(session, wanted, base, launches, **more)
