"""Level 0 on PyTorch: one ONNX node and its gradient.

Imports PyTorch, NumPy, `d5suite.levels`, `d5suite.network` and the rest of the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from d5suite.backends.torch import custom as custom_operators
from d5suite.backends.torch.operators.context import CHANNELS_LAST, Context, require_compiler
from d5suite.backends.torch.operators.table import OPERATORS
from d5suite.levels import operator as level
from d5suite.network.operation import PRECISIONS, Operation

_TYPES = {precision: getattr(torch, name) for precision, name in
          {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.items()}  # fmt: skip


class Operator(level.Operator):
    """One ONNX node on PyTorch; its backward pass is autograd's."""

    def __init__(self, operation: Operation, *, mode: str, device: str) -> None:
        super().__init__(operation, mode=mode, device=device)
        if mode == "compile":
            require_compiler()
        context = Context.of_operation(
            operation,
            device=device,
            dtype=_TYPES[operation.precision],
        )
        custom = operation.custom
        factory = OPERATORS[operation.node.op_type] if custom is None else custom_operators.factory(custom)
        call = factory(operation.node, context)
        self.packing = context.packing
        self.forward = call
        if mode == "compile":  # isolated: operators of one factory share its code, and PyTorch compiles 8 forms of it
            self.forward = torch.compile(call, dynamic=False, fullgraph=True, isolate_recompiles=True)

    def to_native(self, name: str, array: np.ndarray) -> torch.Tensor:
        rounded = array.dtype == PRECISIONS["bf16"]
        tensor = torch.tensor(array.view(np.int16) if rounded else array)
        tensor = tensor.view(torch.bfloat16) if rounded else tensor
        layout = CHANNELS_LAST.get(tensor.ndim) if self.mode == "channels_last" else None
        return tensor.to(self.device, memory_format=layout or torch.contiguous_format)

    def backward(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        operation = self.operation
        leaves = list(inputs)
        for index in operation.differentiable:
            leaves[index] = inputs[index].detach().requires_grad_()
        outputs = self.forward(*leaves)
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        heads = [outputs[index] for index in operation.differentiated]
        sources = [leaves[index] for index in operation.differentiable]
        gradient = torch.autograd.grad
        return lambda *gradients: gradient(heads, sources, gradients, retain_graph=True)

    def to_neutral(self, name: str, value: torch.Tensor) -> np.ndarray:
        tensor = value.detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:
            array = tensor.view(torch.int16).numpy().view(PRECISIONS["bf16"])
        else:
            array = tensor.numpy()
        return np.array(array, self.operation.dtypes[name], order="C")

    def extent(self, value: Any) -> tuple[int, int] | None:
        if not isinstance(value, torch.Tensor):
            return None
        memory = value.untyped_storage()
        return memory.data_ptr(), memory.nbytes()

    def synchronize(self, *results: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
