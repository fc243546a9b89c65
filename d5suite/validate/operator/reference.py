"""Reference answers of one operator, and the file that stores them.

Imports h5py, NumPy and the contract; no framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

from d5suite.levels.operator import Operator
from d5suite.network.operation import Operation
from d5suite.validate.operator.oracle import OperatorOracle, direction
from d5suite.validate.operator.pieces import in_pieces, is_large

DIRECTIONS = 2
"""Number of random directions per input, or for all inputs of a large operation together. The
second guards against errors that cancel by chance."""

TOGETHER = -1
"""Key of all differentiable inputs together, instead of an input's number."""


@dataclass
class OperatorReference:
    """The reference of one operation's answers.

    Attributes
    ----------
    whole : bool
        Whether the reference covers the whole operation, or one piece in float64.
    outputs : list of numpy.ndarray
        The wanted outputs in float64. Inputs of a whole operation are rounded to the timed
        precision.
    derivatives : dict of (int, int) to float
        Central differences at float64 inputs, by input (or `TOGETHER`) and draw.
    gradients : dict of int to numpy.ndarray
        Gradients of a trusted backend at float64 inputs, by input; empty without such a backend.
    source : str
        The trusted backend.
    further : list of list of numpy.ndarray
        Wanted outputs of a whole operation for inputs drawn from the next seeds.
    """

    whole: bool
    outputs: list[np.ndarray]
    derivatives: dict[tuple[int, int], float] = field(default_factory=dict)
    gradients: dict[int, np.ndarray] = field(default_factory=dict)
    source: str = ""
    further: list[list[np.ndarray]] = field(default_factory=list)

    def save(self, path: Path, name: str) -> None:
        """Add the reference to an HDF5 file under the operation's name."""
        key = name.replace("/", "|")
        with h5py.File(path, "a") as file:
            if key in file:
                del file[key]
            group = file.create_group(key)
            group.attrs.update(whole=self.whole, source=self.source)
            for i, output in enumerate(self.outputs):
                group[f"output/{i}"] = output
            for number, outputs in enumerate(self.further):
                for i, output in enumerate(outputs):
                    group[f"further/{number}/{i}"] = output
            for (index, draw), value in self.derivatives.items():
                group[f"derivative/{index}/{draw}"] = value
            for index, gradient in self.gradients.items():
                group[f"gradient/{index}"] = gradient

    @classmethod
    def load(cls, path: Path, name: str) -> OperatorReference | None:
        """Read what `save` wrote; None if it is missing."""
        if not path.exists():
            return None
        with h5py.File(path, "r") as file:
            key = name.replace("/", "|")
            if key not in file:
                return None
            group = file[key]
            further = group.get("further", {})
            return cls(
                whole=bool(group.attrs["whole"]),
                outputs=_in_order(group.get("output", {})),
                further=[_in_order(further[str(number)]) for number in range(len(further))],
                derivatives={
                    (int(index), int(draw)): float(value[()])
                    for index, draws in group.get("derivative", {}).items()
                    for draw, value in draws.items()
                },
                gradients={int(index): np.asarray(value) for index, value in group.get("gradient", {}).items()},
                source=str(group.attrs["source"]),
            )


def _in_order(group: Mapping[str, h5py.Dataset]) -> list[np.ndarray]:
    return [np.asarray(group[str(i)]) for i in range(len(group))]


def reference(
    operation: Operation, seed: int, *, backward: bool, further: int = 0, trusted: Operator | None = None
) -> OperatorReference:
    """Compute an operation's reference.

    Parameters
    ----------
    operation : Operation
        In the precision to be timed.
    seed : int
        Draws the inputs.
    backward : bool
        Whether to include gradients.
    further : int
        Number of further seeds whose outputs to include.
    trusted : Operator, optional
        A trusted backend's float64 operator for the operation's `exact_part`.
    """
    pieces = in_pieces(operation)
    oracle = OperatorOracle(operation if pieces is None else pieces.part)
    found = OperatorReference(pieces is None, oracle.run(oracle.operation.draw(seed)))
    if pieces is None:
        found.further = [oracle.run(operation.draw(seed + number)) for number in range(1, further + 1)]
    if not backward:
        return found
    exact = exact_part(operation)
    arrays, gradients = exact.draw(seed), exact.draw_gradients(seed)
    together = pieces is not None or is_large(exact)
    for moved in [exact.differentiable] if together else [(index,) for index in exact.differentiable]:
        for draw in range(DIRECTIONS):
            directions = {index: direction(exact, index, draw) for index in moved}
            key = TOGETHER if together else moved[0]
            found.derivatives[key, draw] = oracle.derivative(arrays, gradients, directions)
    if trusted is not None:
        answer = trusted.fetch_gradients(trusted.backward(trusted.feed(arrays))(*trusted.feed_gradients(gradients)))
        found.gradients = dict(zip(exact.differentiable, answer, strict=True))
        found.source = trusted.backend
    return found


def exact_part(operation: Operation) -> Operation:
    """Return the float64 operation, whole or a piece, whose gradient `reference` holds.

    A custom operator without float64 has its widest precision.
    """
    pieces = in_pieces(operation)
    return operation.exact if pieces is None else pieces.part
