"""A backend that is right but for one deliberate mistake, chosen by the mode; the conformance kit must find each."""

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
