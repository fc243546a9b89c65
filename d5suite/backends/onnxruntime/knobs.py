"""The tuning knobs of ONNX Runtime, as data. It reads no variables. Imports `d5suite.levels`."""

from d5suite.levels.knobs import MODE, TuningKnob

_GRAPH = "ONNX Runtime, Graph Optimizations (https://onnxruntime.ai/docs/performance/model-optimizations/)"

KNOBS = (TuningKnob(MODE, ("all", "basic"), _GRAPH),)
