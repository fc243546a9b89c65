"""Statistics of timings: pure functions of series of samples.

Imports NumPy, `d5suite.errors` and, lazily, SciPy.
"""
