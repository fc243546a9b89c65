"""The conformance kit: the tests that every backend must pass, built in or not.

``d5suite conformance NAME[:MODE]``, or ``pytest --pyargs d5suite.testing --backend NAME[:MODE]``.
One run checks one backend in one mode on one device and ends with a table of levels. d5suite's own
tests run the same kit on the built-in adapters.

Cases marked ``slow`` repeat a clause on more shapes, precisions or networks. ``--quick``, or
``-m "not slow"``, leaves them out: every clause, operator and level is still checked.

Imports pytest, ONNX and d5suite; reaches the framework only through the `Backend` object.
"""
