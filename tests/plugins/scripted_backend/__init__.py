"""PyTorch on the CPU, which plays a GPU whose event clock follows a script, by mode."""

from dataclasses import replace

from d5suite.backends.torch import BACKEND as RIGHT

BACKEND = replace(
    RIGHT,
    name="scripted",
    title="Scripted",
    package="scripted_backend",
    mode_absent={},
    modes={
        "agrees": "the events span what the host's clock sees",
        "short": "the events span half of it, as of work on two streams",
        "hasty": "the device works twice as long as synchronize waits",
        "backwards": "the event clock goes backwards",
    },
    absent={
        **RIGHT.absent,
        **dict.fromkeys(("Gemm:fp32", "Concat:fp32"), "jobs need not measure ceilings"),
    },
)
