"""`Operation`: one ONNX node with the types of its inputs, the unit that level 0 measures.

It is described by names and numbers: the operator, a shape or values of every input, attributes.
ONNX's checker and shape inference and `d5suite.network.validity` check it. Nothing is allocated
until inputs are drawn. May import ONNX, NumPy and `d5suite.network`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from d5suite.errors import NetworkError
from d5suite.network.custom import CustomOperator, checker_context
from d5suite.network.folding import Shape, fold, shapes_of
from d5suite.network.graph import Node, node_of
from d5suite.network.graph_edits import attributes_of, copy_of, remove_items, replace_items
from d5suite.network.normalise import IR_VERSION, infer
from d5suite.network.operators import REDUCTIONS
from d5suite.network.tensor import PRECISIONS as PRECISIONS
from d5suite.network.tensor import Tensor as Tensor
from d5suite.network.tensor import checked_input, input_from_dict, input_to_dict, plain
from d5suite.network.tensor import is_floating as is_floating
from d5suite.network.validity import require_valid

OPERATION_OPSET = 23
"""The default ONNX operator-set version of operations: the first one with Attention."""

OLDEST_OPERATION_OPSET = 21
"""Older operations are converted to this operator set, so that adapters see one meaning."""

STATIC_INPUTS: Mapping[str, tuple[int, ...]] = {
    "Attention": (6,), "Clip": (1, 2), "Col2Im": (1, 2), "ConstantOfShape": (0,), "DFT": (1, 2), "Dropout": (1, 2),
    "GRU": (4,), "LSTM": (4,), "MaxUnpool": (2,), "Pad": (1, 2, 3), "Range": (0, 1, 2), "Resize": (1, 2, 3),
    "STFT": (1, 3), "Slice": (1, 2, 3, 4), **dict.fromkeys(REDUCTIONS, (1,)),
    **dict.fromkeys(
        ("CumSum", "Expand", "OneHot", "Reshape", "Split", "Squeeze", "Tile", "TopK", "Trilu", "Unsqueeze"), (1,)
    ),
}  # fmt: skip
"""Inputs that must be constant, because adapters may need their values to build native code."""

_GRADIENT_FREE: Mapping[str, tuple[int, ...]] = {"Attention": (3, 4, 5), "BatchNormalization": (3, 4)}
"""Floating-point inputs without a gradient: masks, caches, running statistics."""

_GRADIENT_FREE_OUTPUTS: Mapping[str, tuple[int, ...]] = {
    "Attention": (1, 2, 3), "BatchNormalization": (1, 2), "LayerNormalization": (1, 2), "SoftmaxCrossEntropyLoss": (1,),
    **dict.fromkeys(("Ceil", "EyeLike", "Floor", "Hardmax", "Round", "Sign"), (0,)),
}  # fmt: skip
"""Floating-point outputs without a gradient: statistics, caches, and step functions."""


class Operation:
    """One ONNX node with the types of its inputs.

    Parameters
    ----------
    op_type : str
        The ONNX operator; a custom one as ``domain::Name``.
    inputs : mapping
        In the node's order, by any name: a shape (standard normal), a `Tensor` (random), an array
        (constant) or None (omitted).
    attributes : mapping, optional
        The node's attributes.
    name : str, optional
        Name in reports and errors.
    outputs : sequence of bool, optional
        Whether each output is wanted; by default only the first.
    precision : str
        A key of `PRECISIONS`: the type of random floating-point inputs and of float32 arrays.
    opset : int
        ONNX operator-set version, `OLDEST_OPERATION_OPSET` or later.
    custom : CustomOperator, optional
        The custom operator, if the node is one.

    Raises
    ------
    NetworkError
        If ONNX lacks the operator, or the precision, an attribute or an input is invalid.

    Attributes
    ----------
    node : Node
        With ONNX's default attributes; an omitted input or output is ``""``.
    shapes : dict of str to tuple
        By input and output.
    dtypes : dict of str to numpy.dtype
        By input and output.
    constants : dict of str to numpy.ndarray
        The constant inputs.
    model : onnx.ModelProto
        The node as a model; all inputs are inputs of the graph.
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
                raise NetworkError(f"the {what} must be given by name, not {given!r}", where=where)
        if not any(outputs):
            raise NetworkError("no output is wanted", where=where)
        self.precision = precision
        self.opset = opset
        self._given = dict(inputs)
        self._attributes = {key: plain(value) for key, value in (attributes or {}).items()}
        self._outputs = tuple(bool(wanted) for wanted in outputs)
        self.custom = custom
        if custom is not None:
            given_names = [key if value is not None else "" for key, value in inputs.items()]
            custom.require_tensors(given_names, len(self._outputs))
        floating = PRECISIONS[precision]
        self.inputs = {key: checked_input(key, value, floating, where=where) for key, value in inputs.items()}
        domain, _, kind = op_type.rpartition("::")
        names = [key if value is not None else "" for key, value in self.inputs.items()]
        while names and not names[-1]:
            names.pop()
        results = [f"{kind}.{i}" if wanted else "" for i, wanted in enumerate(self._outputs)]
        try:
            node = helper.make_node(kind, names, results, self.name, domain=domain, **self._attributes)
        except (TypeError, ValueError) as error:
            raise NetworkError(f"an attribute of {op_type} is invalid: {error}", where=self.name) from error
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
        full = copy_of(self.model)
        if node.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in node.attribute):
            replace_items(full.graph.node[0].output, [f"{node.op_type}.{i}" for i in range(3)])  # ONNX requires all
        for output in full.graph.node[0].output:
            if output:
                full.graph.output.append(helper.make_empty_tensor_value_info(output))
        try:
            if schema is not None:
                onnx.checker.check_node(node, checker_context(self.opset))
            inferred = infer(_with_constants(full, self.inputs))
        except (onnx.checker.ValidationError, shape_inference.InferenceError, RuntimeError, ValueError) as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise NetworkError(f"{op_type} is not valid ONNX: {lines[0]}", where=where) from error
        self.model = full
        self.node: Node = node_of(node, 0)
        if self.node.op_type in STATIC_INPUTS:
            self._require_static()
        shapes: dict[str, Shape] = shapes_of(inferred)
        types = self._types()
        if node.op_type == "Range":  # ONNX (1.23) infers no length in 16 bits
            start, limit, delta = (float(value) for value in self.inputs.values() if isinstance(value, np.ndarray))
            shapes[node.output[0]] = (max(math.ceil((limit - start) / delta), 0),)
        self.shapes: dict[str, tuple[int, ...]] = {key: shape for key, (_, shape) in types.items()}
        self.dtypes: dict[str, np.dtype] = {key: dtype for key, (dtype, _) in types.items()}
        elements = {o.name: o.type.tensor_type.elem_type for o in inferred.graph.output}
        for output in inferred.graph.node[0].output:
            if not output:
                continue
            shape = shapes.get(output)
            if shape is None or None in shape:
                raise NetworkError(f"the shape of output {output!r} does not follow from the inputs", where=where)
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
        """Return the operator and the shapes of its inputs, on one line."""
        shapes = ", ".join(f"{key}{list(self.shapes[key])}" for key in self.inputs if key in self.shapes)
        return f"{self.node.op_type}({shapes})"

    @classmethod
    def from_model(cls, model: onnx.ModelProto, arrays: Sequence[np.ndarray | None], name: str) -> Operation:
        """Return the single node of a model as an operation, for inputs like these arrays.

        Parameters
        ----------
        model : onnx.ModelProto
            With one node; converted if its operator set is older than `OLDEST_OPERATION_OPSET`.
        arrays : sequence of numpy.ndarray
            One per input of the graph: the values of `STATIC_INPUTS`, else the shape and type.
        name : str
            Name in errors.

        Raises
        ------
        NetworkError
            If the model has several nodes, or is not valid.
        """
        version = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
        if version < OLDEST_OPERATION_OPSET:
            model = onnx.version_converter.convert_version(model, OLDEST_OPERATION_OPSET)
            version = OLDEST_OPERATION_OPSET
            fold(model, name)
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
        return cls(
            node.op_type, inputs, attributes_of(node), name=name, outputs=[bool(o) for o in node.output], opset=version
        )

    def with_precision(self, precision: str) -> Operation:
        """Return the operation with its floating-point inputs in another type."""
        if precision == self.precision:
            return self
        return Operation(
            self.node.op_type, self._given, self._attributes, name=self.name, outputs=self._outputs,
            precision=precision, opset=self.opset, custom=self.custom,
        )  # fmt: skip

    @property
    def exact(self) -> Operation:
        """The operation in float64, or in the widest precision of a custom operator."""
        return self.with_precision("fp64" if self.custom is None else self.custom.widest)

    @property
    def kinds(self) -> frozenset[str]:
        """The ONNX operator, or the operators in the meaning of a custom operator."""
        return frozenset({self.node.op_type} if self.custom is None else {step[0] for step in self.custom.meaning})

    @property
    def outputs(self) -> tuple[str, ...]:
        """The wanted outputs."""
        return tuple(name for name in self.node.outputs if name)

    @property
    def training(self) -> bool:
        """Whether the node is in training mode: uses batch statistics, or drops values."""
        if self.node.op_type == "Dropout":
            names = list(self.inputs)
            return len(names) > 2 and bool(self.constants.get(names[2], False))
        return bool(self.node.attributes.get("training_mode", 0))

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Indices of the inputs with a gradient; empty if no output has a gradient."""
        if not self.differentiated:
            return ()
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
        """Indices of the wanted outputs with a gradient."""
        return tuple(
            index
            for index, name in enumerate(self.node.outputs)
            if name and is_floating(self.dtypes[name])
            and index not in _GRADIENT_FREE_OUTPUTS.get(self.node.op_type, ())
        )  # fmt: skip

    @property
    def non_negative(self) -> frozenset[str]:
        """Inputs whose values are at least 0, such as indices that never count from the end."""
        return frozenset(
            name
            for name, value in self.inputs.items()
            if isinstance(value, Tensor) and value.low is not None and value.low >= 0
        )

    def nbytes(self, names: Sequence[str] | None = None) -> int:
        """Return the bytes of some tensors; by default of all inputs and wanted outputs."""
        chosen = names if names is not None else [*(n for n in self.node.inputs if n), *self.outputs]
        return sum(math.prod(self.shapes[name]) * self.dtypes[name].itemsize for name in chosen)

    def draw(self, seed: int) -> list[np.ndarray | None]:
        """Draw the node's inputs; None for omitted inputs.

        The values depend on the seed only; a precision rounds the same numbers to its type.
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
        """Call a Python operator's functions once; see `CustomOperator.rehearse`."""
        if self.custom is not None and self.custom.forward is not None:
            self.custom.rehearse(
                [array for array in arrays if array is not None],
                [self.shapes[name] for name in self.outputs],
                [self.dtypes[name] for name in self.outputs],
                backward=backward,
            )

    def draw_gradients(self, seed: int) -> list[np.ndarray]:
        """Draw standard normal gradients of the `differentiated` outputs, in the outputs' types."""
        drawn = []
        for index in self.differentiated:
            output = self.node.outputs[index]
            generator = np.random.default_rng([seed, 1 << 16, index, *self.name.encode()])
            drawn.append(generator.standard_normal(self.shapes[output]).astype(self.dtypes[output]))
        return drawn

    def to_dict(self) -> dict[str, Any]:
        """Describe the operation in JSON's types.

        Raises
        ------
        NetworkError
            If an attribute is not a number, a string, or a list of these.
        """
        for key, value in self._attributes.items():
            if not all(isinstance(v, int | float | str) for v in (value if isinstance(value, list) else [value])):
                raise NetworkError(f"attribute {key!r} cannot be written to a job: {value!r}", where=self.name)
        return {
            "op_type": self.node.op_type,
            "inputs": {key: input_to_dict(value) for key, value in self.inputs.items()},
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
        """Rebuild an operation from `to_dict`; ``custom`` is the operator of a custom operation."""
        inputs = {key: input_from_dict(value) for key, value in content["inputs"].items()}
        return cls(
            content["op_type"], inputs, content["attributes"], name=content["name"], outputs=content["outputs"],
            opset=content["opset"], precision=precision, custom=custom,
        )  # fmt: skip


def _onnx_type(key: str, dtype: np.dtype, *, where: str) -> int:
    """Return ONNX's number for a type."""
    try:
        return int(helper.np_dtype_to_tensor_dtype(dtype))
    except (TypeError, ValueError, KeyError) as error:
        raise NetworkError(f"input {key!r}: ONNX has no tensors of {dtype}", where=where) from error


def _with_constants(model: onnx.ModelProto, inputs: Mapping[str, Any]) -> onnx.ModelProto:
    """Return a copy of the model with constant inputs as initializers, for shape inference."""
    fixed = {key: value for key, value in inputs.items() if isinstance(value, np.ndarray)}
    other = copy_of(model)
    remove_items(other.graph.input, lambda value: value.name in fixed)
    other.graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in fixed.items())
    return other
