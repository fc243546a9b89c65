"""ONNX on MXNet: operators that move data and compute nothing.

Imports NumPy, `d5suite.errors`, `d5suite.network`, and `context` and `elementwise` beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from d5suite.backends.mxnet.operators.context import Call, Context, in_order, padded
from d5suite.backends.mxnet.operators.elementwise import identity
from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes import shape as nodes
from d5suite.network.nodes.resize import read_resize


def concat(node: Node, context: Context) -> Call:
    axis = nodes.read_axis(node, context)
    if _cuts_blocks(node, context, axis):
        return lambda F, *parts: in_order(F, F.concat(*parts, dim=axis))
    return lambda F, *parts: F.concat(*parts, dim=axis)


def _cuts_blocks(node: Node, context: Context, axis: int) -> bool:
    """Return whether a gradient stored in blocks is split within a block (docs/findings.md)."""
    if axis != 1 or node.outputs[0] not in context.in_blocks:
        return False
    widths = [context.shape(name)[1] for name in node.inputs]
    block = 8 if None in widths or sum(n or 0 for n in widths) % 16 else 16
    return any(n is None or n % block for n in widths)


def flatten(node: Node, context: Context) -> Call:
    if node.attributes["axis"] == 1:
        return lambda F, x: F.flatten(x)
    sizes = nodes.read_flatten(node, context)
    return lambda F, x: F.reshape(x, shape=sizes)


def reshape(node: Node, context: Context) -> Call:
    sizes = nodes.read_reshape(node, context).sizes or (1,)  # a number is an array of one
    if 0 in sizes:
        raise NetworkError(f"Reshape to {list(sizes)} is not implemented: MXNet has no such arrays", where=node.name)
    # A transpose after it also fails where oneDNN stores volumes in blocks.
    ahead = in_order if context.rank(node.inputs[0]) == 5 else _alone
    behind = in_order if _fails_in_blocks(node, context) else _alone
    return lambda F, x, _: behind(F, F.reshape(ahead(F, x), shape=sizes))


def _alone(F: Any, x: Any) -> Any:
    return x


def _fails_in_blocks(node: Node, context: Context) -> bool:
    """Return whether a transpose before this node gets its gradient in another shape's blocks.

    Then it fails (docs/findings.md). With five axes, as in a shuffle of channels, `reshape` copies
    already; with six, results were right.
    """
    if node.outputs[0] not in context.in_blocks:
        return False
    return context.rank(node.inputs[0]) < 5 or context.rank(node.outputs[0]) > 4


def transpose(node: Node, context: Context) -> Call:
    order, shape = nodes.read_transpose(node, context), context.shape(node.inputs[0])
    if len(order) <= 6 or shape.count(None) > 1:
        return lambda F, x: F.transpose(x, axes=order)
    # MXNet moves at most six axes; those that stay together are one.
    runs: list[list[int]] = []
    for axis in order:
        if runs and runs[-1][-1] + 1 == axis:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    stored = sorted(runs)
    sizes = [
        -1 if None in (parts := [shape[axis] for axis in run]) else math.prod(n or 0 for n in parts) for run in stored
    ]
    moved, result = [stored.index(run) for run in runs], [shape[axis] or -1 for axis in order]
    return lambda F, x: F.reshape(F.transpose(F.reshape(x, shape=sizes), axes=moved), shape=result)


def squeeze(node: Node, context: Context) -> Call:
    axes = nodes.read_squeeze(node, context)
    if axes and _fails_in_blocks(node, context):
        return lambda F, x, *_: in_order(F, F.squeeze(x, axis=axes))
    return (lambda F, x, *_: F.squeeze(x, axis=axes)) if axes else identity(node, context)


def unsqueeze(node: Node, context: Context) -> Call:
    axes = nodes.read_unsqueeze(node, context)
    if context.shapes.get(node.inputs[0]) == ():  # an array of one
        return lambda F, x, _: F.reshape(x, shape=(1,) * len(axes))
    behind = in_order if _fails_in_blocks(node, context) else _alone
    return lambda F, x, _: behind(F, reduce(lambda y, axis: F.expand_dims(y, axis=axis), axes, x))


def gather(node: Node, context: Context) -> Call:
    plan = nodes.read_gather(node, context)
    axis, numbers = plan.axis, context.numbers(node.inputs[0])
    if plan.wraps:
        return lambda F, x, i: F.take(numbers(F, x), i, axis=axis, mode="wrap")
    if plan.is_embedding:
        (rows, columns), dtype = context.shape(node.inputs[0]), context.type_of(node.inputs[0])
        return lambda F, x, i: F.Embedding(i, numbers(F, x), input_dim=rows, output_dim=columns, dtype=dtype)
    return lambda F, x, i: F.take(numbers(F, x), i, axis=axis)


def slice_(node: Node, context: Context) -> Call:
    """Cut channels separately: ``slice`` fails if they are stored in blocks (docs/findings.md)."""
    plan = nodes.read_slice(node, context)
    cuts = list(plan.cuts)
    # slice_axis makes no empty array.
    channels = cuts[1] if len(cuts) > 1 and cuts[1].step == 1 and cuts[1].start != cuts[1].stop else None
    if channels is not None:
        cuts[1] = slice(None)
    more = channels is None or any(cut != slice(None) for cut in cuts)
    begin, end, step = ([getattr(cut, part) for cut in cuts] for part in ("start", "stop", "step"))

    def call(F: Any, x: Any, *_: Any) -> Any:
        x = reduce(lambda y, axis: F.reverse(y, axis=axis), plan.reversed, x)
        if channels is not None:
            x = F.slice_axis(x, axis=1, begin=channels.start, end=channels.stop)
        return cut(F, x) if more else x

    def cut(F: Any, x: Any) -> Any:
        if len(cuts) < 6 or any(each not in (None, 1) for each in step):
            return F.slice(x, begin, end, step)
        parts = [(axis, each) for axis, each in enumerate(cuts) if each != slice(None)]
        return reduce(lambda y, part: F.slice_axis(y, axis=part[0], begin=part[1].start, end=part[1].stop), parts, x)

    return call


def pad(node: Node, context: Context) -> Call:
    plan = nodes.read_pad(node, context)
    if plan.mode != "constant":
        return _pad_by_itself(node, context, plan)
    return lambda F, x, *_: padded(F, x, plan.widths, float(plan.value))


def _pad_by_itself(node: Node, context: Context, plan: nodes.Pad) -> Call:
    """Pad with the tensor's own cells: by MXNet's operator if it can, else slice by slice."""
    shape, mode = context.shape(node.inputs[0]), plan.mode
    if len(shape) in (4, 5) and not any(map(any, plan.widths[:2])) and not context.is_integer(node.inputs[0]):
        fits = all(n is not None and max(width) < n for n, width in list(zip(shape, plan.widths, strict=True))[2:])
        if mode == "edge" or (mode == "reflect" and fits):
            widths = tuple(itertools.chain(*plan.widths))
            return lambda F, x, *_: F.pad(x, mode=mode, pad_width=widths)
    runs = {axis: _runs(rows) for axis, rows in plan.rows(shape).items()}
    return lambda F, x, *_: reduce(lambda y, axis: _rearranged(F, y, axis, runs[axis]), runs, x)


def _runs(rows: np.ndarray) -> list[tuple[int, int, int]]:
    """Split indices into runs (first index, step, length) with steps 1, -1 or 0."""
    runs: list[tuple[int, int, int]] = []
    for row in rows.tolist():
        if runs:
            first, step, length = runs[-1]
            if length == 1 and abs(row - first) <= 1:
                runs[-1] = first, row - first, 2
                continue
            if length > 1 and row == first + step * length:
                runs[-1] = first, step, length + 1
                continue
        runs.append((row, 1, 1))
    return runs


def _rearranged(F: Any, x: Any, axis: int, runs: Sequence[tuple[int, int, int]]) -> Any:
    """Return the tensor's cells along an axis in the order of `_runs`."""
    parts = []
    for first, step, length in runs:
        last = first + step * (length - 1)
        part = F.slice_axis(x, axis=axis, begin=min(first, last), end=max(first, last) + 1)
        if step == 0:
            part = F.broadcast_axis(part, axis=axis, size=length)
        parts.append(F.reverse(part, axis=axis) if step < 0 else part)
    return parts[0] if len(parts) == 1 else F.concat(*parts, dim=axis)


def expand(node: Node, context: Context) -> Call:
    sizes, rank = nodes.read_expand(node, context), context.rank(node.inputs[0])
    target = tuple(0 if size == 1 else size for size in sizes)  # 0 leaves the input's size

    def run(F: Any, x: Any, _: Any) -> Any:
        for _ in range(len(sizes) - rank):
            x = F.expand_dims(x, axis=0)
        return F.broadcast_to(x, shape=target)

    return run


def tile(node: Node, context: Context) -> Call:
    repeats = nodes.read_tile(node, context)
    # One axis at a time: MXNet's operator fails if it repeats more than a few.
    steps = [[n if axis == i else 1 for i in range(len(repeats))] for axis, n in enumerate(repeats) if n != 1]
    return lambda F, x, _: reduce(lambda y, step: F.tile(y, reps=step), steps, x)


def split(node: Node, context: Context) -> Call:
    axis, sizes = nodes.read_split(node, context)
    ends = list(itertools.accumulate(sizes))
    return lambda F, x, *_: tuple(
        F.slice_axis(x, axis=axis, begin=end - size, end=end) for size, end in zip(sizes, ends, strict=True)
    )


def trilu(node: Node, context: Context) -> Call:
    context.keep(node, nodes.read_triangle(node, context).astype(context.dtype))
    dtype = context.dtype

    def run(F: Any, x: Any, *rest: Any) -> Any:
        zeros = F.zeros_like(x)
        return F.where(F.broadcast_add(F.cast(zeros, dtype), rest[-1]), x, zeros)

    return run


def blocks(node: Node, context: Context) -> Call:
    """DepthToSpace and SpaceToDepth."""
    plan = nodes.read_blocks(node, context)
    if plan.depth_first:
        name = "depth_to_space" if node.op_type == "DepthToSpace" else "space_to_depth"
        return lambda F, x: getattr(F, name)(x, block_size=plan.size)
    return lambda F, x: F.reshape(F.transpose(F.reshape(x, shape=plan.split), axes=plan.order), shape=plan.merged)


def resize(node: Node, context: Context) -> Call:
    plan = read_resize(node, context)
    factors, rank = plan.factors(), len(plan.sizes)
    if not plan.rows and not plan.weights:
        return identity(node, context)
    if plan.mode == "nearest" and factors is not None:
        return lambda F, x, *_: reduce(lambda y, axis: F.repeat(y, repeats=factors[axis], axis=axis), factors, x)
    if plan.mode == "nearest":
        runs = {axis: _runs(rows) for axis, rows in plan.rows.items()}
        return lambda F, x, *_: reduce(lambda y, axis: _rearranged(F, y, axis, runs[axis]), runs, x)
    if plan.aligned is not None and plan.mode == "linear" and rank == 4 and context.dtype != "float64":
        (height, width), aligned = plan.sizes[2:], plan.aligned  # in float64 the kernel rounds the scale
        return lambda F, x, *_: F.contrib.BilinearResize2D(x, height=height, width=width, align_corners=aligned)
    matrices = {axis: matrix.T for axis, matrix in plan.weights.items()}
    context.keep(node, np.concatenate([matrix.ravel() for matrix in matrices.values()]).astype(context.dtype))

    def call(F: Any, x: Any, *rest: Any) -> Any:
        start = 0
        for axis, matrix in matrices.items():
            part = F.slice_axis(rest[-1], axis=0, begin=start, end=start + matrix.size)
            start += matrix.size
            there = [*(i for i in range(rank) if i != axis), axis]
            product = F.dot(F.transpose(x, axes=there), F.reshape(part, shape=matrix.shape))
            x = F.transpose(product, axes=tuple(np.argsort(there).tolist()))
        return x

    return call


depth_to_space = space_to_depth = blocks
