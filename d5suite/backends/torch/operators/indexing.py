"""ONNX on PyTorch: operators that look up, sample, rank, count and generate values.

Imports PyTorch, `d5suite.network` and `context` beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from d5suite.backends.torch.operators.context import Context, Function, in_float32
from d5suite.network import Node
from d5suite.network.nodes import indexing as nodes
from d5suite.network.nodes.context import select
from d5suite.network.nodes.sampling import SamplingFunctions, read_grid_sample, taps
from d5suite.network.nodes.shape import read_axis


def gather_elements(node: Node, context: Context) -> Function:
    plan = nodes.read_elements(node, context)
    axis, size = plan.axis, plan.size
    return lambda x, indices: torch.gather(x, axis, _from_start(indices, size))


def scatter_elements(node: Node, context: Context) -> Function:
    plan, reduction = nodes.read_elements(node, context), node.attributes["reduction"]
    axis, size = plan.axis, plan.size
    if reduction == "none":
        return lambda x, indices, updates: x.scatter(axis, _from_start(indices, size), updates)
    name = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[reduction]
    return lambda x, indices, updates: x.scatter_reduce(axis, _from_start(indices, size), updates, name)


def _from_start(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Convert negative indices, which count from the end, to indices from the start."""
    indices = indices.long()
    return torch.where(indices < 0, indices + size, indices)


def gather_nd(node: Node, context: Context) -> Function:
    plan = nodes.read_tuples(node, context)
    return lambda x, indices: x[_cells(indices, plan)]


def scatter_nd(node: Node, context: Context) -> Function:
    plan, reduction = nodes.read_tuples(node, context), node.attributes["reduction"]
    if reduction in ("none", "add"):
        accumulate = reduction == "add"
        return lambda x, indices, updates: x.index_put(_cells(indices, plan), updates, accumulate)
    name = {"mul": "prod", "max": "amax", "min": "amin"}[reduction]
    count = len(plan.sizes)

    def run(x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros_like(indices[..., 0])
        for column, size in zip(indices.long().unbind(-1), x.shape, strict=False):
            rows = rows * size + _from_start(column, size)
        places = rows.reshape(-1, *[1] * (x.dim() - count)).expand(-1, *x.shape[count:])
        found = x.flatten(0, count - 1).scatter_reduce(0, places, updates.reshape(places.shape), name)
        return found.reshape(x.shape)

    return run


def _cells(indices: torch.Tensor, plan: nodes.Tuples) -> tuple[torch.Tensor, ...]:
    """Return an index of the cells named by tuples of indices; PyTorch wraps negative ones."""
    places = [
        torch.arange(size, device=indices.device).reshape(-1, *[1] * (indices.dim() - 2 - axis))
        for axis, size in enumerate(indices.shape[: plan.batch])
    ]
    return (*places, *indices.long().unbind(-1))


def cum_sum(node: Node, context: Context) -> Function:
    axis, exclusive, reverse = nodes.read_cumulative(node, context)

    def run(x: torch.Tensor, *_: Any) -> torch.Tensor:
        x = x.flip(axis) if reverse else x
        y = torch.cumsum(x, axis, dtype=x.dtype)
        if exclusive:
            y = torch.cat((torch.zeros_like(y.narrow(axis, 0, 1)), y.narrow(axis, 0, y.shape[axis] - 1)), axis)
        return y.flip(axis) if reverse else y

    return run


def top_k(node: Node, context: Context) -> Function:
    plan, wanted = nodes.read_extreme(node, context), context.wanted(node)
    axis, count, largest = plan.axis, plan.count, plan.largest
    if not any(wanted[1:]):
        return lambda x, _: torch.topk(x, count, axis, largest).values

    def ranked(x: torch.Tensor, _: Any) -> Any:
        # Of equal values ONNX takes the first; `torch.topk` takes any.
        values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
        return select((values.narrow(axis, 0, count), indices.narrow(axis, 0, count)), wanted)

    return ranked


def extreme(node: Node, context: Context) -> Function:
    plan = nodes.read_extreme(node, context)
    axis, keep, function = plan.axis, plan.keep, torch.argmax if plan.largest else torch.argmin
    if plan.last:
        return lambda x: x.shape[axis] - 1 - function(x.flip(axis), axis, keep)
    return lambda x: function(x, axis, keep)


def hardmax(node: Node, context: Context) -> Function:
    axis = read_axis(node, context)
    return lambda x: torch.zeros_like(x).scatter(axis, torch.argmax(x, axis, True), 1)


def reverse_sequence(node: Node, context: Context) -> Function:
    time, batch = nodes.read_reverse(node)

    def run(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        lengths = lengths.unsqueeze(time)  # the other of the first two axes is the batch
        steps = torch.arange(x.shape[time], device=x.device).unsqueeze(batch)
        rows = torch.where(steps < lengths, lengths - 1 - steps, steps)
        return torch.gather(x, time, rows.reshape(*rows.shape, *[1] * (x.dim() - 2)).expand_as(x))

    return run


def one_hot(node: Node, context: Context) -> Function:
    axis, depth = nodes.read_one_hot(node, context)

    def run(indices: torch.Tensor, _: Any, values: torch.Tensor) -> torch.Tensor:
        classes = torch.arange(depth, device=indices.device).reshape(-1, *[1] * (indices.dim() - axis))
        return torch.where(_from_start(indices, depth).unsqueeze(axis) == classes, values[1], values[0])

    return run


def range_(node: Node, context: Context) -> Function:
    start, limit, delta, dtype = nodes.read_range(node, context)
    settings = {"dtype": getattr(torch, dtype.name), "device": context.device}
    return lambda *_: torch.arange(start, limit, delta, **settings)


def constant_of_shape(node: Node, context: Context) -> Function:
    sizes, value, dtype = nodes.read_constant_of_shape(node, context)
    settings = {"dtype": getattr(torch, dtype.name), "device": context.device}
    return lambda *_: torch.full(sizes, value, **settings)


def eye_like(node: Node, context: Context) -> Function:
    diagonal, dtype = nodes.read_eye(node, context)
    kind = getattr(torch, dtype.name)

    def run(x: torch.Tensor) -> torch.Tensor:
        rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
        return (columns - rows.unsqueeze(1) == diagonal).to(kind)

    return run


def shape(node: Node, context: Context) -> Function:
    axes = nodes.read_shape(node, context)
    return lambda x: torch.tensor([x.shape[axis] for axis in axes], dtype=torch.int64)


arg_max = arg_min = extreme


_MODES = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}

_FUNCTIONS = SamplingFunctions(torch.floor, torch.round, torch.abs, torch.clamp, torch.Tensor.long)


def grid_sample(node: Node, context: Context) -> Function:
    """Return PyTorch's kernel or, if it has none, a weighted sum over the cells near each point."""
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
