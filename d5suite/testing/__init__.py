"""The conformance kit: what a backend must pass, whoever wrote it.

``d5suite conformance NAME[:MODE]``, or ``pytest --pyargs d5suite.testing --backend NAME[:MODE]``. One run proves one
backend in one mode on one device, and ends with a table per level. The tests of d5suite itself run the same kit on its
own adapters.

Imports pytest, ONNX and d5suite; the framework only through the backend's own `Backend` object.
"""
