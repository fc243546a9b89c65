"""The ONNX operators that backends are expected to support, and why they lack others.

Imports nothing.
"""

ZOO_OPERATORS = frozenset(
    {
        "Add", "AveragePool", "BatchNormalization", "Clip", "Concat", "Conv", "Div", "Dropout", "Flatten", "Gemm",
        "GlobalAveragePool", "GlobalMaxPool", "Identity", "LRN", "LeakyRelu", "LogSoftmax", "MatMul", "MaxPool", "Mul",
        "Pad", "Relu", "Reshape", "Sigmoid", "Softmax", "SoftmaxCrossEntropyLoss", "Squeeze", "Sub", "Sum", "Tanh",
        "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators of the zoo's networks and of ONNX's nine light networks."""

MORE_OPERATORS = frozenset(
    {
        "Abs", "Acos", "Acosh", "And", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "Attention", "BitShift",
        "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Col2Im", "ConstantOfShape",
        "ConvTranspose", "Cos", "Cosh", "CumSum", "DFT", "DepthToSpace", "Det", "Einsum", "Elu", "Equal", "Erf", "Exp",
        "Expand", "EyeLike", "Floor", "GRU", "Gather", "GatherElements", "GatherND", "Gelu", "GlobalLpPool", "Greater",
        "GreaterOrEqual", "GridSample", "GroupNormalization", "HardSigmoid", "HardSwish", "Hardmax",
        "InstanceNormalization", "IsInf", "IsNaN", "LSTM", "LayerNormalization", "Less", "LessOrEqual", "Log",
        "LpNormalization", "LpPool", "Max", "MaxUnpool", "Mean", "Min", "Mish", "Mod", "Neg", "Not", "OneHot", "Or",
        "PRelu", "Pow", "RMSNormalization", "Range", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSumExp",
        "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Resize",
        "ReverseSequence", "Round", "STFT", "ScatterElements", "ScatterND", "Selu", "Shape", "Sign", "Sin", "Sinh",
        "Slice", "Softplus", "Softsign", "SpaceToDepth", "Sqrt", "Tan", "ThresholdedRelu", "Tile", "TopK", "Trilu",
        "Where", "Xor",
    }
)  # fmt: skip
"""Further operators of level 0's problems and of today's networks."""

REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
    "ReduceSumSquare",
)  # fmt: skip
"""Operators that reduce the axes in their second input."""

SINGLE_OPERATORS = frozenset({"Split"})
"""Operators of level 0 only; in networks every part of a Split becomes a Slice."""

LACKING = {
    **dict.fromkeys(
        ("Compress", "NonMaxSuppression", "NonZero", "Unique"),
        "the size of its output depends on values, and executors are built from sizes",
    ),
    **dict.fromkeys(
        ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
        "it draws values, which no reference can check",
    ),
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
