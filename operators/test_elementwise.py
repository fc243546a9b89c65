"""Element-wise operators, with and without broadcasting.

pytest operators/test_elementwise.py --benchmark-json elementwise.json
"""

from d5suite.cases.problem import Problem, Problems
from d5suite.network.operation import Tensor

IMAGE = "ResNet-50's second stage: He et al. (CVPR 2016), table 1"
TRANSFORMER = "BERT-base (Devlin et al., 2019, section 3): hidden size 768, 128 tokens"
SQUEEZE = "squeeze and excitation: Hu et al. (CVPR 2018), section 3: one factor per image and channel"


def residual(batch: int) -> Problem:
    """Return the sum at the end of a residual block."""
    shape = (batch, 256, 56, 56)
    return Problem(f"residual_b{batch}", "Add", {"A": shape, "B": shape}, source=IMAGE)


def bias(batch: int) -> Problem:
    """Return the addition of a bias along the last axis."""
    return Problem(f"bias_b{batch}", "Add", {"A": (batch, 128, 768), "B": (768,)}, source=TRANSFORMER)


def excitation(batch: int) -> Problem:
    """Return the product with one factor per channel."""
    return Problem(f"excitation_b{batch}", "Mul", {"A": (batch, 256, 56, 56), "B": (batch, 256, 1, 1)}, source=SQUEEZE)


def division(batch: int) -> Problem:
    """Return the division by one value per row."""
    return Problem(
        f"rows_b{batch}", "Div", {"A": (batch, 128, 768), "B": Tensor((batch, 128, 1), low=0.5, high=2.0)},
        source=TRANSFORMER,
    )  # fmt: skip


def function(operator: str, batch: int) -> Problem:
    """Return an element-wise function on positive numbers."""
    positive = Tensor((batch, 128, 768), low=0.5, high=2.0)
    return Problem(f"{operator.lower()}_b{batch}", operator, {"X": positive}, source=TRANSFORMER)


def sizes(batch: int) -> list[Problem]:
    """Return every element-wise problem at this batch size."""
    functions = [function("Exp", batch), function("Sqrt", batch)]
    return [residual(batch), bias(batch), excitation(batch), division(batch), *functions]


ELEMENTWISE = Problems(
    "elementwise", smoke=[residual(1), bias(1), excitation(1), function("Exp", 1)], standard=sizes(8), full=sizes(32)
)
