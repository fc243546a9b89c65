"""Description of the skeleton backend. Importing it does not import its framework, NumPy."""

from d5suite.levels.backend import Backend
from d5suite.levels.description import usual_tolerances
from d5suite.network.variants import ON_NO_ADAPTER

LATER = "left out to keep the skeleton short"
INFERENCE_ONLY = "NumPy does not differentiate"

BACKEND = Backend(
    name="skeleton",
    title="Skeleton",
    package="d5suite_skeleton",
    requires=(),  # modules of your framework; d5suite itself needs NumPy
    distributions=("numpy",),
    install="pip install numpy",
    modes={"eager": "one call of NumPy per node"},
    levels=frozenset({0, 1}),
    devices=("cpu",),
    precisions=("fp32", "fp64"),
    operators=frozenset({"Add", "Flatten", "Gemm", "Identity", "LogSoftmax", "MatMul", "Mul", "Relu", "Softmax"}),
    variants=ON_NO_ADAPTER,
    tolerances=usual_tolerances(fp32="float32 rounding", fp64="float64 rounding"),
    absent={
        "stock": "the mode eager is NumPy with no option set",
        "cuda": "NumPy computes on the CPU only",
        "bf16": "NumPy has no bfloat16",
        "fp16": LATER,
        "gradient": INFERENCE_ONLY,
        "level 2": INFERENCE_ONLY,
        "training": INFERENCE_ONLY,
        "distributed": INFERENCE_ONLY,
        "baseline": INFERENCE_ONLY,
        "custom": LATER,
        "profile": LATER,
        "loader": "NumPy has no image loader",
    },
)
