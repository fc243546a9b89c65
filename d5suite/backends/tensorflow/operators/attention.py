"""ONNX in TensorFlow: attention.

Imports TensorFlow, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import Call, Context
from d5suite.levels.layouts import converting
from d5suite.network import Node
from d5suite.network.nodes.attention import BIASED, CAPPED, SCORES, WEIGHTS, Attention, read_attention
from d5suite.network.nodes.context import select


def attention(node: Node, context: Context) -> Call:
    plan, wanted = read_attention(node, context), context.wanted(node)
    dtype = tf.as_dtype(context.dtypes[node.inputs[0]])
    bias = None if plan.bias is None else tf.constant(plan.bias, dtype)

    def run(q: Any, k: Any, v: Any, mask: Any = None, past_k: Any = None, past_v: Any = None, *_: Any) -> Any:
        q, k, v = _heads(q, plan.heads, plan), _heads(k, plan.kv_heads, plan), _heads(v, plan.kv_heads, plan)
        if plan.past:
            k, v = tf.concat([past_k, k], 2), tf.concat([past_v, v], 2)
        batch, heads, queries, _ = q.shape
        # Query heads that share a key head are rows of one product.
        rows = [batch, plan.kv_heads, plan.groups * queries]
        scores = tf.matmul(tf.reshape(q * plan.scale, [*rows, -1]), k, transpose_b=True)
        scores = tf.reshape(scores, [batch, heads, queries, -1])
        shown = {SCORES: scores}
        if plan.softcap:
            scores = plan.softcap * tf.tanh(scores / plan.softcap)
        shown[CAPPED] = scores
        added = _attention_bias(bias, mask, plan, dtype)
        if added is not None:
            scores = scores + added
        shown[BIASED] = scores
        if plan.may_be_blind:
            seen = tf.reduce_max(added, -1, keepdims=True) > -math.inf
            scores = tf.where(seen, scores, 0)
        weights = tf.nn.softmax(scores)
        if plan.may_be_blind:
            weights = tf.where(seen, weights, 0)
        shown[WEIGHTS] = weights
        y = tf.reshape(tf.matmul(tf.reshape(weights, [*rows, -1]), v), [batch, heads, queries, -1])
        if plan.split_heads:
            y = tf.reshape(tf.transpose(y, (0, 2, 1, 3)), [batch, queries, -1])
        return select((y, k, v, shown.get(plan.shows)), wanted)

    return converting(run, context.inputs_to_onnx(node))


def _attention_bias(bias: Any, mask: Any, plan: Attention, dtype: Any) -> Any:
    """Return what is added to the scores, None for nothing."""
    if mask is None:
        return bias
    if plan.mask == "bool":
        mask = tf.where(mask, tf.zeros([], dtype), -math.inf)
    if plan.mask_padding:
        pads = [(0, 0)] * (len(mask.shape) - 1) + [(0, plan.mask_padding)]
        mask = tf.pad(mask, pads, constant_values=tf.cast(-math.inf, dtype))
    return mask if bias is None else mask + bias


def _heads(x: Any, heads: int, plan: Attention) -> Any:
    """Return (batch, heads, steps, size) of a tensor that may be (batch, steps, heads x size)."""
    if not plan.split_heads:
        return x
    return tf.transpose(tf.reshape(x, [*x.shape[:2], heads, -1]), (0, 2, 1, 3))
