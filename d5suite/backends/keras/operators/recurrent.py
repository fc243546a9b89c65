"""ONNX in Keras: LSTM and GRU. Imports Keras, NumPy, `d5suite.network` and `context`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from d5suite.backends.keras.operators.context import Calculation, Context, Factory, Function
from d5suite.network import Node
from d5suite.network.nodes.context import Packing, select
from d5suite.network.nodes.recurrent import Functions, Recurrent, read_recurrent, unrolled

_RECURRENT_GATES = {"LSTM": "ifco", "GRU": "zrh"}
"""The order in which Keras stacks the gates."""


def recurrent(node: Node, context: Context) -> Any:
    """Build an LSTM or GRU layer; run variants without a layer step by step. Level 0 only."""
    plan = read_recurrent(node, context)
    x, w, r, b, _, *initial = plan.names[:7]
    states = [name for name in initial if name]
    if plan.peepholes or (plan.kind == "LSTM" and len(states) == 1):
        return _step_by_step(plan)
    context.prefer(x, (0, 1, 2) if plan.batch_first else (1, 0, 2))
    across = (1, 0, 2) if plan.batch_first else (0, 1, 2)  # states, directions first
    for name in states:
        context.layouts[name] = across
        context.parts[name] = [
            keras.Input((plan.hidden,), batch_size=plan.batch, dtype=str(context.dtypes[name]))
            for _ in range(plan.directions)
        ]
    kinds: dict[str, Any] = {"LSTM": layers.LSTM, "GRU": layers.GRU}
    settings = {
        "use_bias": bool(b),
        "return_sequences": plan.wanted[0],
        "return_state": any(plan.wanted[1:]),
        "recurrent_initializer": "zeros",  # the default has no bfloat16 kernel
    }
    if plan.kind == "GRU":
        settings["reset_after"] = plan.linear_before_reset
    layer = kinds[plan.kind](plan.hidden, go_backwards=plan.reverse, **settings, **context.settings(node))
    cells = [layer.cell]
    if plan.directions == 2:
        layer = layers.Bidirectional(layer, **context.settings(node, ".both"))
        cells = [layer.forward_layer.cell, layer.backward_layer.cell]
    given = [context.parts[name][d] for d in range(plan.directions) for name in states]
    results = layer(context.tensors[x], initial_state=given or None)
    y, *last = results if settings["return_state"] else [results]
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


def _transposed(packing: Packing) -> Packing:
    """Swap the last two axes of packed weights."""
    return Packing(lambda w: packing.pack(w).swapaxes(1, 2), lambda w: packing.unpack(w.swapaxes(1, 2)))


def _biases(plan: Recurrent, order: str) -> Packing:
    """Pack ONNX's two biases as Keras's two or, summed, as its one, whose gradient each has."""
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
        functions = Functions(
            ops.matmul, ops.transpose, ops.sigmoid, ops.tanh, lambda t, n: ops.split(t, n, -1), ops.stack,
            lambda rows, columns: ops.zeros((rows, columns), x.dtype),
        )  # fmt: skip
        return select(unrolled(plan, functions, x, *rest), plan.wanted)

    return run


OPERATORS: dict[str, Factory] = {
    "GRU": recurrent,
    "LSTM": recurrent,
}
