"""The backend under test. Imports d5suite's contract, and the framework only through it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from d5suite.backends import Backend, select
from d5suite.errors import BackendError, ConfigurationError, D5Error, NetworkError
from d5suite.levels.contract import ContractError, require_answer
from d5suite.levels.network import Arrays, Executor
from d5suite.levels.operator import Operator
from d5suite.levels.training import Optimizer, Trainer
from d5suite.measure.threads import allowed_cpus
from d5suite.network import Network
from d5suite.network.operation import Operation
from d5suite.validate.checks import Check
from d5suite.validate.norms import relative_l2

SEED = 0


@dataclass
class Subject:
    """One backend in one mode on one device.

    Attributes
    ----------
    backend : Backend
    mode, device : str
    threads : int
        Budget of this process.
    """

    backend: Backend
    mode: str
    device: str
    threads: int
    _configured: bool = False

    def __str__(self) -> str:
        return f"{self.backend.name}:{self.mode} on {self.device}"

    def configure(self) -> None:
        """Set threads and seed, once.

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
        """The most precise precision that is declared."""
        return next(p for p in ("fp64", "fp32", "fp16", "bf16") if p in self.backend.precisions)

    @property
    def rounding(self) -> float:
        """What outputs may be off by in `exact`: a small multiple of roundoff, or the backend's own tolerance."""
        return 1e-12 if self.exact == "fp64" else self.backend.tolerances[self.exact].outputs

    def require(
        self, network: Network | None = None, *, gradient: bool = False, level: int = 1, precision: str = ""
    ) -> None:
        """Skip the test, with the reason, unless the backend declares what it needs.

        Parameters
        ----------
        network : Network, optional
            All its operators.
        gradient : bool
            The pass backwards.
        level : int
        precision : str
        """
        absent = self.backend.absent
        if network is not None:
            missing = sorted({node.op_type for node in network.nodes} - self.backend.operators)
            if missing:
                pytest.skip("; ".join(f"no {o}" + (f": {absent[o]}" if o in absent else "") for o in missing))
        if gradient and "gradient" in absent:
            pytest.skip(f"no gradient: {absent['gradient']}")
        if level not in self.backend.levels:
            pytest.skip(f"no level {level}: {absent.get(f'level {level}', 'not declared')}")
        if precision and precision not in self.backend.precisions:
            pytest.skip(f"no {precision}: {absent.get(precision, 'not declared')}")

    def hold(self, clause: str, condition: bool, what: str) -> None:
        """Raise `ContractError` unless the condition holds; ``what`` says what is so instead."""
        if not condition:
            raise ContractError(self.backend.name, clause, what)

    def prove(self, clause: str, checks: Iterable[Check]) -> None:
        """Raise `ContractError`, with the figures, at the first check that fails."""
        for check in checks:
            self.hold(clause, check.passed, check.finding)

    def close(self, clause: str, what: str, found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
        """Raise `ContractError` unless an array has the expected shape and values, to a relative L2 error."""
        self.hold(clause, found.shape == expected.shape, f"{what} has shape {found.shape}, not {expected.shape}")
        self.prove(clause, [Check(what, relative_l2(found, expected), tolerance)])

    def same(self, clause: str, what: str, found: Arrays, expected: Arrays) -> None:
        """Raise `ContractError` unless arrays have the expected names and, to the last bit, values."""
        for name in [*expected, *(name for name in found if name not in expected)]:
            if name not in found or name not in expected:
                is_there = "is missing" if name in expected else "should not be there"
                raise ContractError(self.backend.name, clause, f"{what}: {name!r} {is_there}")
            error = relative_l2(found[name], expected[name])
            same = np.array_equal(found[name], expected[name])
            self.hold(clause, same, f"{what}: {name!r} differs, relative error {error:.3g}")

    @contextmanager
    def refuses(self, clause: str, what: str, *names: str, error: type[D5Error] = NetworkError) -> Iterator[None]:
        """Raise `ContractError` unless the block raises this error, its message with all the names in it."""
        try:
            yield
        except error as raised:
            missing = ", ".join(repr(name) for name in names if name not in str(raised))
            self.hold(clause, not missing, f"{what} is refused without naming {missing}: {raised}")
            return
        except Exception as raised:
            found = f"{type(raised).__name__}, not a {error.__name__}: {raised}"
            raise ContractError(self.backend.name, clause, f"{what} ends in a {found}") from raised
        raise ContractError(self.backend.name, clause, f"{what} is taken without an error")

    def executor(self, network: Network, precision: str | None = None) -> Executor:
        """The network on the backend, by default in its most precise precision."""
        self.configure()
        return self.backend.executor(network, mode=self.mode, device=self.device, precision=precision or self.exact)

    def operator(self, operation: Operation) -> Operator:
        """One node on the backend."""
        self.configure()
        return self.backend.operator(operation, mode=self.mode, device=self.device)

    def trainer(self, executor: Executor, optimizer: Optimizer) -> Trainer:
        """The backend's native optimizer on an executor."""
        return self.backend.trainer(executor, optimizer)


def output(executor: Executor, images: np.ndarray) -> np.ndarray:
    """The network's output for a batch of images, under the contract."""
    network = executor.network
    name = network.output
    answer = executor.fetch(executor.forward(executor.feed({network.input: images})))
    given = np.shape(answer.get(name, ()))
    known = network.shapes[name]
    expected = tuple(n or m for n, m in zip(known, given, strict=True)) if len(known) == len(given) else given
    require_answer(executor, "executor.forward", answer, {name: expected})
    return answer[name]


def difference(executor: Executor, images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """The loss and its gradients for a batch, under the contract; running statistics move."""
    network = executor.network
    label, loss = network.require_loss()
    answer = executor.fetch(executor.forward_backward(executor.feed({network.input: images, label: labels})))
    shapes = {name: network.initializers[name].shape for name in network.parameters}
    require_answer(executor, "executor.forward_backward", answer, {loss: (), **shapes})
    return answer


_chosen: Subject | None = None


def choose(text: str | None, device: str, threads: int | None) -> Subject:
    """Take the backend that the command line names as the one under test.

    Raises
    ------
    D5Error
        If it names none or several, or there is no such backend, or its framework is not installed.
    """
    global _chosen
    if not text or "," in text:
        raise ConfigurationError("the conformance kit takes one backend", hint="Give --backend NAME[:MODE].")
    selection = select(text)
    selection.backend.check(device=device)
    problem = selection.backend.problem(selection.mode)
    if problem:
        raise BackendError(problem)
    _chosen = Subject(selection.backend, selection.mode, device, threads or len(allowed_cpus()))
    return _chosen


def chosen() -> Subject:
    """The backend under test."""
    assert _chosen is not None  # pytest_configure has seen to it
    return _chosen
