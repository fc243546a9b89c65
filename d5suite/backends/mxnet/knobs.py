"""The tuning knobs of MXNet, as data. Imports `d5suite.levels`."""

from d5suite.levels.knobs import MODE, UPDATE, TuningKnob, onednn_knobs, openmp_knobs, variable_knob

_VARIABLES = "MXNet, Environment Variables (https://mxnet.apache.org/versions/1.9.1/api/faq/env_var)"
_TIPS = "MXNet, Some Tips for Improving MXNet Performance (https://mxnet.apache.org/versions/1.9.1/api/faq/perf)"

KNOBS = (
    TuningKnob(MODE, ("hybrid", "fused", "imperative", "stock"), _TIPS, layers=("Conv", "BatchNormalization")),
    *openmp_knobs(),
    variable_knob("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN", ("1", "50"), _VARIABLES),
    variable_knob("MXNET_EXEC_ENABLE_INPLACE", ("0",), _VARIABLES),
    variable_knob("MXNET_USE_OPERATOR_TUNING", ("0",), _VARIABLES),
    variable_knob("MXNET_MKLDNN_CACHE_NUM", ("0",), _VARIABLES),
    variable_knob("MXNET_OPTIMIZER_AGGREGATION_SIZE", ("45", "1"), _VARIABLES, layers=(UPDATE,), mode=("stock",)),
    *onednn_knobs("DNNL"),
)
"""The engine's threads are not a knob: the adapter has one, whose operators use all threads of the
budget."""
