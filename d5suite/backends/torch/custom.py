"""Custom operators as PyTorch library operators, with autograd if they have a backward pass.

`custom.cc` registers a C++ source with PyTorch's dispatcher; this module registers Python
operators. Imports PyTorch, NumPy, ONNX's type numbers, `d5suite.custom` and `d5suite.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx.helper import np_dtype_to_tensor_dtype, tensor_dtype_to_np_dtype

from d5suite.custom import DEFINITIONS, CustomOperator, Glue, compile_operator
from d5suite.custom.interface import require_all_outputs, require_output_shapes

NAMESPACE = "d5suite"
"""Namespace of the operators: ``torch.ops.d5suite.Name``."""

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_registered: dict[str, Path | None] = {}
"""Registered operators, with the library of those that have a source."""


def factory(custom: CustomOperator) -> Callable[[Any, Any], Callable[..., Any]]:
    """Return a factory, like those of `operators.OPERATORS`, for a custom operator.

    Raises
    ------
    CompileError
        If the operator's source does not compile.
    ConfigurationError
        If the source and the operator's description disagree on the outputs' shapes.
    NetworkError
        If not all outputs of the operator are wanted.
    """

    def build(node: Any, context: Any) -> Callable[..., Any]:
        require_all_outputs(custom, node)
        name = custom.identifier + ("" if context.device == "cpu" else f"_{context.device}")
        shapes = [context.shapes[output] for output in node.outputs]
        if custom.source is None:  # it checks its outputs' shapes, so they are part of its name
            name += "".join(f"_{'x'.join(map(str, shape))}" for shape in shapes)
        if name not in _registered:
            if custom.source is not None:
                _registered[name] = _register_source(custom, name, context.device)
            else:
                _register_python(custom, name, shapes)
                _registered[name] = None
            _register_autograd(custom, name)
        library = _registered[name]
        if library is not None:
            require_output_shapes(library, custom, node, context.shapes, context.dtypes, context.device)
        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        types = [np_dtype_to_tensor_dtype(context.dtypes[output]) for output in node.outputs]
        if len(types) == 1:
            return lambda *inputs: operator(inputs, types)[0]
        return lambda *inputs: tuple(operator(inputs, types))

    return build


def _register_source(custom: CustomOperator, name: str, device: str) -> Path:
    from torch.utils import cpp_extension  # which imports setuptools

    libraries = ["c10", "torch_cpu", "torch", *(["c10_cuda", "torch_cuda"] if device == "cuda" else [])]
    folders = cpp_extension.library_paths(device)
    glue = Glue(
        source=Path(__file__).with_name("custom.cc"),
        version=f"torch {torch.__version__}",
        compile_flags=tuple(flag for folder in cpp_extension.include_paths(device) for flag in ("-isystem", folder)),
        link_flags=tuple(
            flag
            for flags in (
                [f"-L{folder}" for folder in folders],
                [f"-Wl,-rpath,{folder}" for folder in folders],
                [f"-l{library}" for library in libraries],
            )
            for flag in flags
        ),
        definitions=DEFINITIONS[device],
    )
    path = compile_operator(custom, device=device, glue=glue, identifier=name)
    torch.ops.load_library(str(path))
    return path


def _register_python(custom: CustomOperator, name: str, shapes: Sequence[Sequence[int]]) -> None:
    def run(inputs: Sequence[torch.Tensor], types: Sequence[int]) -> list[torch.Tensor]:
        dtypes = [tensor_dtype_to_np_dtype(number) for number in types]
        return _tensors(custom.call_forward(_arrays(inputs), shapes, dtypes), inputs[0].device)

    _library.define(f"{name}(Tensor[] inputs, int[] types) -> Tensor[]")
    _library.impl(name, run, "CompositeExplicitAutograd")
    if custom.backward is None:
        return

    def run_backward(
        inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        found = custom.call_backward(_arrays(inputs), _arrays(outputs), _arrays(gradients))
        return _tensors(found, inputs[0].device)

    _library.define(f"{name}_backward(Tensor[] inputs, Tensor[] outputs, Tensor[] gradients) -> Tensor[]")
    _library.impl(f"{name}_backward", run_backward, "CompositeExplicitAutograd")


def _register_autograd(custom: CustomOperator, name: str) -> None:
    if not custom.differentiable:
        return
    operator = getattr(getattr(torch.ops, NAMESPACE), f"{name}_backward").default

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        ctx.count = len(inputs[0])
        ctx.save_for_backward(*inputs[0], *output)

    def backward(ctx: Any, gradients: list[torch.Tensor]) -> tuple[list[torch.Tensor | None], None]:
        inputs, outputs = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        heads = [torch.zeros_like(y) if g is None else g for y, g in zip(outputs, gradients, strict=True)]
        answers = operator(list(inputs), list(outputs), heads)
        return [a if x.is_floating_point() else None for x, a in zip(inputs, answers, strict=True)], None

    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_library)


def _arrays(tensors: Sequence[torch.Tensor]) -> tuple[np.ndarray, ...]:
    return tuple(tensor.detach().cpu().numpy() for tensor in tensors)


def _tensors(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]
