"""ONNX on PyTorch: attention, LSTM and GRU.

Imports PyTorch, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from d5suite.backends.torch.operators.context import Context, Function
from d5suite.network import Node
from d5suite.network.nodes.attention import BIASED, CAPPED, SCORES, WEIGHTS, Attention, read_attention
from d5suite.network.nodes.context import select
from d5suite.network.nodes.recurrent import CUDNN_GATES, RecurrenceFunctions, Recurrent, read_recurrent, unrolled


def attention(node: Node, context: Context) -> Function:
    plan = read_attention(node, context)
    dtype = getattr(torch, str(context.dtypes[node.inputs[0]]))
    bias = None if plan.bias is None else torch.as_tensor(plan.bias, dtype=dtype).to(context.device)
    grouped = plan.groups > 1
    if plan.plain:
        bias = None if plan.causal else bias

        def native(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
            q, k, v = _heads(q, plan.heads, plan), _heads(k, plan.kv_heads, plan), _heads(v, plan.kv_heads, plan)
            y = F.scaled_dot_product_attention(
                q, k, v, bias, is_causal=plan.causal, scale=plan.scale, enable_gqa=grouped
            )
            return y.transpose(1, 2).flatten(2) if plan.split_heads else y

        return native

    def general(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None,
        past_k: torch.Tensor | None = None, past_v: torch.Tensor | None = None, *_: Any,
    ) -> Any:  # fmt: skip
        q, k, v = _heads(q, plan.heads, plan), _heads(k, plan.kv_heads, plan), _heads(v, plan.kv_heads, plan)
        if past_k is not None and past_v is not None:
            k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
        present = k, v
        if grouped:
            k, v = (t.repeat_interleave(plan.groups, 1) for t in present)
        root = math.sqrt(plan.scale)
        scores = (q * root) @ (k * root).transpose(2, 3)
        shown = {SCORES: scores}
        if plan.softcap:
            scores = plan.softcap * torch.tanh(scores / plan.softcap)
        shown[CAPPED] = scores
        added = scores.new_zeros(()) if bias is None else bias
        if mask is not None:
            if plan.mask == "bool":
                mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -math.inf)
            added = added + F.pad(mask, (0, plan.mask_padding), value=-math.inf)
        scores = scores + added
        shown[BIASED] = scores
        weights = torch.softmax(scores.float() if scores.dtype == torch.float16 else scores, -1).to(q.dtype)
        if plan.may_be_blind:
            weights = weights.masked_fill(torch.isneginf(added.amax(-1, keepdim=True)), 0)
        shown[WEIGHTS] = weights
        y = weights @ v
        y = y.transpose(1, 2).flatten(2) if plan.split_heads else y
        return select((y, *present, shown.get(plan.shows)), plan.wanted)

    return general


def _heads(x: torch.Tensor, heads: int, plan: Attention) -> torch.Tensor:
    """Reshape merged heads, (batch, steps, heads x size), to (batch, heads, steps, size)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2) if plan.split_heads else x


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
