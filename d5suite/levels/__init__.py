"""The contract between d5suite and a framework's adapter.

Read the modules in this order:

``contract``
    the rule book: every clause that an adapter keeps.
``description``, ``backend``
    what an adapter is and has, as data; loading its modules.
``device``
    what its runtime offers besides computation: a clock, a cold cache, sensors.
``operator`` (level 0), ``network`` (level 1), ``training`` (level 2), ``distributed`` (level 3)
    the classes that it implements.
``native``
    the framework's own ways to train on several ranks.
``baseline``
    the same training step written by hand.
``loader``
    code shared by adapters that load images from HDF5 files.
``layouts``
    code shared by adapters that store tensors in another axis order than ONNX.

Imports the standard library, NumPy, h5py, `d5suite.errors`, `d5suite.network` and
`d5suite.optimizers`; no framework.
"""

LEVELS = ("operator", "network", "training", "distributed")
"""The benchmark's levels by number; results carry the number."""
