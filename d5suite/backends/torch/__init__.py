"""The description of the PyTorch backend; only the modules beside it import PyTorch."""

from d5suite.distributed.horovod import described as horovod
from d5suite.levels.backend import Backend
from d5suite.levels.description import usual_tolerances
from d5suite.levels.native import Knob, NativeScheme
from d5suite.network.operators import MORE_OPERATORS, SINGLE_OPERATORS, ZOO_OPERATORS
from d5suite.network.variants import INTEGERS, ON_NO_ADAPTER, with_types, without_kernels

BACKEND = Backend(
    name="torch",
    title="PyTorch",
    package="d5suite.backends.torch",
    requires=("torch",),
    distributions=("torch",),
    install="pip install 'd5suite[torch]'",
    variables=(
        *("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_SUPPRESS_ERRORS", "TORCH_COMPILE_DEBUG"),
        *("TORCHINDUCTOR_FREEZING", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_CPP_WRAPPER"),
        *("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCH_COMPILE_BACKEND"),
        *("ATEN_CPU_CAPABILITY", "PYTORCH_JIT", "PYTORCH_TUNABLEOP_ENABLED", "THP_MEM_ALLOC_ENABLE"),
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
        *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_CUDNN_V8_API_DISABLED"),
        *("TORCH_MKLDNN_MATMUL_MIN_DIM", "TORCH_NCCL_BLOCKING_WAIT", "GLOO_SOCKET_IFNAME"),
    ),
    modes={
        "eager": "native calls one by one, images stored N, C, H, W",
        "channels_last": "native calls one by one, images stored N, H, W, C",
        "compile": "forward and backward through torch.compile; the optimizer native",
        "cuda_graphs": "as eager, with forward and backward recorded in CUDA graphs and replayed; on cuda only",
        "stock": "as eager, with no option set: the optimizer updates one parameter after another on the CPU",
    },
    levels=frozenset({0, 1, 2, 3}),
    devices=("cpu", "cuda"),
    precisions=("fp32", "bf16", "fp16", "fp64"),
    operators=ZOO_OPERATORS | MORE_OPERATORS,
    single_operators=SINGLE_OPERATORS,
    variants=(
        *ON_NO_ADAPTER,
        without_kernels({"GridSample": INTEGERS}, "PyTorch samples no integers"),
        with_types(
            ("uint16", "uint32", "uint64"),
            "PyTorch has no arithmetic on unsigned integers of more than 8 bits",
            ("Add", "Div", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Sub"),
        ),
    ),
    tolerances=usual_tolerances(
        fp16_trajectory=0.05,
        fp64="rounding: seen 1e-15 in outputs and losses on ResNet-50, 64 px",
        fp32="rounding: seen 3.5e-7 in outputs on ResNet-50 and 1.7e-5 on VGG-19, 4e-4 in gradients and "
        "1.1e-6 in losses on ResNet-50; a ReLU that a rounding flips moves a gradient by 2.2e-2, and "
        "elsewhere moved losses by 1.9e-3",
        bf16="8 significant bits: seen 7.9e-2 in outputs on Inception v1; gradients and losses are estimates",
        fp16="11 significant bits: seen 9.2e-4 in outputs and 2.4e-2 in losses of 20 steps on a network of every "
        "operator, 4.0e-4 and 5e-5 on ResNet-18, 64 px; an eighth of bf16's",
    ),
    schemes={
        "ddp": NativeScheme(
            title="DistributedDataParallel",
            synchronous=True,
            transports={"cpu": "gloo", "cuda": "nccl"},
            sends=2.0,
            knobs={
                "bucket_mib": Knob(25.0, "how many MiB of gradients are sent together", least=0.001),
                "static_graph": Knob(False, "whether it may rely on the same graph in every step"),
                "gradients_as_views": Knob(False, "whether gradients lie in the buckets, without copies"),
            },
        ),
        "fsdp": NativeScheme(
            title="FSDP (fully_shard)",
            synchronous=True,
            transports={"cpu": "gloo", "cuda": "nccl"},
            sends=2.0,
            knobs={
                "gather_again": Knob(False, "whether parameters are freed after the forward pass and gathered again"),
            },
        ),
        "horovod": horovod(any="horovod.torch.mpi_lib_v2"),
    },
    absent={
        "scheme:fsdp:channels_last": "fully_shard takes parameters only whose elements lie in order",
        "loader:tfrecord": "PyTorch has no reader of TFRecord files of its own",
        "loader:recordio": "PyTorch has no reader of RecordIO files of its own",
    },
    mode_absent={
        "cuda_graphs": {
            "cpu": "CUDA graphs are recorded and replayed by a GPU",
            "fp16": "each step has another loss scale, and a skipped step another course",
            "level 0": "an operator is one launch or a few: its time on the GPU is that of the device's own clock",
            "level 3": "the hooks that send gradients do not run in a graph",
        },
    },
)
