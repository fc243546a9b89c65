"""The files between processes: what a worker is asked (`Job`) and what it answers (`Result`).

Both sides import this room. It imports the standard library, jsonschema (late), `d5suite.errors`
and `d5suite.files`.
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
    is_plain_name,
    key_of,
    log_path,
    of_rank,
    reason_path,
    result_path,
    results_of,
)
from d5suite.job.result import Failure, Measured, Result

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
    "is_plain_name",
    "key_of",
    "log_path",
    "of_rank",
    "reason_path",
    "result_path",
    "results_of",
]
