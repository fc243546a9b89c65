"""Workloads: what the measurements of one case share in the worker.

`network` is a network on a dataset, `operator` a single ONNX node. Imports backends as data and
what lies below them; frameworks only through `Backend`.
"""
