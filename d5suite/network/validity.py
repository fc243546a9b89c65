"""Refuse invalid nodes that ONNX's checker and shape inference accept.

Examples: inconsistent shapes of weights, states, masks and labels, windows larger than the image,
indices out of range, unknown attribute values. The rules are those of the operators' ONNX
specification. May import NumPy and, from d5suite, `network` and `errors`. One file, because it is
one table of rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network.graph import Graph, Node, Shape
from d5suite.network.limits import require_rank
from d5suite.network.nodes.equation import expand_equation
from d5suite.network.nodes.windows import Window, window
from d5suite.network.operators import REDUCTIONS

_PADDING = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")

CHOICES: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "Attention": {"is_causal": (0, 1), "qk_matmul_output_mode": (0, 1, 2, 3)},
    "AveragePool": {"auto_pad": _PADDING},
    "BitShift": {"direction": ("LEFT", "RIGHT")},
    "Conv": {"auto_pad": _PADDING},
    "ConvTranspose": {"auto_pad": _PADDING},
    "DFT": {"inverse": (0, 1), "onesided": (0, 1)},
    "GRU": {"direction": ("forward", "reverse", "bidirectional"), "layout": (0, 1), "linear_before_reset": (0, 1)},
    "Gelu": {"approximate": ("none", "tanh")},
    "GridSample": {
        "mode": ("linear", "nearest", "cubic", "bilinear", "bicubic"),
        "padding_mode": ("zeros", "border", "reflection"),
    },
    "LSTM": {"direction": ("forward", "reverse", "bidirectional"), "layout": (0, 1), "input_forget": (0, 1)},
    "LpNormalization": {"p": (2, 1)},
    "LpPool": {"auto_pad": _PADDING},
    "MaxPool": {"auto_pad": _PADDING, "storage_order": (0, 1)},
    "Pad": {"mode": ("constant", "reflect", "edge", "wrap")},
    "Resize": {
        "mode": ("nearest", "linear", "cubic"),
        "nearest_mode": ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
        "keep_aspect_ratio_policy": ("stretch", "not_larger", "not_smaller"),
        "coordinate_transformation_mode": (
            "half_pixel",
            "half_pixel_symmetric",
            "pytorch_half_pixel",
            "align_corners",
            "asymmetric",
            "tf_crop_and_resize",
        ),
    },
    "STFT": {"onesided": (1, 0)},
    "ScatterElements": {"reduction": ("none", "add", "mul", "max", "min")},
    "ScatterND": {"reduction": ("none", "add", "mul", "max", "min")},
    "SoftmaxCrossEntropyLoss": {"reduction": ("none", "sum", "mean")},
}
"""Allowed values of attributes that ONNX's checker does not check."""

ACTIVATIONS = frozenset({
    "relu", "tanh", "sigmoid", "affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu", "softsign",
    "softplus",
})  # fmt: skip
"""Activation functions of a recurrence, in lower case; ONNX ignores the case."""

LARGEST_TENSOR = 1 << 31
"""Limit of values in one tensor for one image; the zoo's largest has 3 million, at 224 pixels."""

LARGEST_PADDING = 64
"""Limit of padding on a side of a smaller image; ASPP pads 36 at its largest rate."""

_PER_IMAGE = frozenset({
    "AveragePool", "Clip", "Col2Im", "Conv", "ConvTranspose", "DFT", "Det", "Div", "Dropout", "GlobalAveragePool",
    "GlobalLpPool", "GlobalMaxPool", "LRN", "LayerNormalization", "LpPool", "MaxPool", "Mod", "STFT", "Transpose",
})  # fmt: skip
"""Operators whose rules do not depend on the batch size, which may be open."""


@dataclass(frozen=True)
class _NodeCheck:
    """One node with everything that is known before it runs."""

    node: Node
    shapes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, np.ndarray]
    bounds: Mapping[str, tuple[int, int]]

    def refuse(self, what: str) -> NoReturn:
        raise NetworkError(f"{self.node.op_type}: {what}", where=self.node.name)

    def given(self, index: int) -> str | None:
        """Return the name of an input; None if it is omitted."""
        names = self.node.inputs
        return names[index] if index < len(names) and names[index] else None

    def shape(self, index: int) -> tuple[int, ...]:
        return self.shapes[self.node.inputs[index]]

    def expect(self, index: int, *wanted: int) -> None:
        """Refuse an input with another shape; accept an omitted input."""
        name = self.given(index)
        if name is not None and self.shapes[name] != wanted:
            self.refuse(f"input {name!r} has shape {list(self.shapes[name])}, not {list(wanted)}")

    def expect_broadcast(self, index: int, *wanted: int) -> None:
        """Refuse an input that does not broadcast to a shape."""
        name = self.given(index)
        if name is None:
            return
        shape = self.shapes[name]
        fits = len(shape) <= len(wanted) and all(
            n in (1, m) for n, m in zip(reversed(shape), reversed(wanted), strict=False)
        )
        if not fits:
            self.refuse(f"input {name!r} of shape {list(shape)} does not broadcast to {list(wanted)}")

    def expect_within(self, index: int, low: int, high: int, *, ignored: int | None = None) -> None:
        """Refuse integer inputs whose values can lie below ``low`` or above ``high``."""
        name = self.given(index)
        if name is None:
            return
        if name in self.values:
            values = self.values[name]
            values = values if ignored is None else values[values != ignored]
            least, most = (int(values.min()), int(values.max())) if values.size else (low, low)
        elif name in self.bounds:
            least, most = self.bounds[name]
            least = low if least == ignored else least
        else:
            return
        if least < low or most > high:
            self.refuse(f"values of input {name!r} from {least} to {most} leave the range from {low} to {high}")


_RULES: dict[str, Callable[[_NodeCheck], None]] = {}
"""What to check beyond ONNX's shape inference, by operator."""


def _rule(*operators: str) -> Callable[[Callable[[_NodeCheck], None]], Callable[[_NodeCheck], None]]:
    """Register a rule for these operators."""

    def register(check: Callable[[_NodeCheck], None]) -> Callable[[_NodeCheck], None]:
        _RULES.update(dict.fromkeys(operators, check))
        return check

    return register


def require_valid(
    node: Node,
    shapes: Mapping[str, tuple[int, ...]],
    values: Mapping[str, np.ndarray],
    bounds: Mapping[str, tuple[int, int]],
) -> None:
    """Raise a `NetworkError` that names the node if it is invalid.

    Parameters
    ----------
    node : Node
        Accepted by ONNX's checker and shape inference.
    shapes : mapping
        Shapes of its inputs and outputs.
    values : mapping
        Values of its constant inputs.
    bounds : mapping
        Smallest and largest possible values of random integer inputs.
    """
    case = _NodeCheck(node, shapes, values, bounds)
    for key, allowed in CHOICES.get(node.op_type, {}).items():
        value = node.attributes.get(key, allowed[0])
        if value not in allowed:
            case.refuse(f"{key} is {value!r}, not one of {', '.join(map(str, allowed))}")
    if node.op_type in _RULES:
        _RULES[node.op_type](case)
    for name in node.outputs:
        if name and min(shapes[name], default=0) < 0:
            case.refuse(f"output {name!r} would have shape {list(shapes[name])}")


def require_sound(network: Graph) -> None:
    """Raise a `NetworkError` for weights that are not finite and for invalid nodes.

    Such a network would fail in every backend, as if the backends were wrong.

    Parameters
    ----------
    network : Graph
        Accepted by ONNX's checker and shape inference.
    """
    for name in (*network.parameters, *network.statistics):
        values = network.initializers[name]
        wrong = values.size - int(np.isfinite(values).sum())
        if wrong:
            raise NetworkError(
                f"{wrong:,} of {values.size:,} values of initializer {name!r} are NaN or infinite",
                where=network.name,
                hint="Was the network saved after its training diverged?",
            )
    for node in network.nodes:
        tensors = [name for name in (*node.inputs, *node.outputs) if name]
        if node.op_type == "BatchNormalization" and node.inputs[4] in network.initializers:
            least = network.initializers[node.inputs[4]].min(initial=0.0)
            if least < 0:
                raise NetworkError(f"BatchNormalization: the variance {node.inputs[4]!r} has {least}", where=node.name)
        for key, value in node.attributes.items():
            if isinstance(value, float) and not (math.isfinite(value) and (key != "epsilon" or value >= 0)):
                raise NetworkError(f"{node.op_type}: {key} is {value}", where=node.name)
        _require_size(network, node, node.inputs)
        stated = {name: network.shapes.get(name, (None, None)) for name in tensors}
        whole = all(None not in shape for shape in stated.values())
        if whole or (_is_per_image(node, stated) and all(None not in shape[1:] for shape in stated.values())):
            shapes = {name: tuple(n or 1 for n in shape) for name, shape in stated.items()}
            require_valid(node, shapes, network.initializers, {})
        _require_size(network, node, node.outputs)


def _is_per_image(node: Node, shapes: Mapping[str, Shape]) -> bool:
    """Return whether a node's rules hold for a batch of any size."""
    if node.op_type == "Gather":
        return node.attributes["axis"] % max(len(shapes[node.inputs[0]]), 1) != 0
    return node.op_type in _PER_IMAGE


def _require_size(network: Graph, node: Node, tensors: Sequence[str]) -> None:
    for name in tensors:
        require_rank(len(network.shapes.get(name, ())), name)
        sizes = [size for size in network.shapes.get(name, ()) if size is not None]
        # An empty constant is valid: a Reshape to a scalar, no axes.
        if 0 in sizes and name not in network.constants:
            sizes_wanted = "x".join(str(size or "N") for size in network.shapes[name])
            hint = f"State its size: --shape {name}={sizes_wanted}, with a number for each N."
            raise NetworkError(
                f"{node.op_type}: {name!r} of shape {sizes} is empty",
                where=node.name,
                hint=hint if name in network.inputs else None,
            )
        if math.prod(sizes) > LARGEST_TENSOR:
            what = f"{node.op_type}: {name!r} of shape {sizes} has more than {LARGEST_TENSOR:,} values"
            raise NetworkError(what, where=node.name)


@_rule("Conv", "ConvTranspose")
def _convolution(case: _NodeCheck) -> None:
    node, image, weight = case.node, case.shape(0), case.shape(1)
    groups, transposed = node.attributes["group"], node.op_type == "ConvTranspose"
    if groups < 1:
        case.refuse(f"{groups} groups")
    expected = weight[0] if transposed else weight[1] * groups
    if image[1] != expected or weight[0] % groups:
        case.refuse(f"with {groups} group(s): the image has {image[1]} channels and the weight is for {expected}")
    kernel = list(node.attributes.get("kernel_shape") or weight[2:])
    if kernel != list(weight[2:]):
        case.refuse(f"kernel_shape is {kernel}, but the weight's is {list(weight[2:])}")
    if min(kernel, default=1) < 1:
        case.refuse(f"a window of {kernel}")
    case.expect(2, weight[1] * groups if transposed else weight[0])
    if not transposed:
        _window(case, weight[2:])
        return
    output = case.shapes[node.outputs[0]]
    if len(output) != len(image):
        case.refuse(f"output_shape {list(node.attributes.get('output_shape', ()))} is smaller than the image")
    if min(output[2:], default=1) < 1:
        case.refuse(f"output would have shape {list(output)}")
    rank = len(kernel)
    strides, dilations = (node.attributes.get(key) or [1] * rank for key in ("strides", "dilations"))
    added = node.attributes.get("output_padding") or [0] * rank
    if any(not 0 <= p < max(s, d) for p, s, d in zip(added, strides, dilations, strict=False)):
        case.refuse(f"output_padding {list(added)} is not below strides {list(strides)} or dilations {list(dilations)}")


def _window(case: _NodeCheck, kernel: tuple[int, ...] = ()) -> Window:
    """Resolve a window; refuse huge padding, which would fill the memory."""
    found = window(case.node, case.shape(0)[2:], kernel)
    for size, *pads in zip(found.image, found.pads_begin, found.pads_end, strict=True):
        if max(pads) > max(size, LARGEST_PADDING):
            case.refuse(f"pads {pads} of an image of {size}")
    return found


@_rule("AveragePool", "LpPool", "MaxPool")
def _pool(case: _NodeCheck) -> None:
    if case.node.attributes.get("p", 1) < 1:
        case.refuse(f"a norm of order {case.node.attributes['p']}")
    found = _window(case)
    spans = [(k - 1) * d + 1 for k, d in zip(found.kernel, found.dilations, strict=True)]
    pads = [max(both) for both in zip(found.pads_begin, found.pads_end, strict=True)]
    if any(pad >= span for pad, span in zip(pads, spans, strict=True)):
        case.refuse(f"a window of {spans} would see only padding, of {pads}")


@_rule("Col2Im")
def _columns(case: _NodeCheck) -> None:
    node, (_, rows, columns) = case.node, case.shape(0)
    image, kernel = (tuple(map(int, case.values[node.inputs[index]])) for index in (1, 2))
    if min((*image, *kernel), default=1) < 1 or len(image) != len(kernel):
        case.refuse(f"blocks of {list(kernel)} of an image of {list(image)}")
    found = window(node, image, kernel)
    if rows % math.prod(kernel) or columns != math.prod(found.outputs):
        wanted = f"{math.prod(found.outputs)} columns of a multiple of {math.prod(kernel)}"
        case.refuse(f"input {node.inputs[0]!r} of shape {list(case.shape(0))} is not {wanted}")


@_rule("MaxUnpool")
def _unpool(case: _NodeCheck) -> None:
    node, pooled = case.node, case.shape(0)
    case.expect(1, *pooled)
    rank = len(pooled) - 2
    kernel = node.attributes["kernel_shape"]
    strides, pads = node.attributes.get("strides") or [1] * rank, node.attributes.get("pads") or [0] * 2 * rank
    if not len(kernel) == len(strides) == len(pads) / 2 == rank or min((*kernel, *strides), default=1) < 1:
        case.refuse(f"a window of {list(kernel)} with strides {list(strides)} and pads {list(pads)}")
    image = [(n - 1) * s + k for n, s, k in zip(pooled[2:], strides, kernel, strict=True)]
    sizes = [n - a - b for n, a, b in zip(image, pads[:rank], pads[rank:], strict=True)]
    name = case.given(2)
    requested = case.values.get(name or "")
    if min(sizes, default=1) < 1 or (
        requested is not None and (len(requested) != rank + 2 or (requested[2:] < sizes).any())
    ):
        case.refuse(f"an image of {sizes} does not fit output_shape {requested}")
    case.expect_within(1, 0, math.prod(pooled[:2]) * math.prod(sizes) - 1)


def _scalar(case: _NodeCheck, index: int) -> int | None:
    """Return the value of a scalar input; None if it is omitted or computed."""
    name = case.given(index)
    return int(case.values[name].item()) if name is not None and name in case.values else None


@_rule("DFT")
def _dft(case: _NodeCheck) -> None:
    shape, length, a = case.shape(0), _scalar(case, 1), case.node.attributes
    if length == 0:
        case.refuse("a length of 0")
    if len(shape) < 2 or shape[-1] not in (1, 2):
        case.refuse(f"input {case.node.inputs[0]!r} of shape {list(shape)} does not end in real and imaginary parts")
    if a["onesided"] and (shape[-1] == 1) == bool(a["inverse"]):
        case.refuse("onesided requires real input, or complex input for the inverse")


@_rule("Slice")
def _slice(case: _NodeCheck) -> None:
    if len(case.shape(1)) != 1:
        case.refuse(f"input {case.node.inputs[1]!r} of shape {list(case.shape(1))} is not a vector")


@_rule("STFT")
def _stft(case: _NodeCheck) -> None:
    shape, (step, length) = case.shape(0), (_scalar(case, index) for index in (1, 3))
    if len(shape) != 3 or shape[-1] not in (1, 2):
        case.refuse(f"input {case.node.inputs[0]!r} of shape {list(shape)} is not (batch, length, 1 or 2)")
    if step is not None and step < 1:
        case.refuse(f"a step of {step}")
    window = case.given(2)
    if length is None and window is not None:
        length = case.shapes[window][0]
    if length is not None and not 1 <= length <= shape[1]:
        case.refuse(f"frames of {length} of a signal of {shape[1]}")
    if case.node.attributes["onesided"] and shape[-1] == 2:
        case.refuse("onesided wants a signal of real numbers")


@_rule("ReverseSequence")
def _reverse(case: _NodeCheck) -> None:
    shape, a = case.shape(0), case.node.attributes
    if len(shape) < 2 or sorted((a["time_axis"], a["batch_axis"])) != [0, 1]:
        case.refuse(
            f"time_axis {a['time_axis']} and batch_axis {a['batch_axis']} are not the first two of {len(shape)}"
        )
    case.expect(1, shape[a["batch_axis"]])
    case.expect_within(1, 0, shape[a["time_axis"]])


@_rule("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LRN")
def _image(case: _NodeCheck) -> None:
    if len(case.shape(0)) < 3:
        case.refuse(
            f"input {case.node.inputs[0]!r} of shape {list(case.shape(0))} is not an image: it has no spatial axes"
        )
    if case.node.attributes.get("p", 1) < 1:
        case.refuse(f"a norm of order {case.node.attributes['p']}")
    if case.node.attributes.get("size", 1) < 1:
        case.refuse(f"size is {case.node.attributes['size']}")


@_rule("LayerNormalization", "RMSNormalization")
def _layer_normalization(case: _NodeCheck) -> None:
    shape, axis = case.shape(0), case.node.attributes["axis"]
    if not -len(shape) <= axis < len(shape):
        case.refuse(f"axis {axis} of {len(shape)}")
    for index in (1, 2):
        case.expect_broadcast(index, *shape[axis % len(shape) :])


@_rule("SoftmaxCrossEntropyLoss")
def _loss(case: _NodeCheck) -> None:
    scores = case.shape(0)
    if len(scores) < 2:
        case.refuse(f"scores of shape {list(scores)} are not (batch, classes, ...)")
    case.expect(1, scores[0], *scores[2:])
    case.expect(2, scores[1])
    case.expect_within(1, 0, scores[1] - 1, ignored=case.node.attributes.get("ignore_index"))


@_rule("Div", "Mod")
def _divide(case: _NodeCheck) -> None:
    divisor = case.values.get(case.node.inputs[1])
    if divisor is not None and divisor.dtype.kind in "iu" and not divisor.all():
        case.refuse("integers are divided by 0")


@_rule("Gather")
def _gather(case: _NodeCheck) -> None:
    shape = case.shape(0)
    rows = shape[case.node.attributes["axis"]]
    case.expect_within(1, -rows, rows - 1)


@_rule("GatherElements", "ScatterElements")
def _elements(case: _NodeCheck) -> None:
    shape, indices, axis = case.shape(0), case.shape(1), case.node.attributes["axis"]
    rank = len(shape)
    if len(indices) != rank or not -rank <= axis < rank:
        case.refuse(f"axis {axis} of {rank}, and indices of {len(indices)} axes")
    if any(m > n for a, (n, m) in enumerate(zip(shape, indices, strict=True)) if a != axis % rank):
        case.refuse(f"indices of shape {list(indices)} reach beyond data of shape {list(shape)}")
    case.expect(2, *indices)
    case.expect_within(1, -shape[axis], shape[axis] - 1)


@_rule("GatherND", "ScatterND")
def _tuples(case: _NodeCheck) -> None:
    shape, indices, batch = case.shape(0), case.shape(1), case.node.attributes.get("batch_dims", 0)
    if not indices or not 0 <= batch < min(len(shape), len(indices)) or indices[:batch] != shape[:batch]:
        case.refuse(f"indices of shape {list(indices)} share no {batch} axes with data of shape {list(shape)}")
    sizes = shape[batch : batch + indices[-1]]
    if len(sizes) != indices[-1]:
        case.refuse(f"indices name {indices[-1]} axes of data of shape {list(shape)}")
    case.expect(2, *indices[:-1], *shape[len(sizes) :])
    name = case.node.inputs[1]
    if name in case.values:
        beyond = np.abs(case.values[name] + 0.5) > np.array(sizes)  # from -size to size - 1
        if beyond.any():
            case.refuse(f"an index in {name!r} reaches beyond data of shape {list(shape)}")
    else:
        case.expect_within(1, -min(sizes), min(sizes) - 1)


@_rule("TopK")
def _top_k(case: _NodeCheck) -> None:
    size, name = case.shape(0)[case.node.attributes["axis"]], case.given(1)
    if name is not None and name in case.values and not 0 <= case.values[name].item() <= size:
        case.refuse(f"{case.values[name].item()} of {size} values")


@_rule("Einsum")
def _einsum(case: _NodeCheck) -> None:
    shapes = [case.shape(index) for index in range(len(case.node.inputs))]
    terms = expand_equation(case.node.attributes["equation"], [len(shape) for shape in shapes]).inputs
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        if len(term) != len(shape):
            case.refuse(f"{term!r} names {len(term)} of {len(shape)} axes")
        for letter, size in zip(term, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                case.refuse(f"{letter!r} names axes of {sizes[letter]} and {size} in {terms}")


@_rule("Gemm")
def _gemm(case: _NodeCheck) -> None:
    case.expect_broadcast(2, *case.shapes[case.node.outputs[0]])


@_rule("PRelu")
def _slope(case: _NodeCheck) -> None:
    case.expect_broadcast(1, *case.shape(0))


@_rule("Transpose")
def _transpose(case: _NodeCheck) -> None:
    rank, order = len(case.shape(0)), case.node.attributes.get("perm")
    if order is not None and sorted(order) != list(range(rank)):
        case.refuse(f"perm {list(order)} is not an order of {rank} axes")


@_rule(*REDUCTIONS)
def _reduce(case: _NodeCheck) -> None:
    name, rank = case.given(1), len(case.shape(0))
    if name is not None and name in case.values:
        axes = [int(axis) % rank for axis in case.values[name].reshape(-1)] if rank else []
        if len(set(axes)) < len(axes):
            case.refuse(f"axes {case.values[name].tolist()} repeat one")


@_rule("DepthToSpace", "SpaceToDepth")
def _blocks(case: _NodeCheck) -> None:
    shape, size = case.shape(0), case.node.attributes["blocksize"]
    to_space = case.node.op_type == "DepthToSpace"
    divided, by = (shape[1:2], size * size) if to_space else (shape[2:], size)
    if size < 1 or any(n % by for n in divided):
        case.refuse(f"input {case.node.inputs[0]!r} of shape {list(shape)} is not made of blocks of {size}")


@_rule("InstanceNormalization")
def _instance_normalization(case: _NodeCheck) -> None:
    shape = case.shape(0)
    if len(shape) < 3:
        case.refuse(f"input {case.node.inputs[0]!r} has shape {list(shape)}, without spatial axes")
    case.expect(1, shape[1])
    case.expect(2, shape[1])


@_rule("GroupNormalization")
def _group_normalization(case: _NodeCheck) -> None:
    channels, groups = case.shape(0)[1], case.node.attributes["num_groups"]
    if groups < 1 or channels % groups:
        case.refuse(f"{channels} channels are not {groups} groups")
    case.expect(1, channels)
    case.expect(2, channels)


@_rule("Clip")
def _clip(case: _NodeCheck) -> None:
    for index in (1, 2):
        case.expect(index)


@_rule("Dropout")
def _dropout(case: _NodeCheck) -> None:
    name = case.given(1)
    case.expect(1)
    if name is not None and name in case.values and not 0 <= float(case.values[name]) < 1:
        case.refuse(f"ratio {float(case.values[name])} is not from 0 to below 1")


@_rule("Reshape")
def _reshape(case: _NodeCheck) -> None:
    before, after = case.shape(0), case.shapes[case.node.outputs[0]]
    if math.prod(before) != math.prod(after):
        case.refuse(f"{list(before)} has {math.prod(before)} values, but {list(after)} has {math.prod(after)}")


@_rule("GRU", "LSTM")
def _recurrent(case: _NodeCheck) -> None:
    node, attributes = case.node, case.node.attributes
    gates, functions = (4, 3) if node.op_type == "LSTM" else (3, 2)
    directions = 2 if attributes["direction"] == "bidirectional" else 1
    hidden, batch_first = attributes["hidden_size"], bool(attributes["layout"])
    first, second, features = case.shape(0)
    steps, batch = (second, first) if batch_first else (first, second)
    case.expect(1, directions, gates * hidden, features)
    case.expect(2, directions, gates * hidden, hidden)
    case.expect(3, directions, 2 * gates * hidden)
    case.expect(4, batch)
    case.expect_within(4, 0, steps)
    state = (batch, directions, hidden) if batch_first else (directions, batch, hidden)
    for index in (5, 6):
        case.expect(index, *state)
    case.expect(7, directions, 3 * hidden)
    named = attributes.get("activations") or []
    if len(named) not in (0, directions * functions) or {name.lower() for name in named} - ACTIVATIONS:
        case.refuse(f"activations {list(named)} are not {directions * functions} ONNX functions")


@_rule("Attention")
def _attention(case: _NodeCheck) -> None:
    node = case.node
    query, key, value = case.shape(0), case.shape(1), case.shape(2)
    if not len(query) == len(key) == len(value) or len(query) not in (3, 4):
        case.refuse(f"Q, K and V have {len(query)}, {len(key)} and {len(value)} axes, not all 3 or all 4")
    if len(query) == 3:
        heads, kv_heads = node.attributes.get("q_num_heads", 0), node.attributes.get("kv_num_heads", 0)
        if heads < 1 or kv_heads < 1:
            case.refuse("inputs of 3 axes need q_num_heads and kv_num_heads")
        for index, count in ((0, heads), (1, kv_heads), (2, kv_heads)):
            if case.shape(index)[2] % count:
                case.refuse(f"input {node.inputs[index]!r}: {case.shape(index)[2]} values are not {count} heads")
        batch, queries, size = query[0], query[1], query[2] // heads
        keys, value_size = key[1], value[2] // kv_heads
        case.expect(1, batch, keys, kv_heads * size)
        case.expect(2, batch, keys, kv_heads * value_size)
    else:
        (batch, heads, queries, size), (_, kv_heads, keys, _), value_size = query, key, value[3]
        case.expect(1, batch, kv_heads, keys, size)
        case.expect(2, batch, kv_heads, keys, value_size)
    if heads % kv_heads:
        case.refuse(f"{heads} heads of queries cannot share {kv_heads} of keys evenly")
    past_key, past_value = case.given(4), case.given(5)
    if (past_key is None) != (past_value is None):
        case.refuse("give both past keys and past values, or neither")
    past = case.shapes[past_key][2] if past_key is not None and len(case.shapes[past_key]) == 4 else 0
    case.expect(4, batch, kv_heads, past, size)
    case.expect(5, batch, kv_heads, past, value_size)
    mask = case.given(3)
    if mask is not None:
        # A mask may be shorter than the keys; keys beyond its end are masked.
        shape = case.shapes[mask]
        if not shape or (shape[-1] > past + keys):
            case.refuse(f"mask {mask!r} of shape {list(shape)} is for more than {past + keys} keys")
        case.expect_broadcast(3, batch, heads, queries, shape[-1])
    case.expect(6, batch)
    case.expect_within(6, 0, past + keys)
