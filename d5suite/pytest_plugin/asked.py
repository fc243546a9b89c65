"""What a command line of pytest asks for, without measuring it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from d5suite.errors import ConfigurationError, D5Error
from d5suite.pytest_plugin import stash
from d5suite.pytest_plugin.options import settings

if TYPE_CHECKING:
    from d5suite.cases.case import Settings


@dataclass
class Asked:
    """What is to be measured: an object that pytest takes as a plug-in.

    Attributes
    ----------
    settings : Settings or None
    targets : list of Target
        In the order in which they would be measured, jobs together.
    skipped : dict of str to str
        Why others cannot be measured, by what they are.
    problem : str or None
        What is wrong with the options.
    """

    settings: Settings | None = None
    targets: list[stash.Target] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    problem: str | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Take what was collected."""
        try:
            self.settings = settings(session.config)
            for item in session.items:
                target, mark = stash.target(item), item.get_closest_marker("skip")
                if target is None:
                    continue
                if mark is not None:
                    self.skipped[item.name] = str(mark.kwargs.get("reason", "skipped"))
                    continue
                target.case.check(target.selection.backend, target.measurement, self.settings)
                self.targets.append(target)
        except D5Error as error:
            self.problem = str(error)


def ask(arguments: Sequence[str]) -> Asked:
    """Let pytest collect what its arguments ask for.

    Parameters
    ----------
    arguments : sequence of str
        Recipes and options, as of ``pytest``.

    Raises
    ------
    ConfigurationError
        If they make no sense, or ask for nothing that can be measured.
    """
    asked = Asked()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main(
            ["-p", "no:cacheprovider", "--collect-only", "--quiet", "--no-header", *arguments], plugins=[asked]
        )
    if asked.problem is not None:
        raise ConfigurationError(asked.problem)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) or asked.settings is None:
        raise ConfigurationError("pytest cannot collect what is asked for", hint=said.getvalue().strip())
    if not asked.targets:
        reasons = [f"{name}: {why}" for name, why in asked.skipped.items()]
        hint = "\n  ".join(reasons[:8]) or "Give recipes, such as recipes/test_imagenet_resnet50.py."
        raise ConfigurationError("there is nothing to measure", hint=hint)
    return asked
