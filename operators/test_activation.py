"""Activation functions.

pytest operators/test_activation.py --benchmark-json activation.json
"""

from d5suite.cases.problem import Problem, Problems

IMAGE = "ResNet-50's second stage: He et al. (CVPR 2016), table 1"
TRANSFORMER = "BERT-base's feed-forward part (Devlin et al., 2019, section 3): 3072 units, 128 tokens"
MOBILENET = "MobileNet v3: Howard et al. (ICCV 2019), table 1"


def over_images(operator: str, batch: int, source: str = IMAGE) -> Problem:
    """Return an activation function on a batch of images."""
    return Problem(f"{operator.lower()}_b{batch}", operator, {"X": (batch, 256, 56, 56)}, source=source)


def gelu(batch: int) -> Problem:
    """Return the transformer's activation function."""
    return Problem(f"gelu_b{batch}", "Gelu", {"X": (batch, 128, 3072)}, source=TRANSFORMER)


FUNCTIONS = ["Relu", "LeakyRelu", "Elu", "Sigmoid", "Tanh", "HardSwish"]


def functions(batch: int) -> list[Problem]:
    """Return every activation function at this batch size."""
    return [*(over_images(name, batch, MOBILENET if name == "HardSwish" else IMAGE) for name in FUNCTIONS), gelu(batch)]


def small() -> Problem:
    """Return a problem so small that the call takes longer than the computation."""
    return Problem("relu_1000", "Relu", {"X": (1000,)}, source="the cost of a call: 4 kB fit into the L1 cache")


ACTIVATION = Problems("activation", smoke=[small(), *functions(1)], standard=functions(8), full=functions(32))
