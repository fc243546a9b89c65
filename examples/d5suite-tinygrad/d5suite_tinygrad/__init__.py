"""Description of the tinygrad backend. Importing it does not import tinygrad."""

from d5suite.levels.backend import Backend
from d5suite.levels.description import Tolerance

SHORT = "left out to keep the example short"

BACKEND = Backend(
    name="tinygrad",
    title="tinygrad",
    package="d5suite_tinygrad",
    requires=("tinygrad",),
    distributions=("tinygrad",),
    install="pip install d5suite-tinygrad, and clang, which compiles its kernels (Debian: apt install clang)",
    modes={
        "jit": "each pass is captured once per shape with TinyJit, and replayed",
        "eager": "each pass is scheduled anew",
    },
    environment={mode: {"DEV": "CPU"} for mode in ("jit", "eager")},
    levels=frozenset({0, 1, 2}),
    devices=("cpu",),
    precisions=("fp32", "fp64"),
    operators=frozenset(
        {
            "Add", "AveragePool", "BatchNormalization", "Clip", "Concat", "Conv", "Div", "Dropout", "Exp", "Flatten",
            "Gemm", "GlobalAveragePool", "GlobalMaxPool", "Identity", "LRN", "LeakyRelu", "LogSoftmax", "MatMul",
            "MaxPool", "Mul", "Pad", "ReduceMean", "ReduceSum", "Relu", "Reshape", "Sigmoid", "Softmax",
            "SoftmaxCrossEntropyLoss", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "Transpose", "Unsqueeze",
        }
    ),
    tolerances={
        "fp32": Tolerance(
            outputs=5e-5,
            gradients=100,
            trajectory=0.02,
            reason="float32 sums, one term after the other: seen 5e-6, 40 for a bias before BatchNormalization, 9e-4",
        ),
        "fp64": Tolerance(outputs=1e-10, gradients=4, trajectory=1e-10, reason="float64 rounding"),
    },
    absent={
        "cuda": SHORT,
        "bf16": SHORT,
        "fp16": SHORT,
        "custom": SHORT,
        "baseline": SHORT,
        "loader": "tinygrad has no image loader",
        "profile": "tinygrad's kernels are fused across nodes, and nothing maps them back to these",
    },
    expected_failures={
        **dict.fromkeys(
            ("test_what_is_a_weight_elsewhere_may_be_computed?*", "test_an_output_may_be_constant"),
            "a network has one input and one output here, to keep the example short",
        ),
        "test_maxpool_with_argmax*": "the indices of MaxPool are not implemented, to keep the example short",
        "test_wrap_pad_cpu": "tinygrad's pad has no mode that wraps",
    },
)  # fmt: skip
