"""The tuning knobs of Keras, as data: the framework below Keras, and that framework's knobs.

Imports `d5suite.levels`.
"""

from d5suite.levels.knobs import MATRIX_LAYERS, MODE, TuningKnob, flag_knob, onednn_knobs, openmp_knobs, variable_knob

_KERAS = "Keras, Configuring your backend (https://keras.io/getting_started/)"
_ONEDNN = "tensorflow/core/util/util.cc of TensorFlow 2.21"
_DISPATCH = "aten/src/ATen/native/DispatchStub.cpp of PyTorch 2.13"
_XLA = "xla/debug_options_flags.cc of OpenXLA"

KNOBS = (
    TuningKnob(MODE, ("tensorflow", "torch", "jax"), _KERAS),
    variable_knob("TF_ENABLE_ONEDNN_OPTS", ("0",), _ONEDNN, layers=MATRIX_LAYERS, mode=("tensorflow",)),
    *openmp_knobs(mode=("torch",)),
    variable_knob("ATEN_CPU_CAPABILITY", ("avx2", "avx512"), _DISPATCH, mode=("torch",)),
    flag_knob("vector-width", "XLA_FLAGS", {"512": "--xla_cpu_prefer_vector_width=512"}, _XLA, mode=("jax",)),
    *onednn_knobs(mode=("tensorflow", "torch")),
)
