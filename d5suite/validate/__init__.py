"""Checks of answers against independent references, made before anything is timed.

`check` says what a check is; `norms`, `oracle` and `metrics` serve every level; `operator`,
`network` and `training` hold each level's checks. Imports NumPy, ONNX and the contract
(`d5suite.levels`, `d5suite.network`); no framework.
"""
