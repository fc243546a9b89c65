"""LSTM and GRU over whole sequences.

pytest operators/test_recurrent.py --benchmark-json recurrent.json
"""

from d5suite.cases.problem import Problem, Problems
from d5suite.network.operation import Tensor

DEEPBENCH = "Baidu DeepBench, code/kernels/rnn_problems.h: as many inputs as hidden units"
GATES = {"LSTM": 4, "GRU": 3}

SCALED = f"scaled down from 1536 units and 187 steps in {DEEPBENCH}"


def recurrent(operator: str, hidden: int, batch: int, steps: int, source: str = DEEPBENCH) -> Problem:
    """Return one unidirectional layer, with sizes in DeepBench's order; GRU in cuDNN's form."""
    weight = Tensor((1, GATES[operator] * hidden, hidden), scale=hidden**-0.5)
    return Problem(
        f"{operator.lower()}_{hidden}_b{batch}_t{steps}", operator,
        {"X": (steps, batch, hidden), "W": weight, "R": weight, "B": (1, 2 * GATES[operator] * hidden)},
        {"hidden_size": hidden, **({"linear_before_reset": 1} if operator == "GRU" else {})}, source,
    )  # fmt: skip


LSTM = [
    *((hidden, batch, 25) for hidden in (512, 1024, 2048, 4096) for batch in (16, 32, 64, 128)),
    (1536, 8, 50), (1536, 16, 50), (1536, 32, 50), (256, 16, 150), (256, 32, 150), (256, 64, 150),
]  # fmt: skip
"""Hidden units, batch size and steps of all training problems. DeepBench's plain RNN problems are
left out, because ONNX's RNN is not supported."""

GRU = [
    *((hidden, 32, steps) for hidden in (2048, 1536, 2560) for steps in (1500, 750, 375, 187)),
    (2816, 32, 750), (2816, 32, 375), (2816, 32, 187), (512, 32, 1), (1024, 32, 1500), (1024, 64, 1500),
]  # fmt: skip

RECURRENT = Problems(
    "recurrent",
    smoke=[recurrent("LSTM", 512, 4, 25), recurrent("GRU", 512, 4, 1), recurrent("GRU", 256, 4, 25, SCALED)],
    standard=[recurrent("LSTM", 512, 16, 25), recurrent("LSTM", 1024, 32, 25), recurrent("LSTM", 256, 16, 150),
              recurrent("GRU", 512, 32, 1), recurrent("GRU", 1536, 32, 187)],
    full=[*(recurrent("LSTM", *sizes) for sizes in LSTM), *(recurrent("GRU", *sizes) for sizes in GRU)],
)  # fmt: skip
