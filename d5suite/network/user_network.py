"""A user's own network: which loss fits, and which values its inputs accept.

May import ONNX, NumPy and, from d5suite, `errors` and `network`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from d5suite.errors import ConfigurationError, NetworkError, UnreadNetworkError
from d5suite.network.analysis import differentiated
from d5suite.network.as_written import load_as_written
from d5suite.network.given_inputs import Given, check_inputs
from d5suite.network.graph import Node
from d5suite.network.model import Network
from d5suite.network.normalise import shapes_at

_MOVES = frozenset({"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Tile", "Transpose",
                    "Unsqueeze"})  # fmt: skip
"""Operators whose output holds the values of their first input."""


@dataclass(frozen=True)
class UserNetwork:
    """A user's network, as it is measured.

    Attributes
    ----------
    network : Network
        With a loss, if one fits.
    untrainable : str
        Why no loss fits, or ``""``.
    loss : str
        The loss in words, with its outputs, or ``""``.
    fixed : tuple of str
        Inputs of one element whose value the user gave; the network has them as constants.
    unread : str
        Why d5suite does not read the file, or ``""``. The network is then a
        `d5suite.network.as_written.WrittenNetwork`.
    """

    network: Network
    untrainable: str
    loss: str = ""
    fixed: tuple[str, ...] = ()
    unread: str = ""

    def check_inputs(self, given: Mapping[str, Given], sample: Mapping[str, np.ndarray]) -> None:
        """Check what a user gives its inputs; see `d5suite.network.given_inputs.check_inputs`."""
        rows = {name: _table(self.network, name) for name in self.network.inputs}
        tables = {name: count for name, count in rows.items() if count}
        check_inputs(self.network, given, sample, fixed=self.fixed, tables=tables)


def parse_shapes(given: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Parse texts like ``INPUT=NxCxHxW``, one per input.

    Raises
    ------
    ConfigurationError
        If a text has another form, or two are for the same input.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for text in given:
        name, _, sizes = text.rpartition("=")
        if not name or not all(
            size.isascii() and size.isdecimal() and 0 < int(size) < 1 << 31 for size in sizes.split("x")
        ):
            raise ConfigurationError(
                f"{text!r} is not an input with its dimensions", where="--shape", hint="Write input=1x3x224x224."
            )
        if name in shapes:
            raise ConfigurationError(f"input {name!r} has two shapes", where="--shape")
        shapes[name] = tuple(int(size) for size in sizes.split("x"))
    return shapes


def load_user_network(
    path: str | Path,
    *,
    shapes: Mapping[str, Sequence[int]],
    batch_size: int,
    given: Mapping[str, Given] | None = None,
) -> UserNetwork:
    """Read a user's network and add a loss.

    The loss is softmax cross-entropy of the first output of class scores; without such an output,
    the squared error of all floating-point outputs. A valid ONNX file that d5suite does not read is
    kept as written.

    Parameters
    ----------
    path : str or Path
        An ``.onnx`` file.
    shapes : mapping of str to sequence of int
        Dimensions by input, where the model leaves them open.
    batch_size : int
        Used where the batch is open and the graph needs its size.
    given : mapping of str to Given, optional
        Values of inputs; see `Network.load`.

    Raises
    ------
    NetworkError
        If it is not valid ONNX, or an input's dimensions are not known.
    """
    try:
        network = Network.load(path, shapes=shapes, given=given)
    except UnreadNetworkError as error:
        return _as_written(path, shapes, given, error)
    _require_sizes(network, path)
    fixed = network.fixed
    if network.batch_size is None and (_needs_batch(network) or _has_other_rows(network, batch_size)):
        network = Network.load(path, shapes={**shapes, **_with_batch(network, batch_size)}, given=given)
    outputs, untrainable = _trained_outputs(network)
    if untrainable:
        return UserNetwork(network, untrainable, fixed=fixed)
    output, axis = _classifying(network, outputs)
    if output:
        if output != network.output:
            stated = {**shapes, **({} if network.batch_size is None else _with_batch(network, batch_size))}
            network = Network.load(path, shapes=stated, given=given, output=output)
        return UserNetwork(network.with_classification_loss(axis), "", f"softmax cross-entropy of {output}", fixed)
    compared = _compared(network, outputs)
    if not compared:
        shown = "; ".join(f"{name} ({', '.join(str(n or '?') for n in network.shapes.get(name, ()))})"
                          for name in outputs)  # fmt: skip
        reason = f"no output has the batch as its first axis, and other axes that are known: {shown}"
        return UserNetwork(network, reason, fixed=fixed)
    loss = f"squared error of {', '.join(compared)}"
    return UserNetwork(network.with_squared_error(compared), "", loss, fixed)


def _as_written(
    path: str | Path, shapes: Mapping[str, Sequence[int]], given: Mapping[str, Given] | None, error: UnreadNetworkError
) -> UserNetwork:
    """Return the network as the file states it; raise ``error`` if the file is not valid ONNX."""
    try:
        network = load_as_written(path, shapes=shapes, given=given)
    except NetworkError:
        raise error from None
    _require_sizes(network, path)
    unread = f"d5suite does not read {Path(path).name}: {error.what}"
    return UserNetwork(network, unread, fixed=network.fixed, unread=unread)


def _require_sizes(network: Network, path: str | Path) -> None:
    """Raise `NetworkError` if an input has an open dimension other than the batch."""
    for name in network.inputs:
        shape = network.shapes[name]
        if None in (shape[1:] if network.batched else shape):
            sizes = ", ".join("?" if size is None else str(size) for size in shape)
            known = "x".join(str(size or "N") for size in shape)
            raise NetworkError(
                f"input {name!r} has shape ({sizes}), with dimensions that the file leaves open",
                where=str(path),
                hint=f"State them: --shape {name}={known}, with a number for each N.",
            )


def _has_other_rows(network: Network, batch_size: int) -> bool:
    """Return whether an output has an open first axis that is not the batch, such as boxes."""
    if not network.batched:
        return False
    batch = max(batch_size, 2)
    shapes = shapes_at(network.model, network.name, _with_batch(network, batch))
    opened = [name for name in network.outputs if network.shapes.get(name, ())[:1] == (None,)]
    return any(shapes.get(name, (None,))[:1] not in ((batch,), (None,)) for name in opened)


def _with_batch(network: Network, batch_size: int) -> dict[str, list[int]]:
    """Return the shapes of all inputs, with this batch where it is open."""
    return {name: [size or batch_size for size in network.shapes[name]] for name in network.inputs}


def _needs_batch(network: Network) -> bool:
    """Return whether the graph may use its batch size other than as the length of first axes."""
    shapes = [network.shapes.get(name) for node in network.nodes for name in node.outputs if name]
    computes = ("MaxUnpool", "ScatterElements", "ScatterND", "Shape", "Size", "Split")
    lengths = {n.inputs[4] for n in network.nodes if n.op_type in ("GRU", "LSTM") and len(n.inputs) > 4}
    return (
        any(node.op_type in computes or _cuts_batch(network, node) for node in network.nodes)
        or any(name in node.outputs for name in lengths - {""} for node in network.nodes)
        or any(shape is None or None in shape[1:] for shape in shapes)
    )


def _cuts_batch(network: Network, node: Node) -> bool:
    """Return whether a node cuts or pads an open first axis."""
    shape = network.shapes.get(node.inputs[0], ()) if node.inputs else ()
    if not shape or shape[0] is not None:
        return False
    if node.op_type == "Gather":
        return int(node.attributes["axis"]) % len(shape) == 0
    known = [network.initializers.get(name) if name else None for name in (*node.inputs, *[""] * 4)[:4]]
    if node.op_type == "Slice":
        axes = known[3] if known[3] is not None else range(0 if known[1] is None else len(known[1]))
        return any(int(axis) % len(shape) == 0 for axis in axes)
    if node.op_type == "Pad" and known[1] is not None:
        padded = range(len(shape)) if known[3] is None else [int(axis) % len(shape) for axis in known[3]]
        pads = known[1].reshape(2, -1)
        return any(axis == 0 and pads[:, place].any() for place, axis in enumerate(padded))
    return False


def _trained_outputs(network: Network) -> tuple[list[str], str]:
    """Return the floating-point outputs that depend on a parameter, or why there are none."""
    if not network.parameters:
        return [], "the network has no parameters"
    trained = differentiated(network)
    outputs = [name for name in network.outputs if name in trained]
    return outputs, "" if outputs else "no output of floating-point numbers depends on a parameter"


def _compared(network: Network, outputs: Sequence[str]) -> list[str]:
    """Return the outputs that a squared error takes: whole samples, of known sizes."""
    found = []
    for name in outputs:
        shape = network.shapes.get(name, (None, None))
        whole = shape[:1] == (network.batch_size,) if network.batched else None not in shape
        if whole and None not in shape[1:] and 0 not in shape and network.dtypes[name].kind == "f":
            found.append(name)
    return found


def _classifying(network: Network, outputs: Sequence[str]) -> tuple[str, int | None]:
    """Return the output that a classification loss fits, and the axis of its classes.

    The output is "" if none fits. The axis is None if a sample has one label.
    """
    if not network.batched:
        return "", None
    for name in outputs:
        shape = network.shapes.get(name, ())
        batch = network.batch_size
        if len(shape) == 2 and shape[0] == batch and (shape[1] or 0) > 1 and network.dtypes[name].kind == "f":
            return name, None
    for name in outputs:
        cells = _axis_of_cells(network, name)
        if cells is not None:
            return name, cells
    return "", None


def _axis_of_cells(network: Network, output: str) -> int | None:
    """Return the axis of an output's classes if it scores every token or pixel of an input."""
    shape = network.shapes.get(output, ())
    if not shape or None in shape[1:] or network.dtypes[output].kind != "f" or shape[0] != network.batch_size:
        return None
    for given in (network.shapes[name] for name in network.inputs):
        if len(shape) == 3 and len(given) in (2, 3) and shape[1] == given[1] and (shape[2] or 0) > 1:
            return 2  # (batch, tokens, classes)
        per_token = len(shape) == 3 and len(given) in (2, 3) and shape[2] == given[-1]
        per_pixel = len(shape) > 3 and len(given) == len(shape)
        if (per_token or per_pixel) and (shape[1] or 0) > 1:
            return 1  # (batch, classes, ...)
    return None


def input_ranges(network: Network) -> dict[str, tuple[int, int]]:
    """Return the range of random values of each input that does not take normal noise.

    A range is the first value and the one past the last. Integers that index tables of the graph
    get the range of the smallest table; other integers are 0 or 1 (see
    `d5suite.data.random_inputs.RandomInput`). A mask, recognised by its name, is all 1. A mask of
    padding (PyTorch's ``key_padding_mask``), which marks the tokens to ignore, is all 0.
    """
    found = {}
    for name in network.inputs:
        if "mask" in name.lower():
            found[name] = (0, 1) if "padding" in name.lower() else (1, 2)
        elif network.dtypes[name].kind != "f":
            found[name] = (0, _table(network, name) or 2)
    return found


def _table(network: Network, name: str) -> int | None:
    """Return the rows of the smallest table that an input indexes; None if it indexes none."""
    same, sizes = {name}, []
    for node in network.nodes:
        if node.op_type in _MOVES and node.inputs[0] in same:
            same.add(node.outputs[0])
        elif node.op_type in ("Gather", "GatherElements") and node.inputs[1] in same:
            shape = network.shapes.get(node.inputs[0], ())
            size = shape[node.attributes["axis"]] if shape else None
            sizes += [size] if size else []
    return min(sizes, default=None)
