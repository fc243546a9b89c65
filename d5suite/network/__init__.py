"""The neutral network: an ONNX graph with names for its image, label, output and loss.

- `graph`, `model`: the network; `rewrites`: losses and other changes of it.
- `onnx_file`: read a file; `normalise` and what it calls bring the model into one form.
- `builder`, `zoo`: write networks. `user_network`: add a loss to a user's own network.
- `given_inputs`: values that a user gives for inputs. `as_written`: a file that is not converted.
- `operation`, `tensor`, `custom`: one node with its inputs, and custom operators.
- `validity`: refuse invalid nodes; `limits`: refuse models that expand to an excessive size.
- `nodes`: what a node's attributes mean.
- `analysis`, `work`: what networks and operations cost. `variants`: what backends lack.

May import ONNX, NumPy and, from d5suite, `errors`; no framework.
"""

from d5suite.network.graph import Node as Node
from d5suite.network.model import Network as Network
