"""The forward pass of one operator, against ONNX's reference evaluator."""

from __future__ import annotations

from d5suite.measurements.operator.kernel import SingleOperator
from d5suite.validate.operator.compare import Findings
from d5suite.validate.operator.forward import check_forward
from d5suite.workloads.operator import OperatorWorkload


class Forward(SingleOperator):
    """The forward pass of one operator."""

    name = "forward"
    backward = False

    def check(self, workload: OperatorWorkload) -> Findings:
        """Check the outputs against ONNX's reference evaluator."""
        known = workload.known
        return check_forward(workload.operator, known, workload.job.seed, None if known.whole else workload.exact)
