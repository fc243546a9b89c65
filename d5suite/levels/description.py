"""The description of a backend: data that is available before its framework is imported.

Imports `d5suite.errors` and, late, `d5suite.network.operators`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from d5suite.errors import BackendError, UnsupportedOperatorError
from d5suite.levels import LEVELS
from d5suite.levels.contract import ContractError

if TYPE_CHECKING:
    from d5suite.levels.native import NativeScheme
    from d5suite.network import Network
    from d5suite.network.graph import Node
    from d5suite.network.nodes.context import NodeContext
    from d5suite.network.operation import Operation
    from d5suite.network.variants import Variant

Described = TypeVar("Described", bound="Description")

DEVICES = ("cpu", "cuda")
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
NOT_BY_RANKS = {"fp16": "the loss scale would have to change on all ranks at once"}
"""Precisions that level 3 has on no backend, with the reason."""


@dataclass(frozen=True)
class Tolerance:
    """Accepted errors of a backend's results in one precision.

    Errors are relative L2 errors of one tensor, ``norm(answer - reference) / norm(reference)``.

    Attributes
    ----------
    outputs : float
        For network outputs and the loss.
    gradients : float
        For each parameter's gradient, in multiples of the network's sensitivity: the change of the
        same gradient in float64 under noise of a few units of this precision's roundoff on the
        weights. One flipped ReLU moves the gradient by a step, so that float32 gradients of a deep
        network differ by parts in a hundred between any two implementations; no fixed figure suits
        both shallow and deep networks.
    trajectory : float
        For the loss of each of ten training steps.
    reason : str
        Why the figures are not smaller.
    repeats : float
        Accepted difference between two runs of the same computation, in outputs, gradients and
        parameters. 0 means equal to the last bit; a framework that is not deterministic has more.
    roundings : float
        Factor on the usual noise on the weights, with which it stands for all roundings of a pass.
        It applies only to single gradients that the usual noise does not explain. More than 1 needs
        a reason, such as an inexact mean of many values.
    """

    outputs: float
    gradients: float
    trajectory: float
    reason: str
    repeats: float = 0.0
    roundings: float = 1.0


USUAL = {
    "fp64": (1e-10, 4, 1e-10),
    "fp32": (5e-5, 4, 1e-2),
    "bf16": (0.2, 2, 0.1),
    "fp16": (0.03, 4, 0.1),
}
"""Tolerances of outputs, gradients and trajectories that d5suite's own adapters share. They are
about ten times the largest errors seen on ResNet-18 and -50 and on ONNX's light networks, by any
adapter."""

WIDER = 4
"""Largest multiple of the usual tolerance that an adapter may declare; more is cut to this."""

MOST_ROUNDINGS = 16.0
"""The largest `Tolerance.roundings` that an adapter may declare; more is cut to this."""


def capped(declared: Tolerance, precision: str, *, trains: bool = True) -> tuple[Tolerance, str]:
    """Return tolerances that are at most `WIDER` times the usual ones, and a remark.

    The remark says which are wider than the usual ones; it is empty if none is. Without ``trains``
    only the tolerance of outputs counts.
    """
    declared = replace(declared, roundings=min(declared.roundings, MOST_ROUNDINGS))
    usual = dict(zip(("outputs", "gradients", "trajectory")[: 3 if trains else 1], USUAL[precision], strict=False))
    wide = {name: value for name, value in usual.items() if getattr(declared, name) > value * (1 + 1e-9)}
    if not wide:
        return declared, ""
    kept = {name: min(getattr(declared, name), WIDER * value) for name, value in wide.items()}
    text = ", ".join(f"{name} {kept[name]:g} where others are held to {value:g}" for name, value in wide.items())
    return replace(declared, **kept), f"its tolerances in {precision} are wider than other backends': {text}"


def usual_tolerances(
    *, fp16_trajectory: float = 0.1, fp32_roundings: float = 1.0, **reasons: str
) -> dict[str, Tolerance]:
    """Return the tolerances that d5suite's own adapters share, each with the adapter's reason.

    They are `USUAL`, but for the two arguments. The reasons state each adapter's own errors.
    """
    figures = USUAL | {"fp16": (*USUAL["fp16"][:2], fp16_trajectory)}
    return {
        precision: Tolerance(*figures[precision], reason, roundings=fp32_roundings if precision == "fp32" else 1.0)
        for precision, reason in reasons.items()
    }


@dataclass(frozen=True)
class Lack:
    """An operator of a network that a backend lacks.

    Attributes
    ----------
    operator : str
    nodes : tuple of str
        Names of the nodes.
    reason : str
        Why the backend lacks it; empty if there is nothing to say.
    """

    operator: str
    nodes: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        more = f" and {len(self.nodes) - 1} more" if len(self.nodes) > 1 else ""
        return f"{self.operator} (node {self.nodes[0]}{more})" + (f", because {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Description:
    """A framework's adapter, described without importing the framework.

    Attributes
    ----------
    name : str
        As in ``--backend name[:mode]``.
    title : str
        The framework's name as its authors write it.
    package : str
        The Python package of the adapter's modules.
    requires : sequence of str
        Modules that must be importable.
    distributions : sequence of str
        Distributions that provide the framework; the first installed one gives the version.
    install : str
        The command that installs it.
    modes : mapping of str to str
        By name: a one-line description; the first mode is the default.
    levels : set of int
        Implemented levels, by their number in `d5suite.levels.LEVELS`.
    devices, precisions : sequence of str
        Subsets of `DEVICES` and `PRECISIONS`.
    operators : set of str
        ONNX operators implemented at every level.
    single_operators : set of str
        ONNX operators implemented at level 0 only.
    variants : sequence of callable
        Checks for variants of these operators that are not implemented, from
        `d5suite.network.variants`.
    right_gradients : set of str
        Operators whose float64 gradient has been proved and serves other backends as a reference at
        level 0. Only a backend that is written for readability has any.
    tolerances : mapping of str to Tolerance
        For each precision.
    environment : mapping of str to mapping of str to str
        By mode: environment variables to set before the framework is imported. Modes that differ
        here exclude each other within one process.
    variables : sequence of str
        The framework's own environment variables that change its speed or its answers. Results
        record those that the user has set. Names are exact, because results are published.
    mode_requires : mapping of str to mapping of str to str
        By mode: further modules that must be importable, each with the command that installs it.
    absent : mapping of str to str
        What is not supported, with the reason: a device, a precision, an operator, a module of
        `d5suite.levels.backend.MODULES`, ``level 0``, ``level 2``, ``level 3``, ``early gradients``
        (`d5suite.levels.distributed.Replica.gradients_early`), ``shared gradients``
        (`d5suite.levels.distributed.Replica.shares_memory`), ``cross barrier``
        (`d5suite.levels.distributed.Replica.gradients_across`), ``device events``
        (`d5suite.levels.device.event_timer`), ``L2 flush`` (`d5suite.levels.device.l2_flush`); at
        level 0 also ``OPERATOR:backward``, ``OPERATOR:PRECISION`` and
        ``OPERATOR:backward:PRECISION``. Of the framework's own schemes: ``scheme:NAME``,
        ``scheme:NAME:MODE`` and ``scheme:NAME:PRECISION``.
    mode_absent : mapping of str to mapping of str to str
        By mode: what this mode does not support although others do, by the keys of `absent`.
    schemes : mapping of str to NativeScheme
        The framework's own ways to train on several ranks.
    expected_failures : mapping of str to str
        Cases of the conformance kit that fail, with the reason: a name or an `fnmatch` pattern,
        with ``mode:`` in front if the case fails in that mode only.
    reduced : str
        Why recipes measure the backend at their ``reduced`` preset only; otherwise empty.
    slow_float64 : str
        Why a proof in float64 on the CPU takes much longer than in other backends; otherwise empty.
        Such a backend is not proved first, if others can compute its references.
    on_request : str
        Why only the recipe of a user's own network measures it unless ``--backend`` names it;
        otherwise empty.
    reads_files : bool
        Whether it runs any ONNX file as it is written, through a reader of its own.
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
    variants: Sequence[Variant] = ()
    right_gradients: frozenset[str] = frozenset()
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    variables: Sequence[str] = ()
    mode_requires: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    mode_absent: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    schemes: Mapping[str, NativeScheme] = field(default_factory=dict)
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    reduced: str = ""
    slow_float64: str = ""
    on_request: str = ""
    reads_files: bool = False

    @property
    def default_mode(self) -> str:
        """The mode used by default."""
        return next(iter(self.modes))

    def of_mode(self: Described, mode: str) -> Described:
        """Return the description of one mode, without what `mode_absent` names."""
        lacking = self.mode_absent.get(mode)
        if not lacking:
            return self
        return replace(
            self,
            devices=[each for each in self.devices if each not in lacking],
            precisions=[each for each in self.precisions if each not in lacking],
            levels=frozenset(each for each in self.levels if f"level {each}" not in lacking),
            absent={**self.absent, **lacking},
            mode_absent={},
        )

    def proving_mode(self, mode: str) -> str:
        """Return the mode whose float64 answers prove ``mode``: the default if both can coexist."""
        shared = self.environment.get(mode) == self.environment.get(self.default_mode)
        return self.default_mode if shared else mode

    def problem(self, mode: str | None = None) -> str | None:
        """Return why the framework cannot be used here; None if it can. Imports nothing."""
        missing = not_importable(self.requires)
        if missing:
            return f"{self.title} is not installed (no module {missing}); install it with: {self.install}"
        mode = mode or self.default_mode
        engines = self.mode_requires.get(mode, {})
        missing = not_importable(list(engines))
        if missing:
            how = " and ".join(command for engine, command in engines.items() if engine in missing.split(", "))
            return (
                f"{self.title} in mode {mode!r} ({self.name}:{mode}) runs on {missing}, which is not installed; "
                f"install it with: {how}"
            )
        return None

    def version(self) -> str | None:
        """Return the installed version of the framework, from package metadata."""
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def check_data(self) -> None:
        """Raise `ContractError` for an unknown mode, device, precision or level."""

        def require(holds: bool, what: str) -> None:
            if not holds:
                raise ContractError(self.name, "backend.data", what)

        require(bool(self.modes), "it has no mode")
        for kind, declared, known in (
            ("device", self.devices, DEVICES),
            ("precision", self.precisions, PRECISIONS),
            ("level", self.levels, range(len(LEVELS))),
        ):
            unknown = [str(each) for each in declared if each not in known]
            require(not unknown, f"{kind} {', '.join(unknown)} is not one of {', '.join(map(str, known))}")
            require(bool(declared), f"it has no {kind}")

    def check(self, *, mode: str | None = None, device: str | None = None, precision: str | None = None) -> None:
        """Raise `BackendError` for an undeclared mode, device or precision.

        A declared precision without tolerances raises `ContractError`.
        """
        if mode is not None and mode in self.mode_absent:
            self.of_mode(mode).check(mode=mode, device=device, precision=precision)
            return
        for kind, asked, known in (
            ("mode", mode, list(self.modes)),
            ("device", device, list(self.devices)),
            ("precision", precision, list(self.precisions)),
        ):
            if asked is not None and asked not in known:
                why = f": {self.absent[asked]}" if asked in self.absent else ""
                raise BackendError(
                    f"backend {self.name!r} has no {kind} {asked!r}{why}",
                    hint=f"Its {kind}s are: {', '.join(known)}.",
                )

        if precision is not None and precision not in self.tolerances:
            raise ContractError(self.name, "backend.tolerances", f"{precision} has no tolerances")

    def lacks_of(self, network: Network) -> list[Lack]:
        """Return the operators of a network that the backend lacks; imports nothing.

        For a backend without gradients, nodes that only the loss needs do not count. The list is
        sorted by operator and reason. A node's variant is not checked if a lacking operator ahead
        of it leaves the shape of its input unknown.
        """
        from d5suite.network.nodes.context import NodeContext
        from d5suite.network.operators import reason_of_lacking

        if network.as_written:
            why = "d5suite does not read the file, and this backend has no reader of its own"
            nodes = {node.op_type: node.name for node in network.nodes}
            return [] if self.reads_files else [Lack(kind, (name,), why) for kind, name in sorted(nodes.items())]
        found: dict[tuple[str, str], list[str]] = {}
        context = NodeContext.of_network(network, training=False)
        unknown: set[str] = set()
        inference_only = "gradient" in self.absent
        for node in network.nodes_for(network.outputs) if inference_only else network.nodes:
            kind, behind = node.op_type, not unknown.isdisjoint(node.inputs)
            why = "" if behind else self._lacks_variant(node, context)
            if kind not in self.operators:
                why = self.absent.get(kind) or reason_of_lacking(kind)
            if why or kind not in self.operators:
                found.setdefault((kind, why), []).append(node.name)
            if behind or kind not in self.operators:
                unknown.update(name for name in node.outputs if name not in network.shapes)
        return [Lack(operator, tuple(nodes), why) for (operator, why), nodes in sorted(found.items())]

    def runs_as_written(self, network: Network) -> bool:
        """Return whether the backend's own reader runs a network's file, instead of the adapter.

        It does if d5suite does not read the file, or knows none of the lacking operators.
        """
        from d5suite.network.operators import DRAWING

        lacks = {each.operator for each in self.lacks_of(network)} if self.reads_files else set()
        unknown = bool(lacks) and lacks.isdisjoint(DRAWING | self.operators | self.absent.keys())
        return self.reads_files and (network.as_written or unknown)

    def _lacks_variant(self, node: Node, context: NodeContext) -> str:
        return next((why for variant in self.variants if (why := variant(node, context))), "")

    def check_operators(self, network: Network) -> None:
        """Raise `UnsupportedOperatorError` that lists all operators which the backend lacks."""
        lacks = self.lacks_of(network)
        if lacks:
            raise UnsupportedOperatorError(
                f"backend {self.name!r} lacks {len(lacks)} operator(s) of network {network.name!r}: "
                + "; ".join(map(str, lacks)),
                hint="`d5suite backends` lists what each backend implements.",
            )

    def lacks_operator(self, name: str, precision: str, *, backward: bool = False) -> str | None:
        """Return why level 0 lacks an operator, or its gradient, in a precision.

        None if it has it.
        """
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
        """Return why level 0 lacks an operation or its gradient; None if it has it."""
        from d5suite.network.nodes.context import NodeContext

        lacking = self.lacks_operator(operation.node.op_type, operation.precision, backward=backward)
        if lacking:
            return lacking
        why = self._lacks_variant(operation.node, NodeContext.of_operation(operation))
        return f"{self.name} has no such {operation.node.op_type}: {why}" if why else None

    def lacks_scheme(self, name: str, *, mode: str, device: str, precision: str) -> str | None:
        """Return why the framework lacks a scheme; None if it has it. Imports nothing."""
        for part, where in (("", ""), (f":{mode}", f" in mode {mode}"), (f":{precision}", f" in {precision}")):
            if f"scheme:{name}{part}" in self.absent:
                return f"{self.name} has no scheme {name!r}{where}: {self.absent[f'scheme:{name}{part}']}"
        if name not in self.schemes:
            own = f"its own schemes are {', '.join(self.schemes)}" if self.schemes else "it has none of its own"
            return f"{self.name} has no scheme {name!r}: {own}"
        described = self.schemes[name]
        if device not in described.transports:
            return f"{self.name} has no scheme {name!r} on {device}, only on {', '.join(described.transports)}"
        needed = {key.removeprefix(f"{mode}:"): how for key, how in described.requires.items()}
        needed = {module: how for module, how in needed.items() if ":" not in module}  # the rest is for other modes
        missing = not_importable(list(needed))
        if missing:
            how = " and ".join(dict.fromkeys(how for module, how in needed.items() if module in missing.split(", ")))
            return f"{described.title} needs {missing}, which is not installed; install it with: {how}"
        return None


def not_importable(modules: Sequence[str]) -> str:
    """Return the names of the modules that are not installed, separated by commas."""
    return ", ".join(module for module in modules if not _is_installed(module))


def _is_installed(module: str) -> bool:
    """Return whether a module is installed, without importing its parents as `find_spec` does."""
    parent, _, rest = module.partition(".")
    found = importlib.util.find_spec(parent)
    path = parent
    for name in rest.split(".") if rest else ():
        path = f"{path}.{name}"
        if found is None or found.submodule_search_locations is None:
            return False
        found = importlib.machinery.PathFinder.find_spec(path, found.submodule_search_locations)
    return found is not None
