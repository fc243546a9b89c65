"""Description of the MXNet backend. Imports `d5suite.levels` and `d5suite.network`, not MXNet."""

from d5suite.distributed.horovod import described as horovod
from d5suite.levels.backend import Backend
from d5suite.levels.description import usual_tolerances
from d5suite.levels.native import Knob, NativeScheme
from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext
from d5suite.network.operators import MORE_OPERATORS, SINGLE_OPERATORS, ZOO_OPERATORS
from d5suite.network.variants import (
    INTEGERS,
    ON_NO_ADAPTER,
    with_attribute,
    with_empty_axes,
    with_types,
    without_kernels,
)

_ENGINE = {"MXNET_CPU_WORKER_NTHREADS": "1", "MXNET_CPU_PRIORITY_NTHREADS": "1"}
"""Run one operator at a time, so that its OpenMP threads are the whole thread budget."""

_SERVERS = {
    "servers": Knob(0, "how many servers hold the weights; 0: as many as ranks", least=0),
    "split_elements": Knob(10**6, "elements from which on an array is divided among all servers", least=1),
}

_IN_FLOAT32 = {"": 2.0**-22}
"""MXNet's servers hold float64 in float32: a few roundings of 2^-24 in a step."""

_NO_ARRAYS = "MXNet has no arrays of this type"


_NO_KERNELS = {
    **dict.fromkeys(("Col2Im", "GridSample", "MaxPool"), INTEGERS),
    **dict.fromkeys(("ScatterElements", "ScatterND"), ("int8", "uint8")),
    "Relu": ("int8", "int32", "int64"),
}


def _padded(node: Node, context: NodeContext) -> str:
    whole = node.op_type == "Pad" and str(context.dtypes.get(node.inputs[0])) in INTEGERS
    constant = whole and node.attributes.get("mode", "constant") == "constant"
    return "MXNet pads integers with those of the image only" if constant else ""


def _unpooling(node: Node, context: NodeContext) -> str:
    """Return why overlapping windows fail: MXNet's scatter adds the values of equal indices."""
    kernel = node.attributes.get("kernel_shape") or ()
    strides = node.attributes.get("strides") or [1] * len(kernel)
    overlapping = node.op_type == "MaxUnpool" and any(s < k for s, k in zip(strides, kernel, strict=True))
    return "windows overlap, and MXNet's scatter adds equal indices" if overlapping else ""


def _columns(node: Node, context: NodeContext) -> str:
    many = node.op_type == "Col2Im" and len(context.shapes.get(node.outputs[0], ())) > 4
    return "MXNet's col2im has one or two spatial axes" if many else ""


def _scalar(node: Node, context: NodeContext) -> str:
    scalar = node.op_type == "Einsum" and any(context.shapes.get(name) == () for name in node.inputs)
    return "MXNet's classic arrays have axes" if scalar else ""


BACKEND = Backend(
    name="mxnet",
    title="MXNet",
    package="d5suite.backends.mxnet",
    requires=("mxnet",),
    distributions=("mxnet",),
    install="pip install --no-deps mxnet==1.9.1 && pip install requests graphviz setuptools",
    variables=(
        *("MXNET_ENGINE_TYPE", "MXNET_CPU_WORKER_NTHREADS", "MXNET_CPU_PRIORITY_NTHREADS", "MXNET_OMP_MAX_THREADS"),
        *("MXNET_EXEC_BULK_EXEC_INFERENCE", "MXNET_EXEC_BULK_EXEC_TRAIN", "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN"),
        *("MXNET_MKLDNN_ENABLED", "MXNET_MKLDNN_CACHE_NUM", "MXNET_SUBGRAPH_BACKEND", "MXNET_USE_FUSION"),
        *("MXNET_OPTIMIZER_AGGREGATION_SIZE", "MXNET_BACKWARD_DO_MIRROR", "MXNET_EXEC_ENABLE_INPLACE"),
        *("MXNET_SAFE_ACCUMULATION", "MXNET_CUDNN_AUTOTUNE_DEFAULT", "MXNET_USE_OPERATOR_TUNING"),
        *("MXNET_KVSTORE_BIGARRAY_BOUND", "MXNET_KVSTORE_REDUCTION_NTHREADS"),
    ),
    modes={
        "hybrid": "a hybridized Gluon block: one cached graph with static memory and shapes",
        "imperative": "the same Gluon block, run operator by operator",
        "fused": "as hybrid, with oneDNN's fused operators in inference, built again when weights have changed",
        "stock": "as hybrid, with no option set: memory and shapes are not static, four arrays are updated in a kernel",
    },
    levels=frozenset({0, 1, 2, 3}),
    devices=("cpu",),
    precisions=("fp32", "fp64"),
    operators=ZOO_OPERATORS | MORE_OPERATORS,
    single_operators=SINGLE_OPERATORS,
    variants=(
        *ON_NO_ADAPTER,
        with_attribute(
            ("ScatterElements", "ScatterND"),
            "reduction",
            ("max", "min", "mul"),
            "MXNet 1.9.1 has no scatter that multiplies or compares",
        ),
        with_types(("int16", "uint16", "uint32", "uint64"), _NO_ARRAYS),
        with_types(
            ("int8", "int32", "int64"),
            "MXNet shifts no bits; a product with a power of two is exact in 8 bits without a sign",
            ("BitShift",),
        ),
        with_types(
            ("int8", "uint8", "int32", "int64"),
            "MXNet multiplies matrices of floating-point numbers only",
            ("Gemm", "MatMul"),
        ),
        with_types(("bool",), "MXNet's scatter has no Booleans", ("ScatterElements", "ScatterND")),
        without_kernels(_NO_KERNELS, "MXNet has no kernel for these integers"),
        _padded,
        with_empty_axes("MXNet's classic arrays cannot have axes of length zero"),
        _unpooling,
        _columns,
        _scalar,
    ),
    tolerances=usual_tolerances(
        fp64="rounding: seen 3e-16 in outputs and 4e-16 in losses; against PyTorch over 20 steps of ResNet-18 "
        "at 32 px, 3e-13 in losses and 4e-12 in parameters",
        fp32="rounding: seen 6.5e-8 in outputs on DenseNet-121, 2e-7 in outputs, 3.1e-7 in losses and 1.4e-6 in "
        "gradients on ResNet-18 at 32 px; a ReLU flipped by rounding changed losses of ResNet-50 by 1.2e-3",
    ),
    environment=dict.fromkeys(("hybrid", "imperative", "fused", "stock"), _ENGINE),
    schemes={
        "dist_sync": NativeScheme(
            title="KVStore dist_sync",
            synchronous=True,
            transports={"cpu": "ps-lite over TCP"},
            sends=2.0,
            servers=True,
            knobs=_SERVERS,
            rounds=_IN_FLOAT32,
            quick=False,  # five processes import MXNet
        ),
        "dist_async": NativeScheme(
            title="KVStore dist_async",
            synchronous=False,
            transports={"cpu": "ps-lite over TCP"},
            sends=2.0,
            servers=True,
            knobs={
                **_SERVERS,
                "in_turn": Knob(False, "whether gradients are sent rank after rank, so that a run repeats itself"),
            },
            rounds=_IN_FLOAT32,
            quick=False,
        ),
        "horovod": horovod(any="horovod.mxnet.mpi_lib"),
    },
    absent={
        "loader:tfrecord": "MXNet cannot read TFRecord files",
        "cross barrier": "a hybridized network takes all its parameters together, before it computes anything",
        "cuda": "MXNet is retired: PyPI's wheel is for the CPU, and the last CUDA wheel (mxnet-cu112) is for CUDA 11.2",
        "bf16": "MXNet 1.9.1 has bfloat16 in some operators only: on the CPU transpose corrupts the heap, dot fails",
        "fp16": "MXNet 1.9.1 has no float16 matrix product on the CPU: a convolution ends with 'FP16 gemm on cpu "
        "not implemented!', dot and FullyConnected reject float16",
    },
    expected_failures={
        "test_cast*_*BFLOAT16*_cpu": "MXNet's casts do not support bfloat16 on the CPU",
        "test_attention_*_bf16_cpu": "MXNet's matrix products on the CPU do not support bfloat16",
        **dict.fromkeys(
            (
                "test_attention_*_fp16_cpu",
                "test_attention_local_window_ext_cache_float16_mask_cpu",
                "test_attention_24_qk_matmul_output_mode3_softmax_precision_cpu",
            ),
            "MXNet's matrix products on the CPU do not support float16",
        ),
        **dict.fromkeys(
            (
                "test_einsum_*_bfloat16_cpu",
                "test_onehot_with_bfloat16_values_cpu",
                "test_range_bfloat16_*_cpu",
                "test_reversesequence_bfloat16_cpu",
            ),
            _NO_ARRAYS,
        ),
        "test_mod_float_edge_cases_fmod_0_*_cpu": "MXNet's remainder of a division by infinity is NaN",
        **dict.fromkeys(
            ("test_operator_means_what_onnx_says?Scatter*", "test_operator_means_what_onnx_says?MaxUnpool*"),
            "MXNet's scatter wants the whole shape, and the batch is open",
        ),
    },
)
