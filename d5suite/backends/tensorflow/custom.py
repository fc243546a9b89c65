"""Custom operators as TensorFlow operators, with a registered gradient where they have a backward pass.

`custom.cc` makes a C++ source a TensorFlow operator library; a Python operator is called from the graph. Imports
TensorFlow, NumPy, `d5suite.custom` and `d5suite.errors`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from d5suite.custom import CustomOperator, Glue, compile_library
from d5suite.errors import NetworkError

Call = Callable[..., Any]

_registered: dict[str, Call] = {}


def factory(custom: CustomOperator) -> Callable[[Any, Any], Call]:
    """A factory, like those of `operators.OPERATORS`, for a custom operator.

    Raises
    ------
    CompileError
        If its source does not compile.
    NetworkError
        If it is to be compiled by XLA, or not all its outputs are wanted.
    """

    def build(node: Any, context: Any) -> Call:
        if context.xla:
            raise NetworkError(
                "TensorFlow's XLA compiles only its own operators, not kernels and callbacks added to it",
                where=custom.name,
                hint="Choose the mode 'graph' or 'eager'.",
            )
        if not all(node.outputs) or len(node.outputs) != len(custom.outputs):
            raise NetworkError("every output of a custom operator must be wanted", where=custom.name)
        types = [tf.as_dtype(context.dtypes[output]) for output in node.outputs]
        if custom.source is not None:
            call = _from_source(custom, context.device, types)
        else:
            call = _from_python(custom, [context.shapes[output] for output in node.outputs], types)
        if len(types) == 1:
            return lambda *inputs: call(*inputs)[0]
        return lambda *inputs: tuple(call(*inputs))

    return build


def _from_source(custom: CustomOperator, device: str, types: Sequence[Any]) -> Call:
    # TensorFlow wants a capital letter first.
    name = f"D5{custom.identifier}" + ("" if device == "cpu" else f"_{device}")
    if name not in _registered:
        _registered[name] = _register(custom, name, device)
    operator = _registered[name]
    return lambda *inputs: operator(inputs=inputs, Toutputs=types)


def _register(custom: CustomOperator, name: str, device: str) -> Call:
    library = tf.load_op_library(str(_compiled(custom, name, device)))
    if custom.differentiable:
        _register_gradient(name, len(custom.inputs), getattr(library, f"{name}Backward"))
    operator: Call = getattr(library, name)
    return operator


def _compiled(custom: CustomOperator, name: str, device: str) -> Path:
    definitions = {
        "D5_INPUTS": str(len(custom.inputs)),
        "D5_OUTPUTS": str(len(custom.outputs)),
        **({"D5_HAS_BACKWARD": "1"} if custom.differentiable else {}),
        **({"D5_CUDA": "1", "GOOGLE_CUDA": "1"} if device == "cuda" else {}),
    }
    flags = [flag.replace("-I", "-isystem", 1) for flag in tf.sysconfig.get_compile_flags()]  # quiet about warnings
    if device == "cuda":
        compiler = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve()
        flags += ["-isystem", str(compiler.parent.parent / "include")]
    glue = Glue(
        source=Path(__file__).with_name("custom.cc"),
        compile_flags=tuple(flags),
        link_flags=tuple(tf.sysconfig.get_link_flags()),
        definitions=tuple(definitions.items()),
    )
    return compile_library(
        custom.name, custom.code(device), glue=glue, identifier=name, attributes=custom.attributes, flags=custom.flags
    )


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
    run, run_backward = custom.forward, custom.backward
    assert run is not None  # a custom operator has either a source or this

    def forward(inputs: Sequence[Any]) -> list[Any]:
        def host(*arrays: np.ndarray) -> list[np.ndarray]:
            found = run(*_read_only(arrays), **custom.attributes)
            return _like(types, found if isinstance(found, tuple) else (found,))

        return _called(host, inputs, types, shapes)

    def backward(inputs: Sequence[Any], outputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        if run_backward is None:
            raise NetworkError("it has no backward pass", where=custom.name)
        floating = [x.dtype.is_floating for x in inputs]
        kinds = [x.dtype for x in inputs if x.dtype.is_floating]
        count = len(inputs)

        def host(*arrays: np.ndarray) -> list[np.ndarray]:
            middle = count + len(outputs)
            arrays = _read_only(arrays)
            given = arrays[:count]
            found = run_backward(given, arrays[count:middle], arrays[middle:], **custom.attributes)
            kept = [
                np.zeros(x.shape) if g is None else g
                for x, g, asked in zip(given, found, floating, strict=True)
                if asked
            ]
            return _like(kinds, kept)

        shapes = [x.shape for x in inputs if x.dtype.is_floating]
        found = iter(_called(host, [*inputs, *outputs, *_heads(outputs, gradients)], kinds, shapes))
        return [next(found) if asked else None for asked in floating]

    def operator(*inputs: Any) -> Any:
        outputs = forward(inputs)
        return outputs, lambda *gradients: backward(inputs, outputs, gradients)

    differentiable: Call = tf.custom_gradient(operator)
    return differentiable


def _called(host: Call, inputs: Sequence[Any], kinds: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    """The tensors that a function of arrays gives, with their shapes where these are known."""
    found = tf.numpy_function(host, list(inputs), kinds, stateful=False)
    found = [found] if isinstance(found, tf.Tensor) else list(found)  # of a list of one, eager mode gives that one
    for tensor, shape in zip(found, shapes, strict=True):
        tensor.set_shape(shape)
    return found


def _heads(outputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """A gradient for each output: zeros for those that nothing depends on."""
    return [tf.zeros_like(y) if g is None else tf.convert_to_tensor(g) for y, g in zip(outputs, gradients, strict=True)]


def _read_only(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The same memory, which is a graph's own."""
    views = tuple(np.asarray(array).view() for array in arrays)
    for view in views:
        view.flags.writeable = False
    return views


def _like(kinds: Sequence[Any], arrays: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(array, kind.as_numpy_dtype) for kind, array in zip(kinds, arrays, strict=True)]
