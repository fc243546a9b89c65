"""The conformance kit: the tests that every backend must pass, built in or not.

``d5suite conformance NAME[:MODE]``, or ``pytest --pyargs d5suite.testing --backend NAME[:MODE]``.
A run checks one backend in one mode on one device, and ends with a table by level. d5suite's own
tests run the same kit on the built-in adapters.

Cases marked ``slow`` repeat a clause on more shapes, precisions or networks. ``--quick``, or
``-m "not slow"``, skips them and still checks every clause, operator and level.

Imports pytest, ONNX and d5suite; reaches the framework only through the `Backend` object.
"""
