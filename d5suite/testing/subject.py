"""The backend under test. Imports d5suite's contract and reaches the framework only through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import ArrayLike

from d5suite.backends import Backend, select
from d5suite.errors import BackendError, ConfigurationError, D5Error, NetworkError
from d5suite.instruments.threads import allowed_cpus
from d5suite.levels.contract import ContractError, require_answer
from d5suite.levels.distributed import Replica
from d5suite.levels.network import Arrays, Executor
from d5suite.levels.operator import Operator
from d5suite.levels.training import Trainer
from d5suite.network import Network
from d5suite.network.operation import Operation
from d5suite.optimizers.settings import Optimizer
from d5suite.testing.bounds import SeenAnswers, explained, with_bounds
from d5suite.testing.networks import fed
from d5suite.validate.check import Check
from d5suite.validate.norms import relative_errors, relative_l2
from d5suite.validate.operator.compare import Findings

SEED = 0

ALIGNED = 64
"""Bytes: JAX and TensorFlow do not copy a NumPy array whose address is a multiple of this."""

SMALL = 1e-3
"""A tensor's error is relative to its norm or, if larger, this fraction of the norm of all."""


@dataclass
class Subject:
    """One backend in one mode on one device.

    Attributes
    ----------
    backend : Backend
    mode, device : str
    threads : int
        Thread budget of this process.
    short : bool
        Whether slow cases are skipped and need not be made.
    seen : SeenAnswers
        The largest errors so far by declared tolerance.
    case, note : str
        The running case, and its largest error with the tolerance.
    """

    backend: Backend
    mode: str
    device: str
    threads: int
    short: bool = False
    seen: SeenAnswers = field(default_factory=SeenAnswers)
    case: str = ""
    note: str = ""
    _largest: float = 0.0
    _precision: str = ""
    _configured: bool = False

    def begin(self, case: str) -> None:
        """Start a case."""
        self.case, self.note, self._largest, self._precision = case, "", 0.0, ""

    @property
    def selection(self) -> str:
        """Return ``NAME:MODE``."""
        return f"{self.backend.name}:{self.mode}"

    def __str__(self) -> str:
        return f"{self.selection} on {self.device}"

    def configure(self) -> None:
        """Set threads and seed once.

        Raises
        ------
        BackendError
            If the device cannot be used here.
        """
        if not self._configured:
            runtime = self.backend.load("runtime", self.mode)
            runtime.configure(threads=self.threads, seed=SEED, device=self.device)
            problem = runtime.device_problem(self.device)
            if problem:
                raise BackendError(f"device {self.device!r} cannot be used: {problem}", where=self.backend.name)
            self._configured = True

    @property
    def exact(self) -> str:
        """Return the most precise declared precision."""
        return next(p for p in ("fp64", "fp32", "fp16", "bf16") if p in self.backend.precisions)

    @property
    def timed(self) -> str:
        """Return ``fp32``, in which most steps are timed, or `exact` if it is not declared."""
        return "fp32" if "fp32" in self.backend.precisions else self.exact

    @property
    def rounding(self) -> float:
        """Return the tolerance of outputs in `exact`: 1e-12, or the backend's own below float64."""
        return 1e-12 if self.exact == "fp64" else self.backend.tolerances[self.exact].outputs

    def require(
        self, network: Network | None = None, *, gradient: bool = False, level: int = 1, precision: str = ""
    ) -> None:
        """Skip the test, with the reason, unless the backend declares what the test needs.

        Parameters
        ----------
        network : Network, optional
            All its operators are needed.
        gradient : bool
            Whether the backward pass is needed.
        level : int
        precision : str
        """
        absent = self.backend.absent
        if network is not None:
            lacks = self.backend.lacks_of(network)
            if lacks:
                pytest.skip(f"it lacks {'; '.join(map(str, lacks))}")
        if gradient and "gradient" in absent:
            pytest.skip(f"no gradient: {absent['gradient']}")
        if level not in self.backend.levels:
            pytest.skip(f"no level {level}: {absent.get(f'level {level}', 'not declared')}")
        if precision and precision not in self.backend.precisions:
            pytest.skip(f"no {precision}: {absent.get(precision, 'not declared')}")

    def hold(self, clause: str, condition: bool, what: str) -> None:
        """Raise `ContractError` with the finding ``what`` unless the condition holds."""
        if not condition:
            raise ContractError(self.backend.name, clause, what)

    def prove(self, clause: str, checks: Iterable[Check], fault: Callable[[], str] | None = None) -> None:
        """Raise `ContractError` with the figures of the first check that fails.

        ``fault`` then names the node at fault.
        """
        made = list(checks)
        for check in made:
            self.seen.add(check, self.case)
            part = check.error / check.tolerance if check.tolerance else 0.0
            if not part < self._largest:
                self._largest, self.note = part, f"{check.error:.1e} of {float(check.tolerance):.1e}"
        wrong = next((check for check in made if not check.passed), None)
        if wrong is not None:
            finding = explained(wrong, self._precision)
            raise ContractError(self.backend.name, clause, f"{finding}; {fault()}" if fault is not None else finding)

    def close(
        self,
        clause: str,
        what: str,
        found: np.ndarray,
        expected: np.ndarray,
        tolerance: float,
        fault: Callable[[], str] | None = None,
    ) -> None:
        """Raise `ContractError` unless shapes are equal and values within a relative L2 error."""
        self.hold(clause, found.shape == expected.shape, f"{what} has shape {found.shape}, not {expected.shape}")
        self.prove(clause, [Check(what, relative_l2(found, expected), tolerance)], fault)

    def named(self, clause: str, what: str, found: Arrays, expected: Arrays) -> None:
        """Raise `ContractError` unless the names are equal."""
        for name in [*expected, *found]:
            is_there = "is missing" if name in expected else "should not be there"
            self.hold(clause, name in found and name in expected, f"{what}: {name!r} {is_there}")

    def same(self, clause: str, what: str, found: Arrays, expected: Arrays) -> None:
        """Raise `ContractError` unless names and values are equal to the last bit."""
        self.named(clause, what, found, expected)
        for name in expected:
            error = relative_l2(found[name], expected[name])
            same = np.array_equal(found[name], expected[name])
            where = f" in {self._precision}" if self._precision else ""
            self.hold(clause, same, f"{what}: {name!r} differs{where}, relative error {error:.3g}")

    def repeats(self, precision: str, least: float = 0.0) -> float:
        """Return `Tolerance.repeats`, or ``least`` if that is larger."""
        return max(self.backend.tolerances[precision].repeats, least)

    def repeated(
        self, clause: str, what: str, found: Arrays, expected: Arrays, precision: str, least: float = 0.0
    ) -> None:
        """Raise `ContractError` unless a repeated answer is the same, within `repeats`."""
        tolerance = self.repeats(precision, least)
        if not tolerance:
            self.same(clause, what, found, expected)
            return
        self.named(clause, what, found, expected)
        for name, value in expected.items():
            shape = found[name].shape
            self.hold(clause, shape == value.shape, f"{what}: {name!r} has shape {shape}, not {value.shape}")
        self.prove(clause, tensor_errors(what, found, expected, tolerance))

    def apart(self, found: ArrayLike, expected: ArrayLike, precision: str) -> bool:
        """Return whether numbers differ by more than a repeated computation may."""
        return not relative_l2(np.asarray(found), np.asarray(expected)) <= self.repeats(precision)

    def deterministic(self, clause: str, what: str, found: Findings, precision: str) -> None:
        """Raise `ContractError` unless reruns at level 0 were the same, within `repeats`."""
        tolerance = self.backend.tolerances[precision].repeats
        if tolerance:
            self.prove(clause, [Check(what, found.repeatability["apart"], tolerance)])
        else:
            self.hold(clause, found.repeatability["identical"], what)

    @contextmanager
    def refuses(self, clause: str, what: str, *names: str, error: type[D5Error] = NetworkError) -> Iterator[None]:
        """Raise `ContractError` unless the block raises this error, and its text has all names."""
        try:
            yield
        except error as raised:
            missing = ", ".join(repr(name) for name in names if name not in str(raised))
            self.hold(clause, not missing, f"{what} is refused without naming {missing}: {raised}")
            return
        except Exception as raised:
            found = f"{type(raised).__name__}, not a {error.__name__}: {raised}"
            raise ContractError(self.backend.name, clause, f"{what} ends in a {found}") from raised
        raise ContractError(self.backend.name, clause, f"{what} is accepted without an error")

    def executor(self, network: Network, precision: str | None = None) -> Executor:
        """Build the network on the backend, by default in its most precise precision."""
        self.configure()
        self._precision = precision or self.exact
        return self.backend.executor(network, mode=self.mode, device=self.device, precision=self._precision)

    def operator(self, operation: Operation) -> Operator:
        """Build one node on the backend."""
        self.configure()
        self._precision = operation.precision
        return self.backend.operator(operation, mode=self.mode, device=self.device)

    def trainer(self, executor: Executor, optimizer: Optimizer) -> Trainer:
        """Build the backend's native optimizer on an executor."""
        return self.backend.trainer(executor, optimizer)

    def replica(self, trainer: Trainer) -> Replica:
        """Make a trainer one rank's replica."""
        return self.backend.replica(trainer)


def tensor_errors(what: str, found: Arrays, expected: Arrays, tolerance: float) -> list[Check]:
    """Return one check per tensor."""
    errors = relative_errors(found, expected, SMALL)
    return [Check(f"{what} of {name}", error, tolerance) for name, error in errors.items()]


def copied(arrays: Arrays) -> dict[str, np.ndarray]:
    """Copy arrays to aligned memory, which some frameworks use without a copy."""
    found = {}
    for name, value in arrays.items():
        memory = np.empty(value.nbytes + ALIGNED, np.uint8)
        start = -memory.ctypes.data % ALIGNED
        found[name] = memory[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
        found[name][...] = value
    return found


def overwrite(arrays: Arrays, values: Arrays | None = None) -> None:
    """Overwrite every array with the given values, or with 7: the owner of an array may do so."""
    for name, array in arrays.items():
        array[...] = 7 if values is None else values[name]


def output(executor: Executor, images: np.ndarray) -> np.ndarray:
    """Compute the network's output for a batch, and check the shape and type of the answer."""
    network = executor.network
    name = network.output
    answer = executor.fetch(executor.forward(executor.feed({network.input: images})))
    given = np.shape(answer.get(name, ()))
    known = network.shapes[name]
    expected = tuple(n or m for n, m in zip(known, given, strict=True)) if len(known) == len(given) else given
    require_answer(executor, "executor.forward", answer, {name: expected})
    return answer[name]


def difference(executor: Executor, images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the loss and its gradients, and check their shapes; running statistics change."""
    network = executor.network
    loss = network.require_loss()[1]
    answer = executor.fetch(executor.forward_backward(fed(executor, (images, labels))))
    shapes = {name: network.initializers[name].shape for name in network.parameters}
    require_answer(executor, "executor.forward_backward", answer, {loss: (), **shapes})
    return answer


_chosen: Subject | None = None


def choose(text: str | None, device: str, threads: int | None) -> Subject:
    """Choose the backend under test from the command line.

    Raises
    ------
    D5Error
        If not exactly one backend is named, it is unknown, or its framework is not installed.
    """
    global _chosen
    if not text or "," in text:
        raise ConfigurationError("the conformance kit tests one backend at a time", hint="Give --backend NAME[:MODE].")
    selection = select(text)
    selection.backend.check(device=device)
    problem = selection.backend.problem(selection.mode)
    if problem:
        raise BackendError(problem)
    _chosen = Subject(with_bounds(selection.backend), selection.mode, device, threads or len(allowed_cpus()))
    return _chosen


def chosen() -> Subject:
    """Return the backend under test."""
    assert _chosen is not None  # set by pytest_configure
    return _chosen
