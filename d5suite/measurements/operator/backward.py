"""The backward pass of one operator, against float64 gradients proved by differences."""

from __future__ import annotations

from collections.abc import Iterable

from d5suite.measurements.operator.kernel import KernelStep, SingleOperator
from d5suite.validate.check import Check
from d5suite.validate.operator.backward import check_backward, check_backward_float64, gradient_evidence
from d5suite.validate.operator.compare import Findings
from d5suite.workloads.operator import OperatorWorkload


class Backward(SingleOperator):
    """The backward pass of one operator; the forward pass is made before timing."""

    name = "backward"
    backward = True

    def prove_first(self, workload: OperatorWorkload, step: KernelStep) -> Iterable[Check]:
        """Prove the float64 gradients against differences."""
        exact, known, seed = workload.exact, workload.known, workload.job.seed
        step.evidence = lambda: gradient_evidence(exact, known, seed)
        return check_backward_float64(exact, known, seed)

    def check(self, workload: OperatorWorkload) -> Findings:
        """Check the gradients, as timed, against the float64 ones."""
        return check_backward(workload.operator, workload.exact, workload.job.seed)
