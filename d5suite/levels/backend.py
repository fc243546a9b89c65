"""What d5suite knows of a backend before its framework is imported: data, and how to load the adapter.

A backend is one `Backend` object, published through the entry-point group ``d5suite.backends``. Importing it must not
import the framework. The adapter itself lies in modules beside the object, the same in every backend:

=============  =====================================================================================
module         what it offers
=============  =====================================================================================
``runtime``    ``configure``, ``versions``, ``device_problem``, ``device_name``, ``device_memory``
``operators``  ``OPERATORS``: ONNX operator name -> native implementation; ``Operator``, a
               `d5suite.levels.operator.Operator` (Level 0)
``custom``     ``factory``: a `d5suite.custom.CustomOperator` -> native implementation
``network``    ``Executor``, a `d5suite.levels.network.Executor` (Level 1)
``training``   ``Trainer``, a `d5suite.levels.training.Trainer` (Level 2)
``baseline``   ``resnet50_training_step``, ``operator_call``, ``lenet5_epoch``: the same work written by hand in the
               framework's own style (`d5suite.levels.baseline`)
``loader``     ``native_loader``: the framework's own image loader on the same files and transform;
               ``NAMES``: what it is called, by the storage format that it reads. A format that it
               does not read is in `Backend.absent` as ``loader:FORMAT``
=============  =====================================================================================

A module that a backend lacks is named in `Backend.absent` with the reason.

Imports the standard library, `d5suite.errors` and the other level modules only.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from d5suite.errors import BackendError, UnsupportedOperatorError
from d5suite.levels.contract import ContractError

if TYPE_CHECKING:
    from d5suite.levels.network import Executor
    from d5suite.levels.operator import Operator
    from d5suite.levels.training import Optimizer, Trainer
    from d5suite.network import Network
    from d5suite.network.operation import Operation

_chosen_modes: dict[str, str] = {}
"""By backend: the mode that this process first loaded it for."""

DEVICES = ("cpu", "cuda")
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
MODULES = ("runtime", "operators", "custom", "network", "training", "baseline", "loader")
"""The modules of an adapter; ``custom``, ``baseline`` and ``loader`` may be absent, and ``training`` is for level 2."""

ZOO_OPERATORS = frozenset(
    {
        "Add", "AveragePool", "BatchNormalization", "Clip", "Concat", "Conv", "Div", "Dropout", "Flatten", "Gemm",
        "GlobalAveragePool", "GlobalMaxPool", "Identity", "LRN", "LeakyRelu", "LogSoftmax", "MatMul", "MaxPool", "Mul",
        "Pad", "Relu", "Reshape", "Sigmoid", "Softmax", "SoftmaxCrossEntropyLoss", "Squeeze", "Sub", "Sum", "Tanh",
        "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""The ONNX operators that the zoo's networks and ONNX's nine light networks are made of."""

MORE_OPERATORS = frozenset(
    {
        "ConvTranspose", "Elu", "Exp", "Gelu", "HardSwish", "LayerNormalization", "ReduceMax", "ReduceMean",
        "ReduceSum", "Sqrt",
    }
)  # fmt: skip
"""Further ONNX operators that the problems of level 0 measure."""

SINGLE_OPERATORS = frozenset({"Attention", "GRU", "Gather", "LSTM"})
"""Those of level 0 that a network of images and labels has no use for: several inputs or outputs that flow, indices."""


@dataclass(frozen=True)
class Tolerance:
    """How far a backend's answers may lie from the reference in one precision.

    Errors are relative L2 errors, ``norm(answer - reference) / norm(reference)``, of one tensor.

    Attributes
    ----------
    outputs : float
        Accepted error of network outputs and of the loss.
    gradients : float
        Accepted error of each parameter's gradient, in multiples of the network's own sensitivity: how much the same
        gradient changes in float64 when the weights get noise of a few units of this precision's roundoff. A rounding
        that flips one ReLU moves the gradient by a step, so that in a deep network float32 gradients differ by parts in
        a hundred whoever computes them, and no fixed figure suits both a shallow and a deep network.
    trajectory : float
        Accepted error of the loss of every one of ten training steps.
    reason : str
        Why these figures and not smaller ones.
    """

    outputs: float
    gradients: float
    trajectory: float
    reason: str


@dataclass(frozen=True)
class Backend:
    """One framework's adapter, described without importing the framework.

    Attributes
    ----------
    name : str
        How users name it: ``--backend name[:mode]``.
    title : str
        The framework's name as its makers write it.
    package : str
        The Python package that holds the adapter modules.
    requires : sequence of str
        Importable module names that must be present.
    distributions : sequence of str
        Names under which the framework may be installed; the first that is installed gives the version.
    install : str
        The command that installs it.
    modes : mapping of str to str
        Mode name to a one-line description; the first is the default.
    levels : set of int
        Benchmark levels implemented (0 operators, 1 networks, 2 training).
    devices, precisions : sequence of str
        Subsets of `DEVICES` and `PRECISIONS`.
    operators : set of str
        ONNX operator names implemented, at every level.
    single_operators : set of str
        Those implemented at level 0 only.
    right_gradients : set of str
        Operators whose float64 gradient was proved right, so that it is a reference for other backends at level 0;
        for a backend that is to be read.
    tolerances : mapping of str to Tolerance
        For each precision.
    environment : mapping of str to mapping of str to str
        By mode: environment variables that must be set before the framework is imported. Modes that differ here exclude
        each other within one process.
    mode_requires : mapping of str to mapping of str to str
        By mode: importable module names that must be present beside ``requires``, each with the command that installs
        it.
    absent : mapping of str to str
        What users may look for in vain, each with the reason: a device, a precision, an operator, a module of
        `MODULES`, ``level 0`` or ``level 2``; at level 0 also ``OPERATOR:backward``, ``OPERATOR:PRECISION`` and
        ``OPERATOR:backward:PRECISION``.
    expected_failures : mapping of str to str
        Cases of the conformance kit that fail for a reason that is known and explained here: a case's name, or a
        pattern of the `fnmatch` module, with ``mode:`` in front if it fails in that mode only, to the reason.
    reduced : str
        Why recipes measure it at their ``reduced`` preset only; empty if they need not.
    """

    name: str
    title: str
    package: str
    requires: Sequence[str]
    distributions: Sequence[str]
    install: str
    modes: Mapping[str, str]
    levels: frozenset[int]
    devices: Sequence[str]
    precisions: Sequence[str]
    operators: frozenset[str]
    single_operators: frozenset[str] = frozenset()
    right_gradients: frozenset[str] = frozenset()
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    mode_requires: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    reduced: str = ""

    @property
    def default_mode(self) -> str:
        """The mode used when the user names none."""
        return next(iter(self.modes))

    def proving_mode(self, mode: str) -> str:
        """The mode whose float64 answers vouch for a mode's: the default one, if one process can hold both."""
        shared = self.environment.get(mode) == self.environment.get(self.default_mode)
        return self.default_mode if shared else mode

    def problem(self, mode: str | None = None) -> str | None:
        """Why the framework cannot be used in this interpreter, or None; imports nothing.

        Parameters
        ----------
        mode : str, optional
            By default the default mode.
        """
        missing = _not_importable(self.requires)
        if missing:
            return f"{self.title} is not installed (no module {missing}); install it with: {self.install}"
        mode = mode or self.default_mode
        engines = self.mode_requires.get(mode, {})
        missing = _not_importable(list(engines))
        if missing:
            how = " and ".join(command for engine, command in engines.items() if engine in missing.split(", "))
            return (
                f"{self.title} in mode {mode!r} ({self.name}:{mode}) runs on {missing}, which is not installed; "
                f"install it with: {how}"
            )
        return None

    def version(self) -> str | None:
        """The installed version of the framework, read from package metadata."""
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def check_data(self) -> None:
        """Raise `ContractError` unless modes, devices, precisions and levels are declared with known names."""

        def require(holds: bool, what: str) -> None:
            if not holds:
                raise ContractError(self.name, "backend.data", what)

        require(bool(self.modes), "it has no mode")
        for kind, declared, known in (
            ("device", self.devices, DEVICES),
            ("precision", self.precisions, PRECISIONS),
            ("level", self.levels, (0, 1, 2)),
        ):
            unknown = [str(each) for each in declared if each not in known]
            require(not unknown, f"{kind} {', '.join(unknown)} is not one of {', '.join(map(str, known))}")
            require(bool(declared), f"it has no {kind}")

    def check(self, *, mode: str | None = None, device: str | None = None, precision: str | None = None) -> None:
        """Raise `BackendError` for a mode, device or precision that the backend does not declare.

        A precision that it declares without tolerances is a `ContractError`.
        """
        for kind, asked, known in (
            ("mode", mode, list(self.modes)),
            ("device", device, list(self.devices)),
            ("precision", precision, list(self.precisions)),
        ):
            if asked is not None and asked not in known:
                why = f": {self.absent[asked]}" if asked in self.absent else ""
                raise BackendError(
                    f"backend {self.name!r} has no {kind} {asked!r}{why}",
                    hint=f"Its {kind}s are: {', '.join(known)}. What is not declared is refused: clause "
                    "'backend.refusal' of the contract.",
                )

        if precision is not None and precision not in self.tolerances:
            raise ContractError(self.name, "backend.tolerances", f"{precision} has no tolerances")

    def check_operators(self, network: Network) -> None:
        """Raise `UnsupportedOperatorError` naming every operator of the network that the backend lacks."""
        missing: dict[str, list[str]] = {}
        for node in network.nodes:
            if node.op_type not in self.operators:
                missing.setdefault(node.op_type, []).append(node.name)
        if missing:
            listed = "; ".join(
                f"{operator} (node {names[0]}"
                + (f" and {len(names) - 1} more)" if len(names) > 1 else ")")
                + (f", because {self.absent[operator]}" if operator in self.absent else "")
                for operator, names in sorted(missing.items())
            )
            raise UnsupportedOperatorError(
                f"backend {self.name!r} lacks {len(missing)} operator(s) of network {network.name!r}: {listed}",
                hint="`d5suite backends` lists what each backend implements.",
            )

    def check_implemented(self, mode: str) -> None:
        """Raise `ContractError` if the adapter declares an operator that it does not implement."""
        if "operators" not in self.absent:
            hollow = (self.operators | self.single_operators) - set(self.load("operators", mode).OPERATORS)
            if hollow:
                raise ContractError(
                    self.name, "backend.operators", f"declared but not implemented: {', '.join(sorted(hollow))}"
                )

    def load(self, module: str, mode: str | None = None) -> ModuleType:
        """Import one of the adapter's modules, and the framework with it.

        Parameters
        ----------
        module : str
            One of `MODULES`.
        mode : str, optional
            The mode to import it for, by default the default one: its `environment` is set first, unless the first
            import of the process has set another.

        Raises
        ------
        BackendError
            If the framework is absent, its import fails, the process already runs a mode that excludes this one, or the
            adapter does not have the module (a `ContractError` where it does not say so).
        """
        if module in self.absent:
            raise BackendError(f"backend {self.name!r} has no {module} module: {self.absent[module]}")
        mode = mode or _chosen_modes.get(self.name) or self.default_mode
        problem = self.problem(mode)
        if problem:
            raise BackendError(problem)
        wanted = self.environment.get(mode, {})
        first = _chosen_modes.setdefault(self.name, mode)
        if self.environment.get(first, {}) != wanted:
            raise BackendError(
                f"this process runs backend {self.name!r} in mode {first!r}, which excludes mode {mode!r}",
                hint="Use another process; a benchmark's worker does.",
            )
        os.environ.update(wanted)
        try:
            return importlib.import_module(f"{self.package}.{module}")
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name == f"{self.package}.{module}":
                raise ContractError(
                    self.name, "backend.modules", f"there is no {error.name}, and {module!r} is not in Backend.absent"
                ) from error
            raise BackendError(
                f"backend {self.name!r} failed to import its {module} module: {error}", where=self.package
            ) from error

    def lacks_operator(self, name: str, precision: str, *, backward: bool = False) -> str | None:
        """Why an ONNX operator is not run at level 0 in a precision, or not backwards, or None."""
        if 0 not in self.levels:
            return f"{self.name} has no level 0: {self.absent.get('level 0', 'not declared')}"
        keys = [name, f"{name}:{precision}"]
        if backward:
            keys += ["gradient", f"{name}:backward", f"{name}:backward:{precision}"]
        for key in keys:
            if key in self.absent:
                return f"{self.name} has no {key}: {self.absent[key]}"
        if "::" in name:
            missing = "custom" in self.absent
            return f"{self.name} has no custom operators: {self.absent['custom']}" if missing else None
        if name not in self.operators | self.single_operators:
            return f"{self.name} has no operator {name}"
        return None

    def lacks(self, operation: Operation, *, backward: bool = False) -> str | None:
        """Why an operation is not run at level 0, or not backwards, or None."""
        return self.lacks_operator(operation.node.op_type, operation.precision, backward=backward)

    def operator(self, operation: Operation, *, mode: str | None = None, device: str = "cpu") -> Operator:
        """Build one ONNX node as a native operator of the framework (Level 0).

        Raises
        ------
        UnsupportedOperatorError
            If the backend lacks the operator.
        """
        mode = mode or self.default_mode
        self.check(mode=mode, device=device, precision=operation.precision)
        lacking = self.lacks(operation)
        if lacking:
            raise UnsupportedOperatorError(
                lacking, where=operation.name, hint="`d5suite operators` lists what there is."
            )
        self.check_implemented(mode)
        from d5suite.levels.operator import Operator

        made = self.load("operators", mode).Operator(operation, mode=mode, device=device)
        if not isinstance(made, Operator):
            raise ContractError(self.name, "operator.class", f"it is a {type(made).__name__}")
        made.backend = self.name
        return made

    def executor(
        self, network: Network, *, mode: str | None = None, device: str = "cpu", precision: str = "fp32"
    ) -> Executor:
        """Build the network as native code of the framework (Level 1)."""
        mode = mode or self.default_mode
        self.check(mode=mode, device=device, precision=precision)
        self.check_operators(network)
        self.check_implemented(mode)
        from d5suite.levels.network import Executor

        made = self.load("network", mode).Executor(network, mode=mode, device=device, precision=precision)
        if not isinstance(made, Executor):
            raise ContractError(self.name, "executor.class", f"it is a {type(made).__name__}")
        made.backend = self.name
        return made

    def trainer(self, executor: Executor, optimizer: Optimizer) -> Trainer:
        """Give an executor of this backend the framework's native optimizer (Level 2)."""
        if 2 not in self.levels:
            why = f": {self.absent['level 2']}" if "level 2" in self.absent else ""
            raise BackendError(f"backend {self.name!r} does not train{why}")
        from d5suite.levels.training import Trainer

        made = self.load("training", executor.mode).Trainer(executor, optimizer)
        if not isinstance(made, Trainer):
            raise ContractError(self.name, "trainer.class", f"it is a {type(made).__name__}")
        return made


def _not_importable(modules: Sequence[str]) -> str:
    """Those of the modules that are not there, as text."""
    return ", ".join(module for module in modules if importlib.util.find_spec(module) is None)
