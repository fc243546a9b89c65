"""Custom operators as TensorFlow operators, with a registered gradient if they have one.

`custom.cc` turns a C++ source into a TensorFlow operator library; the graph calls a Python operator
through ``tf.numpy_function``. Imports TensorFlow, NumPy, `d5suite.custom` and `d5suite.errors`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from d5suite.custom import DEFINITIONS, CustomOperator, Glue, compile_operator
from d5suite.custom.interface import require_all_outputs, require_output_shapes
from d5suite.errors import NetworkError

Call = Callable[..., Any]

_registered: dict[str, tuple[Call, Path]] = {}
"""Registered operators with a source: TensorFlow's function and the library's path."""


def factory(custom: CustomOperator) -> Callable[[Any, Any], Call]:
    """Return a factory, like those of `operators.OPERATORS`, for a custom operator.

    Raises
    ------
    CompileError
        If the operator's source does not compile.
    ConfigurationError
        If the source and the operator's description disagree on the outputs' shapes.
    NetworkError
        If XLA is to compile the operator, or not all of its outputs are wanted.
    """

    def build(node: Any, context: Any) -> Call:
        if context.xla:
            raise NetworkError(
                "TensorFlow's XLA compiles only its own operators, not added kernels and callbacks",
                where=custom.name,
                hint="Choose the mode 'graph' or 'eager'.",
            )
        require_all_outputs(custom, node)
        types = [tf.as_dtype(context.dtypes[output]) for output in node.outputs]
        if custom.source is not None:
            call, library = _from_source(custom, context.device, types)
            require_output_shapes(library, custom, node, context.shapes, context.dtypes, context.device)
        else:
            call = _from_python(custom, [context.shapes[output] for output in node.outputs], types)
        if len(types) == 1:
            return lambda *inputs: call(*inputs)[0]
        return lambda *inputs: tuple(call(*inputs))

    return build


def _from_source(custom: CustomOperator, device: str, types: Sequence[Any]) -> tuple[Call, Path]:
    # TensorFlow requires a capital letter first.
    name = f"D5{custom.identifier}" + ("" if device == "cpu" else f"_{device}")
    if name not in _registered:
        _registered[name] = _register(custom, name, device)
    operator, library = _registered[name]
    return lambda *inputs: operator(inputs=inputs, Toutputs=types), library


def _register(custom: CustomOperator, name: str, device: str) -> tuple[Call, Path]:
    path = _compiled(custom, name, device)
    library = tf.load_op_library(str(path))
    if custom.differentiable:
        _register_gradient(name, len(custom.inputs), getattr(library, f"{name}Backward"))
    return getattr(library, name), path


def _compiled(custom: CustomOperator, name: str, device: str) -> Path:
    # -isystem: no warnings from TensorFlow's headers.
    flags = [flag.replace("-I", "-isystem", 1) for flag in tf.sysconfig.get_compile_flags()]
    flags.append("-U__AVX512FP16__")  # the half-precision code of TensorFlow 2.21's Eigen does not compile with g++ 12
    if device == "cuda":
        compiler = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve()
        flags += ["-isystem", str(compiler.parent.parent / "include")]
    glue = Glue(
        source=Path(__file__).with_name("custom.cc"),
        version=f"tensorflow {tf.__version__}",
        compile_flags=tuple(flags),
        link_flags=tuple(tf.sysconfig.get_link_flags()),
        definitions=DEFINITIONS[device] + ((("GOOGLE_CUDA", "1"),) if device == "cuda" else ()),
    )
    return compile_operator(custom, device=device, glue=glue, identifier=name)


def _register_gradient(name: str, count: int, operator: Call) -> None:
    def gradient(op: Any, *gradients: Any) -> list[Any]:
        inputs, outputs = op.inputs[:count], op.outputs
        types = [x.dtype for x in inputs if x.dtype.is_floating]
        found = iter(
            operator(inputs=inputs, outputs=outputs, output_gradients=_heads(outputs, gradients), Tgradients=types)
        )
        return [next(found) if x.dtype.is_floating else None for x in inputs]

    tf.RegisterGradient(name)(gradient)


def _from_python(custom: CustomOperator, shapes: Sequence[Any], types: Sequence[Any]) -> Call:
    dtypes = [kind.as_numpy_dtype for kind in types]

    def forward(inputs: Sequence[Any]) -> list[Any]:
        def host(*arrays: np.ndarray) -> list[np.ndarray]:
            return custom.call_forward(_read_only(arrays), shapes, dtypes)

        return _called(host, inputs, types, shapes)

    def backward(inputs: Sequence[Any], outputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        if custom.backward is None:
            raise NetworkError("it has no backward pass", where=custom.name)
        floating = [x.dtype.is_floating for x in inputs]
        kinds = [x.dtype for x in inputs if x.dtype.is_floating]
        count = len(inputs)

        def host(*arrays: np.ndarray) -> list[np.ndarray]:
            middle = count + len(outputs)
            arrays = _read_only(arrays)
            found = custom.call_backward(arrays[:count], arrays[count:middle], arrays[middle:])
            return [answer for answer, asked in zip(found, floating, strict=True) if asked]

        shapes = [x.shape for x in inputs if x.dtype.is_floating]
        found = iter(_called(host, [*inputs, *outputs, *_heads(outputs, gradients)], kinds, shapes))
        return [next(found) if asked else None for asked in floating]

    def operator(*inputs: Any) -> Any:
        outputs = forward(inputs)
        return outputs, lambda *gradients: backward(inputs, outputs, gradients)

    differentiable: Call = tf.custom_gradient(operator)
    return differentiable


def _called(host: Call, inputs: Sequence[Any], kinds: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    """Call a function of arrays; return its results as tensors, with their shapes where known."""
    found = tf.numpy_function(host, list(inputs), kinds, stateful=False)
    found = [found] if isinstance(found, tf.Tensor) else list(found)  # eager mode unpacks a list of one
    for tensor, shape in zip(found, shapes, strict=True):
        tensor.set_shape(shape)
    return found


def _heads(outputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Return a gradient for each output, zeros where nothing depends on it."""
    return [tf.zeros_like(y) if g is None else tf.convert_to_tensor(g) for y, g in zip(outputs, gradients, strict=True)]


def _read_only(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return read-only views: the memory belongs to the graph."""
    views = tuple(np.asarray(array).view() for array in arrays)
    for view in views:
        view.flags.writeable = False
    return views
