"""TensorFlow's adapter, described as data; importing this imports no framework."""

from __future__ import annotations

from d5suite.distributed.horovod import described as horovod
from d5suite.levels.backend import Backend
from d5suite.levels.description import usual_tolerances
from d5suite.levels.native import Knob, NativeScheme
from d5suite.network.operators import MORE_OPERATORS, SINGLE_OPERATORS, ZOO_OPERATORS
from d5suite.network.variants import INTEGERS, ON_NO_ADAPTER, with_attribute, without_kernels

BACKEND = Backend(
    name="tensorflow",
    title="TensorFlow",
    package="d5suite.backends.tensorflow",
    requires=("tensorflow",),
    distributions=("tensorflow", "tensorflow-cpu", "tensorflow-rocm"),
    install="pip install 'd5suite[tensorflow]'",
    variables=(
        *("TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS", "XLA_FLAGS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"),
        *("TF_ONEDNN_ASSUME_FROZEN_WEIGHTS", "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"),
        *("TF_MKL_ALLOC_MAX_BYTES", "TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE", "TF_GPU_ALLOCATOR", "TF_GPU_THREAD_MODE"),
        *("TF_GPU_THREAD_COUNT", "TF_FORCE_GPU_ALLOW_GROWTH", "TF_DETERMINISTIC_OPS"),
        *("TF_CUDNN_USE_AUTOTUNE", "TF_USE_LEGACY_KERAS"),
    ),
    modes={
        "graph": "tf.function: one traced graph per forward pass, gradient or training step",
        "xla": "tf.function with jit_compile=True: the same graphs compiled by XLA",
        "eager": "one operator at a time, gradients from a tape",
        "stock": "as graph, with no option set: the update in plain assignments, as tf.keras.optimizers make it",
    },
    levels=frozenset({0, 1, 2, 3}),
    devices=("cpu", "cuda"),
    precisions=("fp32", "bf16", "fp16", "fp64"),
    operators=ZOO_OPERATORS | MORE_OPERATORS,
    single_operators=SINGLE_OPERATORS,
    variants=(
        *ON_NO_ADAPTER,
        without_kernels(
            {"Abs": ("uint8",), "Einsum": ("int8", "int16", "uint8"), "GridSample": INTEGERS, "Sign": ("uint8",)},
            "TensorFlow has no kernel for these integers",
        ),
        with_attribute(
            ("ScatterElements", "ScatterND"), "reduction", ("mul",), "TensorFlow has no scatter that multiplies"
        ),
    ),
    tolerances=usual_tolerances(
        fp64="rounding: seen 1e-15 in outputs and losses on ResNet-50, 64 px",
        fp32="rounding: seen 3.9e-7 in outputs on ResNet-50 and 5e-6 on the light networks, 1.2e-2 in gradients "
        "and 1.0e-4 in losses on ResNet-50, where a rounding flipped a ReLU. The mean of many values in "
        "BatchNormalization is inexact (docs/findings.md): on MobileNet v2, 64 px, one thread, it takes noise of 512 "
        "roundoffs to move each gradient as far, where 32 do for others",
        fp32_roundings=16,
        bf16="8 significant bits: seen 5e-3 in outputs; gradients and losses on ResNet-50 are estimates",
        fp16="11 significant bits: seen 4.9e-4 in outputs and 2.6e-5 in losses on ResNet-18, 64 px, 2.4e-4 in "
        "losses on LeNet-5, and 2.4e-2 in those of 20 steps on a network of every operator (bf16: 0.16); an eighth "
        "of bf16's in outputs",
    ),
    expected_failures={
        **dict.fromkeys(
            (
                "xla:test_forward?Det-*",
                "xla:test_backward?Det-*",
                "xla:test_operator_means_what_onnx_says?Det?",
                "xla:test_det_*_cpu",
            ),
            "TensorFlow's XLA compiles no determinant",
        ),
    },
    schemes={
        "multi_worker_mirrored": NativeScheme(
            title="MultiWorkerMirroredStrategy",
            synchronous=True,
            transports={"cpu": "ring over gRPC", "cuda": "nccl"},
            sends=2.0,
            knobs={
                "pack_bytes": Knob(0, "bytes of gradients that are sent together (bytes_per_pack); 0: all", least=0),
            },
            quick=False,  # to start and trace takes ten seconds
        ),
        "horovod": horovod(any="horovod.tensorflow.mpi_lib"),
    },
    absent={
        "L2 flush": "TensorFlow's tensors are never overwritten, so that no buffer can be written again and again",
        "device events": "TensorFlow's Python interface records no events among a device's work",
        "scheme:parameter_server_strategy": "ParameterServerStrategy has one client, whose program schedules functions "
        "on workers; a rank, which steps on batches of its own, can be none of them",
        "early gradients": "a traced function returns all its results together",
        "cross barrier": "a traced function takes all its parameters together, before it computes anything",
        "shared gradients": "tensors cannot be written: gradients and weights are copied for messages",
        "Add:backward:fp16": "TensorFlow's CPU kernel sums a broadcast operand's gradient in float16: errors up to "
        "6e-3 over 180 terms, where 3.9e-3 is accepted",
        "loader:hdf5": "tf.data cannot read HDF5 files; tensorflow-io, which can, is a separate project",
        "loader:recordio": "tf.data cannot read RecordIO files",
    },
)
