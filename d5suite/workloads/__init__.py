"""Workloads: the data and objects that all measurements of one case share in the worker.

`network` holds a network on a dataset, `drawn` the inputs of a user's own network, `operator` a
single ONNX node, `collective` a collective on a communicator, `workflow` coupled programs. Imports
backends as data, and the parts below them; frameworks only through `Backend`.
"""
