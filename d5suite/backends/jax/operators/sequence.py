"""ONNX on JAX: attention, LSTM and GRU.

Imports JAX, NumPy, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from d5suite.backends.jax.operators.context import HEADS_INSIDE, Call, Context, in_float32, sum_type, typed
from d5suite.levels.layouts import converting, same
from d5suite.network import Node
from d5suite.network.nodes.attention import BIASED, CAPPED, SCORES, WEIGHTS, read_attention
from d5suite.network.nodes.layouts import identity
from d5suite.network.nodes.recurrent import Recurrent, read_recurrent


def attention(node: Node, context: Context) -> Call:
    plan = read_attention(node, context)
    precision, groups = context.precision, plan.groups
    for output in node.outputs[1 if plan.split_heads else 0 : 3]:
        context.layouts[output] = HEADS_INSIDE
    counts = (plan.heads, plan.kv_heads, plan.kv_heads) if plan.split_heads else (1, 1, 1)
    sizes = {(context.shape(name)[-1] or 0) // n for name, n in zip(node.inputs[:3], counts, strict=True)}

    # Tensors of four axes have heads after steps; masks and caches of three axes are ONNX's.
    converters = [
        context.convert(name, HEADS_INSIDE if index != 3 and not (plan.split_heads and index < 3) else identity(rank))
        if name
        else same
        for index, name in enumerate(node.inputs[:6])
        for rank in (len(context.shapes.get(name, ())),)
    ]

    def heads(x: Any, count: int) -> Any:
        return x.reshape(*x.shape[:2], count, -1) if plan.split_heads else x

    def merged(y: Any) -> Any:
        return y.reshape(*y.shape[:2], -1) if plan.split_heads else y

    # JAX's own attention computes softmax in float32 even for float64; the CPU has no float16.
    if plan.plain and len(sizes) == 1 and context.dtypes[node.inputs[0]] in (np.float32, jnp.bfloat16):
        seen = None
        if plan.bias is not None and not plan.causal:
            seen = (plan.bias == 0).reshape((1,) * (4 - plan.bias.ndim) + plan.bias.shape)

        def native(q: Any, k: Any, v: Any, *_: Any) -> Any:
            with jax.default_matmul_precision("highest") if precision is not None else nullcontext():
                q, k, v = (convert(x) for convert, x in zip(converters, (q, k, v), strict=False))
                q, k, v = heads(q, plan.heads), heads(k, plan.kv_heads), heads(v, plan.kv_heads)
                y = jax.nn.dot_product_attention(q, k, v, mask=seen, scale=plan.scale, is_causal=plan.causal)
                return merged(y)

        return native

    def general(*inputs: Any) -> Any:
        given = [convert(x) for convert, x in zip(converters, inputs, strict=False)]
        q, k, v, mask, past_k, past_v = [*given, None, None, None][:6]
        dot = partial(jnp.einsum, precision=precision, preferred_element_type=sum_type(q))
        q, k, v = heads(q, plan.heads), heads(k, plan.kv_heads), heads(v, plan.kv_heads)
        if past_k is not None and past_v is not None:
            k, v = jnp.concatenate((past_k, k), 1), jnp.concatenate((past_v, v), 1)
        present = k, v
        if groups > 1:
            k, v = (jnp.repeat(t, groups, 2) for t in present)
        scores = dot("bqnh,bknh->bnqk", q, k) * plan.scale
        shown = {SCORES: scores}
        if plan.softcap:
            scores = plan.softcap * jnp.tanh(scores / plan.softcap)
        shown[CAPPED] = scores
        added = None if plan.bias is None else jnp.asarray(plan.bias, scores.dtype)
        if mask is not None:
            mask = jnp.where(mask, 0, -jnp.inf) if plan.mask == "bool" else mask.astype(scores.dtype)
            mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, plan.mask_padding)], constant_values=-jnp.inf)
            added = mask if added is None else added + mask
        scores = scores if added is None else scores + added
        shown[BIASED] = scores
        weights = jax.nn.softmax(scores)
        if plan.may_be_blind and added is not None:
            weights = jnp.where(jnp.isneginf(added.max(-1, keepdims=True)), 0, weights)
        shown[WEIGHTS] = weights
        y = merged(dot("bnqk,bknh->bqnh", weights.astype(v.dtype), v)).astype(q.dtype)
        return (y, *typed(node, context, *present, shown.get(plan.shows))) if any(plan.wanted[1:]) else y

    return general


def recurrent(node: Node, context: Context) -> Call:
    """Return a scan over the steps, after one matrix product for the inputs of all steps."""
    plan = read_recurrent(node, context)
    layouts = [
        (0, 2, 1) if place in (1, 2) else identity(len(context.shapes.get(name, ())))
        for place, name in enumerate(node.inputs)
    ]
    converters = [context.convert(*pair) if pair[0] else same for pair in zip(node.inputs, layouts, strict=True)]
    cell = _lstm_cell if plan.kind == "LSTM" else _gru_cell
    precision, axis = context.precision, 1 if plan.batch_first else 0

    def call(
        x: Any, w: Any, r: Any, b: Any = None, _lengths: Any = None, initial_h: Any = None, initial_c: Any = None,
        p: Any = None,
    ) -> Any:  # fmt: skip
        dot = partial(jnp.matmul, precision=precision, preferred_element_type=sum_type(x))
        x = x.swapaxes(0, 1) if plan.batch_first else x
        zeros = jnp.zeros((x.shape[1], plan.hidden), sum_type(x))
        given = (initial_h, initial_c) if plan.kind == "LSTM" else (initial_h,)
        sequences, states = [], []
        for d in range(plan.directions):
            start = [zeros if s is None else in_float32(lax.index_in_dim(s, d, axis, keepdims=False)) for s in given]
            inputs, inside = dot(x, w[d]), None if p is None else in_float32(p[d])
            if b is not None:
                ahead, behind = jnp.split(in_float32(b[d]), 2)
                if plan.linear_before_reset:
                    behind, inside = behind.at[2 * plan.hidden :].set(0), behind[2 * plan.hidden :]
                inputs = inputs + (ahead + behind)
            step = partial(cell, plan, lambda h, matrix: dot(h.astype(x.dtype), matrix), r[d], inside)
            last, y = lax.scan(step, tuple(start), inputs, reverse=plan.reverse or d == 1)
            sequences.append(y.astype(x.dtype))
            states.append(last)
        y = jnp.stack(sequences, 1)
        y = y.transpose(2, 0, 1, 3) if plan.batch_first else y
        if not any(plan.wanted[1:]):
            return y
        return (y, *typed(node, context, *(jnp.stack(last, axis) for last in zip(*states, strict=True))))

    compiled = jax.jit(call)  # otherwise each call would compile its scan, whose functions are new
    return converting(compiled, converters)


def _lstm_cell(plan: Recurrent, dot: Call, r: Any, peepholes: Any, state: Sequence[Any], inputs: Any) -> Any:
    """Take one step from (h, c) and the inputs' part of the gates to ((h, c), h)."""
    h, c = state
    i, o, forget, g = jnp.split(inputs + dot(h, r), 4, axis=-1)
    if peepholes is not None:
        p_i, p_o, p_f = jnp.split(peepholes, 3)
        i, forget = i + p_i * c, forget + p_f * c
    c = jax.nn.sigmoid(forget) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    if peepholes is not None:
        o = o + p_o * c
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def _gru_cell(plan: Recurrent, dot: Call, r: Any, bias: Any, state: Sequence[Any], inputs: Any) -> Any:
    """Take one step from (h,) and the inputs' part of the gates to ((h,), h)."""
    (h,) = state
    gates, new = jnp.split(inputs, [2 * plan.hidden], axis=-1)
    if plan.linear_before_reset:
        by_state, again = jnp.split(dot(h, r), [2 * plan.hidden], axis=-1)
        z, reset = jnp.split(jax.nn.sigmoid(gates + by_state), 2, axis=-1)
        new = jnp.tanh(new + reset * (again if bias is None else again + bias))
    else:
        z, reset = jnp.split(jax.nn.sigmoid(gates + dot(h, r[:, : 2 * plan.hidden])), 2, axis=-1)
        new = jnp.tanh(new + dot(reset * h, r[:, 2 * plan.hidden :]))
    h = new - z * new + z * h
    return (h,), h


gru = lstm = recurrent
