"""The contract between d5suite and a framework, one file per level of the benchmark.

`backend` describes an adapter as data; `network` (Level 1) and `training` (Level 2) say what an adapter implements.
These modules import the standard library, NumPy, `d5suite.errors` and `d5suite.network`, and no framework.
"""
