"""A backend that misbehaves on request, one mode per fault; and one whose framework is not installed."""

from d5suite.levels.backend import Backend, Tolerance

_TOLERANCE = Tolerance(1e-4, 1e-4, 1e-4, "float32 rounding")

BACKEND = Backend(
    name="faulty",
    title="Faulty",
    package="faulty_backend",
    requires=["onnxruntime"],
    distributions=["faulty-backend"],
    install="pip install faulty-backend",
    modes={
        "good": "answers through onnxruntime",
        "wrong": "every output is off by 1 part in 100",
        "nan": "one output is not a number",
        "shape": "one output too few",
        "raises": "an exception in the first call",
        "segfault": "dies of SIGSEGV when timed",
        "killed": "dies of SIGKILL when timed",
        "hangs": "never returns when timed",
        "memory": "takes ever more memory when timed",
        "orphan": "leaves a child process behind and hangs",
    },
    levels=frozenset({1}),
    devices=["cpu"],
    precisions=["fp32"],
    operators=frozenset({"Conv", "BatchNormalization", "Relu", "Add", "GlobalAveragePool", "Flatten", "Gemm",
                         "SoftmaxCrossEntropyLoss"}),
    tolerances={"fp32": _TOLERANCE},
)  # fmt: skip

ABSENT = Backend(
    name="absent",
    title="Absent",
    package="faulty_backend",
    requires=["no_such_framework"],
    distributions=["no-such-framework"],
    install="pip install 'd5suite[absent]'",
    modes={"only": "never runs"},
    levels=frozenset({1}),
    devices=["cpu"],
    precisions=["fp32"],
    operators=frozenset(),
    tolerances={"fp32": _TOLERANCE},
)
