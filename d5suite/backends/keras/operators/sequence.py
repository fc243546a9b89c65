"""ONNX in Keras: attention, LSTM and GRU.

Imports Keras, NumPy, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from d5suite.backends.keras.operators.context import Calculation, Context, Function, in_float32
from d5suite.levels.layouts import converting
from d5suite.network import Node
from d5suite.network.nodes.attention import BIASED, CAPPED, SCORES, WEIGHTS, Attention, read_attention
from d5suite.network.nodes.context import Packing, select
from d5suite.network.nodes.layouts import identity
from d5suite.network.nodes.recurrent import RecurrenceFunctions, Recurrent, read_recurrent, unrolled


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
    """Call Keras's own attention, in whose layout heads come after steps."""
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
    """Compute attention by formula, for every variant and intermediate result."""

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


_RECURRENT_GATES = {"LSTM": "ifco", "GRU": "zrh"}
"""The order in which Keras stacks the gates."""


def recurrent(node: Node, context: Context) -> Any:
    """Build LSTM or GRU layers; run variants without a layer step by step."""
    plan = read_recurrent(node, context)
    states = [name for name in plan.names[5:7] if name]
    has_layer = not plan.peepholes and (plan.kind == "GRU" or len(states) != 1)
    if not context.single:
        return _in_network(node, context, plan, has_layer=has_layer)
    return _single(node, context, plan, states) if has_layer else _step_by_step(plan)


def _single(node: Node, context: Context, plan: Recurrent, states: list[str]) -> Any:
    """Build layers that own the weights."""
    x, w, r, b = plan.names[:4]
    context.prefer(x, (0, 1, 2) if plan.batch_first else (1, 0, 2))
    across = (1, 0, 2) if plan.batch_first else (0, 1, 2)  # states, directions first
    for name in states:
        context.layouts[name] = across
        context.parts[name] = [
            keras.Input((plan.hidden,), batch_size=plan.batch, dtype=str(context.dtypes[name]))
            for _ in range(plan.directions)
        ]
    layer = _layer(node, context, plan, backwards=plan.reverse)
    cells = [layer.cell]
    if plan.directions == 2:
        layer = layers.Bidirectional(layer, **context.settings(node, ".both"))
        cells = [layer.forward_layer.cell, layer.backward_layer.cell]
    given = [context.parts[name][d] for d in range(plan.directions) for name in states]
    results = layer(context.tensors[x], initial_state=given or None)
    y, *last = results if layer.return_state else [results]
    order = _RECURRENT_GATES[plan.kind]
    for name, weights in ((w, [c.kernel for c in cells]), (r, [c.recurrent_kernel for c in cells])):
        context.parts[name], context.packing[name] = weights, _transposed(plan.gates(order))
    if b:
        context.parts[b], context.packing[b] = [c.bias for c in cells], _biases(plan, order)
    if plan.wanted[0]:
        context.layouts[node.outputs[0]] = (0, 1, 2, 3) if plan.batch_first else (2, 0, 1, 3)
        if plan.reverse:
            flip = Calculation(lambda t: ops.flip(t, 1), [...], y.shape, **context.settings(node, ".flip"))
            y = flip(y)
    kept = []
    for i, name in enumerate(node.outputs[1:]):
        each = last[i :: len(plan.wanted) - 1]
        context.layouts[name] = across
        if len(each) > 1 and name:
            stack = Calculation(lambda *t: ops.stack(t), [..., ...], None, **context.settings(node, f".stack{i}"))
            each = [stack(each)]
        kept.append(each[0] if name else None)
    return select((y, *kept), plan.wanted)


def _layer(node: Node, context: Context, plan: Recurrent, *, backwards: bool, suffix: str = "") -> Any:
    """Return Keras's layer for one direction, with the wanted outputs."""
    kinds: dict[str, Any] = {"LSTM": layers.LSTM, "GRU": layers.GRU}
    return kinds[plan.kind](
        plan.hidden,
        go_backwards=backwards,
        use_bias=bool(plan.names[3]),
        return_sequences=plan.wanted[0],
        return_state=any(plan.wanted[1:]),
        recurrent_initializer="zeros",  # the default has no bfloat16 kernel
        **({"reset_after": plan.linear_before_reset} if plan.kind == "GRU" else {}),
        **context.settings(node, suffix),
    )


def _in_network(node: Node, context: Context, plan: Recurrent, *, has_layer: bool) -> Any:
    """Run layers on a network's parameters, which stay as ONNX has them.

    Keras's LSTM has one bias where ONNX has two, and a network trains both. So the layers' own
    weights are not used: each call gets weights that are made from the parameters.
    """
    function, compiles = _by_layers(node, context, plan) if has_layer else (_step_by_step(plan), True)
    time_first = has_layer and not plan.batch_first
    convert = context.inputs_to_onnx(node)
    convert[0] = context.convert(plan.names[0], (1, 0, 2) if time_first else (0, 1, 2))
    if time_first:
        places = [(2, 0, 1, 3), (1, 0, 2), (1, 0, 2)]  # batch first, as the layers have it
        context.layouts.update({name: place for name, place in zip(node.outputs, places, strict=False) if name})
    return context.calculate(node, converting(function, convert), compiles=compiles)


def _by_layers(node: Node, context: Context, plan: Recurrent) -> tuple[Function, bool]:
    """Return a function of ONNX's inputs, batch first, and whether XLA can compile it."""
    each = [
        _layer(node, context, plan, backwards=plan.reverse or d == 1, suffix=f".{d}") for d in range(plan.directions)
    ]
    for layer in each:
        layer.build((None, plan.steps, context.shape(plan.names[1])[2]))
    rows = plan.rows(_RECURRENT_GATES[plan.kind])
    two_biases = plan.kind == "GRU" and plan.linear_before_reset

    def run(x: Any, w: Any, r: Any, b: Any = None, _lengths: Any = None, *initial: Any) -> Any:
        sequences, states = [], []
        for d, layer in enumerate(each):
            weights = [ops.take(ops.transpose(weight[d]), rows, axis=1) for weight in (w, r)]
            if b is not None:
                biases = ops.take(ops.reshape(b[d], (2, -1)), rows, axis=1)
                weights.append(biases if two_biases else ops.sum(biases, axis=0))
            start = [s[:, d] if plan.batch_first else s[d] for s in initial if s is not None]
            found, _ = layer.stateless_call(weights, layer.non_trainable_variables, x, initial_state=start or None)
            y, *last = found if layer.return_state else [found]
            sequences.append(ops.flip(y, 1) if plan.wanted[0] and layer.go_backwards else y)
            states.append(last)
        ends = [ops.stack(last, 1) for last in zip(*states, strict=True)]
        return select((ops.stack(sequences, 2) if plan.wanted[0] else None, *ends), plan.wanted)

    return run, all(layer.supports_jit for layer in each)


def _transposed(packing: Packing) -> Packing:
    """Swap the last two axes of packed weights."""
    return Packing(lambda w: packing.pack(w).swapaxes(1, 2), lambda w: packing.unpack(w.swapaxes(1, 2)))


def _biases(plan: Recurrent, order: str) -> Packing:
    """Pack ONNX's two biases as Keras's two, or as their sum, whose gradient both get."""
    both = plan.bias_gates(order)
    if plan.linear_before_reset and plan.kind == "GRU":
        return Packing(
            lambda b: both.pack(b).reshape(plan.directions, 2, -1),
            lambda b: both.unpack(b.reshape(plan.directions, -1)),
        )

    def pack(b: np.ndarray) -> np.ndarray:
        halves = np.split(both.pack(b), 2, axis=1)
        total: np.ndarray = halves[0] + halves[1]
        return total

    return Packing(pack, lambda b: both.unpack(np.concatenate([b, b], axis=1)))


def _step_by_step(plan: Recurrent) -> Function:
    def run(x: Any, *rest: Any) -> Any:
        functions = RecurrenceFunctions(
            ops.matmul, ops.transpose, ops.sigmoid, ops.tanh, lambda t, n: ops.split(t, n, -1), ops.stack,
            lambda matrix, columns: ops.zeros((ops.shape(matrix)[0], columns), x.dtype),
        )  # fmt: skip
        return select(unrolled(plan, functions, x, *rest), plan.wanted)

    return run


gru = lstm = recurrent
