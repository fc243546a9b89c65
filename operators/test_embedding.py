"""Embedding look-up, and the gradient, which is a scatter.

pytest operators/test_embedding.py --benchmark-json embedding.json
"""

from d5suite.cases.problem import Problem, Problems
from d5suite.network.operation import Tensor

WORDS = "BERT-base (Devlin et al., 2019, section 3): 30522 word pieces, hidden size 768, 128 tokens"
CLICKS = "a categorical feature in the manner of DLRM (Naumov et al., 2019): embeddings of 64"


def words(batch: int, rows: int = 30522, source: str = WORDS) -> Problem:
    """Return the look-up of a batch of sentences."""
    return Problem(
        f"words_{rows}_b{batch}", "Gather", {"data": (rows, 768), "indices": Tensor((batch, 128), "int64", 0, rows)},
        source=source,
    )  # fmt: skip


def clicks(batch: int, rows: int) -> Problem:
    """Return the look-up of one categorical feature for a batch of clicks."""
    return Problem(
        f"clicks_{rows}_b{batch}", "Gather", {"data": (rows, 64), "indices": Tensor((batch,), "int64", 0, rows)},
        source=CLICKS,
    )  # fmt: skip


EMBEDDING = Problems(
    "embedding",
    smoke=[words(2, 2000, f"scaled down to 2000 word pieces from {WORDS}"), clicks(256, 10_000)],
    standard=[words(8), clicks(2048, 100_000)],
    full=[words(32), clicks(2048, 1_000_000), clicks(16_384, 1_000_000)],
)
