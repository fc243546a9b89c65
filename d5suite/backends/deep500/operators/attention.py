"""ONNX on deep500: attention.

Imports deep500 (through `repairs`), NumPy, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from d5suite.backends.deep500.operators.context import Context, CustomOperator, collapsed, positions
from d5suite.backends.deep500.repairs import deep500
from d5suite.network import Node
from d5suite.network.nodes.attention import BIASED, CAPPED, SCORES, WEIGHTS, read_attention


class _Attention(deep500.CustomPythonOp):
    """A custom operator; deep500 has none.

    Its outputs are ONNX's four, the softmax's weights, and the capped scores, which the backward
    pass needs. Query heads that share a key head are further rows of its matrices.
    """

    def __init__(self, node: Node, context: Context) -> None:
        super().__init__(*context.describe(node, outputs=6))
        self._plan = plan = read_attention(node, context)
        self._positions = positions(node)
        self._bias = None if plan.bias is None else plan.bias.astype(context.dtypes[node.inputs[0]])

    def forward(self, *inputs: np.ndarray) -> list[Any]:
        """Return ONNX's outputs, the weights and the capped scores."""
        plan = self._plan
        given: dict[int, Any] = dict(zip(self._positions, inputs, strict=True))
        q, k, v = self._heads(inputs)
        if plan.past:
            k, v = np.concatenate([given[4], k], 2), np.concatenate([given[5], v], 2)
        root = math.sqrt(plan.scale)  # on both factors, as in ONNX: it matters in float16
        scores = ((root * self._rows(q)) @ (root * k).swapaxes(2, 3)).reshape(*q.shape[:3], k.shape[2])
        capped = plan.softcap * np.tanh(scores / plan.softcap) if plan.softcap else scores
        biased = capped if self._bias is None else capped + self._bias
        if plan.mask:
            biased = biased + self._mask(given[3], biased.dtype)
        top = biased.max(-1, keepdims=True)
        shares = np.exp(biased - np.where(np.isneginf(top), 0, top))
        total = shares.sum(-1, keepdims=True)
        weights = shares / np.where(total == 0, 1, total)  # a query that attends to nothing
        y = self._rows(weights) @ v
        shown = {
            SCORES: scores,
            CAPPED: capped,
            BIASED: biased,
            WEIGHTS: weights,
        }
        return [self._joined(y.reshape(*q.shape[:3], v.shape[3])), k, v, shown.get(plan.shows), weights, capped]

    def backward(self, grads: Sequence[Any], fwd_inputs: Sequence[np.ndarray], fwd_outputs: Sequence[Any]) -> list[Any]:
        """Return gradients of query, key, value and a mask that is added; others get zeros."""
        plan = self._plan
        (q, new_k, _), (_, k, v, _, weights, capped) = self._heads(fwd_inputs), fwd_outputs
        above = self._rows(self._split(grads[0], plan.heads))
        by_v = self._rows(weights).swapaxes(2, 3) @ above
        by_weights = (above @ v.swapaxes(2, 3)).reshape(weights.shape)
        by_scores = by_biased = weights * (by_weights - (by_weights * weights).sum(-1, keepdims=True))
        if plan.softcap:
            by_scores = by_scores * (1 - (capped / plan.softcap) ** 2)
        rows = plan.scale * self._rows(by_scores)
        by_q, by_k = (rows @ k).reshape(q.shape), rows.swapaxes(2, 3) @ self._rows(q)
        earlier = k.shape[2] - new_k.shape[2]
        found = [self._joined(g) for g in (by_q, by_k[:, :, earlier:], by_v[:, :, earlier:])]
        further = [np.zeros_like(x) for x in fwd_inputs[3:]]
        if plan.mask == "float":
            further[0] = collapsed(by_biased[..., : k.shape[2] - plan.mask_padding], fwd_inputs[3].shape)
        return [*found, *further]

    def _heads(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        heads = (self._plan.heads, self._plan.kv_heads, self._plan.kv_heads)
        return [self._split(x, count) for x, count in zip(inputs[:3], heads, strict=True)]

    def _split(self, x: np.ndarray, heads: int) -> np.ndarray:
        """Return (batch, heads, steps, size), also of (batch, steps, heads x size)."""
        return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) if self._plan.split_heads else x

    def _joined(self, x: np.ndarray) -> np.ndarray:
        """Undo `_split`."""
        return x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1) if self._plan.split_heads else x

    def _rows(self, x: np.ndarray) -> np.ndarray:
        """Return (batch, key heads, rows, ...) of (batch, query heads, queries, ...)."""
        return x.reshape(len(x), self._plan.kv_heads, -1, x.shape[3])

    def _mask(self, mask: np.ndarray, dtype: np.dtype) -> np.ndarray:
        added = np.where(mask, 0, -np.inf).astype(dtype) if self._plan.mask == "bool" else mask
        return np.pad(added, [*[(0, 0)] * (mask.ndim - 1), (0, self._plan.mask_padding)], constant_values=-np.inf)


def attention(node: Node, context: Context) -> CustomOperator:
    return _Attention(node, context)
