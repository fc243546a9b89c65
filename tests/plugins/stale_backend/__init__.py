"""A backend that is right when it is proved and wrong when it is timed, in a way of its mode."""

from dataclasses import replace

from d5suite.backends.torch import BACKEND as RIGHT

BACKEND = replace(
    RIGHT,
    name="stale",
    package="stale_backend",
    mode_absent={},
    absent={**RIGHT.absent, **dict.fromkeys(("Gemm:fp32", "Concat:fp32"), "jobs need not measure ceilings")},
    modes={
        "right": "no mistake",
        "replay3": "the input is ignored from the third call of one shape on",
        "replay8": "the input is ignored from the eighth call of one shape on",
        "replay20": "the input is ignored from the twentieth call of one shape on",
        "timed": "the input is ignored while it is timed",
        "timed_both": "the input of forward and backward is ignored while it is timed",
        "timed_forward": "the input of forward is ignored while it is timed",
        "timed_update": "updates are an eighth shorter while they are timed",
        "timed_step": "the input of a step is ignored while it is timed",
        "cached": "after eight calls the answer is a cached one",
        "cached_forward": "after eight calls the answer of forward is a cached one",
        "cached_both": "after eight calls the answer of forward and backward is a cached one",
        "half": "after eight calls the answer is wrong by half",
        "unwaited": "an update is skipped unless one waits for the one before",
        "hasty": "the same, after twelve updates",
        "remembers": "right answers are remembered by the input's values, until weights are loaded",
        "recognizes": "right answers are remembered by the input's object, until weights are loaded",
        "few": "of a batch it takes the first eight images only",
        "timed_few": "the same of forward and backward, but only while it is timed",
        "stops": "updates stop after fifteen",
        "halts": "eight steps after weights were loaded updates stop",
        "captures": "eight steps after weights were loaded the batch of the ninth is taken for ever",
        "alternates": "eight steps after weights were loaded each second step updates nothing",
        "quarters": "eight steps after weights were loaded every fourth image is left out",
        "promises": "every answer is a promise, which is kept when it is fetched",
        "promises20": "the same, from the twentieth call of one shape on",
        "looks_up": "feed, and load_parameters, compute the answer, and a call looks it up",
        "frozen": "in float32 running statistics stay as they are",
        "narrow": "in float32 the velocity is rounded to bfloat16",
        "late_rate": "in float32 a change of the learning rate counts one step late",
        "undecayed": "in float32 weight decay leaves out vectors",
        "overflows": "momentum is infinite after fifteen updates",
    },
)
