"""LSTM and GRU nodes, read once for every adapter, and their recurrences step by step for variants that no kernel has.

Formulas and weight layouts: ONNX operator specification, LSTM and GRU. Imports NumPy, `d5suite.errors` and
`d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.model import Shape

GATES = {"LSTM": "iofc", "GRU": "zrh"}
"""The order in which ONNX stacks the gates in W, R and B."""

_DEFAULT_ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]}


class Packing(NamedTuple):
    """How a weight is kept in a framework's own form: NumPy functions there and back."""

    pack: Callable[[np.ndarray], np.ndarray]
    unpack: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Recurrent:
    """An LSTM or GRU node.

    Attributes
    ----------
    kind : str
        ``LSTM`` or ``GRU``.
    hidden : int
        Size of the state.
    directions : int
        1, or 2 for a bidirectional node.
    reverse : bool
        Whether the only direction runs from the last step to the first.
    batch_first : bool
        ONNX's ``layout=1``: X is (batch, steps, features), Y (batch, steps, directions, hidden) and states (batch,
        directions, hidden); otherwise (steps, batch, features), (steps, directions, batch, hidden) and (directions,
        batch, hidden).
    linear_before_reset : bool
        GRU: whether the recurrent product is taken before the reset gate multiplies it, as in cuDNN.
    wanted : tuple of bool
        Whether Y, Y_h and, of LSTM, Y_c are wanted.
    peepholes : bool
        LSTM: whether there is an input P.
    """

    kind: str
    hidden: int
    directions: int
    reverse: bool
    batch_first: bool
    linear_before_reset: bool
    wanted: tuple[bool, ...]
    peepholes: bool

    def gates(self, order: str) -> Packing:
        """ONNX's weights W, R or half of B, (directions, gates x hidden, ...), with their gates in another order.

        Parameters
        ----------
        order : str
            The gates of `GATES`, as the framework stacks them.
        """
        theirs = GATES[self.kind]
        there = [theirs.index(gate) for gate in order]
        back = [order.index(gate) for gate in theirs]
        return Packing(lambda w: self._reordered(w, there), lambda w: self._reordered(w, back))

    def bias_gates(self, order: str) -> Packing:
        """ONNX's bias B, (directions, 2 x gates x hidden), with the gates of both halves in another order."""
        weights = self.gates(order)

        def both(one: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
            return lambda b: np.concatenate([one(half) for half in np.split(b, 2, axis=1)], axis=1)

        return Packing(both(weights.pack), both(weights.unpack))

    def _reordered(self, weight: np.ndarray, order: Sequence[int]) -> np.ndarray:
        gates = weight.reshape(weight.shape[0], len(order), self.hidden, *weight.shape[2:])
        return np.ascontiguousarray(gates[:, list(order)]).reshape(weight.shape)


def recurrent(node: Node, shapes: Mapping[str, Shape], constants: Mapping[str, np.ndarray]) -> Recurrent:
    """Read an LSTM or GRU node.

    Raises
    ------
    NetworkError
        For variants that no adapter implements: sequences of different lengths, clipping, coupled gates, other
        activations than the usual ones.
    """
    attributes = node.attributes
    names = [*node.inputs, *[""] * 8]
    weight, steps = shapes[names[2]], shapes[names[0]]
    hidden = int(attributes.get("hidden_size") or weight[2] or 0)
    count = steps[1] if attributes["layout"] else steps[0]
    lengths = constants.get(names[4])
    direction = attributes["direction"]
    activations = attributes.get("activations") or []
    usual = _DEFAULT_ACTIVATIONS[node.op_type] * (2 if direction == "bidirectional" else 1)
    for wrong, what in (
        (lengths is not None and bool((lengths != count).any()), "sequences of different lengths"),
        (bool(attributes.get("clip")), "clipped cells"),
        (bool(attributes.get("input_forget")), "coupled input and forget gates"),
        (bool(activations) and [a.lower() for a in activations] != [a.lower() for a in usual], "other activations"),
    ):
        if wrong:
            raise NetworkError(f"{node.op_type} with {what} is not implemented", where=node.name)
    outputs = 3 if node.op_type == "LSTM" else 2
    return Recurrent(
        kind=node.op_type,
        hidden=hidden,
        directions=2 if direction == "bidirectional" else 1,
        reverse=direction == "reverse",
        batch_first=bool(attributes["layout"]),
        linear_before_reset=bool(attributes.get("linear_before_reset")),
        wanted=tuple(i < len(node.outputs) and bool(node.outputs[i]) for i in range(outputs)),
        peepholes=bool(names[7]),
    )


@dataclass(frozen=True)
class Functions:
    """What `unrolled` needs of a framework beside ``+``, ``-``, ``*`` and indexing: each on its native tensors.

    Attributes
    ----------
    matmul : callable
        Of two matrices.
    transpose : callable
        Of a matrix.
    sigmoid, tanh : callable
    split : callable
        (tensor, n): n equal parts along the last axis.
    stack : callable
        (tensors, axis): along a new axis.
    zeros : callable
        (rows, columns) in the operation's type.
    """

    matmul: Callable[[Any, Any], Any]
    transpose: Callable[[Any], Any]
    sigmoid: Callable[[Any], Any]
    tanh: Callable[[Any], Any]
    split: Callable[[Any, int], Sequence[Any]]
    stack: Callable[[Sequence[Any], int], Any]
    zeros: Callable[[int, int], Any]


def unrolled(
    plan: Recurrent,
    functions: Functions,
    batch: int,
    steps: int,
    x: Any,
    w: Any,
    r: Any,
    b: Any = None,
    _lengths: Any = None,
    initial_h: Any = None,
    initial_c: Any = None,
    p: Any = None,
) -> tuple[Any, ...]:
    """The recurrence step by step, in any framework's own operations; weights and results as ONNX has them.

    Returns
    -------
    tuple
        Y, Y_h and, of LSTM, Y_c.
    """
    f, time = functions, range(steps)
    every: list[list[Any]] = []
    last_h, last_c = [], []
    for d in range(plan.directions):
        backwards = plan.reverse or d == 1

        def state(value: Any, d: int = d) -> Any:
            if value is None:
                return f.zeros(batch, plan.hidden)
            return value[:, d] if plan.batch_first else value[d]

        h, c = state(initial_h), state(initial_c) if plan.kind == "LSTM" else None
        w_d, r_d = f.transpose(w[d]), f.transpose(r[d])
        halves = f.split(b[d], 2) if b is not None else None
        peep = f.split(p[d], 3) if p is not None else None
        outputs: list[Any] = [None] * steps
        for t in reversed(time) if backwards else time:
            x_t = f.matmul(x[:, t] if plan.batch_first else x[t], w_d)
            if plan.kind == "LSTM":
                h, c = _lstm_step(f, x_t, h, c, r_d, halves, peep)
            else:
                h = _gru_step(f, x_t, h, r_d, halves, plan)
            outputs[t] = h
        every.append(outputs)
        last_h.append(h)
        last_c.append(c)
    state_axis = 1 if plan.batch_first else 0
    # Per step (directions, batch, hidden), or (batch, directions, hidden) with the batch first.
    by_step = [f.stack([every[d][t] for d in range(plan.directions)], state_axis) for t in time]
    results = [f.stack(by_step, state_axis), f.stack(last_h, state_axis)]
    if plan.kind == "LSTM":
        results.append(f.stack(last_c, state_axis))
    return tuple(results)


def _lstm_step(f: Functions, x_t: Any, h: Any, c: Any, r: Any, halves: Any, peep: Any) -> tuple[Any, Any]:
    total = x_t + f.matmul(h, r)
    if halves is not None:
        total = total + halves[0] + halves[1]
    i, o, forget, g = f.split(total, 4)
    if peep is not None:
        i, forget = i + peep[0] * c, forget + peep[2] * c
    c = f.sigmoid(forget) * c + f.sigmoid(i) * f.tanh(g)
    if peep is not None:
        o = o + peep[1] * c
    return f.sigmoid(o) * f.tanh(c), c


def _gru_step(f: Functions, x_t: Any, h: Any, r: Any, halves: Any, plan: Recurrent) -> Any:
    if halves is not None:
        x_t = x_t + halves[0]
    x_z, x_r, x_h = f.split(x_t, 3)
    r_z, r_r, r_h = f.split(r, 3)
    b_z, b_r, b_h = f.split(halves[1], 3) if halves is not None else (0, 0, 0)
    z = f.sigmoid(x_z + f.matmul(h, r_z) + b_z)
    reset = f.sigmoid(x_r + f.matmul(h, r_r) + b_r)
    if plan.linear_before_reset:
        new = f.tanh(x_h + reset * (f.matmul(h, r_h) + b_h))
    else:
        new = f.tanh(x_h + f.matmul(reset * h, r_h) + b_h)
    return new - z * new + z * h
