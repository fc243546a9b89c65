"""ONNX on MXNet: attention, LSTM and GRU.

Imports NumPy, `d5suite.network` and `context`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from d5suite.backends.mxnet.operators.context import Call, Context, Packed, padded
from d5suite.network import Node
from d5suite.network.graph import Shape
from d5suite.network.nodes.attention import BIASED, CAPPED, SCORES, WEIGHTS, read_attention
from d5suite.network.nodes.context import select
from d5suite.network.nodes.recurrent import CUDNN_GATES, RecurrenceFunctions, Recurrent, read_recurrent, unrolled


def attention(node: Node, context: Context) -> Call:
    plan = read_attention(node, context)
    biased, dtype = plan.bias is not None, context.dtype
    if plan.bias is not None:
        context.keep(node, plan.bias)
    heads, kv_heads, count = plan.heads, plan.kv_heads, len(node.inputs)
    (*_, queries, size), (*_, keys, value_size) = (
        (n or 0 for n in _with_heads(context.shape(name), count, split=plan.split_heads))
        for name, count in ((node.inputs[0], heads), (node.inputs[2], kv_heads))
    )
    keys += (context.shape(node.inputs[4])[2] or 0) if plan.past else 0
    rows = plan.groups * queries

    def call(F: Any, *inputs: Any) -> Any:
        q, k, v, mask, past_k, past_v = [*inputs[:count], *[None] * 3][:6]
        if plan.split_heads:
            q, k, v = (
                F.transpose(F.reshape(t, shape=(0, 0, n, -1)), axes=(0, 2, 1, 3))
                for t, n in ((q, heads), (k, kv_heads), (v, kv_heads))
            )
        if past_k is not None:
            k, v = F.concat(past_k, k, dim=2), F.concat(past_v, v, dim=2)
        present = k, v
        # Query heads that share a key head are adjacent: rows of one product.
        q = F.reshape(q * plan.scale, shape=(-1, rows, size))
        k, v = (F.reshape(t, shape=(-3, -2)) for t in present)
        scores = F.reshape(F.batch_dot(q, k, transpose_b=True), shape=(-1, heads, queries, keys))
        shown = {SCORES: scores}
        if plan.softcap:
            scores = plan.softcap * F.tanh(scores / plan.softcap)
        shown[CAPPED] = scores
        added = [inputs[-1]] if biased else []
        if mask is not None:
            # log(True) is 0, and log(False) -inf.
            bias = F.log(F.cast(mask, dtype=dtype)) if plan.mask == "bool" else mask
            rank = context.rank(node.inputs[3])
            added.append(padded(F, bias, [*[(0, 0)] * (rank - 1), (0, plan.mask_padding)], -math.inf))
        total = reduce(F.broadcast_add, added) if added else None
        scores = scores if total is None else F.broadcast_add(scores, total)
        shown[BIASED] = scores
        if plan.may_be_blind:  # a row of only -inf would give NaN, and so would its gradient
            seen = F.max(total, axis=-1, keepdims=True) > -math.inf
            weights = F.broadcast_mul(F.softmax(F.clip(scores, a_min=-1e30, a_max=1e30), axis=-1), seen)
        else:
            weights = F.softmax(scores, axis=-1)
        shown[WEIGHTS] = weights
        y = F.batch_dot(F.reshape(weights, shape=(-1, rows, keys)), v)
        y = F.reshape(y, shape=(-1, heads, queries, value_size))
        if plan.split_heads:
            y = F.reshape(F.transpose(y, axes=(0, 2, 1, 3)), shape=(0, 0, -3))
        return select((y, *present, shown.get(plan.shows)), plan.wanted)

    return call


def _with_heads(shape: Shape, heads: int, *, split: bool) -> Shape:
    """Convert a shape (batch, steps, heads x size) to (batch, heads, steps, size) if ``split``."""
    return (shape[0], heads, shape[1], (shape[2] or 0) // heads) if split else shape


def _slices(F: Any, x: Any, count: int, *, keep: bool = False) -> list[Any]:
    """Split a tensor along its first axis, which the slices lose unless ``keep``."""
    if count == 1:
        return [x if keep else F.squeeze(x, axis=0)]
    return list(F.split(x, num_outputs=count, axis=0, squeeze_axis=not keep))


def recurrent(node: Node, context: Context) -> Call:
    """Return MXNet's kernel or, if it lacks the variant, a loop over the steps."""
    plan = read_recurrent(node, context)
    if not plan.has_kernel:
        return _step_by_step(node, context, plan)
    names = plan.names
    if context.single:
        given = [n for n in names[1:4] if n]
        context.packed.append(_packed_weights(plan, given, [context.shape(n) for n in names[1:3]]))
    count, directions, hidden = len(node.inputs), plan.directions, plan.hidden
    omitted = not names[5] or (plan.kind == "LSTM" and not names[6])
    if omitted and plan.batch:
        context.keep(node, np.zeros((directions, plan.batch, hidden)))
    cells, time = plan.kind == "LSTM", 1 if plan.batch_first else 0
    settings = {
        "state_size": hidden,
        "num_layers": 1,
        "mode": plan.kind.lower(),
        "bidirectional": directions == 2,
        "state_outputs": any(plan.wanted[1:]),
    }

    def first_state(F: Any, x: Any, kept: Any) -> Any:
        """Return zeros: ``kept`` or, if the batch's size is unknown, zeros made from the input."""
        if plan.batch:
            return kept
        cell = F.zeros_like(F.slice_axis(F.slice_axis(x, axis=2, begin=0, end=1), axis=time, begin=0, end=1))
        row = F.swapaxes(cell, 0, 1) if plan.batch_first else cell
        return F.broadcast_axis(row, axis=(0, 2), size=(directions, hidden))

    def call(F: Any, x: Any, weights: Any, *rest: Any) -> Any:
        given = [*rest[: count - 2], *[None] * 5]  # from R on
        if not context.single:  # a network's parameters stay as ONNX has them
            weights = _packed(F, plan, context, weights, *given[:2])
        states = [
            first_state(F, x, rest[-1]) if state is None else F.swapaxes(state, 0, 1) if plan.batch_first else state
            for state in (given[3:5] if cells else given[3:4])
        ]
        x = F.swapaxes(x, 0, 1) if plan.batch_first else x
        found = F.RNN(F.reverse(x, axis=0) if plan.reverse else x, weights, *states, **settings)
        y, *last = found if settings["state_outputs"] else (found,)
        y = F.reverse(y, axis=0) if plan.reverse else y
        y = F.reshape(y, shape=(0, 0, directions, hidden))
        if plan.batch_first:
            y, last = F.swapaxes(y, 0, 1), [F.swapaxes(state, 0, 1) for state in last]
        else:
            y = F.swapaxes(y, 1, 2)
        return select((y, *last), context.wanted(node))

    return call


def _packed(F: Any, plan: Recurrent, context: Context, w: Any, r: Any, b: Any) -> Any:
    """Pack W, R and B in the graph, as `_packed_weights` does."""
    places, size = plan.places(CUDNN_GATES[plan.kind]), plan.hidden

    def gates(x: Any, first: int = 0) -> Any:
        parts = [F.slice_axis(x, axis=1, begin=(first + n) * size, end=(first + n + 1) * size) for n in places]
        return F.concat(*parts, dim=1)

    w, r = (_slices(F, gates(x), plan.directions, keep=True) for x in (w, r))
    if b is None:
        b = F.zeros(shape=(plan.directions, 2 * len(places) * size), dtype=context.dtype)
    else:
        b = F.concat(gates(b), gates(b, len(places)), dim=1)
    parts = [part for pair in zip(w, r, strict=True) for part in pair]
    return F.concat(*(F.reshape(part, shape=(-1,)) for part in (*parts, b)), dim=0)


def _packed_weights(plan: Recurrent, names: Sequence[str], shapes: Sequence[Shape]) -> Packed:
    """Pack W, R and B for the kernel: per direction W and R, then per direction B."""
    gates, biases = plan.gates(CUDNN_GATES[plan.kind]), plan.bias_gates(CUDNN_GATES[plan.kind])
    w_size, r_size = (math.prod(n or 0 for n in shape[1:]) for shape in shapes)
    b_size, split = 2 * (shapes[0][1] or 0), plan.directions * (w_size + r_size)

    def pack(arrays: Sequence[np.ndarray]) -> np.ndarray:
        w, r = (gates.pack(array) for array in arrays[:2])
        b = biases.pack(arrays[2]) if len(arrays) > 2 else np.zeros(plan.directions * b_size, w.dtype)
        return np.concatenate([*(part[d].ravel() for d in range(plan.directions) for part in (w, r)), b.ravel()])

    def unpack(vector: np.ndarray) -> list[np.ndarray]:
        w, r = np.split(vector[:split].reshape(plan.directions, -1), [w_size], axis=1)
        unpacked = [gates.unpack(part.reshape([n or 0 for n in s])) for part, s in zip((w, r), shapes, strict=True)]
        return [*unpacked, biases.unpack(vector[split:].reshape(plan.directions, -1))][: len(names)]

    return Packed(names, pack, unpack)


def _step_by_step(node: Node, context: Context, plan: Recurrent) -> Call:
    """Run the recurrence in MXNet's operators, on split tensors: symbols have no indices."""
    steps = plan.steps or 0
    time_first = replace(plan, batch_first=False)

    def call(F: Any, x: Any, w: Any, r: Any, *rest: Any) -> Any:
        b, lengths, h, c, p = [*rest, *[None] * 5][:5]

        def rows(vectors: Any) -> Any:
            """Repeat each direction's vector as rows: sums of symbols need equal shapes."""
            if vectors is None:
                return None
            return [each_row(v) for v in _slices(F, vectors, plan.directions, keep=True)]

        def each_row(vector: Any) -> Any:
            if plan.batch:
                return F.broadcast_axis(vector, axis=0, size=plan.batch)
            return F.broadcast_like(vector, every[0], lhs_axes=(0,), rhs_axes=(0,))

        def zeros(matrix: Any, width: int) -> Any:
            if plan.batch:
                return F.zeros(shape=(plan.batch, width), dtype=context.dtype)
            return F.broadcast_axis(F.zeros_like(F.slice_axis(matrix, axis=1, begin=0, end=1)), axis=1, size=width)

        def states(value: Any) -> Any:
            if value is None:
                return None
            return _slices(F, F.swapaxes(value, 0, 1) if plan.batch_first else value, plan.directions)

        functions = RecurrenceFunctions(
            F.dot, F.transpose, F.sigmoid, F.tanh, lambda t, n: F.split(t, num_outputs=n, axis=1),
            lambda tensors, axis: F.stack(*tensors, axis=axis), zeros,
        )  # fmt: skip
        every = _slices(F, F.swapaxes(x, 0, 1) if plan.batch_first else x, steps)
        w, r = _slices(F, w, plan.directions), _slices(F, r, plan.directions)
        y, *last = unrolled(time_first, functions, every, w, r, rows(b), lengths, states(h), states(c), rows(p))
        if plan.batch_first:  # (steps, directions, batch, hidden)
            y, last = F.transpose(y, axes=(2, 0, 1, 3)), [F.swapaxes(state, 0, 1) for state in last]
        return select((y, *last), context.wanted(node))

    return call


gru = lstm = recurrent
