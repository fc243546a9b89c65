"""The meaning of ONNX nodes, read once for all adapters, in plain Python and NumPy.

One file per operator family, named like the files of an adapter's ``operators/``. ``read_NAME(node,
context)`` returns what a node's attributes, fixed inputs and shapes say: a value, or a small frozen
dataclass. What a framework can express stays in its adapter. Imports NumPy, `d5suite.errors` and
`d5suite.network`.
"""
