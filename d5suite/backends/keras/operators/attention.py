"""ONNX in Keras: attention.

Imports Keras, NumPy, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from keras import ops

from d5suite.backends.keras.operators.context import Context, in_float32
from d5suite.levels.layouts import converting
from d5suite.network import Node
from d5suite.network.nodes.attention import BIASED, CAPPED, SCORES, WEIGHTS, Attention, read_attention
from d5suite.network.nodes.context import select
from d5suite.network.nodes.layouts import identity


def attention(node: Node, context: Context) -> Any:
    plan = read_attention(node, context)
    plain = plan.plain
    if context.backend == "jax":
        # JAX's own computes the softmax in float32, has no float16 kernel on the CPU, and requires
        # values of the keys' size.
        equal = context.shape(node.inputs[1])[-1] == context.shape(node.inputs[2])[-1]
        plain = plain and equal and context.dtypes[node.inputs[0]].name not in ("float64", "float16")
    return (_plain_attention if plain else _general_attention)(node, context, plan)


def _plain_attention(node: Node, context: Context, plan: Attention) -> Any:
    """Call Keras's own attention, which has heads after steps."""
    dtype, bias = str(context.dtypes[node.inputs[0]]), None
    if plan.bias is not None and not plan.causal:
        bias = ops.convert_to_tensor(plan.bias.reshape((1,) * (4 - plan.bias.ndim) + plan.bias.shape), dtype)
    if not plan.split_heads:
        context.layouts[node.outputs[0]] = (0, 2, 1, 3)
        for name in node.inputs[:3]:
            context.prefer(name, (0, 2, 1, 3))
    stored = identity(3) if plan.split_heads else (0, 2, 1, 3)
    converters = [context.convert(name, stored) for name in node.inputs[:3]]
    scale = np.float64(plan.scale)  # TensorFlow rounds Python floats to float32
    repeats = plan.groups if plan.kv_heads == 1 else 1  # Keras repeats several heads, but not one

    def heads(x: Any, count: int) -> Any:
        return ops.reshape(x, (*x.shape[:2], count, -1)) if plan.split_heads else x

    def run(q: Any, k: Any, v: Any, *_: Any) -> Any:
        q, k, v = (convert(x) for convert, x in zip(converters, (q, k, v), strict=True))
        q, k, v = heads(q, plan.heads), heads(k, plan.kv_heads), heads(v, plan.kv_heads)
        if repeats > 1:
            k, v = ops.repeat(k, repeats, 2), ops.repeat(v, repeats, 2)
        y = ops.dot_product_attention(q, k, v, bias, scale=scale, is_causal=plan.causal)
        return ops.reshape(y, (*y.shape[:2], -1)) if plan.split_heads else y

    return context.calculate(node, run)


def _general_attention(node: Node, context: Context, plan: Attention) -> Any:
    """Compute every variant and intermediate value."""

    def heads(x: Any, count: int) -> Any:
        return ops.transpose(ops.reshape(x, (*x.shape[:2], count, -1)), (0, 2, 1, 3)) if plan.split_heads else x

    root = math.sqrt(plan.scale)
    dtype = str(context.dtypes[node.inputs[0]])
    bias = ops.convert_to_tensor(np.zeros((1, 1)) if plan.bias is None else plan.bias, dtype)

    def run(q: Any, k: Any, v: Any, mask: Any = None, past_k: Any = None, past_v: Any = None, *_: Any) -> Any:
        q, k, v = heads(q, plan.heads), heads(k, plan.kv_heads), heads(v, plan.kv_heads)
        if plan.past:
            k, v = ops.concatenate([past_k, k], 2), ops.concatenate([past_v, v], 2)
        present = k, v
        if plan.groups > 1:
            k, v = (ops.repeat(t, plan.groups, 1) for t in present)
        scores = ops.matmul(q * root, ops.transpose(k * root, (0, 1, 3, 2)))
        shown = {SCORES: scores}
        if plan.softcap:
            scores = plan.softcap * ops.tanh(scores / plan.softcap)
        shown[CAPPED] = scores
        added = bias
        if mask is not None:
            if plan.mask == "bool":
                mask = ops.where(mask, ops.zeros((), scores.dtype), ops.full((), -math.inf, scores.dtype))
            if plan.mask_padding:
                pads = [*[(0, 0)] * (len(mask.shape) - 1), (0, plan.mask_padding)]
                mask = ops.pad(mask, pads, constant_values=-math.inf)
            added = added + mask
        scores = scores + added
        shown[BIASED] = scores
        # The softmax of a row that attends to nothing is NaN, and so is its gradient.
        blind = ops.max(added, -1, keepdims=True) == -math.inf if plan.may_be_blind else None
        weights = ops.softmax(in_float32(scores if blind is None else ops.where(blind, ops.zeros_like(scores), scores)))
        weights = ops.cast(weights, q.dtype)
        if blind is not None:
            weights = ops.where(blind, ops.zeros_like(weights), weights)
        shown[WEIGHTS] = weights
        y = ops.matmul(weights, v)
        if plan.split_heads:
            y = ops.transpose(y, (0, 2, 1, 3))
            y = ops.reshape(y, (*y.shape[:2], -1))
        return select((y, *present, shown.get(plan.shows)), plan.wanted)

    return context.calculate(node, converting(run, context.inputs_to_onnx(node)))
