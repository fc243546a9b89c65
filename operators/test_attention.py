"""Scaled dot-product attention.

pytest operators/test_attention.py --benchmark-json attention.json
"""

from d5suite.cases.problem import Problem, Problems

BERT = "BERT-base (Devlin et al., 2019, section 3): 12 heads of 64"
GPT2 = "GPT-2 small (Radford et al., 2019, table 2): 12 heads of 64, 1024 tokens, causal"
LLAMA = "Llama 3 8B (Grattafiori et al., 2024, table 3): 32 heads of 128, 8 key-value heads, causal"


def attention(batch: int, heads: int, tokens: int, size: int, source: str, *, causal: bool = False) -> Problem:
    """Return the self-attention of one layer."""
    shape = (batch, heads, tokens, size)
    return Problem(
        f"{heads}x{size}_t{tokens}_b{batch}" + ("_causal" if causal else ""), "Attention",
        {"Q": shape, "K": shape, "V": shape}, {"is_causal": int(causal)}, source,
    )  # fmt: skip


def grouped(batch: int, tokens: int) -> Problem:
    """Return grouped-query attention."""
    keys = (batch, 8, tokens, 128)
    return Problem(
        f"grouped_t{tokens}_b{batch}_causal", "Attention", {"Q": (batch, 32, tokens, 128), "K": keys, "V": keys},
        {"is_causal": 1}, LLAMA,
    )  # fmt: skip


ATTENTION = Problems(
    "attention",
    smoke=[attention(1, 12, 128, 64, BERT), attention(1, 12, 128, 64, BERT, causal=True)],
    standard=[attention(8, 12, 128, 64, BERT), attention(1, 12, 1024, 64, GPT2, causal=True), grouped(1, 512)],
    full=[attention(32, 12, 512, 64, BERT), attention(8, 12, 1024, 64, GPT2, causal=True), grouped(1, 4096)],
)
