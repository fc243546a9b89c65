"""TensorFlow's adapter, described as data; importing this imports no framework."""

from __future__ import annotations

from d5suite.levels.backend import Backend, Tolerance

BACKEND = Backend(
    name="tensorflow",
    title="TensorFlow",
    package="d5suite.backends.tensorflow",
    requires=("tensorflow",),
    distributions=("tensorflow", "tensorflow-cpu", "tensorflow-rocm"),
    extra="d5suite[tensorflow]",
    modes={
        "graph": "tf.function: one traced graph per forward pass, gradient or training step",
        "xla": "tf.function with jit_compile=True: the same graphs compiled by XLA",
        "eager": "operator by operator, gradients by a tape",
    },
    levels=frozenset({1, 2}),
    devices=("cpu", "cuda"),
    precisions=("fp32", "bf16", "fp64"),
    operators=frozenset(
        {
            "Add",
            "AveragePool",
            "BatchNormalization",
            "Clip",
            "Concat",
            "Conv",
            "Div",
            "Dropout",
            "Flatten",
            "Gemm",
            "GlobalAveragePool",
            "GlobalMaxPool",
            "Identity",
            "LRN",
            "LeakyRelu",
            "LogSoftmax",
            "MatMul",
            "MaxPool",
            "Mul",
            "Pad",
            "Relu",
            "Reshape",
            "Sigmoid",
            "Softmax",
            "SoftmaxCrossEntropyLoss",
            "Squeeze",
            "Sub",
            "Sum",
            "Tanh",
            "Transpose",
            "Unsqueeze",
        }
    ),
    tolerances={
        "fp64": Tolerance(1e-12, 1e-11, 1e-10, "placeholder"),
        "fp32": Tolerance(1e-5, 1e-4, 1e-4, "placeholder"),
        "bf16": Tolerance(1e-1, 1e-1, 1e-1, "placeholder"),
    },
)
