"""Description of the JAX backend. Imports `d5suite.levels` and `d5suite.network`, not JAX."""

from d5suite.levels.backend import Backend
from d5suite.levels.description import usual_tolerances
from d5suite.levels.native import NativeScheme
from d5suite.network.operators import MORE_OPERATORS, SINGLE_OPERATORS, ZOO_OPERATORS
from d5suite.network.variants import ON_NO_ADAPTER, with_large_integers

BACKEND = Backend(
    name="jax",
    title="JAX",
    package="d5suite.backends.jax",
    requires=("jax", "optax"),
    distributions=("jax",),
    install="pip install 'd5suite[jax]'",
    variables=(
        *("XLA_FLAGS", "JAX_DISABLE_JIT", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64"),
        *("JAX_NUMPY_DTYPE_PROMOTION", "JAX_ENABLE_COMPILATION_CACHE"),
        *("JAX_CPU_ENABLE_ASYNC_DISPATCH", "JAX_COMPILATION_CACHE_DIR"),
        *("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_DEBUG_NANS", "JAX_CHECK_TRACER_LEAKS", "JAX_PLATFORMS"),
        *("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR"),
    ),
    modes={
        "jit": "jax.jit: one XLA program per forward pass, gradient or training step, which reuses donated memory",
        "eager": "operator by operator, each its own XLA program",
        "stock": "as jit, with no option set: a training step writes new arrays beside the old ones",
    },
    levels=frozenset({0, 1, 2, 3}),
    devices=("cpu", "cuda"),
    precisions=("fp32", "bf16", "fp16", "fp64"),
    operators=ZOO_OPERATORS | MORE_OPERATORS,
    single_operators=SINGLE_OPERATORS,
    variants=(*ON_NO_ADAPTER, with_large_integers("JAX computes integers in 32 bits")),
    tolerances=usual_tolerances(
        fp16_trajectory=0.05,
        fp64="rounding: seen 1e-16 in outputs, and 1e-15 in losses and parameters after 20 steps of ResNet-18",
        fp32="rounding: seen 3.1e-7 in outputs and 9e-5 in gradients on ResNet-50, 64 px, and 2.2e-7 in losses "
        "on ResNet-18; a ReLU flipped by rounding changes a gradient by 2e-2 and losses by 1e-4",
        bf16="8 significant bits: seen 3.7e-3 in outputs and 1e-3 in the loss on ResNet-50, 1.9e-2 in losses of "
        "20 steps on ResNet-18",
        fp16="11 significant bits: seen 8.5e-4 in outputs and 2.4e-2 in losses of 20 steps on a network of every "
        "operator, and 2.5e-4 in losses of 20 steps on LeNet-5; rounding is one eighth of bf16's",
    ),
    schemes={
        "sharded": NativeScheme(
            title="shard_map over jax.distributed",
            synchronous=True,
            transports={"cpu": "gloo", "cuda": "nccl"},
            sends=2.0,
            quick=False,  # it is compiled for both optimizers, each twice
        ),
    },
    mode_absent={
        "eager": {"profile": "operators that run one by one are programs without names of nodes; see mode stock"}
    },
    slow_float64="XLA compiles float64 convolutions for the CPU to plain loops in one thread",
    absent={
        "L2 flush": "JAX's arrays are never overwritten, so that no buffer can be written again and again",
        "device events": "JAX's Python interface records no events among a device's work",
        "scheme:horovod": "Horovod has no extension for JAX",
        "scheme:sharded:eager": "one program over all processes is made by jit",
        "early gradients": "a compiled program returns all its results together",
        "cross barrier": "a compiled program takes all its parameters together, before it computes anything",
        "shared gradients": "JAX arrays cannot be written: gradients and weights are copied for messages",
        "loader": "JAX has no image loader; its users use another framework's",
    },
)
