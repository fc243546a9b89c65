"""The tuning knobs of PyTorch, as data. Imports `d5suite.levels`."""

from d5suite.levels.knobs import MATRIX_LAYERS, MODE, TuningKnob, onednn_knobs, openmp_knobs, variable_knob

_GUIDE = "PyTorch, Performance Tuning Guide (https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html)"
_INDUCTOR = "torch/_inductor/config.py of PyTorch 2.13"
_ALLOCATOR = "c10/core/impl/alloc_cpu.cpp of PyTorch 2.13: huge pages for tensors of 2 MiB or more"
_DISPATCH = "aten/src/ATen/native/DispatchStub.cpp of PyTorch 2.13"

KNOBS = (
    TuningKnob(MODE, ("eager", "channels_last", "compile", "stock"), _GUIDE, layers=("Conv", "MaxPool")),
    *openmp_knobs(),
    variable_knob("THP_MEM_ALLOC_ENABLE", ("1",), _ALLOCATOR, bound=("memory",)),
    *onednn_knobs(),
    variable_knob("ATEN_CPU_CAPABILITY", ("avx2", "avx512"), _DISPATCH, bound=("arithmetic",)),
    variable_knob("TORCHINDUCTOR_CPP_WRAPPER", ("1",), _INDUCTOR, mode=("compile",)),
    variable_knob("TORCHINDUCTOR_MAX_AUTOTUNE", ("1",), _INDUCTOR, layers=MATRIX_LAYERS, mode=("compile",)),
)
