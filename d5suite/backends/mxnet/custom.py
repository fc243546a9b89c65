"""Custom operators as MXNet library operators or, in Python, as `CustomOp`, both with autograd.

`custom.cc` makes a C++ source an MXNet extension library, whose operators appear in ``mx.nd`` and
``mx.sym`` like MXNet's own. Imports MXNet, NumPy, `d5suite.custom` and `d5suite.errors`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.backends.mxnet.runtime import mx
from d5suite.custom import CustomOperator, Glue, compile_operator
from d5suite.custom.interface import require_all_outputs, require_output_shapes
from d5suite.errors import NetworkError

PREFIX = "d5suite_"
"""Prefix of the operators' names: ``mx.nd.d5suite_Name``."""

_TYPES = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64")
"""Types that library operators support; an index is MXNet's number of the type."""

_registered: dict[str, Path | None] = {}
"""Library of each registered operator; None for a Python operator."""


def factory(custom: CustomOperator) -> Callable[[Any, Any], Callable[..., Any]]:
    """Return a factory, like those of `operators.OPERATORS`, for a custom operator.

    Raises
    ------
    CompileError
        If the operator's source does not compile.
    ConfigurationError
        If the source and the operator's description disagree on the outputs' shapes.
    NetworkError
        If MXNet's library operators do not support the type of a tensor, or not all outputs of the
        operator are wanted.
    """

    def build(node: Any, context: Any) -> Callable[..., Any]:
        require_all_outputs(custom, node)
        name = PREFIX + custom.identifier
        if name not in _registered:
            if custom.source is not None:
                _registered[name] = _register_source(custom, name)
            else:
                _register_python(custom, name)
                _registered[name] = None
        library = _registered[name]
        if library is not None:
            require_output_shapes(library, custom, node, context.shapes, context.dtypes)
        shapes = [context.shapes[key] for key in (*node.inputs, *node.outputs)]
        types = [context.dtypes[key].name for key in (*node.inputs, *node.outputs)]
        if custom.source is None:
            settings = {"op_type": name, "shapes": json.dumps(shapes), "types": json.dumps(types)}
            function = "Custom"
        else:
            settings = _source_settings(custom, shapes, types)
            function = name

        def call(F: Any, *inputs: Any) -> Any:
            found = getattr(F, function)(*inputs, **settings)
            return tuple(found[index] for index in range(len(node.outputs))) if len(node.outputs) > 1 else found

        return call

    return build


def _source_settings(custom: CustomOperator, shapes: Sequence[Any], types: Sequence[str]) -> dict[str, str]:
    """Return the attributes that `custom.cc` reads."""
    for name in types:
        if name not in _TYPES:
            raise NetworkError(f"MXNet's library operators do not support arrays of {name}", where=custom.name)
    numbers = {
        "inputs": [len(custom.inputs)],
        "types": [_TYPES.index(name) for name in types[len(custom.inputs) :]],
        "ranks": [len(shape) for shape in shapes],
    }
    return {key: ",".join(map(str, values)) for key, values in numbers.items()}


def _register_source(custom: CustomOperator, name: str) -> Path:
    include = Path(mx.libinfo.find_include_path())
    glue = Glue(
        source=Path(__file__).with_name("custom.cc"),
        version=f"mxnet {mx.__version__}",
        compile_flags=tuple(flag for folder in (include, include.parent / "src") for flag in ("-isystem", str(folder))),
    )
    path = compile_operator(custom, glue=glue, identifier=name)
    mx.library.load(str(path.resolve()), verbose=False)
    return path


def _register_python(custom: CustomOperator, name: str) -> None:
    class PythonOperator(mx.operator.CustomOp):
        """Calls Python functions on NumPy arrays with ONNX's shapes; MXNet has no 0-d arrays."""

        def __init__(self, shapes: list[list[int]]) -> None:
            super().__init__()
            self._inputs, self._outputs = shapes[: len(custom.inputs)], shapes[len(custom.inputs) :]

        def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
            inputs, dtypes = _arrays(in_data, self._inputs), [np.dtype(target.dtype) for target in out_data]
            self._write(out_data, req, custom.call_forward(inputs, self._outputs, dtypes))

        def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
            inputs, outputs = _arrays(in_data, self._inputs), _arrays(out_data, self._outputs)
            self._write(in_grad, req, custom.call_backward(inputs, outputs, _arrays(out_grad, self._outputs)))

        def _write(self, targets: Any, req: Any, arrays: Sequence[np.ndarray]) -> None:
            for target, how, array in zip(targets, req, arrays, strict=True):
                value = array.reshape(target.shape)
                self.assign(target, how, mx.nd.ndarray.array(value, ctx=target.context, dtype=target.dtype))

    @mx.operator.register(name)
    class Properties(mx.operator.CustomOpProp):
        """Names, shapes and types of the operator's tensors, passed as JSON."""

        def __init__(self, shapes: str, types: str) -> None:
            super().__init__(need_top_grad=True)
            self._shapes, self._types = json.loads(shapes), json.loads(types)

        def list_arguments(self) -> list[str]:
            return list(custom.inputs)

        def list_outputs(self) -> list[str]:
            return list(custom.outputs)

        def infer_shape(self, in_shape: Any) -> Any:
            shapes = [shape or [1] for shape in self._shapes]
            return shapes[: len(custom.inputs)], shapes[len(custom.inputs) :], []

        def infer_type(self, in_type: Any) -> Any:
            types = [np.dtype(kind).type for kind in self._types]
            return types[: len(custom.inputs)], types[len(custom.inputs) :], []

        def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Any:
            return PythonOperator(self._shapes)


def _arrays(tensors: Sequence[Any], shapes: Sequence[Sequence[int]]) -> tuple[np.ndarray, ...]:
    return tuple(tensor.asnumpy().reshape(shape) for tensor, shape in zip(tensors, shapes, strict=True))
