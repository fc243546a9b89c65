"""The tests that a pytest command line selects, collected without measuring."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from d5suite.errors import ConfigurationError, D5Error
from d5suite.pytest_plugin import stash
from d5suite.pytest_plugin.settings import settings
from d5suite.session.sides import run_code

if TYPE_CHECKING:
    from d5suite.cases.case import Settings
    from d5suite.session.sides import Side

NOTHING = "there is nothing to measure"

NAMES = f"""
import json
from d5suite.errors import ConfigurationError
try:
    from d5suite.pytest_plugin.selected_tests import select_tests
except ImportError:  # a revision of 2026
    from d5suite.pytest_plugin.asked import ask as select_tests
try:
    targets = select_tests(sys.argv[1:]).targets
except ConfigurationError as error:
    if error.what != {NOTHING!r}:
        sys.exit(str(error))
    targets = []
print(json.dumps([f"{{each.wanted.key}} {{each.selection}}" for each in targets if each.measurement.takes_turns]))
"""
"""Code that lists the benchmarks of a revision, which may be older than this one."""


@dataclass
class SelectedTests:
    """The selected measurements, collected as a pytest plug-in.

    Attributes
    ----------
    settings : Settings or None
    targets : list of BenchmarkTarget
        In the order of measuring, grouped by job.
    skipped : list of (BenchmarkTarget, str)
        Tests that cannot be measured, with the reasons.
    named : list of str
        Backends that ``--backend`` names.
    problem : str or None
        What is wrong with the options.
    """

    settings: Settings | None = None
    targets: list[stash.BenchmarkTarget] = field(default_factory=list)
    skipped: list[tuple[stash.BenchmarkTarget, str]] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    problem: str | None = None

    @property
    def lacking(self) -> list[tuple[stash.BenchmarkTarget, str]]:
        """The skipped tests of backends that are named, but have no test to run in turn."""
        able = {str(each.selection) for each in self.targets if each.measurement.takes_turns}
        lost = {each for each in self.named if each not in able}
        return [one for one in self.skipped if one[0].measurement.takes_turns and str(one[0].selection) in lost]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Store what was collected."""
        try:
            if session.config.getoption("sweep"):
                raise ConfigurationError("two sides are compared at one setting", where="--sweep", hint="Leave it out.")
            self.settings = settings(session.config)
            self.named = [str(each) for each in session.config.stash.get(stash.SELECTIONS, [])]
            for item in session.items:
                target, mark = stash.target(item), item.get_closest_marker("skip")
                if target is None:
                    continue
                if mark is not None:
                    self.skipped.append((target, str(mark.kwargs.get("reason", "skipped"))))
                    continue
                target.case.check(target.selection.backend, target.measurement, self.settings)
                self.targets.append(target)
        except D5Error as error:
            self.problem = str(error)


def select_tests(arguments: Sequence[str]) -> SelectedTests:
    """Let pytest collect the tests that its arguments select.

    Parameters
    ----------
    arguments : sequence of str
        Recipes and options, as of ``pytest``.

    Raises
    ------
    ConfigurationError
        If the arguments make no sense, or select nothing that can be measured. It is no error if a
        named backend can measure nothing.
    """
    selected = SelectedTests()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main(
            ["-p", "no:cacheprovider", "--collect-only", "--quiet", "--no-header", *arguments], plugins=[selected]
        )
    if selected.problem is not None:
        raise ConfigurationError(selected.problem)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) or selected.settings is None:
        raise ConfigurationError("pytest cannot collect the tests", hint=said.getvalue().strip())
    if not selected.targets and not selected.lacking:
        reasons = [f"{name_of(each)}: {why}" for each, why in selected.skipped]
        hint = "\n  ".join(reasons[:8]) or "Give recipes, such as recipes/test_imagenet_resnet50.py."
        raise ConfigurationError(NOTHING, hint=hint)
    return selected


def name_of(target: stash.BenchmarkTarget) -> str:
    """Return a benchmark's name: ``case/measurement backend``."""
    return f"{target.wanted.key} {target.selection}"


@dataclass
class BenchmarkSelection:
    """The selection of a command, in the current folder and in other revisions of it.

    Attributes
    ----------
    recipes, options : list of str
        Arguments of pytest.
    """

    recipes: list[str]
    options: list[str]

    @cached_property
    def here(self) -> SelectedTests:
        """Selection in the current folder, by `select_tests`."""
        return select_tests([*self.recipes, *self.options])

    def names(self, side: Side, option: str) -> list[str]:
        """Return the names of the benchmarks that can take turns, from a side's own recipes.

        Parameters
        ----------
        side : Side
        option : str
            The option that names the side, for messages.

        Raises
        ------
        ConfigurationError
            If its recipes cannot be collected.
        """
        if side.repository is None or side.folder is None:
            return [name_of(each) for each in self.here.targets if each.measurement.takes_turns]
        recipes = []
        for each in self.recipes:
            path, *inside = each.split("::")
            place = Path(path).resolve()
            if place.is_relative_to(side.repository):
                place = side.folder / place.relative_to(side.repository)
            if place.exists():
                recipes.append("::".join([str(place), *inside]))
        if not recipes:
            return []
        where = f"{option} {side.spec}"
        said = run_code(side, NAMES, [*recipes, *self.options], where, "its recipes cannot be collected")
        return [str(each) for each in json.loads(said.splitlines()[-1])]
