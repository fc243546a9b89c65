"""The neutral network: an ONNX graph with names for its image, label, output and loss.

`model` holds the network, `builder` and `zoo` write networks, `analysis` counts parameters, multiply-accumulates and
bytes. Imports ONNX and NumPy; no framework, and nothing of d5suite but `d5suite.errors`.
"""

from d5suite.network.model import Network, Node

__all__ = ["Network", "Node"]
