"""Run a job that only computes reference answers of operations; no framework is needed."""

from __future__ import annotations

from d5suite.job import Job, OperationCase
from d5suite.worker.writer import ResultWriter


def compute_references(job: Job, writer: ResultWriter) -> None:
    """Compute one reference per case; both directions of an operation share the reference."""
    from d5suite.workloads.operator import compute_reference

    for case in job.cases:
        assert isinstance(case, OperationCase)
        first, *others = case.keys()
        found = writer.attempt(
            first,
            "computing the reference of",
            lambda case=case: compute_reference(job, case),  # type: ignore[misc]
        )
        for key in (first, *others):
            if found is not None:
                writer.result.references[key] = found
            else:
                writer.result.failures[key] = writer.result.failures[first]
    writer.write()
