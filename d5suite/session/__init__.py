"""The parent side of a run: cases become jobs, workers run the jobs, results become records.

Every batch of cases has one job per backend, with all wanted measurements. This package knows
cases, jobs and results, and backends as data. It never imports a framework or the worker.

============== ====================================================================
`results`      the measurements that a run wants, and their results
`session`      jobs of a run, and records from their results
`attempts`     what one worker finished of its job, and what is left to the next
`elsewhere`    results of jobs that ran elsewhere
`record`       the record of a measurement
`nodes`        the nodes of a cluster in a record
`schedule`     the order in which a run measures
`turns`        workers that take turns: the scheduler
`rounds`       backends that take turns
`pairs`        two sides that take turns
`sides`        the sides of a comparison
`environments` virtual environments with another version of a package
`tools`        running git, pip and interpreters; revisions
============== ====================================================================
"""

from d5suite.session.results import MeasurementResult
from d5suite.session.session import Session

__all__ = ["MeasurementResult", "Session"]
