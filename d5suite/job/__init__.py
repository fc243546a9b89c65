"""The files between processes: the work of a worker (`Job`), and what it measured (`Result`).

The session and the worker both import this package. It imports the standard library, jsonschema
(late), `d5suite.errors` and `d5suite.files`.
"""

from d5suite.job.job import (
    TIME,
    CaseJob,
    CollectiveCase,
    Distributed,
    Job,
    NetworkCase,
    OperationCase,
    Ranks,
    WorkflowCase,
    is_plain_name,
    key_of,
    log_path,
    of_rank,
    reason_path,
    result_path,
    results_of,
    stem_of,
)
from d5suite.job.placement import placed, rank_named
from d5suite.job.result import Failure, Measured, Result, failures_of_ranks

__all__ = [
    "TIME",
    "CaseJob",
    "CollectiveCase",
    "Distributed",
    "Failure",
    "Job",
    "Measured",
    "NetworkCase",
    "OperationCase",
    "Ranks",
    "Result",
    "WorkflowCase",
    "failures_of_ranks",
    "is_plain_name",
    "key_of",
    "log_path",
    "of_rank",
    "placed",
    "rank_named",
    "reason_path",
    "result_path",
    "results_of",
    "stem_of",
]
