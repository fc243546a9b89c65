"""Matrix products, single and batched.

pytest operators/test_gemm.py --benchmark-json gemm.json
"""

from d5suite.cases.problem import Problem, Problems

DEEPBENCH = "Baidu DeepBench, code/kernels/gemm_problems.h"
TRANSFORMER = "BERT-base (Devlin et al., 2019, section 3): 12 heads of 64, hidden 768, feed-forward 3072, 128 tokens"


def gemm(m: int, n: int, k: int, a_transposed: bool = False, b_transposed: bool = False) -> Problem:
    """Return C = A B, with sizes in DeepBench's order."""
    kind = ("t" if a_transposed else "n") + ("t" if b_transposed else "n")
    return Problem(
        f"{m}x{n}x{k}_{kind}",
        "Gemm",
        {"A": (k, m) if a_transposed else (m, k), "B": (n, k) if b_transposed else (k, n)},
        {"transA": int(a_transposed), "transB": int(b_transposed)},
        DEEPBENCH,
    )


def resnet50_classifier(batch: int) -> Problem:
    """Return ResNet-50's last layer."""
    return Problem(
        f"resnet50_fc_b{batch}",
        "Gemm",
        {"A": (batch, 2048), "B": (1000, 2048), "C": (1000,)},
        {"transB": 1},
        "He et al. (CVPR 2016), table 1: 2048 features, 1000 classes",
    )


def attention_scores(batch: int) -> Problem:
    """Return the attention scores of one transformer block: a batched product per head."""
    return Problem(
        f"heads_b{batch}", "MatMul", {"A": (batch, 12, 128, 64), "B": (batch, 12, 64, 128)}, source=TRANSFORMER
    )


def feed_forward(batch: int) -> Problem:
    """Return the first product of one transformer block's feed-forward part."""
    return Problem(f"feed_forward_b{batch}", "MatMul", {"A": (batch, 128, 768), "B": (768, 3072)}, source=TRANSFORMER)


TRAINING = [
    (1760, 16), (1760, 32), (1760, 64), (1760, 128), (1760, 7000), (2048, 16), (2048, 32), (2048, 64), (2048, 128),
    (2048, 7000), (2560, 16), (2560, 32), (2560, 64), (2560, 128), (2560, 7000), (4096, 16), (4096, 32), (4096, 64),
    (4096, 128), (4096, 7000),
]  # fmt: skip
"""m = k, and n, of DeepBench's training problems with a square A, plain and transposed."""

OUTPUT_LAYERS = [(m, n, k) for k in (1760, 2048, 2560, 4096) for m, n in ((5124, 9124), (35, 8457))]

RECURRENT = [
    *((7680, n, 2560) for n in (16, 32, 64, 128)), *((3072, n, 1024) for n in (16, 32, 64, 128)),
    *((m, n, k) for n in (16, 32) for m, k in ((6144, 2048), (4608, 1536), (8448, 2816))),
    *((m, n, m // 3) for n in (24000, 48000) for m in (7680, 6144, 4608, 8448, 3072)),
    *((m, n, k) for n in (24000, 48000) for m in (512, 1024) for k in (2816, 2048, 2560, 1536)),
]  # fmt: skip
"""Problems with A once plain and once transposed. The largest problem has a result of 1.6 GB, and
is refused if memory is short."""

LONG_SUMS = [(m, n, 500_000) for n in (8, 16) for m in (512, 1024)]

SMALL = [(m, n, 512) for n in (16, 32) for m in (512, 1024)]
"""Problems with B once plain and once transposed."""

WEIGHTS_FIRST = [(1760, 7133, 1760), (2048, 7133, 2048), (2560, 7133, 2560), (4096, 7133, 4096), (3072, 7435, 1024),
                 (7680, 5481, 2560)]  # fmt: skip
"""Problems with B transposed."""

GEMM = Problems(
    "gemm",
    smoke=[gemm(35, 700, 2048), gemm(3072, 4, 1024), gemm(1024, 16, 512, b_transposed=True), resnet50_classifier(8),
           attention_scores(1), feed_forward(1)],
    standard=[gemm(1760, 128, 1760), gemm(1760, 128, 1760, a_transposed=True), gemm(2560, 64, 2560),
              gemm(3072, 128, 1024), gemm(1024, 700, 512), gemm(5124, 700, 2048), gemm(3072, 1500, 1024),
              resnet50_classifier(32), attention_scores(8), feed_forward(8)],
    full=[
        *(gemm(m, n, m, transposed) for transposed in (False, True) for m, n in TRAINING),
        *(gemm(m, n, k, transposed) for transposed in (False, True) for m, n, k in OUTPUT_LAYERS),
        *(gemm(m, n, k, transposed) for transposed in (False, True) for m, n, k in [*RECURRENT, *LONG_SUMS]),
        *(gemm(m, n, k, b_transposed=True) for m, n, k in [*WEIGHTS_FIRST, *SMALL]), *(gemm(*sizes) for sizes in SMALL),
        gemm(1024, 700, 512), gemm(1024, 700, 512, a_transposed=True),
        resnet50_classifier(256), attention_scores(32), feed_forward(32),
    ],
)  # fmt: skip
