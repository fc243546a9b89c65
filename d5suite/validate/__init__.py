"""Is the answer right? Error norms, the independent oracle, and the checks that run before anything is timed.

Imports NumPy, ONNX and the contract (`d5suite.levels`, `d5suite.network`); no framework.
"""
