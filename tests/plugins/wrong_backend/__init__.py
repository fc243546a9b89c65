"""A backend that is right but for one deliberate mistake, chosen by the mode; the conformance kit
must find each.

And the same with less to prove it by: ``single`` has float32 only, ``partial`` Softmax only.
"""

from dataclasses import replace

from d5suite.backends.torch import BACKEND as RIGHT
from d5suite.levels.native import Knob, NativeScheme

BACKEND = replace(
    RIGHT,
    name="wrong",
    package="wrong_backend",
    mode_absent={},
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
        "single_output": "forward returns the first output only",
        "threads": "twice the threads it was told",
        "gradient_threads": "twice the threads it was told, in the backward pass only",
        "seedless": "the seed is ignored",
        "eventless": "a GPU has no event timer, without a reason",
        "chatty": "prints at every step",
        "off_by_one": "level 0: a convolution's padding begins one row and column early",
        "axis": "level 0: Softmax along the axis before",
        "dropped": "level 0: Softmax's gradient lacks the term of the sum",
        "half": "level 0: matrix products add up in float16",
        "crash": "level 0: Softmax dies of SIGSEGV",
        "named": "level 0: each operation has the mistake that its name says",
        "unbiased": "running variances are of the unbiased kind",
        "inside": "the velocity contains the learning rate",
        "detached": "the gradient lacks the term of a sum's second operand",
        "thousandth": "all gradients lack a term of one part in a thousand",
        "clipped": "feed clips the array that it is given",
        "tail": "the last image of a batch of more than 16 is taken for the first",
        "view": "feed keeps a view of the array that it is given",
        "loaded_view": "loading keeps views of the arrays that it is given",
        "wide": "float32 answers are fetched as float64",
        "stale": "from the third call on, forward repeats an answer of that shape",
        "stale_shape": "from the third call of one shape on, forward repeats an answer",
        "stale_gradient": "from the third call on, forward_backward repeats an answer",
        "stale_step": "from the third call on, a step trains on the second batch",
        "halts": "from the 33rd step on nothing is updated, and steps are counted",
        "captures": "from the 33rd step on the batch of that step is taken for ever",
        "alternates": "from the 33rd step on, each second step updates nothing",
        "restless": "every 24 steps the velocity is set to zero",
        "quarters": "from the 33rd step on every fourth image is left out",
        "narrow": "the velocity is rounded to bfloat16 in float32",
        "rare_dropout": "Dropout drops nine tenths of its share",
        "one_mask": "Dropout has one mask for all images of a batch",
        "channel_masks": "Dropout has one mask for all channels",
        "few_masks": "Dropout takes 64 masks in turn",
        "unscaled": "Dropout does not scale what it keeps",
        "undropped": "Dropout drops nothing",
        "two_masks": "Dropout's gradient has another mask than its forward pass",
        "reused": "every answer is in the memory of the one before",
        "noisy": "float32 answers have noise of 1e-6",
        "hoarding": "the third forward pass takes 512 MiB",
        "rounded": "float32 gradients are rounded to bfloat16",
        "half_backward": "float32 gradients are computed in bfloat16",
        "first_scale": "the float32 gradient of the first BatchNormalization's scale is 1% too long",
        "last_scale": "the same of the last one",
        "children": "a child process works beside every forward pass",
        "summed": "a replica's gradients are summed over the batch instead of averaged",
        "impatient": "a replica's gradients update the parameters, too",
        "frozen": "the arrays of gradients are read-only",
        "joint": "two gradients share one array",
        "random_order": "gradients are handed out in another order each time",
        "deaf": "an update ignores changes of its arrays",
        "undecayed": "a replica's update forgets weight decay",
        "unclipped": "a replica's update forgets clipping",
        "leaking": "all replicas of a process have one velocity",
        "keeping": "an update keeps the arrays that it is given as its velocity",
        "live": "weights are views of the parameters",
        "restarting": "load_weights resets the optimizer",
        "unseen": "inference does not see the loaded weights",
        "added": "the own scheme adds gradients instead of averaging them",
        "lonely": "the own scheme reduces nothing",
        "lost": "the own scheme loses the last rank's gradient",
        "constant": "the own scheme ignores changes of the learning rate",
        "remembering": "the own scheme goes on where an older one on the same replica ended",
        "slow": "one convolution sleeps for 20 ms",
        "misnamed": "the layer times are of nodes that do not exist",
        "negative": "a layer takes less than no time",
        "hurried": "a rank of the own asynchronous scheme takes the weights after others' gradients, too",
    },
    schemes={
        **RIGHT.schemes,
        "served": NativeScheme(
            title="served",
            synchronous=False,
            transports={"cpu": "gloo"},
            sends=None,
            knobs={"in_turn": Knob(False, "as it always does")},
        ),
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

DAMPENED = replace(BACKEND, name="dampened", modes={"dampening": BACKEND.modes["dampening"]})
"""Wrong in float64, too, which a mode beside the right one is not."""

PARTIAL = replace(
    BACKEND,
    name="partial",
    modes={"right": "no mistake"},
    levels=frozenset({1, 2}),
    operators=frozenset({"Softmax"}),
    single_operators=frozenset(),
    expected_failures={},
    absent={**RIGHT.absent, **dict.fromkeys(("level 0", "operators", "custom", "profile", "baseline", "loader"), _NO)},
)
