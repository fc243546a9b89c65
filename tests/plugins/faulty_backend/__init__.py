"""A backend that misbehaves on request, one mode per fault; and one whose framework is not
installed."""

from dataclasses import replace

from d5suite.levels.backend import Backend
from d5suite.levels.description import Tolerance

_ABSENT = dict.fromkeys(
    [
        "gradient",
        "level 0",
        "level 2",
        "operators",
        "custom",
        "training",
        "baseline",
        "loader",
        "profile",
        "cuda",
        "bf16",
        "fp16",
        "fp64",
    ],
    "this backend is there to misbehave",
)
_TOLERANCE = Tolerance(5e-5, 1e-4, 1e-4, "float32 rounding")

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
        "shape": "one score too few",
        "dtype": "float64 instead of float32",
        "few": "no output at all",
        "raises": "an exception in the first call",
        "segfault": "dies of SIGSEGV when timed",
        "killed": "dies of SIGKILL when timed",
        "hangs": "never returns when timed",
        "memory": "takes ever more memory when timed",
        "third": "takes 512 MiB, which it keeps, in its third call",
        "later": "takes 512 MiB, which it keeps, once it is timed",
        "loading": "takes 512 MiB for a moment while weights are loaded",
        "builds": "compiles for a second where it is made",
        "orphan": "leaves two child processes behind, one in a session of its own, and hangs",
        "engine": "runs on a framework that is not there",
        "exclusive": "needs a process of its own",
    },
    levels=frozenset({1}),
    devices=["cpu"],
    precisions=["fp32"],
    operators=frozenset({"Conv", "BatchNormalization", "Relu", "Add", "GlobalAveragePool", "Flatten", "Gemm",
                         "SoftmaxCrossEntropyLoss"}),
    tolerances={"fp32": _TOLERANCE},
    absent=_ABSENT,
    variables=("FAULTY_FAULT",),
    environment={"engine": {"FAULTY_ENGINE": "other"}, "exclusive": {"FAULTY_ENGINE": "third"}},
    mode_requires={"engine": {"no_such_engine": "pip install no-such-engine"}},
)  # fmt: skip

LIAR = replace(BACKEND, name="liar", precisions=["fp32", "fp64"], modes={"good": "lies about its precisions"})
HOLLOW = replace(
    BACKEND,
    name="hollow",
    modes={"good": "lies about its operators"},
    operators=BACKEND.operators | {"Bernoulli"},
    absent={key: reason for key, reason in _ABSENT.items() if key != "operators"},
)
TWIN = replace(BACKEND, name="twin")
OTHER_TWIN = replace(BACKEND, name="twin", title="The other twin")

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
    absent=_ABSENT,
    environment={"engine": {"FAULTY_ENGINE": "other"}, "exclusive": {"FAULTY_ENGINE": "third"}},
    mode_requires={"engine": {"no_such_engine": "pip install no-such-engine"}},
)

NO_MODE = replace(BACKEND, name="modeless", modes={})
