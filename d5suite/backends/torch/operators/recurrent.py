"""ONNX on PyTorch: LSTM and GRU.

Imports PyTorch, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

from typing import Any

import torch

from d5suite.backends.torch.operators.context import Context, Function
from d5suite.network import Node
from d5suite.network.nodes.context import select
from d5suite.network.nodes.recurrent import CUDNN_GATES, RecurrenceFunctions, Recurrent, read_recurrent, unrolled


def recurrent(node: Node, context: Context) -> Function:
    """Return PyTorch's kernel or, if it lacks the variant, a loop over the steps."""
    plan = read_recurrent(node, context)
    if not plan.has_kernel:
        return _step_by_step(plan)
    _, w_name, r_name, b_name, *_ = plan.names
    order = CUDNN_GATES[plan.kind]
    if context.single:
        context.packing.update({name: plan.gates(order) for name in (w_name, r_name)})
        if b_name:
            context.packing[b_name] = plan.bias_gates(order)
    rows = [torch.tensor(plan.rows(order, halves), device=context.device) for halves in (1, 2)]
    time = 1 if plan.batch_first else 0
    kernel = torch.lstm if plan.kind == "LSTM" else torch.gru

    def run(
        x: torch.Tensor, w: torch.Tensor, r: torch.Tensor, b: torch.Tensor | None = None, _lengths: Any = None,
        h: torch.Tensor | None = None, c: torch.Tensor | None = None, *_: Any,
    ) -> Any:  # fmt: skip
        if not context.single:  # a network's parameters stay as ONNX has them
            w, r = (weight.index_select(1, rows[0]) for weight in (w, r))
            b = b.index_select(1, rows[1]) if b is not None else None
        shape = (plan.directions, x.shape[0 if plan.batch_first else 1], plan.hidden)
        weights: list[torch.Tensor] = []
        for d in range(plan.directions):
            weights += [w[d], r[d], *(b[d].chunk(2) if b is not None else ())]
        states = [
            x.new_zeros(shape) if s is None else s.transpose(0, 1).contiguous() if plan.batch_first else s
            for s in ((h, c) if plan.kind == "LSTM" else (h,))
        ]
        first = states if plan.kind == "LSTM" else states[0]
        y, *last = kernel(
            x.flip(time) if plan.reverse else x, first, weights, b is not None, 1, 0.0, x.requires_grad,
            plan.directions == 2, plan.batch_first,
        )  # fmt: skip
        if plan.reverse:
            y = y.flip(time)
        y = y.unflatten(2, (plan.directions, plan.hidden))
        results = (y, *(s.transpose(0, 1) for s in last)) if plan.batch_first else (y.transpose(1, 2), *last)
        return select(results, plan.wanted)

    return run


def _step_by_step(plan: Recurrent) -> Function:
    def run(x: torch.Tensor, *rest: Any) -> Any:
        functions = RecurrenceFunctions(
            torch.mm, torch.t, torch.sigmoid, torch.tanh, lambda t, n: t.chunk(n, -1), torch.stack,
            lambda matrix, columns: x.new_zeros(matrix.shape[0], columns),
        )  # fmt: skip
        return select(unrolled(plan, functions, x, *rest), plan.wanted)

    return run


gru = lstm = recurrent
