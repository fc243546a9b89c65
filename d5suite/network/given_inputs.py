"""What a user gives the inputs of a network: a value, a range to draw from, or a sample.

A value is a number; a range is a pair, the first number and the one past the last. Everything is
checked against the network before anything is measured. May import ONNX, NumPy and, from d5suite,
`errors` and `network`.
"""

from __future__ import annotations

import hashlib
import math
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper, numpy_helper

from d5suite.errors import ConfigurationError
from d5suite.network.graph_edits import remove_items, replace_items

if TYPE_CHECKING:
    from d5suite.network.graph import Graph

Number = int | float
Given = Number | Sequence[Number]
"""A value, or a range: its first number and the one past the last."""

LARGEST_SAMPLE = 1 << 31
"""Most bytes of a sample's arrays."""


def parse_inputs(texts: Sequence[str]) -> dict[str, Given]:
    """Parse texts like ``INPUT=VALUE`` and ``INPUT=LOW..HIGH``, one per input.

    Raises
    ------
    ConfigurationError
        If a text has another form, a number is not finite, a range is empty, or two texts are for
        one input.
    """
    found: dict[str, Given] = {}
    for text in texts:
        name, _, given = text.rpartition("=")
        low, dots, high = given.partition("..")
        numbers = [_number(part) for part in ((low, high) if dots else (given,))]
        if not name or None in numbers:
            raise ConfigurationError(
                f"{text!r} is not an input with its value or range", where="--input",
                hint="Write sr=16000 for a value, or ids=0..256 for values from 0 to 255.",
            )  # fmt: skip
        if name in found:
            raise ConfigurationError(f"input {name!r} is given twice", where="--input")
        known = [number for number in numbers if number is not None]
        if not all(map(math.isfinite, known)):
            raise ConfigurationError("the numbers must be finite", where=f"--input {text}")
        if dots and not known[0] < known[1]:
            raise ConfigurationError(
                "this range is empty", where=f"--input {text}", hint="The second number is the one past the last."
            )
        found[name] = (known[0], known[1]) if dots else known[0]
    return found


def _number(text: str) -> Number | None:
    for read in (int, float):
        try:
            return read(text)
        except (ValueError, OverflowError):
            continue
    return {"true": 1, "false": 0}.get(text.lower())


def read_sample(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of an ``.npz`` file by name; nothing in it is executed.

    Raises
    ------
    ConfigurationError
        If the file is missing, too large or not an ``.npz`` file, or holds objects.
    """
    where = f"--inputs {path}"
    if not path.is_file():
        found = "is not a regular file" if path.exists() else "does not exist"
        raise ConfigurationError(f"the sample {found}", where=where)
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > LARGEST_SAMPLE:
            raise ConfigurationError(f"the sample has {size:,} bytes; at most {LARGEST_SAMPLE:,} are read", where=where)
        with np.load(path, allow_pickle=False) as file:
            return {name: np.array(file[name]) for name in file.files}
    except ConfigurationError:
        raise
    except Exception as error:  # NumPy and zipfile raise several unrelated types
        raise ConfigurationError(
            f"this is not a file of arrays: {error}", where=where,
            hint="Write it with numpy.savez(path, input=array): numbers only, one array per input.",
        ) from error  # fmt: skip


_NUMBERS = frozenset(
    helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    for kind in ("?", "e", "f", "d", "b", "h", "i", "q", "B", "H", "I", "Q")
)
"""Types of inputs that take a value."""


def fix_inputs(
    model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], given: Mapping[str, Given]
) -> dict[str, np.ndarray]:
    """Turn a model's one-element inputs that have a value into constants; return the constants.

    This decides branches that depend on a sampling rate, for example, and the other inputs may then
    have a common batch.

    Parameters
    ----------
    model : onnx.ModelProto
        Changed in place.
    shapes : mapping of str to sequence of int
        Dimensions by input, where the model leaves them open.
    given : mapping of str to Given

    Raises
    ------
    ConfigurationError
        If a value does not fit, or no other input is left.
    """
    graph, stored = model.graph, {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in graph.input if value.name not in stored]
    fixed = {}
    for value in inputs:
        number, kind = given.get(value.name), value.type.tensor_type
        dims = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in kind.shape.dim]
        shape = [known or size for known, size in zip(dims, shapes.get(value.name, dims), strict=False)]
        if number is None or isinstance(number, Sequence) or not kind.HasField("shape") or math.prod(shape) != 1:
            continue
        if kind.elem_type not in _NUMBERS:
            continue  # the model's own check reports the type
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        _check_numbers(value.name, dtype, [number])
        fixed[value.name] = np.full(shape, number, dtype)
    if fixed and len(fixed) == len(inputs):
        raise _nothing_varies("every input has one value")
    remove_items(graph.input, lambda value: value.name in fixed)
    constants = [
        helper.make_node("Constant", [], [name], f"{name}.given", value=numpy_helper.from_array(array, name))
        for name, array in fixed.items()
    ]
    replace_items(graph.node, [*constants, *graph.node])
    return fixed


def check_inputs(
    network: Graph,
    given: Mapping[str, Given],
    sample: Mapping[str, np.ndarray],
    *,
    fixed: Iterable[str] = (),
    tables: Mapping[str, int] | None = None,
) -> None:
    """Check what a user gives against a network's inputs.

    Parameters
    ----------
    network : Graph
    given : mapping of str to Given
    sample : mapping of str to numpy.ndarray
        Arrays by input, with the batch as their first axis where all inputs of the network have it.
    fixed : iterable of str
        Inputs that `fix_inputs` turned into constants.
    tables : mapping of str to int, optional
        By input: rows of the smallest table that it indexes.

    Raises
    ------
    ConfigurationError
        If there is no such input, an input is given twice, a number is outside of the input's type
        or table, an array does not fit, or all batches would be equal.
    """
    fixed, tables = set(fixed), tables or {}
    known = {*network.inputs, *fixed}
    for option, names in (("--input", given), ("--inputs", sample)):
        for name in names:
            if name not in known:
                raise ConfigurationError(
                    f"the network has no input {name!r}", where=option,
                    hint=f"Its inputs: {', '.join(sorted(known))}.",
                )  # fmt: skip
    for name in given:
        if name in sample:
            raise ConfigurationError(f"input {name!r} is given twice: by --input and by --inputs")
    for name in given.keys() - fixed:
        number = given[name]
        ends = [number[0], number[1]] if isinstance(number, Sequence) else [number]
        _check_numbers(name, network.dtypes[name], ends, tables.get(name))
    for name, array in sample.items():
        _check_array(network, name, array, tables.get(name))
    if network.batched and len(rows := {len(array) for array in sample.values()}) > 1:
        raise ConfigurationError(
            f"its arrays have different numbers of rows: {', '.join(map(str, sorted(rows)))}", where="--inputs"
        )
    values = {name for name in given if not isinstance(given[name], Sequence)}
    if values >= set(network.inputs):
        raise _nothing_varies("every input has one value")
    if {*values, *sample} >= set(network.inputs) and not any(map(_varies, sample.values())):
        raise _nothing_varies("every array of the sample holds one value")


def _nothing_varies(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{why}, so all batches are equal, and no answer could be told from a remembered one",
        where="--input", hint="Leave an input to be drawn, or give it a range.",
    )  # fmt: skip


def _varies(array: np.ndarray) -> bool:
    return bool(array.size) and bool((array != array.flat[0]).any())


def _check_numbers(name: str, dtype: np.dtype, numbers: Sequence[Number], rows: int | None = None) -> None:
    """Check a value, or both ends of a range; the range excludes the second end."""
    where = f"--input {name}={'..'.join(map(str, numbers))}"
    if dtype.kind == "f":
        if max(map(abs, numbers)) > float(np.finfo(dtype).max):
            raise ConfigurationError(f"input {name!r} is {dtype}, which has no such number", where=where)
        return
    if not all(float(number).is_integer() for number in numbers):
        raise ConfigurationError(f"input {name!r} is {dtype}: it takes whole numbers", where=where)
    least, most = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    first, last = int(numbers[0]), int(numbers[-1]) - (len(numbers) > 1)
    if first < least or last > most:
        raise ConfigurationError(f"input {name!r} is {dtype}, from {least} to {most}", where=where)
    _check_rows(name, first, last, rows, where)


def _check_rows(name: str, first: int, last: int, rows: int | None, where: str) -> None:
    if rows is not None and (first < -rows or last >= rows):
        raise ConfigurationError(f"input {name!r} counts the rows of a table, from 0 to {rows - 1}", where=where)


def _check_array(network: Graph, name: str, array: np.ndarray, rows: int | None) -> None:
    """Check an array of a sample against an input's shape and type."""
    where, wanted, dtype = f"--inputs, array {name!r}", network.shapes[name], network.dtypes[name]
    wanted = (None, *wanted[1:]) if network.batched else wanted  # the sample's rows fill a batch of any size
    fits = len(array.shape) == len(wanted) and all(
        size in (None, given) for size, given in zip(wanted, array.shape, strict=True)
    )
    if not fits or not array.size:
        shown = ", ".join("N" if size is None else str(size) for size in wanted)
        raise ConfigurationError(f"its shape is {array.shape}; the input's is ({shown})", where=where)
    if not (np.can_cast(array.dtype, dtype, "same_kind") and (array.dtype.kind == "b") == (dtype.kind == "b")):
        raise ConfigurationError(f"its type is {array.dtype}; the input's is {dtype}", where=where)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            narrow = array.astype(dtype)
        if np.isnan(narrow).any():
            raise ConfigurationError("it holds NaN", where=where)
        if (np.isinf(narrow) != np.isinf(array)).any():
            raise ConfigurationError(f"it holds numbers that {dtype} has not", where=where)
        return
    if (array.astype(dtype) != array).any():
        raise ConfigurationError(f"it holds numbers that {dtype} has not", where=where)
    if dtype.kind != "b":
        _check_rows(name, int(array.min()), int(array.max()), rows, where)


def described(given: Mapping[str, Given], sample: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Describe what is given, by input: ``16000``, ``0..256``, or a sample's digest."""
    found = {
        name: f"{number[0]}..{number[1]}" if isinstance(number, Sequence) else str(number)
        for name, number in given.items()
    }
    for name, array in sample.items():
        digest = hashlib.sha256(repr((array.shape, array.dtype.str)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
        found[name] = f"sample {digest.hexdigest()[:12]}"
    return dict(sorted(found.items()))
