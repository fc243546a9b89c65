"""A workflow: programs that run side by side, and the couplings that join them.

A recipe file declares one `Workflow`; `d5suite.pytest_plugin` makes one test per kind of coupling.
Imports neutral settings, jobs, measurements and `d5suite.workflows`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d5suite.cases.case import Case, Declaration, Settings, Shared, Test, absent, declared_in
from d5suite.errors import ConfigurationError
from d5suite.job import CaseJob, Ranks, Result, WorkflowCase, is_plain_name
from d5suite.measurements import find as find_measurement
from d5suite.measurements.base import Measurement
from d5suite.workflows import find, is_installed
from d5suite.workflows.base import Program
from d5suite.workflows.couplings import POLICIES, known, problem

if TYPE_CHECKING:
    from d5suite.backends import Selection
    from d5suite.levels.backend import Backend

SCHEME = "workflow"
"""Replaces the scheme in names of results: the components of a workflow do different work."""

MAX_TIME_S = 5.0
"""Sampling budget in seconds; ``--benchmark-max-time`` overrides it."""


@dataclass(frozen=True)
class Component:
    """One of the programs that run side by side.

    Attributes
    ----------
    name : str
        Name in the workflow.
    program : str or type of Program
        Name of a program of d5suite or of a plug-in, or a class that the recipe file defines.
    ranks : int or None
        Number of ranks; None for all ranks that the others leave, at least one.
    options : mapping
        Options of the program; JSON-able.
    """

    name: str
    program: str | type[Program]
    ranks: int | None = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> type[Program]:
        """The program's class."""
        return find(self.program) if isinstance(self.program, str) else self.program


@dataclass(frozen=True)
class Coupling:
    """A coupling of two components, in one direction.

    Attributes
    ----------
    name : str
        Name by which the programs know the coupling.
    source, target : str
        Names of the components that write and read.
    kind : str
        A key of `d5suite.workflows.couplings.KINDS`; empty for the kind under measurement
        (`Workflow.kinds`).
    policy : str
        One of `d5suite.workflows.couplings.POLICIES`.
    capacity : int
        Messages that fit into the buffer of each channel.
    write_s : float
        Seconds by which every put is slowed down, to see the effect of a slow writer.
    """

    name: str
    source: str
    target: str
    kind: str = ""
    policy: str = "block"
    capacity: int = 2
    write_s: float = 0.0


@dataclass(frozen=True)
class Workflow(Case, Declaration):
    """Components and couplings.

    Attributes
    ----------
    name : str
        Name in reports.
    components : sequence of Component
    couplings : sequence of Coupling
    steps : mapping of str to int
        Steps of a run by preset; the first preset is the default.
    kinds : sequence of str
        Kinds of couplings; the workflow is measured once with every kind.
    placement : {"packed", "interleaved"}
        Whether a component's ranks follow each other, and so lie on the same hosts, or components
        take turns in the order of ranks.
    checkpoint_every : int
        Steps between checkpoints; it is proved that a restart gives the same results. 0 for no
        checkpoints.
    file : Path
        The Python file that declares the workflow, for messages.
    """

    name: str
    components: Sequence[Component]
    couplings: Sequence[Coupling]
    steps: Mapping[str, int]
    kinds: Sequence[str] = ("memory", "files", "messages", "sockets", "redis", "adios2")
    placement: str = "packed"
    checkpoint_every: int = 0
    file: Path = field(default_factory=declared_in, compare=False, repr=False)

    @property
    def knobs(self) -> tuple[str, ...]:  # type: ignore[override]
        """See `Case.knobs`."""
        return ("threads", "precision", "placement", "capacity", *["coupling"] * bool(self.kinds))

    def __post_init__(self) -> None:
        where = str(self.file)
        if not is_plain_name(self.name):
            raise ConfigurationError(f"a workflow cannot be called {self.name!r}", where=where)
        names = [each.name for each in self.components]
        if (
            len(set(names)) < len(names)
            or not names
            or not all(each.replace("-", "_").isidentifier() for each in names)
        ):
            raise ConfigurationError(
                f"components are called {', '.join(map(repr, names)) or 'nothing'}", where=where,
                hint="Give each one a name of its own, of letters, digits, - and _.",
            )  # fmt: skip
        if not self.steps or not all(isinstance(each, int) and each > 0 for each in self.steps.values()):
            raise ConfigurationError(f"steps are {dict(self.steps)}; need whole numbers from 1 by preset", where=where)
        if self.placement not in ("packed", "interleaved"):
            raise ConfigurationError(
                f"placement is {self.placement!r}", where=where, hint='Write "packed" or "interleaved".'
            )
        for each in self.components:
            self._check_component(each, where)
        for one in self.couplings:
            self._check_coupling(one, names, where)

    def _check_component(self, component: Component, where: str) -> None:
        given = component.kind.options
        unknown = [name for name in component.options if name not in given]
        if unknown:
            raise ConfigurationError(
                f"component {component.name!r}: {component.kind.name} has no option {unknown[0]!r}", where=where,
                hint=f"Its options: {', '.join(given) or 'none'}.",
            )  # fmt: skip
        if component.ranks is not None and component.ranks < 1:
            raise ConfigurationError(f"component {component.name!r} has {component.ranks} ranks", where=where)
        executable = component.options.get("executable")
        if "executable" in given and not (executable and os.access(str(executable), os.X_OK)):
            raise ConfigurationError(
                f"component {component.name!r}: {executable!r} is no program that can be run", where=where,
                hint="Build it first, and give its path.",
            )  # fmt: skip

    def _check_coupling(self, coupling: Coupling, names: Sequence[str], where: str) -> None:
        what = f"coupling {coupling.name!r}"
        for end in (coupling.source, coupling.target):
            if end not in names:
                raise ConfigurationError(
                    f"{what}: there is no component {end!r}", where=where, hint=f"Known: {', '.join(names)}."
                )
        if coupling.source == coupling.target:
            raise ConfigurationError(f"{what} joins {coupling.source} to itself", where=where)
        if coupling.policy not in POLICIES:
            raise ConfigurationError(
                f"{what}: there is no policy {coupling.policy!r}", where=where, hint=f"Known: {', '.join(POLICIES)}."
            )
        if coupling.capacity < 1:
            raise ConfigurationError(f"{what}: capacity is {coupling.capacity}; need 1 or more", where=where)
        if self.checkpoint_every and coupling.policy != "block":
            raise ConfigurationError(
                f"{what}: checkpoints need the policy 'block': what was discarded cannot be repeated", where=where
            )
        for kind in {coupling.kind} if coupling.kind else set(self.kinds):
            known(kind, where)
        if len({each.name for each in self.couplings}) < len(self.couplings):
            raise ConfigurationError("two couplings have the same name", where=where)

    @property
    def batch(self) -> str:
        """A workflow has its own job on every backend."""
        return self.name

    @property
    def origin(self) -> str:  # type: ignore[override]
        """The file that declares the workflow."""
        return str(self.file)

    def variants(self) -> list[Workflow]:
        """Return one workflow per kind of coupling, such as ``heat-memory``."""
        if all(each.kind for each in self.couplings):
            return [replace(self, kinds=())]
        return [
            replace(
                self, name=f"{self.name}-{kind}", kinds=(kind,),
                couplings=[replace(each, kind=each.kind or kind) for each in self.couplings],
            )
            for kind in self.kinds
        ]  # fmt: skip

    def tests(self) -> Iterator[Test]:
        measurement = find_measurement("workflow")
        for variant in self.variants():
            yield Test("_".join(("test", measurement.name, *variant.kinds)), measurement, variant.at)

    def at(self, settings: Settings) -> list[Workflow]:
        """Return the workflow with the placement and capacity of the sweep, if any."""
        if settings.coupling is not None:
            known(settings.coupling, "--sweep coupling")
        capacity = settings.capacity
        return [
            replace(
                self, placement=settings.placement or self.placement,
                couplings=[replace(each, capacity=capacity or each.capacity) for each in self.couplings],
            )
        ]  # fmt: skip

    def why_excluded(self, measurement: type[Measurement], settings: Settings, path: Path) -> str | None:
        others = self.kinds and settings.coupling not in (None, *self.kinds)
        return f"--sweep measures the coupling {settings.coupling} at this point" if others else None

    def of_ranks(self, ranks: Ranks) -> tuple[Ranks, str | None]:
        """Return the ranks as a workflow uses them, and why it cannot use this number, or None."""
        how = replace(ranks.distributed, scheme=SCHEME, settings={}, native=False)
        least = sum(each.ranks or 1 for each in self.components)
        is_open = any(each.ranks is None for each in self.components)
        fits = ranks.size >= least if is_open else ranks.size == least
        needs = f"{self.name} needs --ranks {least}{' or more' if is_open else ''}"
        return Ranks(ranks.size, how), None if fits else needs

    def why_unsupported(self, backend: Backend, measurement: type[Measurement], settings: Settings) -> str | None:
        lacking = absent(backend, measurement)
        for each in self.couplings:
            kind = known(each.kind)
            if lacking is None and each.policy not in kind.policies:
                lacking = f"{kind.title}: no policy {each.policy!r}, because {kind.why_not}"
            if lacking is None and settings.elsewhere is None:
                lacking = problem(each.kind)
        return lacking

    def check(self, backend: Backend, measurement: type[Measurement], settings: Settings) -> None:
        self._steps(settings)

    def _steps(self, settings: Settings) -> tuple[str, int]:
        name = settings.preset or next(iter(self.steps))
        if name not in self.steps:
            raise ConfigurationError(
                f"there is no preset {name!r}", where=self.name, hint=f"Presets: {', '.join(self.steps)}."
            )
        return name, self.steps[name]

    def job(
        self, selection: Selection | None, settings: Settings, measurements: list[str], files: dict[str, str],
        shared: Shared,
    ) -> WorkflowCase:  # fmt: skip
        preset, steps = self._steps(settings)
        return WorkflowCase(
            name=self.name,
            preset=preset,
            measurements=measurements,
            files=files,
            sampling={"max_time_s": MAX_TIME_S, **settings.sampling},
            components=[
                {
                    "name": each.name, "program": each.kind.name, "ranks": each.ranks, "options": dict(each.options),
                    "file": None if is_installed(each.kind) else inspect.getfile(each.kind),
                }
                for each in self.components
            ],
            couplings=[
                {
                    "name": each.name, "source": each.source, "target": each.target, "kind": each.kind,
                    "policy": each.policy, "capacity": each.capacity, "write_s": each.write_s,
                }
                for each in self.couplings
            ],
            steps=steps,
            placement=self.placement,
            checkpoint_every=self.checkpoint_every,
        )  # fmt: skip

    def facts(self, part: CaseJob, result: Result) -> dict[str, Any]:
        return {}

    def preset_name(self, selection: Selection | None, settings: Settings) -> str:
        return settings.preset or next(iter(self.steps))
