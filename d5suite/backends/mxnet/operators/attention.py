"""ONNX on MXNet: attention. Imports `d5suite.network` and `context`."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

from d5suite.backends.mxnet.operators.context import Call, Context, padded
from d5suite.network import Node
from d5suite.network.graph import Shape
from d5suite.network.nodes.attention import BIASED, CAPPED, SCORES, WEIGHTS, read_attention
from d5suite.network.nodes.context import select


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
    """Return (batch, heads, steps, size) of a shape that may be (batch, steps, heads x size)."""
    return (shape[0], heads, shape[1], (shape[2] or 0) // heads) if split else shape
