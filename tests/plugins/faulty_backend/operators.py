"""Fewer operators than the backend `HOLLOW` declares."""

OPERATORS = dict.fromkeys(
    ["Conv", "BatchNormalization", "Relu", "Add", "GlobalAveragePool", "Flatten", "Gemm", "SoftmaxCrossEntropyLoss"]
)
