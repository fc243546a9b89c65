"""LSTM and GRU nodes, and unrolled recurrences for variants without a kernel.

Formulas and weight layouts: ONNX operator specification, LSTM and GRU. Imports NumPy,
`d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext, Packing

GATES = {"LSTM": "iofc", "GRU": "zrh"}
"""The order in which ONNX stacks the gates in W, R and B."""

CUDNN_GATES = {"LSTM": "ifco", "GRU": "rzh"}
"""The order of gates in cuDNN and the kernels that follow it."""

_DEFAULT_ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]}


@dataclass(frozen=True)
class Recurrent:
    """An LSTM or GRU node.

    Attributes
    ----------
    kind : str
        ``LSTM`` or ``GRU``.
    names : tuple of str
        X, W, R, B, sequence lengths, initial h, initial c and P; ``""`` for an omitted input.
    batch, steps : int or None
        Sizes of X.
    hidden : int
        Size of the state.
    directions : int
        1, or 2 for a bidirectional node.
    reverse : bool
        Whether a node of one direction runs from the last step to the first.
    batch_first : bool
        ONNX's ``layout=1``: X is (batch, steps, features), Y (batch, steps, directions, hidden) and
        states (batch, directions, hidden); otherwise (steps, batch, features), (steps, directions,
        batch, hidden) and (directions, batch, hidden).
    linear_before_reset : bool
        GRU: whether the reset gate multiplies the recurrent product, as in cuDNN, or the state.
    wanted : tuple of bool
        Whether Y, Y_h and, for LSTM, Y_c are wanted.
    """

    kind: str
    names: tuple[str, ...]
    batch: int | None
    steps: int | None
    hidden: int
    directions: int
    reverse: bool
    batch_first: bool
    linear_before_reset: bool
    wanted: tuple[bool, ...]

    @property
    def peepholes(self) -> bool:
        """LSTM: whether the gates see the cell state, through the weights P."""
        return bool(self.names[7])

    @property
    def has_kernel(self) -> bool:
        """Whether cuDNN, and the kernels that follow it, support this variant."""
        return not self.peepholes and (self.kind == "LSTM" or self.linear_before_reset)

    def places(self, order: str) -> list[int]:
        """Return the positions of a framework's gates in ONNX's order."""
        return [GATES[self.kind].index(gate) for gate in order]

    def rows(self, order: str, halves: int = 1) -> list[int]:
        """Return the rows of W or R (of B with two halves) in a framework's order of gates."""
        size, gates = self.hidden, [g + h * len(order) for h in range(halves) for g in self.places(order)]
        return [row for gate in gates for row in range(gate * size, (gate + 1) * size)]

    def gates(self, order: str) -> Packing:
        """Return the `Packing` of W, R or half of B, (directions, gates x hidden, ...).

        Parameters
        ----------
        order : str
            The framework's order of the gates in `GATES`.
        """
        there = self.places(order)
        back = [order.index(gate) for gate in GATES[self.kind]]
        return Packing(lambda w: self._reordered(w, there), lambda w: self._reordered(w, back))

    def bias_gates(self, order: str) -> Packing:
        """Return the `Packing` of B, (directions, 2 x gates x hidden)."""
        weights = self.gates(order)

        def both(one: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
            return lambda b: np.concatenate([one(half) for half in np.split(b, 2, axis=1)], axis=1)

        return Packing(both(weights.pack), both(weights.unpack))

    def _reordered(self, weight: np.ndarray, order: Sequence[int]) -> np.ndarray:
        gates = weight.reshape(weight.shape[0], len(order), self.hidden, *weight.shape[2:])
        return np.ascontiguousarray(gates[:, list(order)]).reshape(weight.shape)


def unsupported_variant(node: Node, context: NodeContext) -> str:
    """Return which feature of an LSTM or GRU node no adapter supports, or ``""``."""
    a, lengths = node.attributes, (*node.inputs, *[""] * 8)[4]
    known, steps = context.constants.get(lengths), context.shape(node.inputs[0])[1 if a["layout"] else 0]
    directions = 2 if a["direction"] == "bidirectional" else 1
    activations = [name.lower() for name in a.get("activations") or []]
    for has, what in (
        (bool(lengths) and known is None, "lengths of sequences that are not known before it runs"),
        (known is not None and bool((known != steps).any()), "sequences of different lengths"),
        (bool(a.get("clip")), "clipped cells"),
        (bool(a.get("input_forget")), "coupled input and forget gates"),
        (
            bool(activations) and activations != [n.lower() for n in _DEFAULT_ACTIVATIONS[node.op_type]] * directions,
            f"the activations {', '.join(activations)}",
        ),
    ):
        if has:
            return what
    return ""


def read_recurrent(node: Node, context: NodeContext) -> Recurrent:
    """Read an LSTM or GRU node.

    Raises
    ------
    NetworkError
        For an `unsupported_variant`.
    """
    a = node.attributes
    names = (*node.inputs, *[""] * 8)[:8]
    shape = context.shape(names[0])
    batch, steps = (shape[0], shape[1]) if a["layout"] else (shape[1], shape[0])
    if what := unsupported_variant(node, context):
        raise NetworkError(f"{node.op_type} with {what} is not implemented", where=node.name)
    outputs = [*node.outputs, *[""] * 3][: 3 if node.op_type == "LSTM" else 2]
    return Recurrent(
        kind=node.op_type,
        names=names,
        batch=batch,
        steps=steps,
        hidden=int(a.get("hidden_size") or context.shape(names[2])[2] or 0),
        directions=2 if a["direction"] == "bidirectional" else 1,
        reverse=a["direction"] == "reverse",
        batch_first=bool(a["layout"]),
        linear_before_reset=bool(a.get("linear_before_reset")),
        wanted=tuple(bool(name) for name in outputs),
    )


@dataclass(frozen=True)
class RecurrenceFunctions:
    """A framework's functions that `unrolled` needs besides ``+``, ``-``, ``*`` and indexing.

    Attributes
    ----------
    matmul : callable
        Product of two matrices.
    transpose : callable
        Transpose of a matrix.
    sigmoid, tanh : callable
    split : callable
        (tensor, n) to n equal parts along the last axis.
    stack : callable
        (tensors, axis) to one tensor with a new axis.
    zeros : callable
        (matrix, columns) to zeros of the operation's type, with as many rows as the matrix.
    """

    matmul: Callable[[Any, Any], Any]
    transpose: Callable[[Any], Any]
    sigmoid: Callable[[Any], Any]
    tanh: Callable[[Any], Any]
    split: Callable[[Any, int], Sequence[Any]]
    stack: Callable[[Sequence[Any], int], Any]
    zeros: Callable[[Any, int], Any]


def unrolled(
    plan: Recurrent,
    functions: RecurrenceFunctions,
    x: Any,
    w: Any,
    r: Any,
    b: Any = None,
    _lengths: Any = None,
    initial_h: Any = None,
    initial_c: Any = None,
    p: Any = None,
) -> tuple[Any, ...]:
    """Run the recurrence step by step with a framework's own operations.

    Inputs and results have ONNX's layout.

    Returns
    -------
    tuple
        Y, Y_h and, for LSTM, Y_c.

    Raises
    ------
    NetworkError
        If the number of steps is unknown.
    """
    if plan.steps is None:
        raise NetworkError(f"this variant of {plan.kind} needs a fixed length", where=plan.names[0])
    f, time = functions, range(plan.steps)
    every: list[list[Any]] = []
    last_h, last_c = [], []
    for d in range(plan.directions):
        backwards = plan.reverse or d == 1

        def state(value: Any, d: int = d) -> Any:
            if value is None:
                return f.zeros(x[:, 0] if plan.batch_first else x[0], plan.hidden)
            return value[:, d] if plan.batch_first else value[d]

        h, c = state(initial_h), state(initial_c) if plan.kind == "LSTM" else None
        w_d, r_d = f.transpose(w[d]), f.transpose(r[d])
        halves = f.split(b[d], 2) if b is not None else None
        peep = f.split(p[d], 3) if p is not None else None
        outputs: list[Any] = [None] * len(time)
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
    # For each step (directions, batch, hidden), or (batch, directions, hidden) with batch_first.
    by_step = [f.stack([every[d][t] for d in range(plan.directions)], state_axis) for t in time]
    results = [f.stack(by_step, state_axis), f.stack(last_h, state_axis)]
    if plan.kind == "LSTM":
        results.append(f.stack(last_c, state_axis))
    return tuple(results)


def _lstm_step(f: RecurrenceFunctions, x_t: Any, h: Any, c: Any, r: Any, halves: Any, peep: Any) -> tuple[Any, Any]:
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


def _gru_step(f: RecurrenceFunctions, x_t: Any, h: Any, r: Any, halves: Any, plan: Recurrent) -> Any:
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
