"""Report an adapter's exception as a broken clause, with the adapter's file and line.

Imports d5suite's contract only.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import traceback
from pathlib import Path
from types import FrameType

from d5suite.levels.backend import Backend
from d5suite.levels.contract import CLAUSES, ContractError
from d5suite.levels.distributed import Replica
from d5suite.levels.network import Executor
from d5suite.levels.operator import Operator
from d5suite.levels.training import Trainer

_PARTS = {Executor: "executor", Operator: "operator", Trainer: "trainer", Replica: "replica"}

_CLAUSES = {
    "executor.load_parameters": "executor.parameters",
    "executor.random_state": "executor.random",
    "executor.load_random_state": "executor.random",
    "operator.feed_gradients": "operator.backward",
    "operator.fetch_gradients": "operator.fetch",
    "trainer.load_state": "trainer.state",
    "trainer.gradients": "replica.gradients",
    "trainer.apply": "replica.apply",
    "replica.gradients_early": "replica.gradients",
    "replica.buffers": "replica.gradients",
    "replica.native": "replica.gradients",
    "replica.load_weights": "replica.weights",
}
"""Methods whose clause has another name."""

_OTHERWISE = {
    "executor": "operators.meaning",
    "operator": "operators.meaning",
    "trainer": "trainer.meaning",
    "replica": "replica.class",
}
"""The clause of every other method, including constructors, which build the operators."""


def broken_clause(error: BaseException, backend: Backend) -> tuple[ContractError | None, str]:
    """Return the clause that an exception breaks, or None if the adapter's code is not involved.

    The text with it shows the adapter's lines in the traceback, and the framework's line that
    raised. d5suite's own lines are left out.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    folder = _folder(backend.package)
    own = [number for number, (frame, _) in enumerate(frames) if _within(frame.f_code.co_filename, folder)]
    if not own:
        return None, ""
    kind, method = _method(frames[own[0]][0])
    caller, called = _method(frames[own[0] - 1][0]) if own[0] else ("", "")
    shown = [frames[number] for number in own]
    if own[-1] < len(frames) - 1:
        shown.append(frames[-1])
    summary = traceback.format_exception_only(error)[-1].strip() or type(error).__name__
    last, line = frames[own[-1]]
    what = f"{method} raises {summary}, at {_place(last.f_code.co_filename)}:{line}"
    text = "".join(
        f"\n    {_place(frame.f_code.co_filename)}:{number}, in {frame.f_code.co_name}"
        f"\n      {linecache.getline(frame.f_code.co_filename, number).strip()}"
        for frame, number in shown
    )
    # If a method of the contract calls the adapter's, its clause takes precedence.
    names = [f"{kind}.{name}" for name in ([called, method] if caller == kind else [method])]
    clauses = [_CLAUSES.get(name, name) for name in names]
    clause = next((each for each in clauses if each in CLAUSES), _OTHERWISE.get(kind, "backend.modules"))
    return ContractError(backend.name, clause, what), text


def _folder(package: str) -> str:
    found = importlib.util.find_spec(package)
    return str(Path(found.origin).parent) if found is not None and found.origin else "\0"


def _within(file: str, folder: str) -> bool:
    return file.startswith(folder + os.sep)


def _method(frame: FrameType) -> tuple[str, str]:
    """Return the part of the contract that a function of the adapter implements, and its name."""
    owner = frame.f_locals.get("self")
    for part, kind in _PARTS.items():
        if isinstance(owner, part):
            return kind, frame.f_code.co_name
    return "", frame.f_code.co_name


def _place(file: str) -> str:
    """Return a path relative to the current folder if it is inside, else as it is."""
    relative = os.path.relpath(file)
    return relative if not relative.startswith("..") else file
