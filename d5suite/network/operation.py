"""`Operation`: one ONNX node with the types of its inputs, which is what level 0 validates and measures.

An operation is described by names and numbers: the operator, a shape or fixed values for each input, attributes.
ONNX's checker and shape inference and `d5suite.network.validity` say whether it is valid; nothing is allocated until
its inputs are drawn. Imports ONNX, NumPy and `d5suite.network`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from d5suite.errors import NetworkError
from d5suite.network.custom import CustomOperator
from d5suite.network.model import IR_VERSION, Node, Shape, _fold_constants, _node, _shapes
from d5suite.network.validity import require_valid

OPERATION_OPSET = 23
"""The ONNX operator-set version of operations unless they say otherwise: the first with Attention."""

OLDEST_OPERATION_OPSET = 21
"""Operations of older operator sets are brought up to this one, so that an adapter meets one meaning."""

PRECISIONS: Mapping[str, np.dtype] = {
    "fp64": np.dtype(np.float64),
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
}
"""NumPy's type of floating-point tensors by precision."""

STATIC_INPUTS: Mapping[str, tuple[int, ...]] = {
    "Attention": (6,), "Clip": (1, 2), "Dropout": (1, 2), "GRU": (4,), "LSTM": (4,), "Pad": (1, 2, 3),
    "ReduceMax": (1,), "ReduceMean": (1,), "ReduceSum": (1,), "Reshape": (1,), "Squeeze": (1,), "Unsqueeze": (1,),
}  # fmt: skip
"""Inputs whose values an adapter may need before it can build native code: they are fixed."""

_GRADIENT_FREE: Mapping[str, tuple[int, ...]] = {"Attention": (3, 4, 5), "BatchNormalization": (3, 4)}
"""Floating-point inputs that frameworks do not differentiate by: masks, caches, running statistics."""

_GRADIENT_FREE_OUTPUTS: Mapping[str, tuple[int, ...]] = {
    "Attention": (1, 2, 3), "BatchNormalization": (1, 2), "LayerNormalization": (1, 2), "SoftmaxCrossEntropyLoss": (1,),
}  # fmt: skip
"""Floating-point outputs that are facts about the pass, not results of it."""


@dataclass(frozen=True)
class Tensor:
    """An input whose values are drawn at random.

    Attributes
    ----------
    shape : tuple of int
    kind : str
        ``float`` for the operation's floating-point type, else NumPy's name of a type: ``int64``, ``bool``.
    low, high : float, optional
        Values are uniform in [low, high); of floating-point tensors without them standard normal, of integers 0 or 1.
    scale : float
        Factor on a standard normal tensor.

    An `Operation` refuses one that does not make sense.
    """

    shape: tuple[int, ...]
    kind: str = "float"
    low: float | None = None
    high: float | None = None
    scale: float = 1.0

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The least and the largest value that an integer tensor can have; None for other kinds."""
        if self.kind == "float" or np.dtype(self.kind).kind not in "iu":
            return None
        return int(0 if self.low is None else self.low), int(2 if self.high is None else self.high) - 1

    def draw(self, generator: np.random.Generator, floating: np.dtype) -> np.ndarray:
        """Values, rounded to the type that they will be used in."""
        dtype = floating if self.kind == "float" else np.dtype(self.kind)
        if dtype == np.bool_:
            return generator.random(self.shape) < 0.5
        if self.bounds is not None:
            least, most = self.bounds
            return generator.integers(least, most, self.shape, dtype=dtype, endpoint=True)
        if not is_floating(dtype):
            raise NetworkError(f"values of type {self.kind!r} cannot be drawn", hint="Give an array.")
        if self.low is not None and self.high is not None:
            return generator.uniform(self.low, self.high, self.shape).astype(dtype)
        return (generator.standard_normal(self.shape) * self.scale).astype(dtype)


class Operation:
    """One ONNX node with the types of its inputs.

    Parameters
    ----------
    op_type : str
        The ONNX operator; a custom one as ``domain::Name``.
    inputs : mapping
        By a name of your choice, in the node's order: a shape (random, standard normal), a `Tensor` (random), an array
        (fixed) or None (omitted).
    attributes : mapping, optional
        The node's attributes.
    name : str, optional
        How reports and errors call it.
    outputs : sequence of bool, optional
        Which outputs are wanted; the first one only by default.
    precision : str
        A key of `PRECISIONS`: the type of drawn floating-point inputs, and of arrays in place of float32.
    opset : int
        ONNX operator-set version, `OLDEST_OPERATION_OPSET` or later.
    custom : CustomOperator, optional
        What a custom operator is.

    Raises
    ------
    NetworkError
        If ONNX does not know the operator, or an attribute, a shape, a rank, a type or a value is not as it wants it;
        if a `Tensor` or the precision makes no sense.

    Attributes
    ----------
    node : Node
        With ONNX's default attributes; an input or output that is omitted is ``""``.
    shapes : dict of str to tuple
        By input and output.
    dtypes : dict of str to numpy.dtype
        By input and output.
    constants : dict of str to numpy.ndarray
        The fixed inputs.
    model : onnx.ModelProto
        The node as a model, all inputs fed.
    """

    def __init__(
        self,
        op_type: str,
        inputs: Mapping[str, Any],
        attributes: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        outputs: Sequence[bool] = (True,),
        precision: str = "fp32",
        opset: int = OPERATION_OPSET,
        custom: CustomOperator | None = None,
    ) -> None:
        where = self.name = str(name or op_type)
        if not isinstance(op_type, str):
            raise NetworkError(f"{op_type!r} is not the name of an operator", where=where)
        if precision not in PRECISIONS:
            raise NetworkError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}", where=where)
        newest = onnx.defs.onnx_opset_version()
        if not isinstance(opset, int) or not OLDEST_OPERATION_OPSET <= opset <= newest:
            raise NetworkError(
                f"operator set {opset!r} is not one from {OLDEST_OPERATION_OPSET} to {newest}", where=where
            )
        for what, given in (("inputs", inputs), ("attributes", attributes or {})):
            if not isinstance(given, Mapping) or not all(isinstance(key, str) and key for key in given):
                raise NetworkError(f"the {what} are not given by name: {given!r}", where=where)
        if not any(outputs):
            raise NetworkError("no output is wanted", where=where)
        self.precision = precision
        self.opset = opset
        self._asked = dict(inputs)
        self._attributes = {key: _plain(value) for key, value in (attributes or {}).items()}
        self._outputs = tuple(bool(wanted) for wanted in outputs)
        self.custom = custom
        if custom is not None:
            given_names = [key if value is not None else "" for key, value in inputs.items()]
            custom.require_tensors(given_names, len(self._outputs))
        floating = PRECISIONS[precision]
        self.inputs = {key: _input(key, value, floating, where=where) for key, value in inputs.items()}
        domain, _, kind = op_type.rpartition("::")
        names = [key if value is not None else "" for key, value in self.inputs.items()]
        while names and not names[-1]:
            names.pop()
        results = [f"{kind}.{i}" if wanted else "" for i, wanted in enumerate(self._outputs)]
        try:
            node = helper.make_node(kind, names, results, self.name, domain=domain, **self._attributes)
        except (TypeError, ValueError) as error:
            raise NetworkError(f"an attribute of {op_type} cannot be read: {error}", where=self.name) from error
        infos = [
            helper.make_tensor_value_info(key, _onnx_type(key, dtype, where=where), shape)
            for key, (dtype, shape) in self._types().items()
        ]
        self._build(node, infos, domain)

    def _types(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        floating = PRECISIONS[self.precision]
        return {
            key: (value.dtype, value.shape)
            if isinstance(value, np.ndarray)
            else (floating if value.kind == "float" else np.dtype(value.kind), value.shape)
            for key, value in self.inputs.items()
            if value is not None
        }

    def _build(self, node: onnx.NodeProto, infos: list[Any], domain: str) -> None:
        where, op_type = self.name, f"{domain}::{node.op_type}" if domain else node.op_type
        if not domain and not onnx.defs.has(node.op_type):
            raise NetworkError(f"ONNX has no operator {node.op_type!r}", where=where)
        graph = helper.make_graph([node], node.op_type, infos, [])
        opsets = [helper.make_opsetid("", self.opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
        self.model = helper.make_model(
            graph,
            opset_imports=opsets,
            ir_version=IR_VERSION,
            functions=[self.custom.function(self.opset)] if self.custom is not None else [],
        )
        schema = None if domain else onnx.defs.get_schema(node.op_type, self.opset)
        full = onnx.ModelProto()
        full.CopyFrom(self.model)
        if node.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in node.attribute):
            del full.graph.node[0].output[:]  # ONNX wants all three named
            full.graph.node[0].output.extend([f"{node.op_type}.{i}" for i in range(3)])
        for output in full.graph.node[0].output:
            if output:
                full.graph.output.append(helper.make_empty_tensor_value_info(output))
        try:
            if schema is not None:
                onnx.checker.check_node(node, _checker_context(self.opset))
            inferred = shape_inference.infer_shapes(
                _with_constants(full, self.inputs), check_type=True, strict_mode=True, data_prop=True
            )
        except (onnx.checker.ValidationError, shape_inference.InferenceError, RuntimeError, ValueError) as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise NetworkError(f"{op_type} is not valid ONNX: {lines[0]}", where=where) from error
        self.model = full
        self.node: Node = _node(node, 0)
        if self.node.op_type in STATIC_INPUTS:
            self._require_static()
        shapes: dict[str, Shape] = _shapes(inferred)
        types = self._types()
        self.shapes: dict[str, tuple[int, ...]] = {key: shape for key, (_, shape) in types.items()}
        self.dtypes: dict[str, np.dtype] = {key: dtype for key, (dtype, _) in types.items()}
        elements = {o.name: o.type.tensor_type.elem_type for o in inferred.graph.output}
        for output in inferred.graph.node[0].output:
            if not output:
                continue
            shape = shapes.get(output)
            if shape is None or None in shape:
                raise NetworkError(f"the shape of output {output!r} cannot be told from the inputs", where=where)
            self.shapes[output] = tuple(n for n in shape if n is not None)
            self.dtypes[output] = np.dtype(helper.tensor_dtype_to_np_dtype(elements[output]))
        self.constants = {key: value for key, value in self.inputs.items() if isinstance(value, np.ndarray)}
        bounds = {key: value.bounds for key, value in self.inputs.items() if isinstance(value, Tensor)}
        known = {key: found for key, found in bounds.items() if found is not None}
        require_valid(self.node, self.shapes, self.constants, known)

    def _require_static(self) -> None:
        names = list(self.inputs)
        for index in STATIC_INPUTS[self.node.op_type]:
            if index < len(names) and isinstance(self.inputs[names[index]], Tensor):
                raise NetworkError(
                    f"input {names[index]!r} of {self.node.op_type} must have fixed values", where=self.name,
                    hint="Give an array instead of a shape.",
                )  # fmt: skip

    def __repr__(self) -> str:
        return f"Operation({self.name!r}, {self.describe()})"

    def describe(self) -> str:
        """The operator and the shapes of its inputs, on one line."""
        shapes = ", ".join(f"{key}{list(self.shapes[key])}" for key in self.inputs if key in self.shapes)
        return f"{self.node.op_type}({shapes})"

    @classmethod
    def from_model(cls, model: onnx.ModelProto, arrays: Sequence[np.ndarray | None], name: str) -> Operation:
        """The only node of a model, for inputs like these arrays.

        Parameters
        ----------
        model : onnx.ModelProto
            With one node; of an operator set before `OLDEST_OPERATION_OPSET`, it is converted.
        arrays : sequence of numpy.ndarray
            One for each input of the graph; those that `STATIC_INPUTS` names are fixed, the others give types.
        name : str
            How errors call it.

        Raises
        ------
        NetworkError
            If the model has several nodes, or is not valid.
        """
        version = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
        if version < OLDEST_OPERATION_OPSET:
            model = onnx.version_converter.convert_version(model, OLDEST_OPERATION_OPSET)
            version = OLDEST_OPERATION_OPSET
            _fold_constants(model, name)
        if len(model.graph.node) != 1:
            raise NetworkError(f"the model has {len(model.graph.node)} nodes, not one", where=name)
        node = model.graph.node[0]
        given = dict(zip((i.name for i in model.graph.input), arrays, strict=True))
        fixed = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        static = {node.input[i] for i in STATIC_INPUTS.get(node.op_type, ()) if i < len(node.input)}
        inputs: dict[str, Any] = {}
        for index, key in enumerate(node.input):
            if not key:
                inputs[f"omitted {index}"] = None
            elif key in fixed or key in static:
                inputs[key] = np.asarray(fixed[key] if key in fixed else given[key])
            else:
                array = np.asarray(given[key])
                inputs[key] = Tensor(array.shape, str(array.dtype))
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        return cls(node.op_type, inputs, attributes, name=name, outputs=[bool(o) for o in node.output], opset=version)

    # Variants.

    def with_precision(self, precision: str) -> Operation:
        """The same operation with its floating-point inputs in another type."""
        return self if precision == self.precision else self._variant(self._asked, precision)

    @property
    def exact(self) -> Operation:
        """The same operation in float64 or, of a custom operator without it, in its widest precision."""
        return self.with_precision("fp64" if self.custom is None else self.custom.widest)

    @property
    def kinds(self) -> frozenset[str]:
        """The ONNX operators that it is, or that its meaning is made of."""
        return frozenset({self.node.op_type} if self.custom is None else {step[0] for step in self.custom.meaning})

    def _variant(self, inputs: Mapping[str, Any], precision: str) -> Operation:
        return Operation(
            self.node.op_type, inputs, self._attributes, name=self.name, outputs=self._outputs, precision=precision,
            opset=self.opset, custom=self.custom,
        )  # fmt: skip

    # Facts.

    @property
    def outputs(self) -> tuple[str, ...]:
        """The wanted outputs."""
        return tuple(name for name in self.node.outputs if name)

    @property
    def training(self) -> bool:
        """Whether the node normalises by the batch's statistics, or drops."""
        if self.node.op_type == "Dropout":
            names = list(self.inputs)
            return len(names) > 2 and bool(self.constants.get(names[2], False))
        return bool(self.node.attributes.get("training_mode", 0))

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Numbers of the inputs that have a gradient."""
        return tuple(
            index
            for index, name in enumerate(self.node.inputs)
            if name
            and name not in self.constants
            and is_floating(self.dtypes[name])
            and index not in _GRADIENT_FREE.get(self.node.op_type, ())
        )

    @property
    def differentiated(self) -> tuple[int, ...]:
        """Numbers of the wanted outputs whose gradients the backward pass starts from."""
        return tuple(
            index
            for index, name in enumerate(self.node.outputs)
            if name and is_floating(self.dtypes[name])
            and index not in _GRADIENT_FREE_OUTPUTS.get(self.node.op_type, ())
        )  # fmt: skip

    @property
    def non_negative(self) -> frozenset[str]:
        """Inputs whose values are known to be 0 or more, such as indices that do not count from the end."""
        return frozenset(
            name
            for name, value in self.inputs.items()
            if isinstance(value, Tensor) and value.low is not None and value.low >= 0
        )

    def nbytes(self, names: Sequence[str] | None = None) -> int:
        """Bytes of these tensors, by default of all inputs and wanted outputs together."""
        chosen = names if names is not None else [*(n for n in self.node.inputs if n), *self.outputs]
        return sum(math.prod(self.shapes[name]) * self.dtypes[name].itemsize for name in chosen)

    # Data.

    def draw(self, seed: int) -> list[np.ndarray | None]:
        """Values for each of the node's inputs, None for omitted ones; the same for the same seed and precision.

        Two precisions get the same numbers, rounded to each.
        """
        floating = PRECISIONS[self.precision]
        drawn = [
            value.draw(np.random.default_rng([seed, index, *self.name.encode()]), floating)
            if isinstance(value, Tensor)
            else value
            for index, value in enumerate(self.inputs.values())
        ]
        return drawn[: len(self.node.inputs)]

    def rehearse(self, arrays: Sequence[np.ndarray | None], *, backward: bool = False) -> None:
        """Call a Python operator's functions once; see `CustomOperator.rehearse`. For other operations, nothing."""
        if self.custom is not None and self.custom.forward is not None:
            self.custom.rehearse(
                [array for array in arrays if array is not None],
                [self.shapes[name] for name in self.outputs],
                [self.dtypes[name] for name in self.outputs],
                backward=backward,
            )

    def draw_gradients(self, seed: int) -> list[np.ndarray]:
        """Standard normal gradients for the outputs in `differentiated`, in the outputs' types."""
        drawn = []
        for index in self.differentiated:
            output = self.node.outputs[index]
            generator = np.random.default_rng([seed, 1 << 16, index, *self.name.encode()])
            drawn.append(generator.standard_normal(self.shapes[output]).astype(self.dtypes[output]))
        return drawn

    # Files.

    def to_dict(self) -> dict[str, Any]:
        """The operation as JSON-able names and numbers.

        Raises
        ------
        NetworkError
            If an attribute is neither a number nor a word, nor a list of those.
        """
        for key, value in self._attributes.items():
            if not all(isinstance(v, int | float | str) for v in (value if isinstance(value, list) else [value])):
                raise NetworkError(f"attribute {key!r} cannot be written to a job: {value!r}", where=self.name)
        return {
            "op_type": self.node.op_type,
            "inputs": {key: _input_to_dict(value) for key, value in self.inputs.items()},
            "attributes": dict(self._attributes),
            "name": self.name,
            "outputs": list(self._outputs),
            "opset": self.opset,
            "custom": {"file": str(self.custom.file), "name": self.custom.name} if self.custom is not None else None,
        }

    @classmethod
    def from_dict(
        cls, content: Mapping[str, Any], *, precision: str = "fp32", custom: CustomOperator | None = None
    ) -> Operation:
        """Rebuild an operation from `to_dict`, and for a custom one from what it names."""
        inputs = {key: _input_from_dict(value) for key, value in content["inputs"].items()}
        return cls(
            content["op_type"], inputs, content["attributes"], name=content["name"], outputs=content["outputs"],
            opset=content["opset"], precision=precision, custom=custom,
        )  # fmt: skip


def is_floating(dtype: np.dtype) -> bool:
    """Whether a tensor of this type can have a gradient."""
    return dtype.kind == "f" or dtype == PRECISIONS["bf16"]


def _input(key: str, value: Any, floating: np.dtype, *, where: str) -> Tensor | np.ndarray | None:
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        return value.astype(floating)
    if value is None or isinstance(value, np.ndarray):
        return value
    if isinstance(value, tuple | list):
        value = Tensor(tuple(value))
    if not isinstance(value, Tensor):
        raise NetworkError(f"input {key!r}: {value!r} is neither a shape, nor a Tensor, nor an array", where=where)
    problem = _tensor_problem(value)
    if problem:
        raise NetworkError(f"input {key!r}: {problem}", where=where)
    shape = tuple(operator.index(n) for n in value.shape)
    return Tensor(shape, value.kind, _plain(value.low), _plain(value.high), _plain(value.scale))


def _tensor_problem(tensor: Tensor) -> str | None:
    """Why a tensor cannot be drawn, or None."""
    shape, kind, low, high = tensor.shape, tensor.kind, tensor.low, tensor.high
    if not isinstance(shape, tuple | list) or not all(_is_integer(n) and n >= 0 for n in shape):
        return f"{shape!r} is not a shape, which has whole numbers from 0"
    if not isinstance(kind, str):
        return f"kind {kind!r} is neither 'float' nor the name of a type"
    if kind != "float":
        try:
            helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        except (TypeError, ValueError, KeyError):
            return f"kind {kind!r} is neither 'float' nor the name of a type that ONNX has"
    numbers = [("scale", tensor.scale), *((key, n) for key, n in (("low", low), ("high", high)) if n is not None)]
    for key, number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float | np.number) or not math.isfinite(number):
            return f"{key} is {number!r}, not a finite number"
    if tensor.bounds is None:
        if (low is None) != (high is None):
            return f"low is {low} and high is {high}: they go together"
        if low is not None and high is not None and low >= high:
            return f"low is {low}, and high must be above it, not {high}"
        return None
    (least, most), limits = tensor.bounds, np.iinfo(np.dtype(kind))
    if least > most or least < limits.min or most > limits.max:
        return f"there is no {kind} from {least} to below {most + 1}"
    return None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _onnx_type(key: str, dtype: np.dtype, *, where: str) -> int:
    """ONNX's number of a type."""
    try:
        return int(helper.np_dtype_to_tensor_dtype(dtype))
    except (TypeError, ValueError, KeyError) as error:
        raise NetworkError(f"input {key!r}: ONNX has no tensors of {dtype}", where=where) from error


def _input_to_dict(value: Tensor | np.ndarray | None) -> Any:
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return {"values": value.tolist(), "dtype": str(value.dtype), "shape": list(value.shape)}
    return {
        "shape": list(value.shape), "kind": value.kind, "low": value.low, "high": value.high, "scale": value.scale,
    }  # fmt: skip


def _input_from_dict(content: Any) -> Tensor | np.ndarray | None:
    if content is None:
        return None
    if "values" in content:
        return np.array(content["values"], content["dtype"]).reshape(content["shape"])
    return Tensor(tuple(content["shape"]), content["kind"], content["low"], content["high"], content["scale"])


def _plain(value: Any) -> Any:
    """An attribute in Python's own numbers, words and lists."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _checker_context(opset: int) -> Any:
    context = onnx.checker.C.CheckerContext()
    context.ir_version = IR_VERSION
    context.opset_imports = {"": opset}
    return context


def _with_constants(model: onnx.ModelProto, inputs: Mapping[str, Any]) -> onnx.ModelProto:
    """The model with fixed inputs as initializers, whose values shape inference may need."""
    fixed = {key: value for key, value in inputs.items() if isinstance(value, np.ndarray)}
    if not fixed:
        return model
    other = onnx.ModelProto()
    other.CopyFrom(model)
    kept = [i for i in other.graph.input if i.name not in fixed]
    other.graph.ClearField("input")
    other.graph.input.extend(kept)
    other.graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in fixed.items())
    return other
