"""Keras's adapter, described as data; importing this imports no framework."""

from __future__ import annotations

from d5suite.distributed.horovod import described as horovod
from d5suite.levels.backend import Backend
from d5suite.levels.description import usual_tolerances
from d5suite.levels.native import Knob, NativeScheme
from d5suite.network.operators import MORE_OPERATORS, SINGLE_OPERATORS, ZOO_OPERATORS
from d5suite.network.variants import ON_NO_ADAPTER, with_large_integers

BACKEND = Backend(
    name="keras",
    title="Keras",
    package="d5suite.backends.keras",
    requires=("keras",),
    distributions=("keras",),
    install="pip install 'd5suite[keras]'",
    variables=(
        *("XLA_FLAGS", "TF_XLA_FLAGS", "TF_ENABLE_ONEDNN_OPTS", "JAX_DISABLE_JIT"),
        *("JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64", "TORCHDYNAMO_DISABLE", "ATEN_CPU_CAPABILITY"),
        *("TF_GPU_ALLOCATOR", "TF_FORCE_GPU_ALLOW_GROWTH", "XLA_PYTHON_CLIENT_PREALLOCATE", "PYTORCH_CUDA_ALLOC_CONF"),
    ),
    modes={
        "tensorflow": "Keras on TensorFlow, compiled as Keras chooses: graph on the CPU, XLA on a GPU; channels last",
        "torch": "Keras on PyTorch, one operator at a time; channels first",
        "jax": "Keras on JAX, compiled by jax.jit; channels last",
    },
    environment={mode: {"KERAS_BACKEND": mode} for mode in ("tensorflow", "torch", "jax")},
    mode_requires={mode: {mode: f"pip install 'd5suite[{mode}]'"} for mode in ("tensorflow", "torch", "jax")},
    levels=frozenset({0, 1, 2, 3}),
    devices=("cpu", "cuda"),
    precisions=("fp32", "bf16", "fp16", "fp64"),
    operators=ZOO_OPERATORS | MORE_OPERATORS,
    single_operators=SINGLE_OPERATORS,
    variants=(*ON_NO_ADAPTER, with_large_integers("Keras is fed integers of 32 bits, which all its backends have")),
    tolerances=usual_tolerances(
        fp64="rounding: seen 1e-15 in outputs and losses, and 5e-12 in losses of 20 steps of ResNet-18, 32 px",
        fp32="rounding: seen 1.6e-7 in outputs, 4.2e-2 in gradients, where a rounding flipped a ReLU, and 1e-7 "
        "in losses on ResNet-18, 32 px; deeper networks are estimates. On PyTorch, Keras computes the variance as "
        "a difference of means, which is less exact",
        bf16="8 significant bits: seen 3.8e-3 in outputs, 0.19 in gradients and 1.6e-3 in losses on ResNet-18, 32 px",
        fp16="11 significant bits: seen 9.2e-4 in outputs and 5.5e-2 in losses of 20 steps on a network of "
        "every operator, 4.0e-4 and 3.8e-5 on ResNet-18, 64 px; an eighth of bf16's in outputs",
    ),
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
        "horovod": horovod(tensorflow="horovod.tensorflow.mpi_lib", torch="horovod.torch.mpi_lib_v2"),
    },
    slow_float64="Keras builds and traces each float64 function in Python, layer by layer",
    absent={
        "L2 flush": "Keras's tensors are never overwritten, so that no buffer can be written again and again",
        "device events": "Keras has no events, and those of its backend are not its own",
        "stock": "the mode tensorflow is Keras with no option set, on its default backend",
        "scheme:multi_worker_mirrored:torch": "it is TensorFlow's; Keras has no distribution of its own on PyTorch",
        "scheme:multi_worker_mirrored:jax": "it is TensorFlow's; keras.distribution, which is for JAX, would "
        "normalise by the batch of all ranks",
        "scheme:horovod:jax": "Horovod has no extension for JAX",
        "early gradients": "a compiled gradient returns its results together, and so does torch.autograd.grad",
        "cross barrier": "a compiled step takes all its parameters together, before it computes anything",
        "shared gradients": "tensors of TensorFlow and JAX cannot be written: gradients are copied for messages",
        "loader:tfrecord": "Keras cannot read TFRecord files; its users take TensorFlow's loader, see there",
        "loader:recordio": "Keras cannot read RecordIO files",
        "custom": "Keras has no custom operators of its own: see its backends' adapters",
    },
    expected_failures={
        "jax:test_backward?Add-bf16?": "XLA's CPU code sums a broadcast operand's bfloat16 gradient in bfloat16: "
        "errors up to 4.3e-2, where 3.1e-2 is accepted",
    },
)
