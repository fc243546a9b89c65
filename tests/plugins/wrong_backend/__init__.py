"""A backend that is right but for one deliberate mistake, chosen by the mode; the conformance kit must find each.

And the same with less to prove it by: ``single`` has float32 only, ``partial`` Softmax only.
"""

from dataclasses import replace

from d5suite.backends.torch import BACKEND as RIGHT

BACKEND = replace(
    RIGHT,
    name="wrong",
    package="wrong_backend",
    modes={
        "right": "no mistake",
        "padding": "pads of the beginning and the end are swapped",
        "sum": "the loss is summed instead of averaged",
        "dampening": "momentum with dampening",
        "unsynchronized": "work goes on in another thread, and synchronize does not wait",
        "statistics": "inference moves the running statistics",
        "uphill": "in float32, in which alone it is timed, the optimizer goes uphill",
        "forgetful": "load_state forgets what the optimizer remembered",
        "lenient": "takes any image",
        "threads": "twice the threads it was told",
        "seedless": "the seed is ignored",
        "chatty": "prints at every step",
        "off_by_one": "level 0: a convolution's padding begins one row and column early",
        "axis": "level 0: Softmax along the axis before",
        "dropped": "level 0: Softmax's gradient lacks the term of the sum",
        "half": "level 0: matrix products add up in float16",
        "crash": "level 0: Softmax dies of SIGSEGV",
    },
)

_NO = "absent on purpose, to see what the kit can still prove"

SINGLE = replace(
    BACKEND,
    name="single",
    modes={"right": "no mistake", "tripled": "every gradient is three times what it should be"},
    precisions=("fp32",),
    absent={**RIGHT.absent, **dict.fromkeys(("fp64", "bf16", "fp16"), _NO)},
)

PARTIAL = replace(
    BACKEND,
    name="partial",
    modes={"right": "no mistake"},
    levels=frozenset({1, 2}),
    operators=frozenset({"Softmax"}),
    single_operators=frozenset(),
    expected_failures={},
    absent={**RIGHT.absent, **dict.fromkeys(("level 0", "operators", "custom", "baseline", "loader"), _NO)},
)
