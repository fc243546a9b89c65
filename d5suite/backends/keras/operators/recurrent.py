"""ONNX in Keras: LSTM and GRU.

Imports Keras, NumPy, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from d5suite.backends.keras.operators.context import Calculation, Context, Function
from d5suite.levels.layouts import converting
from d5suite.network import Node
from d5suite.network.nodes.context import Packing, select
from d5suite.network.nodes.recurrent import RecurrenceFunctions, Recurrent, read_recurrent, unrolled

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
    """Return a function of ONNX's inputs that is batch first, and whether XLA can compile it."""
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
    """Pack ONNX's two biases as Keras's two, or as one, their sum, whose gradient both have."""
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
