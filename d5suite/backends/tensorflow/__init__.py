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
    # About ten times the worst seen on ResNet-18 and -50 (64 px, batch 8, all modes) and on ONNX's light networks.
    tolerances={
        "fp64": Tolerance(
            outputs=2e-6,
            gradients=20,
            trajectory=1e-10,
            reason="outputs are compared with onnxruntime in float32 (seen 1.5e-7); gradients and losses agree among "
            "modes to 2 sensitivities and 2e-16 on ResNet-18; ResNet-50 amplifies roundings 1e4-fold in ten steps",
        ),
        "fp32": Tolerance(
            outputs=5e-5,
            gradients=50,
            trajectory=2e-2,
            reason="seen: outputs 4e-7 on ResNets and 5e-6 on AlexNet with random weights, whose sums are long; "
            "gradients 4.6 sensitivities; losses 1e-7 on ResNet-18, but 2e-3 on ResNet-50 by its tenth step",
        ),
        "bf16": Tolerance(
            outputs=5e-2,
            gradients=15,
            trajectory=0.4,
            reason="8 significant bits: seen outputs 5e-3, gradients 1.5 sensitivities, and losses 4e-2 on ResNet-50 "
            "by its tenth step; graphs and eager execution round at different places",
        ),
    },
)
