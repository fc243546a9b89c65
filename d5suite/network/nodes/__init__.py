"""The meaning of ONNX nodes, read once for all adapters, in plain Python and NumPy.

There is one file per operator family, named like the files of an adapter's ``operators/``.
``read_NAME(node, context)`` interprets a node's attributes, constant inputs and shapes, and returns
a value or a small frozen dataclass. How a framework expresses the node is up to its adapter.
Imports NumPy, `d5suite.errors` and `d5suite.network`.
"""
