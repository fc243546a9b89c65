"""Softmax and softmax cross-entropy.

pytest operators/test_softmax.py --benchmark-json softmax.json
"""

from d5suite.cases.problem import Problem, Problems
from d5suite.network.operation import Tensor

IMAGENET = "ImageNet's 1000 classes (Russakovsky et al., 2015)"
TRANSFORMER = "BERT-base (Devlin et al., 2019, sections 3 and 4): 12 heads, 128 tokens, 30522 word pieces"


def over_classes(operator: str, batch: int) -> Problem:
    """Return a softmax over the classes of a batch of images."""
    return Problem(f"{operator.lower()}_1000_b{batch}", operator, {"X": (batch, 1000)}, source=IMAGENET)


def over_keys(batch: int) -> Problem:
    """Return a softmax over the keys of every query."""
    return Problem(f"heads_b{batch}", "Softmax", {"X": (batch, 12, 128, 128)}, source=TRANSFORMER)


def cross_entropy(batch: int, classes: int, source: str) -> Problem:
    """Return the mean loss of a batch."""
    inputs = {"scores": (batch, classes), "labels": Tensor((batch,), "int64", 0, classes)}
    return Problem(f"loss_{classes}_b{batch}", "SoftmaxCrossEntropyLoss", inputs, source=source)


def sizes(batch: int) -> list[Problem]:
    """Return every softmax and loss problem at this batch size."""
    return [
        over_classes("Softmax", batch), over_classes("LogSoftmax", batch), over_keys(batch),
        cross_entropy(batch, 1000, IMAGENET), cross_entropy(16 * batch, 30522, TRANSFORMER),
    ]  # fmt: skip


SOFTMAX = Problems(
    "softmax",
    smoke=[over_classes("Softmax", 32), over_keys(1), cross_entropy(32, 1000, IMAGENET)],
    standard=sizes(32),
    full=sizes(256),
)
