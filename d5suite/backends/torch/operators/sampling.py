"""ONNX on PyTorch: images sampled at the points of a grid.

Imports PyTorch, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from d5suite.backends.torch.operators.context import Context, Function, in_float32
from d5suite.network import Node
from d5suite.network.nodes.sampling import SamplingFunctions, read_grid_sample, taps

_MODES = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}

_FUNCTIONS = SamplingFunctions(torch.floor, torch.round, torch.abs, torch.clamp, torch.Tensor.long)


def grid_sample(node: Node, context: Context) -> Function:
    """Return PyTorch's kernel or, where it has none, a sum over the cells near every point."""
    plan = read_grid_sample(node, context)
    axes = len(plan.sizes)
    if axes == 2 or (axes == 3 and plan.mode != "cubic"):
        settings = _MODES[plan.mode], plan.padding, plan.aligned
        return lambda x, grid: F.grid_sample(in_float32(x), in_float32(grid), *settings).to(x.dtype)

    def run(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        rows, points = in_float32(x).flatten(2), in_float32(grid).flatten(1, -2).unbind(-1)
        y = torch.zeros((), dtype=rows.dtype, device=rows.device)
        for tap in taps(plan, _FUNCTIONS, points):
            cells = tap.cell.unsqueeze(1).expand(-1, plan.channels, -1)
            y = y + torch.gather(rows, 2, cells) * tap.weight.unsqueeze(1)
        return y.reshape(*x.shape[:2], *plan.outputs).to(x.dtype)

    return run
