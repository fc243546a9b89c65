"""Nodes that move data: axes, sizes and padding.

Imports NumPy, `d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.graph import Shape
from d5suite.network.nodes import layouts
from d5suite.network.nodes.context import NodeContext


def read_axis(node: Node, context: NodeContext) -> int:
    """Return the non-negative axis that a node's attribute names."""
    axis: int = node.attributes["axis"]
    return axis % context.rank(node.inputs[0])


def read_axes(node: Node, context: NodeContext, rank: int, index: int = 1) -> tuple[int, ...] | None:
    """Return the sorted non-negative axes in an input; None if it is omitted."""
    axes = context.constant(node, index)
    return None if axes is None else tuple(sorted(int(axis) % rank for axis in axes))


def read_squeeze(node: Node, context: NodeContext) -> tuple[int, ...]:
    """Return the axes that a Squeeze removes; by default all axes known to have size 1."""
    shape = context.shape(node.inputs[0])
    axes = read_axes(node, context, len(shape))
    return tuple(axis for axis, size in enumerate(shape) if size == 1) if axes is None else axes


def read_unsqueeze(node: Node, context: NodeContext) -> tuple[int, ...]:
    """Return the axes of the output that an Unsqueeze adds."""
    added = context.constant(node, 1)
    return read_axes(node, context, context.rank(node.inputs[0]) + (0 if added is None else len(added))) or ()


def read_transpose(node: Node, context: NodeContext) -> tuple[int, ...]:
    """Return the permutation of a Transpose."""
    return tuple(node.attributes.get("perm") or reversed(range(context.rank(node.inputs[0]))))


def read_flatten(node: Node, context: NodeContext) -> tuple[int, int]:
    """Return the two sizes of a Flatten; -1 for a size that follows from the other.

    Raises
    ------
    NetworkError
        If neither size is known.
    """
    shape = context.shape(node.inputs[0])
    axis: int = node.attributes["axis"]
    axis += len(shape) if axis < 0 else 0
    rows, columns = (None if None in part else math.prod(n or 0 for n in part) for part in (shape[:axis], shape[axis:]))
    if columns:
        return (-1 if axis else 1), columns
    if rows:
        return rows, -1
    if rows is None or columns is None:
        raise NetworkError(f"Flatten of shape {list(shape)} at axis {axis} is not implemented", where=node.name)
    return rows, columns


@dataclass(frozen=True)
class Reshape:
    """A Reshape.

    Attributes
    ----------
    sizes : tuple of int
        Target shape, with copied sizes resolved: at most one is -1, and 0 is a size.
    splits, merges : bool
        Whether it only splits channels into groups, (N, C, spatial) to (N, groups, channels,
        spatial), or merges them again. Data stored channels-last then stay in place.
    """

    sizes: tuple[int, ...]
    splits: bool
    merges: bool


def read_reshape(node: Node, context: NodeContext) -> Reshape:
    """Read a Reshape.

    Raises
    ------
    NetworkError
        If two sizes of the target are unknown.
    """
    shape = context.shape(node.inputs[0])
    wanted = context.constant(node, 1)
    assert wanted is not None  # ONNX has no default
    copies = not node.attributes["allowzero"]
    sizes: list[int | None] = [shape[i] if n == 0 and copies else int(n) for i, n in enumerate(wanted)]
    if None in sizes and -1 in sizes and shape.count(None) == 1:  # the inferred size follows from the known ones
        known = math.prod(n for n in shape if n is not None)
        sizes[sizes.index(-1)] = known // math.prod(n for n in sizes if n is not None and n > 0)
    target = tuple(-1 if n is None else n for n in sizes)
    if target.count(-1) > 1:
        raise NetworkError(f"Reshape of shape {list(shape)} to {wanted.tolist()} is not implemented", where=node.name)
    found: Shape = context.shapes.get(node.outputs[0], tuple(sizes))
    return Reshape(target, layouts.splits_channels(shape, found), layouts.splits_channels(found, shape))


def read_stored_reshape(node: Node, context: layouts.LayoutContext) -> tuple[layouts.Layout, tuple[int, ...]]:
    """Return the layout in which a Reshape takes its input, and its target shape as stored.

    Splitting or merging the channels leaves them last (ShuffleNet). Sets the output's layout.
    """
    plan, rank, layout = read_reshape(node, context), context.rank(node.inputs[0]), context.layout(node.inputs[0])
    entered, stored = layouts.identity(rank), layouts.identity(len(plan.sizes))
    if plan.splits and layout == layouts.channels_last(rank):
        entered, stored = layout, layouts.grouped_channels_last(rank + 1)
    elif plan.merges and layout != entered:
        entered, stored = layouts.grouped_channels_last(rank), layouts.channels_last(rank - 1)
    context.layouts[node.outputs[0]] = stored
    return entered, tuple(plan.sizes[axis] for axis in stored)


@dataclass(frozen=True)
class Gather:
    """A Gather.

    Attributes
    ----------
    axis : int
    size : int or None
        Size of the data on that axis.
    wraps : bool
        Whether indices may be negative and count from the end.
    is_embedding : bool
        Whether non-negative indices look up rows of a matrix.
    """

    axis: int
    size: int | None
    wraps: bool
    is_embedding: bool


def read_gather(node: Node, context: NodeContext) -> Gather:
    """Read a Gather."""
    shape, axis = context.shape(node.inputs[0]), read_axis(node, context)
    wraps = node.inputs[1] not in context.non_negative
    return Gather(axis, shape[axis], wraps, axis == 0 and len(shape) == 2 and not wraps)


@dataclass(frozen=True)
class Slice:
    """A Slice: reverse some axes, then cut with positive steps.

    Attributes
    ----------
    reversed : tuple of int
    cuts : tuple of slice
        One per axis.
    """

    reversed: tuple[int, ...]
    cuts: tuple[slice, ...]


def read_slice(node: Node, context: NodeContext) -> Slice:
    """Read a Slice.

    Raises
    ------
    NetworkError
        If bounds of an axis of unknown size count from its end.
    """
    shape = context.shape(node.inputs[0])
    starts, ends, axes, steps = (context.constant(node, index) for index in (1, 2, 3, 4))
    assert starts is not None and ends is not None  # ONNX has no default
    named = range(len(starts)) if axes is None else [int(axis) % len(shape) for axis in axes]
    strides = [1] * len(starts) if steps is None else [int(step) for step in steps]
    cuts, backwards = [slice(None)] * len(shape), []
    for axis, start, end, step in zip(named, map(int, starts), map(int, ends), strides, strict=True):
        size = shape[axis]
        if size is None:
            if min(start, end, step) < 0 or end < np.iinfo(np.int32).max:
                raise NetworkError(f"Slice of an unknown size from {start} to {end}", where=node.name)
            cuts[axis] = slice(start, None, step)
            continue
        found = range(size)[slice(start, end, step)]
        if step < 0:
            backwards.append(axis)
            found = range(size - 1 - found.start, size - 1 - found.stop, -step)
        cuts[axis] = slice(found.start, max(found.start, found.stop), found.step)
    return Slice(tuple(backwards), tuple(cuts))


def read_expand(node: Node, context: NodeContext) -> tuple[int, ...]:
    """Return an Expand's sizes for every axis of its output; 1 leaves the input's size."""
    wanted = context.constant(node, 1)
    assert wanted is not None  # ONNX has no default
    return (*[1] * (context.rank(node.inputs[0]) - len(wanted)), *map(int, wanted))


def read_tile(node: Node, context: NodeContext) -> tuple[int, ...]:
    """Return the number of repeats of every axis in a Tile."""
    repeats = context.constant(node, 1)
    assert repeats is not None  # ONNX has no default
    return tuple(map(int, repeats))


def read_split(node: Node, context: NodeContext) -> tuple[int, tuple[int, ...]]:
    """Return the axis of a Split and the sizes of its parts."""
    axis = read_axis(node, context)
    return axis, tuple(context.shape(name)[axis] or 0 for name in node.outputs)


def read_trilu(node: Node, context: NodeContext) -> tuple[bool, int]:
    """Return whether a Trilu keeps the upper triangle, and the number of its diagonal."""
    diagonal = context.constant(node, 1)
    return bool(node.attributes["upper"]), 0 if diagonal is None else int(diagonal.item())


def read_triangle(node: Node, context: NodeContext) -> np.ndarray:
    """Return where a Trilu keeps its input: bool, (rows, columns).

    Raises
    ------
    NetworkError
        If the size of a matrix is unknown.
    """
    upper, diagonal = read_trilu(node, context)
    *_, rows, columns = context.shape(node.inputs[0])
    if rows is None or columns is None:
        raise NetworkError("Trilu of an unknown size is not implemented", where=node.name)
    return np.tri(rows, columns, diagonal - 1 if upper else diagonal, bool) != upper


@dataclass(frozen=True)
class Blocks:
    """A DepthToSpace or SpaceToDepth: a reshape, a transposition and a reshape.

    Attributes
    ----------
    size : int
        Size of a block along both axes.
    depth_first : bool
        Whether the depth is ``DCR``, (block, block, channels), or (channels, block, block).
    split, merged : tuple of int
        Target shapes of the two reshapes, with -1 for the batch.
    order : tuple of int
        Permutation of the six axes between the reshapes.
    """

    size: int
    depth_first: bool
    split: tuple[int, ...]
    order: tuple[int, ...]
    merged: tuple[int, ...]


def read_blocks(node: Node, context: NodeContext, *, last: bool = False) -> Blocks:
    """Read a DepthToSpace or SpaceToDepth of images in ONNX's layout, or with channels ``last``.

    Raises
    ------
    NetworkError
        If the size of the image is unknown.
    """
    (_, *sizes), b = context.shape(node.inputs[0]), node.attributes["blocksize"]
    if None in sizes:
        raise NetworkError(f"{node.op_type} of an unknown size is not implemented", where=node.name)
    depth, height, width = (n or 0 for n in sizes)
    depth_first = node.attributes.get("mode", "DCR") == "DCR"
    blocks = "yxc" if depth_first else "cyx"  # rows and columns of a block, and channels
    if node.op_type == "DepthToSpace":
        depth //= b * b
        split, merged = f"hw{blocks}" if last else f"{blocks}hw", ["c", "hy", "wx"]
    else:
        height, width = height // b, width // b
        split, merged = "hywxc" if last else "chywx", [blocks, "h", "w"]
    if last:
        merged = [*merged[1:], merged[0]]
    lengths = {"c": depth, "h": height, "w": width, "y": b, "x": b}
    order = (split.index(axis) + 1 for axis in "".join(merged))
    wanted = (math.prod(lengths[axis] for axis in axes) for axes in merged)
    return Blocks(b, depth_first, (-1, *(lengths[axis] for axis in split)), (0, *order), (-1, *wanted))


@dataclass(frozen=True)
class Pad:
    """A Pad.

    Attributes
    ----------
    mode : str
        ``constant``, ``edge``, ``reflect`` or ``wrap``.
    widths : tuple of (int, int)
        Cells before and after, for each axis; negative ones are cropped.
    value : float or int
        The constant.
    """

    mode: str
    widths: tuple[tuple[int, int], ...]
    value: Any

    @property
    def added(self) -> tuple[tuple[int, int], ...]:
        """Cells added before and after, for every axis."""
        return tuple((max(before, 0), max(after, 0)) for before, after in self.widths)

    @property
    def kept(self) -> tuple[slice, ...]:
        """The part of every axis that remains after cropping by negative widths."""
        return tuple(slice(max(-before, 0), min(after, 0) or None) for before, after in self.widths)

    def rows(self, shape: Shape) -> dict[int, np.ndarray]:
        """Return the input index of every output index, by padded axis: int64.

        Raises
        ------
        NetworkError
            If the size of a padded axis is unknown.
        """
        found = {}
        for axis, (width, size) in enumerate(zip(self.widths, shape, strict=True)):
            if any(width):
                if size is None:
                    raise NetworkError(f"Pad with mode {self.mode!r} of an unknown size is not implemented")
                found[axis] = np.pad(np.arange(size), width, self.mode)  # type: ignore[call-overload]
        return found


def read_pad(node: Node, context: NodeContext) -> Pad:
    """Read a Pad.

    Raises
    ------
    NetworkError
        If a width is negative and the mode is not ``constant``.
    """
    rank = context.rank(node.inputs[0])
    amounts, value, axes = (context.constant(node, index) for index in (1, 2, 3))
    assert amounts is not None  # ONNX has no default
    if node.attributes["mode"] != "constant" and min(amounts, default=0) < 0:
        raise NetworkError(f"negative padding: {amounts.tolist()}", where=node.name)
    padded = range(rank) if axes is None else [int(axis) % rank for axis in axes]
    widths = [(0, 0)] * rank
    for axis, before, after in zip(padded, amounts[: len(padded)], amounts[len(padded) :], strict=True):
        widths[axis] = (int(before), int(after))
    return Pad(node.attributes["mode"], tuple(widths), 0.0 if value is None else value.item())
