"""The ONNX operators that backends are expected to support, and why they lack others.

Imports the standard library only.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

ZOO_OPERATORS = frozenset(
    {
        "Add", "AveragePool", "BatchNormalization", "Clip", "Concat", "Conv", "Div", "Dropout", "Flatten", "Gemm",
        "GlobalAveragePool", "GlobalMaxPool", "Identity", "LRN", "LeakyRelu", "LogSoftmax", "MatMul", "MaxPool", "Mul",
        "Pad", "Relu", "Reshape", "Sigmoid", "Softmax", "SoftmaxCrossEntropyLoss", "Squeeze", "Sub", "Sum", "Tanh",
        "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators of the zoo's networks and of ONNX's nine light networks."""

SINGLE_OPERATORS = frozenset({"Split"})
"""Operators of level 0 only; in networks every part of a Split becomes a Slice."""

FAMILIES: Mapping[str, Sequence[str]] = {
    "convolution": ("Col2Im", "Conv", "ConvTranspose"),
    "elementwise": (
        "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "BitwiseAnd", "BitwiseNot",
        "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Clip", "Cos", "Cosh", "Div", "Dropout", "Elu", "Equal", "Erf",
        "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN",
        "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or",
        "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus",
        "Softsign", "Sqrt", "Sub", "Sum", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor",
    ),
    "indexing": (
        "ArgMax", "ArgMin", "ConstantOfShape", "CumSum", "EyeLike", "GatherElements", "GatherND", "GridSample",
        "Hardmax", "OneHot", "Range", "ReverseSequence", "ScatterElements", "ScatterND", "Shape", "TopK",
    ),
    "matrix": ("DFT", "Det", "Einsum", "Gemm", "MatMul", "STFT"),
    "normalization": (
        "BatchNormalization", "GroupNormalization", "InstanceNormalization", "LRN", "LayerNormalization",
        "LpNormalization", "RMSNormalization",
    ),
    "pooling": (
        "AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool", "MaxUnpool",
    ),
    "reduction": (
        "LogSoftmax", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
        "ReduceSum", "ReduceSumSquare", "Softmax", "SoftmaxCrossEntropyLoss",
    ),
    "sequence": ("Attention", "GRU", "LSTM"),
    "shape": (
        "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Pad", "Reshape", "Resize", "Slice", "SpaceToDepth",
        "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze",
    ),
}  # fmt: skip
"""The ONNX operators by family; an adapter's ``operators`` package has a module per family."""

MORE_OPERATORS = frozenset(chain(*FAMILIES.values())) - ZOO_OPERATORS - SINGLE_OPERATORS
"""Further operators of level 0's problems and of today's networks."""

REDUCTIONS = tuple(name for name in FAMILIES["reduction"] if name.startswith("Reduce"))
"""Operators that reduce the axes in their second input."""

DRAWING = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators that draw values."""

LACKING = {
    **dict.fromkeys(
        ("Compress", "NonMaxSuppression", "NonZero", "Unique"),
        "the size of its output depends on values, and executors are built from sizes",
    ),
    **dict.fromkeys(sorted(DRAWING), "it draws values, which no reference can check"),
    **dict.fromkeys(
        ("DeformConv", "MaxRoiPool", "RoiAlign"),
        "most frameworks have it in add-on packages only, if at all, so that hardly two could be compared",
    ),
}
"""Operators that no adapter supports, with the reason."""

_FOREIGN = {
    "ai.onnx.ml": "it is of ONNX's set for classical machine learning, such as trees, and not of that for networks",
    "com.microsoft": (
        "it is not ONNX's own: ONNX Runtime's optimizer wrote it, so give the original file, before optimization"
    ),
}


def reason_of_lacking(operator: str) -> str:
    """Return why no adapter supports an operator (``domain::Name`` outside ONNX), or ``""``."""
    domain = operator.rpartition("::")[0]
    return LACKING.get(operator) or _FOREIGN.get(domain) or ("it is not one of ONNX's own" if domain else "")
