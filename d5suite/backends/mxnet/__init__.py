"""The MXNet backend, described; MXNet itself is imported by the modules beside this one."""

from d5suite.levels.backend import ZOO_OPERATORS, Backend, Tolerance

_ENGINE = {"MXNET_CPU_WORKER_NTHREADS": "1", "MXNET_CPU_PRIORITY_NTHREADS": "1"}
"""One operator at a time, whose OpenMP threads are the budget."""

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
    levels=frozenset({1, 2}),
    devices=("cpu",),
    precisions=("fp32", "fp64"),
    operators=ZOO_OPERATORS,
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
        "cuda": "MXNet is retired: PyPI's wheel is for the CPU, and the last CUDA wheel (mxnet-cu112) is for CUDA 11.2",
        "bf16": "MXNet 1.9.1 has bfloat16 for some operators: on the CPU transpose corrupts the heap, and dot refuses",
    },
    expected_failures={
        "test_reshape_allowzero_reordered_cpu": "MXNet's classic arrays have no axes of length zero",
    },
)
