"""ONNX on PyTorch: attention.

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
    """Return (batch, heads, steps, size) of a tensor that may be (batch, steps, heads x size)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2) if plan.split_heads else x
