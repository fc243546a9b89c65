"""The tuning knobs of TensorFlow, as data. Imports `d5suite.levels`."""

from d5suite.levels.knobs import MATRIX_LAYERS, MODE, UPDATE, TuningKnob, flag_knob, onednn_knobs, variable_knob

_FUNCTION = "TensorFlow, Better performance with tf.function (https://www.tensorflow.org/guide/function)"
_ONEDNN = "tensorflow/core/util/util.cc and core/common_runtime/mkl_cpu_allocator.h of TensorFlow 2.21"
_XLA = "OpenXLA, Using XLA with TensorFlow, auto-clustering (https://openxla.org/xla/tf2xla)"

_OWN = ("graph", "eager", "stock")
"""Modes whose kernels are TensorFlow's own."""

KNOBS = (
    TuningKnob(MODE, ("graph", "xla", "eager", "stock"), _FUNCTION, layers=("BatchNormalization", UPDATE)),
    variable_knob("TF_ENABLE_ONEDNN_OPTS", ("0",), _ONEDNN, layers=MATRIX_LAYERS),
    variable_knob("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", ("1",), _ONEDNN, bound=("memory",), mode=_OWN),
    variable_knob("TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE", ("0",), _ONEDNN, mode=_OWN),
    flag_knob(
        "auto-clustering", "TF_XLA_FLAGS", {"on": "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"}, _XLA,
        mode=("graph", "stock"),
    ),
    *onednn_knobs(TF_ENABLE_ONEDNN_OPTS=("",)),
)  # fmt: skip
"""The sizes of the thread pools are not knobs: d5suite sets them to the thread budget."""
