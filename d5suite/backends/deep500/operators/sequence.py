"""ONNX on deep500: attention, LSTM and GRU.

Imports deep500 (through `repairs`), NumPy, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from d5suite.backends.deep500.operators.context import Context, CustomOperator, collapsed, positions, sigmoid
from d5suite.backends.deep500.repairs import deep500
from d5suite.network import Node
from d5suite.network.nodes.attention import BIASED, CAPPED, SCORES, WEIGHTS, read_attention
from d5suite.network.nodes.recurrent import read_recurrent


class _Attention(deep500.CustomPythonOp):
    """Attention as a custom operator; deep500 has no attention.

    The outputs are ONNX's four outputs, the softmax weights, and the capped scores, which the
    backward pass needs. Query heads that share a key head are stacked as rows of one matrix.
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
        """Reshape merged heads, (batch, steps, heads x size), to (batch, heads, steps, size)."""
        return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) if self._plan.split_heads else x

    def _joined(self, x: np.ndarray) -> np.ndarray:
        """Undo `_split`."""
        return x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1) if self._plan.split_heads else x

    def _rows(self, x: np.ndarray) -> np.ndarray:
        """Reshape (batch, query heads, queries, ...) to (batch, key heads, rows, ...)."""
        return x.reshape(len(x), self._plan.kv_heads, -1, x.shape[3])

    def _mask(self, mask: np.ndarray, dtype: np.dtype) -> np.ndarray:
        added = np.where(mask, 0, -np.inf).astype(dtype) if self._plan.mask == "bool" else mask
        return np.pad(added, [*[(0, 0)] * (mask.ndim - 1), (0, self._plan.mask_padding)], constant_values=-np.inf)


def attention(node: Node, context: Context) -> CustomOperator:
    return _Attention(node, context)


class _Steps(NamedTuple):
    """All steps of one direction, for the backward pass.

    Attributes
    ----------
    gates : numpy.ndarray
        (steps, batch, gates x hidden), after their activations, in ONNX's order.
    hidden : numpy.ndarray
        (steps + 1, batch, hidden), the initial state first.
    inner : numpy.ndarray
        LSTM: the cells, like ``hidden``. GRU: the recurrent product of the new state, (steps,
        batch, hidden).
    """

    gates: np.ndarray
    hidden: np.ndarray
    inner: np.ndarray


class _Recurrent(deep500.CustomPythonOp):
    """A custom operator for LSTM or GRU, step by step; deep500 has neither.

    Its outputs are ONNX's outputs and a list of one `_Steps` per direction. Internally, the axis of
    steps comes before that of the batch.
    """

    def __init__(self, node: Node, context: Context) -> None:
        self._plan = plan = read_recurrent(node, context)
        super().__init__(*context.describe(node, outputs=len(plan.wanted) + 1))
        self._positions = positions(node)
        backwards = [plan.reverse, True][: plan.directions]
        self._orders = [slice(None, None, -1 if turned else 1) for turned in backwards]

    def forward(self, *inputs: np.ndarray) -> list[Any]:
        """Return the hidden states at every step, the last states and the `_Steps`."""
        x, w, r, b, h, c, p = self._named(inputs)
        passes = []
        for d, order in enumerate(self._orders):
            zeros = np.zeros((x.shape[1], self._plan.hidden), x.dtype)
            bias = np.zeros(2 * w.shape[1], x.dtype) if b is None else b[d]
            start_h, start_c = (zeros if state is None else state[d] for state in (h, c))
            passes.append(self._run(x[order], w[d], r[d], bias, start_h, start_c, None if p is None else p[d]))
        y = np.stack([one.hidden[1:][order] for one, order in zip(passes, self._orders, strict=True)], 1)
        results = [np.stack([one.hidden[-1] for one in passes])]
        if self._plan.kind == "LSTM":
            results.append(np.stack([one.inner[-1] for one in passes]))
        if self._plan.batch_first:
            return [y.transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in results), passes]
        return [y, *results, passes]

    def backward(self, grads: Sequence[Any], fwd_inputs: Sequence[np.ndarray], fwd_outputs: Sequence[Any]) -> list[Any]:
        """Return the gradient of every input; an unused output's gradient may be 0."""
        x, w, r, _, _, _, p = self._named(fwd_inputs)
        *results, passes = fwd_outputs
        above = [np.broadcast_to(np.asarray(g, x.dtype), y.shape) for g, y in zip(grads, results, strict=False)]
        if self._plan.batch_first:
            above = [above[0].transpose(1, 2, 0, 3), *(g.swapaxes(0, 1) for g in above[1:])]
        by_x, by_others = np.zeros_like(x), []
        for d, (order, one) in enumerate(zip(self._orders, passes, strict=True)):
            by_y, *by_states = above[0][:, d][order], *(g[d] for g in above[1:])
            found, *others = self._back(one, x[order], w[d], r[d], None if p is None else p[d], by_y, *by_states)
            by_x[order] += found
            by_others.append(others)
        stacked = [np.stack(those) for those in zip(*by_others, strict=True)]
        if self._plan.batch_first:
            by_x, stacked[3:5] = by_x.swapaxes(0, 1), [state.swapaxes(0, 1) for state in stacked[3:5]]
        by_place = dict(zip((1, 2, 3, 5, 6, 7), stacked, strict=False))
        return [by_x, *(by_place[place] for place in self._positions[1:])]

    def _named(self, inputs: Sequence[np.ndarray]) -> list[Any]:
        """Return X, W, R, B, initial h and c, and P; None for an omitted one."""
        given: dict[int, Any] = dict(zip(self._positions, inputs, strict=True))
        if self._plan.batch_first:
            given |= {place: given[place].swapaxes(0, 1) for place in (0, 5, 6) if place in given}
        return [given.get(place) for place in (0, 1, 2, 3, 5, 6, 7)]

    def _run(self, x: Any, w: Any, r: Any, b: Any, h: Any, c: Any, p: Any) -> _Steps:
        """Run all steps of one direction."""
        raise NotImplementedError

    def _back(self, one: _Steps, x: Any, w: Any, r: Any, p: Any, by_y: Any, *by_states: Any) -> list[Any]:
        """Return the gradients of X, W, R, B, h and, for LSTM, c and P."""
        raise NotImplementedError


def _over_steps(above: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the gradient of a weight that multiplies these values at every step."""
    return above.reshape(-1, above.shape[-1]).T @ values.reshape(-1, values.shape[-1])


class _Lstm(_Recurrent):
    """c' = f c + i g and h' = o tanh(c'); with peepholes, i and f depend on c, and o on c'."""

    def _run(self, x: Any, w: Any, r: Any, b: Any, h: Any, c: Any, p: Any) -> _Steps:
        p_i, p_o, p_f = (0, 0, 0) if p is None else np.split(p, 3)
        gates, hidden, cells = [], [h], [c]
        for total in x @ w.T + np.add(*np.split(b, 2)):
            i, o, f, g = np.split(total + h @ r.T, 4, -1)
            i, f, g = sigmoid(i + p_i * c), sigmoid(f + p_f * c), np.tanh(g)
            c = f * c + i * g
            o = sigmoid(o + p_o * c)
            h = o * np.tanh(c)
            gates.append(np.concatenate([i, o, f, g], -1))
            hidden.append(h)
            cells.append(c)
        return _Steps(np.stack(gates), np.stack(hidden), np.stack(cells))

    def _back(self, one: _Steps, x: Any, w: Any, r: Any, p: Any, by_y: Any, *by_states: Any) -> list[Any]:
        p_i, p_o, p_f = (0, 0, 0) if p is None else np.split(p, 3)
        by_h, by_c = by_states
        by_total = np.empty_like(one.gates)
        for t in reversed(range(len(x))):
            i, o, f, g = np.split(one.gates[t], 4, -1)
            bent = np.tanh(one.inner[t + 1])
            by_h = by_h + by_y[t]
            by_o = by_h * bent * o * (1 - o)
            by_c = by_c + by_h * o * (1 - bent**2) + by_o * p_o
            by_i, by_f, by_g = by_c * g * i * (1 - i), by_c * one.inner[t] * f * (1 - f), by_c * i * (1 - g**2)
            by_total[t] = np.concatenate([by_i, by_o, by_f, by_g], -1)
            by_h, by_c = by_total[t] @ r, by_c * f + by_i * p_i + by_f * p_f
        by_bias = by_total.sum((0, 1))
        by_i, by_o, by_f, _ = np.split(by_total, 4, -1)
        peeped = (by_i * one.inner[:-1], by_o * one.inner[1:], by_f * one.inner[:-1])
        by_peepholes = np.concatenate([product.sum((0, 1)) for product in peeped])
        by_weights = [_over_steps(by_total, x), _over_steps(by_total, one.hidden[:-1])]
        return [by_total @ w, *by_weights, np.tile(by_bias, 2), by_h, by_c, by_peepholes]


class _Gru(_Recurrent):
    """h' = (1 - z) n + z h; n uses the reset h, or with ``linear_before_reset`` the reset R h."""

    def _run(self, x: Any, w: Any, r: Any, b: Any, h: Any, c: Any, p: Any) -> _Steps:
        size, linear = self._plan.hidden, self._plan.linear_before_reset
        b_w, b_r = np.split(b, 2)
        gates, hidden, products = [], [h], []
        for total in x @ w.T + b_w:
            z, reset = np.split(sigmoid(total[:, : 2 * size] + h @ r[: 2 * size].T + b_r[: 2 * size]), 2, -1)
            product = (h if linear else reset * h) @ r[2 * size :].T + b_r[2 * size :]
            new = np.tanh(total[:, 2 * size :] + (reset * product if linear else product))
            h = (1 - z) * new + z * h
            gates.append(np.concatenate([z, reset, new], -1))
            hidden.append(h)
            products.append(product)
        return _Steps(np.stack(gates), np.stack(hidden), np.stack(products))

    def _back(self, one: _Steps, x: Any, w: Any, r: Any, p: Any, by_y: Any, *by_states: Any) -> list[Any]:
        size, linear = self._plan.hidden, self._plan.linear_before_reset
        r_gates, r_new = r[: 2 * size], r[2 * size :]
        (by_h,) = by_states
        by_total, by_product = np.empty_like(one.gates), np.empty_like(one.inner)
        for t in reversed(range(len(x))):
            h, (z, reset, new) = one.hidden[t], np.split(one.gates[t], 3, -1)
            by_h = by_h + by_y[t]
            by_new = by_h * (1 - z) * (1 - new**2)
            by_product[t] = by_new * reset if linear else by_new
            through = by_product[t] @ r_new
            by_reset = (by_new * one.inner[t] if linear else through * h) * reset * (1 - reset)
            by_gates = np.concatenate([by_h * (h - new) * z * (1 - z), by_reset], -1)
            by_total[t] = np.concatenate([by_gates, by_new], -1)
            by_h = by_h * z + (through if linear else through * reset) + by_gates @ r_gates
        before, by_gates = one.hidden[:-1], by_total[..., : 2 * size]
        multiplied = before if linear else one.gates[..., size : 2 * size] * before
        by_r = np.concatenate([_over_steps(by_gates, before), _over_steps(by_product, multiplied)])
        by_bias = np.concatenate([by_total.sum((0, 1)), by_gates.sum((0, 1)), by_product.sum((0, 1))])
        return [by_total @ w, _over_steps(by_total, x), by_r, by_bias, by_h]


def recurrent(node: Node, context: Context) -> CustomOperator:
    return (_Lstm if node.op_type == "LSTM" else _Gru)(node, context)


gru = lstm = recurrent
