"""A backend: its description, and the code that loads its adapter.

A backend is one `Backend` object, published through the entry-point group ``d5suite.backends``.
Importing it must not import the framework. The adapter itself consists of modules beside the
object, with the same names in every backend:

===============  ===================================================================================
``runtime``      ``configure``, ``versions``, ``device_problem``, ``device_name``, ``device_memory``
                 and, for ``cuda``, ``event_timer`` and ``l2_flush``; perhaps ``sensors``
                 (`d5suite.levels.device`). ``mode_problem``, where the environment can switch off
                 what a mode is named after: ``mode_problem(mode)`` returns how, or None.
                 ``set_threads(threads)``, if idle threads of the framework spin: sets the number of
                 threads at any time after ``configure``
``operators``    ``OPERATORS``: ONNX operator name -> native implementation; ``Operator``, a
                 `d5suite.levels.operator.Operator` (level 0)
``custom``       ``factory``: a `d5suite.custom.CustomOperator` -> native implementation
``network``      ``Executor``, a `d5suite.levels.network.Executor` (level 1)
``profile``      ``profile``: how long each node takes within a step (`d5suite.levels.profile`)
``training``     ``Trainer``, a `d5suite.levels.training.Trainer` (level 2)
``distributed``  ``Replica``, a `d5suite.levels.distributed.Replica` (level 3)
``native``       where `Backend.schemes` has any: ``SCHEMES``, the framework's own schemes by name,
                 each a `d5suite.levels.native.FrameworkScheme`
``horovod``      the same for Horovod, if it has an extension for the framework
``baseline``     ``resnet50_training_step``: a training step written by hand in the framework's own
                 style (`d5suite.levels.baseline`)
``loader``       ``native_loader``: the framework's own image loader on the same files and
                 transform; ``NAMES``: its name by storage format. A format that it does
                 not read is in `Backend.absent` as ``loader:FORMAT``
``knobs``        ``KNOBS``: what `d5suite.tuning` may change, as data; optional
                 (`d5suite.levels.knobs`)
===============  ===================================================================================

`Backend.absent` names each module that a backend lacks, with the reason. Imports
`d5suite.errors`, `description` and, late, the other level modules.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from d5suite.errors import BackendError, UnsupportedOperatorError
from d5suite.levels.contract import ContractError
from d5suite.levels.description import NOT_BY_RANKS, Description
from d5suite.levels.imports import lean_imports

if TYPE_CHECKING:
    from d5suite.levels.distributed import Replica
    from d5suite.levels.knobs import TuningKnob
    from d5suite.levels.native import FrameworkScheme
    from d5suite.levels.network import Executor
    from d5suite.levels.operator import Operator
    from d5suite.levels.training import Trainer
    from d5suite.network import Network
    from d5suite.network.operation import Operation
    from d5suite.optimizers.settings import Optimizer

_chosen_modes: dict[str, str] = {}
"""The mode of this process's first import, by backend."""

MODULES = ("runtime", "operators", "custom", "network", "profile", "training", "distributed", "baseline", "loader")
"""The modules of an adapter. ``custom``, ``profile``, ``baseline`` and ``loader`` are optional;
``training`` is needed for level 2 only, ``distributed`` for level 3 only."""


@dataclass(frozen=True)
class Backend(Description):
    """A framework's adapter: described without importing the framework, and loaded when used."""

    def check_implemented(self, mode: str) -> None:
        """Raise `ContractError` if the adapter declares an operator without implementing it."""
        if "operators" not in self.absent:
            hollow = (self.operators | self.single_operators) - set(self.load("operators", mode).OPERATORS)
            if hollow:
                raise ContractError(
                    self.name, "backend.operators", f"declared but not implemented: {', '.join(sorted(hollow))}"
                )

    def check_mode(self, mode: str) -> None:
        """Raise `BackendError` if the environment switches off what a mode is named after."""
        find_problem = getattr(self.load("runtime", mode), "mode_problem", None)
        problem = None if find_problem is None else find_problem(mode)
        if problem:
            raise BackendError(
                f"mode {self.name}:{mode} is not what it is called: {problem}",
                hint="Unset the variable, or measure another mode (`d5suite backends` lists them).",
            )

    def check_version(self, versions: Mapping[str, str]) -> None:
        """Raise `ContractError` if the framework's version is not that of its installed package.

        A package's metadata may lack the local part, such as ``+cpu``.

        Parameters
        ----------
        versions : mapping of str to str
            What the adapter's ``runtime.versions`` returned.
        """
        installed, said = self.version(), versions.get(self.name)
        if installed and said and installed.partition("+")[0] != said.partition("+")[0]:
            raise ContractError(self.name, "runtime.versions", f"it says {said}, and {installed} is installed")

    def load(self, module: str, mode: str | None = None) -> ModuleType:
        """Import a module of the adapter, and the framework with it.

        Parameters
        ----------
        module : str
            One of `MODULES`.
        mode : str, optional
            The mode whose `environment` is set first. By default the mode of the process's first
            import, or else the default mode.

        Raises
        ------
        BackendError
            If the framework is missing or fails to import, the process already runs a mode that
            excludes this one, or the adapter lacks the module (a `ContractError` if `absent` does
            not name it).
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
            with lean_imports():
                return importlib.import_module(f"{self.package}.{module}")
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name == f"{self.package}.{module}":
                raise ContractError(
                    self.name, "backend.modules", f"there is no {error.name}, and {module!r} is not in Backend.absent"
                ) from error
            raise BackendError(
                f"backend {self.name!r} failed to import its {module} module: {error}", where=self.package
            ) from error

    def operator(self, operation: Operation, *, mode: str | None = None, device: str = "cpu") -> Operator:
        """Build one ONNX node as a native operator (level 0).

        Raises
        ------
        UnsupportedOperatorError
            If the backend lacks the operator.
        """
        mode = mode or self.default_mode
        self.check(mode=mode, device=device, precision=operation.precision)
        lacking = self.of_mode(mode).lacks(operation)
        if lacking:
            raise UnsupportedOperatorError(
                lacking, where=operation.name, hint="`d5suite operators` lists what each backend implements."
            )
        self.check_implemented(mode)
        self.check_mode(mode)
        from d5suite.levels.operator import Operator

        made = self.load("operators", mode).Operator(operation, mode=mode, device=device)
        if not isinstance(made, Operator):
            raise ContractError(self.name, "operator.class", f"it is a {type(made).__name__}")
        made.backend = self.name
        return made

    def executor(
        self, network: Network, *, mode: str | None = None, device: str = "cpu", precision: str = "fp32"
    ) -> Executor:
        """Build a network as native code (level 1)."""
        mode = mode or self.default_mode
        self.check(mode=mode, device=device, precision=precision)
        self.check_operators(network)
        self.check_implemented(mode)
        self.check_mode(mode)
        from d5suite.levels.network import Executor

        made = self.load("network", mode).Executor(network, mode=mode, device=device, precision=precision)
        if not isinstance(made, Executor):
            raise ContractError(self.name, "executor.class", f"it is a {type(made).__name__}")
        made.backend = self.name
        return made

    def trainer(self, executor: Executor, optimizer: Optimizer) -> Trainer:
        """Build the native optimizer for an executor of this backend (level 2)."""
        if 2 not in self.levels:
            why = f": {self.absent['level 2']}" if "level 2" in self.absent else ""
            raise BackendError(f"backend {self.name!r} does not train{why}")
        from d5suite.levels.training import Trainer

        made = self.load("training", executor.mode).Trainer(executor, optimizer)
        if not isinstance(made, Trainer):
            raise ContractError(self.name, "trainer.class", f"it is a {type(made).__name__}")
        return made

    def replica(self, trainer: Trainer) -> Replica:
        """Build one rank's replica from a trainer of this backend (level 3).

        Raises
        ------
        BackendError
            If the backend has no level 3, or the trainer computes in one of `NOT_BY_RANKS`.
        """
        own = self.of_mode(trainer.executor.mode)
        if 3 not in own.levels:
            why = f": {own.absent['level 3']}" if "level 3" in own.absent else ""
            raise BackendError(f"backend {self.name!r} has no level 3{why}")
        precision = trainer.executor.precision
        if precision in NOT_BY_RANKS:
            raise BackendError(
                f"level 3 has no {precision}: {NOT_BY_RANKS[precision]}",
                hint="Use bf16 or fp32.",
            )
        from d5suite.levels.distributed import Replica

        made = self.load("distributed", trainer.executor.mode).Replica(trainer)
        if not isinstance(made, Replica):
            raise ContractError(self.name, "replica.class", f"it is a {type(made).__name__}")
        return made

    def knobs(self) -> tuple[TuningKnob, ...]:
        """Return the tuning knobs of the framework; none if the adapter declares none.

        Imports the adapter's module ``knobs`` and no framework.
        """
        name = f"{self.package}.knobs"
        try:
            found: tuple[TuningKnob, ...] = importlib.import_module(name).KNOBS
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            return ()
        return found

    def framework_scheme(self, name: str, mode: str) -> type[FrameworkScheme]:
        """Import the adapter's class for one of `schemes`.

        Raises
        ------
        BackendError
            If there is none.
        """
        if name not in self.schemes:
            raise BackendError(f"backend {self.name!r} has no scheme {name!r} of its own")
        from d5suite.levels.native import FrameworkScheme

        module = self.load(self.schemes[name].module, mode)
        made = getattr(module, "SCHEMES", {}).get(name)
        if not (isinstance(made, type) and issubclass(made, FrameworkScheme)):
            raise ContractError(self.name, "scheme.class", f"{module.__name__}.SCHEMES[{name!r}] is {made!r}")
        return made
