"""Comparisons of answers with independent references.

`check` defines a check; `norms`, `oracle`, `arrays` and `metrics` serve all levels; `operator`,
`network`, `training` and `distributed` hold the comparisons of one level. Imports NumPy, ONNX and
the contract (`d5suite.levels`, `d5suite.network`); no framework.
"""
