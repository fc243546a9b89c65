"""ONNX Runtime, described for d5suite as data; importing this does not import onnxruntime."""

from d5suite.levels.backend import Backend, Tolerance

INFERENCE_ONLY = "onnxruntime runs networks forwards; its training build is a package of its own"
WHOLE_GRAPH = "onnxruntime takes the whole ONNX graph, so there is nothing to implement operator by operator"

BACKEND = Backend(
    name="onnxruntime",
    title="ONNX Runtime",
    package="d5suite_onnxruntime",
    requires=("onnxruntime",),
    distributions=("onnxruntime", "onnxruntime-gpu"),
    install="pip install d5suite-onnxruntime",
    modes={"all": "every graph optimization", "basic": "only those that remove what is redundant"},
    levels=frozenset({1}),
    devices=("cpu",),
    precisions=("fp32",),
    operators=frozenset(
        {
            "Add", "AveragePool", "BatchNormalization", "Clip", "Concat", "Conv", "Div", "Dropout", "Erf", "Exp",
            "Flatten", "Gemm", "GlobalAveragePool", "GlobalMaxPool", "Identity", "LRN", "LeakyRelu", "LogSoftmax",
            "MatMul", "MaxPool", "Mul", "Pad", "Relu", "Reshape", "Sigmoid", "Softmax", "SoftmaxCrossEntropyLoss",
            "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "Transpose", "Unsqueeze",
        }
    ),
    tolerances={
        "fp32": Tolerance(
            outputs=5e-5,
            gradients=1,
            trajectory=1,
            reason="float32 rounding: seen 6e-7 on single operators; gradients and training do not exist here",
        )
    },
    absent={
        "cuda": "this example is for the CPU build",
        "bf16": "the CPU build has no bfloat16 convolution",
        "fp16": "the CPU build has no float16 convolution",
        "fp64": "the CPU build has no float64 convolution",
        "gradient": INFERENCE_ONLY,
        "level 0": WHOLE_GRAPH,
        "level 2": INFERENCE_ONLY,
        "training": INFERENCE_ONLY,
        "baseline": INFERENCE_ONLY,
        "operators": WHOLE_GRAPH,
        "custom": WHOLE_GRAPH,
        "loader": "onnxruntime has no image loader",
    },
    expected_failures={"*LRN-size=4*": "onnxruntime's LRN takes odd sizes only"},
)  # fmt: skip
