"""The tuning knobs of deep500's reference, as data: variables of NumPy and of its OpenBLAS.

Imports `d5suite.levels`.
"""

from d5suite.levels.knobs import variable_knob

_NUMPY = "NumPy, Global Configuration Options (https://numpy.org/doc/stable/reference/global_state.html)"
_OPENBLAS = "OpenBLAS, Runtime variables (https://www.openmathlib.org/OpenBLAS/docs/runtime_variables/)"

KNOBS = (
    variable_knob("NUMPY_MADVISE_HUGEPAGE", ("0", "1"), _NUMPY, bound=("memory",)),
    variable_knob("OPENBLAS_CORETYPE", ("Haswell", "SkylakeX", "Zen"), _OPENBLAS, layers=("Conv", "Gemm", "MatMul")),
)
"""The mode is not a knob: mode ``reference`` exists to be read, not to be fast."""
