"""The neutral network: an ONNX graph with names for its image, label, output and loss.

- `model`, `normalise`, `rewrites`: the network, its one form, its changes.
- `builder`, `zoo`: write networks.
- `operation`, `tensor`, `validity`, `custom`: one node with its inputs, and custom operators.
- `nodes`: what a node's attributes mean. `analysis`, `work`: what networks and operations cost.

May import ONNX, NumPy and, from d5suite, `errors`; no framework.
"""

from d5suite.network.graph import Node as Node
from d5suite.network.model import Network as Network
