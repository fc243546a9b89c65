"""The clauses of the contract between d5suite and an adapter, and the checks of single answers against them.

An adapter that breaks one gets a `ContractError` with its name and the clause's, from a benchmark's validation and from
the conformance kit alike. Imports NumPy, `d5suite.errors` and the other level modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from d5suite.errors import BackendError

if TYPE_CHECKING:
    from d5suite.levels.network import Executor

CLAUSES: Mapping[str, str] = {
    "backend.name": "an entry point of the group d5suite.backends has the name of the Backend it leads to, and no "
    "other plug-in has that name",
    "backend.hygiene": "importing the Backend object imports no framework",
    "backend.data": "modes, devices, precisions and levels are declared with known names",
    "backend.modules": "the adapter has the modules of d5suite.levels.backend.MODULES with the functions and classes "
    "they are to offer, and names the absent ones in Backend.absent",
    "backend.absent": "every device, precision and module that the adapter lacks is in Backend.absent with a reason",
    "backend.operators": "Backend.operators and Backend.single_operators are what the operators module implements",
    "backend.tolerances": "every declared precision has tolerances with a reason",
    "backend.refusal": "a mode, device, precision or operator that is not declared is refused with a BackendError or "
    "an UnsupportedOperatorError before anything runs",
    "executor.class": "network.Executor is a d5suite.levels.network.Executor",
    "executor.feed": "feed takes the network's inputs of the shapes it declares, and refuses others with a "
    "NetworkError",
    "executor.forward": "forward gives the network's output, the same each time, and fetch its value, for a batch of "
    "any size, within the precision's tolerance",
    "executor.forward_backward": "forward_backward gives the loss, and a gradient of its shape for every parameter, "
    "and refuses a network without a loss with a NetworkError",
    "executor.statistics": "forward_backward and a training step move running statistics by the batch's mean and "
    "biased variance, whatever the batch's size",
    "executor.fetch": "fetch gives NumPy arrays of the neutral shape: float64 for fp64, float32 otherwise",
    "executor.finite": "the answers to finite inputs are finite",
    "executor.parameters": "parameters gives copies of all parameters and running statistics, and load_parameters "
    "overwrites those it is given, of this executor alone, and refuses unknown names and wrong shapes with a "
    "NetworkError",
    "executor.random": "random_state holds what Dropout draws from: an executor that loads it draws the same numbers",
    "executor.inference": "forward changes no parameter and no running statistic",
    "executor.synchronize": "synchronize returns only when all work issued so far has finished",
    "executor.quiet": "nothing is printed while a network runs",
    "operator.class": "operators.Operator is a d5suite.levels.operator.Operator",
    "operator.feed": "feed takes one array for each input of the node, and refuses others with a NetworkError",
    "operator.forward": "forward gives the wanted outputs, the same each time, and changes none of its inputs",
    "operator.backward": "backward gives a callable from the outputs' gradients to a gradient for every differentiable "
    "input, the same each time",
    "operator.fetch": "fetch gives NumPy arrays of ONNX's shapes and types",
    "operator.synchronize": "synchronize, given what the last call returned, returns only when all work issued so far "
    "has finished",
    "operator.extent": "extent tells where a tensor lies in memory, so that views differ from results of their own, or "
    "gives None for every tensor",
    "operators.meaning": "an operator means what ONNX says",
    "gradient.meaning": "the gradient is the derivative of the mean loss over the batch",
    "trainer.class": "training.Trainer is a d5suite.levels.training.Trainer",
    "trainer.loss": "step gives the loss before the update as a scalar",
    "trainer.meaning": "the optimizer follows the formula in d5suite.levels.training in every precision, also when "
    "gradients are clipped, averaged over several batches, or the learning rate changes",
    "trainer.scaling": "in fp16 the scale of the loss follows d5suite.levels.training.LossScaling, and a gradient that "
    "is not finite updates nothing",
    "trainer.state": "state gives what the formula remembers, and a trainer that loads it goes on as this one would",
    "runtime.seed": "the same seed gives the same random numbers, and another seed others",
    "runtime.threads": "no more threads work at a time than runtime.configure was told",
}
"""By name: what the contract says."""


class ContractError(BackendError):
    """An adapter does not do what the contract says; the message names the adapter and the clause.

    Parameters
    ----------
    backend : str
        The adapter's name.
    clause : str
        A key of `CLAUSES`.
    what : str
        What it did instead.
    """

    def __init__(self, backend: str, clause: str, what: str) -> None:
        self.backend = backend
        self.clause = clause
        super().__init__(
            f"backend {backend!r} breaks clause {clause!r} of the contract: {what}",
            hint=f"The clause: {CLAUSES[clause]}.",
        )


def require_answer(
    executor: Executor, clause: str, answer: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise `ContractError` unless all expected tensors are there, with their shapes, dtype and finite numbers.

    Parameters
    ----------
    executor : Executor
        Whose answer it is.
    clause : str
        The clause that says what tensors there must be.
    answer : mapping
        What ``executor.fetch`` gave.
    expected : mapping of str to tuple of int
        Shapes by tensor name.
    """
    backend = executor.backend
    dtype = np.dtype(np.float64 if executor.precision == "fp64" else np.float32)
    for name, shape in expected.items():
        if name not in answer:
            raise ContractError(backend, clause, f"tensor {name!r} is missing from its answer")
        value = answer[name]
        if not isinstance(value, np.ndarray):
            raise ContractError(backend, "executor.fetch", f"tensor {name!r} is a {type(value).__name__}")
        if value.shape != tuple(shape):
            raise ContractError(backend, clause, f"tensor {name!r} has shape {value.shape}, not {tuple(shape)}")
        if value.dtype != dtype:
            raise ContractError(backend, "executor.fetch", f"tensor {name!r} is {value.dtype}, not {dtype}")
        if not np.isfinite(value).all():
            raise ContractError(backend, "executor.finite", f"tensor {name!r} holds numbers that are not finite")
