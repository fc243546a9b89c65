"""ONNX in TensorFlow: attention, LSTM and GRU.

Imports TensorFlow, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import Call, Context, in_float32
from d5suite.levels.layouts import converting, same
from d5suite.network import Node
from d5suite.network.nodes.attention import BIASED, CAPPED, SCORES, WEIGHTS, Attention, read_attention
from d5suite.network.nodes.context import select
from d5suite.network.nodes.recurrent import CUDNN_GATES, Recurrent, read_recurrent


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
    """Return the sum of bias and mask, which is added to the scores; None if there is neither."""
    if mask is None:
        return bias
    if plan.mask == "bool":
        mask = tf.where(mask, tf.zeros([], dtype), -math.inf)
    if plan.mask_padding:
        pads = [(0, 0)] * (len(mask.shape) - 1) + [(0, plan.mask_padding)]
        mask = tf.pad(mask, pads, constant_values=tf.cast(-math.inf, dtype))
    return mask if bias is None else mask + bias


def _heads(x: Any, heads: int, plan: Attention) -> Any:
    """Reshape merged heads, (batch, steps, heads x size), to (batch, heads, steps, size)."""
    if not plan.split_heads:
        return x
    return tf.transpose(tf.reshape(x, [*x.shape[:2], heads, -1]), (0, 2, 1, 3))


def recurrent(node: Node, context: Context) -> Call:
    others = [context.to_onnx(name) if name and place not in (1, 2) else same for place, name in enumerate(node.inputs)]
    plan = read_recurrent(node, context)
    _, w_name, r_name, b_name, *_ = plan.names
    state_axis, wanted = 1 if plan.batch_first else 0, context.wanted(node)
    # A network's parameters stay as ONNX has them.
    reordered = plan.kind == "LSTM" and not context.single
    rows = [plan.rows(CUDNN_GATES["LSTM"], halves) for halves in (1, 2)] if reordered else []
    if plan.kind == "LSTM" and context.single:
        gates = CUDNN_GATES["LSTM"]  # as in TensorFlow's kernel
        context.packing.update({w_name: plan.gates(gates), r_name: plan.gates(gates)})
        if b_name:
            context.packing[b_name] = plan.bias_gates(gates)
    weights = [context.convert(name, (0, 2, 1)) for name in (w_name, r_name)]
    # XLA cannot return what a loop keeps for its gradient.
    scan = _unrolled_scan if context.xla and context.gradients else tf.scan

    def run(
        x: Any, w: Any, r: Any, b: Any = None, _lengths: Any = None, h: Any = None, c: Any = None, p: Any = None
    ) -> Any:
        if plan.batch_first:
            x = tf.transpose(x, (1, 0, 2))
        w, r = weights[0](w), weights[1](r)
        if reordered:
            w, r = (tf.gather(weight, rows[0], axis=2) for weight in (w, r))
            b = tf.gather(b, rows[1], axis=1) if b is not None else None
        ends = []
        for d in range(plan.directions):
            states = [
                tf.zeros([x.shape[1], plan.hidden], x.dtype) if s is None else s[:, d] if plan.batch_first else s[d]
                for s in ((h, c) if plan.kind == "LSTM" else (h,))
            ]
            backwards = plan.reverse or d == 1
            biases = tf.split(b[d], 2) if b is not None else None
            if plan.kind == "GRU":
                ends.append(_gru(scan, x, w[d], r[d], biases, states[0], plan, backwards=backwards))
                continue
            peepholes = tf.split(p[d], 3) if p is not None else None
            # The kernel has no float64, and XLA has no such kernel. The kernel's gradient is wrong:
            # 2.21 takes the older kernel's, whose gates are in another order.
            native = x.dtype in (tf.float32, tf.float16) and not (context.gradients or context.xla)
            lstm = _lstm_block if native else partial(_lstm, scan)
            ends.append(lstm(x, w[d], r[d], biases, states, peepholes, backwards=backwards))
        every, *last = zip(*ends, strict=True)
        y = tf.stack(every, 1)
        y = tf.transpose(y, (2, 0, 1, 3)) if plan.batch_first else y
        return select((y, *(tf.stack(s, state_axis) for s in last)), wanted)

    return converting(run, others)


def _lstm_block(
    x: Any, w: Any, r: Any, biases: Any, states: Sequence[Any], peepholes: Any, *, backwards: bool
) -> tuple[Any, ...]:
    """Run one direction of an LSTM by TensorFlow's kernel; return all h, and the last h and c."""
    i, o, f = peepholes if peepholes is not None else [tf.zeros([r.shape[0]], x.dtype)] * 3
    y = tf.raw_ops.BlockLSTMV2(
        seq_len_max=tf.constant(x.shape[0], tf.int64), x=tf.reverse(x, [0]) if backwards else x, cs_prev=states[1],
        h_prev=states[0], w=tf.concat([w, r], 0), wci=i, wcf=f, wco=o,
        b=biases[0] + biases[1] if biases is not None else tf.zeros([w.shape[1]], x.dtype),
        cell_clip=0.0, use_peephole=peepholes is not None,
    )  # fmt: skip
    return tf.reverse(y.h, [0]) if backwards else y.h, y.h[-1], y.cs[-1]


def _lstm(
    scan: Call, x: Any, w: Any, r: Any, biases: Any, states: Sequence[Any], peepholes: Any, *, backwards: bool
) -> tuple[Any, ...]:
    """Run one direction of an LSTM as a loop over the steps; return what `_lstm_block` returns."""
    peepholes = [in_float32(p) for p in peepholes] if peepholes is not None else None

    def step(state: Sequence[Any], x_t: Any) -> tuple[Any, ...]:
        h, c = state
        i, f, g, o = tf.split(in_float32(x_t) + _product(h, r), 4, 1)
        if peepholes is not None:
            i, f = i + peepholes[0] * c, f + peepholes[2] * c
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
        if peepholes is not None:
            o = o + peepholes[1] * c
        return tf.sigmoid(o) * tf.tanh(c), c

    total = biases[0] + biases[1] if biases is not None else None
    start = tuple(in_float32(state) for state in states)
    every_h, every_c = (tf.cast(s, x.dtype) for s in scan(step, _projected(x, w, total), start, reverse=backwards))
    last = 0 if backwards else -1
    return every_h, every_h[last], every_c[last]


def _gru(
    scan: Call, x: Any, w: Any, r: Any, biases: Any, state: Any, plan: Recurrent, *, backwards: bool
) -> tuple[Any, ...]:
    """Run one direction of a GRU as a loop over the steps; return all states h, and the last."""
    split = [2 * plan.hidden, plan.hidden]
    r_gates, r_new = tf.split(r, split, 1)
    if biases is None:
        total = b_r = None
    elif plan.linear_before_reset:
        total, b_r = biases[0], in_float32(biases[1])
    else:
        total, b_r = biases[0] + biases[1], None

    def reset_last(h: Any, x_t: Any) -> Any:
        product = _product(h, r) if b_r is None else _product(h, r) + b_r
        (x_z, x_r, x_n), (h_z, h_r, h_n) = tf.split(in_float32(x_t), 3, 1), tf.split(product, 3, 1)
        z = tf.sigmoid(x_z + h_z)
        new = tf.tanh(x_n + tf.sigmoid(x_r + h_r) * h_n)
        return z * h + (1 - z) * new

    def reset_first(h: Any, x_t: Any) -> Any:
        x_gates, x_n = tf.split(in_float32(x_t), split, 1)
        z, reset = tf.split(tf.sigmoid(x_gates + _product(h, r_gates)), 2, 1)
        new = tf.tanh(x_n + _product(reset * h, r_new))
        return z * h + (1 - z) * new

    step = reset_last if plan.linear_before_reset else reset_first
    every = tf.cast(scan(step, _projected(x, w, total), in_float32(state), reverse=backwards), x.dtype)
    return every, every[0 if backwards else -1]


def _unrolled_scan(step: Call, values: Any, state: Any, *, reverse: bool) -> Any:
    """Do what `tf.scan` does, without a loop."""
    states = []
    for value in tf.unstack(tf.reverse(values, [0]) if reverse else values):
        state = step(state, value)
        states.append(state)
    return tf.nest.map_structure(lambda *every: tf.stack(every), *(states[::-1] if reverse else states))


def _product(state: Any, weight: Any) -> Any:
    """Return the state's part of the gates, in float32 at least."""
    return in_float32(tf.matmul(tf.cast(state, weight.dtype), weight))


def _projected(x: Any, w: Any, bias: Any) -> Any:
    """Return the inputs' part of the gates, for all steps in one product."""
    y = tf.matmul(tf.reshape(x, [-1, x.shape[2]]), w)
    return tf.reshape(y if bias is None else y + bias, [*x.shape[:2], -1])


gru = lstm = recurrent
