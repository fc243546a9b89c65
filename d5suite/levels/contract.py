"""The rule book: what an adapter promises d5suite, clause by clause. Read this module first.

A violation raises `ContractError`, both in the validation of a benchmark and in the conformance
kit. The other modules of this package define the classes that the clauses name.

Imports NumPy, `d5suite.errors` and the other level modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from d5suite.errors import BackendError

if TYPE_CHECKING:
    from d5suite.levels.network import Executor

CLAUSES: Mapping[str, str] = {
    # The description: `Backend`, in the adapter's ``__init__``
    "backend.name": "the entry point in the group d5suite.backends has the name of its Backend, and no other plug-in "
    "has that name",
    "backend.hygiene": "importing the Backend object does not import the framework",
    "backend.data": "modes, devices, precisions and levels have known names",
    "backend.modules": "the adapter has the modules of d5suite.levels.backend.MODULES with the required functions and "
    "classes, and lists missing ones in Backend.absent",
    "backend.absent": "Backend.absent gives a reason for every missing device, precision and module",
    "backend.operators": "Backend.operators and Backend.single_operators match what the operators module implements",
    "backend.tolerances": "every declared precision has tolerances with a reason",
    "backend.refusal": "an undeclared mode, device, precision or operator raises a BackendError or an "
    "UnsupportedOperatorError before anything runs",
    # The process: ``runtime``
    "runtime.seed": "equal seeds give equal random numbers, and different seeds different ones",
    "runtime.versions": "the framework's version is that of its installed package",
    "runtime.threads": "at any time, no more threads run than runtime.configure allows, child processes included",
    # Level 0, a single operator: ``operators``
    "operator.class": "operators.Operator is a d5suite.levels.operator.Operator",
    "operator.feed": "feed accepts one array per input of the node and raises a NetworkError for anything else",
    "operator.copy": "feed and feed_gradients copy: the caller may overwrite an array once they have returned, and no "
    "call changes it",
    "operator.forward": "forward returns the wanted outputs of every feed, the same each time (Tolerance.repeats), and "
    "changes none of its inputs",
    "operator.lifetime": "outputs keep their values for as long as the caller holds them, and gradients until the next "
    "call of the function that returned them; a caller may hold several feeds and functions",
    "operator.backward": "backward returns a function from the gradients of the outputs to the gradient of every "
    "differentiable input, the same each time (Tolerance.repeats)",
    "operator.fetch": "fetch returns NumPy arrays of ONNX's shapes and types",
    "operator.synchronize": "synchronize, given the result of the last call, returns only after all issued work has "
    "finished",
    "operator.extent": "extent locates every tensor in memory, so that views can be told from copies, or returns None "
    "for every tensor",
    "operators.meaning": "an operator computes what ONNX specifies",
    # Level 1, a network: ``network``
    "executor.class": "network.Executor is a d5suite.levels.network.Executor",
    "executor.feed": "feed accepts the network's inputs in their declared shapes and raises a NetworkError for "
    "anything else",
    "executor.copy": "feed copies: the caller may overwrite an array once feed has returned, and no call changes it",
    "executor.forward": "forward returns the network's output for every batch of any size, within the precision's "
    "tolerance after fetch, and the same each time (Tolerance.repeats)",
    "executor.forward_backward": "forward_backward returns the loss and the gradient of every parameter, in its "
    "shape, for every batch, and the same each time (Tolerance.repeats); it raises a NetworkError for a network "
    "without a loss",
    "executor.lifetime": "outputs and losses keep their values for as long as the caller holds them, through any other "
    "calls, and gradients until the executor's next call",
    "executor.statistics": "forward_backward and a training step update running statistics with the batch's mean and "
    "biased variance, for any batch size",
    "executor.fetch": "fetch returns NumPy arrays of the neutral shape: float64 for fp64, float32 otherwise",
    "executor.finite": "finite inputs give finite outputs, losses and gradients",
    "executor.parameters": "parameters returns copies of all parameters and running statistics; load_parameters "
    "overwrites the given ones with copies, in this executor only, and raises a NetworkError for unknown names and "
    "wrong shapes",
    "executor.random": "random_state returns copies of the state of Dropout's generator; an executor that has loaded "
    "it, as copies, draws the same numbers",
    "executor.inference": "forward changes no parameter and no running statistic",
    "executor.synchronize": "synchronize returns only after all issued work has finished",
    "executor.memory": "calls take no memory that the first two calls did not",
    "executor.quiet": "running a network prints nothing",
    "gradient.meaning": "the gradient is the derivative of the mean loss over the batch",
    "profile.nodes": "profile gives times to nodes of the network only, to several together where they ran as one, and "
    "at most once in each direction",
    "profile.times": "times are wall time per step and not negative; with those of what belongs to no node they add up "
    "to the profiled step's time or less",
    # Level 2, training: ``training``
    "trainer.class": "training.Trainer is a d5suite.levels.training.Trainer",
    "trainer.loss": "step returns the loss before the update as a scalar",
    "trainer.meaning": "in every precision and in every step, the optimizer follows its formula in "
    "d5suite.optimizers.settings, with gradient clipping, gradient accumulation and changes of the learning rate, and "
    "gives the same each time (Tolerance.repeats)",
    "trainer.scaling": "in fp16 the loss scale follows d5suite.optimizers.settings.LossScaling, and a gradient that is "
    "not finite updates nothing",
    "trainer.state": "state returns copies of everything that the formula needs for the next step; a trainer that has "
    "loaded it, as copies, continues identically (Tolerance.repeats)",
    # Level 3, several ranks: ``distributed``, ``native``
    "replica.class": "distributed.Replica is a d5suite.levels.distributed.Replica",
    "replica.gradients": "gradients returns the loss and the gradient of every parameter for this replica's batch, "
    "and changes nothing but running statistics; gradients_early hands out every gradient once, always in one order",
    "replica.apply": "apply makes the same update as step would make from these gradients, with the values that the "
    "arrays hold when it is called: clipped, decayed and counted alike, with this replica's own optimizer state",
    "replica.memory": "the arrays of gradients are writable, contiguous, of the parameters' type and size, in the "
    "order of Replica.names, and do not overlap",
    "replica.lifetime": "gradients keep their values until the next call of gradients or apply, and losses for as "
    "long as the caller holds them; apply keeps no reference to the arrays that it is given",
    "replica.weights": "weights and load_weights copy, load_weights keeps the optimizer's state, and inference uses "
    "the loaded weights",
    "scheme.data": "Backend.schemes describes each scheme: a name that none of d5suite's own schemes has, a title, "
    "the backend's devices, knobs with a meaning, and in_turn if it is not synchronous",
    "scheme.meaning": "a synchronous scheme makes the update that one process would make on all ranks' batches, "
    "clipped and decayed alike, at the trainer's learning rate, starting from the replica's weights; its mean loss is "
    "the loss over all batches, and after each step weights returns the weights of all ranks. An asynchronous scheme, "
    "with in_turn, applies each rank's gradient by itself, rank after rank, to weights that the rank then takes",
    "scheme.finish": "finish leaves the same parameters in all ranks' executors, to the last bit",
    "scheme.class": "SCHEMES of the module that Backend.schemes names has a class of "
    "d5suite.levels.native.FrameworkScheme for each scheme",
}
"""The clauses by name, in the order of the levels. ``d5suite conformance NAME`` checks them all."""


class ContractError(BackendError):
    """An adapter violates the contract; the message names the adapter and the clause.

    Parameters
    ----------
    backend : str
        The adapter's name.
    clause : str
        A key of `CLAUSES`.
    what : str
        What the adapter does instead.
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
    """Raise `ContractError` unless all expected tensors are there, well formed and finite.

    Parameters
    ----------
    executor : Executor
        The executor that computed the tensors.
    clause : str
        The clause to name for missing tensors and wrong shapes.
    answer : mapping
        The result of ``executor.fetch``.
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
            raise ContractError(backend, "executor.finite", f"tensor {name!r} holds non-finite numbers")
