"""ONNX on deep500: the cross-entropy loss.

Imports deep500 (through `repairs`), NumPy, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from d5suite.backends.deep500.operators.context import Context, CustomOperator, log_softmax_of
from d5suite.backends.deep500.repairs import deep500
from d5suite.network import Node
from d5suite.network.nodes.loss import SoftmaxCrossEntropyLoss, read_softmax_cross_entropy_loss


class _SoftmaxCrossEntropy(deep500.CustomPythonOp):
    """ONNX's SoftmaxCrossEntropyLoss; deep500's cross-entropies take probabilities, and clip them.

    Parameters
    ----------
    inputs, outputs : list of deep500.TensorDescriptor
    plan : SoftmaxCrossEntropyLoss
    """

    def __init__(self, inputs: list[Any], outputs: list[Any], plan: SoftmaxCrossEntropyLoss) -> None:
        super().__init__(inputs, outputs)
        self._reduction, self._ignored, self._logged = plan.reduction, plan.ignored, plan.logged

    def _parts(self, x: np.ndarray, labels: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, ...]:
        """Return log-probabilities, valid labels, sample weights and unweighted losses."""
        logarithms = log_softmax_of(x, 1)
        kept = labels != self._ignored if self._ignored is not None else np.ones(labels.shape, bool)
        valid = np.where(kept, labels, 0)
        factors = kept.astype(x.dtype) if weight is None else weight[valid] * kept
        return logarithms, valid, factors, -np.take_along_axis(logarithms, valid[:, None], 1)[:, 0]

    def _share(self, factors: np.ndarray) -> Any:
        return 1 / factors.sum() if self._reduction == "mean" else 1

    def forward(self, x: np.ndarray, labels: np.ndarray, weight: np.ndarray | None = None) -> Any:
        """Return the loss and, if they are wanted, the log-probabilities."""
        logarithms, _, factors, losses = self._parts(x, labels, weight)
        weighted = factors * losses
        loss = weighted if self._reduction == "none" else np.asarray(weighted.sum() * self._share(factors))
        return [loss, logarithms] if self._logged else loss

    def backward(self, grads: Any, fwd_inputs: Any, fwd_outputs: Any) -> list[np.ndarray]:
        """Return the gradients of logits, labels (zeros) and, if there are any, weights."""
        x, labels, *weight = fwd_inputs
        logarithms, valid, factors, losses = self._parts(x, labels, weight[0] if weight else None)
        above = grads[0] * self._share(factors)
        difference = np.exp(logarithms)
        np.put_along_axis(difference, valid[:, None], np.take_along_axis(difference, valid[:, None], 1) - 1, 1)
        found = [difference * (above * factors)[:, None], np.zeros_like(labels)]
        if weight:
            excess = losses - (fwd_outputs[0] if self._reduction == "mean" else 0)
            by_weight = np.zeros_like(weight[0])
            np.add.at(by_weight, valid, above * excess * (factors != 0))
            found.append(by_weight)
        return found


def softmax_cross_entropy_loss(node: Node, context: Context) -> CustomOperator:
    plan = read_softmax_cross_entropy_loss(node, context)
    return _SoftmaxCrossEntropy(*context.describe(node, outputs=1 + plan.logged), plan)
