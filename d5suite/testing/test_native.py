"""A framework's own schemes: two ranks train like one process with both batches.

The ranks of a scheme are started once, for all precisions that are to be tested.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from d5suite.distributed.communicators import problem
from d5suite.distributed.schemes import SCHEMES, settings_from_dict
from d5suite.levels.native import FrameworkScheme, NativeSettings
from d5suite.testing import native_rank
from d5suite.testing.native_rank import AGAIN, ALONE, RANKS, RUNS
from d5suite.testing.networks import classifier
from d5suite.testing.ranks import TIMEOUT_S, run_ranks
from d5suite.testing.scheme_rank import RankRun
from d5suite.testing.subject import Subject, chosen
from d5suite.validate.check import Check
from d5suite.validate.distributed.rules import IN_TURN
from d5suite.validate.norms import ROUNDING, relative_errors, relative_l2

AGREEMENT = {"fp64": 1e-10, "fp32": 5e-3}
"""Accepted relative error of a tensor, by precision. A framework may update by different kernels in
each precision: a scheme with an error of 1e-10 in float64 has one of 9e-4 in float32. A sum instead
of a mean makes an error of 1."""

AMPLIFIED = 16
"""Accepted error after all steps, in units of the rounding that the scheme declares for a step."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each scheme that the backend declares; in a short run only the first, if it is quick."""
    if "scheme" in metafunc.fixturenames:
        backend = chosen().backend
        described, kinds = backend.schemes, [each for each in AGREEMENT if each in backend.precisions]
        short = [name for name in [*described][:1] if described[name].quick]
        metafunc.parametrize(
            ("scheme", "precision"),
            [
                pytest.param(name, kind, marks=[] if name in short else [pytest.mark.slow])
                for name, kind in itertools.product(described, kinds)
            ],
        )


@dataclass
class NativeRuns:
    """The runs of ranks by scheme, each made when it is first asked for.

    Attributes
    ----------
    subject : Subject
    wanted : dict of str to list of str
        The precisions to test, by scheme.
    folder : Path
        An empty folder.
    """

    subject: Subject
    wanted: dict[str, list[str]]
    folder: Path
    _started: dict[str, tuple[Path, str]] = field(default_factory=dict)

    def ranks(self, scheme: str, precision: str) -> tuple[Path, str]:
        """Return the folder of the ranks' runs, and which rank failed and how, if any.

        A failure counts for the first precision whose runs are incomplete; if all runs are
        complete, for all precisions. Every other precision is then run again with its own ranks.
        """
        together = self.wanted[scheme]
        if scheme not in self._started:
            self._started[scheme] = self._start(scheme, together)
        folder, failure = self._started[scheme]
        broken = [kind for kind in together if not _complete(folder, kind)][:1] or together
        return (folder, failure) if not failure or precision in broken else self._start(scheme, [precision])

    def _start(self, scheme: str, precisions: list[str]) -> tuple[Path, str]:
        of, kinds = self.subject, ",".join(precisions)
        folder = self.folder / f"{scheme}-{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        timeout_s = TIMEOUT_S * len(precisions)
        arguments = (of.selection, of.device, kinds, scheme)
        return folder, run_ranks(native_rank.__name__, folder, RANKS, *arguments, timeout_s=timeout_s)


def _files(folder: Path, what: str, precision: str) -> list[Path]:
    return [RankRun.file(folder, what, precision, rank) for rank in range(RANKS)]


def _complete(folder: Path, precision: str) -> bool:
    made = (_files(folder, what + kind, precision) for what in RUNS for kind in (*AGAIN, ALONE))
    return all(file.exists() for files in made for file in files)


@pytest.fixture(scope="module")
def native_runs(
    subject: Subject, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> NativeRuns:
    """Find the precisions to test; nothing is started yet."""
    wanted: dict[str, list[str]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.originalname == test_a_scheme_trains_as_one_process.__name__:
            scheme, precision = (str(item.callspec.params[name]) for name in ("scheme", "precision"))
            if not subject.backend.lacks_scheme(scheme, mode=subject.mode, device=subject.device, precision=precision):
                wanted.setdefault(scheme, []).append(precision)
    return NativeRuns(subject, wanted, tmp_path_factory.mktemp("native"))


def test_schemes_are_described(subject: Subject) -> None:
    if not subject.backend.schemes:
        pytest.skip("it has no schemes of its own")
    for name, described in subject.backend.schemes.items():
        clause = "scheme.data"
        subject.hold(clause, name not in SCHEMES, f"{name} is the name of one of d5suite's own schemes")
        subject.hold(clause, bool(described.title), f"{name} has no title")
        unknown = [device for device in described.transports if device not in subject.backend.devices]
        subject.hold(clause, bool(described.transports), f"{name} runs on no device")
        subject.hold(clause, not unknown, f"{name} has the device {', '.join(unknown)}, which the backend lacks")
        for key, knob in described.knobs.items():
            wrong = knob.problem(knob.default)
            subject.hold(clause, wrong is None and bool(knob.meaning), f"{name}:{key}: {wrong or 'has no meaning'}")
        ordered = described.synchronous or (IN_TURN in described.knobs and described.knobs[IN_TURN].default is False)
        subject.hold(clause, ordered, f"{name} is not synchronous, and has no {IN_TURN} that is False by default")


def test_a_scheme_trains_as_one_process(subject: Subject, scheme: str, precision: str, native_runs: NativeRuns) -> None:
    subject.require(classifier(), gradient=True, level=3)
    backend = subject.backend
    lacking = problem("gloo") or backend.lacks_scheme(
        scheme, mode=subject.mode, device=subject.device, precision=precision
    )
    if lacking:
        pytest.skip(lacking)
    made = backend.framework_scheme(scheme, subject.mode)
    subject.hold("scheme.class", issubclass(made, FrameworkScheme), f"{scheme} is {made!r}")
    folder, failure = native_runs.ranks(scheme, precision)
    subject.hold("scheme.meaning", not failure, f"{scheme}: {failure}")
    settings = settings_from_dict({"name": scheme}, backend)
    assert isinstance(settings, NativeSettings)
    limit = max(AGREEMENT[precision], AMPLIFIED * settings.rounding)
    checks, differ = [], []
    for run, again in itertools.product(RUNS, AGAIN):
        what = run + again
        alone, found = (
            [RankRun.read(file) for file in _files(folder, kind, precision)] for kind in (run + ALONE, what)
        )
        errors = [_worst(*pair) for pair in zip(found, alone, strict=True)]
        losses = relative_l2(np.mean([each.losses for each in found], axis=0), np.array(alone[0].losses))
        checks += [
            Check(f"{scheme}, parameters, {what}", max(errors), limit),
            Check(f"{scheme}, losses, {what}", losses, limit),
        ]
        first, *others = ([value.tobytes() for value in each.weights[-1].values()] for each in found)
        differ += [what] * any(each != first for each in others)
    subject.prove("scheme.meaning", checks)
    subject.hold("scheme.finish", not differ, f"{scheme}: ranks end with different parameters: {', '.join(differ)}")


def _worst(found: RankRun, alone: RankRun) -> float:
    """Return the largest error of a tensor in a rank's run, after any step and at the end."""
    pairs = zip(found.weights, alone.weights, strict=True)
    return max(error for pair in pairs for error in relative_errors(*pair, ROUNDING).values())
