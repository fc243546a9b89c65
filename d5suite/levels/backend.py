"""What d5suite knows of a backend before its framework is imported: data, and how to load the adapter.

A backend is one `Backend` object, published through the entry-point group ``d5suite.backends``. Importing it must not
import the framework. The adapter itself lies in modules beside the object, the same in every backend:

=============  =====================================================================================
module         what it offers
=============  =====================================================================================
``runtime``    ``configure``, ``versions``, ``device_problem``, ``device_name``, ``device_memory``
``operators``  ``OPERATORS``: ONNX operator name -> native implementation
``network``    ``Executor``, a `d5suite.levels.network.Executor` (Level 1)
``training``   ``Trainer``, a `d5suite.levels.training.Trainer` (Level 2)
``baseline``   ``resnet50_training_step``: the same workload written by hand in the framework's own style
``loader``     ``native_loader``: the framework's own image loader on the same files and transform
=============  =====================================================================================

Imports the standard library, `d5suite.errors` and the other level modules only.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from d5suite.errors import BackendError, UnsupportedOperatorError

if TYPE_CHECKING:
    from d5suite.levels.network import Executor
    from d5suite.levels.training import Optimizer, Trainer
    from d5suite.network import Network

DEVICES = ("cpu", "cuda")
PRECISIONS = ("fp32", "bf16", "fp64")


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
    extra : str
        How to install it: the argument of ``pip install``.
    modes : mapping of str to str
        Mode name to a one-line description; the first is the default.
    levels : set of int
        Benchmark levels implemented (1 networks, 2 training).
    devices, precisions : sequence of str
        Subsets of `DEVICES` and `PRECISIONS`.
    operators : set of str
        ONNX operator names implemented.
    tolerances : mapping of str to Tolerance
        For each precision.
    """

    name: str
    title: str
    package: str
    requires: Sequence[str]
    distributions: Sequence[str]
    extra: str
    modes: Mapping[str, str]
    levels: frozenset[int]
    devices: Sequence[str]
    precisions: Sequence[str]
    operators: frozenset[str]
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)

    @property
    def default_mode(self) -> str:
        """The mode used when the user names none."""
        return next(iter(self.modes))

    def problem(self) -> str | None:
        """Why the framework cannot be used in this interpreter, or None; imports nothing."""
        missing = [module for module in self.requires if importlib.util.find_spec(module) is None]
        if missing:
            modules = ", ".join(missing)
            return f"{self.title} is not installed (no module {modules}); install it with: pip install '{self.extra}'"
        return None

    def version(self) -> str | None:
        """The installed version of the framework, read from package metadata."""
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def check(self, *, mode: str | None = None, device: str | None = None, precision: str | None = None) -> None:
        """Raise `BackendError` for a mode, device or precision that the backend does not declare."""
        for kind, asked, known in (
            ("mode", mode, list(self.modes)),
            ("device", device, list(self.devices)),
            ("precision", precision, list(self.precisions)),
        ):
            if asked is not None and asked not in known:
                raise BackendError(
                    f"backend {self.name!r} has no {kind} {asked!r}", hint=f"Its {kind}s are: {', '.join(known)}."
                )

    def check_operators(self, network: Network) -> None:
        """Raise `UnsupportedOperatorError` naming every operator of the network that the backend lacks."""
        missing: dict[str, list[str]] = {}
        for node in network.nodes:
            if node.op_type not in self.operators:
                missing.setdefault(node.op_type, []).append(node.name)
        if missing:
            listed = "; ".join(
                f"{operator} (node {names[0]}" + (f" and {len(names) - 1} more)" if len(names) > 1 else ")")
                for operator, names in sorted(missing.items())
            )
            raise UnsupportedOperatorError(
                f"backend {self.name!r} lacks {len(missing)} operator(s) of network {network.name!r}: {listed}",
                hint="`d5suite backends` lists what each backend implements.",
            )

    def load(self, module: str) -> ModuleType:
        """Import one of the adapter's modules, and the framework with it.

        Raises
        ------
        BackendError
            If the framework is absent or its import fails.
        """
        problem = self.problem()
        if problem:
            raise BackendError(problem)
        try:
            return importlib.import_module(f"{self.package}.{module}")
        except ImportError as error:
            raise BackendError(
                f"backend {self.name!r} failed to import its {module} module: {error}", where=self.package
            ) from error

    def executor(
        self, network: Network, *, mode: str | None = None, device: str = "cpu", precision: str = "fp32"
    ) -> Executor:
        """Build the network as native code of the framework (Level 1)."""
        mode = mode or self.default_mode
        self.check(mode=mode, device=device, precision=precision)
        self.check_operators(network)
        executor: Executor = self.load("network").Executor(network, mode=mode, device=device, precision=precision)
        return executor

    def trainer(self, executor: Executor, optimizer: Optimizer) -> Trainer:
        """Give an executor of this backend the framework's native optimizer (Level 2)."""
        trainer: Trainer = self.load("training").Trainer(executor, optimizer)
        return trainer
