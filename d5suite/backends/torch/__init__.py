"""The PyTorch backend, described; PyTorch itself is imported by the modules beside this one."""

from d5suite.levels.backend import Backend, Tolerance

BACKEND = Backend(
    name="torch",
    title="PyTorch",
    package="d5suite.backends.torch",
    requires=("torch",),
    distributions=("torch",),
    extra="d5suite[torch]",
    modes={
        "eager": "native calls one by one, images stored N, C, H, W",
        "channels_last": "native calls one by one, images stored N, H, W, C",
        "compile": "forward and backward through torch.compile; the optimizer native",
    },
    levels=frozenset({1, 2}),
    devices=("cpu", "cuda"),
    precisions=("fp32", "bf16", "fp64"),
    operators=frozenset(
        {
            "Add", "AveragePool", "BatchNormalization", "Clip", "Concat", "Conv", "Div", "Dropout", "Flatten",
            "Gemm", "GlobalAveragePool", "GlobalMaxPool", "Identity", "LRN", "LeakyRelu", "LogSoftmax", "MatMul",
            "MaxPool", "Mul", "Pad", "Relu", "Reshape", "Sigmoid", "Softmax", "SoftmaxCrossEntropyLoss", "Squeeze",
            "Sub", "Sum", "Tanh", "Transpose", "Unsqueeze",
        }
    ),
    tolerances={
        "fp32": Tolerance(1e-5, 10, 1e-4, "TODO"),
        "bf16": Tolerance(1e-1, 1, 1e-1, "TODO"),
        "fp64": Tolerance(1e-12, 1e-11, 1e-11, "TODO"),
    },
)  # fmt: skip
