"""`Network` and `Node`: a validated, normalised ONNX graph.

Any ``.onnx`` file is brought to one form, so that an adapter meets each operator with one meaning: operator-set version
`OPSET` or later, constants folded into initializers, explicit pads, every attribute's default filled in. A file is
untrusted: it is parsed, checked and bounded, and never executed.

Imports ONNX and NumPy late, so that `import d5suite` stays quick.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, shape_inference

from d5suite.errors import NetworkError

OPSET = 21
"""The ONNX operator-set version that networks are brought up to."""

IR_VERSION = 10
"""The ONNX file version that belongs to `OPSET` 21 (ONNX's release table)."""

OLDEST_OPSET = 9
"""The oldest operator-set version that a file may have; ONNX's version converter starts to be complete there."""

MAX_CONSTANT_BYTES = 4 << 30
"""No constant of a network may be larger; AlexNet's largest weight has 151 MB."""

_SMALL = 1024
"""Values of an initializer that may matter to shapes: sizes and axes are far shorter, weights far longer."""

Shape = tuple[int | None, ...]
"""A tensor's dimensions; None where the size is only known when data are fed (the batch)."""

_FOLDABLE = frozenset(
    {"Constant", "ConstantOfShape", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Transpose", "Cast",
     "Concat", "Shape", "Gather", "Slice", "Add", "Sub", "Mul", "Div", "Sqrt"}
)  # fmt: skip

_STATISTICS_INPUTS = {"BatchNormalization": (3, 4)}


@dataclass(frozen=True)
class Node:
    """One operator of a network.

    Attributes
    ----------
    name : str
        Unique within the network.
    op_type : str
        The ONNX operator, with its domain in front (``domain::Op``) where that is not ONNX's own.
    inputs, outputs : tuple of str
        Tensor names; an omitted optional input or output is ``""``.
    attributes : mapping
        Python values (int, float, str, list or NumPy array), ONNX's defaults filled in.
    """

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Network:
    """A neural network in neutral form.

    Parameters
    ----------
    model : onnx.ModelProto
        A complete model. It is checked, normalised and shape-inferred.
    name : str, optional
        How reports call it; the graph's name by default.
    input, output : str, optional
        The image input (N, C, H, W) and the output (N, classes); by default the graph's only input and first output.
    label, loss : str, optional
        The label input, int64 (N,) or for several labels per image (N, classes), and the scalar mean loss. Both or
        neither; without them the network is for inference.

    Raises
    ------
    NetworkError
        If the model is invalid, or the names do not fit it.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        *,
        name: str | None = None,
        input: str | None = None,
        output: str | None = None,
        label: str | None = None,
        loss: str | None = None,
    ) -> None:
        self.name = name or model.graph.name or "network"
        self.model = _normalised(model, self.name)
        graph = self.model.graph
        self.initializers: dict[str, np.ndarray] = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        inputs = [i.name for i in graph.input if i.name not in self.initializers]
        outputs = [o.name for o in graph.output]
        if (label is None) != (loss is None):
            raise NetworkError("give both a label and a loss, or neither", where=self.name)
        self.input = input or self._only([i for i in inputs if i != label], "input")
        self.output = output or self._only([o for o in outputs if o != loss][:1], "output")
        self.label = label
        self.loss = loss
        for kind, wanted, known in (
            ("input", self.input, inputs),
            ("label", label, inputs),
            ("output", self.output, outputs),
            ("loss", loss, outputs),
        ):
            if wanted is not None and wanted not in known:
                raise NetworkError(
                    f"the network has no {kind} {wanted!r}",
                    where=self.name,
                    hint=f"It has: {', '.join(known) or 'none'}.",
                )
        unfed = [i for i in inputs if i not in (self.input, self.label)]
        if unfed:
            raise NetworkError(
                f"the network needs further inputs: {', '.join(unfed)}",
                where=self.name,
                hint="A d5suite network has one image input and at most one label input.",
            )
        self.nodes: tuple[Node, ...] = _without_unused_outputs([_node(n, i) for i, n in enumerate(graph.node)], outputs)
        self.shapes: dict[str, Shape] = _shapes(self.model)
        self.statistics: tuple[str, ...] = tuple(
            dict.fromkeys(
                node.inputs[i]
                for node in self.nodes
                for i in _STATISTICS_INPUTS.get(node.op_type, ())
                if node.inputs[i]
            )
        )
        self.parameters: tuple[str, ...] = tuple(
            name
            for name, value in self.initializers.items()
            if value.dtype.kind == "f" and value.ndim > 0 and name not in self.statistics
        )

    def __repr__(self) -> str:
        return f"Network({self.name!r}, {len(self.nodes)} nodes, {len(self.parameters)} parameters)"

    def _only(self, names: list[str], kind: str) -> str:
        if len(names) != 1:
            raise NetworkError(
                f"expected one {kind}, found {len(names)}: {', '.join(names) or 'none'}",
                where=self.name,
                hint=f"Name the {kind} explicitly.",
            )
        return names[0]

    @classmethod
    def load(cls, path: str | Path, **names: str | None) -> Network:
        """Read an ``.onnx`` file.

        Parameters
        ----------
        path : str or Path
            The file. External data may lie in its folder or below, nowhere else.
        **names
            ``name``, ``input``, ``output``, ``label`` and ``loss`` as in `Network`.

        Raises
        ------
        NetworkError
            If the file is missing, corrupt, older than opset `OLDEST_OPSET`, invalid, or points outside its folder.
        """
        path = Path(path)
        try:
            model = onnx.load(path, load_external_data=False)
        except OSError as error:
            raise NetworkError(f"cannot read the network: {error.strerror or error}", where=str(path)) from error
        except Exception as error:  # protobuf's decode errors share no public base class across versions
            raise NetworkError(
                "this is not an ONNX model, or it is cut short", where=str(path), hint=f"The parser said: {error}"
            ) from error
        if not model.graph.node:
            raise NetworkError("this is not an ONNX model, or it has no nodes", where=str(path))
        _load_external_data(model, path)
        names.setdefault("name", path.stem)
        try:
            return cls(model, **names)
        except NetworkError as error:
            if error.where == str(path):
                raise
            raise NetworkError(error.what, where=str(path), hint=error.hint) from error

    @property
    def constants(self) -> tuple[str, ...]:
        """Initializers that are neither parameters nor statistics: shapes, axes, scalars."""
        weights = {*self.parameters, *self.statistics}
        return tuple(name for name in self.initializers if name not in weights)

    @property
    def batch_size(self) -> int | None:
        """The batch size the graph is fixed to, or None if it takes any."""
        return self.shapes[self.input][0]

    def at_generic_point(self) -> Network:
        """The same network with noise on all its weights, for validation.

        Initial weights are special: biases are zero, running variances one, and the last scale of a residual branch
        may be zero, so that whole branches could be wrong unseen. Here every parameter and running mean gets normal
        noise of a tenth of its root mean square (of 1 where it is zero), and every running variance a factor near 1.
        """
        generator = np.random.default_rng(0xD5)
        variances = {node.inputs[4] for node in self.nodes if node.op_type == "BatchNormalization"}
        other = copy.copy(self)
        other.initializers = dict(self.initializers)
        for name in (*self.parameters, *self.statistics):
            value = self.initializers[name].astype(np.float64)
            noise = generator.standard_normal(value.shape)
            if name in variances:
                value = value * np.exp(0.1 * noise)
            else:
                value = value + 0.1 * (float(np.sqrt(np.mean(value**2))) or 1.0) * noise
            other.initializers[name] = value.astype(self.initializers[name].dtype)
        other.model = onnx.ModelProto()
        other.model.CopyFrom(self.model)
        other.model.graph.ClearField("initializer")
        other.model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in other.initializers.items())
        return other

    def require_loss(self) -> tuple[str, str]:
        """The names of the label input and of the loss.

        Raises
        ------
        NetworkError
            If the network has none, being for inference only.
        """
        if self.label is None or self.loss is None:
            raise NetworkError(
                "the network has no loss, so it cannot be trained",
                where=self.name,
                hint="Network.with_classification_loss() adds one.",
            )
        return self.label, self.loss

    def nodes_for(self, outputs: Iterable[str]) -> tuple[Node, ...]:
        """The nodes that these outputs need, in an order in which they can run."""
        needed = set(outputs)
        chosen = []
        for node in reversed(self.nodes):
            if needed.intersection(node.outputs):
                chosen.append(node)
                needed.update(node.inputs)
        return tuple(reversed(chosen))

    def consumers(self, tensor: str) -> tuple[Node, ...]:
        """The nodes that read a tensor."""
        return tuple(node for node in self.nodes if tensor in node.inputs)

    def with_classification_loss(self) -> Network:
        """The same network with a label input and mean softmax cross-entropy, so that it can be trained.

        The loss is taken of the logits: where the output is a Softmax, of that Softmax's input.
        """
        if self.loss is not None:
            return self
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        logits = self._before_softmax()
        batch = [self.shapes[self.input][0] or "N"]
        if len(self.shapes[logits]) > 2:
            model.graph.node.append(onnx.helper.make_node("Flatten", [logits], ["d5suite.logits"], "d5suite.flatten"))
            logits = "d5suite.logits"
        model.graph.node.append(
            onnx.helper.make_node(
                "SoftmaxCrossEntropyLoss", [logits, "label"], ["loss"], "d5suite.loss", reduction="mean"
            )
        )
        model.graph.input.append(onnx.helper.make_tensor_value_info("label", onnx.TensorProto.INT64, batch))
        model.graph.output.append(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
        return Network(model, name=self.name, input=self.input, output=self.output, label="label", loss="loss")

    def with_multilabel_loss(self) -> Network:
        """The same network for images that have several labels, each verified to be there or not, or unknown.

        The label input becomes int64 (N, classes): 1 where a class is verified to be present, 0 where it is verified to
        be absent, -1 where nobody looked. The loss is sigmoid cross-entropy, averaged over all verified labels of the
        batch; unknown ones count neither way. It is written as the softmax cross-entropy of the pair (0, logit), which
        is the same: ``softmax((0, x))[1] = sigmoid(x)``. A loss that the network already has is replaced.

        Raises
        ------
        NetworkError
            If the output is not of shape (N, classes).
        """
        logits = self._before_softmax()
        shape = self.shapes[logits]
        if len(shape) != 2 or shape[1] is None:
            raise NetworkError(
                f"a multi-label loss needs an output of shape (N, classes), not {shape}", where=self.name
            )
        model = self._without_loss()
        initializers = {"d5suite.axis": np.array([1]), "d5suite.pads": np.array([0, 1, 0, 0, 0, 0])}
        model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in initializers.items())
        make = onnx.helper.make_node
        model.graph.node.extend(
            [
                make("Unsqueeze", [logits, "d5suite.axis"], ["d5suite.present"], "d5suite.present"),
                make("Pad", ["d5suite.present", "d5suite.pads"], ["d5suite.pair"], "d5suite.pair"),
                make(
                    "SoftmaxCrossEntropyLoss",
                    ["d5suite.pair", "label"],
                    ["loss"],
                    "d5suite.loss",
                    reduction="mean",
                    ignore_index=-1,
                ),
            ]
        )
        labels = onnx.helper.make_tensor_value_info(
            "label", onnx.TensorProto.INT64, [self.shapes[self.input][0] or "N", shape[1]]
        )
        model.graph.input.append(labels)
        model.graph.output.append(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
        return Network(model, name=self.name, input=self.input, output=self.output, label="label", loss="loss")

    def _without_loss(self) -> onnx.ModelProto:
        """The model with nothing but what the output needs."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        graph = model.graph
        needed = {name for node in self.nodes_for([self.output]) for name in (*node.inputs, *node.outputs)}
        nodes = [node for node in graph.node if node.output[0] in needed]
        kept = [tensor for tensor in graph.initializer if tensor.name in needed]
        inputs = [value for value in graph.input if value.name == self.input]
        outputs = [value for value in graph.output if value.name == self.output]
        for field_name, values in (("node", nodes), ("initializer", kept), ("input", inputs), ("output", outputs)):
            graph.ClearField(field_name)
            getattr(graph, field_name).extend(values)
        return model

    def with_label_smoothing(self, smoothing: float) -> Network:
        """The same network, its softmax cross-entropy taken with smoothed labels.

        With smoothing e and K classes the label's probability is ``1 - e + e / K`` and that of every other class
        ``e / K`` (Szegedy et al., "Rethinking the inception architecture", CVPR 2016, section 7), so that the loss is
        ``(1 - e) H(label) + e H(uniform)``. Every cross-entropy of the loss is smoothed.

        Parameters
        ----------
        smoothing : float
            0 <= e < 1; 0 changes nothing.

        Raises
        ------
        NetworkError
            If the network has no mean softmax cross-entropy of one label per image.
        """
        if not 0 <= smoothing < 1:
            raise NetworkError(f"label smoothing must lie in [0, 1), not {smoothing}", where=self.name)
        if not smoothing:
            return self
        label, loss = self.require_loss()
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        graph = model.graph
        make = onnx.helper.make_node
        nodes = list(graph.node)
        graph.ClearField("node")
        smoothed = 0
        for node in nodes:
            attributes = _node(node, 0).attributes
            if node.op_type != "SoftmaxCrossEntropyLoss":
                graph.node.append(node)
                continue
            if attributes["reduction"] != "mean" or len(node.input) > 2 or len(self.shapes[label]) != 1:
                raise NetworkError("labels can be smoothed in a mean over one label per image only", where=self.name)
            smoothed += 1
            logits, result, prefix = node.input[0], node.output[0], f"d5suite.smoothing.{smoothed}"
            node.output[0] = f"{prefix}.hard"
            graph.node.extend(
                [
                    node,
                    make("LogSoftmax", [logits], [f"{prefix}.log"], f"{prefix}.log", axis=1),
                    make("ReduceMean", [f"{prefix}.log"], [f"{prefix}.mean"], f"{prefix}.mean", keepdims=0),
                    make("Mul", [f"{prefix}.hard", "d5suite.certain"], [f"{prefix}.own"], f"{prefix}.own"),
                    make("Mul", [f"{prefix}.mean", "d5suite.uniform"], [f"{prefix}.others"], f"{prefix}.others"),
                    make("Add", [f"{prefix}.own", f"{prefix}.others"], [result], f"{prefix}.sum"),
                ]
            )
        if not smoothed:
            raise NetworkError(
                "the network has no softmax cross-entropy whose labels could be smoothed", where=self.name
            )
        graph.initializer.extend(
            numpy_helper.from_array(np.array(value, np.float32), name)
            for name, value in (("d5suite.certain", 1 - smoothing), ("d5suite.uniform", -smoothing))
        )
        return Network(model, name=self.name, input=self.input, output=self.output, label=label, loss=loss)

    def without_dropout(self) -> Network:
        """The same network with every Dropout taken out, for validation: two frameworks never drop the same values."""
        if all(node.op_type != "Dropout" for node in self.nodes):
            return self
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        graph = model.graph
        same: dict[str, str] = {}
        nodes = []
        for node in graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = same.get(name, name)
            if node.op_type == "Dropout":
                same[node.output[0]] = node.input[0]
            else:
                nodes.append(node)
        nodes += [
            onnx.helper.make_node("Identity", [same[value.name]], [value.name], f"{value.name}.kept")
            for value in graph.output
            if value.name in same
        ]
        graph.ClearField("node")
        graph.node.extend(nodes)
        return Network(model, name=self.name, input=self.input, output=self.output, label=self.label, loss=self.loss)

    def _before_softmax(self) -> str:
        """The input of the Softmax that the output comes from, perhaps through changes of shape; else the output."""
        tensor = self.output
        for node in reversed(self.nodes):
            if tensor in node.outputs and node.op_type == "Softmax":
                return node.inputs[0]
            if tensor in node.outputs and node.op_type in _VIEWS:
                tensor = node.inputs[0]
        return self.output


_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})


def _normalised(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    versions = {o.domain: o.version for o in model.opset_import}
    version = versions.get("", versions.get("ai.onnx", 0))
    if version < OLDEST_OPSET:
        raise NetworkError(
            f"opset {version} is too old; d5suite reads opset {OLDEST_OPSET} and later",
            where=name,
            hint="Export the model again with a newer opset.",
        )
    try:
        onnx.checker.check_model(model)
        if version < OPSET:
            from onnx import version_converter

            model = version_converter.convert_version(model, OPSET)
        else:
            given, model = model, onnx.ModelProto()
            model.CopyFrom(given)
        model.ir_version = max(model.ir_version, IR_VERSION)  # older ones want initializers among the inputs
        _check_control_flow(model, name)
        _fold_constants(model, name)
        _infer_shapes(model)
        if any(n.op_type == "Shape" for n in model.graph.node):
            _fold_constants(model, name, _shapes(model))
            _infer_shapes(model)
        return model
    except (onnx.checker.ValidationError, shape_inference.InferenceError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NetworkError(f"the model is not valid ONNX: {first}", where=name) from error


def _infer_shapes(model: onnx.ModelProto) -> None:
    """Note the shapes of all tensors in the model, without passing its weights to ONNX's library and back."""
    graph = model.graph
    light = onnx.helper.make_model(
        onnx.GraphProto(name=graph.name, node=graph.node, input=graph.input, output=graph.output),
        ir_version=model.ir_version,
        opset_imports=model.opset_import,
        functions=model.functions,
    )
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= _SMALL:
            light.graph.initializer.append(tensor)
        else:
            light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    inferred = shape_inference.infer_shapes(light, check_type=True, strict_mode=True, data_prop=True).graph
    for field_name in ("value_info", "output"):
        graph.ClearField(field_name)
        getattr(graph, field_name).extend(getattr(inferred, field_name))


def _check_control_flow(model: onnx.ModelProto, name: str) -> None:
    nested = [n for n in model.graph.node for a in n.attribute if a.type in (a.GRAPH, a.GRAPHS)]
    if nested:
        raise NetworkError(
            f"control flow is not supported: {', '.join(sorted({n.op_type for n in nested}))}",
            where=name,
            hint="Export the model without conditionals and loops.",
        )


def _fold_constants(model: onnx.ModelProto, name: str, shapes: Mapping[str, Shape] | None = None) -> None:
    """Replace nodes that read only initializers by their values, and drop initializers nobody reads.

    With the tensors' shapes given, a Shape node of a tensor whose dimensions are all fixed is replaced too.
    """
    from onnx.reference import ReferenceEvaluator

    graph = model.graph
    values = {t.name: t for t in graph.initializer}
    kept = []
    for node in graph.node:
        dimensions = (shapes or {}).get(node.input[0], (None,)) if node.op_type == "Shape" else (None,)
        if None not in dimensions and not node.attribute:
            values[node.output[0]] = numpy_helper.from_array(np.array(dimensions, np.int64), node.output[0])
            continue
        if node.op_type not in _FOLDABLE or node.domain or any(i and i not in values for i in node.input):
            kept.append(node)
            continue
        if node.op_type == "ConstantOfShape":
            sizes = numpy_helper.to_array(values[node.input[0]])
            if np.prod(sizes.astype(np.float64)) * 8 > MAX_CONSTANT_BYTES or (sizes < 0).any():
                raise NetworkError(f"node {node.name!r} asks for a constant of shape {sizes.tolist()}", where=name)
        arrays = {i: numpy_helper.to_array(values[i]) for i in node.input if i}
        for output, array in zip(node.output, ReferenceEvaluator(node).run(None, arrays), strict=True):
            values[output] = numpy_helper.from_array(np.ascontiguousarray(array), output)
    for node in kept:
        # The version converter leaves Dropout's ratio as a vector of one, which shape inference then refuses.
        if node.op_type == "Dropout" and len(node.input) > 1 and list(values[node.input[1]].dims) == [1]:
            del values[node.input[1]].dims[:]
    used = {i for node in kept for i in node.input} | {o.name for o in graph.output}
    inputs = [i for i in graph.input if i.name not in values]
    graph.ClearField("node")
    graph.node.extend(kept)
    graph.ClearField("initializer")
    graph.initializer.extend(t for key, t in values.items() if key in used)
    graph.ClearField("input")
    graph.input.extend(inputs)


def _node(node: onnx.NodeProto, index: int) -> Node:
    """A `Node` with ONNX's default attributes filled in."""
    domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}::"
    attributes: dict[str, Any] = {}
    if not domain and onnx.defs.has(node.op_type):
        for key, attribute in onnx.defs.get_schema(node.op_type).attributes.items():
            if attribute.default_value.name:
                attributes[key] = _attribute(attribute.default_value)
    attributes.update({a.name: _attribute(a) for a in node.attribute})
    return Node(
        node.name or f"{node.op_type}_{index}", domain + node.op_type, tuple(node.input), tuple(node.output), attributes
    )


def _without_unused_outputs(nodes: list[Node], wanted: Iterable[str]) -> tuple[Node, ...]:
    """The nodes without optional outputs that nobody reads, such as Dropout's mask, which then need not be computed."""
    read = {*wanted, *(name for node in nodes for name in node.inputs)}
    kept = []
    for node in nodes:
        outputs = [name if i == 0 or name in read else "" for i, name in enumerate(node.outputs)]
        while len(outputs) > 1 and not outputs[-1]:
            outputs.pop()
        kept.append(replace(node, outputs=tuple(outputs)))
    return tuple(kept)


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, int | float):
        return value
    return [v.decode() if isinstance(v, bytes) else v for v in value]


def _shapes(model: onnx.ModelProto) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {t.name: tuple(t.dims) for t in model.graph.initializer}
    for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        if value.type.tensor_type.HasField("shape"):
            shapes[value.name] = tuple(
                d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim
            )
    return shapes


def _load_external_data(model: onnx.ModelProto, path: Path) -> None:
    folder = path.parent.resolve()
    tensors = [*model.graph.initializer, *(a.t for n in model.graph.node for a in n.attribute if a.HasField("t"))]
    for tensor in tensors:
        if not onnx.external_data_helper.uses_external_data(tensor):
            continue
        location = {e.key: e.value for e in tensor.external_data}.get("location", "")
        target = folder / location
        if not location or not target.resolve().is_relative_to(folder) or target.is_symlink():
            raise NetworkError(
                f"the data of tensor {tensor.name!r} lie outside the model's folder: {location!r}",
                where=str(path),
                hint="Put the model and its data into one folder.",
            )
        if not target.is_file():
            raise NetworkError(f"the data file {location!r} of tensor {tensor.name!r} is missing", where=str(path))
    try:
        onnx.external_data_helper.load_external_data_for_model(model, str(folder))
    except Exception as error:  # onnx raises several unrelated types for bad offsets and lengths
        raise NetworkError(f"the model's external data cannot be read: {error}", where=str(path)) from error
