"""The MXNet backend, described; MXNet itself is imported by the modules beside this one."""

from d5suite.levels.backend import MORE_OPERATORS, SINGLE_OPERATORS, ZOO_OPERATORS, Backend, Tolerance

_ENGINE = {"MXNET_CPU_WORKER_NTHREADS": "1", "MXNET_CPU_PRIORITY_NTHREADS": "1"}
"""One operator at a time, whose OpenMP threads are the budget."""

_NO_ARRAYS = "MXNet has no arrays of this type"

BACKEND = Backend(
    name="mxnet",
    title="MXNet",
    package="d5suite.backends.mxnet",
    requires=("mxnet",),
    distributions=("mxnet",),
    install="pip install --no-deps mxnet==1.9.1 && pip install requests graphviz setuptools",
    modes={
        "hybrid": "a hybridized Gluon block: one cached graph with static memory and shapes",
        "imperative": "the same Gluon block, operator by operator",
    },
    levels=frozenset({0, 1, 2}),
    devices=("cpu",),
    precisions=("fp32", "fp64"),
    operators=ZOO_OPERATORS | MORE_OPERATORS,
    single_operators=SINGLE_OPERATORS,
    tolerances={
        "fp64": Tolerance(
            outputs=1e-10,
            gradients=4,
            trajectory=1e-10,
            reason="rounding: seen 3e-16 in outputs, 4e-16 in losses, and against PyTorch over 20 steps of ResNet-18 "
            "at 32 px 3e-13 in losses and 4e-12 in parameters",
        ),
        "fp32": Tolerance(
            outputs=5e-5,
            gradients=4,
            trajectory=1e-2,
            reason="rounding: seen 6.5e-8 in outputs on DenseNet-121, 2e-7 in outputs, 3.1e-7 in losses and 1.4e-6 in "
            "gradients on ResNet-18 at 32 px; a ReLU that a rounding flips moved losses of ResNet-50 by 1.2e-3",
        ),
    },
    environment={"hybrid": _ENGINE, "imperative": _ENGINE},
    absent={
        "loader:tfrecord": "MXNet has no reader of TFRecord files of its own",
        "cuda": "MXNet is retired: PyPI's wheel is for the CPU, and the last CUDA wheel (mxnet-cu112) is for CUDA 11.2",
        "bf16": "MXNet 1.9.1 has bfloat16 for some operators: on the CPU transpose corrupts the heap, and dot refuses",
        "fp16": "MXNet 1.9.1 has no matrix product of float16 on the CPU: a convolution ends with 'FP16 gemm on cpu "
        "not implemented!', dot and FullyConnected refuse",
    },
    expected_failures={
        **dict.fromkeys((f"test_*_{kind}_cpu" for kind in ("int16", "uint16", "uint32", "uint64")), _NO_ARRAYS),
        "test_attention_*_bf16_cpu": "MXNet 1.9.1 has bfloat16 for some operators only: on the CPU dot refuses",
        **dict.fromkeys(
            (
                "test_attention_*_fp16_cpu",
                "test_attention_local_window_ext_cache_float16_mask_cpu",
                "test_attention_24_qk_matmul_output_mode3_softmax_precision_cpu",
            ),
            "MXNet's matrix products take no float16 on the CPU",
        ),
        "test_maxpool_2d_uint8_cpu": "MXNet's pooling takes floating-point arrays only",
        "test_maxpool_with_argmax_2d_*_cpu": "MXNet's pooling gives no indices",
        "test_reduce_*_empty_set*_cpu": "MXNet's classic arrays have no axes of length zero",
        "test_reshape_allowzero_reordered_cpu": "MXNet's classic arrays have no axes of length zero",
    },
)
